//! What a run prints: streamed text, or one JSON object.

use crate::cli::console;
use crate::engine::user_graph::Output;
use crate::model::app_error::AppError;
use crate::model::error::InputError;
use crate::model::prompts::Request;
use crate::model::tokenizer::{TextStream, Tokenizer};
use distributed::Common;
use distributed::plan::{Finish, RequestOutput, Timing};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Text of several requests on stdout: only the first unfinished one streams, the order is kept.
pub struct Streamer<'a> {
    tokenizer: Option<&'a Tokenizer>,
    requests: usize,
    eos: &'a [i32],
    current: usize,
    printed: usize,
    text: Option<TextStream<'a>>,
    failed: Option<AppError>,
}

impl<'a> Streamer<'a> {
    /// For `requests` requests that end at `eos`; without a tokenizer, token ids are printed.
    pub fn new(tokenizer: Option<&'a Tokenizer>, requests: usize, eos: &'a [i32]) -> Self {
        Streamer {
            tokenizer,
            requests,
            eos,
            current: 0,
            printed: 0,
            text: tokenizer.map(Tokenizer::stream),
            failed: None,
        }
    }

    /// Prints what is new.
    pub fn look(&mut self, rank: &Common) {
        while self.current < self.requests && self.failed.is_none() {
            let (tokens, finish) = rank.tokens(self.current, self.printed);
            let new: Vec<i32> = tokens.to_vec();
            self.printed += new.len();
            let mut out = String::new();
            for &token in &new {
                match &mut self.text {
                    // It ends the request and is not shown.
                    Some(_) if self.eos.contains(&token) => {}
                    Some(stream) => match stream.push(token as u32) {
                        Ok(text) => out.push_str(&text),
                        Err(error) => self.failed = Some(error.into()),
                    },
                    None => out.push_str(&format!("{token} ")),
                }
            }
            if finish.is_some() {
                match self.text.take().map(TextStream::finish).transpose() {
                    Ok(rest) => out.push_str(&rest.unwrap_or_default()),
                    Err(error) => self.failed = Some(error.into()),
                }
                out.push('\n');
                self.current += 1;
                self.printed = 0;
                self.text = self.tokenizer.map(Tokenizer::stream);
            }
            self.write(&out);
            if finish.is_none() {
                break;
            }
        }
    }

    fn write(&mut self, text: &str) {
        match console::print(text) {
            Ok(true) => {}
            // Who reads has seen enough.
            Ok(false) => self.current = self.requests,
            Err(error) => self.failed = Some(error),
        }
    }

    /// The first error of the tokenizer or of standard output, if there was one.
    pub fn error(self) -> Option<AppError> {
        self.failed
    }
}

/// The text of a request's tokens: all but the end-of-sequence token that ended it.
pub fn text_of(tokenizer: Option<&Tokenizer>, output: &RequestOutput) -> Result<Value, InputError> {
    let Some(tokenizer) = tokenizer else { return Ok(Value::Null) };
    let shown = match output.finish {
        Some(Finish::Eos) => &output.tokens[..output.tokens.len().saturating_sub(1)],
        _ => &output.tokens[..],
    };
    let ids: Vec<u32> = shown.iter().map(|&t| t as u32).collect();
    Ok(Value::String(tokenizer.decode(&ids)?))
}

/// What a start took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Until the weights were in place.
    pub load: Duration,
    /// On a GPU: from the task graphs to the loaded cubin.
    pub compile: Option<Duration>,
    /// To bring the weights to their place.
    pub weights: Duration,
    /// Weights and constants of all ranks.
    pub weights_bytes: u64,
}

/// The object of `--json`, schema mpk-run/1.
pub fn json_object(
    backend: &str,
    ranks: u32,
    requests: &[Request],
    outputs: &[RequestOutput],
    tokenizer: Option<&Tokenizer>,
    start: &Start,
    timing: Timing,
) -> Result<Value, InputError> {
    let requests = requests
        .iter()
        .zip(outputs)
        .map(|(request, output)| {
            let mut object = Map::new();
            object.insert("prompt_tokens".into(), json!(request.prompt_tokens));
            object.insert("tokens".into(), json!(output.tokens));
            object.insert("text".into(), text_of(tokenizer, output)?);
            let reason = match output.finish {
                Some(Finish::Eos) => "eos",
                Some(Finish::Cancelled) => "cancelled",
                Some(Finish::Length) | None => "length",
            };
            object.insert("finish_reason".into(), json!(reason));
            if !output.logprobs.is_empty() {
                object.insert("logprobs".into(), json!(output.logprobs));
            }
            Ok(Value::Object(object))
        })
        .collect::<Result<Vec<_>, InputError>>()?;
    let decode = timing.decode.as_secs_f64();
    let per_token = if timing.decode_steps == 0 { 0.0 } else { 1000.0 * decode / timing.decode_steps as f64 };
    let mut timing = json!({
        "load_s": start.load.as_secs_f64(),
        "prefill_s": timing.prefill.as_secs_f64(),
        "decode_s": timing.decode.as_secs_f64(),
        "decode_steps": timing.decode_steps,
        "ms_per_token": per_token,
    });
    if let Some(compile) = start.compile {
        timing["compile_s"] = json!(compile.as_secs_f64());
        timing["weights_s"] = json!(start.weights.as_secs_f64());
        timing["weights_bytes"] = json!(start.weights_bytes);
    }
    Ok(json!({
        "schema": "mpk-run/1",
        "backend": backend,
        "tp": ranks,
        "requests": requests,
        "timing": timing,
    }))
}

/// The outputs of a user's own graph: a line for each, or one JSON object.
pub fn print_outputs(
    as_json: bool,
    (backend, ranks): (&str, u32),
    outputs: Vec<Output>,
    loaded: Duration,
    took: Duration,
) -> Result<(), AppError> {
    if !as_json {
        for (name, dtype, dims, values) in outputs {
            let shown: Vec<String> = values.iter().map(|v| format!("{v}")).collect();
            console::print_line(&format!("{name} {dtype} {dims:?}: {}", shown.join(" ")))?;
        }
        return Ok(());
    }
    let outputs: Map<String, Value> = outputs
        .into_iter()
        .map(|(name, dtype, dims, values)| (name, json!({"dtype": dtype, "dims": dims, "values": values})))
        .collect();
    let object = json!({
        "schema": "mpk-run/1",
        "backend": backend,
        "tp": ranks,
        "requests": [],
        "outputs": outputs,
        "timing": {"load_s": loaded.as_secs_f64(), "prefill_s": took.as_secs_f64(), "decode_s": 0.0,
                   "decode_steps": 0, "ms_per_token": 0.0},
    });
    console::print_line(&object.to_string())
}

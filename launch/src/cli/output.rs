//! What a run prints: streamed text, or one JSON object.

use crate::cli::console;
use crate::cli::program::Failure;
use crate::engine::user_graph::GraphRun;
use crate::engine::{Completion, Error, Event, Handle, Info, Stats, Token};
use crate::model::app_error::AppError;
use serde_json::{Map, Value, json};

/// Prints the text of each request as it arrives, in the order of the requests: only the first unfinished one streams.
/// Without a tokenizer, token ids are printed. With several requests, a line before each text names its prompt. With
/// `logprobs`, one line per token follows the text.
///
/// # Errors
/// A request has failed, or standard output cannot be written. A closed standard output is no error.
pub fn print_texts(info: &Info, handles: Vec<Handle>, logprobs: bool) -> Result<(), Failure> {
    let several = handles.len() > 1;
    let mut read = true;
    let mut print = |text: &str| -> Result<(), AppError> {
        if read && !text.is_empty() {
            read = console::print(text)?;
        }
        Ok(())
    };
    for (index, handle) in handles.into_iter().enumerate() {
        if several {
            let gap = if index > 0 { "\n" } else { "" };
            print(&format!(
                "{gap}==> prompt {}: {} <==\n",
                index + 1,
                excerpt(info, handle.prompt_tokens())
            ))?;
        }
        let mut tokens = Vec::new();
        for event in handle {
            match &event {
                Event::Token(token) if info.tokenizer.is_some() => print(&token.text)?,
                Event::Token(token) => print(&format!("{} ", token.id))?,
                Event::End(end) => {
                    check(end.error.as_ref())?;
                    print(&format!("{}\n", end.text))?;
                }
            }
            if let (true, Event::Token(token)) = (logprobs, event) {
                tokens.push(token);
            }
        }
        for (number, token) in tokens.iter().enumerate() {
            print(&logprobs_line(info, number + 1, token)?)?;
        }
    }
    Ok(())
}

/// Number of characters that are shown of a prompt.
const SHOWN: usize = 60;

/// The beginning of a prompt, on one line.
fn excerpt(info: &Info, tokens: &[u32]) -> String {
    let text = info.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(tokens).ok());
    let text = match text {
        Some(text) => text.split_whitespace().collect::<Vec<_>>().join(" "),
        None => tokens.iter().take(SHOWN).map(u32::to_string).collect::<Vec<_>>().join(" "),
    };
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// One line for a token: its number, its log-probability, and the tokens with the highest log-probabilities.
fn logprobs_line(info: &Info, number: usize, token: &Token) -> Result<String, AppError> {
    let name = |id: u32| -> Result<String, AppError> {
        Ok(match &info.tokenizer {
            Some(tokenizer) => format!("{id} {:?}", tokenizer.decode(&[id])?),
            None => id.to_string(),
        })
    };
    let own = token.logprob.map_or_else(String::new, |logprob| format!(" {logprob:.4}"));
    let mut line = format!("{number:>5}  {}{own}:", name(token.id)?);
    for &(id, logprob) in &token.logprobs {
        line.push_str(&format!("  {} {logprob:.4}", name(id)?));
    }
    line.push('\n');
    Ok(line)
}

/// Turns the error of a failed request into the program's error.
///
/// # Errors
/// The request has failed.
pub fn check(error: Option<&Error>) -> Result<(), Failure> {
    error.map_or(Ok(()), |error| Err(error.clone().into()))
}

/// The object of `--json`, schema mpk-run/1, for prompts and their answers.
pub fn json_object(info: &Info, stats: &Stats, answers: &[(Vec<u32>, Completion)]) -> Value {
    let requests: Vec<Value> = answers
        .iter()
        .map(|(prompt, answer)| {
            let mut object = Map::new();
            object.insert("prompt_tokens".into(), json!(prompt));
            object.insert("tokens".into(), json!(answer.tokens));
            let text = info.tokenizer.as_ref().map(|_| answer.text.as_str());
            object.insert("text".into(), json!(text));
            object.insert("finish_reason".into(), json!(answer.reason.name()));
            if !answer.logprobs.is_empty() {
                object.insert("token_logprobs".into(), json!(answer.token_logprobs));
                object.insert("logprobs".into(), json!(answer.logprobs));
            }
            Value::Object(object)
        })
        .collect();
    let (decode, start) = (stats.decode.as_secs_f64(), &info.start);
    let per_token = if stats.decode_steps == 0 { 0.0 } else { 1000.0 * decode / stats.decode_steps as f64 };
    let mut timing = json!({
        "load_s": start.load.as_secs_f64(),
        "prefill_s": stats.prefill.as_secs_f64(),
        "decode_s": decode,
        "decode_steps": stats.decode_steps,
        "ms_per_token": per_token,
    });
    if let Some(compile) = start.compile {
        timing["compile_s"] = json!(compile.as_secs_f64());
        timing["weights_s"] = json!(start.weights.as_secs_f64());
        timing["weights_bytes"] = json!(start.weights_bytes);
    }
    json!({
        "schema": "mpk-run/1",
        "backend": info.backend,
        "tp": info.ranks,
        "requests": requests,
        "timing": timing,
    })
}

/// A number in JSON. JSON has no NaN or infinities, so these are strings, which Python's `float` and JavaScript's `Number` read.
fn number(value: f64) -> Value {
    match value {
        _ if value.is_nan() => json!("NaN"),
        f64::INFINITY => json!("Infinity"),
        f64::NEG_INFINITY => json!("-Infinity"),
        _ => json!(value),
    }
}

/// Prints the outputs of a user graph: one line for each, or one JSON object.
///
/// # Errors
/// Standard output cannot be written.
pub fn print_outputs(as_json: bool, info: &Info, run: &GraphRun) -> Result<(), AppError> {
    if !as_json {
        for output in &run.outputs {
            let shown: Vec<String> = output.values.iter().map(|v| format!("{v}")).collect();
            console::print_line(&format!(
                "{} {} {:?}: {}",
                output.name,
                output.dtype,
                output.dims,
                shown.join(" ")
            ))?;
        }
        return Ok(());
    }
    let outputs: Map<String, Value> = run
        .outputs
        .iter()
        .map(|o| {
            let values: Vec<Value> = o.values.iter().copied().map(number).collect();
            (o.name.clone(), json!({"dtype": o.dtype, "dims": o.dims, "values": values}))
        })
        .collect();
    let object = json!({
        "schema": "mpk-run/1",
        "backend": info.backend,
        "tp": info.ranks,
        "requests": [],
        "outputs": outputs,
        "timing": {"load_s": info.start.load.as_secs_f64(), "prefill_s": run.took.as_secs_f64(), "decode_s": 0.0,
                   "decode_steps": 0, "ms_per_token": 0.0},
    });
    console::print_line(&object.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_lacks_are_strings() {
        let values = [1.5, f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0].map(number);
        assert_eq!(json!(values).to_string(), r#"[1.5,"NaN","NaN","Infinity","-Infinity",-0.0]"#);
    }
}

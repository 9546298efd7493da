//! `/v1/completions`.

use super::answers::{Ending, Piece, Shown, Usage, Whole};
use super::body::receive;
use super::error::ApiError;
use super::format::{Format, Header, Names, respond};
use super::generation::{self, check_logprobs};
use super::state::App;
use super::{logprobs, prompts, sse};
use crate::model::prompts::Prompt;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::Value;
use std::time::Instant;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

const NAMES: Names = Names { id: "cmpl", object: "text_completion", chunk: "text_completion" };

/// Answers a request.
pub async fn handle(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let arrival = Instant::now();
    let ready = app.serving()?;
    ready.loaded.backend.expect();
    let body = receive(&app, request).await?;
    let limits = app.limits;
    let (generation, prompts, echoed) = prompts::beside(&app, body.size(), move |loaded| {
        let (_memory, mut fields) = body.fields()?;
        let (model, can) = (&loaded.model, &loaded.capabilities);
        let echo = fields.flag("echo")?;
        // With `echo`, a request may ask for the prompt alone.
        let mut generation = generation::read(&mut fields, model, can, &limits, u32::from(!echo))?;
        let asked = fields.integer("logprobs", 0, i64::from(u32::MAX))?;
        generation.logprobs = asked.map(|asked| check_logprobs("logprobs", asked as u32, can)).transpose()?;
        if echo && generation.logprobs.is_some() {
            let message = "`logprobs` with `echo` is not supported: those of the prompt are not computed";
            return Err(ApiError::unsupported("logprobs", message));
        }
        if !fields.optional_flag("add_special_tokens")?.unwrap_or(true) {
            let message =
                "`add_special_tokens`: false is not supported; send the token ids of /tokenize as `prompt`";
            return Err(ApiError::unsupported("add_special_tokens", message));
        }
        let given = prompts::read(fields.take("prompt"), model)?;
        // Encoding can take long.
        drop(fields);
        let ids = given.iter().map(|prompt| prompts::encode(loaded, prompt, "prompt"));
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        let echoed = if echo {
            given.into_iter().map(|prompt| shown(loaded, prompt)).collect::<Result<Vec<_>, _>>()?
        } else {
            Vec::new()
        };
        Ok((generation, ids, echoed))
    })
    .await?;
    let words = Words {
        header: Header::new(&app, NAMES, &generation),
        prompts: if generation.return_token_ids { prompts.clone() } else { Vec::new() },
        echoed,
    };
    let plan =
        prompts::plan(&ready.loaded.model, prompts, generation, Some(DEFAULT_MAX_TOKENS), "prompt", arrival)?;
    respond(&app, ready, plan, words).await
}

/// The text that `echo` puts before an answer.
fn shown(loaded: &super::state::Loaded, prompt: Prompt) -> Result<String, ApiError> {
    match (prompt, &loaded.tokenizer) {
        (Prompt::Text(text) | Prompt::Rendered(text), _) => Ok(text),
        (Prompt::Tokens(ids), Some(tokenizer)) => {
            tokenizer.decode_with_special(&ids).map_err(|error| prompts::of_input("prompt", &error))
        }
        (Prompt::Tokens(_), None) => Ok(String::new()),
    }
}

/// The JSON format of completions.
struct Words {
    header: Header,
    /// The prompts, if the answers show their token ids.
    prompts: Vec<Vec<u32>>,
    /// The texts of the prompts, if the answers repeat them.
    echoed: Vec<String>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

impl Words {
    fn choice<'a>(
        &'a self,
        index: usize,
        text: &'a str,
        tokens: &[Shown],
        finish_reason: Option<&'static str>,
        with_prompt: bool,
    ) -> Choice<'a> {
        let base = self.echoed.get(index / self.header.n).map_or(0, |text| text.chars().count());
        let prompt = self.prompts.get(index / self.header.n).map(Vec::as_slice);
        Choice {
            index,
            text,
            logprobs: self.header.logprobs(|tokenizer| logprobs::of_completion(tokenizer, tokens, base)),
            finish_reason,
            token_ids: self.header.ids(tokens),
            prompt_token_ids: prompt.filter(|_| with_prompt),
        }
    }
}

impl Format for Words {
    fn object(&self, all: Vec<Whole>, usage: Usage) -> Value {
        let choice = |(index, Whole { text, tokens, reason }): (usize, Whole)| {
            let text = match self.echoed.get(index / self.header.n) {
                Some(echoed) => format!("{echoed}{text}"),
                None => text,
            };
            let choice = self.choice(index, &text, &tokens, Some(reason), true);
            serde_json::to_value(choice).unwrap_or_default()
        };
        self.header.object(all.into_iter().enumerate().map(choice).collect(), usage)
    }
}

impl sse::Events for Words {
    fn begin(&mut self) -> Vec<String> {
        let n = self.header.n;
        let echo =
            |index: usize| self.header.chunk(self.choice(index, &self.echoed[index / n], &[], None, true));
        (0..self.echoed.len() * n).map(echo).collect()
    }

    fn piece(&mut self, piece: &Piece) -> Vec<String> {
        let reason = piece.ending.as_ref().map(Ending::name);
        vec![self.header.chunk(self.choice(piece.choice, &piece.text, &piece.tokens, reason, false))]
    }

    fn usage(&mut self, usage: Usage) -> String {
        self.header.usage(usage)
    }
}

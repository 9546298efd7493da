//! `/v1/completions`.

use super::answers::{Ending, Piece, Shown, Usage, Whole};
use super::body::{no_memory, receive};
use super::error::ApiError;
use super::format::{Format, Header, Names, respond};
use super::generation::{self, check_logprobs};
use super::memory::Memory;
use super::state::{App, Loaded};
use super::{logprobs, prompts, sse};
use crate::model::prompts::Prompt;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::Value;
use std::time::Instant;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Estimated bytes of a token id in JSON.
const ID: usize = 8;
/// Bytes of prompts that the answers to one request may repeat without a share of the memory.
const FEW: usize = 64 << 10;

const NAMES: Names = Names { id: "cmpl", object: "text_completion", chunk: "text_completion" };

/// Answers a request.
pub async fn handle(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let arrival = Instant::now();
    let ready = app.serving()?;
    ready.loaded.backend.expect();
    let body = receive(&app, request).await?;
    let limits = app.limits;
    let most = limits.choices.min(ready.all_places);
    let shared = App::clone(&app);
    let (generation, prompts, repeated) = prompts::beside(&app, body.size(), move |loaded| {
        let (memory, mut fields) = body.fields()?;
        let (model, can) = (&loaded.model, &loaded.capabilities);
        let echo = fields.flag("echo")?;
        // With `echo`, a request may ask for the prompt alone.
        let least = u32::from(!echo);
        let has_text = loaded.tokenizer.is_some();
        let mut generation = generation::read(&mut fields, model, can, has_text, &limits, least)?;
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
        super::limits::check_choices(given.len(), generation.n, most)?;
        // Encoding can take long.
        drop(fields);
        let ids = given.iter().map(|prompt| prompts::encode(loaded, prompt, "prompt"));
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        let echoed = if echo {
            given.into_iter().map(|prompt| shown(loaded, prompt)).collect::<Result<Vec<_>, _>>()?
        } else {
            Vec::new()
        };
        let shows_ids = generation.return_token_ids && (echo || !generation.stream);
        let shown_ids = if shows_ids { ids.clone() } else { Vec::new() };
        let repeated = Repeated { texts: echoed, ids: shown_ids, memory: None };
        let repeated = repeated.hold(&shared, memory, generation.n)?;
        Ok((generation, ids, repeated))
    })
    .await?;
    let words = Words { header: Header::new(&app, NAMES, &generation), repeated };
    let plan =
        prompts::plan(&ready.loaded.model, prompts, generation, Some(DEFAULT_MAX_TOKENS), "prompt", arrival)?;
    respond(&app, ready, plan, words).await
}

/// The text that `echo` puts before an answer.
fn shown(loaded: &Loaded, prompt: Prompt) -> Result<String, ApiError> {
    match (prompt, &loaded.tokenizer) {
        (Prompt::Text(text) | Prompt::Rendered(text), _) => Ok(text),
        (Prompt::Tokens(ids), Some(tokenizer)) => {
            tokenizer.decode_with_special(&ids).map_err(|error| prompts::of_input("prompt", &error))
        }
        (Prompt::Tokens(_), None) => Ok(String::new()),
    }
}

/// The prompts that the answers repeat.
struct Repeated {
    /// The texts of the prompts, with `echo`.
    texts: Vec<String>,
    /// Their token ids, if the answers show them.
    ids: Vec<Vec<u32>>,
    /// The memory of all copies until they are sent, unless they are short.
    memory: Option<Memory>,
}

impl Repeated {
    /// Takes memory for the copies in `n` answers to each prompt. Otherwise a few requests with long prompts and a large `n` could take
    /// all the memory of the machine. Gives `memory` back if it is not needed.
    ///
    /// # Errors
    /// There are too many copies, or others have the memory.
    fn hold(mut self, app: &App, mut memory: Memory, n: usize) -> Result<Repeated, ApiError> {
        let texts: usize = self.texts.iter().map(String::len).sum();
        let ids: usize = self.ids.iter().map(Vec::len).sum();
        let bytes = n.saturating_mul(texts.saturating_add(ids.saturating_mul(ID)));
        let most = app.limits.all_bodies_bytes / 4;
        if bytes > most {
            let message = format!(
                "the answers would repeat {bytes} bytes of prompts, and at most {most} are possible; shorten the prompts, or \
                 leave out `echo` and `return_token_ids`"
            );
            return Err(ApiError::field(if n == 1 { "prompt" } else { "n" }, message));
        }
        if bytes > FEW {
            memory.drop_values();
            memory.grow(app, bytes).map_err(|_| no_memory())?;
            self.memory = Some(memory);
        }
        Ok(self)
    }
}

/// The JSON format of completions.
struct Words {
    header: Header,
    repeated: Repeated,
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
        let echoed = self.repeated.texts.get(index / self.header.n);
        let base = echoed.map_or(0, |text| text.chars().count());
        let prompt = self.repeated.ids.get(index / self.header.n).map(Vec::as_slice);
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
            let text = match self.repeated.texts.get(index / self.header.n) {
                Some(echoed) => format!("{echoed}{text}"),
                None => text,
            };
            let choice = self.choice(index, &text, &tokens, Some(reason), true);
            serde_json::to_value(choice).unwrap_or_default()
        };
        self.header.object(all.into_iter().enumerate().map(choice).collect(), usage)
    }

    fn take_memory(&mut self) -> Option<Memory> {
        self.repeated.memory.take()
    }
}

impl sse::Events for Words {
    fn begin(&mut self) -> Vec<String> {
        let n = self.header.n;
        let texts = &self.repeated.texts;
        let echo = |index: usize| self.header.chunk(self.choice(index, &texts[index / n], &[], None, true));
        (0..texts.len() * n).map(echo).collect()
    }

    fn piece(&mut self, piece: &Piece) -> Vec<String> {
        let reason = piece.ending.as_ref().map(Ending::name);
        vec![self.header.chunk(self.choice(piece.choice, &piece.text, &piece.tokens, reason, false))]
    }

    fn usage(&mut self, usage: Usage) -> String {
        self.header.usage(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::Limits;
    use super::super::state::Shared;
    use super::*;

    #[test]
    fn prompts_that_answers_repeat_take_memory() {
        let app = Shared::new(Limits { all_bodies_bytes: 1 << 20, ..Limits::default() }, None);
        let hold = |text: usize, ids: usize, n: usize| {
            let repeated = Repeated { texts: vec!["x".repeat(text)], ids: vec![vec![5; ids]], memory: None };
            let mut memory = Memory::default();
            memory.grow(&app, 10_000).unwrap();
            repeated.hold(&app, memory, n)
        };
        // Few copies take none, and give the body's back.
        let few = hold(100, 100, 10).unwrap();
        assert!(few.memory.is_none());
        assert_eq!(app.bodies.available_permits(), 1024);
        let many = hold(10 << 10, 1 << 10, 10).unwrap();
        assert_eq!(app.bodies.available_permits(), 1024 - 10 * (10 + 8));
        drop(many);
        assert_eq!(app.bodies.available_permits(), 1024);
        // One request gets at most a quarter.
        for (text, n, field) in [(2 << 10, 129, "n"), (257 << 10, 1, "prompt")] {
            let error = hold(text, 0, n).err().unwrap();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(field)));
        }
        // Others have the memory.
        let quarters: Vec<Repeated> = (0..4).filter_map(|_| hold(250 << 10, 0, 1).ok()).collect();
        assert_eq!(quarters.len(), 4);
        assert_eq!(hold(100 << 10, 0, 1).err().unwrap().code, Some("busy"));
    }
}

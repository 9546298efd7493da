//! `/v1/completions`.

use super::answers::{self, Answers, Ending, Piece, Shown, Usage};
use super::body::{json_body, read_json};
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{self, check_logprobs};
use super::state::{App, Ready};
use super::{logprobs, prompts, sse};
use crate::model::prompts::Prompt;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::time::Instant;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Answers a request.
pub async fn handle(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let arrival = Instant::now();
    let ready = app.serving()?;
    ready.loaded.backend.expect();
    let (model, can) = (&ready.loaded.model, &ready.loaded.capabilities);
    let read = read_json::<Map<String, Value>>(&app, request).await?;
    let mut fields = Fields(read.value);
    let echo = fields.flag("echo")?;
    // With `echo`, a request may ask for the prompt alone.
    let mut generation = generation::read(&mut fields, model, can, &app.limits, u32::from(!echo))?;
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
    if given.len() * generation.n > app.limits.choices {
        let message = format!("prompts x n is more than {}, the limit of this server", app.limits.choices);
        return Err(ApiError::field("prompt", message));
    }
    let (prompts, echoed) = prompts::beside(&app, read.bytes, move |loaded| {
        let ids = given.iter().map(|prompt| prompts::encode(loaded, prompt, "prompt"));
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        let echoed = if echo {
            given.into_iter().map(|prompt| shown(loaded, prompt)).collect::<Result<_, _>>()?
        } else {
            Vec::new()
        };
        Ok((ids, echoed))
    })
    .await?;
    drop(read.memory);
    let (stream, include_usage, n) = (generation.stream, generation.include_usage, generation.n);
    let mut words = Words {
        id: app.new_id("cmpl"),
        created: super::state::now(),
        n,
        include_usage,
        with_logprobs: generation.logprobs.is_some(),
        with_ids: generation.return_token_ids,
        prompts: if generation.return_token_ids { prompts.clone() } else { Vec::new() },
        echoed,
        app: App::clone(&app),
    };
    let choices = prompts.len() * n;
    let plan = prompts::plan(model, prompts, generation, Some(DEFAULT_MAX_TOKENS), "prompt", arrival)?;
    let answers = answers::start(&app, ready, plan)?;
    if stream {
        return Ok(sse::response(answers, words, include_usage));
    }
    whole(&mut words, answers, choices).await
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

/// All answers in one object.
async fn whole(words: &mut Words, mut answers: Answers, choices: usize) -> Result<Response, ApiError> {
    let mut all: Vec<(String, Vec<Shown>, &'static str)> = (0..choices)
        .map(|choice| (words.echoed.get(choice / words.n).cloned().unwrap_or_default(), Vec::new(), ""))
        .collect();
    while let Some(mut piece) = answers.next().await {
        if let Some(Ending::Failed(error)) = piece.ending {
            return Err(error);
        }
        let (text, tokens, reason) = &mut all[piece.choice];
        text.push_str(&piece.text);
        tokens.append(&mut piece.tokens);
        *reason = piece.ending.map_or(*reason, |ending| ending.name());
    }
    let choices: Vec<Value> = all
        .into_iter()
        .enumerate()
        .map(|(index, (text, tokens, reason))| {
            let choice = words.choice(index, &text, &tokens, Some(reason), true);
            serde_json::to_value(choice).unwrap_or_default()
        })
        .collect();
    let object = json!({
        "id": words.id, "object": "text_completion", "created": words.created, "model": words.model(),
        "choices": choices, "usage": answers.usage,
    });
    Ok(json_body(object.to_string()))
}

/// The JSON format of completions.
struct Words {
    id: String,
    created: u64,
    n: usize,
    include_usage: bool,
    with_logprobs: bool,
    with_ids: bool,
    prompts: Vec<Vec<u32>>,
    echoed: Vec<String>,
    app: App,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [Choice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
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
    fn ready(&self) -> Option<&Ready> {
        self.app.ready.get()
    }

    fn model(&self) -> &str {
        self.ready().map_or("", |ready| &ready.loaded.model.name)
    }

    fn choice<'a>(
        &'a self,
        index: usize,
        text: &'a str,
        tokens: &[Shown],
        finish_reason: Option<&'static str>,
        with_prompt: bool,
    ) -> Choice<'a> {
        let tokenizer = self.ready().and_then(|ready| ready.loaded.tokenizer.as_ref());
        let base = self.echoed.get(index / self.n).map_or(0, |text| text.chars().count());
        let prompt = self.prompts.get(index / self.n).map(Vec::as_slice);
        Choice {
            index,
            text,
            logprobs: self.with_logprobs.then(|| logprobs::of_completion(tokenizer, tokens, base)),
            finish_reason,
            token_ids: self.with_ids.then(|| tokens.iter().map(|shown| shown.token.id).collect()),
            prompt_token_ids: prompt.filter(|_| with_prompt),
        }
    }

    fn chunk(&self, choices: &[Choice<'_>], usage: Option<Usage>) -> String {
        let chunk = Chunk {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: self.model(),
            choices,
            usage: self.include_usage.then_some(usage),
        };
        serde_json::to_string(&chunk).unwrap_or_default()
    }
}

impl sse::Events for Words {
    fn begin(&mut self) -> Vec<String> {
        let choices = 0..self.echoed.len() * self.n;
        let echo =
            |index| self.chunk(&[self.choice(index, &self.echoed[index / self.n], &[], None, true)], None);
        choices.map(echo).collect()
    }

    fn piece(&mut self, piece: &Piece) -> Vec<String> {
        let reason = piece.ending.as_ref().map(Ending::name);
        vec![self.chunk(&[self.choice(piece.choice, &piece.text, &piece.tokens, reason, false)], None)]
    }

    fn usage(&mut self, usage: Usage) -> String {
        self.chunk(&[], Some(usage))
    }
}

//! What the answers of completions and chats have in common: either a stream or one object, with the same first fields.

use super::answers::{self, Plan, Shown, Usage, Whole};
use super::body::{json_body, kept_json_body};
use super::error::ApiError;
use super::generation::Generation;
use super::memory::Memory;
use super::sse;
use super::state::{App, Ready, now};
use crate::model::tokenizer::Tokenizer;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};

/// How an endpoint formats its answers.
pub trait Format: sse::Events {
    /// The object with all answers.
    fn object(&self, all: Vec<Whole>, usage: Usage) -> Value;

    /// The memory that the object keeps until it is sent, if it needs any.
    fn take_memory(&mut self) -> Option<Memory> {
        None
    }
}

/// Submits `plan` to the engine, and answers with a stream or with one object, as the request asks.
///
/// # Errors
/// The engine refuses the request, or an answer fails before the object is complete.
pub async fn respond<F: Format>(
    app: &App,
    ready: &Ready,
    plan: Plan,
    mut format: F,
) -> Result<Response, ApiError> {
    let (stream, include_usage) = (plan.generation.stream, plan.generation.include_usage);
    let answers = answers::start(app, ready, plan)?;
    if stream {
        return Ok(sse::response(answers, format, include_usage));
    }
    let (all, usage) = answers.whole().await?;
    let text = format.object(all, usage).to_string();
    Ok(match format.take_memory() {
        Some(memory) => kept_json_body(memory, text),
        None => json_body(text),
    })
}

/// The names in an endpoint's objects.
#[derive(Clone, Copy)]
pub struct Names {
    /// The start of the id.
    pub id: &'static str,
    /// The type of an object with all answers.
    pub object: &'static str,
    /// The type of an event.
    pub chunk: &'static str,
}

/// The fields that are the same in every object of a request, and the parts that the request asks for.
pub struct Header {
    names: Names,
    id: String,
    created: u64,
    /// Number of answers per prompt.
    pub n: usize,
    include_usage: bool,
    with_logprobs: bool,
    with_ids: bool,
    app: App,
}

#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

impl Header {
    /// The header of a new request.
    pub fn new(app: &App, names: Names, generation: &Generation) -> Self {
        Header {
            names,
            id: app.new_id(names.id),
            created: now(),
            n: generation.n,
            include_usage: generation.include_usage,
            with_logprobs: generation.logprobs.is_some(),
            with_ids: generation.return_token_ids,
            app: App::clone(app),
        }
    }

    fn ready(&self) -> Option<&Ready> {
        self.app.ready.get()
    }

    fn model(&self) -> &str {
        self.ready().map_or("", |ready| &ready.loaded.model.name)
    }

    /// The log-probabilities in the format of `of`, if the request asks for them.
    pub fn logprobs(&self, of: impl FnOnce(Option<&Tokenizer>) -> Value) -> Option<Value> {
        let tokenizer = self.ready().and_then(|ready| ready.loaded.tokenizer.as_ref());
        self.with_logprobs.then(|| of(tokenizer))
    }

    /// The ids of `tokens`, if the request asks for them.
    pub fn ids(&self, tokens: &[Shown]) -> Option<Vec<u32>> {
        self.with_ids.then(|| tokens.iter().map(|shown| shown.token.id).collect())
    }

    /// The object with all answers.
    pub fn object(&self, choices: Vec<Value>, usage: Usage) -> Value {
        json!({
            "id": self.id, "object": self.names.object, "created": self.created, "model": self.model(),
            "choices": choices, "usage": usage,
        })
    }

    /// The event with `choice`.
    pub fn chunk<C: Serialize>(&self, choice: C) -> String {
        self.event(&[choice], None)
    }

    /// The event with the numbers of tokens and no choices.
    pub fn usage(&self, usage: Usage) -> String {
        self.event::<()>(&[], Some(usage))
    }

    fn event<C: Serialize>(&self, choices: &[C], usage: Option<Usage>) -> String {
        let chunk = Chunk {
            id: &self.id,
            object: self.names.chunk,
            created: self.created,
            model: self.model(),
            choices,
            usage: self.include_usage.then_some(usage),
        };
        serde_json::to_string(&chunk).unwrap_or_default()
    }
}

//! `/v1/chat/completions`.

use super::answers::{self, Answers, Ending, Piece, Shown, Usage};
use super::body::{json_body, read_json};
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{self, check_logprobs};
use super::messages::Conversation;
use super::state::{App, Ready};
use super::{logprobs, prompts, sse};
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::time::Instant;

/// Maximum `top_logprobs`, as in OpenAI's API.
const MOST_TOP_LOGPROBS: i64 = 20;

/// Answers a request.
pub async fn handle(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let arrival = Instant::now();
    let ready = app.serving()?;
    ready.loaded.backend.expect();
    let (model, can) = (&ready.loaded.model, &ready.loaded.capabilities);
    let read = read_json::<Map<String, Value>>(&app, request).await?;
    let mut fields = Fields(read.value);
    let mut generation = generation::read(&mut fields, model, can, &app.limits, 1)?;
    let logprobs = fields.flag("logprobs")?;
    let top = fields.integer("top_logprobs", 0, MOST_TOP_LOGPROBS)?;
    generation.logprobs = match (logprobs, top) {
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            let message = "`top_logprobs` needs `logprobs` to be true";
            return Err(ApiError::field("top_logprobs", message));
        }
        (true, top) => {
            let (name, top) = top.map_or(("logprobs", 0), |top| ("top_logprobs", top as u32));
            Some(check_logprobs(name, top, can)?)
        }
    };
    let conversation = Conversation::read(&mut fields)?;
    let prompt = prompts::beside(&app, read.bytes, move |loaded| {
        prompts::encode(loaded, &conversation.render(loaded)?, "messages")
    })
    .await?;
    drop(read.memory);
    let (stream, include_usage, n) = (generation.stream, generation.include_usage, generation.n);
    let words = Words {
        id: app.new_id("chatcmpl"),
        created: super::state::now(),
        n,
        include_usage,
        with_logprobs: generation.logprobs.is_some(),
        with_ids: generation.return_token_ids,
        app: App::clone(&app),
    };
    let shown_prompt = (generation.return_token_ids && !stream).then(|| prompt.clone());
    let plan = prompts::plan(model, vec![prompt], generation, None, "messages", arrival)?;
    let answers = answers::start(&app, ready, plan)?;
    if stream {
        return Ok(sse::response(answers, words, include_usage));
    }
    whole(&words, answers, shown_prompt).await
}

/// Returns all answers in one object.
async fn whole(words: &Words, mut answers: Answers, prompt: Option<Vec<u32>>) -> Result<Response, ApiError> {
    let mut all: Vec<(String, Vec<Shown>, &'static str)> = vec![(String::new(), Vec::new(), ""); words.n];
    while let Some(mut piece) = answers.next().await {
        if let Some(Ending::Failed(error)) = piece.ending {
            return Err(error);
        }
        let (text, tokens, reason) = &mut all[piece.choice];
        text.push_str(&piece.text);
        tokens.append(&mut piece.tokens);
        *reason = piece.ending.map_or(*reason, |ending| ending.name());
    }
    let choice = |(index, (text, tokens, reason)): (usize, (String, Vec<Shown>, &str))| {
        let mut choice = json!({
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": null},
            "logprobs": words.logprobs(&tokens),
            "finish_reason": reason,
        });
        if let Some(ids) = words.ids(&tokens) {
            choice["token_ids"] = json!(ids);
        }
        choice
    };
    let choices: Vec<Value> = all.into_iter().enumerate().map(choice).collect();
    let mut object = json!({
        "id": words.id, "object": "chat.completion", "created": words.created, "model": words.model(),
        "choices": choices, "usage": answers.usage,
    });
    if let Some(prompt) = prompt {
        object["prompt_token_ids"] = json!(prompt);
    }
    Ok(json_body(object.to_string()))
}

/// The JSON format of chats.
struct Words {
    id: String,
    created: u64,
    n: usize,
    include_usage: bool,
    with_logprobs: bool,
    with_ids: bool,
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
    delta: Delta<'a>,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize, Default)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl Words {
    fn ready(&self) -> Option<&Ready> {
        self.app.ready.get()
    }

    fn model(&self) -> &str {
        self.ready().map_or("", |ready| &ready.loaded.model.name)
    }

    fn logprobs(&self, tokens: &[Shown]) -> Option<Value> {
        let tokenizer = self.ready().and_then(|ready| ready.loaded.tokenizer.as_ref());
        self.with_logprobs.then(|| logprobs::of_chat(tokenizer, tokens))
    }

    fn ids(&self, tokens: &[Shown]) -> Option<Vec<u32>> {
        self.with_ids.then(|| tokens.iter().map(|shown| shown.token.id).collect())
    }

    fn chunk(&self, choices: &[Choice<'_>], usage: Option<Usage>) -> String {
        let chunk = Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
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
        let first = |index| {
            let delta = Delta { role: Some("assistant"), content: Some("") };
            self.chunk(&[Choice { index, delta, logprobs: None, finish_reason: None, token_ids: None }], None)
        };
        (0..self.n).map(first).collect()
    }

    fn piece(&mut self, piece: &Piece) -> Vec<String> {
        let index = piece.choice;
        let mut events = Vec::new();
        if !piece.text.is_empty() || !piece.tokens.is_empty() {
            let delta = Delta { role: None, content: Some(&piece.text) };
            let (logprobs, token_ids) = (self.logprobs(&piece.tokens), self.ids(&piece.tokens));
            events
                .push(self.chunk(&[Choice { index, delta, logprobs, finish_reason: None, token_ids }], None));
        }
        if let Some(ending) = &piece.ending {
            let finish_reason = Some(ending.name());
            let delta = Delta::default();
            events.push(
                self.chunk(&[Choice { index, delta, logprobs: None, finish_reason, token_ids: None }], None),
            );
        }
        events
    }

    fn usage(&mut self, usage: Usage) -> String {
        self.chunk(&[], Some(usage))
    }
}

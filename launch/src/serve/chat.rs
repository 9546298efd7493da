//! `/v1/chat/completions`.

use super::answers::{Piece, Shown, Usage, Whole};
use super::body::receive;
use super::error::ApiError;
use super::format::{Format, Header, Names, respond};
use super::generation::{self, check_logprobs};
use super::messages::Conversation;
use super::state::App;
use super::{logprobs, prompts, sse};
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};
use std::time::Instant;

/// Maximum `top_logprobs`, as in OpenAI's API.
const MOST_TOP_LOGPROBS: i64 = 20;

const NAMES: Names = Names { id: "chatcmpl", object: "chat.completion", chunk: "chat.completion.chunk" };

/// Answers a request.
pub async fn handle(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let arrival = Instant::now();
    let ready = app.serving()?;
    ready.loaded.backend.expect();
    let body = receive(&app, request).await?;
    let limits = app.limits;
    let (generation, prompt) = prompts::beside(&app, body.size(), move |loaded| {
        let (_memory, mut fields) = body.fields()?;
        let (can, has_text) = (&loaded.capabilities, loaded.tokenizer.is_some());
        let mut generation = generation::read(&mut fields, &loaded.model, can, has_text, &limits, 1)?;
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
        let add_special_tokens = fields.flag("add_special_tokens")?;
        let conversation = Conversation::read(&mut fields)?;
        // Rendering and encoding can take long.
        drop(fields);
        let rendered = conversation.render(loaded, add_special_tokens)?;
        drop(conversation);
        Ok((generation, prompts::encode(loaded, &rendered, "messages")?))
    })
    .await?;
    let shown = generation.return_token_ids && !generation.stream;
    let words =
        Words { header: Header::new(&app, NAMES, &generation), prompt: shown.then(|| prompt.clone()) };
    let plan = prompts::plan(&ready.loaded.model, vec![prompt], generation, None, "messages", arrival)?;
    respond(&app, ready, plan, words).await
}

/// The JSON format of chats.
struct Words {
    header: Header,
    /// The prompt, if the object with the answers shows it.
    prompt: Option<Vec<u32>>,
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
    fn logprobs(&self, tokens: &[Shown]) -> Option<Value> {
        self.header.logprobs(|tokenizer| logprobs::of_chat(tokenizer, tokens))
    }
}

impl Format for Words {
    fn object(&self, all: Vec<Whole>, usage: Usage) -> Value {
        let choice = |(index, Whole { text, tokens, reason }): (usize, Whole)| {
            let mut choice = json!({
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": null},
                "logprobs": self.logprobs(&tokens),
                "finish_reason": reason,
            });
            if let Some(ids) = self.header.ids(&tokens) {
                choice["token_ids"] = json!(ids);
            }
            choice
        };
        let mut object = self.header.object(all.into_iter().enumerate().map(choice).collect(), usage);
        if let Some(prompt) = &self.prompt {
            object["prompt_token_ids"] = json!(prompt);
        }
        object
    }
}

impl sse::Events for Words {
    fn begin(&mut self) -> Vec<String> {
        let first = |index| {
            let delta = Delta { role: Some("assistant"), content: Some("") };
            self.header.chunk(Choice { index, delta, logprobs: None, finish_reason: None, token_ids: None })
        };
        (0..self.header.n).map(first).collect()
    }

    fn piece(&mut self, piece: &Piece) -> Vec<String> {
        let index = piece.choice;
        let mut events = Vec::new();
        if !piece.text.is_empty() || !piece.tokens.is_empty() {
            let delta = Delta { role: None, content: Some(&piece.text) };
            let (logprobs, token_ids) = (self.logprobs(&piece.tokens), self.header.ids(&piece.tokens));
            events.push(self.header.chunk(Choice { index, delta, logprobs, finish_reason: None, token_ids }));
        }
        if let Some(ending) = &piece.ending {
            let finish_reason = Some(ending.name());
            let delta = Delta::default();
            let choice = Choice { index, delta, logprobs: None, finish_reason, token_ids: None };
            events.push(self.header.chunk(choice));
        }
        events
    }

    fn usage(&mut self, usage: Usage) -> String {
        self.header.usage(usage)
    }
}

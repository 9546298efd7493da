//! `/tokenize` and `/detokenize`, with vLLM's fields.

use super::body::{held_json_body, receive};
use super::error::ApiError;
use super::messages::Conversation;
use super::state::App;
use super::{generation, prompts};
use crate::model::prompts::Prompt;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

#[derive(Serialize)]
struct Tokens<'a> {
    count: usize,
    max_model_len: u32,
    tokens: &'a [u32],
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize)]
struct Text<'a> {
    prompt: &'a str,
}

fn written(answer: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(answer).map_err(|error| ApiError::failed(error.to_string(), "internal_error"))
}

/// Converts a text or a chat to token ids.
pub async fn tokenize(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    app.serving()?;
    let body = receive(&app, request).await?;
    let (memory, answer) = prompts::beside(&app, body.size(), move |loaded| {
        let (memory, mut fields) = body.fields()?;
        generation::check_model(&mut fields, &loaded.model)?;
        let special = fields.optional_flag("add_special_tokens")?;
        let with_strings = fields.flag("return_token_strs")?;
        let conversation = match fields.look("messages") {
            Some(_) => Some(Conversation::read(&mut fields)?),
            None => None,
        };
        let text = fields.text("prompt")?;
        if conversation.is_some() && text.is_some() {
            return Err(ApiError::field("prompt", "give either `prompt` or `messages`, not both"));
        }
        drop(fields);
        let (prompt, param) = match (conversation, text) {
            (Some(conversation), _) => (conversation.render(loaded, special == Some(true))?, "messages"),
            (None, Some(text)) if special == Some(false) => (Prompt::Rendered(text), "prompt"),
            (None, Some(text)) => (Prompt::Text(text), "prompt"),
            (None, None) => return Err(ApiError::field("prompt", "`prompt` or `messages` is missing")),
        };
        let ids = prompts::tokenize(loaded, &prompt, param)?;
        let string = |&id: &u32| loaded.tokenizer.as_ref().and_then(|t| t.written(id)).unwrap_or_default();
        let answer = Tokens {
            count: ids.len(),
            max_model_len: loaded.model.max_seq_len,
            tokens: &ids,
            token_strs: with_strings.then(|| ids.iter().map(string).collect()),
        };
        Ok((memory, written(&answer)?))
    })
    .await?;
    held_json_body(&app, memory, answer)
}

/// Converts token ids to text, including special tokens.
pub async fn detokenize(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    app.serving()?;
    let body = receive(&app, request).await?;
    let (memory, answer) = prompts::beside(&app, body.size(), move |loaded| {
        let (memory, mut fields) = body.fields()?;
        generation::check_model(&mut fields, &loaded.model)?;
        if fields.look("tokens").is_none() {
            return Err(ApiError::field("tokens", "`tokens` is missing"));
        }
        let ids = fields.ids("tokens", loaded.model.vocab_size)?;
        drop(fields);
        let message = "the model has no tokenizer.json";
        let tokenizer = loaded.tokenizer.as_ref().ok_or_else(|| ApiError::field("tokens", message))?;
        let text =
            tokenizer.decode_with_special(&ids).map_err(|error| prompts::of_input("tokens", &error))?;
        Ok((memory, written(&Text { prompt: &text })?))
    })
    .await?;
    held_json_body(&app, memory, answer)
}

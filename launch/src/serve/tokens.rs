//! `/tokenize` and `/detokenize`, with vLLM's fields.

use super::body::{json_body, read_json};
use super::error::ApiError;
use super::fields::Fields;
use super::messages::Conversation;
use super::state::App;
use super::{generation, prompts};
use crate::model::prompts::Prompt;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

/// Converts a text or a chat to token ids.
pub async fn tokenize(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let ready = app.serving()?;
    let read = read_json::<Map<String, Value>>(&app, request).await?;
    let mut fields = Fields(read.value);
    generation::check_model(&mut fields, &ready.loaded.model)?;
    let special = fields.optional_flag("add_special_tokens")?;
    let with_strings = fields.flag("return_token_strs")?;
    let conversation = match fields.look("messages") {
        Some(_) => Some(Conversation::read(&mut fields)?),
        None => None,
    };
    let text = fields.text("prompt")?;
    let most = ready.loaded.model.max_seq_len;
    let object = prompts::beside(&app, read.bytes, move |loaded| {
        // A chat template writes its special tokens itself.
        let (prompt, param) = match (conversation, text) {
            (Some(conversation), _) => match (conversation.render(loaded)?, special) {
                (Prompt::Rendered(text), Some(true)) => (Prompt::Text(text), "messages"),
                (prompt, _) => (prompt, "messages"),
            },
            (None, Some(text)) if special == Some(false) => (Prompt::Rendered(text), "prompt"),
            (None, Some(text)) => (Prompt::Text(text), "prompt"),
            (None, None) => return Err(ApiError::field("prompt", "`prompt` or `messages` is missing")),
        };
        let ids = prompts::encode(loaded, &prompt, param)?;
        let written = |&id: &u32| loaded.tokenizer.as_ref().and_then(|t| t.written(id)).unwrap_or_default();
        let strings = with_strings.then(|| ids.iter().map(written).collect::<Vec<String>>());
        Ok(json!({"count": ids.len(), "max_model_len": most, "tokens": ids, "token_strs": strings}))
    })
    .await?;
    drop(read.memory);
    Ok(json_body(object.to_string()))
}

/// Converts token ids to text, including special tokens.
pub async fn detokenize(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let ready = app.serving()?;
    let read = read_json::<Map<String, Value>>(&app, request).await?;
    let mut fields = Fields(read.value);
    generation::check_model(&mut fields, &ready.loaded.model)?;
    if fields.look("tokens").is_none() {
        return Err(ApiError::field("tokens", "`tokens` is missing"));
    }
    let ids = fields.ids("tokens", ready.loaded.model.vocab_size)?;
    let object = prompts::beside(&app, read.bytes, move |loaded| {
        let message = "the model has no tokenizer.json";
        let tokenizer = loaded.tokenizer.as_ref().ok_or_else(|| ApiError::field("tokens", message))?;
        let text =
            tokenizer.decode_with_special(&ids).map_err(|error| prompts::of_input("tokens", &error))?;
        Ok(json!({"prompt": text}))
    })
    .await?;
    drop(read.memory);
    Ok(json_body(object.to_string()))
}

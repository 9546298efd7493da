//! Prompts of requests: encodes text to token ids, and checks that they fit.

use super::answers::Plan;
use super::backend::ModelInfo;
use super::error::ApiError;
use super::fields;
use super::generation::Generation;
use super::memory::give_back_free;
use super::state::{App, Loaded};
use crate::model::error::InputError;
use crate::model::prompts::Prompt;
use serde_json::Value;
use std::sync::Arc;
use std::time::Instant;
use taskgraph::words::counted;
use tokio::sync::Semaphore;

/// Maximum size of a body that is parsed and encoded on the current thread. Starting another thread would take longer.
const SHORT: usize = 4096;

/// Bodies above this size are parsed and encoded one after the other. An encoding can take some hundred times the bytes of its text, and
/// other bodies must not wait for several of these.
const LONG: usize = 256 << 10;

/// Runs CPU-bound work, such as parsing a long body and encoding its text, outside the threads that serve connections.
/// The number of such jobs at the same time is limited, and only one of them has a body of more than [`LONG`] bytes. `bytes` is the size
/// of the request's body.
///
/// # Errors
/// The errors of `work`.
pub async fn beside<T: Send + 'static>(
    app: &App,
    bytes: usize,
    work: impl FnOnce(&Loaded) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if bytes <= SHORT {
        return work(&app.serving()?.loaded);
    }
    let failed = |what: String| ApiError::failed(what, "internal_error");
    let permit = |jobs: &Arc<Semaphore>| Arc::clone(jobs).acquire_owned();
    // First, so that long bodies that wait keep no other body waiting.
    let long = match bytes > LONG {
        true => Some(permit(&app.long_bodies).await.map_err(|e| failed(e.to_string()))?),
        false => None,
    };
    let permit = permit(&app.encoders).await.map_err(|e| failed(e.to_string()))?;
    let app = App::clone(app);
    let done = tokio::task::spawn_blocking(move || {
        let (_permit, long) = (permit, long);
        let ready = app.serving()?;
        let done = work(&ready.loaded);
        if long.is_some() {
            give_back_free();
        }
        done
    });
    done.await.map_err(|error| failed(format!("the request cannot be read: {error}")))?
}

/// Reads `prompt`: text, a list of texts, token ids, or a list of lists of token ids.
///
/// # Errors
/// It is missing or something else.
pub fn read(prompt: Option<Value>, model: &ModelInfo) -> Result<Vec<Prompt>, ApiError> {
    let expected = "a string, a list of strings, a list of token ids, or a list of lists of token ids";
    let wrong = |value: &Value| fields::wrong("prompt", expected, value);
    let one = |(i, value): (usize, &Value)| match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(ids) => Ok(Prompt::Tokens(fields::ids(&format!("prompt[{i}]"), ids, model.vocab_size)?)),
        other => Err(wrong(other)),
    };
    match prompt {
        None => Err(ApiError::field("prompt", "`prompt` is missing")),
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) => match list.first() {
            None => Err(ApiError::field("prompt", "`prompt` is an empty list")),
            Some(Value::Number(_)) => {
                Ok(vec![Prompt::Tokens(fields::ids("prompt", &list, model.vocab_size)?)])
            }
            Some(_) => list.iter().enumerate().map(one).collect(),
        },
        Some(other) => Err(wrong(&other)),
    }
}

/// The token ids of a prompt that gets an answer. An empty text has none: a begin-of-text token alone is not a prompt.
///
/// # Errors
/// It is text without a tokenizer, or the tokenizer cannot encode it.
pub fn encode(loaded: &Loaded, prompt: &Prompt, param: &str) -> Result<Vec<u32>, ApiError> {
    match prompt {
        Prompt::Text(text) | Prompt::Rendered(text) if text.is_empty() => Ok(Vec::new()),
        _ => tokenize(loaded, prompt, param),
    }
}

/// The token ids of `prompt`, as the tokenizer gives them.
///
/// # Errors
/// Those of [`encode`].
pub fn tokenize(loaded: &Loaded, prompt: &Prompt, param: &str) -> Result<Vec<u32>, ApiError> {
    let tokenizer = || {
        let message = "the model has no tokenizer.json; give token ids";
        loaded.tokenizer.as_ref().ok_or_else(|| ApiError::field(param, message))
    };
    match prompt {
        Prompt::Tokens(ids) => Ok(ids.clone()),
        Prompt::Text(text) => tokenizer()?.encode(text).map_err(|error| of_input(param, &error)),
        Prompt::Rendered(text) => tokenizer()?.encode_rendered(text).map_err(|error| of_input(param, &error)),
    }
}

/// Checks that prompts and answers fit the model. If the request does not set a number of tokens, it gets `default`, or
/// without a default as many as fit.
///
/// # Errors
/// A prompt is empty or too long.
pub fn plan(
    model: &ModelInfo,
    prompts: Vec<Vec<u32>>,
    generation: Generation,
    default: Option<u32>,
    param: &str,
    arrival: Instant,
) -> Result<Plan, ApiError> {
    let most = model.max_seq_len;
    let room = |prompt: &Vec<u32>| {
        let length = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        if length == 0 {
            return Err(ApiError::field(param, "the prompt is empty; give at least one token"));
        }
        if length >= most {
            let message = format!(
                "the prompt has {}, but prompt and answer together may have at most {most}; shorten the prompt",
                counted(length, "token")
            );
            return Err(ApiError::too_long(param, message));
        }
        let room = most - length;
        match generation.max_tokens {
            Some(wanted) if wanted > room => {
                let message = format!(
                    "the prompt has {} and {wanted} more are asked for, but together they are at most {most}; ask for at \
                     most {room}",
                    counted(length, "token")
                );
                Err(ApiError::too_long(generation.max_tokens_name, message))
            }
            Some(wanted) => Ok(wanted),
            None => Ok(default.map_or(room, |default| default.max(generation.min_tokens).min(room))),
        }
    };
    let max_tokens = prompts.iter().map(room).collect::<Result<Vec<u32>, _>>()?;
    if let Some(max_tokens) = max_tokens.iter().find(|&&max_tokens| max_tokens < generation.min_tokens) {
        let message =
            format!("`min_tokens` is more than the answer may have: {}", counted(*max_tokens, "token"));
        return Err(ApiError::field("min_tokens", message));
    }
    Ok(Plan { prompts, max_tokens, generation, arrival })
}

/// Converts an error of the model's files to the request's error.
pub fn of_input(param: &str, error: &InputError) -> ApiError {
    let message = match error {
        InputError::Tokenizer { problem, .. } | InputError::ChatTemplate { problem, .. } => problem.clone(),
        other => other.whole(),
    };
    ApiError::field(param, message)
}

#[cfg(test)]
mod tests {
    use super::super::limits::Limits;
    use super::super::state::Shared;
    use super::super::testing;
    use super::*;
    use crate::model::tokenizer::Tokenizer;
    use std::path::Path;
    use std::task::{Context, Waker};

    /// A model whose tokenizer adds a begin-of-text token, 1, to a text.
    fn loaded() -> Loaded {
        let data: Value = serde_json::from_str(include_str!("../../testdata/byte_fallback.json")).unwrap();
        let file = data["tokenizer"].to_string();
        let tokenizer = Tokenizer::parse(Path::new("tokenizer.json"), file.as_bytes()).unwrap();
        Loaded { tokenizer: Some(tokenizer), ..testing::loaded() }
    }

    /// They wait before they take an encoder.
    #[test]
    fn long_bodies_keep_only_each_other_waiting() {
        let app = Shared::new(Limits::default(), None);
        app.set_ready(loaded());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let running = Arc::clone(&app.long_bodies).acquire_owned().await.unwrap();
            let job = |_| Box::pin(beside(&app, LONG + 1, |_| Ok(())));
            let mut waiting: Vec<_> = (0..2 * app.limits.encoders).map(job).collect();
            let context = &mut Context::from_waker(Waker::noop());
            assert!(waiting.iter_mut().all(|job| job.as_mut().poll(context).is_pending()));
            assert_eq!(app.encoders.available_permits(), app.limits.encoders);
            assert!(beside(&app, LONG, |_| Ok(())).await.is_ok());
            drop(running);
            for job in waiting {
                assert!(job.await.is_ok());
            }
            assert_eq!(app.long_bodies.available_permits(), 1);
        });
    }

    #[test]
    fn an_empty_text_has_its_special_tokens_but_is_no_prompt() {
        let mut loaded = loaded();
        let (text, rendered) = (Prompt::Text(String::new()), Prompt::Rendered(String::new()));
        assert_eq!(tokenize(&loaded, &text, "prompt").unwrap(), [1]);
        assert!(tokenize(&loaded, &rendered, "prompt").unwrap().is_empty());
        assert!(encode(&loaded, &text, "prompt").unwrap().is_empty());
        assert!(encode(&loaded, &rendered, "prompt").unwrap().is_empty());
        assert_eq!(encode(&loaded, &Prompt::Text("The".into()), "prompt").unwrap(), [1, 273]);
        loaded.tokenizer = None;
        let error = tokenize(&loaded, &text, "prompt").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("prompt"));
    }
}

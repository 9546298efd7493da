//! Prompts from the command line and model.json: checks them, and turns them into requests of token ids.

use crate::model::chat_template::{ChatTemplate, Rendering};
use crate::model::model_json::{ModelJson, Sizes};
use crate::model::{error::InputError, tokenizer::Tokenizer};
use serde_json::json;
use taskgraph::words::counted;

/// A prompt as the user gave it.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptSource {
    /// Where it was given, for messages: `--prompt 2`, "model.json: `generate.prompts[0]`".
    pub place: String,
    /// The prompt.
    pub prompt: Prompt,
}

/// Text or token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Encoded with the tokenizer's defaults.
    Text(String),
    /// Text that a chat template rendered. It already contains its special tokens.
    Rendered(String),
    /// Used as they are.
    Tokens(Vec<u32>),
}

impl PromptSource {
    /// A prompt of text.
    pub fn text(place: impl Into<String>, text: impl Into<String>) -> Self {
        Self { place: place.into(), prompt: Prompt::Text(text.into()) }
    }

    /// The prompt as the first message of a conversation, rendered by `template`. Token ids stay as they are.
    ///
    /// # Errors
    /// The template refuses the message.
    pub fn as_chat(self, template: &ChatTemplate, rendering: &Rendering) -> Result<Self, InputError> {
        let Prompt::Text(text) = &self.prompt else { return Ok(self) };
        let message = json!({"role": "user", "content": text});
        let prompt = Prompt::Rendered(template.render(&[message], rendering)?);
        Ok(Self { prompt, ..self })
    }

    /// A prompt of token ids.
    pub fn tokens(place: impl Into<String>, tokens: Vec<u32>) -> Self {
        Self { place: place.into(), prompt: Prompt::Tokens(tokens) }
    }
}

/// The prompts of `generate` in model.json, texts first. Each has its place, for messages.
pub fn of_model_json(model: &ModelJson) -> Vec<PromptSource> {
    let file = model.file();
    let texts = model
        .generate
        .prompts
        .iter()
        .enumerate()
        .map(|(i, text)| PromptSource::text(format!("{file}: `generate.prompts[{i}]`"), text.clone()));
    let tokens = model.generate.prompt_tokens.iter().enumerate().map(|(i, tokens)| {
        PromptSource::tokens(format!("{file}: `generate.prompt_tokens[{i}]`"), tokens.clone())
    });
    texts.chain(tokens).collect()
}

/// The limits that requests are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Maximum number of tokens of a request, prompt and answer together: `max_seq_len`.
    pub max_seq_len: u32,
    /// Number of tokens that all KV pages hold together.
    pub kv_tokens: u64,
    /// Requested number of new tokens.
    pub max_new_tokens: u32,
}

impl Limits {
    /// The limits of a run.
    pub fn new(sizes: &Sizes, vocab_size: u32, max_new_tokens: u32) -> Self {
        Self {
            vocab_size,
            max_seq_len: sizes.max_seq_len,
            kv_tokens: u64::from(sizes.num_pages) * u64::from(sizes.page_size),
            max_new_tokens,
        }
    }

    /// Number of tokens of the longest request that is possible, prompt and answer together: the smaller of `max_seq_len` and
    /// all KV pages.
    pub fn longest(&self) -> u32 {
        // At most max_seq_len, so it fits.
        u64::from(self.max_seq_len).min(self.kv_tokens) as u32
    }

    /// True if the KV pages, not `max_seq_len`, limit the longest request.
    pub fn is_limited_by_pages(&self) -> bool {
        self.kv_tokens < u64::from(self.max_seq_len)
    }

    /// The limit of the longest request, for messages: `max_seq_len = 1024`, "the 512 tokens that runtime.kv_pages holds".
    pub fn longest_in_words(&self) -> String {
        match self.is_limited_by_pages() {
            true => format!("the {} that runtime.kv_pages holds", counted(self.longest(), "token")),
            false => format!("max_seq_len = {}", self.longest()),
        }
    }
}

/// A checked request, ready to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// At least one id, each in the vocabulary.
    pub prompt_tokens: Vec<u32>,
    /// Number of new tokens after which the request ends with finish reason "length": the requested number, or fewer if
    /// `max_seq_len` or the KV cache has less room. At least 1.
    pub max_new_tokens: u32,
}

/// Checks `prompts` and encodes the texts. The order is kept.
///
/// # Errors
/// There is no prompt, or an empty one; a token id is out of range; a prompt leaves no room for one new token in
/// `max_seq_len` or in the KV cache; a text has no tokenizer; `max_new_tokens` is 0; all prompts together have more
/// tokens than fit in 31 bits.
pub fn resolve(
    prompts: &[PromptSource],
    tokenizer: Option<&Tokenizer>,
    limits: &Limits,
) -> Result<Vec<Request>, InputError> {
    if limits.max_new_tokens == 0 {
        return Err(error("max_new_tokens", "is 0", "ask for at least 1 new token"));
    }
    if prompts.is_empty() {
        return Err(error("prompts", "no prompt was given", "give at least one"));
    }
    let requests =
        prompts.iter().map(|source| resolve_one(source, tokenizer, limits)).collect::<Result<Vec<_>, _>>()?;
    let sum = |count: fn(&Request) -> usize| requests.iter().map(count).sum::<usize>();
    let (prompt, new) = (sum(|r| r.prompt_tokens.len()), sum(|r| r.max_new_tokens as usize));
    if prompt > i32::MAX as usize || new > i32::MAX as usize {
        return Err(error(
            "prompts",
            &format!(
                "{prompt} prompt tokens and {new} new tokens are too many for one run, which may have {}",
                i32::MAX
            ),
            "give fewer prompts at a time",
        ));
    }
    Ok(requests)
}

fn resolve_one(
    source: &PromptSource,
    tokenizer: Option<&Tokenizer>,
    limits: &Limits,
) -> Result<Request, InputError> {
    let place = &source.place;
    let tokens = match &source.prompt {
        Prompt::Text(text) | Prompt::Rendered(text) => {
            let Some(tokenizer) = tokenizer else {
                return Err(error(
                    place,
                    "the prompt is text, but the model has no tokenizer.json",
                    "give token ids (Request::tokens), or use a checkpoint whose folder has a tokenizer.json",
                ));
            };
            // A tokenizer that adds a begin-of-text token would make an empty prompt look like one token.
            if text.is_empty() {
                return Err(error(place, "the prompt is empty", "give at least one character"));
            }
            match source.prompt {
                Prompt::Rendered(_) => tokenizer.encode_rendered(text)?,
                _ => tokenizer.encode(text)?,
            }
        }
        Prompt::Tokens(tokens) => tokens.clone(),
    };
    if tokens.is_empty() {
        return Err(error(place, "the prompt is empty", "give at least one token"));
    }
    if let Some((i, id)) = tokens.iter().enumerate().find(|(_, id)| **id >= limits.vocab_size) {
        return Err(error(
            place,
            &format!("token {i} is {id}, but the vocabulary has {}", counted(limits.vocab_size, "token")),
            &format!("use ids from 0 to {}", limits.vocab_size.saturating_sub(1)),
        ));
    }
    let (count, longest) = (tokens.len() as u64, u64::from(limits.longest()));
    if count >= longest {
        let (verb, field) = match limits.is_limited_by_pages() {
            true => ("need more than", "runtime.kv_pages"),
            false => ("never fit in", "max_seq_len"),
        };
        return Err(error(
            place,
            &format!(
                "the prompt has {}, so it and one new token {verb} {}",
                counted(count, "token"),
                limits.longest_in_words()
            ),
            &format!("shorten the prompt or raise {field}"),
        ));
    }
    // Less than max_seq_len, so it fits.
    let room = (longest - count) as u32;
    Ok(Request { prompt_tokens: tokens, max_new_tokens: limits.max_new_tokens.min(room) })
}

/// Reads the argument of `--prompt-tokens`: ids separated by commas. Spaces around them are ignored.
///
/// # Errors
/// An element is not a number from 0 to 4294967295. `place` is used in the message.
pub fn parse_tokens(place: &str, list: &str) -> Result<Vec<u32>, InputError> {
    if list.trim().is_empty() {
        return Ok(Vec::new());
    }
    list.split(',')
        .enumerate()
        .map(|(i, id)| {
            id.trim().parse().map_err(|_| {
                error(
                    place,
                    &format!("element {}, {:?}, is not a token id", i + 1, id.trim()),
                    "separate the ids by commas, such as 1,2,3",
                )
            })
        })
        .collect()
}

fn error(place: &str, problem: &str, fix: &str) -> InputError {
    InputError::Prompt { place: place.into(), problem: problem.into(), fix: fix.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { vocab_size: 100, max_seq_len: 10, kv_tokens: 1 << 40, max_new_tokens: 4 };

    fn one(tokens: &[u32], limits: &Limits) -> Result<Request, String> {
        let source = PromptSource::tokens("--prompt-tokens", tokens.to_vec());
        resolve(&[source], None, limits).map(|mut r| r.remove(0)).map_err(|e| {
            assert_eq!(e.exit_status(), 2);
            e.whole()
        })
    }

    #[test]
    fn new_tokens_are_clamped_to_the_room() {
        assert_eq!(one(&[1; 5], &LIMITS).unwrap().max_new_tokens, 4);
        assert_eq!(one(&[1; 7], &LIMITS).unwrap().max_new_tokens, 3);
        assert_eq!(one(&[1; 9], &LIMITS).unwrap().max_new_tokens, 1);
        let kv = Limits { kv_tokens: 8, ..LIMITS };
        assert_eq!(one(&[1; 5], &kv).unwrap().max_new_tokens, 3);
        assert_eq!((LIMITS.longest(), kv.longest()), (10, 8));
        let most = Limits { max_new_tokens: u32::MAX, max_seq_len: u32::MAX, ..LIMITS };
        assert!(one(&[1; 5], &most).unwrap_err().contains("one run"));
    }

    #[test]
    fn prompts_that_can_never_run_are_refused() {
        let message = one(&[1; 10], &LIMITS).unwrap_err();
        assert!(message.contains("max_seq_len = 10") && message.contains("never fit"), "{message}");
        let kv = Limits { kv_tokens: 8, ..LIMITS };
        assert!(
            one(&[1; 8], &kv)
                .unwrap_err()
                .contains("need more than the 8 tokens that runtime.kv_pages holds")
        );
        let short = Limits { max_seq_len: 1, ..LIMITS };
        assert!(one(&[1], &short).unwrap_err().contains("the prompt has 1 token, so it"));
        assert!(one(&[], &LIMITS).unwrap_err().contains("empty"));
        let message = one(&[0, 99, 100], &LIMITS).unwrap_err();
        assert!(message.contains("token 2 is 100") && message.contains("0 to 99"), "{message}");
        assert!(one(&[1], &Limits { max_new_tokens: 0, ..LIMITS }).is_err());
        assert!(resolve(&[], None, &LIMITS).unwrap_err().whole().contains("give at least one"));
        let text = [PromptSource::text("--prompt", "a")];
        let message = resolve(&text, None, &LIMITS).unwrap_err().whole();
        assert!(message.contains("tokenizer.json"), "{message}");
    }

    #[test]
    fn token_lists() {
        assert_eq!(parse_tokens("x", "1, 2,30").unwrap(), [1, 2, 30]);
        assert_eq!(parse_tokens("x", "").unwrap(), Vec::<u32>::new());
        for bad in ["1,,2", "a", "-1", "1.5", "4294967296", "1,2,"] {
            assert!(parse_tokens("x", bad).is_err(), "{bad}");
        }
    }
}

//! Converts text to token ids and back with a checkpoint's tokenizer.json and the tokens that other files add to it.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokenizers::DecoderWrapper;
use tokenizers::models::ModelWrapper;

use crate::model::error::InputError;
use added::Added;
use guard::{bounded, caught};

mod added;
#[cfg(test)]
mod added_test;
mod guard;
#[cfg(test)]
mod tests;
mod vocabulary;

/// Time limit for the tokenizers library to load a file, or to encode or decode a text. It handles about a megabyte per second.
const LONGEST_CALL: Duration = Duration::from_secs(60);
/// Number of characters of a text that a message quotes.
const QUOTED: usize = 40;

/// Texts up to this size are encoded directly if no regular expression can take exponential time, because starting a thread would take
/// longer.
const SHORT_TEXT: usize = 4096;

/// Number of ids that a [`TextStream`] decodes again at each step, before it drops older ones.
const LONGEST_WINDOW: usize = 16;
/// Number of ids that are kept as context when older ones are dropped.
const KEPT_CONTEXT: usize = 6;

/// A tokenizer.json, with the tokens that other files of the checkpoint add.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    path: PathBuf,
    tokenizer: Arc<tokenizers::Tokenizer>,
    special: Arc<HashSet<u32>>,
    byte_fallback: bool,
    /// The decoder only joins the bytes of tokens. So the text after a whole character decodes the same on its own.
    joins_bytes: bool,
    /// The decoder applies regular expressions, so decoding may take long.
    decodes_by_regex: bool,
    /// A regular expression repeats a group, so encoding even a short text may take forever.
    may_explode: bool,
}

impl Tokenizer {
    /// Reads `tokenizer.json` in `folder`, and the files there that add tokens to it; `None` if there is no tokenizer.json.
    ///
    /// # Errors
    /// The file is unreadable or not a tokenizer, or another file is unreadable or malformed.
    pub fn open(folder: &Path) -> Result<Option<Self>, InputError> {
        let path = folder.join("tokenizer.json");
        let Some(bytes) = crate::model::files::read_if_there(&path)? else { return Ok(None) };
        Self::parse_with(&path, &bytes, Added::read(folder)?).map(Some)
    }

    /// Reads the text of a tokenizer.json. `path` is used in messages.
    ///
    /// # Errors
    /// The text is not a tokenizer.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, InputError> {
        Self::parse_with(path, bytes, Added::default())
    }

    fn parse_with(path: &Path, bytes: &[u8], added: Added) -> Result<Self, InputError> {
        // To report a syntax error with its line and column.
        crate::model::json::parse_object(&path.display().to_string(), bytes)?;
        let (own_path, own_bytes) = (path.to_path_buf(), bytes.to_vec());
        let loaded = bounded(LONGEST_CALL, move || Self::load(own_path, &own_bytes, &added));
        loaded.and_then(|loaded| loaded).map_err(|problem| InputError::Tokenizer {
            path: path.into(),
            problem: format!("the tokenizers library (0.22) cannot read this file: {problem}"),
        })
    }

    fn load(path: PathBuf, bytes: &[u8], added: &Added) -> Result<Self, String> {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string())?;
        // The file may contain the truncation and padding of the last training run. `tokenizer(text)` uses neither.
        tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
        tokenizer.with_padding(None);
        // With dropout, each call would give other tokens, so every rank would run another prompt.
        if let ModelWrapper::BPE(model) = tokenizer.get_model()
            && model.dropout.is_some()
        {
            let mut model = model.clone();
            model.dropout = None;
            tokenizer.with_model(model);
            tracing::warn!("{}: ignoring `model.dropout`, which is for training only", path.display());
        }
        for warning in added.add_to(&mut tokenizer) {
            tracing::warn!("{warning}");
        }
        let special: HashSet<u32> = tokenizer
            .get_added_tokens_decoder()
            .iter()
            .filter_map(|(id, token)| token.special.then_some(*id))
            .collect();
        let special = Arc::new(special);
        let decoder = tokenizer.get_decoder().and_then(|decoder| serde_json::to_string(decoder).ok());
        let decoder_has = |word: &str| decoder.as_ref().is_some_and(|decoder| decoder.contains(word));
        let joins_bytes = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        let (byte_fallback, decodes_by_regex) = (decoder_has("\"ByteFallback\""), decoder_has("\"Regex\""));
        let may_explode =
            repeats_a_group(&serde_json::to_string(&tokenizer.get_pre_tokenizer()).unwrap_or_default())
                || repeats_a_group(&serde_json::to_string(&tokenizer.get_normalizer()).unwrap_or_default());
        Ok(Self {
            path,
            tokenizer: Arc::new(tokenizer),
            special,
            byte_fallback,
            joins_bytes,
            decodes_by_regex,
            may_explode,
        })
    }

    /// The ids of `text`, with the special tokens that the tokenizer adds by default (such as a leading begin-of-text)
    /// and without a chat template.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, InputError> {
        self.encode_with(text, true)
    }

    /// The ids of a text that a chat template rendered. It already contains its special tokens, so none are added.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, InputError> {
        self.encode_with(text, false)
    }

    fn encode_with(&self, text: &str, add_special: bool) -> Result<Vec<u32>, InputError> {
        let encoded = if self.may_explode || text.len() > SHORT_TEXT {
            let (tokenizer, own_text) = (Arc::clone(&self.tokenizer), text.to_string());
            bounded(LONGEST_CALL, move || tokenizer.encode_fast(own_text, add_special))
        } else {
            caught(|| self.tokenizer.encode_fast(text, add_special))
        };
        let encoded = encoded.and_then(|encoded| encoded.map_err(|e| e.to_string()));
        encoded.map(|encoding| encoding.get_ids().to_vec()).map_err(|problem| {
            let begin: String = text.chars().take(QUOTED).collect();
            let more = if begin.len() < text.len() { "..." } else { "" };
            self.error(format!("cannot encode {begin:?}{more}: {problem}"))
        })
    }

    /// The text of `ids` without special tokens. Ids that are not in the vocabulary have no text.
    ///
    /// # Errors
    /// The tokenizer cannot decode the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String, InputError> {
        let decoded = if self.decodes_by_regex {
            let (tokenizer, ids) = (Arc::clone(&self.tokenizer), ids.to_vec());
            bounded(LONGEST_CALL, move || tokenizer.decode(&ids, true))
        } else {
            // A thread for every token would cost more than the token itself.
            caught(|| self.tokenizer.decode(ids, true))
        };
        decoded
            .and_then(|decoded| decoded.map_err(|e| e.to_string()))
            .map_err(|problem| self.error(format!("cannot decode: {problem}")))
    }

    /// A decoder that takes one id at a time.
    pub fn stream(&self) -> TextStream {
        TextStream { tokenizer: self.clone(), window: Vec::new(), emitted: 0, all: Vec::new(), total: 0 }
    }

    fn error(&self, problem: String) -> InputError {
        InputError::Tokenizer { path: self.path.clone(), problem }
    }

    fn knows(&self, id: u32) -> bool {
        self.tokenizer.id_to_token(id).is_some()
    }

    /// True if `id` stands for a single byte that a `ByteFallback` decoder joins with its neighbours.
    fn is_byte(&self, id: u32) -> bool {
        self.byte_of_run(id).is_some()
    }
}

/// True if a regular expression in `json` repeats a group, as `(a+)+` does. Only such expressions can take exponential
/// time in the length of the text. If an expression only looks like one, the cost is a thread per text.
fn repeats_a_group(json: &str) -> bool {
    json.contains("\"Regex\"") && [")*", ")+", "){"].iter().any(|repeat| json.contains(repeat))
}

/// Decodes a growing sequence of ids into pieces of text.
///
/// The pieces, with the last one from [`TextStream::finish`], add up to [`Tokenizer::decode`] of all ids. No piece ends within a
/// character: text that the next id may still change is held back.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    /// The ids that are decoded together: some context, and those whose text has not been emitted completely.
    window: Vec<u32>,
    /// Bytes of the window's text that have been emitted.
    emitted: usize,
    all: Vec<u32>,
    /// Bytes emitted in total.
    total: usize,
}

impl TextStream {
    /// Adds the next id. Returns the text that has become final, which is often empty.
    ///
    /// To leave out the end-of-sequence token, do not pass it.
    ///
    /// # Errors
    /// The tokenizer cannot decode the ids.
    pub fn push(&mut self, id: u32) -> Result<String, InputError> {
        self.all.push(id);
        // Neither kind has text, so neither ends a run of byte tokens.
        if self.tokenizer.special.contains(&id) || !self.tokenizer.knows(id) {
            return Ok(String::new());
        }
        self.window.push(id);
        // A run of byte tokens is one unit: if the run as a whole is not UTF-8, no part of it is.
        if self.tokenizer.is_byte(id) {
            return Ok(String::new());
        }
        let text = self.tokenizer.decode(&self.window)?;
        // An incomplete character decodes as one U+FFFD at the end, until the rest of it arrives.
        let certain = text.strip_suffix('\u{FFFD}').unwrap_or(&text);
        let piece = certain.get(self.emitted..).unwrap_or("").to_string();
        self.emitted += piece.len();
        self.total += piece.len();
        if self.emitted == text.len() {
            if self.tokenizer.joins_bytes {
                self.window.clear();
                self.emitted = 0;
            } else if self.window.len() > LONGEST_WINDOW {
                self.shorten(&text)?;
            }
        }
        Ok(piece)
    }

    /// Ends the sequence. Returns the text that was held back.
    ///
    /// # Errors
    /// The tokenizer cannot decode the ids.
    pub fn finish(self) -> Result<String, InputError> {
        let text = self.tokenizer.decode(&self.all)?;
        Ok(text.get(self.total..).unwrap_or("").to_string())
    }

    /// Drops old ids from the window once its whole text is emitted, if the remaining ids decode to the end of `text`.
    fn shorten(&mut self, text: &str) -> Result<(), InputError> {
        let kept = &self.window[self.window.len() - KEPT_CONTEXT..];
        let kept_text = self.tokenizer.decode(kept)?;
        // A decoder may treat a sequence's first token differently, for example by dropping a leading space.
        if !kept_text.is_empty() && text.ends_with(&kept_text) && !self.tokenizer.is_byte(kept[0]) {
            self.window = kept.to_vec();
            self.emitted = kept_text.len();
        }
        Ok(())
    }
}

//! Tokens that a checkpoint adds to those of tokenizer.json: `added_tokens_decoder` and the named special tokens of
//! tokenizer_config.json, and in older checkpoints added_tokens.json and special_tokens_map.json.
//!
//! They are added as transformers adds them (`tokenization_utils_base.py` and `tokenization_utils_tokenizers.py` of 5.24): the
//! tokenizers library gives each new token the next free id, whatever id the file gives. An id that differs is worth a warning, because
//! the model then reads another row of its embedding than it was trained with.

use crate::model::error::InputError;
use crate::model::json::{self, Fields};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use tokenizers::AddedToken;

/// The names of special tokens, in the order in which transformers adds them.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The tokens of all files but tokenizer.json, and how the text of special tokens is encoded.
#[derive(Debug, Default)]
pub(super) struct Added {
    /// Those with an id, by ascending id.
    listed: Vec<Listed>,
    /// The named special tokens, which have no id. They are added unless they are there already.
    named: Vec<AddedToken>,
    /// Other special tokens without an id.
    extra: Vec<AddedToken>,
    /// tokenizer_config.json's `split_special_tokens`: in texts, special tokens are encoded like any other text.
    /// The path of that file, if it says so.
    split_special: Option<String>,
}

/// A token with the id that its file gives it.
#[derive(Debug)]
struct Listed {
    /// The file and the place in it.
    file: String,
    place: String,
    id: u32,
    token: AddedToken,
    /// tokenizer.json's flags of the same token count.
    yields: bool,
}

impl Added {
    /// Reads the files of `folder`.
    ///
    /// # Errors
    /// A file cannot be read or is not JSON, or a token is malformed.
    pub(super) fn read(folder: &Path) -> Result<Self, InputError> {
        let path = folder.join("tokenizer_config.json");
        let file = path.display().to_string();
        let config = json::object_if_there(&path)?.unwrap_or_default();
        let fields = Fields::new(&file, "", &config);
        let split_special = fields.bool("split_special_tokens")?.unwrap_or(false).then(|| file.clone());
        if fields.object("added_tokens_decoder")?.is_some() {
            // transformers does not read the older files then.
            let mut added = Self { listed: decoder(&file, &config)?, split_special, ..Self::default() };
            added.read_special(&[(file.as_str(), &config)])?;
            return Ok(added);
        }
        let map_path = folder.join("special_tokens_map.json");
        let map_file = map_path.display().to_string();
        let map = json::object_if_there(&map_path)?.unwrap_or_default();
        let mut added = Self { split_special, ..Self::default() };
        added.read_special(&[(map_file.as_str(), &map), (file.as_str(), &config)])?;
        added.listed = added.older(&folder.join("added_tokens.json"))?;
        Ok(added)
    }

    /// Reads special tokens. A name that several files have is taken from the first of them.
    fn read_special(&mut self, files: &[(&str, &Map<String, Value>)]) -> Result<(), InputError> {
        let first = |name: &str| {
            files
                .iter()
                .find_map(|&(file, map)| map.get(name).map(|value| (file, value)))
                .filter(|(_, v)| !v.is_null())
        };
        let names = files.iter().rev().flat_map(|(_, map)| map.keys());
        let others = names.filter(|name| name.ends_with("_token") && !NAMED.contains(&name.as_str()));
        let mut seen = HashSet::new();
        let names = NAMED.into_iter().chain(others.map(String::as_str)).filter(|&name| seen.insert(name));
        for name in names {
            match first(name) {
                // Other fields may have such a name, such as `add_bos_token`.
                Some((file, value)) if NAMED.contains(&name) || value.is_string() || value.is_object() => {
                    self.named.push(special(file, name, value, true)?);
                }
                _ => {}
            }
        }
        let extra = ["extra_special_tokens", "additional_special_tokens"];
        let given = extra.into_iter().find_map(|name| {
            let (file, value) = first(name)?;
            value.as_array().is_none_or(|list| !list.is_empty()).then_some((file, name, value))
        });
        let Some((file, name, value)) = given else { return Ok(()) };
        match value {
            Value::Array(list) => {
                for (index, value) in list.iter().enumerate() {
                    self.extra.push(special(file, &format!("{name}[{index}]"), value, false)?);
                }
            }
            Value::Object(map) => {
                for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
                    self.named.push(special(file, &format!("{name}.{key}"), value, true)?);
                }
            }
            other => {
                let problem = format!("expected a list of tokens, found {}", json::kind(other));
                return Err(InputError::field(file, name, problem));
            }
        }
        Ok(())
    }

    /// Reads added_tokens.json, which has only ids. Special are the tokens that are special by name.
    fn older(&self, path: &Path) -> Result<Vec<Listed>, InputError> {
        let file = path.display().to_string();
        let tokens = json::object_if_there(path)?.unwrap_or_default();
        let special: HashSet<&str> =
            self.named.iter().chain(&self.extra).map(|token| token.content.as_str()).collect();
        let mut listed = Vec::with_capacity(tokens.len());
        for (content, value) in &tokens {
            let Some(id) = value.as_u64().and_then(|id| u32::try_from(id).ok()) else {
                let problem = format!("expected a token id, found {}", json::kind(value));
                return Err(InputError::field(&file, content.as_str(), problem));
            };
            let token = AddedToken::from(content.as_str(), special.contains(content.as_str()));
            listed.push(Listed { file: file.clone(), place: content.clone(), id, token, yields: true });
        }
        listed.sort_by_key(|listed| listed.id);
        Ok(listed)
    }

    /// Adds the tokens to those of tokenizer.json. Returns a warning for each token whose id differs from that in its file, and one if
    /// special tokens are encoded like other text.
    pub(super) fn add_to(&self, tokenizer: &mut tokenizers::Tokenizer) -> Vec<String> {
        let there: HashMap<String, AddedToken> = tokenizer
            .get_added_tokens_decoder()
            .into_values()
            .map(|token| (token.content.clone(), token))
            .collect();
        let before: Vec<Option<u32>> =
            self.listed.iter().map(|listed| tokenizer.token_to_id(&listed.token.content)).collect();
        let named: HashSet<&str> = self.named.iter().map(|token| token.content.as_str()).collect();
        let mut tokens: Vec<AddedToken> = Vec::new();
        for Listed { token, yields, .. } in &self.listed {
            match there.get(&token.content) {
                Some(same) if *yields || same == token => {}
                // Also with other flags: these replace tokenizer.json's.
                _ => {
                    let special = token.special || named.contains(token.content.as_str());
                    tokens.push(AddedToken { special, ..token.clone() });
                }
            }
        }
        for token in self.named.iter().chain(&self.extra) {
            if !there.contains_key(&token.content)
                && tokens.iter().all(|other| other.content != token.content)
            {
                tokens.push(token.clone());
            }
        }
        if !tokens.is_empty() {
            tokenizer.add_tokens(&tokens);
        }
        tokenizer.set_encode_special_tokens(self.split_special.is_some());
        let split = self.split_special.iter().map(|file| {
            format!(
                "{file}: `split_special_tokens`: special tokens in texts are encoded like any other text, also those that the chat \
                 template writes; transformers does the same. Remove the field if the model was not trained so"
            )
        });
        let with_ids = self.listed.iter().zip(before);
        with_ids
            .filter_map(|(listed, before)| {
                let id = tokenizer.token_to_id(&listed.token.content)?;
                (id != listed.id).then(|| listed.warning(id, before.is_some()))
            })
            .chain(split)
            .collect()
    }
}

impl Listed {
    /// The warning for a token that has the id `found`. `there`: tokenizer.json has the token.
    fn warning(&self, found: u32, there: bool) -> String {
        let Self { file, place, id, token, .. } = self;
        let content = &token.content;
        let why = match there {
            true => "is that of tokenizer.json",
            false => "is the next free one, since tokenizer.json does not have the token",
        };
        format!(
            "{file}: `{place}`: the token {content:?} has id {id} here, but gets id {found}, which {why}; transformers does the same. Give \
             it in both files the id that the model was trained with"
        )
    }
}

/// The tokens of `added_tokens_decoder`, by ascending id.
fn decoder(file: &str, config: &Map<String, Value>) -> Result<Vec<Listed>, InputError> {
    let mut listed = Vec::new();
    for (key, value) in config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten() {
        let place = format!("added_tokens_decoder.{key}");
        let Ok(id) = key.parse::<u32>() else {
            return Err(InputError::field(file, place, "expected a token id as the key"));
        };
        let Value::Object(map) = value else {
            let problem = format!("expected an object with `content`, found {}", json::kind(value));
            return Err(InputError::field(file, place, problem));
        };
        let fields = Fields::new(file, &place, map);
        let special = fields.bool("special")?.unwrap_or(false);
        let token = token(&fields, special)?;
        listed.push(Listed { file: file.into(), place, id, token, yields: false });
    }
    listed.sort_by_key(|listed| listed.id);
    Ok(listed)
}

/// A special token: its text, or an object. An object in a list may say that it is not special.
fn special(file: &str, place: &str, value: &Value, named: bool) -> Result<AddedToken, InputError> {
    match value {
        Value::String(content) => Ok(AddedToken::from(content.as_str(), true)),
        Value::Object(map) => {
            let fields = Fields::new(file, place, map);
            let special = named || fields.bool("special")?.unwrap_or(true);
            token(&fields, special)
        }
        other => {
            let problem =
                format!("expected a token or an object with `content`, found {}", json::kind(other));
            Err(InputError::field(file, place, problem))
        }
    }
}

/// A token from its fields, with the library's defaults.
fn token(fields: &Fields<'_>, special: bool) -> Result<AddedToken, InputError> {
    let Some(content) = fields.str("content")? else { return Err(fields.error("content", "missing")) };
    let flag = |name: &str, default: bool| Ok::<bool, InputError>(fields.bool(name)?.unwrap_or(default));
    Ok(AddedToken {
        content: content.into(),
        single_word: flag("single_word", false)?,
        lstrip: flag("lstrip", false)?,
        rstrip: flag("rstrip", false)?,
        // Special tokens are not normalized by default.
        normalized: flag("normalized", !special)?,
        special,
    })
}

//! A checkpoint's chat template: messages to the text that the model was trained on.
//!
//! The template is the checkpoint's own (`chat_template.jinja`, or `chat_template` in `tokenizer_config.json`),
//! written in Jinja for Python. It is rendered as Hugging Face transformers renders it: the same white-space rules,
//! the same extra functions, and Python's way to print values and JSON.
//!
//! ```
//! use launch::model::chat_template::{ChatTemplate, Rendering};
//! use serde_json::json;
//!
//! # fn main() -> Result<(), launch::model::error::InputError> {
//! let template = ChatTemplate::parse(
//!     "chat_template.jinja".as_ref(),
//!     "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
//! )?;
//! let messages = [json!({"role": "user", "content": "Hello"})];
//! assert_eq!(template.render(&messages, &Rendering::default())?, "<user>Hello<assistant>");
//! # Ok(())
//! # }
//! ```

mod files;
mod python;
mod tags;
#[cfg(test)]
mod tests;

use crate::model::error::InputError;
use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Rest;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Deserialize;
use serde_json::{Map, Value as Json};

use std::path::{Path, PathBuf};

/// Name of the template inside its environment; no extension, so that nothing is escaped.
const NAME: &str = "chat";
/// Steps after which a rendering is given up: no template needs as many, and a loop without end reaches it in seconds.
const MOST_STEPS: u64 = 20_000_000;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and so on, as the tokenizer's configuration has them.
    special_tokens: Map<String, Json>,
}

/// What a rendering is given besides the messages.
#[derive(Debug, Clone)]
pub struct Rendering {
    /// End with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Descriptions of tools that the model may call; `None` where there are none.
    pub tools: Option<Json>,
    /// The template's own arguments, such as `enable_thinking`.
    pub arguments: Map<String, Json>,
    /// The time that `strftime_now` tells; `None` for the clock's.
    pub now: Option<Zoned>,
}

impl Default for Rendering {
    fn default() -> Self {
        Rendering { add_generation_prompt: true, tools: None, arguments: Map::new(), now: None }
    }
}

impl ChatTemplate {
    /// The chat template of the checkpoint in `folder`; `None` where it has none. Where there are several, `default`
    /// is taken.
    ///
    /// # Errors
    /// A file that is unreadable or not valid.
    pub fn open(folder: &Path) -> Result<Option<Self>, InputError> {
        let Some(found) = files::find(folder)? else { return Ok(None) };
        let mut template = Self::parse(&found.path, &found.text)?;
        template.special_tokens = found.special_tokens;
        Ok(Some(template))
    }

    /// Compiles `text`; `path` is for messages.
    ///
    /// # Errors
    /// The text is not a template.
    pub fn parse(path: &Path, text: &str) -> Result<Self, InputError> {
        let mut environment = Environment::new();
        environment.set_syntax(white_space_of_transformers());
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_fuel(Some(MOST_STEPS));
        environment.set_formatter(|out, _, value| {
            if value.is_undefined() {
                return Ok(());
            }
            write!(out, "{}", python::text(value)).map_err(Error::from)
        });
        environment.add_filter("tojson", python::to_json);
        environment.add_filter("string", |value: Value| python::text(&value));
        // Python cannot iterate over None.
        environment.add_test("iterable", |value: Value| !value.is_none() && value.try_iter().is_ok());
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        // Jinja reads every line end as this one.
        let template = tags::adapted(&text.replace("\r\n", "\n"));
        environment.add_template_owned(NAME, template).map_err(|e| {
            InputError::chat_template(path, format!("not a template that can be read: {}", describe(&e)))
        })?;
        Ok(Self { path: path.into(), environment, special_tokens: Map::new() })
    }

    /// The text for `messages`, each an object with `role` and `content` as OpenAI's API has them.
    ///
    /// # Errors
    /// The template refuses the messages (with its own words), or fails.
    pub fn render(&self, messages: &[Json], rendering: &Rendering) -> Result<String, InputError> {
        let mut context = self.special_tokens.clone();
        context.insert("messages".into(), Json::Array(messages.to_vec()));
        context.insert("tools".into(), rendering.tools.clone().unwrap_or(Json::Null));
        context.insert("documents".into(), Json::Null);
        context.insert("add_generation_prompt".into(), Json::Bool(rendering.add_generation_prompt));
        context.extend(rendering.arguments.clone());
        let now = rendering.now.clone().unwrap_or_else(Zoned::now);
        let mut environment = self.environment.clone();
        environment.add_function("strftime_now", move |format: String, _: Rest<Value>| {
            jiff::fmt::strtime::format(format.as_bytes(), &now)
                .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
        });
        let rendered = Value::deserialize(Json::Object(context))
            .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
            .and_then(|context| environment.get_template(NAME)?.render(context));
        rendered.map_err(|e| {
            InputError::chat_template(
                &self.path,
                format!("the messages cannot be rendered: {}", describe(&e)),
            )
        })
    }
}

/// A line that holds only a block leaves nothing behind.
fn white_space_of_transformers() -> SyntaxConfig {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default()
}

/// The error's own words and its line.
fn describe(error: &Error) -> String {
    let what = match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_string(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}

//! A checkpoint's chat template. It turns messages into the text format that the model was trained on.
//!
//! The template is the checkpoint's own (`chat_template.jinja`, or `chat_template` in `tokenizer_config.json`), written in
//! Jinja for Python. It is rendered as Hugging Face transformers renders it: with the same white-space rules, the same extra
//! functions, and Python's formatting of values and JSON.
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

mod content;
#[cfg(test)]
mod content_test;
mod files;
mod filters;
pub mod limit;
mod methods;
mod python;
mod tags;
#[cfg(test)]
mod tests;

use crate::model::error::InputError;
use content::Forms;
use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Rest;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde::Deserialize;
use serde_json::{Map, Value as Json};

use std::path::{Path, PathBuf};

/// The template's name in its environment. It has no extension, so nothing is escaped.
const NAME: &str = "chat";
/// Maximum number of steps of a rendering. No template needs as many, and an endless loop reaches it within seconds.
const MOST_STEPS: u64 = 20_000_000;

/// The same for a conversation of three messages, with which the template is probed. It needs a few thousand.
const MOST_STEPS_OF_PROBE: u64 = 200_000;

/// Names that a rendering sets itself.
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// True if a template's own argument cannot have this name.
pub fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name)
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and so on, from the tokenizer's configuration.
    special_tokens: Map<String, Json>,
    /// What it expects as a message's content.
    forms: Forms,
}

/// The inputs of a rendering besides the messages.
#[derive(Debug, Clone)]
pub struct Rendering {
    /// End with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Descriptions of tools that the model may call, if any.
    pub tools: Option<Json>,
    /// The template's own arguments, such as `enable_thinking`.
    pub arguments: Map<String, Json>,
    /// The time for `strftime_now`; `None` uses the clock.
    pub now: Option<Zoned>,
}

impl Default for Rendering {
    fn default() -> Self {
        Rendering { add_generation_prompt: true, tools: None, arguments: Map::new(), now: None }
    }
}

impl ChatTemplate {
    /// The chat template of the checkpoint in `folder`; `None` if it has none. If there are several, the one named `default`
    /// is used.
    ///
    /// # Errors
    /// A file cannot be read or is invalid.
    pub fn open(folder: &Path) -> Result<Option<Self>, InputError> {
        let Some(found) = files::find(folder)? else { return Ok(None) };
        Self::compile(&found.path, &found.text, found.special_tokens).map(Some)
    }

    /// Compiles `text`. `path` is used in messages.
    ///
    /// # Errors
    /// The text is not a valid template.
    pub fn parse(path: &Path, text: &str) -> Result<Self, InputError> {
        Self::compile(path, text, Map::new())
    }

    fn compile(path: &Path, text: &str, special_tokens: Map<String, Json>) -> Result<Self, InputError> {
        let mut environment = Environment::new();
        environment.set_syntax(white_space_of_transformers());
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(methods::call);
        environment.set_formatter(|out, _, value| {
            if value.is_undefined() {
                return Ok(());
            }
            write!(out, "{}", python::text(value)).map_err(Error::from)
        });
        filters::add(&mut environment);
        // Python cannot iterate over None.
        environment.add_test("iterable", |value: Value| !value.is_none() && value.try_iter().is_ok());
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        // Jinja treats every line end as `\n`.
        let template = tags::adapted(&text.replace("\r\n", "\n"));
        environment.add_template_owned(NAME, template).map_err(|e| {
            InputError::chat_template(path, format!("not a valid chat template: {}", describe(&e)))
        })?;
        let mut template = Self { path: path.into(), environment, special_tokens, forms: Forms::default() };
        template.forms = Forms::of(&|messages| {
            let limited = limit::Limited::begin();
            let text =
                template.render_as_given(&limited, messages, &Rendering::default(), MOST_STEPS_OF_PROBE);
            text.unwrap_or_default()
        });
        Ok(template)
    }

    /// The text for `messages`, each an object with `role` and `content` as OpenAI's API has them. Content is text or a list
    /// of text parts. The template gets it in the form that it expects.
    ///
    /// # Errors
    /// The template refuses the messages, with its own message, or fails.
    pub fn render(&self, messages: &[Json], rendering: &Rendering) -> Result<String, InputError> {
        let limited = limit::Limited::begin();
        let mut messages = messages.to_vec();
        messages.iter_mut().for_each(|message| self.forms.adapt(message));
        self.render_as_given(&limited, messages, rendering, MOST_STEPS)
    }

    /// The text for `messages` as they are, after at most `steps` steps.
    fn render_as_given(
        &self,
        limited: &limit::Limited,
        messages: Vec<Json>,
        rendering: &Rendering,
        steps: u64,
    ) -> Result<String, InputError> {
        let mut context = self.special_tokens.clone();
        context.insert("messages".into(), Json::Array(messages));
        context.insert("tools".into(), rendering.tools.clone().unwrap_or(Json::Null));
        context.insert("documents".into(), Json::Null);
        context.insert("add_generation_prompt".into(), Json::Bool(rendering.add_generation_prompt));
        context.extend(rendering.arguments.clone());
        let now = rendering.now.clone().unwrap_or_else(Zoned::now);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(steps));
        environment.add_function("strftime_now", move |format: String, _: Rest<Value>| {
            jiff::fmt::strtime::format(format.as_bytes(), &now)
                .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
        });
        let rendered = Value::deserialize(Json::Object(context))
            .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
            .and_then(|context| {
                limited.limit();
                environment.get_template(NAME)?.render(context)
            });
        rendered.map_err(|e| {
            InputError::chat_template(
                &self.path,
                format!("the messages cannot be rendered: {}", describe(&e)),
            )
        })
    }
}

/// As in transformers, a line with only a block produces no output.
fn white_space_of_transformers() -> SyntaxConfig {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default()
}

/// The error's own message and its line.
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

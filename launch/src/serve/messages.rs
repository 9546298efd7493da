//! Checks the messages of a chat and converts them to what chat templates expect.

use super::error::ApiError;
use super::fields::{Fields, wrong};
use super::prompts::of_input;
use super::state::Loaded;
use crate::model::chat_template::{self, Rendering};
use crate::model::prompts::Prompt;
use serde_json::{Map, Value, json};

/// The inputs of a chat template.
pub struct Conversation {
    messages: Vec<Value>,
    rendering: Rendering,
}

/// What an assistant's message may have instead of content, as in OpenAI's API.
const INSTEAD_OF_CONTENT: [&str; 3] = ["tool_calls", "function_call", "refusal"];

/// Fields of a message that are text.
const TEXTS: [&str; 3] = ["name", "tool_call_id", "refusal"];

impl Conversation {
    /// Reads `messages`, `tools`, `chat_template_kwargs`, `reasoning_effort` and `add_generation_prompt`.
    ///
    /// # Errors
    /// A field is wrong, or holds content other than text.
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let messages = match fields.take("messages") {
            None => return Err(ApiError::field("messages", "`messages` is missing")),
            Some(Value::Array(list)) if !list.is_empty() => list,
            Some(other) => return Err(wrong("messages", "a list of at least one message", &other)),
        };
        let messages = messages.into_iter().enumerate().map(|(i, message)| self::message(i, message));
        let messages = messages.collect::<Result<Vec<Value>, _>>()?;
        let mut arguments = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(name) = arguments.keys().find(|name| chat_template::is_reserved(name)) {
            let param = format!("chat_template_kwargs.{name}");
            return Err(ApiError::field(param, format!("`{name}` is a field of the request itself")));
        }
        if let Some(effort) = fields.text("reasoning_effort")? {
            arguments.entry("reasoning_effort").or_insert(Value::String(effort));
        }
        let tools = match fields.take("tools") {
            None => None,
            Some(Value::Array(list)) if list.is_empty() => None,
            Some(Value::Array(list)) => Some(Value::Array(tools(list)?)),
            Some(other) => return Err(wrong("tools", "a list of tools", &other)),
        };
        let add_generation_prompt = fields.optional_flag("add_generation_prompt")?.unwrap_or(true);
        let rendering = Rendering { add_generation_prompt, tools, arguments, now: None };
        Ok(Conversation { messages, rendering })
    }

    /// Renders the prompt with the checkpoint's chat template. A template writes its special tokens itself. With `add_special_tokens`,
    /// the prompt also gets those that the tokenizer adds to a text.
    ///
    /// # Errors
    /// There is no template, or it refuses the messages.
    pub fn render(&self, loaded: &Loaded, add_special_tokens: bool) -> Result<Prompt, ApiError> {
        let template = loaded.template.as_ref().ok_or_else(|| {
            let message = "the model has no chat template; use /v1/completions";
            ApiError::field("messages", message)
        })?;
        let text = template.render(&self.messages, &self.rendering);
        let text = text.map_err(|error| of_input("messages", &error))?;
        Ok(if add_special_tokens { Prompt::Text(text) } else { Prompt::Rendered(text) })
    }
}

fn message(i: usize, message: Value) -> Result<Value, ApiError> {
    let place = format!("messages[{i}]");
    let mut message = match message {
        Value::Object(message) => message,
        other => return Err(wrong(&place, "an object with `role` and `content`", &other)),
    };
    let role = match message.get("role") {
        Some(Value::String(role)) if !role.is_empty() => role,
        other => {
            let found = other.unwrap_or(&Value::Null);
            return Err(wrong(&format!("{place}.role"), "a string such as \"user\"", found));
        }
    };
    let given = |name: &&str| message.get(*name).is_some_and(|value| !value.is_null() && *value != json!([]));
    let is_assistant = role == "assistant";
    let needs_content = !is_assistant || !INSTEAD_OF_CONTENT.iter().any(given);
    // A function's result may be null.
    let needs_value = needs_content && role != "function";
    for name in TEXTS {
        if let Some(value) = message.get(name).filter(|value| !value.is_null() && !value.is_string()) {
            return Err(wrong(&format!("{place}.{name}"), "a string", value));
        }
    }
    match message.get_mut("content") {
        None if needs_content => {
            let place = format!("{place}.content");
            let message = format!("`{place}` is missing");
            return Err(ApiError::field(place, message));
        }
        None | Some(Value::String(_)) => {}
        Some(Value::Null) if !needs_value => {}
        Some(content) => {
            let parts = match content {
                Value::Array(parts) => texts(&place, parts, is_assistant)?,
                other => {
                    return Err(wrong(
                        &format!("{place}.content"),
                        "a string or a list of text parts",
                        other,
                    ));
                }
            };
            *content = Value::Array(parts);
        }
    }
    if let Some(calls) = message.get_mut("tool_calls").filter(|calls| !calls.is_null()) {
        let Value::Array(calls) = calls else {
            return Err(wrong(&format!("{place}.tool_calls"), "a list", calls));
        };
        for (k, call) in calls.iter_mut().enumerate() {
            if !call.is_object() {
                return Err(wrong(&format!("{place}.tool_calls[{k}]"), "an object", call));
            }
            open_arguments(call);
        }
    }
    Ok(Value::Object(message))
}

/// `parts` as parts of type `text` without other fields. `ChatTemplate::render` joins them for templates that expect text. Only an
/// assistant's message has refusals.
fn texts(place: &str, parts: &[Value], is_assistant: bool) -> Result<Vec<Value>, ApiError> {
    let text = |(k, part): (usize, &Value)| -> Result<Value, ApiError> {
        let place = format!("{place}.content[{k}]");
        let field = match &part["type"] {
            _ if !part.is_object() => return Err(wrong(&place, "an object with `type` and `text`", part)),
            Value::Null => "text",
            Value::String(kind) if kind == "text" => "text",
            Value::String(kind) if kind == "refusal" && is_assistant => "refusal",
            Value::String(kind) => {
                let message =
                    format!("`{place}`: content of type {kind:?} is not supported; only text is supported");
                return Err(ApiError::unsupported(place, message));
            }
            other => return Err(wrong(&format!("{place}.type"), "a string such as \"text\"", other)),
        };
        match &part[field] {
            Value::String(text) => Ok(json!({"type": "text", "text": text})),
            other => Err(wrong(&format!("{place}.{field}"), "a string", other)),
        }
    };
    parts.iter().enumerate().map(text).collect()
}

/// Clients send a call's arguments as JSON text, but templates expect the object.
fn open_arguments(call: &mut Value) {
    let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
    if let Some(arguments) = arguments
        && let Some(opened) = arguments.as_str().and_then(|text| serde_json::from_str::<Map<_, _>>(text).ok())
    {
        *arguments = Value::Object(opened);
    }
}

fn tools(list: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    for (i, tool) in list.iter().enumerate() {
        if !tool.is_object() {
            return Err(wrong(&format!("tools[{i}]"), "an object", tool));
        }
        if tool["type"] != "function" || !tool["function"]["name"].is_string() {
            let message =
                format!("`tools[{i}]` must be {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}");
            return Err(ApiError::field(format!("tools[{i}]"), message));
        }
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use crate::model::chat_template::ChatTemplate;

    fn read(value: Value) -> Result<Conversation, ApiError> {
        let Value::Object(object) = value else { panic!("an object") };
        Conversation::read(&mut Fields(object))
    }

    #[test]
    fn parts_are_texts_and_arguments_objects() {
        let conversation = read(json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}, {"text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls":
                [{"function": {"name": "f", "arguments": "{\"x\": 1}"}}, {"function": {"arguments": "not JSON"}}]},
        ]}))
        .unwrap();
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(conversation.messages[0]["content"], parts);
        assert_eq!(conversation.messages[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(conversation.messages[1]["tool_calls"][1]["function"]["arguments"], "not JSON");
    }

    fn loaded(template: &str) -> Loaded {
        let template = ChatTemplate::parse("chat_template.jinja".as_ref(), template).unwrap();
        Loaded { template: Some(template), ..testing::loaded() }
    }

    #[test]
    fn the_tokenizer_adds_special_tokens_only_if_asked() {
        let loaded = loaded("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
        let conversation = read(json!({"messages": [{"role": "user", "content": "x"}]})).unwrap();
        let text = "<user>x".to_string();
        assert_eq!(conversation.render(&loaded, false), Ok(Prompt::Rendered(text.clone())));
        assert_eq!(conversation.render(&loaded, true), Ok(Prompt::Text(text)));
    }

    #[test]
    fn a_template_gets_content_in_the_form_that_it_expects() {
        let of_text = loaded("{% for m in messages %}{{ m.content }}{% endfor %}");
        let of_parts =
            loaded("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}");
        for (content, as_text, as_parts) in [
            (json!("the fox"), "the fox", "[the fox]"),
            (json!([{"type": "text", "text": "the"}, {"text": " fox"}]), "the\n fox", "[the][ fox]"),
            (json!([]), "", ""),
        ] {
            let conversation = read(json!({"messages": [{"role": "user", "content": content}]})).unwrap();
            for (loaded, wanted) in [(&of_text, as_text), (&of_parts, as_parts)] {
                assert_eq!(conversation.render(loaded, false), Ok(Prompt::Rendered(wanted.into())));
            }
        }
    }

    #[test]
    fn a_refusal_is_text_of_the_assistant() {
        let message = |role: &str| {
            let parts = json!([{"type": "refusal", "refusal": "No."}, {"text": "Sorry."}]);
            json!({"messages": [{"role": role, "content": parts}]})
        };
        let parts = json!([{"type": "text", "text": "No."}, {"type": "text", "text": "Sorry."}]);
        assert_eq!(read(message("assistant")).unwrap().messages[0]["content"], parts);
        let error = read(message("user")).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("messages[0].content[0]"));
    }

    #[test]
    fn the_effort_is_an_argument_of_the_template() {
        let effort = |mut value: Value| {
            value["messages"] = json!([{"role": "any role", "content": "x"}]);
            read(value).map(|conversation| conversation.rendering.arguments.get("reasoning_effort").cloned())
        };
        assert_eq!(effort(json!({})), Ok(None));
        assert_eq!(effort(json!({"reasoning_effort": "low"})), Ok(Some(json!("low"))));
        let both = json!({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}});
        assert_eq!(effort(both), Ok(Some(json!("high"))));
        let error = effort(json!({"reasoning_effort": 5})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("reasoning_effort"));
    }

    /// As in OpenAI's API: only an assistant's message may lack content, and only if it says something else.
    #[test]
    fn content_is_required() {
        let read = |message: Value| read(json!({"messages": [message]}));
        let with = |mut message: Value, content: Value| {
            message["content"] = content;
            message
        };
        for role in ["system", "developer", "user", "assistant", "tool", "function"] {
            let message = json!({"role": role, "tool_call_id": "1", "name": "f"});
            let error = read(message.clone()).err().unwrap();
            assert_eq!(error.param.as_deref(), Some("messages[0].content"), "{role}");
            assert!(error.message.ends_with("is missing"), "{role}: {}", error.message);
            let null = read(with(message.clone(), Value::Null));
            match role {
                "function" => assert!(null.is_ok()),
                _ => assert_eq!(null.err().unwrap().param.as_deref(), Some("messages[0].content"), "{role}"),
            }
            assert!(read(with(message, json!(""))).is_ok(), "{role}");
        }
        for (name, value) in [
            ("tool_calls", json!([{"type": "function", "function": {"name": "f", "arguments": "{}"}}])),
            ("function_call", json!({"name": "f", "arguments": "{}"})),
            ("refusal", json!("no")),
        ] {
            for (role, accepted) in [("assistant", true), ("user", false)] {
                let message = json!({"role": role, name: value});
                assert_eq!(read(message.clone()).is_ok(), accepted, "{role}, {name}");
                assert_eq!(read(with(message, Value::Null)).is_ok(), accepted, "{role}, {name}");
            }
        }
        assert!(read(json!({"role": "assistant", "content": null, "tool_calls": []})).is_err());
        assert!(read(json!({"role": "assistant", "content": null, "tool_calls": null})).is_err());
    }

    #[test]
    fn wrong_messages_name_their_place() {
        for (value, param) in [
            (json!({}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": "hello"}), "messages"),
            (json!({"messages": ["hello"]}), "messages[0]"),
            (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "", "content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
            (json!({"messages": [{"role": "user", "content": "x", "name": 5}]}), "messages[0].name"),
            (json!({"messages": [{"role": "user", "content": ["x"]}]}), "messages[0].content[0]"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": 5, "text": "x"}]}]}),
                "messages[0].content[0].type",
            ),
            (
                json!({"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}]}),
                "messages[0].content[0].refusal",
            ),
            (
                json!({"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}, "f"]}]}),
                "messages[0].tool_calls[1]",
            ),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
                "messages[0].content[0].text",
            ),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
                "messages[0].content[0]",
            ),
            (json!({"messages": [{"role": "user", "content": "x"}], "tools": 1}), "tools"),
            (json!({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "x"}]}), "tools[0]"),
            (
                json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}),
                "chat_template_kwargs.messages",
            ),
        ] {
            let error = read(value).err().unwrap();
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        }
    }
}

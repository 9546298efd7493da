//! The form of a message's content: text, or a list of parts.
//!
//! Some templates print the content, some go through its parts, and some do either. A template shows nothing of a form that it does not
//! know, and raises no error. So a template is probed when it is loaded: it renders text of a known wording in both forms.

use serde_json::{Value, json};

/// Renders a conversation; empty if the template refuses it.
type Render<'a> = &'a dyn Fn(Vec<Value>) -> String;

/// Texts that no template contains.
const FIRST: &str = "Qvdzk1first";
const SECOND: &str = "Qvdzk2second";
/// It is in a part, but is not its text. A template that prints it prints the list as a whole.
const BESIDE: &str = "Qvdzk3beside";
/// The roles that are probed after the user's. A role that shows neither form gets the user's.
const OTHER_ROLES: [&str; 5] = ["system", "developer", "assistant", "tool", "function"];

/// The content that a template expects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Form {
    /// Text. Parts are joined, one per line.
    #[default]
    Text,
    /// Parts. Text becomes one part.
    Parts,
    /// Parts, of which the template prints only the first. So all text becomes one part.
    OnePart,
    /// Text or parts, as the client gave it.
    Either,
}

/// The form of each probed role.
#[derive(Debug, Default)]
pub struct Forms(Vec<(&'static str, Form)>);

impl Forms {
    /// Probes a template. One that refuses all probes gets text.
    pub fn of(render: Render<'_>) -> Self {
        let after_system = |content: &Value| {
            vec![json!({"role": "system", "content": "s"}), json!({"role": "user", "content": content})]
        };
        let user = form(render, |content| vec![json!({"role": "user", "content": content})])
            .or_else(|| form(render, after_system));
        let Some(user) = user else { return Forms::default() };
        let mut forms = vec![("user", user)];
        for role in OTHER_ROLES {
            if let Some(form) = form(render, |content| conversation(role, content, user)) {
                forms.push((role, form));
            }
        }
        Forms(forms)
    }

    /// Gives the content of `message` the form that the template expects.
    pub fn adapt(&self, message: &mut Value) {
        let form = self.form(message["role"].as_str());
        let Some(content) = message.get_mut("content") else { return };
        let adapted = match (form, &*content) {
            (Form::Parts | Form::OnePart, Value::String(text)) => Some(one_part(text)),
            (Form::Text, Value::Array(parts)) => joined(parts).map(Value::String),
            (Form::OnePart, Value::Array(parts)) => joined(parts).map(|text| one_part(&text)),
            _ => None,
        };
        if let Some(adapted) = adapted {
            *content = adapted;
        }
    }

    pub(super) fn form(&self, role: Option<&str>) -> Form {
        let known = |role: &str| self.0.iter().find(|(name, _)| *name == role).map(|(_, form)| *form);
        role.and_then(known).or_else(|| known("user")).unwrap_or_default()
    }
}

fn one_part(text: &str) -> Value {
    json!([{"type": "text", "text": text}])
}

/// The texts of `parts`, one per line; `None` if a part is not text.
fn joined(parts: &[Value]) -> Option<String> {
    let text = |part: &Value| {
        let is_text = part.get("type").is_none_or(|kind| kind == "text");
        part.get("text").filter(|_| is_text).and_then(Value::as_str).map(String::from)
    };
    let texts = parts.iter().map(text).collect::<Option<Vec<String>>>()?;
    Some(texts.join("\n"))
}

/// A conversation with `content` in the message of `role`. Some templates accept a role only in its usual place.
fn conversation(role: &str, content: &Value, user: Form) -> Vec<Value> {
    let question = match user {
        Form::Text | Form::Either => json!("q"),
        Form::Parts | Form::OnePart => one_part("q"),
    };
    let question = json!({"role": "user", "content": question});
    // Some templates check that an id has nine characters.
    let call = json!({"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}});
    let result = json!({"role": role, "name": "f", "tool_call_id": "call00000", "content": content});
    let message = json!({"role": role, "content": content});
    match role {
        "assistant" => vec![question.clone(), message, question],
        "tool" | "function" => {
            vec![question, json!({"role": "assistant", "content": "", "tool_calls": [call]}), result]
        }
        _ => vec![message, question],
    }
}

/// The form that the template shows in `conversation`; `None` if it shows neither.
fn form(render: Render<'_>, conversation: impl Fn(&Value) -> Vec<Value>) -> Option<Form> {
    let shows_text = render(conversation(&json!(FIRST))).contains(FIRST);
    let of_parts = render(conversation(&json!([
        {"type": "text", "text": FIRST, "beside": BESIDE},
        {"type": "text", "text": SECOND, "beside": BESIDE},
    ])));
    let shows_first = of_parts.contains(FIRST) && !of_parts.contains(BESIDE);
    let shows_all = shows_first && of_parts.contains(SECOND);
    match (shows_text, shows_first, shows_all) {
        (true, _, true) => Some(Form::Either),
        (true, _, false) => Some(Form::Text),
        (false, _, true) => Some(Form::Parts),
        (false, true, false) => Some(Form::OnePart),
        (false, false, false) => None,
    }
}

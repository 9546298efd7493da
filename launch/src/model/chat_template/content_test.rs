use super::content::Form;
use super::{ChatTemplate, Rendering};
use serde_json::{Value, json};
use std::path::Path;

/// `template` applied to messages of the user, each with one of `contents`.
fn rendered(template: &str, contents: &[Value]) -> String {
    let template = ChatTemplate::parse(Path::new("a test"), template).unwrap();
    let messages: Vec<Value> =
        contents.iter().map(|content| json!({"role": "user", "content": content})).collect();
    template.render(&messages, &Rendering::default()).unwrap()
}

fn contents() -> [Value; 2] {
    [json!("the fox"), json!([{"type": "text", "text": "the"}, {"type": "text", "text": " fox"}])]
}

/// vLLM renders these texts.
#[test]
fn text_is_shown_in_the_form_that_the_template_expects() {
    let each = |body: &str| format!("{{% for m in messages %}}{{{{ m.role }}}}:{body};{{% endfor %}}");
    let loops = "{% for p in m.content %}{{ p.text }}{% endfor %}";
    let of_type =
        "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}";
    let either =
        format!("{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}<{loops}>{{% endif %}}");
    for (body, wanted) in [
        (loops, "user:the fox;user:the fox;"),
        (of_type, "user:the fox;user:the fox;"),
        (either.as_str(), "user:the fox;user:<the fox>;"),
        ("{{ m.content }}", "user:the fox;user:the\n fox;"),
        ("{{ 'x' + m.content }}", "user:xthe fox;user:xthe\n fox;"),
        ("{{ m.content | tojson }}", "user:\"the fox\";user:\"the\\n fox\";"),
        ("{{ m.content[0].text }}", "user:the fox;user:the\n fox;"),
        ("-", "user:-;user:-;"),
    ] {
        assert_eq!(rendered(&each(body), &contents()), wanted, "{body}");
    }
}

#[test]
fn each_role_has_its_own_form() {
    let template = "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}\
         {% else %}{{ m.content }}{% endif %}|{% endfor %}";
    let template = ChatTemplate::parse(Path::new("a test"), template).unwrap();
    let messages: Vec<Value> = ["system", "user", "assistant", "tool", "some role"]
        .iter()
        .flat_map(|role| contents().map(|content| json!({"role": role, "content": content})))
        .collect();
    let text = template.render(&messages[..8], &Rendering::default()).unwrap();
    let printed = "the fox|the\n fox|";
    assert_eq!(text, format!("{printed}the fox|the fox|{printed}{printed}"));
    assert_eq!(template.forms.form(Some("some role")), Form::Parts);
}

#[test]
fn a_template_may_refuse_probes() {
    let loops = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}";
    let needs_system =
        format!("{{% if messages[0].role != 'system' %}}{{{{ raise_exception('no') }}}}{{% endif %}}{loops}");
    let template = ChatTemplate::parse(Path::new("a test"), &needs_system).unwrap();
    let messages = [json!({"role": "system", "content": "a"}), json!({"role": "user", "content": "b"})];
    assert_eq!(template.render(&messages, &Rendering::default()).unwrap(), "ab");

    let refuses =
        "{% if messages|length < 4 %}{{ raise_exception('no') }}{% endif %}{{ messages[3].content }}";
    let message = json!({"role": "user", "content": contents()[1]});
    let template = ChatTemplate::parse(Path::new("a test"), refuses).unwrap();
    let messages = vec![message; 4];
    assert_eq!(template.render(&messages, &Rendering::default()).unwrap(), "the\n fox");
}

#[test]
fn other_content_stays_as_it_is() {
    let template = ChatTemplate::parse(Path::new("a test"), "{{ messages[0].content }}").unwrap();
    for content in [json!(null), json!(5), json!([{"type": "image"}]), json!(["a"])] {
        let mut message = json!({"role": "user", "content": content});
        template.forms.adapt(&mut message);
        assert_eq!(message["content"], content);
    }
    let mut message = json!({"role": "user"});
    template.forms.adapt(&mut message);
    assert_eq!(message, json!({"role": "user"}));
}

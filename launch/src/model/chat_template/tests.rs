use super::*;
use serde_json::json;

/// Written by launch/testdata/chat/make.py with transformers.
const EXPECTED: &str = include_str!("../../../testdata/chat/expected.json");

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/chat")
}

/// What `{{ expression }}` prints.
pub fn printed(expression: &str) -> Result<String, String> {
    let template = ChatTemplate::parse(Path::new("a test"), &format!("{{{{ {expression} }}}}"));
    template
        .and_then(|template| template.render(&[], &Rendering::default()))
        .map_err(|error| error.to_string())
}

/// The results of all cases: those where both give the same text, those where both refuse, and the others.
struct Comparison {
    texts: usize,
    refusals: usize,
    /// Rendered by us although Python fails, for example because of a loop over None.
    lenient: Vec<String>,
    differences: Vec<String>,
}

/// Renders every case of `expected`. `text_of` returns a template's text.
fn compare(expected: &Json, text_of: impl Fn(&str) -> String) -> Comparison {
    let now: jiff::civil::DateTime = expected["now"].as_str().unwrap().parse().unwrap();
    let now = now.to_zoned(jiff::tz::TimeZone::UTC).unwrap();
    let mut all = Comparison { texts: 0, refusals: 0, lenient: Vec::new(), differences: Vec::new() };
    for case in expected["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let conversation = case["conversation"].as_str().unwrap();
        let mut template = ChatTemplate::parse(Path::new(name), &text_of(name)).unwrap();
        template.special_tokens = expected["tokens"].as_object().unwrap().clone();
        let mut arguments = case["arguments"].as_object().unwrap().clone();
        let add = arguments.remove("add_generation_prompt");
        let rendering = Rendering {
            add_generation_prompt: add.is_none_or(|add| add.as_bool().unwrap()),
            tools: arguments.remove("tools"),
            arguments,
            now: Some(now.clone()),
        };
        let messages = expected["conversations"][conversation].as_array().unwrap();
        let limited = limit::Limited::begin();
        let rendered = template.render_as_given(&limited, messages.clone(), &rendering, MOST_STEPS);
        let place = format!("{name}, {conversation}, {}", case["arguments"]);
        match (rendered, case["text"].as_str()) {
            (Ok(text), Some(wanted)) if text == wanted => all.texts += 1,
            (Err(_), None) => all.refusals += 1,
            (ours, Some(wanted)) => {
                all.differences.push(format!("{place}\n  ours   {ours:?}\n  wanted {wanted:?}"))
            }
            (Ok(_), None) => all.lenient.push(format!("{place}: transformers: {}", case["error"])),
        }
    }
    all
}

#[test]
fn renders_what_transformers_renders() {
    let expected: Json = serde_json::from_str(EXPECTED).unwrap();
    let text_of = |name: &str| std::fs::read_to_string(folder().join(name)).unwrap();
    let all = compare(&expected, text_of);
    assert!(all.differences.is_empty(), "{}", all.differences.join("\n"));
    assert!(all.lenient.is_empty(), "{}", all.lenient.join("\n"));
    assert!(all.texts > 300 && all.refusals > 40, "{} texts, {} refusals", all.texts, all.refusals);
}

/// For templates that cannot be part of this repository: MPK_CHAT_CASES names a file that make.py has written for them.
#[test]
fn renders_what_transformers_renders_of_other_templates() {
    let Some(path) = std::env::var_os("MPK_CHAT_CASES") else { return };
    let expected: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let text_of = |folder: &str| {
        let mut files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        std::fs::read_to_string(files.find(|path| path.extension().is_some_and(|e| e == "jinja")).unwrap())
            .unwrap()
    };
    let all = compare(&expected, text_of);
    let (lenient, different) = (all.lenient.len(), all.differences.len());
    println!(
        "{} texts and {} refusals agree, {lenient} only we render, {different} differ",
        all.texts, all.refusals
    );
    println!("{}", all.lenient.join("\n"));
    assert!(all.differences.is_empty(), "{}", all.differences.join("\n"));
}

#[test]
fn refusals_carry_the_templates_words_and_line() {
    let template =
        ChatTemplate::parse(Path::new("x/t.jinja"), "a\n{{ raise_exception('no ' + messages[0].role) }}");
    let refusal = template.unwrap().render(&[json!({"role": "critic"})], &Rendering::default()).unwrap_err();
    assert_eq!(refusal.exit_status(), 2);
    assert_eq!(refusal.to_string(), "x/t.jinja: the messages cannot be rendered: no critic (line 2)");
    let broken = ChatTemplate::parse(Path::new("x/t.jinja"), "{% for %}").unwrap_err().to_string();
    assert!(
        broken.starts_with("x/t.jinja: not a valid chat template: ") && broken.ends_with("(line 1)"),
        "{broken}"
    );
}

#[test]
fn a_template_without_end_is_given_up() {
    let text = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    let template = ChatTemplate::parse(Path::new("t"), text).unwrap();
    let refusal = template.render(&[], &Rendering::default()).unwrap_err().to_string();
    assert!(refusal.contains("cannot be rendered"), "{refusal}");
}

#[test]
fn templates_are_found_where_checkpoints_have_them() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let render = || {
        let template = ChatTemplate::open(folder.path()).unwrap()?;
        Some(template.render(&[json!({"role": "user", "content": "hi"})], &Rendering::default()).unwrap())
    };
    assert_eq!(render(), None);
    write("tokenizer_config.json", r#"{"bos_token": {"content": "<b>"}, "eos_token": null}"#);
    assert_eq!(render(), None);
    let list =
        r#"[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}list"}]"#;
    write(
        "tokenizer_config.json",
        &format!(r#"{{"bos_token": {{"content": "<b>"}}, "chat_template": {list}}}"#),
    );
    assert_eq!(render().unwrap(), "<b>list");
    write(
        "tokenizer_config.json",
        r#"{"bos_token": "<c>", "chat_template": "{{ bos_token }}text{{ unk_token }}"}"#,
    );
    write("special_tokens_map.json", r#"{"bos_token": "<old>", "unk_token": {"content": "<u>"}}"#);
    assert_eq!(render().unwrap(), "<c>text<u>");
    write("chat_template.json", r#"{"chat_template": "processor"}"#);
    assert_eq!(render().unwrap(), "processor");
    write("chat_template.jinja", "{{ messages[0].content }}\n");
    assert_eq!(render().unwrap(), "hi");
    // As in Python's json, the last value of a key counts.
    write("chat_template.jinja", "{{ bos_token }}");
    write("tokenizer_config.json", r#"{"bos_token": "<first>", "bos_token": "<last>"}"#);
    assert_eq!(render().unwrap(), "<last>");
    write("tokenizer_config.json", "{");
    assert!(ChatTemplate::open(folder.path()).unwrap_err().to_string().contains("tokenizer_config.json:1:"));
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    write("tokenizer_config.json", r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#);
    std::fs::remove_file(folder.path().join("chat_template.json")).unwrap();
    assert!(ChatTemplate::open(folder.path()).unwrap_err().to_string().contains("only rag"));
    write("tokenizer_config.json", r#"{"chat_template": []}"#);
    assert!(
        ChatTemplate::open(folder.path())
            .unwrap_err()
            .to_string()
            .ends_with("`chat_template` is an empty list")
    );
}

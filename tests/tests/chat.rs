//! Proves what a user can name as a model, and that `--chat` runs what the checkpoint's chat template says.

use mpk_tests::Job;
use std::path::{Path, PathBuf};

/// The trained example's folder, as Hugging Face publishes one, with `template` as its chat template.
fn folder_with_template(template: &str) -> tempfile::TempDir {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny");
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(example).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_owned();
        if name != "model.json" {
            std::os::unix::fs::symlink(path.canonicalize().unwrap(), folder.path().join(name)).unwrap();
        }
    }
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

fn job(model: impl Into<PathBuf>, options: &[&str]) -> Job {
    Job::new(2).arg(model.into()).args(options).args(["--max-new-tokens", "6"])
}

#[test]
fn a_chat_prompt_is_what_the_template_renders() {
    let template = "{{ 'In the beginning' if shout is not defined else shout }}, {{ messages[0].content | upper }}\n\n\
                    {%- if add_generation_prompt %}: and{% endif %}";
    let folder = folder_with_template(template);
    let plain = job(folder.path(), &["--prompt", "In the beginning, LIGHT: and"]).run_json();
    let chat = job(folder.path(), &["--chat", "--prompt", "light"]).run_json();
    assert_eq!(chat.requests[0].prompt_tokens, plain.requests[0].prompt_tokens);
    assert_eq!(chat.requests[0].tokens, plain.requests[0].tokens);
    let options = ["--chat", "--prompt", "light", "--template-argument", "shout=Behold"];
    let argument = job(folder.path(), &options).run_json();
    let plain = job(folder.path(), &["--prompt", "Behold, LIGHT: and"]).run_json();
    assert_eq!(argument.requests[0].prompt_tokens, plain.requests[0].prompt_tokens);
    // Token ids are no message.
    let tokens = job(folder.path(), &["--chat", "--prompt-tokens", "5,6,7"]).run_json();
    assert_eq!(tokens.requests[0].prompt_tokens, [5, 6, 7]);
}

#[test]
fn a_refusal_of_the_template_is_bad_input() {
    let folder = folder_with_template("{{ raise_exception('no such talk') }}");
    let finished = job(folder.path(), &["--chat", "--prompt", "x"]).run().expect(2).expect_nothing_left();
    assert!(finished.error_lines().iter().any(|line| line.contains("no such talk")), "{}", finished.stderr);
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let finished = job(folder.path(), &["--chat", "--prompt", "x"]).run().expect(2);
    assert!(finished.stderr.contains("has no chat template"), "{}", finished.stderr);
}

#[test]
fn a_name_of_the_hub_is_looked_up_in_the_cache() {
    let folder = folder_with_template("{{ messages[0].content }}");
    let home = tempfile::tempdir().unwrap();
    let home_path = home.path().to_str().unwrap();
    let named = || job("someone/tiny-model", &["--prompt", "And it came"]).env("HF_HOME", home_path);
    let finished = named().env("HF_HUB_CACHE", "").run().expect(2);
    assert!(finished.stderr.contains("hf download someone/tiny-model"), "{}", finished.stderr);
    let repository = home.path().join("hub/models--someone--tiny-model");
    std::fs::create_dir_all(repository.join("refs")).unwrap();
    std::fs::create_dir_all(repository.join("snapshots")).unwrap();
    std::fs::write(repository.join("refs/main"), "abc123").unwrap();
    std::os::unix::fs::symlink(folder.path(), repository.join("snapshots/abc123")).unwrap();
    let found = named().env("HF_HUB_CACHE", "").run_json();
    let same = job(folder.path(), &["--prompt", "And it came"]).run_json();
    assert_eq!(found.requests[0].tokens, same.requests[0].tokens);
}

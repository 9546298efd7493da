//! Proves which names a user can give for a model, and that `--chat` follows the checkpoint's chat
//! template.

use mpk_tests::Job;
use mpk_tests::http::Answer;
use mpk_tests::server::Server;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The trained example's folder, in Hugging Face's form, with `template` as its chat template.
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
    // Token ids are not a message.
    let tokens = job(folder.path(), &["--chat", "--prompt-tokens", "5,6,7"]).run_json();
    assert_eq!(tokens.requests[0].prompt_tokens, [5, 6, 7]);
}

const TRANSCRIPT: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

#[test]
fn a_conversation_keeps_its_history() {
    let folder = folder_with_template(TRANSCRIPT);
    let text =
        |prompt: &str| job(folder.path(), &["--prompt", prompt]).run_json().requests[0].text.clone().unwrap();
    let first = text("user: Light\nassistant:");
    let second = text(&format!("user: Light\nassistant: {first}\nuser: And the waters\nassistant:"));
    for ranks in [1, 2] {
        let conversation = Job::new(ranks).arg(folder.path()).args(["--chat", "--max-new-tokens", "6"]);
        let mut running = conversation.with_stdin().start();
        running.say("Light");
        running.wait_for_output(|out| out.contains(&format!("{first}\n")));
        running.say("");
        running.say("And the waters");
        running.say_no_more();
        let finished = running.wait().expect(0).expect_nothing_left();
        assert_eq!(finished.stdout, format!("{first}\n{second}\n"));
    }
}

#[test]
fn a_signal_stops_an_answer_and_not_the_conversation() {
    let folder = folder_with_template(TRANSCRIPT);
    let options = ["--chat", "--max-new-tokens", "400", "--ignore-eos", "--debug-stall", "0:embedding:20"];
    let mut running = Job::alone().arg(folder.path()).args(options).with_stdin().start();
    running.say("Light");
    running.wait_for_output(|out| out.len() > 3);
    running.signal_process(&running.ranks()[0], libc::SIGINT);
    running.wait_for_output(|out| out.ends_with('\n'));
    let stopped = running.output();
    running.say("And the waters");
    running.wait_for_output(|out| out.len() > stopped.len() + 3);
    // The first signal ends an answer, the second one the conversation.
    running.signal_process(&running.ranks()[0], libc::SIGTERM);
    running.wait_for_output(|out| out.len() > stopped.len() && out.ends_with('\n'));
    running.signal_process(&running.ranks()[0], libc::SIGTERM);
    let finished = running.wait().expect(0).expect_nothing_left();
    assert!(finished.stdout.starts_with(&stopped) && finished.stdout.len() > stopped.len() + 3);
}

/// The first signal stops the answer for its reader, but the kernel does not let it go. So the second signal ends the process.
#[test]
fn a_second_signal_ends_a_conversation_whose_kernel_is_stuck() {
    let folder = folder_with_template(TRANSCRIPT);
    let options = ["--chat", "--debug-stall", "0:4:60000", "--deadline", "50"];
    let mut running = Job::alone().arg(folder.path()).args(options).with_stdin().start();
    running.wait_for_log("weights:");
    running.say("Light");
    std::thread::sleep(Duration::from_secs(1));
    running.signal(libc::SIGINT);
    std::thread::sleep(Duration::from_millis(300));
    assert!(running.is_running());
    running.signal(libc::SIGINT);
    let begin = Instant::now();
    let finished = running.wait().expect(4).expect_nothing_left();
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    assert!(finished.stderr.contains("a second signal has ended this process"), "{}", finished.stderr);
}

#[test]
fn a_conversation_continues_when_it_no_longer_fits() {
    let folder = folder_with_template(TRANSCRIPT);
    let conversation = Job::alone().arg(folder.path());
    let options = ["--chat", "--max-seq-len", "96", "--max-new-tokens", "24", "--ignore-eos"];
    let mut running = conversation.args(options).with_stdin().start();
    for _ in 0..6 {
        running.say("And the earth was without form, and void");
    }
    running.say(&"And darkness was upon the face of the deep. ".repeat(20));
    running.say("And light was");
    running.say_no_more();
    let finished = running.wait().expect(0).expect_nothing_left();
    assert!(finished.stderr.contains("messages are left out"), "{}", finished.stderr);
    assert!(finished.stderr.contains("never fit in"), "{}", finished.stderr);
}

#[test]
fn a_refusal_of_the_template_is_bad_input() {
    let folder = folder_with_template("{{ raise_exception('no such talk') }}");
    let finished = job(folder.path(), &["--chat", "--prompt", "x"]).run().expect(2).expect_nothing_left();
    assert!(finished.error_lines().iter().any(|line| line.contains("no such talk")), "{}", finished.stderr);
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let finished = job(folder.path(), &["--chat", "--prompt", "x"]).run().expect(2);
    assert!(finished.stderr.contains("needs a chat template"), "{}", finished.stderr);
}

/// Each of these would need terabytes, or overflow the stack.
#[test]
fn a_template_that_needs_too_much_is_bad_input() {
    let memory = "chat template needs far more memory";
    for (steps, grows, words) in [
        (40, "s.value ~ s.value", memory),
        (40, "[s.value, s.value]|join", memory),
        (99_999, "[s.value]", "chat template nests values too deeply"),
    ] {
        let text = format!(
            "{{% set s = namespace(value='ab') %}}{{% for i in range({steps}) %}}{{% set s.value = {grows} %}}{{% endfor %}}{{{{ s.value }}}}"
        );
        let folder = folder_with_template(&text);
        let finished = Job::alone().arg(folder.path()).args(["--chat", "--prompt", "x"]).run().expect(2);
        assert!(finished.stderr.contains(words), "{}", finished.stderr);
        finished.expect_nothing_left();
    }
}

#[test]
fn a_hub_name_is_looked_up_in_the_cache() {
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
    let server = Job::alone().arg("someone/tiny-model").env("HF_HOME", home_path).env("HF_HUB_CACHE", "");
    let server = Server::of(server);
    let models = Answer::get(&server.address, "/v1/models").json();
    assert_eq!(models["data"][0]["id"], "someone/tiny-model", "{models}");
    server.end();
}

//! The clients that people use: curl, and the `openai` package of Python.

use super::fake::{Behaviour, NAME, usual};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Says why a client is missing; fails if the client is required.
fn missing(what: &str) {
    let required = std::env::var_os("MPK_REQUIRE_CLIENTS").is_some_and(|value| value == "1");
    assert!(!required, "{what}, and MPK_REQUIRE_CLIENTS=1; scripts/setup.sh --clients installs it");
    eprintln!("skipped: {what}; scripts/setup.sh --clients installs it");
}

fn expect_success(output: &Output) -> String {
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{errors}", output.status);
    out.into_owned()
}

#[test]
fn curl_reads_answers_and_streams() {
    let server = usual(Behaviour { pace: Duration::from_millis(1), ..Behaviour::default() });
    let base = format!("http://{}", server.address);
    let curl =
        |arguments: &[&str]| Command::new("curl").args(["-sS", "--max-time", "20"]).args(arguments).output();
    let Ok(health) = curl(&["-f", &format!("{base}/health")]) else {
        return missing("curl is not installed");
    };
    assert_eq!(expect_success(&health), "");
    let post = |path: &str, body: &str| {
        let json = ["-H", "Content-Type: application/json", "-d", body];
        let url = format!("{base}{path}");
        expect_success(&curl(&[&["-N", url.as_str()], &json[..]].concat()).unwrap())
    };
    let answer = post("/v1/completions", r#"{"prompt": "Once", "max_tokens": 50}"#);
    assert!(answer.contains("In the beginning God created"), "{answer}");
    let stream =
        post("/v1/chat/completions", r#"{"messages": [{"role": "user", "content": "Hi"}], "stream": true}"#);
    assert!(stream.starts_with("data: {") && stream.ends_with("data: [DONE]\n\n"), "{stream}");
    // A body that is too long: curl shows the status, whether or not it asked before it
    // sent.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("body");
    std::fs::write(&file, vec![b' '; 20 << 20]).unwrap();
    let data = format!("@{}", file.display());
    let url = format!("{base}/v1/completions");
    for more in [&["-H", "Expect: 100-continue"][..], &["-H", "Expect:"]] {
        let options = ["-o", "/dev/null", "-w", "%{http_code}", "-H", "Content-Type: application/json"];
        let output = curl(&[&options[..], more, &["--data-binary", &data, &url]].concat()).unwrap();
        assert_eq!(expect_success(&output), "413");
    }
}

/// The folder into which `scripts/setup.sh --clients` installs the packages; `MPK_CLIENTS`
/// names another one.
fn packages() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.setup/clients");
    std::env::var_os("MPK_CLIENTS").map_or(own, PathBuf::from)
}

#[test]
fn the_openai_package() {
    let packages = packages();
    if !packages.join("openai").is_dir() {
        return missing("the openai package is not installed");
    }
    let server = usual(Behaviour { pace: Duration::from_millis(1), ..Behaviour::default() });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/openai_client.py");
    let output = Command::new("python3")
        .arg(script)
        .args([&format!("http://{}/v1", server.address), NAME])
        .env("PYTHONPATH", packages)
        .output()
        .expect("python3");
    let out = expect_success(&output);
    assert!(out.ends_with("ok\n"), "{out}");
    // Both streams that were closed early were cancelled.
    server.expect_idle();
    assert_eq!(server.seen.cancelled.load(Ordering::SeqCst), 2);
}

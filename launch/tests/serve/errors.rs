//! Refused requests, and what clients are told.

use super::fake::{Behaviour, NAME, eventually, limits, loading, server, usual};
use super::http::{Connection, get, post, request};
use launch::serve::backend::Capabilities;
use launch::serve::limits::Limits;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn wrong_requests_get_openai_errors() {
    let server = usual(Behaviour::default());
    let completion = |body: Value, param: Option<&str>| {
        post(server.address, "/v1/completions", &body).expect_error(400, param)
    };
    completion(json!([1]), None);
    completion(json!({}), Some("prompt"));
    completion(json!({"prompt": null}), Some("prompt"));
    completion(json!({"prompt": 5}), Some("prompt"));
    completion(json!({"prompt": []}), Some("prompt"));
    completion(json!({"prompt": ""}), Some("prompt"));
    completion(json!({"prompt": [[]]}), Some("prompt"));
    completion(json!({"prompt": ["a", 5]}), Some("prompt"));
    completion(json!({"prompt": [1, 2048]}), Some("prompt[1]"));
    completion(json!({"prompt": [1, -1]}), Some("prompt[1]"));
    completion(json!({"prompt": [[1], [1.5]]}), Some("prompt[1][0]"));
    completion(json!({"prompt": "x", "temperature": "hot"}), Some("temperature"));
    completion(json!({"prompt": "x", "max_tokens": 0}), Some("max_tokens"));
    completion(json!({"prompt": "x", "n": 129}), Some("n"));
    completion(json!({"prompt": "x", "logprobs": 21}), Some("logprobs"));
    completion(json!({"prompt": "x", "logprobs": 1, "echo": true}), Some("logprobs"));
    completion(json!({"prompt": "x", "response_format": {"type": "json_object"}}), Some("response_format"));
    completion(json!({"prompt": "x", "suffix": "y"}), Some("suffix"));
    completion(json!({"prompt": "x", "best_of": 3}), Some("best_of"));
    let chat = |body: Value, param: Option<&str>| {
        post(server.address, "/v1/chat/completions", &body).expect_error(400, param)
    };
    let messages = json!([{"role": "user", "content": "x"}]);
    chat(json!({"messages": messages, "tool_choice": "required"}), Some("tool_choice"));
    chat(json!({"messages": messages, "top_logprobs": 2}), Some("top_logprobs"));
    chat(json!({"messages": messages, "logprobs": 3}), Some("logprobs"));
    chat(json!({"messages": []}), Some("messages"));
    let message = chat(json!({"messages": [{"role": "user", "content": "refuse"}]}), Some("messages"));
    assert!(message.contains("no such talk"), "{message}");
    post(server.address, "/tokenize", &json!({})).expect_error(400, Some("prompt"));
    post(server.address, "/detokenize", &json!({"tokens": "x"})).expect_error(400, Some("tokens"));
    post(server.address, "/detokenize", &json!({"tokens": [9999]})).expect_error(400, Some("tokens[0]"));
    assert!(server.seen.submissions.lock().unwrap().is_empty());
}

#[test]
fn prompts_that_do_not_fit() {
    let server = usual(Behaviour::default());
    let ask = |length: usize, fields: Value| {
        let mut body = json!({"prompt": vec![5; length]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        post(server.address, "/v1/completions", &body)
    };
    let answer = ask(2000, json!({}));
    let message = answer.expect_error(400, Some("prompt"));
    assert!(message.contains("2000"), "{message}");
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    ask(1990, json!({"max_tokens": 11})).expect_error(400, Some("max_tokens"));
    assert_eq!(ask(1990, json!({"max_tokens": 10})).status, 200);
    assert_eq!(ask(1999, json!({})).status, 200);
    assert_eq!(server.submission().max_new_tokens, 1);
    ask(1990, json!({"min_tokens": 11})).expect_error(400, Some("min_tokens"));
}

#[test]
fn fields_that_the_engine_does_not_support_are_refused_by_name() {
    let server = usual(Behaviour { can: Capabilities::default(), ..Behaviour::default() });
    for (name, value) in [
        ("temperature", json!(0.5)),
        ("repetition_penalty", json!(1.2)),
        ("min_tokens", json!(2)),
        ("ignore_eos", json!(true)),
        ("logprobs", json!(1)),
        ("add_special_tokens", json!(false)),
    ] {
        let answer = post(server.address, "/v1/completions", &json!({"prompt": "x", name: value}));
        let message = answer.expect_error(400, Some(name));
        assert!(message.contains(name), "{message}");
        // Most refusals are final, but this one is not.
        assert_eq!(message.contains("--logprobs K"), name == "logprobs", "{message}");
        assert_eq!(answer.json()["error"]["code"], "unsupported_parameter");
    }
    assert_eq!(
        post(server.address, "/v1/completions", &json!({"prompt": "x", "temperature": 0})).status,
        200
    );
}

#[test]
fn paths_methods_models_and_types() {
    let server = usual(Behaviour::default());
    get(server.address, "/v1/nothing").expect_error(404, None);
    get(server.address, "/").expect_error(404, None);
    get(server.address, "/v1/models/%ff").expect_error(400, Some("model"));
    get(server.address, "/v1/completions").expect_error(405, None);
    post(server.address, "/v1/models", &json!({})).expect_error(405, None);
    let answer = post(server.address, "/v1/completions", &json!({"model": "other", "prompt": "x"}));
    let message = answer.expect_error(404, Some("model"));
    assert!(message.contains(NAME), "{message}");
    assert_eq!(answer.json()["error"]["code"], "model_not_found");
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let mut connection = Connection::open(server.address);
        let header = format!("Content-Type: {kind}");
        connection.send(request("POST", "/v1/completions", &[&header], "{\"prompt\": \"x\"}").as_bytes());
        connection.answer().unwrap().expect_error(415, None);
    }
    for body in [
        "",
        "{",
        "{\"prompt\": \"x\"",
        "nonsense",
        "{\"prompt\": \"x\"} trailing",
        "\u{0}",
        "{\"prompt\": \"\\ud800\"}",
    ] {
        let mut connection = Connection::open(server.address);
        connection.post("/v1/completions", body);
        connection.answer().unwrap().expect_error(400, None);
    }
    let deep = format!("{{\"prompt\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let mut connection = Connection::open(server.address);
    connection.post("/v1/completions", &deep);
    connection.answer().unwrap().expect_error(400, None);
    let mut connection = Connection::open(server.address);
    connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{\"prompt\":\"\xff\"}");
    connection.answer().unwrap().expect_error(400, None);
}

#[test]
fn a_key_is_required_everywhere_except_at_health() {
    let server = server(Behaviour::default(), limits(), Some("sk-secret"));
    assert_eq!(get(server.address, "/health").status, 200);
    for path in ["/v1/models", "/metrics", "/v1/nothing"] {
        let answer = get(server.address, path);
        answer.expect_error(401, None);
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    }
    post(server.address, "/v1/completions", &json!({"prompt": "x"})).expect_error(401, None);
    let with = |header: &str, path: &str| {
        let mut connection = Connection::open(server.address);
        connection.send(request("GET", path, &[header], "").as_bytes());
        connection.answer().unwrap()
    };
    with("Authorization: Bearer sk-wrong", "/v1/models").expect_error(401, None);
    with("Authorization: Bearer sk-secret2", "/v1/models").expect_error(401, None);
    assert_eq!(with("Authorization: Bearer sk-secret", "/v1/models").status, 200);
    assert_eq!(with("Authorization: Bearer sk-secret", "/metrics").status, 200);
}

#[test]
fn a_full_queue_is_429_and_everything_or_nothing() {
    // Two slots and a queue of two.
    let bounds = Limits { queued_requests: 2, ..limits() };
    let server = server(Behaviour { stall_after: Some(1), ..Behaviour::default() }, bounds, None);
    let body = json!({"prompt": "x", "stream": true, "n": 3});
    let mut first = Connection::open(server.address);
    first.post("/v1/completions", &body.to_string());
    first.head().unwrap();
    let answer = post(server.address, "/v1/completions", &json!({"prompt": "x", "n": 2}));
    answer.expect_error(429, None);
    assert!(answer.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    assert_eq!(server.seen.submissions.lock().unwrap().len(), 3);
    let mut second = Connection::open(server.address);
    second.post("/v1/completions", &json!({"prompt": "x", "stream": true}).to_string());
    assert_eq!(second.head().unwrap().status, 200);
    post(server.address, "/v1/completions", &json!({"prompt": "x"})).expect_error(429, None);
    // More than can ever fit is refused for good.
    let message =
        post(server.address, "/v1/completions", &json!({"prompt": "x", "n": 5})).expect_error(400, Some("n"));
    assert!(message.contains("more than 4, the maximum number of answers"), "{message}");
    // Places become free again.
    drop(first);
    eventually("the first is gone", || server.seen.open.load(Ordering::SeqCst) == 1);
    let mut third = Connection::open(server.address);
    third.post("/v1/completions", &body.to_string());
    assert_eq!(third.head().unwrap().status, 200);
    drop((second, third));
    server.expect_idle();
    // The engine's own bound.
    let bounded = usual(Behaviour { capacity: 1, stall_after: Some(0), ..Behaviour::default() });
    post(bounded.address, "/v1/completions", &json!({"prompt": "x", "n": 2})).expect_error(429, None);
    bounded.expect_idle();
}

#[test]
fn nothing_is_served_while_the_model_loads() {
    let server = loading(limits(), None);
    let answer = get(server.address, "/health");
    answer.expect_error(503, None);
    assert_eq!(answer.json()["error"]["code"], "loading");
    post(server.address, "/v1/completions", &json!({"prompt": "x"})).expect_error(503, None);
    get(server.address, "/metrics").expect_error(503, None);
    server.load(Behaviour::default());
    assert_eq!(get(server.address, "/health").status, 200);
    assert_eq!(post(server.address, "/v1/completions", &json!({"prompt": "x"})).status, 200);
    assert_eq!(server.drain(Duration::ZERO), launch::serve::Outcome::Drained);
}

//! Answers as server-sent events.

use super::fake::{Behaviour, NAME, eventually, limits, server, tokenizer, usual};
use super::http::{Connection, post};
use launch::serve::limits::Limits;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const TEXT: &str = "In the beginning God created the heaven and the earth.";

fn chat(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "x"}], "stream": true});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[test]
fn a_chat_begins_with_the_role_and_ends_with_the_reason() {
    let server = usual(Behaviour::default());
    let body = chat(json!({"stream_options": {"include_usage": true}}));
    let answer = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(answer.header("cache-control"), Some("no-cache"));
    let events = answer.events();
    let id = events[0]["id"].as_str().unwrap();
    for event in &events {
        assert_eq!(
            (event["object"].as_str(), event["id"].as_str()),
            (Some("chat.completion.chunk"), Some(id))
        );
        assert_eq!(event["model"], NAME);
    }
    let (usage, chunks) = events.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    let new = tokenizer().encode(TEXT).unwrap().len() as u64 + 1;
    assert_eq!(usage["usage"]["completion_tokens"], new);
    assert_eq!(
        usage["usage"]["total_tokens"].as_u64().unwrap(),
        usage["usage"]["prompt_tokens"].as_u64().unwrap() + new
    );
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some()));
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!(
        last["choices"],
        json!([{"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop"}])
    );
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert!(chunks.len() > 5, "{} chunks", chunks.len());
    let mut text = String::new();
    for chunk in chunks {
        assert_eq!(chunk["choices"][0]["finish_reason"], Value::Null);
        text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap());
    }
    for chunk in &chunks[1..] {
        assert!(chunk["choices"][0]["delta"].get("role").is_none());
    }
    assert_eq!(text, TEXT);
}

#[test]
fn a_completion_streams_text_and_no_usage_unless_asked() {
    let server = usual(Behaviour::default());
    let body = json!({"prompt": "Once", "stream": true, "max_tokens": 5, "echo": true, "n": 2});
    let events = post(server.address, "/v1/completions", &body).events();
    assert!(events.iter().all(|event| event.get("usage").is_none() && event["object"] == "text_completion"));
    let five = tokenizer().decode(&tokenizer().encode(TEXT).unwrap()[..5]).unwrap();
    for index in 0..2 {
        let mine: Vec<&Value> =
            events.iter().map(|e| &e["choices"][0]).filter(|choice| choice["index"] == index).collect();
        let text: String = mine.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(text, format!("Once{five}"));
        let (last, others) = mine.split_last().unwrap();
        assert_eq!(last["finish_reason"], "length");
        assert!(others.iter().all(|choice| choice["finish_reason"].is_null()));
    }
}

#[test]
fn tokens_come_one_by_one_as_they_are_made() {
    let server = usual(Behaviour { pace: Duration::from_millis(20), ..Behaviour::default() });
    let mut connection = Connection::open(server.address);
    connection.post("/v1/chat/completions", &chat(json!({"max_tokens": 6})).to_string());
    assert_eq!(connection.head().unwrap().status, 200);
    let begin = Instant::now();
    let mut times = Vec::new();
    while connection.chunk().is_some() {
        times.push(begin.elapsed());
    }
    assert!(times.len() >= 6, "{times:?}");
    // The role does not wait for a token.
    let (first, last) = (times[0], times[times.len() - 1]);
    assert!(last - first > Duration::from_millis(80), "{times:?}");
}

#[test]
fn a_stop_string_never_shows_in_a_stream() {
    let server = usual(Behaviour { answer: "one two\n\nUser: three".into(), ..Behaviour::default() });
    let events = post(server.address, "/v1/chat/completions", &chat(json!({"stop": ["\n\nUser:"]}))).events();
    let text: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "one two");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    // Text that only begins like a stop string is not lost.
    let events = post(server.address, "/v1/chat/completions", &chat(json!({"stop": ["three!"]}))).events();
    let text: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "one two\n\nUser: three");
}

#[test]
fn logprobs_of_a_stream_cover_every_token_once() {
    let server = usual(Behaviour::default());
    let body = chat(json!({"logprobs": true, "top_logprobs": 1, "return_token_ids": true}));
    let events = post(server.address, "/v1/chat/completions", &body).events();
    let choices = || events.iter().map(|event| &event["choices"][0]);
    let count: usize = choices().filter_map(|c| c["logprobs"]["content"].as_array()).map(Vec::len).sum();
    let ids: Vec<u64> = choices()
        .filter_map(|choice| choice["token_ids"].as_array())
        .flatten()
        .map(|id| id.as_u64().unwrap())
        .collect();
    let mut expected: Vec<u64> = tokenizer().encode(TEXT).unwrap().iter().map(|&id| id.into()).collect();
    expected.push(0);
    assert_eq!((count, ids), (expected.len(), expected));
}

#[test]
fn a_client_that_goes_away_cancels_its_request() {
    let server = usual(Behaviour { endless: true, pace: Duration::from_millis(1), ..Behaviour::default() });
    for (path, body) in [
        ("/v1/chat/completions", chat(json!({"n": 2}))),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 1900})),
    ] {
        let mut connection = Connection::open(server.address);
        connection.post(path, &body.to_string());
        if body["stream"] == true {
            connection.head().unwrap();
            connection.chunk().unwrap();
        }
        eventually("it runs", || server.seen.open.load(Ordering::SeqCst) > 0);
        let begin = Instant::now();
        drop(connection);
        server.expect_idle();
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
    assert_eq!(server.seen.cancelled.load(Ordering::SeqCst), 3);
    assert_eq!(server.seen.finished.load(Ordering::SeqCst), 0);
}

#[test]
fn a_client_that_does_not_read_is_cut_off() {
    let behaviour = Behaviour { endless: true, answer: "word ".repeat(50), ..Behaviour::default() };
    let small = Limits {
        pieces: 4,
        reader_time: Duration::from_millis(200),
        write_time: Duration::from_millis(400),
        ..limits()
    };
    let server = server(behaviour, small, None);
    // Many answers, so that the socket's buffers fill up before they end.
    let body = chat(json!({"n": 6, "max_tokens": 1900, "logprobs": true, "top_logprobs": 20}));
    let connection = Connection::open(server.address);
    connection.post("/v1/chat/completions", &body.to_string());
    eventually("it runs", || server.seen.open.load(Ordering::SeqCst) > 0);
    server.expect_idle();
    assert!(server.seen.cancelled.load(Ordering::SeqCst) > 0);
    assert!(server.seen.tokens.load(Ordering::SeqCst) < 6 * 1900);
}

#[test]
fn a_request_that_fails_ends_its_stream_with_an_error() {
    let server = usual(Behaviour { fail_after: Some(3), ..Behaviour::default() });
    let events = post(server.address, "/v1/chat/completions", &chat(json!({}))).events();
    let error = &events.last().unwrap()["error"];
    assert_eq!(
        (error["type"].as_str(), error["code"].as_str()),
        (Some("server_error"), Some("engine_failed"))
    );
    assert!(error["message"].as_str().unwrap().contains("worker 3 waits"));
    let message = post(server.address, "/v1/completions", &json!({"prompt": "x"})).expect_error(500, None);
    assert!(message.contains("worker 3 waits"), "{message}");
    // An engine that ends the stream without an event.
    let server = usual(Behaviour { drop_after: Some(3), ..Behaviour::default() });
    let events = post(server.address, "/v1/chat/completions", &chat(json!({}))).events();
    assert_eq!(events.last().unwrap()["error"]["code"], "engine_failed");
}

//! Unusual requests that occur in practice, answered as OpenAI's and other servers
//! do.

use super::fake::{Behaviour, usual};
use super::http::{Connection, get, post, request};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

#[test]
fn a_temperature_that_no_float_holds() {
    let server = usual(Behaviour::default());
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let body =
            json!({"prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": 1e308});
        let message = post(server.address, path, &body).expect_error(400, Some("temperature"));
        assert!(message.contains("from 0 to 100, found 1e+308"), "{message}");
        // This one does not even fit a double.
        let mut connection = Connection::open(server.address);
        connection.post(path, "{\"prompt\": \"x\", \"messages\": [], \"temperature\": 1e309}");
        connection.answer().unwrap().expect_error(400, None);
    }
}

#[test]
fn no_messages() {
    let server = usual(Behaviour::default());
    for path in ["/v1/chat/completions", "/tokenize"] {
        for messages in [json!([]), json!(""), json!({})] {
            let answer = post(server.address, path, &json!({"messages": messages}));
            let message = answer.expect_error(400, Some("messages"));
            assert!(message.contains("at least one message"), "{message}");
        }
    }
}

#[test]
fn the_prompt_alone() {
    let server = usual(Behaviour::default());
    let body =
        json!({"prompt": ["Once upon", [5, 6]], "max_tokens": 0, "echo": true, "return_token_ids": true});
    let answer = post(server.address, "/v1/completions", &body).json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2, "{answer}");
    assert_eq!(choices[0]["text"], "Once upon");
    assert_eq!(choices[1]["prompt_token_ids"], json!([5, 6]));
    assert!(
        choices.iter().all(|choice| choice["finish_reason"] == "length" && choice["token_ids"] == json!([]))
    );
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens"], 0);
    assert_eq!(usage["total_tokens"], usage["prompt_tokens"]);
    assert!(usage["prompt_tokens"].as_u64() > Some(2), "{usage}");
    let body = json!({"prompt": "Once upon", "max_tokens": 0, "echo": true, "stream": true,
        "stream_options": {"include_usage": true}});
    let events = post(server.address, "/v1/completions", &body).events();
    let choices: Vec<&Value> = events.iter().flat_map(|event| event["choices"].as_array().unwrap()).collect();
    let text: String = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(text, "Once upon");
    assert_eq!(choices.last().unwrap()["finish_reason"], "length");
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 0);
    // The engine is not involved.
    assert!(server.seen.submissions.lock().unwrap().is_empty());
    for body in [
        json!({"prompt": "x", "max_tokens": 0}),
        json!({"prompt": "x", "max_tokens": 0, "echo": false}),
        json!({"prompt": "x", "max_tokens": -1, "echo": true}),
    ] {
        post(server.address, "/v1/completions", &body).expect_error(400, Some("max_tokens"));
    }
    let body = json!({"prompt": vec![5; 2000], "max_tokens": 0, "echo": true});
    post(server.address, "/v1/completions", &body).expect_error(400, Some("prompt"));
    let body = json!({"prompt": "x", "max_tokens": 0, "min_tokens": 1, "echo": true});
    post(server.address, "/v1/completions", &body).expect_error(400, Some("min_tokens"));
}

#[test]
fn encoded_bodies() {
    let server = usual(Behaviour::default());
    let body = "{\"prompt\": \"x\"}";
    let chunked = |coding: &str| {
        let mut connection = Connection::open(server.address);
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: {coding}\r\n\r\n"
        );
        connection.send(format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).as_bytes());
        connection.answer().unwrap()
    };
    assert_eq!(chunked("chunked").status, 200);
    assert_eq!(chunked("Chunked").status, 200);
    let message = chunked("gzip, chunked").expect_error(501, None);
    assert!(message.contains("gzip"), "{message}");
    // Two headers count as one list.
    chunked("deflate\r\nTransfer-Encoding: chunked").expect_error(501, None);
    let packed = |coding: &str| {
        let header = format!("Content-Encoding: {coding}");
        let mut connection = Connection::open(server.address);
        let headers = ["Content-Type: application/json", &header];
        connection.send(request("POST", "/v1/completions", &headers, body).as_bytes());
        connection.answer().unwrap()
    };
    assert_eq!(packed("identity").status, 200);
    let message = packed("gzip").expect_error(415, None);
    assert!(message.contains("gzip"), "{message}");
    packed("identity, br").expect_error(415, None);
}

#[test]
fn a_flood_of_wrong_requests_is_slowed_down() {
    let server = usual(Behaviour::default());
    let begin = Instant::now();
    // Each client asks again as soon as it is refused.
    let refused: usize = std::thread::scope(|scope| {
        let ask = || {
            let mut count = 0;
            while begin.elapsed() < Duration::from_millis(600) {
                get(server.address, "/v1/nothing").expect_error(404, None);
                count += 1;
            }
            count
        };
        let clients: Vec<_> = (0..20).map(|_| scope.spawn(ask)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    let most = 64 + 100 * (begin.elapsed().as_millis() as usize + 700) / 1000;
    assert!((64..=most).contains(&refused), "{refused} in {:?}", begin.elapsed());
    // Correct requests are not slowed down.
    let begin = Instant::now();
    assert_eq!(post(server.address, "/v1/completions", &json!({"prompt": "x"})).status, 200);
    assert!(begin.elapsed() < Duration::from_millis(500), "{:?}", begin.elapsed());
}

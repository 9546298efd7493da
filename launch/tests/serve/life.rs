//! The server's end: drained, cut off, or with its engine lost.

use super::fake::{Behaviour, eventually, limits, usual};
use super::http::{Connection, get, request};
use launch::serve::Outcome;
use launch::serve::state::Phase;
use serde_json::{Value, json};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn last_event(connection: &mut Connection) -> Value {
    let mut body = Vec::new();
    while let Some(chunk) = connection.chunk() {
        body.extend(chunk);
    }
    let text = String::from_utf8(body).unwrap();
    let events: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(events.last(), Some(&"data: [DONE]"), "{text}");
    serde_json::from_str(events[events.len() - 2].strip_prefix("data: ").unwrap()).unwrap()
}

fn streaming(server: &super::fake::Running) -> Connection {
    let mut connection = Connection::open(server.address);
    connection
        .post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1900, "stream": true}).to_string());
    assert_eq!(connection.head().unwrap().status, 200);
    eventually("it runs", || server.seen.tokens.load(Ordering::SeqCst) > 0);
    connection
}

#[test]
fn running_requests_finish_and_new_ones_are_refused() {
    let server = usual(Behaviour { pace: Duration::from_millis(20), ..Behaviour::default() });
    let mut running = streaming(&server);
    let mut idle = Connection::open(server.address);
    idle.get("/health");
    assert_eq!(idle.answer().unwrap().status, 200);
    let address = server.address;
    let reader = std::thread::spawn(move || last_event(&mut running));
    let seen = std::sync::Arc::clone(&server.seen);
    let begin = Instant::now();
    let waiter = std::thread::spawn(move || server.drain(Duration::from_secs(20)));
    assert!(idle.is_closed());
    eventually("the port is closed", || TcpStream::connect(address).is_err());
    assert_eq!(waiter.join().unwrap(), Outcome::Drained);
    assert!(begin.elapsed() < Duration::from_secs(15));
    assert_eq!(reader.join().unwrap()["choices"][0]["finish_reason"], "stop");
    assert_eq!(seen.finished.load(Ordering::SeqCst), 1);
}

#[test]
fn the_engine_expects_a_request_as_soon_as_its_head_is_there() {
    let server = usual(Behaviour::default());
    let expected = || server.seen.expected.load(Ordering::SeqCst);
    assert_eq!(get(server.address, "/v1/models").status, 200);
    assert_eq!(expected(), 0);
    let bodies = [
        ("/v1/completions", json!({"prompt": "x"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "x"}]})),
    ];
    for (before, (path, body)) in bodies.into_iter().enumerate() {
        let (mut connection, body) = (Connection::open(server.address), body.to_string());
        let whole = request("POST", path, &["Content-Type: application/json"], &body);
        let (head, body) = whole.split_at(whole.len() - body.len());
        connection.send(head.as_bytes());
        eventually("it is expected", || expected() == before + 1);
        assert_eq!(server.seen.submissions.lock().unwrap().len(), before);
        connection.send(body.as_bytes());
        assert_eq!(connection.answer().unwrap().status, 200);
        assert_eq!((expected(), server.seen.submissions.lock().unwrap().len()), (before + 1, before + 1));
    }
}

#[test]
fn a_request_on_an_open_connection_is_told_that_the_server_ends() {
    let server = usual(Behaviour { pace: Duration::from_millis(20), ..Behaviour::default() });
    let mut running = streaming(&server);
    // A request whose body comes only after the server has been told to drain.
    let mut late = Connection::open(server.address);
    let body = "{\"prompt\": \"x\"}";
    late.send(format!("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{{", body.len()).as_bytes());
    let app = server.app.clone();
    let all = limits().all_bodies_bytes / 1024;
    eventually("the body has begun", || app.bodies.available_permits() < all);
    let waiter = std::thread::spawn(move || server.drain(Duration::from_secs(20)));
    eventually("it drains", || *app.phase.borrow() == Phase::Draining);
    late.send(&body.as_bytes()[1..]);
    let answer = late.answer().unwrap();
    answer.expect_error(503, None);
    assert_eq!(answer.json()["error"]["code"], "shutting_down");
    assert_eq!(last_event(&mut running)["choices"][0]["finish_reason"], "stop");
    assert_eq!(waiter.join().unwrap(), Outcome::Drained);
}

#[test]
fn requests_that_do_not_end_in_time_are_cut_off_with_a_reason() {
    for behaviour in [
        Behaviour { endless: true, pace: Duration::from_millis(5), ..Behaviour::default() },
        Behaviour { stall_after: Some(3), ..Behaviour::default() },
    ] {
        let server = usual(behaviour);
        let mut running = streaming(&server);
        let reader = std::thread::spawn(move || last_event(&mut running));
        let seen = std::sync::Arc::clone(&server.seen);
        let begin = Instant::now();
        assert_eq!(server.drain(Duration::from_millis(100)), Outcome::CutOff(1));
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
        assert_eq!(reader.join().unwrap()["error"]["code"], "shutting_down");
        assert_eq!(seen.cancelled.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn a_lost_engine_ends_every_stream_with_an_error() {
    let server = usual(Behaviour { stall_after: Some(3), ..Behaviour::default() });
    let mut streams: Vec<Connection> = (0..3).map(|_| streaming(&server)).collect();
    let mut whole = Connection::open(server.address);
    whole.post("/v1/completions", &json!({"prompt": "x"}).to_string());
    eventually("all run", || server.seen.open.load(Ordering::SeqCst) == 4);
    let mut health = Connection::open(server.address);
    health.get("/health");
    assert_eq!(health.answer().unwrap().status, 200);
    let begin = Instant::now();
    server.app.go_on(Phase::Lost("rank 1 has ended".into()));
    // It stays lost, even if another phase is set.
    server.app.go_on(Phase::Draining);
    for stream in &mut streams {
        let error = last_event(stream)["error"].clone();
        assert_eq!(error["code"], "engine_lost");
        assert!(error["message"].as_str().unwrap().contains("rank 1 has ended"), "{error}");
    }
    let message = whole.answer().unwrap().expect_error(500, None);
    assert!(message.contains("rank 1 has ended"), "{message}");
    assert_eq!(server.wait(), Outcome::Lost("rank 1 has ended".into()));
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[test]
fn health_reports_a_lost_engine() {
    let server = usual(Behaviour::default());
    let mut connection = Connection::open(server.address);
    // An incomplete head keeps the connection open while the server ends.
    connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n");
    std::thread::sleep(Duration::from_millis(50));
    server.app.go_on(Phase::Lost("rank 1 has ended".into()));
    connection.send(b"\r\n");
    if let Some(answer) = connection.answer() {
        answer.expect_error(500, None);
        assert_eq!(answer.json()["error"]["code"], "engine_lost");
    }
}

#[test]
fn a_taken_port_is_an_error() {
    let server = usual(Behaviour::default());
    let again = launch::serve::Server::start("127.0.0.1", server.address.port(), None, limits());
    assert_eq!(again.err().map(|e| e.kind()), Some(std::io::ErrorKind::AddrInUse));
    assert_eq!(get(server.address, "/health").status, 200);
}

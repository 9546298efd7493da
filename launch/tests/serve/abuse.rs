//! Clients that send too much, too slowly, or nonsense: the server answers or refuses, and lives.

use super::fake::{Behaviour, Running, eventually, limits, server, usual};
use super::http::{Connection, get, post, request};
use launch::serve::limits::Limits;
use serde_json::json;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Checks that the server still works.
fn expect_alive(server: &Running) {
    let answer = post(server.address, "/v1/completions", &json!({"prompt": "x", "max_tokens": 2}));
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[test]
fn a_body_of_100_megabytes() {
    let server = usual(Behaviour::default());
    // With its length announced.
    let mut connection = Connection::open(server.address);
    connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 104857600\r\n\r\n");
    let megabyte = vec![b' '; 1 << 20];
    for _ in 0..100 {
        if connection.stream().write_all(&megabyte).is_err() {
            break;
        }
    }
    connection.answer().unwrap().expect_error(413, None);
    // In chunks that do not announce the length.
    let mut connection = Connection::open(server.address);
    connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n");
    for _ in 0..100 {
        let sent = connection
            .stream()
            .write_all(b"100000\r\n")
            .and_then(|()| connection.stream().write_all(&megabyte))
            .and_then(|()| connection.stream().write_all(b"\r\n"));
        if sent.is_err() {
            break;
        }
    }
    let _ = connection.stream().write_all(b"0\r\n\r\n");
    connection.answer().unwrap().expect_error(413, None);
    // A client that asks before it sends gets the refusal at once.
    let mut connection = Connection::open(server.address);
    connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: 104857600\r\n\r\n");
    connection.answer().unwrap().expect_error(413, None);
    expect_alive(&server);
}

#[test]
fn bodies_together_are_bounded_too() {
    let bounds = Limits { all_bodies_bytes: 64 << 10, body_bytes: 60 << 10, ..limits() };
    let server = server(Behaviour::default(), bounds, None);
    let head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 40000\r\n\r\n";
    let mut first = Connection::open(server.address);
    first.send(head.as_bytes());
    first.send(format!("{{\"prompt\": \"{}", "x".repeat(39_000)).as_bytes());
    eventually("it is read", || server.app.bodies.available_permits() < 64 - 38);
    let mut second = Connection::open(server.address);
    second.send(head.as_bytes());
    second.send(format!("{{\"prompt\": \"{}", "x".repeat(39_000)).as_bytes());
    second.answer().unwrap().expect_error(503, None);
    first.send(" ".repeat(40_000 - 39_012 - 2).as_bytes());
    first.send(b"\"}");
    assert_eq!(first.answer().unwrap().status, 200);
    expect_alive(&server);
}

/// A small text with large values: each `{"":0}` takes hundreds of bytes in memory.
fn with_large_values(prompt: &str) -> String {
    let objects = vec!["{\"\":0}"; 10_000].join(",");
    format!("{{\"prompt\": \"{prompt}\", \"max_tokens\": 8, \"ignored\": [{objects}]}}")
}

#[test]
fn bodies_with_large_values_are_parsed_in_turn() {
    let bounds = Limits { all_bodies_bytes: 1 << 20, body_bytes: 100 << 10, ..limits() };
    let server = server(Behaviour::default(), bounds, None);
    let mut connections: Vec<Connection> = (0..8).map(|_| Connection::open(server.address)).collect();
    for connection in &connections {
        connection.post("/tokenize", &with_large_values("a"));
    }
    for connection in &mut connections {
        let answer = connection.answer().unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    // The same for a body that is refused.
    let mut connection = Connection::open(server.address);
    connection.post("/tokenize", &with_large_values("a\", \"model\": \"other"));
    connection.answer().unwrap().expect_error(404, Some("model"));
    eventually("the memory is free", || {
        server.app.bodies.available_permits() == 1024 && server.app.values.available_permits() == 1024
    });
    expect_alive(&server);
}

#[test]
fn a_request_that_runs_holds_no_memory_of_its_body() {
    let bounds = Limits { all_bodies_bytes: 1 << 20, body_bytes: 100 << 10, ..limits() };
    let server = server(Behaviour { stall_after: Some(2), ..Behaviour::default() }, bounds, None);
    let chat = with_large_values("")
        .replace("\"prompt\": \"\"", "\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]");
    let mut waiting = Vec::new();
    for (path, body) in [("/v1/completions", with_large_values("a")), ("/v1/chat/completions", chat)] {
        let connection = Connection::open(server.address);
        connection.post(path, &body);
        waiting.push(connection);
        eventually("it runs", || server.seen.open.load(Ordering::SeqCst) == waiting.len());
        // The request is submitted after its memory is given back.
        assert_eq!(server.app.bodies.available_permits(), 1024);
        assert_eq!(server.app.values.available_permits(), 1024);
    }
}

#[test]
fn a_thousand_idle_connections() {
    // Both ends of each connection are files of this process.
    launch::cli::process_limits::check(None).unwrap();
    let server = usual(Behaviour::default());
    let idle: Vec<Connection> = (0..1000).map(|_| Connection::open(server.address)).collect();
    let begin = Instant::now();
    expect_alive(&server);
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    drop(idle);
    expect_alive(&server);
}

#[test]
fn too_many_connections_get_an_error() {
    let bounds = Limits { connections: 8, head_time: Duration::from_millis(300), ..limits() };
    let server = server(Behaviour::default(), bounds, None);
    let idle: Vec<Connection> = (0..8).map(|_| Connection::open(server.address)).collect();
    let mut more = Connection::open(server.address);
    more.answer().unwrap().expect_error(503, None);
    assert!(more.is_closed());
    // Silent connections are closed after a while, and make room.
    for mut connection in idle {
        assert!(connection.is_closed());
    }
    expect_alive(&server);
}

#[test]
fn slow_heads_bodies_and_idle_clients_are_closed() {
    let soon = Duration::from_millis(200);
    let server = server(Behaviour::default(), Limits { head_time: soon, body_time: soon, ..limits() }, None);
    let mut head = Connection::open(server.address);
    head.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ");
    let mut body = Connection::open(server.address);
    body.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{");
    let mut idle = Connection::open(server.address);
    idle.get("/health");
    assert_eq!(idle.answer().unwrap().status, 200);
    let begin = Instant::now();
    while head.line().is_some() {}
    body.answer().unwrap().expect_error(408, None);
    assert!(idle.is_closed());
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    expect_alive(&server);
}

#[test]
fn long_heads_and_many_headers() {
    let server = usual(Behaviour::default());
    for headers in [vec!["X-Many: 1".to_string(); 200], vec![format!("X-Long: {}", "x".repeat(1_000_000))]] {
        let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
        let mut connection = Connection::open(server.address);
        let _ = connection.stream().write_all(request("GET", "/health", &headers, "").as_bytes());
        // Refused, or the connection closed.
        let answer = connection.answer();
        assert!(answer.as_ref().is_none_or(|answer| answer.status == 431), "{answer:?}");
    }
    let path = format!("/{}", "x".repeat(60_000));
    assert!(get(server.address, &path).status >= 400);
    expect_alive(&server);
}

#[test]
fn input_that_is_not_http() {
    let server = usual(Behaviour::default());
    let good = request("POST", "/v1/completions", &["Content-Type: application/json"], "{\"prompt\": \"x\"}");
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..300 {
        let mut bytes = good.clone().into_bytes();
        match round % 3 {
            0 => bytes = (0..random() % 300).map(|_| random() as u8).collect(),
            1 => {
                for _ in 0..1 + random() % 8 {
                    let at = random() as usize % bytes.len();
                    bytes[at] = random() as u8;
                }
            }
            _ => bytes.truncate(random() as usize % bytes.len()),
        }
        let connection = Connection::open(server.address);
        let _ = connection.stream().write_all(&bytes);
        let _ = connection.stream().shutdown(std::net::Shutdown::Write);
    }
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ] {
        let mut connection = Connection::open(server.address);
        let _ = connection.stream().write_all(bytes);
        if let Some(answer) = connection.answer() {
            assert!((400..600).contains(&answer.status), "{answer:?}");
        }
    }
    expect_alive(&server);
    server.expect_idle();
}

#[test]
fn a_flood() {
    let server = usual(Behaviour { pace: Duration::from_millis(1), ..Behaviour::default() });
    let (mut served, mut busy) = (0, 0);
    let mut connections: Vec<Connection> = (0..400).map(|_| Connection::open(server.address)).collect();
    for connection in &connections {
        connection.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 4}).to_string());
    }
    for connection in &mut connections {
        match connection.answer().unwrap() {
            answer if answer.status == 200 => served += 1,
            answer => {
                answer.expect_error(429, None);
                busy += 1;
            }
        }
    }
    assert!(served >= 6 && busy > 0, "{served} served, {busy} turned away");
    server.expect_idle();
    expect_alive(&server);
}

//! A small HTTP client that sends exactly what it is given, so that tests can send what no client
//! would.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longest wait of a test for a byte.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection.
pub struct Connection {
    reader: BufReader<TcpStream>,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.text()))
    }

    /// The JSON of a stream's events without the last one, which is checked here.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"), "{}", self.text());
        let mut events: Vec<&str> = self
            .text()
            .strip_suffix("\n\n")
            .expect("a whole last event")
            .split("\n\n")
            .map(|event| event.strip_prefix("data: ").expect("data"))
            .collect();
        assert_eq!(events.pop(), Some("[DONE]"));
        events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
    }

    /// Asserts that it is an error object with this status and parameter; returns the message.
    pub fn expect_error(&self, status: u16, param: Option<&str>) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/json"));
        let error = &self.json()["error"];
        assert_eq!(error["param"].as_str(), param, "{error}");
        let keys: Vec<&String> = error.as_object().expect("an error object").keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        assert!(error["type"].is_string() && (error["code"].is_string() || error["code"].is_null()));
        error["message"].as_str().expect("a message").to_string()
    }
}

impl Connection {
    pub fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Connection { reader: BufReader::new(stream) }
    }

    pub fn stream(&self) -> &TcpStream {
        self.reader.get_ref()
    }

    /// Sends bytes as they are.
    pub fn send(&self, bytes: &[u8]) {
        self.stream().write_all(bytes).expect("the server reads");
    }

    /// Sends a request with a JSON body.
    pub fn post(&self, path: &str, body: &str) {
        self.send(request("POST", path, &["Content-Type: application/json"], body).as_bytes());
    }

    pub fn get(&self, path: &str) {
        self.send(request("GET", path, &[], "").as_bytes());
    }

    /// Reads a line without its end; `None` if the connection has ended.
    pub fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(line.trim_end_matches(['\r', '\n']).to_string()),
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                panic!("the server says nothing")
            }
            Err(_) => None,
        }
    }

    /// Reads the head of an answer; `None` if the connection has ended.
    pub fn head(&mut self) -> Option<Answer> {
        let first = self.line()?;
        let status =
            first.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("{first:?}"));
        let mut headers = Vec::new();
        loop {
            let line = self.line().expect("headers");
            match line.split_once(':') {
                None => break,
                Some((name, value)) => headers.push((name.to_string(), value.trim().to_string())),
            }
        }
        Some(Answer { status, headers, body: Vec::new() })
    }

    /// Reads a chunk of a chunked body; `None` after the last.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let length = usize::from_str_radix(&self.line()?, 16).expect("a chunk's length");
        let mut chunk = vec![0; length + 2];
        self.reader.read_exact(&mut chunk).ok()?;
        chunk.truncate(length);
        (length > 0).then_some(chunk)
    }

    /// Reads a whole answer; `None` if the connection has ended.
    pub fn answer(&mut self) -> Option<Answer> {
        let mut answer = self.head()?;
        if answer.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                answer.body.extend(chunk);
            }
        } else {
            let length =
                answer.header("content-length").map_or(0, |length| length.parse().expect("a length"));
            answer.body = vec![0; length];
            self.reader.read_exact(&mut answer.body).expect("the body");
        }
        Some(answer)
    }

    /// Whether the server has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.reader.read(&mut [0]), Ok(0) | Err(_))
    }
}

/// A request as text.
pub fn request(method: &str, path: &str, headers: &[&str], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n");
    for header in headers {
        text.push_str(header);
        text.push_str("\r\n");
    }
    text.push_str(&format!("Content-Length: {}\r\n\r\n{body}", body.len()));
    text
}

/// One POST on a new connection.
pub fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    let mut connection = Connection::open(address);
    connection.post(path, &body.to_string());
    connection.answer().expect("an answer")
}

/// One GET on a new connection.
pub fn get(address: SocketAddr, path: &str) -> Answer {
    let mut connection = Connection::open(address);
    connection.get(path);
    connection.answer().expect("an answer")
}

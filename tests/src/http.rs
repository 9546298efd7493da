//! Requests to one of our servers, in HTTP/1.0: an answer ends when its connection ends.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Maximum time that a test waits for a byte.
const PATIENCE: Duration = Duration::from_secs(40);

/// An answer whose body has not been read yet. Dropping it closes the connection.
pub struct Answer {
    /// Its status.
    pub status: u16,
    body: BufReader<TcpStream>,
}

impl Answer {
    /// Sends a JSON body to `path` of the server at `address`, and reads the head of the answer.
    ///
    /// # Panics
    /// There is no answer.
    pub fn post(address: &str, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        Answer::to(address, &(head + &body))
    }

    /// Asks for `path`.
    ///
    /// # Panics
    /// There is no answer.
    pub fn get(address: &str, path: &str) -> Answer {
        Answer::to(address, &format!("GET {path} HTTP/1.0\r\n\r\n"))
    }

    /// As `get`; `None` if there is no answer.
    pub fn try_get(address: &str, path: &str) -> Option<Answer> {
        let mut stream = TcpStream::connect(address).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
        let mut body = BufReader::new(stream);
        let mut line = String::new();
        body.read_line(&mut line).ok()?;
        Some(Answer { status: line.split(' ').nth(1)?.parse().ok()?, body })
    }

    fn to(address: &str, request: &str) -> Answer {
        let mut stream = TcpStream::connect(address).unwrap_or_else(|e| panic!("{address}: {e}"));
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.write_all(request.as_bytes()).expect("the server reads");
        let mut body = BufReader::new(stream);
        let mut line = String::new();
        body.read_line(&mut line).expect("an answer");
        let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status: {line:?}"));
        while !line.trim().is_empty() {
            line.clear();
            body.read_line(&mut line).expect("headers");
        }
        Answer { status, body }
    }

    /// The whole body as text.
    ///
    /// # Panics
    /// It does not end.
    pub fn text(mut self) -> String {
        let mut text = String::new();
        // What arrived before a broken connection counts.
        let _ = self.body.read_to_string(&mut text);
        text
    }

    /// The whole body as JSON; the answer must not be an error.
    ///
    /// # Panics
    /// It is something else.
    pub fn json(self) -> Value {
        let status = self.status;
        let text = self.text();
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    /// The last event of a stream; null if there is none.
    pub fn last_event(mut self) -> Value {
        let mut last = Value::Null;
        while let Some(event) = self.event() {
            last = event;
        }
        last
    }

    /// The next event of a stream; `None` after `[DONE]`, or if the stream breaks.
    pub fn event(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if self.body.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if let Some(data) = line.trim_end().strip_prefix("data: ") {
                return serde_json::from_str(data).ok();
            }
        }
    }
}

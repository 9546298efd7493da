//! Limits on the memory and time that clients can use.

use crate::model::model_json::{LONGEST_STOP, MOST_STOPS};
use std::time::Duration;

/// Limits of a server. The defaults suit a server on a trusted network.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Open connections. Further ones get status 503 and are closed.
    pub connections: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Bytes of all bodies in memory together. The values parsed from large bodies may take as much again.
    pub all_bodies_bytes: usize,
    /// Header lines of a request.
    pub headers: usize,
    /// Bytes of a request's head.
    pub head_bytes: usize,
    /// Time until a request's head is complete. Also the maximum idle time of a connection.
    pub head_time: Duration,
    /// Time until a request's body is complete.
    pub body_time: Duration,
    /// How long a client may read nothing of an answer before its connection is closed.
    pub write_time: Duration,
    /// How long a full channel waits for its reader before the request is cancelled.
    pub reader_time: Duration,
    /// Pieces of an answer that can wait for their reader.
    pub pieces: usize,
    /// Requests that wait for a slot of the engine. Further ones get status 429.
    pub queued_requests: usize,
    /// Answers per request: prompts x n.
    pub choices: usize,
    /// Stop strings, and stop token ids, per request.
    pub stops: usize,
    /// Bytes of a stop string.
    pub stop_bytes: usize,
    /// Number of long bodies that are parsed, rendered with the chat template, and encoded at the same time.
    pub encoders: usize,
    /// How long clients have to read the end of their answers when the server ends.
    pub last_words: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 4096,
            body_bytes: 4 << 20,
            all_bodies_bytes: 64 << 20,
            headers: 100,
            head_bytes: 64 << 10,
            head_time: Duration::from_secs(30),
            body_time: Duration::from_secs(30),
            write_time: Duration::from_secs(30),
            reader_time: Duration::from_secs(30),
            pieces: 64,
            queued_requests: 256,
            choices: 128,
            stops: MOST_STOPS,
            stop_bytes: LONGEST_STOP,
            encoders: 4,
            last_words: Duration::from_secs(1),
        }
    }
}

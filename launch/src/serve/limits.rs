//! What bounds memory and time that clients can take.

use crate::model::model_json::{LONGEST_STOP, MOST_STOPS};
use std::time::Duration;

/// Bounds of a server. Each has a default that suits a server on a trusted network.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once; more are told 503 and closed.
    pub connections: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Bytes of all bodies that are in memory at once.
    pub all_bodies_bytes: usize,
    /// Header lines of a request.
    pub headers: usize,
    /// Bytes of a request's head.
    pub head_bytes: usize,
    /// Until a request's head is complete; also how long a connection may be idle.
    pub head_time: Duration,
    /// Until a request's body is complete.
    pub body_time: Duration,
    /// How long a client may take no byte of an answer before the connection is closed.
    pub write_time: Duration,
    /// How long a full stream of an answer waits for its reader before the request is cancelled.
    pub reader_time: Duration,
    /// Pieces of an answer that wait for its reader.
    pub pieces: usize,
    /// Requests that wait for a slot of the engine; more get 429.
    pub queued_requests: usize,
    /// Answers of one request: prompts x n.
    pub choices: usize,
    /// Stop strings, and stop token ids, of a request.
    pub stops: usize,
    /// Bytes of a stop string.
    pub stop_bytes: usize,
    /// Texts that are encoded, and chat templates rendered, at once.
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

//! Limits on the memory and time that clients can use.

use super::error::ApiError;
use crate::model::model_json::{LONGEST_STOP, MOST_STOPS};
use std::time::Duration;
use taskgraph::words::counted;

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
    /// How long a client that has read nothing yet may let its answer wait. After that its connection is closed.
    pub write_time: Duration,
    /// Bytes that a client must read per second, on average, while its answer waits.
    pub slowest_reader: u32,
    /// Maximum pause of a client that has read more than that before.
    pub longest_pause: Duration,
    /// How long a full channel waits for its reader before the request is cancelled. Longer than `longest_pause`, so that the client's
    /// connection decides.
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
            slowest_reader: 256,
            longest_pause: Duration::from_secs(120),
            reader_time: Duration::from_secs(150),
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

/// Checks the number of answers that a request asks for: `n` for each prompt.
///
/// # Errors
/// There are more than `most`.
pub fn check_choices(prompts: usize, n: usize, most: usize) -> Result<(), ApiError> {
    if prompts.saturating_mul(n) <= most {
        return Ok(());
    }
    let message = format!(
        "{} x n = {n} is more than {most}, the maximum number of answers per request",
        counted(prompts, "prompt")
    );
    Err(ApiError::field(if n == 1 { "prompt" } else { "n" }, message))
}

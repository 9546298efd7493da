//! Reads lines from standard input. While it waits for a line, it calls a function at intervals.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{Read, stdin};
use std::time::Duration;

/// Bytes that have been read but not returned.
#[derive(Debug, Default)]
pub struct Lines {
    bytes: VecDeque<u8>,
    ended: bool,
}

impl Lines {
    /// The next line without its line end. Returns `None` at the end of the input, or when `stop` returns true.
    /// `stop` is called every `tick`.
    pub fn next(&mut self, tick: Duration, stop: impl Fn() -> bool) -> Option<String> {
        loop {
            if let Some(end) = self.bytes.iter().position(|&b| b == b'\n') {
                let line: Vec<u8> = self.bytes.drain(..=end).collect();
                return Some(text(&line[..end]));
            }
            if self.ended {
                let rest: Vec<u8> = self.bytes.drain(..).collect();
                return (!rest.is_empty()).then(|| text(&rest));
            }
            if stop() {
                return None;
            }
            if is_ready(tick) {
                let mut chunk = [0; 4096];
                match stdin().lock().read(&mut chunk) {
                    Ok(0) => self.ended = true,
                    Ok(count) => self.bytes.extend(&chunk[..count]),
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    // A read error counts as the end of the input.
                    Err(_) => self.ended = true,
                }
            }
        }
    }
}

/// Waits up to `tick`. Returns true if a read would return at once, with input or at the end.
fn is_ready(tick: Duration) -> bool {
    let stdin = stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    // A tick always fits the type.
    let limit = Timespec::try_from(tick).ok();
    match poll(&mut fds, limit.as_ref()) {
        Ok(ready) => ready > 0,
        // A signal arrived. The caller must check `stop` first, because a read would wait for the next line.
        Err(Errno::INTR) => false,
        // The following read reports any other error.
        Err(_) => true,
    }
}

fn text(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    String::from_utf8_lossy(line).into_owned()
}

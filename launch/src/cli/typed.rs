//! Lines of standard input, with a look around while there is none.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{Read, stdin};
use std::time::Duration;

/// What has been read, and not been given out.
#[derive(Debug, Default)]
pub struct Lines {
    bytes: VecDeque<u8>,
    ended: bool,
}

impl Lines {
    /// The next line, without its end; `None` at the end of the input, or when `stop`, asked every `tick`, says so.
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
                    // A standard input that can't be read has ended.
                    Err(_) => self.ended = true,
                }
            }
        }
    }
}

/// Whether reading gives something, or the end, at once; waits for it for `tick`.
fn is_ready(tick: Duration) -> bool {
    let stdin = stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    // A tick always fits.
    let limit = Timespec::try_from(tick).ok();
    match poll(&mut fds, limit.as_ref()) {
        Ok(ready) => ready > 0,
        // A signal came: the caller looks at what it asks for. A read would wait for the next line first.
        Err(Errno::INTR) => false,
        // Another error is left to the read that follows.
        Err(_) => true,
    }
}

fn text(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    String::from_utf8_lossy(line).into_owned()
}

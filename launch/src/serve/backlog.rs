//! How long an answer may wait for a client that reads slowly.
//!
//! A client may be slower than the model, as a terminal is. But it must not keep an answer, and its memory, for as long as it likes. So
//! each byte that it takes earns it a little time, and it is given up when its time is over.

use super::limits::Limits;
use std::time::{Duration, Instant};

/// Longer times are cut, because they are added to points in time.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// The time that a client has left.
#[derive(Debug)]
pub struct Backlog {
    /// Time for a client that has taken nothing yet.
    grace: Duration,
    /// Bytes that earn a second.
    slowest: u64,
    /// A client never has more time than this.
    longest: Duration,
    /// When the client's time is over. `None`: nothing has waited since it last caught up.
    end: Option<Instant>,
    /// Bytes that it had taken when `end` was computed.
    taken: u64,
}

impl Backlog {
    /// A client that has taken nothing yet.
    pub fn new(limits: &Limits) -> Self {
        Backlog {
            grace: limits.write_time.min(LONGEST),
            slowest: u64::from(limits.slowest_reader.max(1)),
            longest: limits.longest_pause.min(LONGEST),
            end: None,
            taken: 0,
        }
    }

    /// True if something has waited since the client last caught up.
    pub fn has_begun(&self) -> bool {
        self.end.is_some()
    }

    /// Something waits for the client, which has taken `taken` bytes so far. Returns when its time is over.
    pub fn wait(&mut self, now: Instant, taken: u64) -> Instant {
        let more = taken.saturating_sub(self.taken);
        self.taken = self.taken.max(taken);
        let earned = Duration::from_millis(more.saturating_mul(1000) / self.slowest).min(self.longest);
        // The time goes on where it was, however little the client takes.
        let begin = self.end.unwrap_or(now + self.grace);
        let end = (begin + earned).min(now + self.longest);
        self.end = Some(end);
        end
    }

    /// The client has taken everything.
    pub fn caught_up(&mut self) {
        self.end = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backlog() -> Backlog {
        Backlog::new(&Limits::default())
    }

    /// The time at which a client is given up that takes `bytes` every `seconds`, if that happens within a day.
    fn given_up_after(bytes: u64, seconds: u64) -> Option<Duration> {
        let (mut backlog, begin) = (backlog(), Instant::now());
        let (mut now, mut taken) = (begin, 0);
        let mut end = backlog.wait(begin, 0);
        while now - begin < Duration::from_secs(24 * 3600) {
            now += Duration::from_secs(seconds);
            if now >= end {
                return Some(end - begin);
            }
            taken += bytes;
            end = backlog.wait(now, taken);
        }
        None
    }

    #[test]
    fn a_slow_client_may_take_as_long_as_it_needs() {
        // A terminal, and the slowest client that is possible.
        assert_eq!(given_up_after(1000, 1), None);
        assert_eq!(given_up_after(256, 1), None);
        // Its system may take the bytes in larger pieces.
        assert_eq!(given_up_after(20_000, 20), None);
    }

    #[test]
    fn a_client_that_only_takes_a_few_bytes_is_given_up() {
        assert_eq!(given_up_after(0, 1), Some(Duration::from_secs(30)));
        for (bytes, seconds) in [(1, 29), (10, 29), (200, 29), (100, 1)] {
            let after = given_up_after(bytes, seconds).expect("it is given up");
            assert!(after < Duration::from_secs(60), "{bytes} bytes every {seconds} s: {after:?}");
        }
    }

    #[test]
    fn bytes_taken_in_advance_allow_a_pause_of_a_bounded_length() {
        let (mut backlog, begin) = (backlog(), Instant::now());
        let longest = Limits::default().longest_pause;
        // Pieces of 64 KiB arrive 64 s apart if a client on the same machine reads 1 KiB/s.
        for piece in 1..100 {
            let now = begin + Duration::from_secs(64 * piece);
            assert_eq!(backlog.wait(now, piece << 16), now + longest);
        }
        let last = begin + Duration::from_secs(64 * 99);
        // It takes nothing more.
        assert_eq!(backlog.wait(last + longest, 99 << 16), last + longest);
        // A client that has taken everything starts anew.
        assert!(backlog.has_begun());
        backlog.caught_up();
        assert!(!backlog.has_begun());
        let later = last + Duration::from_secs(10_000);
        assert_eq!(backlog.wait(later, 99 << 16), later + Limits::default().write_time);
    }
}

//! Refusals take their time when there are many: a client that asks again at once would otherwise take the cores from those that are
//! served. On the CPU target a refusal costs client and server about a third of a millisecond, which is a token.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two refusals in the long run.
const STEP: Duration = Duration::from_millis(10);
/// So many come at once before any of them waits.
const AT_ONCE: u32 = 64;
/// No refusal waits longer: `Retry-After` asks for a second at least, too.
const LONGEST: Duration = Duration::from_secs(1);

/// How long each refusal waits.
#[derive(Debug)]
pub struct Pace {
    /// When the next refusal may leave; up to `AT_ONCE` steps ago.
    next: Mutex<Instant>,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { next: Mutex::new(Instant::now()) }
    }
}

impl Pace {
    /// What the refusal that is ready `now` has to wait.
    pub fn wait(&self, now: Instant) -> Duration {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(STEP * AT_ONCE).unwrap_or(now);
        // Those that come while all wait for the longest time do not make later ones wait for it too.
        *next = (*next).max(earliest).min(now + LONGEST) + STEP;
        next.saturating_duration_since(now).min(LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_refusals_leave_at_once_and_many_at_a_bounded_rate() {
        let pace = Pace::default();
        let begin = Instant::now() + STEP * AT_ONCE;
        for _ in 0..AT_ONCE {
            assert_eq!(pace.wait(begin), Duration::ZERO);
        }
        assert_eq!(pace.wait(begin), STEP);
        for _ in 0..10_000 {
            assert!(pace.wait(begin) <= LONGEST);
        }
        assert_eq!(pace.wait(begin), LONGEST);
        // The flood is over.
        let after = begin + LONGEST + STEP * 2;
        assert!(pace.wait(after) <= STEP);
        assert_eq!(pace.wait(after + STEP * AT_ONCE), Duration::ZERO);
    }
}

//! Delays refusals if there are many. Otherwise a client that retries at once would take the cores from running
//! requests. On the CPU target, a refusal costs client and server about a third of a millisecond, as much as a token.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two refusals in the long run.
const STEP: Duration = Duration::from_millis(10);
/// This many refusals in a row leave without a delay.
const AT_ONCE: u32 = 64;
/// Maximum delay of a refusal. `Retry-After` asks for at least a second too.
const LONGEST: Duration = Duration::from_secs(1);

/// Computes the delay of each refusal.
#[derive(Debug)]
pub struct Pace {
    /// When the next refusal may leave; up to `AT_ONCE` steps in the past.
    next: Mutex<Instant>,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { next: Mutex::new(Instant::now()) }
    }
}

impl Pace {
    /// The delay of a refusal that is ready `now`.
    pub fn wait(&self, now: Instant) -> Duration {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(STEP * AT_ONCE).unwrap_or(now);
        // Refusals that arrive while the maximum delay applies do not add to the delay of later ones.
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

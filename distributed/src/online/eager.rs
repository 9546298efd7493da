//! Checks without pauses, for a host that has cores to spare.

use crate::affinity::Cores;
use crate::bell::Bell;
use std::time::{Duration, Instant};

/// The next message, or the first token of a short prompt, comes within this time, or it takes so long that a pause hardly matters.
const LONGEST: Duration = Duration::from_micros(300);

/// Cores for a rank's host, the threads that serve connections, and other programs.
const FEWEST_CORES: usize = 4;

/// When a host checks without pauses. A thread that sleeps takes tens of microseconds to wake up, on some machines more than a hundred,
/// and a first token passes through the hosts several times.
#[derive(Debug)]
pub(super) struct Eager {
    able: bool,
    until: Option<Instant>,
}

impl Eager {
    /// For a host with this `bell`, on a rank with these `cores`. On the CPU target the workers need the cores, and the kernel rings.
    pub fn new(bell: Bell, cores: &Cores) -> Eager {
        Eager { able: !bell.of_kernel && cores.sharers == 1 && cores.own.len() >= FEWEST_CORES, until: None }
    }

    /// False if this host always sleeps between checks.
    pub fn is_able(&self) -> bool {
        self.able
    }

    /// More is expected at once.
    pub fn begin(&mut self) {
        self.until = self.able.then(|| Instant::now() + LONGEST);
    }

    /// More is expected at once if it was before.
    pub fn go_on(&mut self) {
        if self.is_on() {
            self.begin();
        }
    }

    /// What was expected is here.
    pub fn end(&mut self) {
        self.until = None;
    }

    pub fn is_on(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn only_a_host_with_cores_to_spare_is_eager_and_not_for_long() {
        static WORD: AtomicU32 = AtomicU32::new(0);
        let bell = Bell::of_hosts(&WORD);
        let cores = |count, sharers| Cores { own: (0..count).collect(), sharers };
        let mut eager = Eager::new(bell, &cores(16, 1));
        assert!(eager.is_able() && !eager.is_on());
        // Nothing was expected before.
        eager.go_on();
        assert!(!eager.is_on());
        eager.begin();
        assert!(eager.until.is_some_and(|until| until <= Instant::now() + LONGEST));
        eager.end();
        assert!(!eager.is_on());
        eager.until = Some(Instant::now());
        assert!(!eager.is_on());
        // SAFETY: a static word.
        let of_kernel = unsafe { Bell::new(NonNull::from(&WORD).cast(), true) };
        for (bell, cores) in [(bell, cores(3, 1)), (bell, cores(16, 2)), (of_kernel, cores(16, 1))] {
            let mut sleeps = Eager::new(bell, &cores);
            sleeps.begin();
            assert!(!sleeps.is_able() && sleeps.until.is_none());
        }
    }
}

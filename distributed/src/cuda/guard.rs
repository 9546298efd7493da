//! Ends a kernel whose host cannot go on.

use std::time::{Duration, Instant};

/// How often the guard checks whether the kernel has ended.
const LOOK: Duration = Duration::from_millis(1);

/// A kernel that runs until it is done or told to end.
pub(super) trait Runs {
    /// Tells it to end.
    fn tell_to_end(&self);
    /// True if it does not run any more.
    fn is_over(&self) -> bool;
    /// It did not end. From now on, nothing may wait for it or free its memory.
    fn leave(&self);
}

/// A kernel that has been launched. It ends before the rank's memory goes away, even if the host's thread panics or returns early: freeing
/// memory of the GPU waits for the kernel, and one that waits for requests never ends by itself.
pub(super) struct Guard<'a, K: Runs> {
    /// `None` once it has ended.
    kernel: Option<&'a K>,
    limit: Duration,
}

impl<'a, K: Runs> Guard<'a, K> {
    /// For a kernel that ends within `limit` after it was told to, unless it is stuck.
    pub fn new(kernel: &'a K, limit: Duration) -> Self {
        Guard { kernel: Some(kernel), limit }
    }

    /// The kernel has ended.
    pub fn has_ended(mut self) {
        self.kernel = None;
    }
}

impl<K: Runs> Drop for Guard<'_, K> {
    fn drop(&mut self) {
        let Some(kernel) = self.kernel.filter(|kernel| !kernel.is_over()) else { return };
        kernel.tell_to_end();
        let begin = Instant::now();
        while !kernel.is_over() {
            if begin.elapsed() > self.limit {
                kernel.leave();
                return;
            }
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    /// A kernel that ends a few looks after it was told to, or never.
    struct Kernel {
        looks: Cell<u32>,
        log: RefCell<Vec<&'static str>>,
    }

    impl Kernel {
        fn new(looks: u32) -> Kernel {
            Kernel { looks: Cell::new(looks), log: RefCell::default() }
        }

        fn note(&self, what: &'static str) {
            self.log.borrow_mut().push(what);
        }
    }

    impl Runs for Kernel {
        fn tell_to_end(&self) {
            self.note("told");
        }

        fn is_over(&self) -> bool {
            if !self.log.borrow().contains(&"told") {
                return false;
            }
            self.looks.set(self.looks.get().saturating_sub(1));
            self.looks.get() == 0
        }

        fn leave(&self) {
            self.note("left");
        }
    }

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_panic_of_the_host_ends_the_kernel_before_its_memory_goes_away() {
        struct Memory<'a>(&'a Kernel);
        impl Drop for Memory<'_> {
            fn drop(&mut self) {
                assert_eq!(self.0.looks.get(), 0, "the kernel still runs");
                self.0.note("freed");
            }
        }
        fn host(kernel: &Kernel) {
            let _memory = Memory(kernel);
            let _guard = Guard::new(kernel, LIMIT);
            // A panic without its message.
            resume_unwind(Box::new(()));
        }
        let kernel = Kernel::new(3);
        assert!(catch_unwind(AssertUnwindSafe(|| host(&kernel))).is_err());
        assert_eq!(*kernel.log.borrow(), ["told", "freed"]);
    }

    #[test]
    fn a_stuck_kernel_is_left() {
        let kernel = Kernel::new(u32::MAX);
        drop(Guard::new(&kernel, Duration::from_millis(5)));
        assert_eq!(*kernel.log.borrow(), ["told", "left"]);
    }

    #[test]
    fn a_kernel_that_has_ended_is_not_told() {
        let kernel = Kernel::new(3);
        Guard::new(&kernel, LIMIT).has_ended();
        assert!(kernel.log.borrow().is_empty());
    }
}

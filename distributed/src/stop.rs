//! A request to end the kernels of one world.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tells the kernels of one world to end ([`crate::World::stopped_by`]), as a signal tells those of all worlds of the process. A clone is
/// the same request.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// The running kernel ends with an error, and so does any later one.
    pub fn ask(&self) {
        // Relaxed: pairs with `is_asked`. It only makes a loop end, and publishes nothing.
        self.0.store(true, Ordering::Relaxed);
    }

    /// True after [`Stop::ask`].
    pub(crate) fn is_asked(&self) -> bool {
        // Relaxed: pairs with `ask`.
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::World;

    #[test]
    fn a_stop_ends_the_kernels_of_its_world_only() {
        let stop = Stop::default();
        let (stopped, other) = (World::single().stopped_by(stop.clone()), World::single());
        assert!(!stopped.is_stopping());
        stop.ask();
        assert!(stopped.is_stopping() && !other.is_stopping());
    }
}

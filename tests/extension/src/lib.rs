//! One task type, one operator that only composes others, one collective and one pass, each a file and a line here.

pub mod block;
pub mod count;
pub mod negate;
pub mod rotate;

use std::sync::{Arc, Once};
use taskgraph::Registry;

/// The registry with what this crate adds.
pub fn registry() -> Registry {
    static ADDED: Once = Once::new();
    ADDED.call_once(|| kernels_cu::registry::add(&negate::REGISTRATION).expect("a name of its own"));
    let mut registry = kernels_cu::registry::registry();
    registry.register(Arc::new(block::Block));
    registry.register_collective(Arc::new(rotate::Rotate));
    registry
}

//! One task type, one operator that only composes others, one collective, one pass and one model family. Each is a file
//! and a line here.

pub mod bigram;
pub mod block;
pub mod count;
pub mod negate;
pub mod rotate;

use std::sync::{Arc, Once};
use taskgraph::Registry;

/// Adds what every graph of this process may use: everything except the pass and the collective, which a graph's own
/// registry names.
pub fn add() {
    static ADDED: Once = Once::new();
    ADDED.call_once(|| {
        kernels_cu::registry::add(&negate::REGISTRATION).expect("a name of its own");
        kernels_cu::registry::add(&block::REGISTRATION).expect("a name of its own");
        launch::model::families::add(&bigram::Bigram).expect("a name of its own");
    });
}

/// The registry with this crate's additions.
pub fn registry() -> Registry {
    add();
    let mut registry = kernels_cu::registry::registry();
    registry.register_collective(Arc::new(rotate::Rotate));
    registry
}

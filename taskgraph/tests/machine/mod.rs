//! A machine that executes small task graphs on bytes, in every order that the protocol allows.
//!
//! It knows counters, lists, launches and memory, but no regions, clocks or proofs. Memory consists of words of four
//! bytes. A task writes a hash of everything that it has read, so two executions differ as soon as one task has read
//! something else. Tasks read all inputs in one step, and write all outputs in a later one. A put reads and writes at
//! any time after its task was taken. Flagged words are visible at once. With `lazy`, other writes become visible only
//! after the writer's next trigger, so a word publishes nothing else.
//!
//! Orders that cannot be told apart are explored once (`races.rs`).

mod build;
mod execution;
mod explore;
mod merge;
mod model;
mod network;
mod races;

pub use explore::Outcome;
pub use model::Machine;
use taskgraph::task_graph::TaskGraph;

impl Machine {
    /// `classes[c][r]`; `program` has the class of each iteration.
    pub fn new(classes: &[&[TaskGraph]], program: &[usize]) -> Machine {
        let mut machine = build::build(classes, program);
        merge::merge(&mut machine);
        machine
    }

    /// The same with every word of memory, even those that change together.
    pub fn of_all_words(classes: &[&[TaskGraph]], program: &[usize]) -> Machine {
        build::build(classes, program)
    }
}

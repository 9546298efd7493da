//! The trait of a pass.

use crate::error::BuildError;
use crate::op_graph::OpGraph;
use crate::options::BuildOptions;
use crate::registry::Registry;
use std::fmt;

/// A property of an op graph that passes need, give and keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// Names, order and attributes are checked, and every tensor has its type.
    Typed,
    /// No operator is left that only composes others.
    Composed,
    /// Every tensor has its sharding, and collectives are inserted where a value changes its sharding.
    Sharded,
    /// No operator computes an unused result.
    Live,
    /// Fusion is complete: running it again finds nothing.
    Fused,
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Property::Typed => "typed",
            Property::Composed => "composed",
            Property::Sharded => "sharded",
            Property::Live => "live",
            Property::Fused => "fused",
        })
    }
}

/// The inputs of a pass besides the graph.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Operators by name.
    pub registry: &'a Registry,
    /// The options that the graph is built with.
    pub options: &'a BuildOptions,
}

/// A pass: changes an op graph in place. It must not change what the graph computes.
pub trait Pass: fmt::Debug + Send + Sync {
    /// Its name, unique in a list.
    fn name(&self) -> &'static str;

    /// The properties that must hold before.
    fn needs(&self) -> &'static [Property] {
        &[]
    }

    /// The properties that hold afterwards in any case.
    fn gives(&self) -> &'static [Property] {
        &[]
    }

    /// The properties that hold afterwards if they held before. All others count as lost.
    fn keeps(&self) -> &'static [Property];

    /// Changes the graph.
    ///
    /// # Errors
    /// The graph is invalid. The error names the operator or tensor.
    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError>;
}

//! What a pass is.

use crate::error::BuildError;
use crate::op_graph::OpGraph;
use crate::options::BuildOptions;
use crate::registry::Registry;
use std::fmt;

/// Something that holds for an op graph, which passes need, give and keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// Names, order and attributes are checked, and every tensor has its type.
    Typed,
    /// No operator is left that only composes others.
    Composed,
    /// Every tensor has its sharding, and collectives stand where a value changes it.
    Sharded,
    /// No operator does what nobody wants.
    Live,
    /// What is fused stays so: further fusion finds nothing.
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

/// What a pass may ask, besides the graph.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Operators by name.
    pub registry: &'a Registry,
    /// What the graph is built for.
    pub options: &'a BuildOptions,
}

/// A pass: takes an op graph and changes it in place. It must not change what the graph computes.
pub trait Pass: fmt::Debug + Send + Sync {
    /// Its name, unique in a list.
    fn name(&self) -> &'static str;

    /// What must hold before.
    fn needs(&self) -> &'static [Property] {
        &[]
    }

    /// What holds afterwards, whatever was before.
    fn gives(&self) -> &'static [Property] {
        &[]
    }

    /// What still holds afterwards, if it did before. All else is taken for lost.
    fn keeps(&self) -> &'static [Property];

    /// Changes the graph.
    ///
    /// # Errors
    /// What of the graph is wrong, with the name of the operator or tensor.
    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError>;
}

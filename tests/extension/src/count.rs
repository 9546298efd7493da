//! A pass: counts operators by type.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use taskgraph::passes::{Context, Property};
use taskgraph::{BuildError, OpGraph, Pass};

#[derive(Clone, Debug, Default)]
pub struct Count(pub Arc<Mutex<BTreeMap<String, usize>>>);

impl Pass for Count {
    fn name(&self) -> &'static str {
        "count"
    }
    fn needs(&self) -> &'static [Property] {
        &[Property::Sharded]
    }
    fn keeps(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed, Property::Sharded, Property::Live, Property::Fused]
    }
    fn run(&self, graph: &mut OpGraph, _: &Context<'_>) -> Result<(), BuildError> {
        let mut counts = self.0.lock().map_err(|_| BuildError::pass("count", "a thread panicked"))?;
        graph.ops.iter().for_each(|op| *counts.entry(op.op_type.clone()).or_default() += 1);
        Ok(())
    }
}

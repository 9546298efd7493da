//! Dead operators.

use super::pass::{Context, Pass, Property};
use crate::error::BuildError;
use crate::op_graph::{OpGraph, Role};

/// Removes operators whose results are not used: no output, no persistent tensor and no effect depends on them. A graph without
/// any of these is not changed: it is run only to be timed.
#[derive(Clone, Copy, Debug)]
pub struct DeadOperators;

impl Pass for DeadOperators {
    fn name(&self) -> &'static str {
        "dead"
    }

    fn needs(&self) -> &'static [Property] {
        &[Property::Typed]
    }

    fn gives(&self) -> &'static [Property] {
        &[Property::Live]
    }

    fn keeps(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed, Property::Sharded, Property::Fused]
    }

    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError> {
        let mut wanted: Vec<bool> =
            graph.tensors.iter().map(|t| t.output || matches!(t.role, Role::Persistent { .. })).collect();
        let mut live = vec![false; graph.ops.len()];
        for (index, op) in graph.ops.iter().enumerate().rev() {
            let effects = context.registry.get(&op.op_type).is_some_and(|t| t.has_effects());
            live[index] = effects || op.outputs.iter().any(|&t| wanted[t as usize]);
            if live[index] {
                op.inputs.iter().for_each(|&t| wanted[t as usize] = true);
            }
        }
        if live.contains(&true) {
            let mut live = live.into_iter();
            graph.ops.retain(|_| live.next().unwrap_or(true));
        }
        Ok(())
    }
}

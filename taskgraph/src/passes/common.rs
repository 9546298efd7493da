//! Common subexpressions.

use super::pass::{Context, Pass, Property};
use crate::error::BuildError;
use crate::op_graph::{Op, OpGraph, Role};
use std::collections::{HashMap, HashSet};

/// Removes duplicate work: an operator with the same type, inputs and attributes as an earlier one is replaced by it. If both
/// results are outputs, both operators stay.
#[derive(Clone, Copy, Debug)]
pub struct CommonSubexpressions;

impl Pass for CommonSubexpressions {
    fn name(&self) -> &'static str {
        "common"
    }

    fn needs(&self) -> &'static [Property] {
        &[Property::Typed]
    }

    fn keeps(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed, Property::Sharded, Property::Live, Property::Fused]
    }

    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError> {
        let written: HashSet<u32> = graph.ops.iter().flat_map(|op| op.outputs.iter().copied()).collect();
        let mut first_of: HashMap<(String, Vec<u32>, String), Vec<u32>> = HashMap::new();
        let mut replaced: HashMap<u32, u32> = HashMap::new();
        let mut kept: Vec<Op> = Vec::with_capacity(graph.ops.len());
        for mut op in std::mem::take(&mut graph.ops) {
            for input in &mut op.inputs {
                *input = replaced.get(input).copied().unwrap_or(*input);
            }
            let plain = op.outputs.iter().all(|&t| graph.tensors[t as usize].role == Role::Activation)
                && !context.registry.get(&op.op_type).is_some_and(|t| t.has_effects())
                // A persistent tensor may have another value at another place in the order.
                && !op.inputs.iter().any(|t| {
                    matches!(graph.tensors[*t as usize].role, Role::Persistent { .. }) && written.contains(t)
                });
            if !plain {
                kept.push(op);
                continue;
            }
            let attrs = serde_json::to_string(&op.attrs).unwrap_or_default();
            let key = (op.op_type.clone(), op.inputs.clone(), attrs);
            let Some(first) = first_of.get(&key) else {
                first_of.insert(key, op.outputs.clone());
                kept.push(op);
                continue;
            };
            let pairs = || first.iter().zip(&op.outputs).map(|(&a, &b)| (a as usize, b as usize));
            let same = |(a, b): (usize, usize)| {
                let (a, b) = (&graph.tensors[a], &graph.tensors[b]);
                a.dtype == b.dtype && a.dims == b.dims && a.sharding == b.sharding
            };
            if first.len() != op.outputs.len() || !pairs().all(same) {
                kept.push(op);
                continue;
            }
            // Both are outputs, so both are computed. But readers of the second may read the first.
            let both = pairs().any(|(a, b)| graph.tensors[a].output && graph.tensors[b].output);
            let pairs: Vec<(usize, usize)> = pairs().collect();
            if both {
                kept.push(op);
            }
            for (a, b) in pairs {
                if graph.tensors[b].output && !both {
                    // The tensor that stays gets the name of the output.
                    let name = std::mem::take(&mut graph.tensors[b].name);
                    graph.tensors[b].name = std::mem::replace(&mut graph.tensors[a].name, name);
                    (graph.tensors[a].output, graph.tensors[b].output) = (true, false);
                }
                replaced.insert(b as u32, a as u32);
            }
        }
        graph.ops = kept;
        Ok(())
    }
}

//! Results that reuse the memory of an operand.

use super::pass::{Context, Pass, Property};
use crate::error::BuildError;
use crate::op_graph::{OpGraph, Role};
use std::collections::HashSet;

/// Marks results that may reuse the memory of an operand that has no later reader ([`crate::TaskType::may_overwrite`]). The
/// memory plan then shares the memory if the order of tasks allows it.
#[derive(Clone, Copy, Debug)]
pub struct InPlace;

impl Pass for InPlace {
    fn name(&self) -> &'static str {
        "in_place"
    }

    fn needs(&self) -> &'static [Property] {
        &[Property::Typed, Property::Sharded]
    }

    fn keeps(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed, Property::Sharded, Property::Live, Property::Fused]
    }

    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError> {
        let mut read_later: HashSet<u32> = HashSet::new();
        let mut overwrites = std::collections::BTreeMap::new();
        for op in graph.ops.iter().rev() {
            let pairs = context.registry.get(&op.op_type).map_or(&[][..], |t| t.may_overwrite());
            for &(input, output) in pairs {
                let (Some(&input), Some(&output)) = (op.inputs.get(input), op.outputs.get(output)) else {
                    continue;
                };
                let (from, to) = (&graph.tensors[input as usize], &graph.tensors[output as usize]);
                let alike = from.dtype == to.dtype && from.dims == to.dims && from.sharding == to.sharding;
                let once = op.inputs.iter().filter(|&&t| t == input).count() == 1;
                let free = |t: &crate::op_graph::Tensor| t.role == Role::Activation && !t.output;
                if alike && once && free(from) && free(to) && !read_later.contains(&input) {
                    overwrites.entry(output).or_insert(input);
                }
            }
            read_later.extend(&op.inputs);
        }
        graph.overwrites = overwrites;
        Ok(())
    }
}

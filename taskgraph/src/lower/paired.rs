//! Weights whose rows lie in pairs, because their readers want each row of the first half next to its row of the second half.

use crate::error::BuildError;
use crate::op_graph::{Op, OpGraph};
use crate::registry::Registry;
use crate::target::Target;
use rustc_hash::FxHashMap;

/// The paired weights of a graph. A matrix has one order of rows, so its readers must agree.
pub(super) fn paired_weights(
    graph: &OpGraph,
    registry: &Registry,
    target: &Target,
) -> Result<Vec<u32>, BuildError> {
    let mut paired: FxHashMap<u32, &Op> = FxHashMap::default();
    let reads_pairs = |op: &Op, input: usize| {
        registry.get(&op.op_type).is_some_and(|t| t.paired_inputs(target).contains(&input))
    };
    let reads = || graph.ops.iter().flat_map(|op| op.inputs.iter().enumerate().map(move |read| (op, read)));
    for (op, (input, &tensor)) in reads() {
        if reads_pairs(op, input) {
            paired.insert(tensor, op);
        }
    }
    for (op, (input, tensor)) in reads() {
        if let Some(other) = paired.get(tensor)
            && !reads_pairs(op, input)
        {
            return Err(BuildError::tensor(
                &graph.tensors[*tensor as usize].name,
                format!(
                    "is read by `{}` ({}) in pairs of rows and by `{}` ({}) row by row; use two weights",
                    other.name, other.op_type, op.name, op.op_type
                ),
            ));
        }
    }
    let mut list: Vec<u32> = paired.into_keys().collect();
    list.sort_unstable();
    Ok(list)
}

//! The layout of an operand in memory follows from its role: weights with two dimensions are packed in tiles, and all other tensors are
//! plain. A task would misread one as the other, so each operand must have the role that its operator's contract asks for.

use super::view::op_view;
use crate::error::BuildError;
use crate::op_graph::{Op, OpGraph, Role, Tensor};
use crate::registry::Registry;

/// Checks the roles of an operator's inputs: weights that it reads packed ([`crate::TaskType::tiled_inputs`]), and inputs that never
/// change ([`crate::TaskType::constant_inputs`]).
pub(super) fn check_roles(graph: &OpGraph, op: &Op, registry: &Registry) -> Result<(), BuildError> {
    let task_type = registry.get(&op.op_type);
    if let Some(composed) = task_type
        && composed.compose(&op_view(graph, op)).map_err(|e| BuildError::op(&op.name, e.0))?.is_some()
    {
        return Ok(()); // The operators that replace it are checked.
    }
    let tiled = task_type.map_or(&[][..], |t| t.tiled_inputs());
    let constant = task_type.map_or(&[][..], |t| t.constant_inputs());
    for (index, &input) in op.inputs.iter().enumerate() {
        let tensor = &graph.tensors[input as usize];
        let is = name_of(&tensor.role);
        let problem = match is_packed(tensor) {
            false if tiled.contains(&index) => {
                format!(
                    "reads input {index}, `{}`, packed in tiles, so it must be a weight, but it is {is}",
                    tensor.name
                )
            }
            true if !tiled.contains(&index) => format!(
                "cannot read `{}`, because weights with two dimensions are packed in tiles; make it a constant",
                tensor.name
            ),
            _ if constant.contains(&index) && !is_constant(&tensor.role) => format!(
                "may read input {index}, `{}`, early, so it must be a weight, a constant or an input, but it is {is}",
                tensor.name
            ),
            _ => continue,
        };
        return Err(BuildError::op(&op.name, format!("`{}` {problem}", op.op_type)));
    }
    Ok(())
}

/// [`check_roles`] of every operator.
pub(crate) fn check_all_roles(graph: &OpGraph, registry: &Registry) -> Result<(), BuildError> {
    graph.ops.iter().try_for_each(|op| check_roles(graph, op, registry))
}

fn is_packed(tensor: &Tensor) -> bool {
    matches!(tensor.role, Role::Weight { .. }) && tensor.dims.len() == 2
}

fn is_constant(role: &Role) -> bool {
    matches!(role, Role::Weight { .. } | Role::Constant | Role::Input)
}

fn name_of(role: &Role) -> &'static str {
    match role {
        Role::Input => "an input",
        Role::Weight { .. } => "a weight",
        Role::Constant => "a constant",
        Role::Persistent { .. } => "persistent",
        Role::Activation => "an activation",
    }
}

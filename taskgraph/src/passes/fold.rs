//! Constant folding.

use super::pass::{Context, Pass, Property};
use crate::error::BuildError;
use crate::op_graph::{Op, OpGraph, Role, Tensor};
use crate::split::Sharding;
use crate::task_type::OpError;
use std::fmt::Debug;
use std::sync::Arc;

/// Knows the values of constants and computes with them.
pub trait Evaluate: Debug + Send + Sync {
    /// Computes the outputs of an operator whose inputs are all constant, and stores their values under the names of the output
    /// tensors. Returns false if it cannot; the operator then stays.
    ///
    /// # Errors
    /// The values are invalid.
    fn evaluate(&self, graph: &OpGraph, op: &Op) -> Result<bool, OpError>;
}

/// Computes operators with constant inputs once, when the graph is built. Their results become constants. It applies to operators
/// that depend only on their inputs ([`crate::TaskType::is_pure`]).
///
/// This crate has no values and no kernels, so the default list does not contain this pass. A caller that has both inserts it
/// before `shard`.
#[derive(Clone, Debug)]
pub struct FoldConstants(pub Arc<dyn Evaluate>);

impl Pass for FoldConstants {
    fn name(&self) -> &'static str {
        "fold"
    }

    fn needs(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed]
    }

    fn keeps(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed]
    }

    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError> {
        let mut index = 0;
        while index < graph.ops.len() {
            let op = &graph.ops[index];
            let tensors = |ids: &[u32]| ids.iter().map(|&t| &graph.tensors[t as usize]).collect::<Vec<_>>();
            // The values of a partial tensor are one rank's summand, not its value.
            let constant = |t: &Tensor| {
                matches!(t.role, Role::Weight { .. } | Role::Constant) && t.sharding != Sharding::Partial
            };
            let task_type = context.registry.get(&op.op_type);
            let folds = task_type.is_some_and(|t| t.is_pure() && !t.has_effects())
                && !op.inputs.is_empty()
                && tensors(&op.inputs).iter().all(|t| constant(t))
                && tensors(&op.outputs).iter().all(|t| t.role == Role::Activation && !t.output);
            let evaluated = match folds {
                true => self.0.evaluate(graph, op).map_err(|e| BuildError::op(&op.name, e.0))?,
                false => false,
            };
            if evaluated {
                let op = graph.ops.remove(index);
                op.outputs.iter().for_each(|&t| graph.tensors[t as usize].role = Role::Constant);
            } else {
                index += 1;
            }
        }
        Ok(())
    }
}

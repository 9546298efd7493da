//! Sums whose rows stay with the ranks that sum them.
//!
//! After a two-shot allreduce every rank has the whole sum. If each reader first computes something row by row, such as a norm, the
//! ranks need only that. So a rank computes it for the rows that it sums and sends the result. The result is smaller
//! than the f32 sum, and each row is computed only once. The next allreduce needs the same rows of the sum as its
//! residual.

use super::classes::Classes;
use super::collectives::Uses;
use super::types::Part;
use crate::collective::{CollectiveOp, SumRows};
use crate::error::BuildError;
use crate::op_graph::{OpGraph, Role};
use crate::options::BuildOptions;
use crate::passes::op_view;
use crate::registry::Registry;

/// Which sums stay with their owners.
#[derive(Debug)]
pub(crate) struct Owned {
    /// How each operator sums, if it is a collective.
    pub rows: Vec<SumRows>,
    kept: Vec<bool>,
}

impl Owned {
    /// For a graph that has been sharded and fused.
    pub fn new(
        graph: &OpGraph,
        registry: &Registry,
        options: &BuildOptions,
        uses: &Uses,
        classes: &mut Classes<'_>,
        parts: &mut Vec<Part>,
    ) -> Result<Owned, BuildError> {
        let mut owned =
            Owned { rows: vec![SumRows::Any; graph.ops.len()], kept: vec![false; graph.tensors.len()] };
        let mut kept_rows = None;
        let sums_rows: Vec<bool> = graph
            .ops
            .iter()
            .map(|op| {
                let Some(collective) = registry.collective(&op.op_type) else { return false };
                let view = op_view(graph, op);
                collective.sums_rows(&CollectiveOp {
                    view: &view,
                    options,
                    can_push: uses.can_push(graph, registry, options, op),
                    can_place: false,
                    can_store: false,
                    rows: SumRows::Any,
                })
            })
            .collect();
        for (index, op) in graph.ops.iter().enumerate().filter(|(index, _)| sums_rows[*index]) {
            let tensor = op.outputs[0];
            let sum = &graph.tensors[tensor as usize];
            if sum.role != Role::Activation || sum.output {
                continue;
            }
            let mut computes = false;
            let mut fits = true;
            for (reader, other) in graph.ops.iter().enumerate().filter(|(_, o)| o.inputs.contains(&tensor)) {
                fits &= if registry.collective(&other.op_type).is_some() {
                    sums_rows[reader] && other.inputs[0] != tensor
                } else {
                    computes = true;
                    let input = other.inputs.iter().position(|&t| t == tensor).unwrap_or(0);
                    let class = classes.cut(other, false, None, Some(input), parts)?;
                    class.iter().all(|local| local.own.is_some())
                };
                if !fits {
                    break;
                }
            }
            if fits && computes {
                owned.kept[tensor as usize] = true;
                owned.rows[index] = SumRows::Kept;
                kept_rows = Some(sum.dims[0]);
            }
        }
        if let Some(rows) = kept_rows {
            classes.turn_rows(rows);
        }
        for (index, op) in graph.ops.iter().enumerate().filter(|(index, _)| sums_rows[*index]) {
            if owned.rows[index] == SumRows::Any && op.inputs.iter().any(|&t| owned.kept[t as usize]) {
                owned.rows[index] = SumRows::Own;
            }
        }
        Ok(owned)
    }

    /// The input of an operator that stays with its owners.
    pub fn input_of(&self, inputs: &[u32]) -> Option<usize> {
        inputs.iter().position(|&tensor| self.kept[tensor as usize])
    }
}

//! The tasks of a product of few rows.

use super::gated::rows_of;
use super::{Family, Operands};
use crate::abi::{mpk_linear_params, params_words};
use crate::tasks::contract;
use crate::tasks::linear_parts;
use crate::tasks::source::Source;
use taskgraph::task_type::{Access, LocalOp, OpError, Partition, TaskSpec};
use taskgraph::{Region, Target};

/// Bytes of prepared rows that a task keeps in the cache.
const CHUNK_BYTES: u64 = 1 << 20;

/// Minimum and maximum number of rows per chunk. With fewer rows, the weights would be read too often.
const CHUNK_ROWS: (u64, u64) = (96, 480);

impl Family {
    /// Tasks, for [`taskgraph::TaskType::partition`].
    pub fn partition(self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let at = self.operands(op.inputs.len())?;
        let (x, out) = (&op.inputs[0], &op.outputs[0]);
        let (parts, x_parts) = (linear_parts::parts_of(out), linear_parts::parts_of(x));
        let residual_parts = at.residual.map_or(1, |residual| linear_parts::parts_of(&op.inputs[residual]));
        let (rows, columns) = contract::local_matrix(&linear_parts::matrix_of(out))?;
        let (weight_rows, k) = contract::local_matrix(&op.inputs[at.weight])?;
        let (x_rows, x_columns) = contract::local_matrix(&linear_parts::matrix_of(x))?;
        if u64::from(weight_rows) != self.halves() * u64::from(columns)
            || u64::from(x_columns) != self.x_columns(k.into())
        {
            return Err(OpError(format!(
                "on rank {} x has {x_columns} columns and the output {columns}, but the weight is [{weight_rows}, {k}]",
                op.rank
            )));
        }
        if parts > 1 && (self.source != Source::Plain || self.gated)
            || x_parts > 1 && self.source != Source::RmsNorm
        {
            return Err(OpError("only plain products write summands, and only norms read them".to_string()));
        }
        let k_padded = u64::from(k).next_multiple_of(2);
        // A rank may hold no column at all if there are fewer columns than ranks.
        let chunk_rows =
            (CHUNK_BYTES / (4 * k_padded.max(2))).clamp(CHUNK_ROWS.0, CHUNK_ROWS.1).min(u64::from(rows));
        let params = self.params(op, &at, chunk_rows as u32)?;
        if !self.has_gate(params.activation, target) {
            return Err(OpError(format!("on a GPU its `activation` can only be silu; {}", self.separate())));
        }
        let column_unit = self.column_unit(target);
        if self.gated && columns % column_unit != 0 {
            return Err(OpError(format!(
                "on rank {} the weight has {columns} rows of gates, but must have a multiple of {column_unit}; {}",
                op.rank,
                self.separate()
            )));
        }
        let align = contract::attr_u32(op.global.attrs, "align")?.unwrap_or(1);
        let row_bytes = |i: usize| u64::from(k) * op.inputs[i].dtype.size();
        let tiles = Target { column_unit, ..target.clone() }.column_tiles(columns, align);
        let pieces = tiles.iter().flat_map(|tile| (0..parts).map(move |part| (tile, part)));
        let tasks = pieces.map(|(tile, part)| {
            let tile_columns = Region::whole(&[rows, columns]).with(1, tile.start, tile.end);
            // The same columns of all summands.
            let stacked = |parts| Region::whole(&[parts, rows, columns]).with(2, tile.start, tile.end);
            let own_k = linear_parts::columns_of(part, parts, k);
            let mut task = TaskSpec::default();
            task.reads.push(match (x_parts, parts) {
                (1, 1) => Access::new(0, Region::whole(&[x_rows, x_columns])),
                (1, _) => Access::new(0, Region::whole(&[x_rows, k]).with(1, own_k.start, own_k.end)),
                _ => Access::new(0, Region::whole(&[x_parts, x_rows, x_columns])),
            });
            if let Some(norm) = at.norm {
                task.reads.push(Access::new(norm as u8, Region::whole(&[k])));
            }
            for range in rows_of(self.gated, tile.clone(), columns, target) {
                let rows = Region::whole(&[weight_rows, k]).with(0, range.start, range.end);
                task.reads.push(Access::new(at.weight as u8, rows.with(1, own_k.start, own_k.end)));
            }
            if let Some(bias) = at.bias {
                // First the bias of the gates, then that of the ups.
                for first in (0..self.halves() as u32).map(|half| half * columns) {
                    let part = Region::whole(&[weight_rows]).with(0, first + tile.start, first + tile.end);
                    task.reads.push(Access::new(bias as u8, part));
                }
            }
            let part_of = |operand, parts| Access::inner(operand, stacked(parts).with(0, part, part + 1));
            if let Some(residual) = at.residual.map(|residual| residual as u8) {
                task.reads.push(match residual_parts {
                    1 => Access::new(residual, tile_columns),
                    // Each summand of the residual becomes part of one of the output's.
                    _ if residual_parts == parts => part_of(residual, parts),
                    _ => Access::new(residual, stacked(residual_parts)),
                });
            }
            task.writes.push(if parts > 1 { part_of(0, parts) } else { Access::new(0, tile_columns) });
            // If several tasks share a tile, one adds the bias and, if it has no parts of its own, the residual. 1: leave it out.
            task.args[0] = i32::from(part > 0);
            task.args[1] = i32::from(part > 0 && residual_parts != parts);
            let width = u64::from(tile.end - tile.start);
            let bytes =
                self.halves() * width * row_bytes(at.weight) + u64::from(rows) * (row_bytes(0) + width * 4);
            task.cost = bytes / u64::from(parts);
            task
        });
        Ok(Partition {
            params: params_words(&params),
            // One row, then the chunk. A row has whole pairs of elements.
            scratch_bytes: (4 * k_padded).next_multiple_of(64) + chunk_rows * 4 * k_padded,
            tasks: tasks.collect(),
        })
    }

    /// The parameters of all tasks. `chunk_rows`: the number of rows that a task prepares at a time.
    fn params(self, op: &LocalOp<'_>, at: &Operands, chunk_rows: u32) -> Result<mpk_linear_params, OpError> {
        let (attrs, out) = (op.global.attrs, &op.outputs[0]);
        let partial = op.world > 1 && contract::split_columns(op.global.inputs[at.weight].sharding).is_some();
        // The type of summands does not say what their rows count.
        let rows = if linear_parts::parts_of(out) > 1 { op.global.outputs[0].ty.rows } else { out.rows };
        Ok(mpk_linear_params {
            push: 0,
            rows_kind: contract::rows_kind(rows),
            gather_samples: u32::from(contract::attr_bool(attrs, "gather_samples")?),
            has_bias: u32::from(at.bias.is_some()),
            add_bias: u32::from(!partial || op.rank == 0),
            has_residual: u32::from(at.residual.is_some()),
            chunk_rows,
            gated: u32::from(self.gated),
            eps: if at.norm.is_some() { contract::eps(op.global)? } else { 0.0 },
            activation: contract::activation(attrs)?,
        })
    }
}

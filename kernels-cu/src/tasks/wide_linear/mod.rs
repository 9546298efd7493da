//! `wide_linear`: a product of many rows in tiles that use Hopper's tensor cores at their full speed.
//!
//! Inputs: x in `MPK_LAYOUT_WIDE` (from `wide_rows`, a gated product or attention), weight `[n, k]` (`[2n, k]` = gate above up with
//! `gated`), optional bias, optional residual `[rows, n]` (f32). Output `[rows, n]`: x times the weight, with the same result as `linear`,
//! `linear_with_residual` or, with `gated`, `linear` and `silu_mul`. A gated output is in `MPK_LAYOUT_WIDE` if its reader wants
//! that. If a tile has all rows, x has the narrower column tiles. The residual may then be two summands `[2, rows, n]`.
//!
//! The output can be pushed if one tile has all rows: some row is always in use, so every task pushes something, and its pushes order what
//! follows. With several tiles of rows, tasks can write it into a peer's memory: each triggers an event there, even if it has nothing to write.
//!
//! Attributes: `gated`, `has_bias`, `has_residual`, `parts` (1, 2 or 4) and `first_row`. With `parts` there is one output (f32) for each
//! part of k, the first with bias and residual, or one output `[2, rows, n]` with both parts. With `first_row`, only the tiles from this row
//! on have parts. Then the first output is the product's own, of which the tasks write the rows before, and the parts follow. The
//! expansion of the linear family (`src/tasks/wide.rs`) creates this operator.

use crate::abi::{self, mpk_task_wide_linear, mpk_wide_linear_params, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use crate::tasks::linear_family::gated::{gpu_layout, rows_of};
use crate::tasks::linear_knobs::PUSHED_ROWS;
use crate::tasks::operand::gpu_float;
use crate::tasks::wide::{is_narrow, is_wide, matrix, narrow_dims, tall_tiles, wide_dims};
use crate::tasks::wide_order::in_order;
use crate::tasks::wide_tile::{
    CUT, MOST_BROAD_ROWS, MOST_TALL_ROWS, Tile, choose_broad, is_narrow_tile, parted,
};
use std::mem::offset_of;
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType};
use taskgraph::{Region, Target, TaskType};

#[cfg(test)]
mod cut_test;
#[cfg(test)]
mod paired_test;
#[cfg(test)]
mod pushed_test;
#[cfg(test)]
mod test;

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "wide_linear",
    core_number: None,
    contract: Some(|| Arc::new(WideLinear)),
    run: Some(mpk_task_wide_linear),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let words = size_of::<mpk_wide_linear_params>() / 4;
    let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
    let params: mpk_wide_linear_params = bytemuck::pod_read_unaligned(bytes);
    let ([x, weight, ..], [out]) = (site.inputs, site.outputs) else {
        return Err("it must have x, a weight and one output".to_string());
    };
    if u32::from(weight.layout) != gpu_layout(params.gated != 0)
        || weight.strides[0] != weight.dims[1].next_multiple_of(abi::MPK_FRAGMENT_K)
    {
        return Err(format!("its weight {:?} is not packed for the GPU", weight.dims));
    }
    let weight = gpu_float(weight)?;
    if weight == "MPK_F32" || u32::from(x.dtype) != u32::from(site.inputs[1].dtype) {
        return Err("x and weight must be of one type of 2 bytes".to_string());
    }
    let sums = if params.push != 0 { abi::MPK_F32_FLAGGED } else { abi::MPK_F32 };
    if out.dtype != x.dtype && (params.gated != 0 || u32::from(out.dtype) != sums) {
        return Err(format!("its output of type {} needs weights of the same type", out.dtype));
    }
    let has_all_rows = x.dims[3] == abi::MPK_WIDE_NARROW;
    let width = params.width;
    let (code, pushes) = match params.high {
        _ if has_all_rows && width == MOST_BROAD_ROWS => (format!("WideBroad<{weight}>"), false),
        high if has_all_rows && is_narrow_tile(high, width) => {
            (format!("WideNarrow<{weight}, {width}>"), true)
        }
        _ if has_all_rows => (format!("WideTall<{weight}, {width}>"), true),
        128 => (format!("WideLinear<{weight}, {}, {width}>", params.tokens), false),
        _ => (format!("WideFew<{weight}, {width}>"), true),
    };
    if params.push != 0 && !pushes {
        return Err(format!("a product of {} rows cannot push its output", params.rows));
    }
    Ok(format!("mpk::gpu::{code}"))
}

/// Blocks of k in a step of a tile of few rows (`gpu/wide_few.cuh`).
const STEP_BLOCKS: u32 = 8;

/// Contract of `wide_linear`.
#[derive(Debug)]
pub struct WideLinear;

impl TaskType for WideLinear {
    fn name(&self) -> &'static str {
        "wide_linear"
    }

    fn infer(&self, _op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        Err(OpError("is created from a `linear` with many rows; write `linear` instead".to_string()))
    }

    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Ok(contract::replicated(op.inputs.len(), 1))
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let attr = |name| contract::attr_bool(op.global.attrs, name);
        let (gated, has_bias, has_residual) = (attr("gated")?, attr("has_bias")?, attr("has_residual")?);
        let (weight_rows, k) = contract::local_matrix(&op.inputs[1])?;
        let halves = 1 + u32::from(gated);
        let to_wide = is_wide(&op.outputs[0]);
        let (rows, columns) = match to_wide {
            true => (op.global.outputs[0].ty.dims[0] as u32, weight_rows / halves),
            false => {
                let known = matrix(&op.outputs[0]).map(|(rows, columns, _)| (rows, columns));
                known.map_or_else(|| contract::local_matrix(&op.outputs[0]), Ok)?
            }
        };
        let dims: Vec<u32> = op.inputs[0].dims.iter().map(|d| *d as u32).collect();
        let narrow = is_narrow(&op.inputs[0]);
        let wanted = if narrow { narrow_dims } else { wide_dims };
        if weight_rows != halves * columns || op.inputs[0].dims != wanted(rows.into(), k.into()) {
            return Err(OpError(format!(
                "on rank {} x is {dims:?} and the output [{rows}, {columns}], but the weight [{weight_rows}, {k}]",
                op.rank
            )));
        }
        let partial = op.world > 1 && contract::split_columns(op.global.inputs[1].sharding).is_some();
        let parts = contract::attr_u32(op.global.attrs, "parts")?.unwrap_or(1);
        let first_cut = contract::attr_u32(op.global.attrs, "first_row")?.unwrap_or(0);
        let tile = match narrow {
            true if rows > MOST_TALL_ROWS => choose_broad(columns, gated, parts, target.workers),
            true if parts > 1 => tall_tiles(target).halved(rows),
            true => tall_tiles(target).choose(rows, columns, gated, target.workers),
            false if first_cut > 0 => CUT,
            false => parted(rows, columns, gated, parts, target.workers),
        };
        let params = mpk_wide_linear_params {
            rows_kind: contract::rows_kind(op.global.outputs[0].ty.rows),
            rows,
            has_bias: u32::from(has_bias),
            add_bias: u32::from(!partial || op.rank == 0),
            has_residual: u32::from(has_residual),
            gated: u32::from(gated),
            wide_output: u32::from(to_wide),
            high: tile.high,
            tokens: tile.tokens,
            width: tile.width,
            push: 0,
        };
        // Parts consist of whole steps of a tile of few rows.
        let blocks = k.div_ceil(abi::MPK_FRAGMENT_K);
        let cut = |part: u32| (blocks * part / parts).next_multiple_of(STEP_BLOCKS).min(blocks);
        // Two summands in one output, one after the other.
        let is_stacked = |ty: &TensorType| ty.dims.len() == 3;
        let stacked = is_stacked(&op.outputs[0]);
        if stacked && !(parts == 2 && narrow && tile.width < MOST_BROAD_ROWS) {
            return Err(OpError(format!("a product with {tile} cannot have two summands")));
        }
        if parts > 1 && (gated || to_wide || cut(parts - 1) >= blocks) {
            return Err(OpError(format!("a product with {tile} and {k} columns cannot have {parts} parts")));
        }
        let parts: Vec<(u32, u32)> = (0..parts).map(|part| (cut(part), cut(part + 1))).collect();
        let Tile { width, tokens, .. } = tile;
        let (high, wide) = (tile.output_columns(gated), tokens * width);
        if first_cut % wide != 0 || first_cut >= rows {
            return Err(OpError(format!(
                "tiles of {wide} rows cannot be cut from row {first_cut} of {rows} on"
            )));
        }
        // Whole tiles first, then those that are cut. The parts of a tile are tasks of their own, for as many workers.
        let ordered = |row_tiles: u32, parts: u32| {
            in_order(columns.div_ceil(high), row_tiles, tile.group(), target.workers / parts)
        };
        let (whole, shared) = (first_cut / wide, rows.div_ceil(wide) - first_cut / wide);
        let uncut = if whole == 0 { Vec::new() } else { ordered(whole, 1) };
        let uncut = uncut.into_iter().map(|tile| (tile, 0, (0, blocks)));
        let first_part = u8::from(whole > 0);
        let of_parts = |(column, row)| {
            let tile = (column, row + whole);
            parts.iter().zip(first_part..).map(move |(blocks, output)| (tile, output, *blocks))
        };
        let tasks = uncut
            .chain(ordered(shared, parts.len() as u32).into_iter().flat_map(of_parts))
            .map(|((column_tile, token_tile), output, blocks)| {
                let (first, end) = (column_tile * high, ((column_tile + 1) * high).min(columns));
                let (first_row, end_row) = (token_tile * wide, ((token_tile + 1) * wide).min(rows));
                let mut task = TaskSpec::default();
                let x = Region::whole(&dims);
                let (tile_rows, in_tile) = (dims[2], first_row % dims[2]);
                let x = x.with(0, first_row / tile_rows, (end_row - 1) / tile_rows + 1);
                let x = if width < tile_rows { x.with(2, in_tile, in_tile + width) } else { x };
                task.reads.push(Access::new(0, x));
                for rows in rows_of(gated, first..end, columns, target) {
                    let rows = Region::whole(&[weight_rows, k]).with(0, rows.start, rows.end);
                    task.reads.push(Access::new(1, rows));
                }
                if has_bias {
                    for half in (0..halves).map(|half| half * columns) {
                        let part = Region::whole(&[weight_rows]).with(0, half + first, half + end);
                        task.reads.push(Access::new(2, part));
                    }
                }
                let out = match to_wide {
                    // Whole tiles, including the parts outside the output.
                    true => {
                        let dims = op.outputs[0].dims.iter().map(|d| *d as u32).collect::<Vec<_>>();
                        let rows = (first_row / dims[2], end_row.div_ceil(dims[2]));
                        let (first, end) = (first / dims[3], end.div_ceil(dims[3]));
                        Region::whole(&dims).with(0, rows.0, rows.1).with(1, first, end)
                    }
                    false => Region::whole(&[rows, columns]).with(0, first_row, end_row).with(1, first, end),
                };
                let in_stack = |parts: (u32, u32)| {
                    let whole = Region::whole(&[2, rows, columns]).with(0, parts.0, parts.1);
                    whole.with(1, first_row, end_row).with(2, first, end)
                };
                if has_residual {
                    let operand = 2 + u8::from(has_bias);
                    let region =
                        if is_stacked(&op.inputs[usize::from(operand)]) { in_stack((0, 2)) } else { out };
                    task.reads.push(Access::new(operand, region));
                }
                let part = u32::from(output);
                task.writes.push(match stacked {
                    true => Access::new(0, in_stack((part, part + 1))),
                    false if first_cut == 0 || token_tile < whole => Access::new(output, out),
                    false => {
                        let in_part = Region::whole(&[rows - first_cut, columns]).with(1, first, end);
                        Access::new(output, in_part.with(0, first_row - first_cut, end_row - first_cut))
                    }
                });
                task.args[..3].copy_from_slice(&[first_row as i32, blocks.0 as i32, blocks.1 as i32]);
                // If no tile is cut, all tasks have the same cost. Their order suits the L2 cache, and workers get them in turn.
                task.cost =
                    u64::from(tile.high + wide) * u64::from((blocks.1 - blocks.0) * abi::MPK_FRAGMENT_K) * 2;
                task
            })
            .collect();
        // On the CPU target: the tile's rows, the output's rows if their layout is changed afterwards, and what the linear family needs.
        let k_padded = u64::from(k).next_multiple_of(2);
        let as_rows = (u64::from(wide) * u64::from(k) * 2).next_multiple_of(64);
        let results = if to_wide { (u64::from(wide) * u64::from(high) * 2).next_multiple_of(64) } else { 0 };
        let scratch_bytes = as_rows
            + results
            + if narrow { (u64::from(wide) * u64::from(tile.high) * 4).next_multiple_of(64) } else { 0 }
            + (4 * k_padded).next_multiple_of(64)
            + u64::from(abi::MPK_WIDE_ROWS) * 4 * k_padded;
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }

    fn tiled_inputs(&self) -> &'static [usize] {
        &[1]
    }

    fn constant_inputs(&self) -> &'static [usize] {
        &[1]
    }

    /// Values of two bytes leave as whole sectors.
    fn peer_output(&self, op: &LocalOp<'_>) -> Option<usize> {
        let rows = op.outputs.len() == 1 && op.outputs[0].dims.len() == 2;
        (rows && op.outputs[0].dtype.size() == 2).then_some(0)
    }

    fn holds_sums(&self) -> bool {
        true
    }

    fn pushable_output(&self) -> Option<usize> {
        Some(0)
    }

    fn push_param(&self) -> Option<usize> {
        Some(offset_of!(mpk_wide_linear_params, push) / 4)
    }

    fn most_pushed_rows(&self, target: &Target) -> u64 {
        target.tuned(&PUSHED_ROWS).min(MOST_TALL_ROWS.into())
    }
}

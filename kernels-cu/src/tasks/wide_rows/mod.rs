//! `wide_rows`: rows of x in `MPK_LAYOUT_WIDE` (`abi.h`), for `wide_linear`.
//!
//! Input: x `[rows, k]`, which is rounded to `act_dtype`. With `source` `norm` x is normed with the norm weight `[k]` first; then x may
//! be two summands `[2, rows, k]` (f32), if the output has the narrower column tiles. With `silu_mul` the result is silu(gate) * up of
//! x `[rows, 2k]` = `[gate | up]`. Output: `[row tiles, column tiles, 128, 64]` of `act_dtype`, or with the narrower column tiles
//! `[row tiles, column tiles, 16, 32, 64 or 128, 16]`. Columns from k on are 0; rows that are not in use are not written. A task has a
//! block of rows. With `gather_samples` the rows are those of x that are sampled.
//!
//! Attributes: `source` (`plain`), `act_dtype`, `eps` of the norm, `gather_samples`. The expansion of the linear family creates this
//! operator.

use crate::abi::{self, mpk_task_wide_rows, mpk_wide_rows_params, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract::eps;
use crate::tasks::contract::{self, replicated};
use crate::tasks::operand::{gpu_float, gpu_rows_contiguous};
use crate::tasks::wide::{is_narrow, matrix, narrow_dims, wide_dims};
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType};
use taskgraph::{Attribute, AttributeKind, DType, Region, Rows, Target, TaskType};

#[cfg(test)]
pub(super) mod summed_test;
#[cfg(test)]
mod test;

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "wide_rows",
    core_number: None,
    contract: Some(|| Arc::new(WideRows)),
    run: Some(mpk_task_wide_rows),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let ([x, norm @ ..], [out]) = (site.inputs, site.outputs) else {
        return Err("it must have inputs and one output".to_string());
    };
    gpu_rows_contiguous(site.inputs)?;
    let source = match site.params.first() {
        Some(0) => "kPlain",
        Some(1) => "kRmsNorm",
        Some(2) => "kSiluMul",
        Some(other) => return Err(format!("its source is {other}, expected 0 to 2")),
        None => return Err("it has no parameters".to_string()),
    };
    let norm = norm.first().map_or(Ok("MPK_F32"), gpu_float)?;
    let more = match out.dims[3] {
        abi::MPK_WIDE_NARROW => format!(", {}, {}", abi::MPK_WIDE_NARROW, x.ndim == 3),
        _ => String::new(),
    };
    let words = size_of::<mpk_wide_rows_params>() / 4;
    let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
    let params: mpk_wide_rows_params = bytemuck::pod_read_unaligned(bytes);
    let parts = if x.ndim == 3 || source == "kSiluMul" { 2 } else { 1 };
    let pieces = gpu_pieces(params.columns, x.dtype, parts);
    Ok(format!(
        "mpk::gpu::WideRows<mpk::gpu::{source}, {}, {norm}, {}, {pieces}{more}>",
        gpu_float(x)?,
        gpu_float(out)?
    ))
}

/// Compute threads of a block of the kernel (`gpu/config.cuh`).
const COMPUTE_THREADS: u32 = 256;

/// Maximum number of pieces of a row per thread, both parts included: 64 KB of shared memory. A longer row is read piece by
/// piece.
const MOST_PIECES: u32 = 16;

/// The number of pieces of a row of this type per thread of the GPU code, in each of `parts` parts: the threads of a block have pieces of
/// 16 bytes, in turn.
pub(super) fn gpu_pieces(columns: u32, dtype: u8, parts: u32) -> u32 {
    let piece = if u32::from(dtype) == abi::MPK_F32 { 4 } else { 8 };
    columns.div_ceil(piece * COMPUTE_THREADS).clamp(1, MOST_PIECES / parts)
}

/// How the rows are computed: the params word for the attribute's value.
fn source(op: &OpView<'_>) -> Result<u32, OpError> {
    match op.attrs.get("source").map(|v| v.as_str()) {
        None | Some(Some("plain")) => Ok(0),
        Some(Some("norm")) => Ok(1),
        Some(Some("silu_mul")) => Ok(2),
        Some(_) => Err(OpError("`source` must be plain, norm or silu_mul".to_string())),
    }
}

const ATTRIBUTES: &[Attribute] = &[
    Attribute::new("source", AttributeKind::Name(&["plain", "norm", "silu_mul"])),
    Attribute::new("act_dtype", AttributeKind::DType),
    Attribute::new("eps", AttributeKind::Number),
    Attribute::new("gather_samples", AttributeKind::Bool),
];

/// Contract of `wide_rows`.
#[derive(Debug)]
pub struct WideRows;

impl TaskType for WideRows {
    fn name(&self) -> &'static str {
        "wide_rows"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let source = source(op)?;
        contract::num_inputs(op, 1 + usize::from(source == 1), 1 + usize::from(source == 1))?;
        let (rows, columns) = contract::matrix(&op.inputs[0])?;
        contract::float(&op.inputs[0])?;
        let dtype = contract::attr_dtype(op.attrs, "act_dtype")?.unwrap_or(op.inputs[0].ty.dtype);
        if dtype.size() != 2 || !dtype.is_float() {
            return Err(OpError(format!("`act_dtype` must be f16 or bf16, not {dtype}")));
        }
        if source == 2 && (columns % 2 != 0 || op.inputs[0].ty.dtype != dtype) {
            return Err(OpError(format!(
                "`{}` must be gate and up of {dtype} side by side",
                op.inputs[0].name
            )));
        }
        let columns = if source == 2 { columns / 2 } else { columns };
        if let Some(norm) = op.inputs.get(1) {
            contract::vector(norm, columns)?;
            contract::float(norm)?;
            eps(op)?;
        }
        let gather = contract::attr_bool(op.attrs, "gather_samples")?;
        let rows = if gather { u64::from(op.capacity.samples) } else { rows };
        Ok(vec![TensorType { dtype, dims: wide_dims(rows, columns), rows: Rows::Fixed }])
    }

    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Ok(replicated(op.inputs.len(), 1))
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let source = source(op.global)?;
        let known = matrix(&op.inputs[0]).map(|(rows, columns, _)| (rows, columns));
        let (x_rows, x_columns) = known.map_or_else(|| contract::local_matrix(&op.inputs[0]), Ok)?;
        let stacked = op.inputs[0].dims.len() == 3;
        let narrow = is_narrow(&op.outputs[0]);
        if stacked && !(narrow && source == 1) {
            return Err(OpError("x may be two summands only with `source` norm and few rows".to_string()));
        }
        let gather = contract::attr_bool(op.global.attrs, "gather_samples")?;
        let (rows, kind) = match gather {
            true => (op.global.capacity.samples, Rows::Samples),
            false => (x_rows, op.global.inputs[0].ty.rows),
        };
        let columns = if source == 2 { x_columns / 2 } else { x_columns };
        let dims: Vec<u32> = op.outputs[0].dims.iter().map(|d| *d as u32).collect();
        let wanted = if narrow { narrow_dims } else { wide_dims };
        if op.outputs[0].dims != wanted(u64::from(rows), u64::from(columns)) {
            return Err(OpError(format!("[{rows}, {columns}] does not fit the wide rows {dims:?}")));
        }
        let params = mpk_wide_rows_params {
            source,
            gather: u32::from(gather),
            rows_kind: contract::rows_kind(kind),
            rows,
            columns,
            eps: if source == 1 { eps(op.global)? } else { 0.0 },
        };
        // The sizes of blocks are powers of two, so no block lies in two row tiles.
        let tile = dims[2];
        let block = (0..7).map(|b| 1 << b).find(|b| rows.div_ceil(*b) <= target.workers).unwrap_or(tile);
        let bytes = op.inputs[0].dtype.size() * u64::from(x_columns) + 2 * u64::from(columns);
        let tasks = (0..rows)
            .step_by(block as usize)
            .map(|first| {
                let end = (first + block).min(rows);
                // The last block includes the rest of its tile.
                let (in_tile, end_in_tile) =
                    (first % tile, if end == rows { tile } else { (end - 1) % tile + 1 });
                let mut task = TaskSpec::default();
                // Rows of attention are named by slot, not by position, so a reader of some rows waits for all. Attention's rows are
                // never normed or gated. Which rows are samples is known only at run time.
                let (whole, rows_at) = match stacked {
                    true => (Region::whole(&[2, x_rows, x_columns]), 1),
                    false => (Region::whole(&[x_rows, x_columns]), 0),
                };
                let (read, in_x) =
                    if source == 0 || gather { (whole, first) } else { (whole.with(rows_at, first, end), 0) };
                task.reads.push(Access::new(0, read));
                if source == 1 {
                    task.reads.push(Access::new(1, Region::whole(&[columns])));
                }
                let region = Region::whole(&dims).with(0, first / tile, first / tile + 1);
                task.writes.push(Access::new(0, region.with(2, in_tile, end_in_tile)));
                task.args[..3].copy_from_slice(&[first as i32, in_x as i32, (end - first) as i32]);
                task.cost = u64::from(block) * bytes;
                task
            })
            .collect();
        let padded = u64::from(columns).next_multiple_of(u64::from(abi::MPK_WIDE_COLUMNS));
        let of_sum = if stacked { 4 * u64::from(columns) } else { 0 };
        let scratch_bytes = of_sum + 4 * u64::from(columns) + DType::Bf16.size() * padded;
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }

    /// The code of `reduce` has the norm too.
    fn joins_sum(&self, op: &LocalOp<'_>) -> bool {
        matches!(source(op.global), Ok(1)) && op.inputs[0].dims.len() == 2
    }

    fn gathered_inputs(&self) -> &'static [usize] {
        &[0]
    }

    fn constant_inputs(&self) -> &'static [usize] {
        &[1]
    }
}

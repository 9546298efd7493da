//! `reduce`: the sum of the ranks' partial tiles in rank order, in f32, plus the residual once. A core task type:
//! taskgraph creates its tasks when it lowers an allreduce.
//!
//! Parameters (`mpk_reduce_params`): world, rank, rows_kind (0 tokens, 1 samples, 2 all), flags (1 flagged, 2 has a
//! residual). Not flagged: the inputs are the rank's own partial tile [rows, columns], the receive view [world, rows,
//! columns] of the same type (f32, bf16 or f16), whose own slot is not read, and the residual f32 [rows, columns]. Flagged: the inputs are the
//! receive view f32_flagged [world, rows, columns], whose slots are all read, and the residual. Output: [rows,
//! columns], f32 or the act dtype. Strides are arbitrary, but columns are contiguous.
//!
//! With `MPK_REDUCE_ROWS` (f32 output) the task also norms the rows that it sums, as `wide_rows` does
//! ([`TaskType::joins_sum`](taskgraph::TaskType::joins_sum)). The last input is then the norm weight, the second output is the rows in
//! `MPK_LAYOUT_WIDE`, and the parameters are `mpk_reduce_rows_params`.

use crate::abi::{
    MPK_F32, MPK_F32_FLAGGED, MPK_REDUCE_FLAGGED, MPK_REDUCE_RESIDUAL, MPK_REDUCE_ROWS, MPK_TASK_TYPE_REDUCE,
    MPK_WIDE_COLUMNS, MPK_WIDE_NARROW, mpk_operand, mpk_reduce_params, mpk_reduce_rows_params,
    mpk_task_reduce, mpk_task_reduce_ready,
};
use crate::registry::{GpuSite, Registration};
use crate::tasks::operand::{gpu_float, gpu_rows_contiguous};
use crate::tasks::wide_rows::gpu_pieces;
use taskgraph::task_graph::sum_flags;

// The verifier knows the flags, too.
const _: () = assert!(
    sum_flags::FLAGGED == MPK_REDUCE_FLAGGED
        && sum_flags::RESIDUAL == MPK_REDUCE_RESIDUAL
        && sum_flags::FOLLOWED == MPK_REDUCE_ROWS
);

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "reduce",
    core_number: Some(MPK_TASK_TYPE_REDUCE as u16),
    contract: None,
    run: Some(mpk_task_reduce),
    ready: Some(mpk_task_reduce_ready),
    gpu: Some(gpu),
};

/// Maximum number of ranks whose parts a thread of the GPU code holds at a time.
const GPU_MAX_WORLD: u32 = 16;

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let words = size_of::<mpk_reduce_params>() / 4;
    let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
    let params: mpk_reduce_params = bytemuck::pod_read_unaligned(bytes);
    let (flagged, residual) =
        (params.flags & MPK_REDUCE_FLAGGED != 0, params.flags & MPK_REDUCE_RESIDUAL != 0);
    let rows = params.flags & MPK_REDUCE_ROWS != 0;
    let count = if flagged { 1 } else { 2 } + usize::from(residual) + usize::from(rows);
    let ([summand, rest @ ..], [out, normed @ ..]) = (site.inputs, site.outputs) else {
        return Err("it must have inputs and an output".to_string());
    };
    if normed.len() != usize::from(rows) {
        return Err(format!(
            "its parameters describe {} outputs, not {}",
            1 + usize::from(rows),
            site.outputs.len()
        ));
    }
    if site.inputs.len() != count {
        return Err(format!("its parameters describe {count} inputs, not {}", site.inputs.len()));
    }
    if params.world == 0 || params.world > GPU_MAX_WORLD {
        return Err(format!("{} ranks; the GPU code supports 1 to {GPU_MAX_WORLD}", params.world));
    }
    if let [normed] = normed {
        return gpu_rows(site, &params, (summand, out, normed));
    }
    let mut arguments = format!("{}, {}, {flagged}, {residual}", gpu_float(out)?, params.world);
    if !flagged {
        let dtype = gpu_float(summand)?;
        if rest[0].dtype != summand.dtype {
            return Err(format!("its own summand is {dtype}, but the others are {}", gpu_float(&rest[0])?));
        }
        // Sums of f32 are the default.
        if dtype != "MPK_F32" {
            arguments = format!("{arguments}, {dtype}");
        }
    }
    Ok(format!("mpk::gpu::Reduce<{arguments}>"))
}

/// The GPU code that also norms the rows.
fn gpu_rows(
    site: &GpuSite<'_>,
    params: &mpk_reduce_params,
    (summand, sum, normed): (&mpk_operand, &mpk_operand, &mpk_operand),
) -> Result<String, String> {
    gpu_rows_contiguous(site.inputs.iter().chain([sum]))?;
    let words = size_of::<mpk_reduce_rows_params>() / 4;
    let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
    let rows = bytemuck::pod_read_unaligned::<mpk_reduce_rows_params>(bytes).rows;
    let [first, second, ..] = site.inputs else { return Err("it must have a norm weight".to_string()) };
    let norm = &site.inputs[site.inputs.len() - 1];
    let flagged = params.flags & MPK_REDUCE_FLAGGED != 0;
    let fits = rows.source == 1
        && u32::from(sum.dtype) == MPK_F32
        && match flagged {
            true => u32::from(first.dtype) == MPK_F32_FLAGGED,
            false => first.dtype == second.dtype,
        }
        && [MPK_WIDE_COLUMNS, MPK_WIDE_NARROW].contains(&normed.dims[3]);
    if !fits {
        return Err("it must sum f32 and norm the rows".to_string());
    }
    let (name, summands) = match flagged {
        true => ("ReducePushedRows", String::new()),
        false => ("ReduceRows", format!("{}, ", gpu_float(summand)?)),
    };
    Ok(format!(
        "mpk::gpu::{name}<{}, {}, {summands}{}, {}, {}, {}>",
        params.world,
        params.flags & MPK_REDUCE_RESIDUAL != 0,
        gpu_float(norm)?,
        gpu_float(normed)?,
        gpu_pieces(rows.columns, sum.dtype, 1),
        normed.dims[3],
    ))
}

#[cfg(test)]
mod rows_test;
#[cfg(test)]
mod test;

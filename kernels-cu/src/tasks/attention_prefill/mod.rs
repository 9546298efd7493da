//! `attention_prefill`: causal attention of many rows over pages that `attention_append` has filled. Created by
//! `attention`'s expansion (`expansion`) in graphs of many rows.
//!
//! Inputs: 0. the queries that `attention_append` wrote, 1. the cache. Outputs: 0. the same as `attention`'s; 1. and 2.
//! partial results, `[2 tasks, 128, head_dim]` and `[2 tasks, 128, 2]` (maximum, sum) f32, for `attention_prefill_merge`.
//!
//! # Tasks and regions
//! The number of tasks is fixed; arguments `[t, 0..]`. The work of each task follows from the batch (units.h). The sum of
//! all units' weights is cut evenly. So all workers have work with one long prompt, with a hundred short ones, and with a
//! decode row of long context next to a prompt. A cut may fall inside a unit; then its parts give partial results.
//!
//! The rows that a task writes are known only at run time. In regions, the *unit share* of task t of T stands for them: the
//! rows R t/T .. R (t+1)/T of R. The invariant behind it: **the units of an iteration are disjoint**. A task has what lies
//! between two neighbouring cuts, and the cuts are in order. The CPU code checks that order in every task. Each task has its
//! own two partial results.

use crate::abi::{mpk_attention_prefill_params, mpk_operand, mpk_task_attention_prefill, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::attended;
use crate::tasks::contract;
use crate::tasks::heads::{Heads, MAX_SPLITS, rows_and_active, scale, scratch_bytes, window};
use crate::tasks::operand::gpu_float;
use std::sync::Arc;
use taskgraph::op_graph::Attrs;
use taskgraph::target::Backend;
use taskgraph::task_type::{
    Access, ExpandedOp, Expansion, ExpansionOperand, LocalOp, OpError, OpView, Partition, ShardRule,
    TaskSpec, Temporary, TensorType,
};
use taskgraph::{DType, Knob, Region, Rows, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "attention_prefill",
    core_number: None,
    contract: Some(|| Arc::new(AttentionPrefill)),
    run: Some(mpk_task_attention_prefill),
    ready: None,
    gpu: Some(gpu),
};

/// `kTileRows` of units.h: rows of a query tile. It limits the query heads per key-value head.
const TILE_ROWS: u32 = 128;
/// `kPartsOfTask` of units.h.
const PARTS: u32 = 2;
/// `kBlockRows` of attention/cache_layout.cuh. Copies bring whole blocks.
const BLOCK_ROWS: u32 = 8;
/// Graphs with fewer rows keep `attention` by default.
pub const LEAST_ROWS: Knob = Knob {
    name: "attention_prefill.least_rows",
    default: 64,
    candidates: &[64, 128, 256, 512],
    about: "minimum number of rows of a graph in which prompts have their own attention operators",
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let ([queries, cache], [out, ..]) = (site.inputs, site.outputs) else {
        return Err("it must have two inputs and three outputs".to_string());
    };
    let dim = cache.dims[3];
    let page_size = gpu_page_size(cache, dim)?;
    if queries.dtype != cache.dtype || out.dtype != cache.dtype || queries.strides[0] % 8 != 0 {
        return Err("queries and output must have the cache's type, and rows of whole 16 bytes".to_string());
    }
    let more = last_arguments(site)?;
    Ok(format!("mpk::gpu::AttentionPrefill<{}, {dim}, {page_size}{more}>", gpu_float(cache)?))
}

/// The last template arguments of the GPU code: whether the operator has a window, and the columns of a column tile of the output. Others
/// have no code for these.
pub(crate) fn last_arguments(site: &GpuSite<'_>) -> Result<String, String> {
    let words = size_of::<mpk_attention_prefill_params>() / 4;
    let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
    let params: mpk_attention_prefill_params = bytemuck::pod_read_unaligned(bytes);
    let columns = site.outputs.first().map_or(0, attended::gpu_columns);
    Ok(match (params.window != 0, columns) {
        (false, 0) => String::new(),
        (true, 0) => ", true".to_string(),
        (window, columns) => format!(", {window}, {columns}"),
    })
}

/// The page size of a cache; an error if the GPU code of the prefill steps does not support the cache.
pub(crate) fn gpu_page_size(cache: &mpk_operand, dim: u32) -> Result<u32, String> {
    let [pages, planes, page_size, row] = cache.dims.map(u64::from);
    if cache.ndim != 4
        || row != u64::from(dim)
        || cache.strides.map(u64::from) != [planes * page_size * row, page_size * row, row, 1]
    {
        return Err("its cache must be [pages, planes, positions, head_dim] without gaps".to_string());
    }
    if !matches!(row, 64 | 128) || gpu_float(cache)? == "MPK_F32" {
        return Err(format!("heads of {row}, or f32; the GPU code takes 64 and 128 elements of 2 bytes"));
    }
    if !page_size.is_multiple_of(u64::from(BLOCK_ROWS)) {
        return Err(format!("pages of {page_size} positions; the GPU code takes a multiple of {BLOCK_ROWS}"));
    }
    if pages * planes * page_size >= 1 << 32 {
        return Err("its cache has 2^32 rows or more".to_string());
    }
    Ok(page_size as u32)
}

/// The value of the attribute `prefill`, if it is given.
pub(crate) fn wish(attrs: &Attrs) -> Result<Option<bool>, OpError> {
    if !attrs.contains_key("prefill") {
        return Ok(None);
    }
    contract::attr_bool(attrs, "prefill").map(Some)
}

/// Whether `attention` expands into the prefill steps.
pub(crate) fn chosen(op: &LocalOp<'_>, target: &Target) -> Result<bool, OpError> {
    let wish = wish(op.global.attrs)?;
    if wish == Some(false) {
        return Ok(false);
    }
    let heads = Heads::global(op.global.attrs)?;
    let group = heads.heads / heads.kv_heads;
    let problem = if group > u64::from(TILE_ROWS) {
        Some(format!("{group} query heads share keys, but a task takes at most {TILE_ROWS}"))
    } else if scale(op.global.attrs, heads.head_dim)? <= 0.0 {
        Some("`scale` is not above 0".to_string())
    } else if target.backend == Backend::Cpu {
        None
    } else if !target.wide {
        Some("the device has no tensor cores that multiply 64 rows at once".to_string())
    } else if !matches!(heads.head_dim, 64 | 128) || op.inputs[1].dtype == DType::F32 {
        Some("the GPU code takes heads of 64 and 128 elements of 2 bytes".to_string())
    } else if !op.inputs[1].dims[2].is_multiple_of(u64::from(BLOCK_ROWS)) {
        Some(format!("the GPU code takes pages of a multiple of {BLOCK_ROWS} positions"))
    } else {
        None
    };
    if let (Some(true), Some(problem)) = (wish, &problem) {
        return Err(OpError(format!("attribute `prefill` can't be true: {problem}")));
    }
    let rows = op.inputs[0].dims[0];
    let many = rows >= target.tuned(&LEAST_ROWS) && rows > u64::from(op.global.capacity.active);
    Ok(problem.is_none() && (wish == Some(true) || (target.wide && many)))
}

/// Number of tasks of `attention_prefill`, and of its merge, in a graph with `rows` rows.
fn num_tasks(rows: u64, target: &Target) -> u32 {
    u64::from(target.workers).min(rows).max(1) as u32
}

/// The steps that replace `attention`.
pub(crate) fn expansion(op: &LocalOp<'_>, target: &Target) -> Result<Expansion, OpError> {
    let heads = Heads::local(op.global.attrs, op.global.inputs[0].sharding, op.rank, op.world)?;
    let tasks = u64::from(num_tasks(op.inputs[0].dims[0], target) * PARTS);
    let partial = |width: u64| TensorType {
        dtype: DType::F32,
        dims: vec![tasks, u64::from(TILE_ROWS), width],
        rows: Rows::Fixed,
    };
    let step = |op_type, suffix, inputs: &[ExpansionOperand], outputs: &[ExpansionOperand]| ExpandedOp {
        op_type,
        suffix,
        inputs: inputs.to_vec(),
        outputs: outputs.to_vec(),
        attrs: Attrs::new(),
    };
    let columns = heads.num_queries() * heads.head_dim;
    let queries = TensorType { dims: vec![op.inputs[0].dims[0], columns], ..op.inputs[0].clone() };
    use ExpansionOperand::{Input, Output, Temporary as Temp};
    let append: Vec<_> = (0..op.inputs.len()).filter(|&i| i != 1).map(Input).collect();
    Ok(Expansion {
        temporaries: vec![
            Temporary { suffix: ".queries", ty: queries },
            Temporary { suffix: ".partial", ty: partial(heads.head_dim) },
            Temporary { suffix: ".softmax", ty: partial(2) },
        ],
        ops: vec![
            step("attention_append", ".append", &append, &[Temp(0), Output(1)]),
            step("attention_prefill", "", &[Temp(0), Input(1)], &[Output(0), Temp(1), Temp(2)]),
            step("attention_prefill_merge", ".merge", &[Temp(1), Temp(2)], &[Output(0)]),
        ],
    })
}

/// Parameters of `attention_prefill` and its merge, whose output 0 is `attention`'s.
pub(crate) fn params(
    op: &LocalOp<'_>,
    target: &Target,
) -> Result<(Heads, mpk_attention_prefill_params), OpError> {
    let heads = Heads::local(op.global.attrs, op.global.outputs[0].sharding, op.rank, op.world)?;
    attended::check(op, heads.num_queries() * heads.head_dim)?;
    let group = heads.heads / heads.kv_heads;
    let params = mpk_attention_prefill_params {
        head_dim: heads.head_dim as u32,
        group: group as u32,
        skipped: (heads.queries.start - heads.key_values.start * group) as u32,
        queries: heads.num_queries() as u32,
        kv_heads: heads.num_key_values() as u32,
        tasks: num_tasks(attended::rows(op)?, target),
        scale: scale(op.global.attrs, heads.head_dim)? as f32,
        window: window(op.global.attrs)?,
    };
    Ok((heads, params))
}

/// The error if a graph names one of the steps itself.
pub(crate) fn step_only(name: &str) -> OpError {
    OpError(format!("`{name}` is a step of `attention`; name that, with the attribute `prefill`"))
}

/// The region of the output that stands for the units of task `t`.
pub(crate) fn unit_share(op: &LocalOp<'_>, params: &mpk_attention_prefill_params, t: u32) -> Access {
    attended::write(op, 0..params.queries * params.head_dim, (t, params.tasks), Access::rows_of_units)
}

/// Bytes for the weights before each slot.
pub(crate) fn weights_bytes(active: u32) -> u64 {
    8 * (u64::from(active) + 1)
}

/// Contract of `attention_prefill`.
#[derive(Debug)]
pub struct AttentionPrefill;

impl TaskType for AttentionPrefill {
    fn name(&self) -> &'static str {
        "attention_prefill"
    }

    fn infer(&self, _op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        Err(step_only(self.name()))
    }

    fn shard(&self, _op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Err(step_only(self.name()))
    }

    fn seen_positions(&self, params: &[u32]) -> Option<u32> {
        let window = std::mem::offset_of!(mpk_attention_prefill_params, window) / 4;
        params.get(window).copied().filter(|&window| window != 0)
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (heads, params) = params(op, target)?;
        let (rows, active) = rows_and_active(op.inputs[0].dims[0], op.global.capacity.active)?;
        let (columns, dim) = (op.inputs[0].dims[1] as u32, params.head_dim);
        let cost = u64::from(rows * columns) * 4 / u64::from(params.tasks);
        let all = Region::whole(&[active, heads.num_key_values() as u32, MAX_SPLITS]);
        let tasks = (0..params.tasks).map(|t| {
            let parts = |width| {
                Region::whole(&[PARTS * params.tasks, TILE_ROWS, width]).with(0, PARTS * t, PARTS * (t + 1))
            };
            let mut task = TaskSpec { args: [t as i32, 0, 0, 0, 0, 0, 0, 0], cost, ..TaskSpec::default() };
            task.reads.push(Access::new(0, Region::whole(&[rows, columns])));
            task.reads.push(Access::pages_of_rows(1, all));
            task.writes.push(unit_share(op, &params, t));
            task.writes.push(Access::rows_of_units(1, parts(dim), t, params.tasks));
            task.writes.push(Access::rows_of_units(2, parts(2), t, params.tasks));
            task
        });
        let tasks = tasks.collect();
        let scratch_bytes = scratch_bytes(heads.head_dim) + weights_bytes(active);
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }
}

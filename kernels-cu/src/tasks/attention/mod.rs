//! `attention`: causal attention of the iteration's rows over a paged key-value cache, with rope and, if the model has it, an
//! rmsnorm of each query and key. It appends the new keys and values to the cache itself.
//!
//! Inputs, with global dimensions (local ones follow from the shardings):
//! 0. `qkv` [rows, (heads + 2 kv_heads) head_dim], act dtype: queries, keys, values. On several ranks
//!    `Sharding::Split` on dimension 1 with the parts `Queries`, `KeyValues`, `KeyValues` ([`qkv_sharding`]).
//! 1. `kv_cache` [num_pages, 2 kv_heads, page_size, head_dim], act dtype, `Role::Persistent` with
//!    [`kv_region_dims`]. Dimension 1 is the key heads, then the value heads; on several ranks it is split with
//!    the parts `KeyValues`, `KeyValues` ([`kv_sharding`]), so that a rank holds
//!    [num_pages, 2, its kv heads, page_size, head_dim] contiguously.
//! 2. `rope` [max_seq_len, head_dim] f32: half cosines, half sines of each position (`Role::Constant`).
//! 3. and 4., only with `qk_norm`: `q_norm`, `k_norm` `[head_dim]`, act dtype.
//!
//! Outputs: 0. [rows, heads head_dim], act dtype, split like the queries; in `MPK_LAYOUT_WIDE` if a wide product reads it
//! (`tasks/attended.rs`). 1. `kv_cache` again: the same tensor as
//! input 1.
//!
//! Attributes: `heads`, `kv_heads`, `head_dim` (even), `qk_norm` (default false), `eps` (with `qk_norm`), `scale`
//! (default head_dim^-0.5), `splits` and `prefill` (default by the target), `window` (default none).
//!
//! With `window` w, a query at position p sees the keys at max(0, p - w + 1) to p. Pages before the window stay allocated; they are not
//! read. The cache's regions are those of the whole slot.
//!
//! # Tasks and regions
//! There is one task per active slot a, local key-value head h and split i. On GPUs a task may also cover the heads after h
//! (`attention.kv_heads`), and several slots: a, a + d, a + 2d ... (`attention.slots`). Arguments: `[a, h, i, splits, first local
//! query head, query heads of each key-value head, slots, d]`. A slot's positions (context and new tokens, without pages that no row
//! sees) are cut into `splits` shares of whole pages. The rows of an active slot are known only at run time; those of different
//! slots are disjoint. In regions, "the rows of active slot a" are represented by the slot's *row share* ([`row_share`]): the rows
//! R a/A .. R (a+1)/A of R rows, for A active slots. Writers of a slot's rows name the row share with
//! [`taskgraph::Trust::RowsOfSlot`] and see the whole tensor. Rows that another operator names may belong to any slot. A task reads and writes the region `[a, h, i]` of the cache, in `kv_region_dims`.
//!
//! If each head has d tasks of several slots, the first slots of the tasks are 0 to d - 1. So the active slots are distributed
//! evenly, however many there are. Regions then name the *unit share* of task a of d ([`taskgraph::Trust::RowsOfUnits`]): a unit is
//! a slot here, and its share of the cache's slots stands for the pages.
//!
//! With more than one split, the operator expands into two. `attention` writes f32 partial results [rows, local heads, splits,
//! head_dim] and [rows, local heads, splits, 2] (maximum, sum), and `attention_merge` combines them. A share in which a row
//! sees no key has maximum -infinity and sum 0.
//!
//! In graphs of many rows it expands into `attention_append`, `attention_prefill` and `attention_prefill_merge`
//! ([`super::attention_prefill`]), if the target has wide products and the GPU code supports the heads and pages. The attribute `prefill`
//! (true or false) overrides that choice.
//!
//! Queries and keys are rounded to the act dtype after norm and rope; softmax and accumulation are f32.

mod division;

use crate::abi::{mpk_attention_params, mpk_operand, mpk_task_attention, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::attended;
use crate::tasks::attention_prefill;
use crate::tasks::contract;
use crate::tasks::heads::{Heads, rows_and_active, scale, scratch_bytes, window};
use crate::tasks::operand::gpu_float;
use division::{
    KV_HEADS, MAX_KV_HEADS, SLOTS, SPLIT_POSITIONS, STREAMED_SLOTS, kv_heads_of_task, slots_of_task,
};
use std::sync::Arc;
use taskgraph::op_graph::Attrs;
use taskgraph::task_type::{
    Access, ExpandedOp, Expansion, ExpansionOperand, LocalOp, Need, OpError, OpView, Partition, ShardRule,
    TaskSpec, Temporary, TensorType,
};
use taskgraph::words::counted;
use taskgraph::{Attribute, AttributeKind, DType, Knob, Region, Sharding, Split, Target, TaskType};

pub use crate::tasks::heads::{MAX_SPLITS, kv_dims, kv_region_dims, kv_sharding, qkv_sharding, row_share};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "attention",
    core_number: None,
    contract: Some(|| Arc::new(Attention)),
    run: Some(mpk_task_attention),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let words = size_of::<mpk_attention_params>() / 4;
    let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
    let params: mpk_attention_params = bytemuck::pod_read_unaligned(bytes);
    let (inputs, outputs) = (5 + 2 * params.qk_norm as usize, 2 + params.partial as usize);
    if site.inputs.len() != inputs || site.outputs.len() != outputs {
        return Err(format!("it must have {inputs} inputs and {outputs} outputs"));
    }
    let (qkv, cache, rope) = (&site.inputs[..3], &site.inputs[3], &site.inputs[4]);
    let dim = params.head_dim;
    if dim == 0 || !dim.is_multiple_of(2) || dim > 256 {
        return Err(format!("heads of {dim} elements; the GPU code takes even numbers up to 256"));
    }
    let [pages, planes, page_size, _] = cache.dims.map(u64::from);
    let row = u64::from(dim);
    if cache.ndim != 4
        || page_size == 0
        || cache.strides.map(u64::from) != [planes * page_size * row, page_size * row, row, 1]
    {
        return Err("its cache must be [pages, planes, positions, head_dim] without gaps".to_string());
    }
    if pages * planes * page_size >= 1 << 32 {
        return Err("its cache has 2^32 rows or more".to_string());
    }
    if (u64::from(rope.dims[0]) / page_size + 1) * (u64::from(params.splits) + 1) >= 1 << 32 {
        return Err("its sequences have too many pages".to_string());
    }
    let act = gpu_float(cache)?;
    let of_act = |operand: &mpk_operand| operand.dtype == cache.dtype;
    if !qkv.iter().chain(&site.inputs[5..]).all(of_act) || (params.partial == 0 && !of_act(&site.outputs[0]))
    {
        return Err("queries, keys, values and output must have the cache's type".to_string());
    }
    let (qk_norm, partial) = (params.qk_norm != 0, params.partial != 0);
    if params.splits == 0 {
        return Err("it has no splits".to_string());
    }
    let kv_heads = params.kv_heads;
    if !kv_heads.is_power_of_two() || kv_heads > MAX_KV_HEADS {
        return Err(format!("tasks of {kv_heads} key-value heads; the GPU code takes 1, 2, 4 or 8"));
    }
    let streamed = match (params.streamed != 0, kv_heads, params.window) {
        (false, 1, 0) => String::new(),
        (true, 1, 0) => ", true".to_string(),
        (streamed, _, 0) => format!(", {streamed}, {kv_heads}"),
        (streamed, ..) => format!(", {streamed}, {kv_heads}, true"),
    };
    let more = match attended::gpu_columns(&site.outputs[0]) {
        columns @ 1.. if !partial => {
            format!(", {}, {kv_heads}, {}, {columns}", params.streamed != 0, params.window != 0)
        }
        _ => streamed,
    };
    Ok(format!("mpk::gpu::Attention<{act}, {dim}, {page_size}, {qk_norm}, {partial}{more}>"))
}

const ATTRIBUTES: &[Attribute] = &[
    Attribute::new("heads", AttributeKind::Whole),
    Attribute::new("kv_heads", AttributeKind::Whole),
    Attribute::new("head_dim", AttributeKind::Whole),
    Attribute::new("splits", AttributeKind::Whole),
    Attribute::new("qk_norm", AttributeKind::Bool),
    Attribute::new("eps", AttributeKind::Number),
    Attribute::new("scale", AttributeKind::Number),
    Attribute::new("prefill", AttributeKind::Bool),
    Attribute::new("window", AttributeKind::Whole),
];

/// Contract of `attention`.
#[derive(Debug)]
pub struct Attention;

impl TaskType for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn knobs(&self) -> &'static [&'static Knob] {
        &[&SPLIT_POSITIONS, &STREAMED_SLOTS, &KV_HEADS, &SLOTS, &attention_prefill::LEAST_ROWS]
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let heads = Heads::global(op.attrs)?;
        let qk_norm = contract::attr_bool(op.attrs, "qk_norm")?;
        let wanted = if qk_norm { 5 } else { 3 };
        contract::num_inputs(op, wanted, wanted)?;
        let (qkv, cache, rope) = (&op.inputs[0], &op.inputs[1], &op.inputs[2]);
        contract::float(qkv)?;
        let (rows, columns) = contract::matrix(qkv)?;
        let width = (heads.heads + 2 * heads.kv_heads) * heads.head_dim;
        if columns != width {
            return Err(OpError(format!(
                "`{}` has {}; {} and 2 x {} of {} are {width}",
                qkv.name,
                counted(columns, "column"),
                counted(heads.heads, "query head"),
                counted(heads.kv_heads, "key-value head"),
                heads.head_dim
            )));
        }
        contract::dtype(cache, qkv.ty.dtype)?;
        match cache.ty.dims[..] {
            [pages, planes, page_size, head_dim]
                if pages > 0
                    && page_size > 0
                    && planes == 2 * heads.kv_heads
                    && head_dim == heads.head_dim => {}
            _ => {
                return Err(OpError(format!(
                    "`{}` must be [num_pages, {}, page_size, {}], not {:?}",
                    cache.name,
                    2 * heads.kv_heads,
                    heads.head_dim,
                    cache.ty.dims
                )));
            }
        }
        contract::dtype(rope, DType::F32)?;
        let (_, rope_columns) = contract::matrix(rope)?;
        if rope_columns != heads.head_dim {
            return Err(OpError(format!("`{}` must have {}", rope.name, counted(heads.head_dim, "column"))));
        }
        for norm in &op.inputs[3..] {
            contract::vector(norm, heads.head_dim)?;
            contract::dtype(norm, qkv.ty.dtype)?;
        }
        scale(op.attrs, heads.head_dim)?;
        window(op.attrs)?;
        attention_prefill::wish(op.attrs)?;
        if qk_norm && contract::attr_f64(op.attrs, "eps")?.is_none() {
            return Err(OpError("attribute `eps` must be given with `qk_norm`".to_string()));
        }
        let out = TensorType { dims: vec![rows, heads.heads * heads.head_dim], ..qkv.ty.clone() };
        Ok(vec![out, cache.ty.clone()])
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let heads = Heads::global(op.attrs)?;
        let (qkv, cache) = (&op.inputs[0], &op.inputs[1]);
        let mut inputs = vec![Need::Replicated; op.inputs.len()];
        inputs[1] = Need::AsIs;
        if *cache.sharding == Sharding::Replicated {
            return Ok(ShardRule { inputs, outputs: vec![Sharding::Replicated; 2] });
        }
        if *cache.sharding != kv_sharding(heads.heads, heads.kv_heads)
            || *qkv.sharding != qkv_sharding(1, heads.heads, heads.kv_heads, heads.head_dim)
        {
            return Err(OpError(format!(
                "`{}` and `{}` must be split by heads, both, or neither",
                qkv.name, cache.name
            )));
        }
        if heads.heads % u64::from(world) != 0 {
            return Err(OpError(format!(
                "{world} ranks do not divide {}",
                counted(heads.heads, "query head")
            )));
        }
        inputs[0] = Need::AsIs;
        let queries = Split::Queries { heads: heads.heads, head_dim: heads.head_dim };
        let out = Sharding::split(1, heads.heads * heads.head_dim, queries);
        Ok(ShardRule { inputs, outputs: vec![out, cache.sharding.clone()] })
    }

    fn expand(&self, op: &LocalOp<'_>, target: &Target) -> Result<Option<Expansion>, OpError> {
        if op.outputs.len() > 2 {
            return Ok(None); // writes partial results already
        }
        if attention_prefill::chosen(op, target)? {
            return attention_prefill::expansion(op, target).map(Some);
        }
        let splits = division::splits(op, target)?;
        if splits == 1 {
            return Ok(None);
        }
        let heads = Heads::local(op.global.attrs, op.global.inputs[0].sharding, op.rank, op.world)?;
        let partial = |width: u64| TensorType {
            dtype: DType::F32,
            dims: vec![op.inputs[0].dims[0], heads.num_queries(), u64::from(splits), width],
            rows: op.inputs[0].rows,
        };
        let mut attrs = Attrs::new();
        attrs.insert("splits".to_string(), splits.into());
        let mut merge_attrs = attrs.clone();
        merge_attrs.insert("dtype".to_string(), op.outputs[0].dtype.name().into());
        Ok(Some(Expansion {
            temporaries: vec![
                Temporary { suffix: ".partial", ty: partial(heads.head_dim) },
                Temporary { suffix: ".softmax", ty: partial(2) },
            ],
            ops: vec![
                ExpandedOp {
                    op_type: "attention",
                    suffix: "",
                    inputs: (0..op.inputs.len()).map(ExpansionOperand::Input).collect(),
                    outputs: vec![
                        ExpansionOperand::Temporary(0),
                        ExpansionOperand::Temporary(1),
                        ExpansionOperand::Output(1),
                    ],
                    attrs,
                },
                ExpandedOp {
                    op_type: "attention_merge",
                    suffix: ".merge",
                    inputs: vec![ExpansionOperand::Temporary(0), ExpansionOperand::Temporary(1)],
                    outputs: vec![ExpansionOperand::Output(0)],
                    attrs: merge_attrs,
                },
            ],
        }))
    }

    fn writes_as(&self, op: &LocalOp<'_>, output: usize, ty: &TensorType, _target: &Target) -> bool {
        output == 0 && attended::writes_as(op, ty)
    }

    fn seen_positions(&self, params: &[u32]) -> Option<u32> {
        let window = std::mem::offset_of!(mpk_attention_params, window) / 4;
        params.get(window).copied().filter(|&window| window != 0)
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let attrs = op.global.attrs;
        let heads = Heads::local(attrs, op.global.inputs[0].sharding, op.rank, op.world)?;
        let (rows, active) = rows_and_active(op.inputs[0].dims[0], op.global.capacity.active)?;
        let (queries, key_values) = (heads.num_queries(), heads.num_key_values());
        let dim = heads.head_dim;
        let local = |what: &str, got: u64, wanted: u64| {
            if got == wanted { Ok(()) } else { Err(OpError(format!("{what} is {got}, not {wanted}"))) }
        };
        local("local width of qkv", op.inputs[0].dims[1], (queries + 2 * key_values) * dim)?;
        local("local dimension 1 of the cache", op.inputs[1].dims[1], 2 * key_values)?;
        let partial = op.outputs.len() == 3;
        if !partial {
            attended::check(op, queries * dim)?;
        }
        let splits = if partial { contract::attr_u32(attrs, "splits")?.unwrap_or(1) } else { 1 };
        let scale = scale(attrs, dim)?;
        let kv_heads = kv_heads_of_task(&heads, active, splits, target);
        let params = mpk_attention_params {
            head_dim: dim as u32,
            splits,
            partial: u32::from(partial),
            qk_norm: u32::from(op.inputs.len() == 5),
            eps: contract::attr_f64(attrs, "eps")?.unwrap_or(0.0) as f32,
            scale: scale as f32,
            streamed: u32::from(u64::from(active) >= target.tuned(&STREAMED_SLOTS)),
            kv_heads,
            window: window(attrs)?,
        };
        let qkv = |first: u64, count: u64| {
            Region::whole(&[rows, 0]).with(1, (first * dim) as u32, ((first + count) * dim) as u32)
        };
        let whole = |index: usize| {
            let dims: Vec<u32> = op.inputs[index].dims.iter().map(|d| *d as u32).collect();
            Access::new(index as u8, Region::whole(&dims))
        };
        let bytes = op.inputs[0].dtype.size();
        let together = u64::from(kv_heads);
        // Tasks of a head: each has the slots that are `groups` apart.
        let groups = active.div_ceil(slots_of_task(&heads, active, kv_heads, target));
        let several = groups < active;
        let cost = together * division::most_keys(op)? * dim * bytes / u64::from(splits);
        let mut tasks =
            Vec::with_capacity((u64::from(groups) * key_values / together * u64::from(splits)) as usize);
        for a in 0..groups {
            let (share, slots) = (row_share(rows, a, groups), row_share(active, a, groups));
            let of_task = (active - a).div_ceil(groups);
            let of_rows = |operand, region| {
                if several {
                    Access::rows_of_units(operand, region, a, groups)
                } else {
                    Access::rows_of_slot(operand, region, a, active)
                }
            };
            let of_pages = if several { Access::pages_of_rows } else { Access::pages_of_slot };
            for h in (0..key_values).step_by(kv_heads as usize) {
                let first_readers = heads.readers(h);
                let readers = first_readers.start..heads.readers(h + together - 1).end;
                let count = readers.end - readers.start;
                for i in 0..splits {
                    let cache = Region::whole(&[0, 0, 0]).with(0, slots.start, slots.end);
                    let cache = cache.with(1, h as u32, h as u32 + kv_heads).with(2, i, i + 1);
                    let mut task = TaskSpec {
                        args: [
                            a as i32,
                            h as i32,
                            i as i32,
                            splits as i32,
                            readers.start as i32,
                            (first_readers.end - first_readers.start) as i32,
                            of_task as i32,
                            groups as i32,
                        ],
                        cost: u64::from(of_task)
                            * (cost + u64::from(rows / active) * (2 * count + 2 * together) * dim * bytes),
                        ..TaskSpec::default()
                    };
                    task.reads.push(Access::new(0, qkv(readers.start, count)));
                    task.reads.push(Access::new(0, qkv(queries + h, together)));
                    task.reads.push(Access::new(0, qkv(queries + key_values + h, together)));
                    task.reads.push(of_pages(1, cache));
                    task.reads.extend((2..op.inputs.len()).map(whole));
                    let (first, last) = (readers.start as u32, readers.end as u32);
                    if partial {
                        for (operand, width) in [(0, dim as u32), (1, 2)] {
                            let region = Region::whole(&[rows, queries as u32, splits, width])
                                .with(0, share.start, share.end)
                                .with(1, first, last)
                                .with(2, i, i + 1);
                            task.writes.push(of_rows(operand, region));
                        }
                        task.writes.push(of_pages(2, cache));
                    } else {
                        let columns = first * dim as u32..last * dim as u32;
                        let by = if several { Access::rows_of_units } else { Access::rows_of_slot };
                        task.writes.push(attended::write(op, columns, (a, groups), by));
                        task.writes.push(of_pages(1, cache));
                    }
                    tasks.push(task);
                }
            }
        }
        Ok(Partition { params: params_words(&params), scratch_bytes: scratch_bytes(dim), tasks })
    }

    fn constant_inputs(&self) -> &'static [usize] {
        &[2, 3, 4]
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(1, 1)]
    }
}

#[cfg(test)]
mod graph_test;
#[cfg(test)]
mod prefill_test;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod test;
#[cfg(test)]
mod test_case;
#[cfg(test)]
mod wide_test;
#[cfg(test)]
mod window_test;

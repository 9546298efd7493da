//! Shared parts of the task types of the linear family: operands, shardings, tiles.
//!
//! The left side of the product is computed from `x` row by row (unchanged, normed, or gated) and rounded once to the
//! weight's type. The weight `[n, k]` is tiled. Bias `[n]` and residual `[rows, n]` (f32) are added to the f32 sums.
//!
//! Column-parallel weights (split on dimension 0) give split columns. Row-parallel weights (split on dimension 1) need
//! `x` with the same split and give partial sums, each rounded once to the output's type; only rank 0 adds the bias.
//! Operands with other shardings are resharded.
//!
//! The output of a gated product `[gate | up]` is silu(gate) * up, half as wide. The attribute `activation` selects
//! another gate than SiLU, as in `silu_mul`. On GPUs the weight's rows lie in pairs (`MPK_LAYOUT_PAIRED`), so a task's gates and ups
//! are one operand, and its columns are multiples of 8 instead of 16.
//!
//! In products of few rows, several tasks may share the k of a tile (`linear_parts.rs`). Then the output, a normed x or the residual is
//! `[parts, rows, columns]`, and a task reads its own columns of x and of the weight.
//!
//! Attributes: `output_dtype` (default: f32 with a row-parallel weight, otherwise the weight's type; with a residual
//! the output is always f32, and the product is not rounded before), `gather_samples` (output row s is computed from
//! the row that yields sample s), `align` (column tiles are multiples of it if there are enough of them), and `eps` of
//! the norm.

use crate::abi::{self, mpk_linear_params, params_words};
use crate::registry::GpuSite;
use crate::tasks::contract;
use crate::tasks::linear_knobs::GATING_WORKERS;
use crate::tasks::linear_parts;
use crate::tasks::operand::{gpu_float, gpu_rows_contiguous};
use crate::tasks::wide::{self, Product};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

pub use crate::tasks::source::Source;
use taskgraph::split::Part;
use taskgraph::target::Backend;
use taskgraph::task_type::{
    Access, Expansion, LocalOp, Need, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType,
};
use taskgraph::{Attribute, AttributeKind, DType, Region, Rows, Sharding, Target};

/// A member of the family.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// How the left side is computed.
    pub source: Source,
    /// The last input is a residual.
    pub residual: bool,
    /// The product is [gate | up], each rounded to the output's type, and the output is silu(gate) * up. A task has the
    /// weight's rows for its gates and for its ups as two operands, unless the rows lie in pairs. Its bias is always two operands.
    pub gated: bool,
}

/// Index of the params word `push`.
pub const PUSH_PARAM: usize = 0;

/// The layout in which GPUs read the weight of a product, gated or not.
pub fn gpu_layout(gated: bool) -> u32 {
    if gated { abi::MPK_LAYOUT_PAIRED } else { abi::MPK_LAYOUT_FRAGMENT }
}

/// The weight's rows of columns `columns` of the output: those of gates and those of ups, as they lie in memory.
pub fn rows_of(gated: bool, columns: Range<u32>, all: u32, target: &Target) -> SmallVec<[Range<u32>; 2]> {
    let Range { start, end } = columns;
    match (gated, target.backend.pair_rows()) {
        (false, _) => smallvec![start..end],
        (true, Some(_)) => smallvec![2 * start..2 * end],
        (true, None) => smallvec![start..end, all + start..all + end],
    }
}

/// Bytes of prepared rows that a task keeps in the cache.
const CHUNK_BYTES: u64 = 1 << 20;
/// Minimum and maximum number of rows per chunk. With fewer rows, the weights would be read too often.
const CHUNK_ROWS: (u64, u64) = (96, 480);

/// GPU code for normed rows is compiled for multiples of this number of columns, so that shapes share code.
const GPU_COLUMNS_STEP: u32 = 4096;

/// The same for rows that are several summands.
const GPU_COLUMNS_OF_PARTS_STEP: u32 = 1024;

const OUTPUT_DTYPE: Attribute = Attribute::new("output_dtype", AttributeKind::DType);
const GATHER_SAMPLES: Attribute = Attribute::new("gather_samples", AttributeKind::Bool);
const ALIGN: Attribute = Attribute::new("align", AttributeKind::Whole);
/// Of the norm.
const EPS: Attribute = Attribute::new("eps", AttributeKind::Number);

/// Positions of the operands.
struct Operands {
    norm: Option<usize>,
    weight: usize,
    bias: Option<usize>,
    residual: Option<usize>,
}

impl Family {
    /// The attributes. A fused operator takes over those of its parts, so a part must not have one that it does not use: it would count
    /// for the other part.
    pub const fn attributes(self) -> &'static [Attribute] {
        match (self.source, self.gated) {
            (Source::Plain, false) => &[OUTPUT_DTYPE, GATHER_SAMPLES, ALIGN],
            (Source::RmsNorm, false) => &[OUTPUT_DTYPE, GATHER_SAMPLES, ALIGN, EPS],
            (Source::RmsNorm, true) => &[OUTPUT_DTYPE, GATHER_SAMPLES, ALIGN, EPS, contract::ACTIVATION],
            (Source::Plain, true) | (Source::SiluMul, _) => {
                &[OUTPUT_DTYPE, GATHER_SAMPLES, ALIGN, contract::ACTIVATION]
            }
        }
    }

    fn operands(self, count: usize) -> Result<Operands, OpError> {
        let norm = (self.source == Source::RmsNorm).then_some(1);
        let weight = 1 + usize::from(norm.is_some());
        let least = weight + 1 + usize::from(self.residual);
        if count != least && count != least + 1 {
            return Err(OpError(format!("takes {least} inputs, or {} with a bias, not {count}", least + 1)));
        }
        let bias = (count > least).then_some(weight + 1);
        let residual = self.residual.then_some(count - 1);
        Ok(Operands { norm, weight, bias, residual })
    }

    /// Columns of the product per column of the output.
    fn halves(self) -> u64 {
        1 + u64::from(self.gated)
    }

    /// Outputs of the operator, for [`taskgraph::TaskType::infer`].
    pub fn infer(self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let at = self.operands(op.inputs.len())?;
        let (x, weight) = (&op.inputs[0], &op.inputs[at.weight]);
        let (rows, x_columns) = contract::matrix(x)?;
        let (n, k) = contract::matrix(weight)?;
        if self.gated && n % 2 != 0 {
            return Err(OpError(format!(
                "`{}` must hold the rows of gate, then the rows of up, but has {n} rows",
                weight.name
            )));
        }
        contract::float(x)?;
        contract::float(weight)?;
        let wanted = if self.source == Source::SiluMul { 2 * k } else { k };
        if x_columns != wanted {
            return Err(OpError(format!(
                "`{}` [{n}, {k}] needs `{}` to have {wanted} columns, not {x_columns}",
                weight.name, x.name
            )));
        }
        if let Some(norm) = at.norm {
            contract::vector(&op.inputs[norm], k)?;
            contract::float(&op.inputs[norm])?;
            contract::eps(op)?;
        }
        if let Some(bias) = at.bias {
            contract::vector(&op.inputs[bias], n)?;
            contract::float(&op.inputs[bias])?;
        }
        let gather = contract::attr_bool(op.attrs, "gather_samples")?;
        if gather && x.ty.rows != Rows::Tokens {
            return Err(OpError(format!(
                "`gather_samples` needs token rows, but `{}` does not have them",
                x.name
            )));
        }
        let (rows, rows_kind) =
            if gather { (u64::from(op.capacity.samples), Rows::Samples) } else { (rows, x.ty.rows) };
        if let Some(residual) = at.residual {
            let residual = &op.inputs[residual];
            contract::dtype(residual, DType::F32)?;
            if residual.ty.dims != [rows, n] || residual.ty.rows != rows_kind {
                return Err(OpError(format!(
                    "`{}` must be [{rows}, {n}], not {:?}",
                    residual.name, residual.ty.dims
                )));
            }
        }
        let row_parallel = contract::split_columns(weight.sharding).is_some();
        let default = if row_parallel { DType::F32 } else { weight.ty.dtype };
        let mut dtype = contract::attr_dtype(op.attrs, "output_dtype")?.unwrap_or(default);
        if !dtype.is_float() {
            return Err(OpError(format!("`output_dtype` must be f32, f16 or bf16, not {dtype}")));
        }
        if self.residual {
            dtype = DType::F32;
        }
        if row_parallel && dtype != DType::F32 && dtype != weight.ty.dtype {
            return Err(OpError(format!(
                "the partial sums of the row-parallel `{}` ({}) cannot be {dtype}; set `output_dtype` to f32 or to the \
                 weight's type",
                weight.name, weight.ty.dtype
            )));
        }
        Ok(vec![TensorType { dtype, dims: vec![rows, n / self.halves()], rows: rows_kind }])
    }

    /// Shardings, for [`taskgraph::TaskType::shard`].
    pub fn shard(self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let at = self.operands(op.inputs.len())?;
        let weight = &op.inputs[at.weight];
        let mut inputs = vec![Need::Replicated; op.inputs.len()];
        inputs[at.weight] = Need::AsIs;
        if world == 1 {
            return Ok(ShardRule {
                inputs: vec![Need::AsIs; op.inputs.len()],
                outputs: vec![Sharding::Replicated],
            });
        }
        let output = match weight.sharding {
            Sharding::Replicated => Sharding::Replicated,
            Sharding::Partial => return Err(OpError(format!("weight `{}` cannot be partial", weight.name))),
            Sharding::Split { dim: 0, parts } => {
                for (index, dim) in [(at.bias, 0), (at.residual, 1)] {
                    if let Some(index) = index {
                        inputs[index] = Need::Split(Sharding::Split { dim, parts: parts.clone() });
                    }
                }
                match &parts[..] {
                    [gate, up] if self.gated && gate == up => Sharding::Split { dim: 1, parts: vec![*gate] },
                    _ if self.gated => {
                        return Err(OpError(format!(
                            "`{}` must be split over the ranks as gate and up, both in the same way; give its `shard` two \
                             equal `parts`",
                            weight.name
                        )));
                    }
                    _ => Sharding::Split { dim: 1, parts: parts.clone() },
                }
            }
            Sharding::Split { parts, .. } => {
                if self.residual {
                    return Err(OpError(format!(
                        "the row-parallel `{}` gives partial sums, so the residual must be added after the allreduce",
                        weight.name
                    )));
                }
                if self.source == Source::RmsNorm {
                    return Err(OpError(format!(
                        "`{}` is row-parallel, but a norm needs whole rows",
                        weight.name
                    )));
                }
                inputs[0] = Need::Split(Sharding::Split { dim: 1, parts: self.columns_of_x(parts) });
                Sharding::Partial
            }
        };
        Ok(ShardRule { inputs, outputs: vec![output] })
    }

    /// The GPU code of a task (`src/gpu/linear.cuh`), for [`crate::registry::Registration::gpu`].
    ///
    /// # Errors
    /// The reason why that code cannot run the task.
    pub fn gpu(self, site: &GpuSite<'_>) -> Result<String, String> {
        let words = size_of::<mpk_linear_params>() / 4;
        let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
        let params: mpk_linear_params = bytemuck::pod_read_unaligned(bytes);
        let norm = usize::from(self.source == Source::RmsNorm);
        let halves = self.halves() as usize;
        let count =
            2 + norm + halves * usize::from(params.has_bias != 0) + usize::from(params.has_residual != 0);
        let ([x, ..], [out]) = (site.inputs, site.outputs) else {
            return Err("it must have inputs and one output".to_string());
        };
        if params.gated != u32::from(self.gated) {
            return Err(format!("its parameters say gated {}, but its type does not", params.gated));
        }
        if site.inputs.len() != count {
            return Err(format!("its parameters describe {count} inputs, not {}", site.inputs.len()));
        }
        let weight = &site.inputs[1 + norm];
        let (k, stride) = (weight.dims[1], weight.strides[0]);
        // A task may have a part of k.
        let cut = stride > k.next_multiple_of(abi::MPK_FRAGMENT_K);
        if u32::from(weight.layout) != gpu_layout(self.gated)
            || stride < k
            || !stride.is_multiple_of(abi::MPK_FRAGMENT_K)
            || cut && (self.source != Source::Plain || self.gated)
        {
            return Err(format!("its weight [{}, {k}] is not packed for the GPU", weight.dims[0]));
        }
        let wanted = if self.source == Source::SiluMul { 2 * u64::from(k) } else { u64::from(k) };
        let x_columns = if x.ndim == 3 { x.dims[2] } else { x.dims[1] };
        if u64::from(x_columns) != wanted {
            return Err(format!("x has {x_columns} columns, but the weight needs {wanted}"));
        }
        let residual = (params.has_residual != 0).then(|| &site.inputs[count - 1]);
        // Only rows that are loaded at once need code for their number of summands.
        let parts = match x.ndim {
            3 => x.dims[0],
            _ => 1 + u32::from(cut || residual.is_some_and(|residual| residual.ndim == 3)),
        };
        let strided =
            site.inputs.iter().chain([out]).filter(|o| u32::from(o.layout) == abi::MPK_LAYOUT_STRIDED);
        gpu_rows_contiguous(strided)?;
        let eights = match out.dims[0] {
            0..=8 => 1,
            9..=16 => 2,
            _ => 4,
        };
        let source = match self.source {
            Source::Plain => "kPlain",
            Source::RmsNorm => "kRmsNorm",
            Source::SiluMul => "kSiluMul",
        };
        if out.dtype != abi::MPK_F32_FLAGGED as u8 {
            gpu_float(out)?;
        }
        // Only rows that are normed are kept in registers. Summands have few columns, since their writer has few tiles.
        let step = if parts > 1 { GPU_COLUMNS_OF_PARTS_STEP } else { GPU_COLUMNS_STEP };
        let most = if norm == 1 { k.max(1).next_multiple_of(step) } else { 0 };
        let parts = if parts > 1 { format!(", {parts}") } else { String::new() };
        Ok(format!(
            "mpk::gpu::Linear<{}, mpk::gpu::{source}, {most}, {eights}, {}, {}{parts}>",
            gpu_float(weight)?,
            gpu_float(x)?,
            if norm == 1 { gpu_float(&site.inputs[1])? } else { "MPK_F32" },
        ))
    }

    /// Parts of the columns of `x`, for a row-parallel weight with these parts.
    fn columns_of_x(self, parts: &[Part]) -> Vec<Part> {
        if self.source == Source::SiluMul { [parts, parts].concat() } else { parts.to_vec() }
    }

    /// For [`taskgraph::TaskType::fuses`]. A gate after the product becomes part of it if there are many workers: gating
    /// all inputs on each of them would then cost more than gating the few outputs. Packed weights are cut at
    /// multiples of 16 rows, so the ups must begin at such a row; in pairs of rows, at a multiple of 8.
    pub fn fuses(self, op: &OpView<'_>, world: u32, target: &Target) -> bool {
        if !contract::activation(op.attrs).is_ok_and(|activation| self.has_gate(activation, target)) {
            return false;
        }
        if !self.gated {
            return true;
        }
        let Some(weight) = self.operands(op.inputs.len()).ok().and_then(|at| op.inputs.get(at.weight)) else {
            return false;
        };
        let unit = self.column_unit(target);
        let aligned = |columns: u64| columns.is_multiple_of(u64::from(unit));
        let aligned = match weight.sharding {
            Sharding::Split { dim: 0, parts } => parts.iter().all(|part| {
                (0..world)
                    .map(|rank| part.split.range(part.len, rank, world))
                    .all(|r| aligned(r.end - r.start))
            }),
            _ => weight.ty.dims.first().is_some_and(|n| aligned(n / 2)),
        };
        aligned && u64::from(target.max_tiles) >= target.tuned(&GATING_WORKERS)
    }

    /// True if the target's code has this gate, or the product has none. The GPU's products gate by SiLU only.
    fn has_gate(self, activation: u32, target: &Target) -> bool {
        let gates = self.gated || self.source == Source::SiluMul;
        !gates || target.backend != Backend::Cuda || activation == abi::MPK_ACTIVATION_SILU
    }

    /// What to use where a gated product is refused. A graph that names it could not know.
    fn separate(self) -> &'static str {
        match (self.gated, self.source, self.residual) {
            (true, Source::RmsNorm, _) => {
                "use `rmsnorm_linear`, then `silu_mul`; they are fused where that is possible"
            }
            (true, ..) => "use `linear`, then `silu_mul`",
            (false, _, true) => "use `silu_mul`, then `linear_with_residual`",
            (false, _, false) => "use `silu_mul`, then `linear`",
        }
    }

    /// Column tiles of the output are multiples of it.
    fn column_unit(self, target: &Target) -> u32 {
        target.backend.pair_rows().filter(|_| self.gated).unwrap_or(target.column_unit)
    }

    /// For [`taskgraph::TaskType::paired_inputs`], if `weight` is the weight.
    pub fn paired_inputs<'a>(self, weight: &'a [usize], target: &Target) -> &'a [usize] {
        if self.gated && target.backend.pair_rows().is_some() { weight } else { &[] }
    }

    /// For [`taskgraph::TaskType::expand`]: products of many rows, on a GPU with wide products.
    pub fn expand(self, op: &LocalOp<'_>, target: &Target) -> Result<Option<Expansion>, OpError> {
        Ok(self.wide_product(op)?.and_then(|product| wide::expand(&product, op, target)))
    }

    /// The operator as a wide product, if it can be one.
    fn wide_product(self, op: &LocalOp<'_>) -> Result<Option<Product>, OpError> {
        let Operands { weight, bias, residual, .. } = self.operands(op.inputs.len())?;
        if contract::activation(op.global.attrs)? != abi::MPK_ACTIVATION_SILU {
            return Ok(None); // wide products support SiLU gates only
        }
        let gathers = contract::attr_bool(op.global.attrs, "gather_samples")?;
        Ok(Some(Product { source: self.source, gated: self.gated, weight, bias, residual, gathers }))
    }

    /// For [`taskgraph::TaskType::reads_as`].
    pub fn reads_as(self, op: &LocalOp<'_>, input: usize, target: &Target) -> Option<TensorType> {
        let product = self.wide_product(op).ok().flatten();
        if let Some(product) = product.filter(|product| wide::expand(product, op, target).is_some()) {
            return wide::reads_as(&product, op, input, target);
        }
        let at = self.operands(op.inputs.len()).ok()?;
        let adds = input == 0 && at.norm.is_some() || at.residual == Some(input);
        adds.then(|| linear_parts::reads_as(op, input, target)).flatten()
    }

    /// For [`taskgraph::TaskType::writes_as`].
    pub fn writes_as(self, op: &LocalOp<'_>, ty: &TensorType, target: &Target) -> bool {
        let product = self.wide_product(op).ok().flatten();
        if let Some(product) = product.filter(|product| wide::expand(product, op, target).is_some()) {
            return wide::writes_as(&product, op, ty, target);
        }
        let gathers = contract::attr_bool(op.global.attrs, "gather_samples").unwrap_or(true);
        let Ok(Operands { weight, .. }) = self.operands(op.inputs.len()) else { return false };
        let plain = self.source == Source::Plain && !self.gated && !gathers;
        let k = op.inputs[weight].dims.get(1);
        plain && k.is_some_and(|&k| linear_parts::writes_as(op, k, ty, target))
    }

    /// Tasks, for [`taskgraph::TaskType::partition`].
    pub fn partition(self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let at = self.operands(op.inputs.len())?;
        let attrs = op.global.attrs;
        let (x, out) = (&op.inputs[0], &op.outputs[0]);
        let (parts, x_parts) = (linear_parts::parts_of(out), linear_parts::parts_of(x));
        let residual_parts = at.residual.map_or(1, |residual| linear_parts::parts_of(&op.inputs[residual]));
        let (rows, columns) = contract::local_matrix(&linear_parts::matrix_of(out))?;
        let (weight_rows, k) = contract::local_matrix(&op.inputs[at.weight])?;
        let (x_rows, x_columns) = contract::local_matrix(&linear_parts::matrix_of(x))?;
        let wanted = if self.source == Source::SiluMul { 2 * u64::from(k) } else { u64::from(k) };
        if u64::from(weight_rows) != self.halves() * u64::from(columns) || u64::from(x_columns) != wanted {
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
        let partial = op.world > 1 && contract::split_columns(op.global.inputs[at.weight].sharding).is_some();
        let k_padded = u64::from(k).next_multiple_of(2);
        // A rank may hold no column at all if there are fewer columns than ranks.
        let chunk_rows =
            (CHUNK_BYTES / (4 * k_padded.max(2))).clamp(CHUNK_ROWS.0, CHUNK_ROWS.1).min(u64::from(rows));
        let params = mpk_linear_params {
            push: 0,
            rows_kind: contract::rows_kind(if parts > 1 { op.global.outputs[0].ty.rows } else { out.rows }),
            gather_samples: u32::from(contract::attr_bool(attrs, "gather_samples")?),
            has_bias: u32::from(at.bias.is_some()),
            add_bias: u32::from(!partial || op.rank == 0),
            has_residual: u32::from(at.residual.is_some()),
            chunk_rows: chunk_rows as u32,
            gated: u32::from(self.gated),
            eps: if at.norm.is_some() { contract::eps(op.global)? } else { 0.0 },
            activation: contract::activation(attrs)?,
        };
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
        let align = contract::attr_u32(attrs, "align")?.unwrap_or(1);
        let row_bytes = |i: usize| u64::from(k) * op.inputs[i].dtype.size();
        let tiles = Target { column_unit, ..target.clone() }.column_tiles(columns, align);
        let pieces = tiles.iter().flat_map(|tile| (0..parts).map(move |part| (tile, part)));
        let tasks = pieces.map(|(tile, part)| {
            let tile_columns = Region::whole(&[rows, columns]).with(1, tile.start, tile.end);
            // Those of all summands.
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
                // First that of the gates, then that of the ups.
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
            // 1: the task leaves out the bias; the residual.
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
            // one row, then the chunk, each row of whole pairs
            scratch_bytes: (4 * k_padded).next_multiple_of(64) + chunk_rows * 4 * k_padded,
            tasks: tasks.collect(),
        })
    }
}

#[cfg(test)]
#[path = "linear_family_test.rs"]
mod tests;

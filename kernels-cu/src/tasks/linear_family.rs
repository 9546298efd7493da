//! The task types of the linear family: products of a left side and a weight.
//!
//! The left side is computed from `x` row by row (unchanged, normed, or gated) and rounded once to the weight's type. The weight `[n, k]`
//! is tiled. Bias `[n]` and residual `[rows, n]` (f32) are added to the f32 sums.
//!
//! The output of a gated product `[gate | up]` is silu(gate) * up, half as wide. The attribute `activation` selects another gate than SiLU,
//! as in `silu_mul`.
//!
//! Row-parallel weights give partial sums, each rounded once to the output's type. Only rank 0 adds the bias.
//!
//! In products of few rows, several tasks may share the k of a tile (`linear_parts.rs`). Then the output, a normed x or the residual is
//! `[parts, rows, columns]`, and a task reads its own columns of x and of the weight.
//!
//! Attributes: `output_dtype` (default: f32 with a row-parallel weight, otherwise the weight's type; with a residual
//! the output is always f32, and the product is not rounded before), `gather_samples` (output row s is computed from
//! the row that yields sample s), `align` (column tiles are multiples of it if there are enough of them), and `eps` of
//! the norm.
//!
//! This file has what a member is, its operands and its output. Each other part of the contract has its own file.

pub mod gated;
mod gpu;
mod layouts;
mod partition;
mod shard;

use crate::tasks::contract;
use taskgraph::task_type::{OpError, OpView, TensorType};
use taskgraph::{Attribute, AttributeKind, DType, Rows};

pub use crate::tasks::source::Source;

/// A member of the family.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// How the left side is computed.
    pub source: Source,
    /// The last input is a residual.
    pub residual: bool,
    /// The product is [gate | up], each rounded to the output's type, and the output is silu(gate) * up. A task has two operands of the
    /// weight, its gates and its ups, unless the rows lie in pairs. Its bias is always two operands.
    pub gated: bool,
}

/// Index of the params word `push`.
pub const PUSH_PARAM: usize = 0;

const OUTPUT_DTYPE: Attribute = Attribute::new("output_dtype", AttributeKind::DType);
const GATHER_SAMPLES: Attribute = Attribute::new("gather_samples", AttributeKind::Bool);
const ALIGN: Attribute = Attribute::new("align", AttributeKind::Whole);
/// The norm's eps.
const EPS: Attribute = Attribute::new("eps", AttributeKind::Number);

/// Positions of the operands.
struct Operands {
    norm: Option<usize>,
    weight: usize,
    bias: Option<usize>,
    residual: Option<usize>,
}

impl Family {
    /// The attributes. A fused operator takes over those of its parts. So a part must not have an attribute that it does not use: it would
    /// apply to the other part.
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

    /// The positions of `count` inputs.
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

    /// Columns of `x` for a weight of `k` columns.
    fn x_columns(self, k: u64) -> u64 {
        if self.source == Source::SiluMul { 2 * k } else { k }
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
        let wanted = self.x_columns(k);
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
}

#[cfg(test)]
#[path = "linear_family_test.rs"]
mod tests;

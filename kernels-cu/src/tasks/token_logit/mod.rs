//! `token_logit`: the logit of the token that was chosen for each sample, before penalties and temperature.
//!
//! Inputs: 0. `token` i32 `[slots]`, replicated, 1. `logits` f32 [samples, vocabulary], split on their columns or replicated, as for
//! [`super::argmax_partial`]. Output: f32 [slices, samples], split on dimension 0: rank r writes slice r. A rank writes the logit
//! if the token is among its columns, otherwise -infinity. So the highest of all slices is the token's. NaN counts as -infinity.
//!
//! Attribute: `slices` (the number of ranks; default 1).
//!
//! One task: arguments `[first global token, columns, 0..]`. Without columns it does not read the logits.

use super::argmax_partial::{columns_of_rank, slice_of_rank};
use crate::abi::mpk_task_token_logit;
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use std::sync::Arc;
use taskgraph::op_graph::Attrs;
use taskgraph::task_type::{
    Access, LocalOp, Need, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType,
};
use taskgraph::{Attribute, AttributeKind, DType, Region, Rows, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "token_logit",
    core_number: None,
    contract: Some(|| Arc::new(TokenLogit)),
    run: Some(mpk_task_token_logit),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(_site: &GpuSite<'_>) -> Result<String, String> {
    Ok("mpk::gpu::TokenLogit".to_string())
}

fn slices(attrs: &Attrs) -> Result<u32, OpError> {
    match contract::attr_u32(attrs, "slices")?.unwrap_or(1) {
        0 => Err(OpError("`slices` must be above 0".to_string())),
        slices => Ok(slices),
    }
}

/// Contract of `token_logit`.
#[derive(Debug)]
pub struct TokenLogit;

impl TaskType for TokenLogit {
    fn name(&self) -> &'static str {
        "token_logit"
    }

    fn attributes(&self) -> &'static [Attribute] {
        const { &[Attribute::new("slices", AttributeKind::Whole)] }
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let slices = slices(op.attrs)?;
        let [token, logits] = contract::inputs(op)?;
        contract::dtype(token, DType::I32)?;
        contract::dtype(logits, DType::F32)?;
        let (samples, _) = contract::matrix(logits)?;
        if token.ty.dims.len() != 1 || token.ty.dims[0] < samples {
            return Err(OpError(format!(
                "`{}` must have a token for each of {samples} samples, not {:?}",
                token.name, token.ty.dims
            )));
        }
        Ok(vec![TensorType { dtype: DType::F32, dims: vec![slices.into(), samples], rows: Rows::Fixed }])
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let [_, logits] = contract::inputs(op)?;
        let (need, slice) = slice_of_rank(logits, slices(op.attrs)?, world)?;
        Ok(ShardRule { inputs: vec![Need::Replicated, need], outputs: vec![slice] })
    }

    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let (samples, _) = contract::local_matrix(&op.inputs[1])?;
        let (columns, first_token) = columns_of_rank(op, 1, slices(op.global.attrs)?)?;
        let token = first_token + u64::from(columns.start);
        let mut task = TaskSpec {
            args: [token as i32, columns.len() as i32, 0, 0, 0, 0, 0, 0],
            cost: 64 * u64::from(samples),
            ..TaskSpec::default()
        };
        task.reads.push(Access::new(0, Region::whole(&[samples])));
        if !columns.is_empty() {
            let own = Region::whole(&[samples, 0]).with(1, columns.start, columns.end);
            task.reads.push(Access::new(1, own));
        }
        task.writes.push(Access::new(0, Region::whole(&[1, samples])));
        Ok(Partition { params: Vec::new(), scratch_bytes: 0, tasks: vec![task] })
    }
}

#[cfg(test)]
mod test;

//! `token_counts`: how often each token occurs in the sequence of a slot, for penalties.
//!
//! Input and output, in place: `counts` u32 [slots, vocabulary], `Role::Persistent`, split on its columns or
//! replicated. A word has bit 31 set if the token is in the prompt. The other bits count how often it occurred as a new
//! token. Attribute: `tiles`, the column tiles of a rank.
//!
//! The tokens are those of the iteration's rows. So a sequence is counted while it passes through the model, and each
//! sampled token in the next iteration. If a slot begins at position 0, its counts are cleared first. So they are also
//! correct after a slot has got another request, and after a preempted request is computed again. Slots whose request
//! has no penalties (`MPK_SAMPLING_PENALTIES`) are skipped. A request with penalties must process its whole sequence,
//! from position 0 on.
//!
//! One task per tile: arguments `[first global token, 0..]`.

use crate::abi::{mpk_task_token_counts, mpk_token_counts_params, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::argmax_partial::cut;
use crate::tasks::contract;
use std::sync::Arc;
use taskgraph::task_type::{
    Access, LocalOp, Need, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType,
};
use taskgraph::{Attribute, AttributeKind, DType, Region, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "token_counts",
    core_number: None,
    contract: Some(|| Arc::new(TokenCounts)),
    run: Some(mpk_task_token_counts),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(_site: &GpuSite<'_>) -> Result<String, String> {
    Ok("mpk::gpu::TokenCounts".to_string())
}

/// Contract of `token_counts`.
#[derive(Debug)]
pub struct TokenCounts;

impl TaskType for TokenCounts {
    fn name(&self) -> &'static str {
        "token_counts"
    }

    fn attributes(&self) -> &'static [Attribute] {
        const { &[Attribute::new("tiles", AttributeKind::Whole)] }
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let [counts] = contract::inputs(op)?;
        contract::dtype(counts, DType::U32)?;
        contract::matrix(counts)?;
        if contract::attr_u32(op.attrs, "tiles")? == Some(0) {
            return Err(OpError("`tiles` must be above 0".to_string()));
        }
        Ok(vec![counts.ty.clone()])
    }

    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Ok(ShardRule { inputs: vec![Need::AsIs], outputs: vec![op.inputs[0].sharding.clone()] })
    }

    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let tiles = contract::attr_u32(op.global.attrs, "tiles")?.unwrap_or(1);
        let (slots, columns) = contract::local_matrix(&op.inputs[0])?;
        let first_token = op.input_ranges(0).first().map_or(0, |range| range.start);
        let tasks = cut(columns, tiles)
            .into_iter()
            .filter(|range| !range.is_empty())
            .map(|range| {
                let access = Access::new(0, Region::whole(&[slots, 0]).with(1, range.start, range.end));
                let mut task = TaskSpec {
                    args: [(first_token as u32 + range.start) as i32, 0, 0, 0, 0, 0, 0, 0],
                    cost: 64,
                    ..TaskSpec::default()
                };
                task.reads.push(access);
                task.writes.push(access);
                task
            })
            .collect();
        let params = mpk_token_counts_params { unused: 0 };
        Ok(Partition { params: params_words(&params), scratch_bytes: 0, tasks })
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }
}

//! `attention_prefill_merge`: joins the partial results of units that several tasks of `attention_prefill` computed.
//!
//! Inputs: that operator's outputs 1 and 2. Output: its output 0; this operator writes the rows of those units.
//!
//! There are as many tasks as `attention_prefill` has; arguments `[t, 0..]`. If the cut between tasks t - 1 and t falls inside
//! a unit, the tasks of all cuts inside the unit share its rows, so no two tasks write the same row. In regions, the *unit
//! share* of task t stands for them ([`super::attention_prefill`]).

use crate::abi::{mpk_task_attention_prefill_merge, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::attended;
use crate::tasks::attention_prefill::{last_arguments, params, step_only, unit_share, weights_bytes};
use crate::tasks::heads::rows_and_active;
use crate::tasks::operand::gpu_float;
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType};
use taskgraph::{Region, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "attention_prefill_merge",
    core_number: None,
    contract: Some(|| Arc::new(AttentionPrefillMerge)),
    run: Some(mpk_task_attention_prefill_merge),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let ([partial, _], [out]) = (site.inputs, site.outputs) else {
        return Err("it must have two inputs and one output".to_string());
    };
    match (partial.dims[2], gpu_float(out)?) {
        (dim @ (64 | 128), act) if act != "MPK_F32" => {
            Ok(format!("mpk::gpu::AttentionPrefillMerge<{act}, {dim}{}>", last_arguments(site)?))
        }
        (dim, act) => Err(format!("heads of {dim} {act}; the GPU code takes 64 and 128 elements of 2 bytes")),
    }
}

/// Contract of `attention_prefill_merge`.
#[derive(Debug)]
pub struct AttentionPrefillMerge;

impl TaskType for AttentionPrefillMerge {
    fn name(&self) -> &'static str {
        "attention_prefill_merge"
    }

    fn infer(&self, _op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        Err(step_only(self.name()))
    }

    fn shard(&self, _op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Err(step_only(self.name()))
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (_, params) = params(op, target)?;
        let (_, active) = rows_and_active(attended::rows(op)?, op.global.capacity.active)?;
        let tasks = (0..params.tasks).map(|t| {
            let mut task = TaskSpec { args: [t as i32, 0, 0, 0, 0, 0, 0, 0], cost: 1, ..TaskSpec::default() };
            for (i, input) in op.inputs.iter().enumerate() {
                let dims: Vec<u32> = input.dims.iter().map(|d| *d as u32).collect();
                task.reads.push(Access::new(i as u8, Region::whole(&dims)));
            }
            task.writes.push(unit_share(op, &params, t));
            task
        });
        let tasks = tasks.collect();
        Ok(Partition { params: params_words(&params), scratch_bytes: weights_bytes(active), tasks })
    }
}

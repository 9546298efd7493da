//! A collective: with `rotate`, each rank gets what the rank before it holds of a tensor that every rank
//! holds.

use taskgraph::collective::{Collective, CollectiveOp, Exchange, Lowered, Operand, Send, Step};
use taskgraph::task_type::{Need, OpError, OpView, ShardRule, TensorType};
use taskgraph::{Region, Sharding};

#[derive(Debug)]
pub struct Rotate;

impl Collective for Rotate {
    fn name(&self) -> &'static str {
        "rotate"
    }
    fn infer(&self, op: &OpView<'_>) -> Result<TensorType, OpError> {
        op.inputs.first().map(|x| x.ty.clone()).ok_or_else(|| OpError("takes one input".into()))
    }
    fn shard(&self, _: &OpView<'_>, _: u32) -> Result<ShardRule, OpError> {
        Ok(ShardRule { inputs: vec![Need::Replicated], outputs: vec![Sharding::Replicated] })
    }
    fn lower(&self, op: &CollectiveOp<'_>) -> Result<Lowered, OpError> {
        let dims: Vec<u32> = op.view.inputs[0].ty.dims.iter().map(|&d| d as u32).collect();
        let (all, world) = (Region::whole(&dims), op.world());
        let send = |rank| vec![Send { to: (rank + 1) % world, source: Some(all), target: all, event: 0 }];
        Ok(Lowered {
            steps: vec![Step::Exchange(Exchange {
                source: Operand::Input(0),
                target: Operand::Output,
                rows_kind: 2,
                sends: (0..world).map(send).collect(),
                rows_per_index: 0,
                between_all: true,
                completes: None,
                beside_producer: false,
            })],
            ..Lowered::default()
        })
    }
}

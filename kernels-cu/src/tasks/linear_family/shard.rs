//! Shardings of a product.
//!
//! A column-parallel weight (split on dimension 0) gives split columns. A row-parallel weight (split on dimension 1) needs `x` with the
//! same split, and gives partial sums. Operands with other shardings are resharded.

use super::Family;
use crate::tasks::contract;
use crate::tasks::source::Source;
use taskgraph::Sharding;
use taskgraph::split::Part;
use taskgraph::task_type::{Need, OpError, OpView, ShardRule};

impl Family {
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
                contract::held_once(weight, world)?;
                inputs[0] = Need::Split(Sharding::Split { dim: 1, parts: self.columns_of_x(parts) });
                Sharding::Partial
            }
        };
        Ok(ShardRule { inputs, outputs: vec![output] })
    }

    /// The parts of the columns of `x`, for a row-parallel weight with these parts.
    fn columns_of_x(self, parts: &[Part]) -> Vec<Part> {
        if self.source == Source::SiluMul { [parts, parts].concat() } else { parts.to_vec() }
    }
}

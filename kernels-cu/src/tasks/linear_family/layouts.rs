//! When a product is wide, and in which layouts its operands may be read and written.

use super::{Family, Operands};
use crate::abi;
use crate::tasks::contract;
use crate::tasks::linear_parts;
use crate::tasks::source::Source;
use crate::tasks::wide::{self, Product};
use taskgraph::Target;
use taskgraph::task_type::{Expansion, LocalOp, OpError, TensorType};

impl Family {
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

    /// The operator as a wide product, if it is one on this target.
    fn wide(self, op: &LocalOp<'_>, target: &Target) -> Option<Product> {
        let product = self.wide_product(op).ok().flatten();
        product.filter(|product| wide::expand(product, op, target).is_some())
    }

    /// For [`taskgraph::TaskType::reads_as`].
    pub fn reads_as(self, op: &LocalOp<'_>, input: usize, target: &Target) -> Option<TensorType> {
        if let Some(product) = self.wide(op, target) {
            return wide::reads_as(&product, op, input, target);
        }
        let at = self.operands(op.inputs.len()).ok()?;
        let adds = input == 0 && at.norm.is_some() || at.residual == Some(input);
        adds.then(|| linear_parts::reads_as(op, input, target)).flatten()
    }

    /// For [`taskgraph::TaskType::writes_as`].
    pub fn writes_as(self, op: &LocalOp<'_>, ty: &TensorType, target: &Target) -> bool {
        if let Some(product) = self.wide(op, target) {
            return wide::writes_as(&product, op, ty, target);
        }
        let gathers = contract::attr_bool(op.global.attrs, "gather_samples").unwrap_or(true);
        let Ok(Operands { weight, .. }) = self.operands(op.inputs.len()) else { return false };
        let plain = self.source == Source::Plain && !self.gated && !gathers;
        let k = op.inputs[weight].dims.get(1);
        plain && k.is_some_and(|&k| linear_parts::writes_as(op, k, ty, target))
    }
}

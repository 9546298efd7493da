//! An operator that only composes others: `block(x, w)` is `linear(negate(x), w) + x`.

use kernels_cu::registry::Registration;
use std::sync::Arc;
use taskgraph::task_type::{ExpandedOp, Expansion, ExpansionOperand, OpError, OpView, Temporary, TensorType};
use taskgraph::{Attrs, TaskType};

/// Registry entry.
pub static REGISTRATION: Registration = Registration {
    name: "block",
    core_number: None,
    contract: Some(|| Arc::new(Block)),
    run: None,
    ready: None,
    gpu: None,
};

#[derive(Debug)]
struct Block;

impl TaskType for Block {
    fn name(&self) -> &'static str {
        "block"
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        op.inputs.first().map(|x| vec![x.ty.clone()]).ok_or_else(|| OpError("takes x and w".into()))
    }
    fn compose(&self, op: &OpView<'_>) -> Result<Option<Expansion>, OpError> {
        let (x, w, y) = (ExpansionOperand::Input(0), ExpansionOperand::Input(1), ExpansionOperand::Output(0));
        let [negated, product] = [0, 1].map(ExpansionOperand::Temporary);
        let part = |op_type, suffix, inputs: Vec<ExpansionOperand>, output| ExpandedOp {
            op_type,
            suffix,
            inputs,
            outputs: vec![output],
            attrs: Attrs::new(),
        };
        let temporary = |suffix| Temporary { suffix, ty: op.inputs[0].ty.clone() };
        Ok(Some(Expansion {
            temporaries: vec![temporary(".negated"), temporary(".product")],
            ops: vec![
                part("negate", ".negate", vec![x], negated),
                part("linear", ".linear", vec![negated, w], product),
                part("add", "", vec![product, x], y),
            ],
        }))
    }
}

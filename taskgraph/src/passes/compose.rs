//! Operators that only compose others.

use super::infer::infer;
use super::pass::{Context, Pass, Property};
use super::view::op_view;
use crate::error::BuildError;
use crate::op_graph::{Op, OpGraph, Role, Tensor};
use crate::split::Sharding;
use crate::task_type::{Expansion, ExpansionOperand};
use std::collections::HashSet;

/// Maximum nesting depth of compositions.
const MOST_NESTED: usize = 16;

/// Replaces operators by the operators that they compose ([`crate::TaskType::compose`]) until none is left, and checks the parts.
/// It runs before sharding and fusion, so that the parts are sharded and fused like any other operator.
#[derive(Clone, Copy, Debug)]
pub struct Compose;

impl Pass for Compose {
    fn name(&self) -> &'static str {
        "compose"
    }

    fn needs(&self) -> &'static [Property] {
        &[Property::Typed]
    }

    fn gives(&self) -> &'static [Property] {
        &[Property::Composed]
    }

    fn keeps(&self) -> &'static [Property] {
        &[Property::Typed]
    }

    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError> {
        for _ in 0..MOST_NESTED {
            if !compose(graph, context)? {
                return Ok(());
            }
            infer(graph, context.registry)?;
        }
        Err(BuildError::Graph(format!(
            "compositions are nested more than {MOST_NESTED} levels deep; an operator probably composes itself"
        )))
    }
}

fn compose(graph: &mut OpGraph, context: &Context<'_>) -> Result<bool, BuildError> {
    let mut names: HashSet<String> = graph.tensors.iter().map(|t| t.name.clone()).collect();
    let mut op_names: HashSet<String> = graph.ops.iter().map(|op| op.name.clone()).collect();
    let mut changed = false;
    let mut ops = Vec::with_capacity(graph.ops.len());
    for op in std::mem::take(&mut graph.ops) {
        let expansion = match context.registry.get(&op.op_type) {
            Some(t) => t.compose(&op_view(graph, &op)).map_err(|e| BuildError::op(&op.name, e.0))?,
            None => None,
        };
        let Some(expansion) = expansion else {
            ops.push(op);
            continue;
        };
        changed = true;
        op_names.remove(&op.name);
        replace(graph, &op, &expansion, (&mut names, &mut op_names), &mut ops)?;
    }
    graph.ops = ops;
    Ok(changed)
}

fn replace(
    graph: &mut OpGraph,
    op: &Op,
    expansion: &Expansion,
    (names, op_names): (&mut HashSet<String>, &mut HashSet<String>),
    ops: &mut Vec<Op>,
) -> Result<(), BuildError> {
    let first = graph.tensors.len() as u32;
    for temporary in &expansion.temporaries {
        graph.tensors.push(Tensor {
            name: fresh(names, format!("{}{}", op.name, temporary.suffix)),
            dtype: temporary.ty.dtype,
            dims: temporary.ty.dims.clone(),
            rows: temporary.ty.rows,
            role: Role::Activation,
            sharding: Sharding::Replicated,
            output: false,
        });
    }
    let temporaries = first..graph.tensors.len() as u32;
    for part in &expansion.ops {
        let pick = |operands: &[ExpansionOperand]| -> Option<Vec<u32>> {
            operands
                .iter()
                .map(|operand| match *operand {
                    ExpansionOperand::Input(i) => op.inputs.get(i).copied(),
                    ExpansionOperand::Output(i) => op.outputs.get(i).copied(),
                    ExpansionOperand::Temporary(i) => temporaries.clone().nth(i),
                })
                .collect()
        };
        let (Some(inputs), Some(outputs)) = (pick(&part.inputs), pick(&part.outputs)) else {
            return Err(BuildError::op(
                &op.name,
                format!("its part `{}` uses an operand that does not exist", part.suffix),
            ));
        };
        ops.push(Op {
            name: fresh(op_names, format!("{}{}", op.name, part.suffix)),
            op_type: part.op_type.into(),
            inputs,
            outputs,
            attrs: part.attrs.clone(),
        });
    }
    Ok(())
}

/// Finds a name that is not in use, and reserves it.
pub(super) fn fresh(taken: &mut HashSet<String>, wanted: String) -> String {
    let mut name = wanted.clone();
    let mut number = 1;
    while !taken.insert(name.clone()) {
        number += 1;
        name = format!("{wanted}.{number}");
    }
    name
}

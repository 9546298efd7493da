//! Fusion of operators, by the rules of the task types and collectives.

use super::infer::infer_op;
use super::pass::{Context, Pass, Property};
use super::view::op_view;
use crate::collective::Consumer;
use crate::error::BuildError;
use crate::op_graph::{Op, OpGraph, Role};
use crate::registry::Registry;
use crate::target::Target;
use crate::task_type::Fusion;
use std::collections::HashMap;

/// Fuses operators by [`crate::TaskType::fusions`] if [`crate::TaskType::fuses`] agrees, and lets collectives include other
/// operators ([`crate::Collective::absorb`]: a residual that is added to an allreduce), until nothing more fits. The operator of
/// an output, or of a tensor with several readers, is not absorbed, and neither is one whose weight the fused operator would read in
/// pairs of rows ([`crate::TaskType::paired_inputs`]), if that weight has several readers. The fused operator has the name and place
/// of the absorbing one.
#[derive(Clone, Copy, Debug)]
pub struct Fuse;

impl Pass for Fuse {
    fn name(&self) -> &'static str {
        "fuse"
    }

    fn needs(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed, Property::Sharded]
    }

    fn gives(&self) -> &'static [Property] {
        &[Property::Fused]
    }

    fn keeps(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed, Property::Sharded, Property::Live]
    }

    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError> {
        fuse(graph, context.registry, context.options.world, &context.options.target)
    }
}

fn fuse(graph: &mut OpGraph, registry: &Registry, world: u32, target: &Target) -> Result<(), BuildError> {
    let mut rules: HashMap<&'static str, Vec<Fusion>> = HashMap::new();
    for fusion in registry.iter().flat_map(|t| t.fusions()) {
        if registry.get(fusion.fused).is_some() {
            rules.entry(fusion.consumer).or_default().push(*fusion);
        }
    }
    let mut producer: Vec<Option<usize>> = vec![None; graph.tensors.len()];
    let mut uses = vec![0u32; graph.tensors.len()];
    for (index, op) in graph.ops.iter().enumerate() {
        op.outputs.iter().for_each(|&t| producer[t as usize] = Some(index));
        op.inputs.iter().for_each(|&t| uses[t as usize] += 1);
    }
    let mut alive = vec![true; graph.ops.len()];
    let absorbable =
        |graph: &OpGraph, alive: &[bool], tensor: u32, op_type: Option<&str>, at: usize| -> Option<usize> {
            let t = &graph.tensors[tensor as usize];
            let index = producer[tensor as usize].filter(|&p| alive[p])?;
            let op = &graph.ops[index];
            let moves_past_a_write = op.inputs.iter().any(|&i| {
                matches!(graph.tensors[i as usize].role, Role::Persistent { .. })
                    && producer[i as usize].is_some_and(|w| index < w && w < at)
            });
            (op_type.is_none_or(|wanted| op.op_type == wanted)
                && op.outputs.as_slice() == [tensor]
                && uses[tensor as usize] == 1
                && t.role == Role::Activation
                && !t.output
                && !moves_past_a_write)
                .then_some(index)
        };
    for index in 0..graph.ops.len() {
        // A fused operator may be absorbed in turn. Its producers come before it, so one sweep finds everything.
        while let Some((absorbed, fused)) = find(graph, registry, &rules, &alive, index, &absorbable) {
            let view = op_view(graph, &fused);
            let fits = registry.get(&fused.op_type).is_none_or(|t| {
                // A weight whose rows lie in pairs is of no use to another reader.
                let sole = |&i: &usize| fused.inputs.get(i).is_none_or(|&w| uses[w as usize] == 1);
                t.fuses(&view, world, target) && t.paired_inputs(target).iter().all(sole)
            });
            if !fits {
                break;
            }
            // It need not accept all operands of the two, such as a sum's third summand. Then they stay apart.
            let Some(Ok(inferred)) = infer_op(registry, &fused.op_type, &view) else { break };
            let same = inferred.len() == fused.outputs.len()
                && inferred.iter().zip(&fused.outputs).all(|(ty, &o)| {
                    let tensor = &graph.tensors[o as usize];
                    tensor.dtype == ty.dtype && tensor.dims == ty.dims
                });
            if !same {
                return Err(BuildError::op(
                    &fused.name,
                    format!("fused into `{}`, it would write other types than before", fused.op_type),
                ));
            }
            alive[absorbed] = false;
            graph.ops[index] = fused;
        }
    }
    let mut keep = alive.iter();
    graph.ops.retain(|_| *keep.next().unwrap_or(&true));
    Ok(())
}

type Absorbable<'a> = dyn Fn(&OpGraph, &[bool], u32, Option<&str>, usize) -> Option<usize> + 'a;

fn find(
    graph: &OpGraph,
    registry: &Registry,
    rules: &HashMap<&'static str, Vec<Fusion>>,
    alive: &[bool],
    index: usize,
    absorbable: &Absorbable<'_>,
) -> Option<(usize, Op)> {
    let op = &graph.ops[index];
    for rule in rules.get(op.op_type.as_str()).into_iter().flatten() {
        let Some(&tensor) = op.inputs.get(rule.consumer_input) else { continue };
        let Some(absorbed) = absorbable(graph, alive, tensor, Some(rule.producer), index) else { continue };
        let first = &graph.ops[absorbed];
        let mut inputs = first.inputs.clone();
        inputs
            .extend(op.inputs.iter().enumerate().filter(|(i, _)| *i != rule.consumer_input).map(|(_, &t)| t));
        let mut attrs = first.attrs.clone();
        attrs.extend(op.attrs.iter().map(|(k, v)| (k.clone(), v.clone())));
        let fused = Op {
            name: op.name.clone(),
            op_type: rule.fused.into(),
            inputs,
            outputs: op.outputs.clone(),
            attrs,
        };
        return Some((absorbed, fused));
    }
    let is_sum = registry.get(&op.op_type).is_some_and(|t| t.is_sum());
    for (input, &tensor) in op.inputs.iter().enumerate() {
        let Some(absorbed) = absorbable(graph, alive, tensor, None, index) else { continue };
        let first = &graph.ops[absorbed];
        let Some(collective) = registry.collective(&first.op_type) else { continue };
        let view = op_view(graph, op);
        let consumer = Consumer { view: &view, input, is_sum };
        let Some(attrs) = collective.absorb(&op_view(graph, first), &consumer) else { continue };
        let others = op.inputs.iter().enumerate().filter(|(i, _)| *i != input).map(|(_, &t)| t);
        let fused = Op {
            name: first.name.clone(),
            op_type: first.op_type.clone(),
            inputs: first.inputs.iter().copied().chain(others).collect(),
            outputs: op.outputs.clone(),
            attrs,
        };
        return Some((absorbed, fused));
    }
    None
}

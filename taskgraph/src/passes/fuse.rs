//! Fusion of operators, by the rules of the task types.

use super::collective_ops::{ADD, ALLREDUCE, infer_collective};
use super::view::op_view;
use crate::builder::BuildError;
use crate::dtype::DType;
use crate::op_graph::{Op, OpGraph, Role};
use crate::split::Sharding;
use crate::target::Target;
use crate::task_type::{Fusion, Registry};
use std::collections::HashMap;

/// Fuses operators by [`crate::TaskType::fusions`] where [`crate::TaskType::fuses`], and an `add` behind an allreduce into that allreduce as its
/// residual, until nothing more fits. A tensor that is wanted or has several users keeps its operator. The fused
/// operator has the name and place of the absorbing one.
///
/// # Errors
/// A rule whose result does not accept the operands, or gives another type than before.
pub fn fuse(graph: &mut OpGraph, registry: &Registry, world: u32, target: &Target) -> Result<(), BuildError> {
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
        |graph: &OpGraph, alive: &[bool], tensor: u32, op_type: &str, at: usize| -> Option<usize> {
            let t = &graph.tensors[tensor as usize];
            let index = producer[tensor as usize].filter(|&p| alive[p])?;
            let op = &graph.ops[index];
            let moves_past_a_write = op.inputs.iter().any(|&i| {
                matches!(graph.tensors[i as usize].role, Role::Persistent { .. })
                    && producer[i as usize].is_some_and(|w| index < w && w < at)
            });
            (op.op_type == op_type
                && op.outputs.as_slice() == [tensor]
                && uses[tensor as usize] == 1
                && t.role == Role::Activation
                && !t.output
                && !moves_past_a_write)
                .then_some(index)
        };
    for index in 0..graph.ops.len() {
        // A fused operator may be absorbed in turn; its producers come before it, so one sweep sees all.
        while let Some((absorbed, fused)) = find(graph, &rules, &alive, index, &absorbable) {
            let view = op_view(graph, &fused);
            if registry.get(&fused.op_type).is_some_and(|t| !t.fuses(&view, world, target)) {
                break;
            }
            let inferred = match (infer_collective(&fused.op_type, &view), registry.get(&fused.op_type)) {
                (Some(result), _) => result,
                (None, Some(task_type)) => task_type.infer(&view),
                (None, None) => break,
            }
            .map_err(|e| BuildError::op(&fused.name, format!("fused into `{}`: {}", fused.op_type, e.0)))?;
            let same = inferred.len() == fused.outputs.len()
                && inferred.iter().zip(&fused.outputs).all(|(ty, &o)| {
                    let tensor = &graph.tensors[o as usize];
                    tensor.dtype == ty.dtype && tensor.dims == ty.dims
                });
            if !same {
                return Err(BuildError::op(
                    &fused.name,
                    format!("fused into `{}` it would write other types than before", fused.op_type),
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

type Absorbable<'a> = dyn Fn(&OpGraph, &[bool], u32, &str, usize) -> Option<usize> + 'a;

fn find(
    graph: &OpGraph,
    rules: &HashMap<&'static str, Vec<Fusion>>,
    alive: &[bool],
    index: usize,
    absorbable: &Absorbable<'_>,
) -> Option<(usize, Op)> {
    let op = &graph.ops[index];
    for rule in rules.get(op.op_type.as_str()).into_iter().flatten() {
        let Some(&tensor) = op.inputs.get(rule.consumer_input) else { continue };
        let Some(absorbed) = absorbable(graph, alive, tensor, rule.producer, index) else { continue };
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
    if op.op_type == ADD && op.inputs.len() == 2 && op.outputs.len() == 1 {
        // a + b = b + a bit for bit, so the allreduce may stand on either side.
        for branch in 0..2 {
            let (tensor, residual) = (op.inputs[branch], op.inputs[1 - branch]);
            let Some(absorbed) = absorbable(graph, alive, tensor, ALLREDUCE, index) else { continue };
            let (sum, other) = (&graph.tensors[tensor as usize], &graph.tensors[residual as usize]);
            let output = &graph.tensors[op.outputs[0] as usize];
            if graph.ops[absorbed].inputs.len() != 1
                || sum.dtype != DType::F32
                || other.dtype != DType::F32
                || other.sharding != Sharding::Replicated
                || other.dims != sum.dims
                || !output.dtype.is_float()
            {
                continue;
            }
            let mut attrs = graph.ops[absorbed].attrs.clone();
            attrs.insert("dtype".into(), output.dtype.name().into());
            let fused = Op {
                name: graph.ops[absorbed].name.clone(),
                op_type: ALLREDUCE.into(),
                inputs: vec![graph.ops[absorbed].inputs[0], residual],
                outputs: op.outputs.clone(),
                attrs,
            };
            return Some((absorbed, fused));
        }
    }
    None
}

//! Sharding: what of each tensor lives where, and the collectives that follow from it.

use super::collective_ops::{ADD, ALLGATHER, ALLREDUCE};
use super::view::op_view;
use crate::builder::BuildError;
use crate::op_graph::{Attrs, Op, OpGraph, Role, Tensor};
use crate::split::{Sharding, Split};
use crate::task_type::{Need, Registry};
use std::collections::{HashMap, HashSet};

/// Fills in the sharding of activations and inserts an `allreduce` (partial to replicated) or `allgather` (split
/// to replicated) where an operator needs all of a tensor; once for each tensor, shared by all its users. A
/// wanted output is made whole too, under its own name. With one rank collectives disappear.
///
/// # Errors
/// A contract's own, with the operator's name; a number of ranks that does not divide the heads.
pub fn shard(graph: &mut OpGraph, registry: &Registry, world: u32) -> Result<(), BuildError> {
    check_splits(graph, world)?;
    if world == 1 {
        // A split over one rank, and a sum over one rank, are the whole. Weights keep theirs: a contract may
        // derive the type of an output from it.
        for tensor in graph.tensors.iter_mut().filter(|t| !matches!(t.role, Role::Weight { .. })) {
            tensor.sharding = Sharding::Replicated;
        }
        remove_collectives(graph, registry);
    }
    let mut pass = Pass {
        world,
        names: graph.tensors.iter().map(|t| t.name.clone()).collect(),
        op_names: graph.ops.iter().map(|o| o.name.clone()).collect(),
        whole: HashMap::new(),
        ops: Vec::with_capacity(graph.ops.len() * 2),
    };
    for mut op in std::mem::take(&mut graph.ops) {
        match op.op_type.as_str() {
            ALLREDUCE | ALLGATHER => pass.explicit(graph, &mut op)?,
            _ => pass.operator(graph, registry, &mut op)?,
        }
        pass.ops.push(op);
    }
    pass.wanted_outputs(graph)?;
    graph.ops = pass.ops;
    Ok(())
}

struct Pass {
    world: u32,
    names: HashSet<String>,
    op_names: HashSet<String>,
    /// The replicated tensor of each tensor that has been made whole.
    whole: HashMap<u32, u32>,
    ops: Vec<Op>,
}

impl Pass {
    fn operator(&mut self, graph: &mut OpGraph, registry: &Registry, op: &mut Op) -> Result<(), BuildError> {
        let Some(task_type) = registry.get(&op.op_type) else {
            return Err(BuildError::op(&op.name, "has an unknown type; run `infer` first"));
        };
        loop {
            let rule = task_type
                .shard(&op_view(graph, op), self.world)
                .map_err(|e| BuildError::op(&op.name, e.0))?;
            if rule.inputs.len() != op.inputs.len() || rule.outputs.len() != op.outputs.len() {
                return Err(BuildError::op(
                    &op.name,
                    format!(
                        "the contract of `{}` answers for {} inputs and {} outputs, the operator has {} and {}",
                        op.op_type,
                        rule.inputs.len(),
                        rule.outputs.len(),
                        op.inputs.len(),
                        op.outputs.len()
                    ),
                ));
            }
            let mut changed = false;
            for (input, need) in op.inputs.iter_mut().zip(&rule.inputs) {
                let is_whole = graph.tensors[*input as usize].sharding == Sharding::Replicated;
                if *need == Need::Replicated && self.world > 1 && !is_whole {
                    *input = self.replicate(graph, *input)?;
                    changed = true;
                }
            }
            if changed {
                continue;
            }
            for (&output, sharding) in op.outputs.iter().zip(rule.outputs) {
                let tensor = &mut graph.tensors[output as usize];
                if tensor.role != Role::Activation && self.world > 1 && tensor.sharding != sharding {
                    return Err(BuildError::op(
                        &op.name,
                        format!(
                            "writes `{}`, which is persistent and {}, but on {} ranks its output is {}; write an \
                             activation instead",
                            tensor.name,
                            in_words(&tensor.sharding),
                            self.world,
                            in_words(&sharding)
                        ),
                    ));
                }
                if tensor.role == Role::Activation {
                    tensor.sharding = match sharding {
                        Sharding::Partial if self.world == 1 => Sharding::Replicated,
                        other => other,
                    };
                    check_split(tensor, self.world)?;
                }
            }
            return Ok(());
        }
    }

    fn explicit(&mut self, graph: &mut OpGraph, op: &mut Op) -> Result<(), BuildError> {
        let output = &graph.tensors[op.outputs[0] as usize];
        if output.role != Role::Activation
            && (op.op_type == ALLGATHER || output.sharding != Sharding::Replicated)
        {
            return Err(BuildError::op(
                &op.name,
                format!(
                    "writes `{}`, which is persistent; `{}` {}",
                    output.name,
                    op.op_type,
                    if op.op_type == ALLGATHER {
                        "needs an output in symmetric memory: write an activation instead"
                    } else {
                        "gives every rank the whole: leave the tensor replicated"
                    }
                ),
            ));
        }
        let input = &graph.tensors[op.inputs[0] as usize];
        let fits = match op.op_type.as_str() {
            ALLREDUCE => self.world == 1 || input.sharding == Sharding::Partial,
            _ => self.world == 1 || matches!(input.sharding, Sharding::Split { .. }),
        };
        if !fits {
            let wanted = if op.op_type == ALLREDUCE { "a partial" } else { "a split" };
            return Err(BuildError::op(
                &op.name,
                format!(
                    "`{}` takes {wanted} tensor, `{}` is not; leave the operator out",
                    op.op_type, input.name
                ),
            ));
        }
        if op.inputs.len() == 2 && self.world > 1 {
            if graph.tensors[op.inputs[1] as usize].sharding != Sharding::Replicated {
                op.inputs[1] = self.replicate(graph, op.inputs[1])?;
            }
        } else if op.inputs.len() == 1 && self.world > 1 {
            let dtype_differs =
                graph.tensors[op.outputs[0] as usize].dtype != graph.tensors[op.inputs[0] as usize].dtype;
            if !dtype_differs {
                self.whole.entry(op.inputs[0]).or_insert(op.outputs[0]);
            }
        }
        graph.tensors[op.outputs[0] as usize].sharding = Sharding::Replicated;
        Ok(())
    }

    fn replicate(&mut self, graph: &mut OpGraph, tensor: u32) -> Result<u32, BuildError> {
        if let Some(&whole) = self.whole.get(&tensor) {
            return Ok(whole);
        }
        let source = &graph.tensors[tensor as usize];
        let op_type = match source.sharding {
            Sharding::Partial => ALLREDUCE,
            _ => ALLGATHER,
        };
        if op_type == ALLREDUCE && (source.dims.len() != 2 || source.dtype != crate::DType::F32) {
            return Err(BuildError::tensor(
                &source.name,
                format!(
                    "must be summed over the ranks, which needs f32 [rows, columns]; it is {} {:?}",
                    source.dtype, source.dims
                ),
            ));
        }
        let name = fresh(&mut self.names, format!("{}.{op_type}", source.name));
        let op_name = fresh(&mut self.op_names, name.clone());
        let whole = Tensor {
            name,
            role: Role::Activation,
            sharding: Sharding::Replicated,
            output: false,
            ..source.clone()
        };
        let id = graph.add_tensor(whole).0;
        self.ops.push(Op {
            name: op_name,
            op_type: op_type.into(),
            inputs: vec![tensor],
            outputs: vec![id],
            attrs: Attrs::new(),
        });
        self.whole.insert(tensor, id);
        Ok(id)
    }

    /// A wanted tensor that no rank has all of is made whole; the whole one takes its name.
    fn wanted_outputs(&mut self, graph: &mut OpGraph) -> Result<(), BuildError> {
        for id in 0..graph.tensors.len() {
            let tensor = &graph.tensors[id];
            if self.world == 1
                || !tensor.output
                || tensor.role != Role::Activation
                || tensor.sharding == Sharding::Replicated
            {
                continue;
            }
            let whole = self.replicate(graph, id as u32)? as usize;
            graph.tensors[id].output = false;
            if graph.tensors[whole].output {
                continue;
            }
            graph.tensors[whole].output = true;
            let local = fresh(&mut self.names, format!("{}.local", graph.tensors[id].name));
            graph.tensors[whole].name = std::mem::replace(&mut graph.tensors[id].name, local);
        }
        Ok(())
    }
}

fn in_words(sharding: &Sharding) -> String {
    match sharding {
        Sharding::Replicated => "whole on every rank".into(),
        Sharding::Partial => "a partial sum".into(),
        Sharding::Split { dim, .. } => format!("split in dimension {dim}"),
    }
}

fn fresh(taken: &mut HashSet<String>, wanted: String) -> String {
    let mut name = wanted.clone();
    let mut number = 1;
    while !taken.insert(name.clone()) {
        number += 1;
        name = format!("{wanted}.{number}");
    }
    name
}

fn check_splits(graph: &OpGraph, world: u32) -> Result<(), BuildError> {
    graph.tensors.iter().try_for_each(|tensor| check_split(tensor, world))
}

fn check_split(tensor: &Tensor, world: u32) -> Result<(), BuildError> {
    let Sharding::Split { parts, .. } = &tensor.sharding else { return Ok(()) };
    for part in parts {
        if let Split::Queries { heads, .. } | Split::KeyValues { heads, .. } = part.split
            && heads % u64::from(world) != 0
        {
            let possible: Vec<String> =
                (1..=heads.min(1024)).filter(|n| heads % n == 0).map(|n| n.to_string()).collect();
            return Err(BuildError::tensor(
                &tensor.name,
                format!(
                    "{world} ranks do not divide {heads} query heads; possible are {}",
                    possible.join(", ")
                ),
            ));
        }
    }
    Ok(())
}

/// With one rank an allreduce or allgather is its input: users read that instead, where names allow it.
fn remove_collectives(graph: &mut OpGraph, registry: &Registry) {
    let mut replaced: HashMap<u32, u32> = HashMap::new();
    let mut kept = Vec::with_capacity(graph.ops.len());
    for mut op in std::mem::take(&mut graph.ops) {
        for input in &mut op.inputs {
            if let Some(&other) = replaced.get(input) {
                *input = other;
            }
        }
        if op.op_type == ALLREDUCE && op.inputs.len() == 2 && registry.get(ADD).is_some() {
            op.op_type = ADD.into();
        }
        let collective = op.op_type == ALLREDUCE || op.op_type == ALLGATHER;
        if collective && op.inputs.len() == 1 {
            let (input, output) = (op.inputs[0] as usize, op.outputs[0] as usize);
            let same_type = graph.tensors[input].dtype == graph.tensors[output].dtype
                && graph.tensors[output].role == Role::Activation;
            let wanted = graph.tensors[output].output;
            let producible = graph.tensors[input].role == Role::Activation && !graph.tensors[input].output;
            if same_type && (!wanted || producible) {
                if wanted {
                    let (name, other) =
                        (graph.tensors[output].name.clone(), graph.tensors[input].name.clone());
                    graph.tensors[input].name = name;
                    graph.tensors[output].name = other;
                    graph.tensors[input].output = true;
                    graph.tensors[output].output = false;
                }
                replaced.insert(output as u32, input as u32);
                continue;
            }
        }
        kept.push(op);
    }
    graph.ops = kept;
}

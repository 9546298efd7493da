//! Sharding: which part of each tensor is on which rank, and the collectives that follow from it.

use super::compose::fresh;
use super::pass::{Context, Pass, Property};
use super::view::op_view;
use crate::collective::Alone;
use crate::error::BuildError;
use crate::json::shard_to_value;
use crate::op_graph::{Attrs, Op, OpGraph, Role, Tensor};
use crate::registry::Registry;
use crate::split::{Sharding, Split};
use crate::task_type::{Need, OpView, ShardRule};
use crate::words::counted;
use std::collections::{HashMap, HashSet};

/// Sets the sharding of activations, and inserts a collective where an operator needs a tensor with another sharding: `allreduce`
/// (partial to replicated), `allgather` (split to replicated), `slice` (replicated to split), `all_to_all` (split to another
/// split), `reduce_scatter` (partial to split), or one that a user registered. There is one collective per tensor and sharding,
/// shared by all readers. An output is made complete too, under its own name. With one rank, collectives disappear.
#[derive(Clone, Copy, Debug)]
pub struct Shard;

impl Pass for Shard {
    fn name(&self) -> &'static str {
        "shard"
    }

    fn needs(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed]
    }

    fn gives(&self) -> &'static [Property] {
        &[Property::Sharded]
    }

    fn keeps(&self) -> &'static [Property] {
        &[Property::Typed, Property::Composed, Property::Live]
    }

    fn run(&self, graph: &mut OpGraph, context: &Context<'_>) -> Result<(), BuildError> {
        shard(graph, context.registry, context.options.world)
    }
}

fn shard(graph: &mut OpGraph, registry: &Registry, world: u32) -> Result<(), BuildError> {
    check_splits(graph, world)?;
    if world == 1 {
        // A split over one rank, and a sum over one rank, are the whole tensor. Weights keep their split, because a contract may
        // derive the type of an output from it.
        for tensor in graph.tensors.iter_mut().filter(|t| !matches!(t.role, Role::Weight { .. })) {
            tensor.sharding = Sharding::Replicated;
        }
        remove_collectives(graph, registry);
    }
    let mut pass = Sharder {
        world,
        registry,
        names: graph.tensors.iter().map(|t| t.name.clone()).collect(),
        op_names: graph.ops.iter().map(|o| o.name.clone()).collect(),
        resharded: HashMap::new(),
        ops: Vec::with_capacity(graph.ops.len() * 2),
    };
    for op in std::mem::take(&mut graph.ops) {
        pass.operator(graph, op)?;
    }
    pass.wanted_outputs(graph)?;
    graph.ops = pass.ops;
    Ok(())
}

struct Sharder<'a> {
    world: u32,
    registry: &'a Registry,
    names: HashSet<String>,
    op_names: HashSet<String>,
    /// The tensor with another sharding that was made from a tensor.
    resharded: HashMap<(u32, Sharding), u32>,
    ops: Vec<Op>,
}

impl Sharder<'_> {
    fn rule(&self, op: &Op, view: &OpView<'_>) -> Result<ShardRule, BuildError> {
        let rule = match (self.registry.collective(&op.op_type), self.registry.get(&op.op_type)) {
            (Some(collective), _) => collective.shard(view, self.world),
            (None, Some(task_type)) => task_type.shard(view, self.world),
            (None, None) => return Err(BuildError::op(&op.name, "has an unknown type; run `infer` first")),
        };
        let rule = rule.map_err(|e| BuildError::op(&op.name, e.0))?;
        if rule.inputs.len() != op.inputs.len() || rule.outputs.len() != op.outputs.len() {
            return Err(BuildError::op(
                &op.name,
                format!(
                    "the contract of `{}` returns shardings for {} inputs and {} outputs, but the operator has {} and {}",
                    op.op_type,
                    rule.inputs.len(),
                    rule.outputs.len(),
                    op.inputs.len(),
                    op.outputs.len()
                ),
            ));
        }
        Ok(rule)
    }

    fn operator(&mut self, graph: &mut OpGraph, mut op: Op) -> Result<(), BuildError> {
        let constant = self.registry.get(&op.op_type).map_or(&[][..], |t| t.constant_inputs());
        let rule = loop {
            let rule = self.rule(&op, &op_view(graph, &op))?;
            let mut changed = false;
            for (place, (input, need)) in op.inputs.iter_mut().zip(&rule.inputs).enumerate() {
                let wanted = match need {
                    Need::AsIs => continue,
                    Need::Replicated => &Sharding::Replicated,
                    Need::Split(sharding) => sharding,
                };
                let tensor = &graph.tensors[*input as usize];
                if self.world > 1 && tensor.sharding != *wanted {
                    // A collective's result is written by tasks, so it is not constant.
                    if constant.contains(&place) && matches!(tensor.role, Role::Constant | Role::Input) {
                        return Err(BuildError::tensor(&tensor.name, other_shard(wanted)));
                    }
                    *input = self.reshard(graph, *input, wanted)?;
                    changed = true;
                }
            }
            if !changed {
                break rule;
            }
        };
        let written: Vec<u32> = op.outputs.iter().copied().filter(|&t| is_persistent(graph, t)).collect();
        let mut into: Vec<(u32, u32)> = Vec::new();
        for (place, sharding) in rule.outputs.into_iter().enumerate() {
            let output = op.outputs[place];
            let sharding = if self.world == 1 { Sharding::Replicated } else { sharding };
            let tensor = &mut graph.tensors[output as usize];
            if tensor.role == Role::Activation {
                tensor.sharding = sharding;
                check_split(tensor, self.world)?;
            } else if self.world > 1 && tensor.sharding != sharding {
                // The value reaches it through an activation. This is not possible for a tensor that the operator also reads, or
                // that it knows by pages.
                let plain = tensor.role == (Role::Persistent { region_dims: None });
                if !plain || op.inputs.contains(&output) || self.registry.collective(&op.op_type).is_some() {
                    let (declared, written) = both_in_words(&tensor.sharding, &sharding);
                    return Err(BuildError::op(
                        &op.name,
                        format!(
                            "writes `{}`, which is persistent and {declared}, but on {} ranks its output is {written}; write \
                             an activation instead",
                            tensor.name, self.world
                        ),
                    ));
                }
                let name = fresh(&mut self.names, format!("{}.local", tensor.name));
                let local =
                    Tensor { name, role: Role::Activation, sharding, output: false, ..tensor.clone() };
                check_split(&local, self.world)?;
                let local = graph.add_tensor(local).0;
                op.outputs[place] = local;
                into.push((local, output));
            }
        }
        let reusable = self.registry.collective(&op.op_type).is_some() && op.inputs.len() == 1;
        if reusable && self.world > 1 {
            let (input, output) = (op.inputs[0], op.outputs[0]);
            let (from, to) = (&graph.tensors[input as usize], &graph.tensors[output as usize]);
            if from.dtype == to.dtype && to.role == Role::Activation {
                self.resharded.entry((input, to.sharding.clone())).or_insert(output);
            }
        }
        self.ops.push(op);
        // What was made from the old value of a persistent tensor is not its new value.
        if !written.is_empty() {
            self.resharded.retain(|(tensor, _), _| !written.contains(tensor));
        }
        into.into_iter().try_for_each(|(from, to)| self.reshard_into(graph, from, to))
    }

    /// Inserts the collective that writes `tensor` with the sharding of `to`, another tensor.
    fn reshard_into(&mut self, graph: &mut OpGraph, tensor: u32, to: u32) -> Result<(), BuildError> {
        let (op_type, attrs) = self.collective(graph, tensor, &graph.tensors[to as usize].sharding)?;
        let name = fresh(&mut self.op_names, format!("{}.{op_type}", graph.tensors[to as usize].name));
        let op_type = op_type.to_string();
        self.ops.push(Op { name, op_type, inputs: vec![tensor], outputs: vec![to], attrs });
        Ok(())
    }

    /// The first collective that can change the sharding of `tensor` to `to`.
    fn collective(
        &self,
        graph: &OpGraph,
        tensor: u32,
        to: &Sharding,
    ) -> Result<(&'static str, Attrs), BuildError> {
        let source = &graph.tensors[tensor as usize];
        let read = Op {
            name: String::new(),
            op_type: String::new(),
            inputs: vec![tensor],
            outputs: Vec::new(),
            attrs: Default::default(),
        };
        let view = op_view(graph, &read);
        let found =
            self.registry.collectives().find_map(|c| Some((c.name(), c.reshards(&view.inputs[0], to)?)));
        found.ok_or_else(|| BuildError::tensor(&source.name, no_way(source, to)))
    }

    /// `tensor` with another sharding, made by the first collective that can do it.
    fn reshard(&mut self, graph: &mut OpGraph, tensor: u32, to: &Sharding) -> Result<u32, BuildError> {
        if let Some(&known) = self.resharded.get(&(tensor, to.clone())) {
            return Ok(known);
        }
        let given = &graph.tensors[tensor as usize];
        if matches!(given.role, Role::Weight { .. })
            && given.dims.len() == 1
            && given.sharding != Sharding::Partial
        {
            // A second weight with the same values, which each rank loads in the part that it needs. So it stays constant, and kernels
            // may read it before their events. Vectors are small.
            let name = fresh(&mut self.names, format!("{}.resharded", given.name));
            let second = Tensor { name, sharding: to.clone(), output: false, ..given.clone() };
            check_split(&second, self.world)?;
            let id = graph.add_tensor(second).0;
            self.resharded.insert((tensor, to.clone()), id);
            return Ok(id);
        }
        let (op_type, attrs) = self.collective(graph, tensor, to)?;
        let source = &graph.tensors[tensor as usize];
        let name = fresh(&mut self.names, format!("{}.{op_type}", source.name));
        let op_name = fresh(&mut self.op_names, name.clone());
        let changed =
            Tensor { name, role: Role::Activation, sharding: to.clone(), output: false, ..source.clone() };
        check_split(&changed, self.world)?;
        let id = graph.add_tensor(changed).0;
        self.ops.push(Op {
            name: op_name,
            op_type: op_type.into(),
            inputs: vec![tensor],
            outputs: vec![id],
            attrs,
        });
        self.resharded.insert((tensor, to.clone()), id);
        Ok(id)
    }

    /// Completes outputs that no rank holds as a whole. The complete tensor takes over the name.
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
            let mut whole = self.reshard(graph, id as u32, &Sharding::Replicated)? as usize;
            if graph.tensors[whole].output {
                // The user made it complete and wants both, so this one gets a collective of its own.
                self.resharded.remove(&(id as u32, Sharding::Replicated));
                whole = self.reshard(graph, id as u32, &Sharding::Replicated)? as usize;
            }
            graph.tensors[id].output = false;
            graph.tensors[whole].output = true;
            let local = fresh(&mut self.names, format!("{}.local", graph.tensors[id].name));
            graph.tensors[whole].name = std::mem::replace(&mut graph.tensors[id].name, local);
        }
        Ok(())
    }
}

fn is_persistent(graph: &OpGraph, tensor: u32) -> bool {
    matches!(graph.tensors[tensor as usize].role, Role::Persistent { .. })
}

fn in_words(sharding: &Sharding) -> String {
    match sharding {
        Sharding::Replicated => "whole on every rank".into(),
        Sharding::Partial => "a partial sum".into(),
        Sharding::Split { dim, .. } => format!("split in dimension {dim}"),
    }
}

/// The same for two shardings that differ. Two splits of one dimension are shown as in a tensor's `shard`.
fn both_in_words(a: &Sharding, b: &Sharding) -> (String, String) {
    let exact = |sharding| match shard_to_value(sharding) {
        Some(shard) => format!("split as {shard}"),
        None => in_words(sharding),
    };
    if in_words(a) == in_words(b) { (exact(a), exact(b)) } else { (in_words(a), in_words(b)) }
}

/// The message for a given tensor whose `shard` must be `to`.
fn other_shard(to: &Sharding) -> String {
    let shard = shard_to_value(to).unwrap_or_else(|| "replicated".into());
    format!(
        "is needed {} on several ranks, but its `shard` says otherwise; change that to {shard}",
        in_words(to)
    )
}

fn no_way(tensor: &Tensor, to: &Sharding) -> String {
    match (&tensor.sharding, &tensor.role) {
        (Sharding::Partial, _) => format!(
            "must be summed over the ranks, which needs f32, bf16 or f16 [rows, columns]; it is {} {:?}",
            tensor.dtype, tensor.dims
        ),
        (_, Role::Weight { .. }) => other_shard(to),
        _ => {
            let (found, wanted) = both_in_words(&tensor.sharding, to);
            format!("is needed {wanted}, but is {found}, and no collective can convert it")
        }
    }
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
                    "{world} ranks do not divide {}; possible numbers of ranks: {}",
                    counted(heads, "query head"),
                    possible.join(", ")
                ),
            ));
        }
    }
    Ok(())
}

/// With one rank, most collectives equal their input. Readers use the input instead, if names allow it.
fn remove_collectives(graph: &mut OpGraph, registry: &Registry) {
    let mut replaced: HashMap<u32, u32> = HashMap::new();
    let mut kept = Vec::with_capacity(graph.ops.len());
    for mut op in std::mem::take(&mut graph.ops) {
        for input in &mut op.inputs {
            if let Some(&other) = replaced.get(input) {
                *input = other;
            }
        }
        let alone = registry.collective(&op.op_type).map(|c| c.alone(&op_view(graph, &op)));
        if alone == Some(Alone::Sum)
            && let Some(sum) = registry.iter().find(|t| t.is_sum())
        {
            op.op_type = sum.name().into();
            op.attrs.clear();
        }
        if alone == Some(Alone::Identity) {
            let (input, output) = (op.inputs[0] as usize, op.outputs[0] as usize);
            let wanted = graph.tensors[output].output;
            let producible = graph.tensors[input].role == Role::Activation && !graph.tensors[input].output;
            // A later operator may write a persistent input. Then its readers must not see what was read before.
            let keeps = !is_persistent(graph, input as u32);
            if graph.tensors[output].role == Role::Activation && keeps && (!wanted || producible) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::op_graph::Rows;
    use crate::split::{Part, Split};

    #[test]
    fn shardings_are_shown_in_words() {
        let split =
            |dim, unit| Sharding::Split { dim, parts: vec![Part { len: 4, split: Split::Even { unit } }] };
        let tensor = Tensor {
            name: "x".into(),
            dtype: DType::U8,
            dims: vec![4, 4],
            rows: Rows::Fixed,
            role: Role::Activation,
            sharding: split(1, 1),
            output: false,
        };
        for (to, words) in [
            (
                Sharding::Replicated,
                "is needed whole on every rank, but is split in dimension 1, and no collective",
            ),
            (split(0, 1), "is needed split in dimension 0, but is split in dimension 1, and no collective"),
            (
                split(1, 2),
                r#"is needed split as {"dim":1,"kind":"even","unit":2}, but is split as {"dim":1,"#,
            ),
        ] {
            let message = no_way(&tensor, &to);
            assert!(message.starts_with(words), "{message}");
        }
    }
}

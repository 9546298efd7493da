//! Cuts operators into tasks. Operators that look the same, such as the layers of a model, are cut once per rank.

use super::layouts::Layouts;
use super::local::local_op;
use super::own_rows::own_step;
use super::turning::turn;
use super::types::{Dims, LocalClass, NONE, Part, Step};
use crate::blocks::Blocks;
use crate::error::BuildError;
use crate::op_graph::{Op, OpGraph, Role};
use crate::passes::op_view;
use crate::region::Region;
use crate::registry::Registry;
use crate::split::Sharding;
use crate::target::Target;
use crate::task_type::{ExpansionOperand, LocalOp, OpView, OperandView, Partition, TaskType, TensorType};
use rustc_hash::FxHashMap;
use std::fmt::Write;
use std::sync::Arc;

/// Cuts operators, and remembers the results.
pub(crate) struct Classes<'a> {
    graph: &'a OpGraph,
    registry: &'a Registry,
    target: &'a Target,
    world: u32,
    layouts: &'a Layouts,
    turned_rows: Option<u64>,
    by_key: FxHashMap<String, Arc<Vec<LocalClass>>>,
}

impl<'a> Classes<'a> {
    pub fn new(
        graph: &'a OpGraph,
        registry: &'a Registry,
        target: &'a Target,
        world: u32,
        layouts: &'a Layouts,
    ) -> Self {
        Classes { graph, registry, target, world, layouts, turned_rows: None, by_key: FxHashMap::default() }
    }

    /// From now on, the tasks of blocks of rows are ordered such that ranks are alike when these blocks are turned. `rows` is the number
    /// of rows of the sums that stay with their owners.
    pub fn turn_rows(&mut self, rows: u64) {
        self.turned_rows = Some(rows);
        self.by_key.clear();
    }

    /// True if the operator is a collective, which has no class.
    pub fn is_collective(&self, op: &Op) -> bool {
        self.registry.collective(&op.op_type).is_some()
    }

    /// Cuts the operator on each rank. `push` is set if its pushable output goes to every rank as flagged words. `dealt` is set
    /// if an output is split over the ranks in blocks ([`crate::collective::Lowered::dealt`]). `own` is an input of which each rank has
    /// only its own rows. If the operator needs other rows too, its class has no [`LocalClass::own`].
    pub fn cut(
        &mut self,
        op: &Op,
        push: bool,
        dealt: Option<(usize, Blocks)>,
        own: Option<usize>,
        parts: &mut Vec<Part>,
    ) -> Result<Arc<Vec<LocalClass>>, BuildError> {
        let view = op_view(self.graph, op);
        let mut key = String::with_capacity(256);
        let _ = write!(key, "{} {push} {dealt:?} {own:?} {:?}", op.op_type, op.attrs);
        for operand in view.inputs.iter().chain(&view.outputs) {
            let _ = write!(key, "|{:?} {:?} ", operand.ty, operand.sharding);
            match operand.role {
                Role::Weight { .. } => key.push('w'),
                other => drop(write!(key, "{other:?}")),
            }
        }
        for tensor in op.inputs.iter().chain(&op.outputs) {
            let _ = write!(key, "|{:?}", self.layouts.of(*tensor));
        }
        if let Some(class) = self.by_key.get(&key) {
            return Ok(class.clone());
        }
        let class = self.cut_all_ranks(op, &view, push, own, parts).map(|class| {
            let mut local = local_op(&view, 0, self.world);
            self.layouts.apply(&op.inputs, &op.outputs, &mut local);
            let class = turn(class, &local.outputs, self.turned_rows, dealt, parts);
            let Some(input) = own else { return class };
            let rows = view.inputs[input].ty.dims.first().copied().unwrap_or(0);
            own_step(&class, input, rows, parts).unwrap_or(class)
        });
        let class = class.map_err(|e| match e {
            Failure::Message(message) => BuildError::op(&op.name, message),
            Failure::Unknown(op_type) => BuildError::op(
                &op.name,
                format!("needs the task type `{op_type}`, which is not registered; register it"),
            ),
        })?;
        let class = Arc::new(class);
        self.by_key.insert(key, class.clone());
        Ok(class)
    }

    fn cut_all_ranks(
        &self,
        op: &Op,
        view: &OpView<'_>,
        push: bool,
        own: Option<usize>,
        parts: &mut Vec<Part>,
    ) -> Result<Vec<LocalClass>, Failure> {
        let mut ranks: Vec<LocalClass> = Vec::with_capacity(self.world as usize);
        // A rank that is cut like an earlier one with the same share uses its parts, so that analyses are shared too.
        let mut done: FxHashMap<Vec<u64>, usize> = FxHashMap::default();
        for rank in 0..self.world {
            let mut local = local_op(view, rank, self.world);
            self.layouts.apply(&op.inputs, &op.outputs, &mut local);
            let share: Vec<u64> =
                local.inputs.iter().chain(&local.outputs).flat_map(|t| t.dims.iter().copied()).collect();
            let earlier = done.get(&share).map(|&first| ranks[first].clone());
            let class = self.cut_rank(op, &local, push, own, earlier.as_ref(), parts)?;
            done.entry(share).or_insert(ranks.len());
            ranks.push(class);
        }
        if let Some(other) = ranks.iter().position(|r| !same_shape(r, &ranks[0])) {
            return Err(Failure::Message(format!(
                "`{}` is carried out by other task types on rank {other} than on rank 0; its contract must expand it alike on all ranks",
                op.op_type
            )));
        }
        Ok(ranks)
    }

    fn cut_rank(
        &self,
        op: &Op,
        local: &LocalOp<'_>,
        push: bool,
        own: Option<usize>,
        earlier: Option<&LocalClass>,
        parts: &mut Vec<Part>,
    ) -> Result<LocalClass, Failure> {
        let task_type = self.task_type(&op.op_type)?;
        let expansion = task_type.expand(local, self.target).map_err(|e| Failure::Message(e.0))?;
        let Some(expansion) = expansion else {
            let partition = task_type.partition(local, self.target).map_err(|e| Failure::Message(e.0))?;
            check_written(local.rank, &written(local, &partition)?)?;
            let part = self.add_part(task_type, local, partition, push, earlier_part(earlier, 0), parts)?;
            let step = Step {
                task_type: task_type.clone(),
                suffix: "",
                inputs: (0..op.inputs.len()).map(ExpansionOperand::Input).collect(),
                outputs: (0..op.outputs.len()).map(ExpansionOperand::Output).collect(),
                joins_sum: task_type.joins_sum(local),
                sums_rows: task_type.sums_rows(local),
                stores: task_type.peer_output(local),
                part,
            };
            return Ok(LocalClass { temporaries: Vec::new(), steps: vec![step], own: None });
        };
        let temporaries: Vec<(&'static str, TensorType)> =
            expansion.temporaries.iter().map(|t| (t.suffix, t.ty.clone())).collect();
        for (suffix, ty) in &temporaries {
            if ty.dims.is_empty()
                || ty.dims.len() > 4
                || ty.dims.iter().any(|&d| d > u64::from(u32::MAX >> 1))
            {
                return Err(Failure::Message(format!(
                    "its temporary `{suffix}` has dimensions {:?}",
                    ty.dims
                )));
            }
        }
        let mut steps = Vec::with_capacity(expansion.ops.len());
        // Steps may each write a part of one operand. Steps that declare all of it write different rows, known only at run time.
        let mut parts_written: Vec<(ExpansionOperand, Written)> = Vec::new();
        let (sharding, role) = (Sharding::Replicated, Role::Activation);
        for expanded in &expansion.ops {
            let step_type = self.task_type(expanded.op_type)?;
            let mut attrs = op.attrs.clone();
            attrs.extend(expanded.attrs.iter().map(|(k, v)| (k.clone(), v.clone())));
            let pick =
                |operands: &[ExpansionOperand]| -> Result<Vec<(OperandView<'_>, TensorType)>, Failure> {
                    operands
                        .iter()
                        .map(|operand| {
                            let (views, types, index) = match *operand {
                                ExpansionOperand::Input(i) => (&local.global.inputs, &local.inputs, i),
                                ExpansionOperand::Output(i) => (&local.global.outputs, &local.outputs, i),
                                ExpansionOperand::Temporary(i) => {
                                    let (suffix, ty) = temporaries.get(i)?;
                                    let view = OperandView {
                                        name: suffix,
                                        ty: ty.clone(),
                                        sharding: &sharding,
                                        role: &role,
                                    };
                                    return Some((view, ty.clone()));
                                }
                            };
                            Some((views.get(index)?.clone(), types.get(index)?.clone()))
                        })
                        .collect::<Option<Vec<_>>>()
                        .ok_or_else(|| {
                            Failure::Message(format!(
                                "its step `{}` uses an operand that does not exist",
                                expanded.suffix
                            ))
                        })
                };
            let (inputs, local_inputs): (Vec<_>, Vec<_>) = pick(&expanded.inputs)?.into_iter().unzip();
            let (outputs, local_outputs): (Vec<_>, Vec<_>) = pick(&expanded.outputs)?.into_iter().unzip();
            let global =
                OpView { name: &op.name, attrs: &attrs, inputs, outputs, capacity: local.global.capacity };
            let step_op = LocalOp {
                global: &global,
                inputs: local_inputs,
                outputs: local_outputs,
                rank: local.rank,
                world: local.world,
            };
            // Each rank gets one of `world` shares of these tasks.
            let of_own = own.is_some_and(|input| expanded.inputs.contains(&ExpansionOperand::Input(input)));
            let finer = Target { workers: self.target.workers * local.world, ..self.target.clone() };
            let target = if of_own { &finer } else { self.target };
            let partition = step_type.partition(&step_op, target).map_err(|e| Failure::Message(e.0))?;
            let of_step = expanded.outputs.iter().zip(written(&step_op, &partition)?);
            for (&operand, of_step) in of_step.filter(|(_, output)| output.written != output.elements) {
                match parts_written.iter_mut().find(|(known, _)| *known == operand) {
                    Some((_, known)) => known.written += of_step.written,
                    None => parts_written.push((operand, of_step)),
                }
            }
            let pushed = push
                && task_type
                    .pushable_output()
                    .is_some_and(|o| expanded.outputs.contains(&ExpansionOperand::Output(o)));
            let part = self.add_part(
                step_type,
                &step_op,
                partition,
                pushed,
                earlier_part(earlier, steps.len()),
                parts,
            )?;
            steps.push(Step {
                task_type: step_type.clone(),
                suffix: expanded.suffix,
                inputs: expanded.inputs.clone(),
                outputs: expanded.outputs.clone(),
                joins_sum: step_type.joins_sum(&step_op),
                sums_rows: step_type.sums_rows(&step_op),
                stores: step_type.peer_output(&step_op),
                part,
            });
        }
        let parts_written: Vec<Written> = parts_written.into_iter().map(|(_, written)| written).collect();
        check_written(local.rank, &parts_written)?;
        Ok(LocalClass { temporaries, steps, own: None })
    }

    fn task_type(&self, name: &str) -> Result<&'a Arc<dyn TaskType>, Failure> {
        self.registry.get(name).ok_or_else(|| Failure::Unknown(name.to_string()))
    }

    fn add_part(
        &self,
        task_type: &Arc<dyn TaskType>,
        op: &LocalOp<'_>,
        mut partition: Partition,
        push: bool,
        earlier: u32,
        parts: &mut Vec<Part>,
    ) -> Result<u32, Failure> {
        if partition.tasks.is_empty() {
            return Ok(NONE);
        }
        if push {
            let (Some(output), Some(param)) = (task_type.pushable_output(), task_type.push_param()) else {
                return Err(Failure::Message("cannot push its output".into()));
            };
            match partition.params.get_mut(param) {
                Some(word) => *word = 1,
                None => return Err(Failure::Message(format!("has no parameter word {param} for `push`"))),
            }
            // In the receive buffer [world, rows, columns], the same tile of every rank.
            for access in partition.tasks.iter_mut().flat_map(|t| &mut t.writes) {
                if access.operand as usize == output {
                    let [r0, c0, ..] = access.region.lo;
                    let [r1, c1, ..] = access.region.hi;
                    access.region = Region { lo: [0, r0, c0, 0], hi: [op.world, r1, c1, 1] };
                }
            }
        }
        let scratch_bytes = u32::try_from(partition.scratch_bytes)
            .map_err(|_| Failure::Message("needs more than 4 GiB of scratch memory".into()))?;
        let part = Part {
            type_name: task_type.name().to_string(),
            params: partition.params,
            rank_param: None,
            stacked: None,
            scratch_bytes,
            tasks: partition.tasks,
        };
        if parts.get(earlier as usize).is_some_and(|other| *other == part) {
            return Ok(earlier);
        }
        parts.push(part);
        Ok(parts.len() as u32 - 1)
    }
}

fn earlier_part(earlier: Option<&LocalClass>, step: usize) -> u32 {
    earlier.and_then(|class| class.steps.get(step)).map_or(NONE, |step| step.part)
}

enum Failure {
    Message(String),
    Unknown(String),
}

fn same_shape(a: &LocalClass, b: &LocalClass) -> bool {
    a.temporaries.len() == b.temporaries.len()
        && a.steps.len() == b.steps.len()
        && a.steps.iter().zip(&b.steps).all(|(x, y)| {
            x.task_type.name() == y.task_type.name() && x.inputs == y.inputs && x.outputs == y.outputs
        })
}

/// How much of an output tasks write.
struct Written {
    name: String,
    persistent: bool,
    elements: u64,
    written: u64,
}

/// What a partition writes of each output. Checks that it stays inside its operands.
fn written(op: &LocalOp<'_>, partition: &Partition) -> Result<Vec<Written>, Failure> {
    let space = |view: &OperandView<'_>, ty: &TensorType| match view.role {
        Role::Persistent { region_dims: Some(dims) } => (Dims::new(dims), true),
        _ => (Dims::new(&ty.dims), false),
    };
    let inputs: Vec<_> = op.global.inputs.iter().zip(&op.inputs).map(|(v, t)| space(v, t)).collect();
    let outputs: Vec<_> = op.global.outputs.iter().zip(&op.outputs).map(|(v, t)| space(v, t)).collect();
    let mut written: Vec<Written> = op
        .global
        .outputs
        .iter()
        .zip(&outputs)
        .map(|(view, (dims, _))| Written {
            name: view.name.to_string(),
            persistent: matches!(view.role, Role::Persistent { .. }),
            elements: dims.volume(),
            written: 0,
        })
        .collect();
    for task in &partition.tasks {
        for (accesses, spaces, what) in
            [(&task.reads[..], &inputs, "read"), (&task.writes[..], &outputs, "write")]
        {
            for access in accesses {
                let Some((dims, named)) = spaces.get(access.operand as usize) else {
                    return Err(Failure::Message(format!(
                        "a task {what}s operand {}, but the operator has only {}",
                        access.operand,
                        spaces.len()
                    )));
                };
                if !Region::whole(dims.as_slice()).contains(&access.region) && !access.region.is_empty() {
                    return Err(Failure::Message(format!(
                        "a task {what}s {} of operand {}, which is {:?}",
                        access.region,
                        access.operand,
                        dims.as_slice()
                    )));
                }
                if *named != access.trust.is_some_and(|t| t.of_pages()) {
                    return Err(Failure::Message(format!(
                        "a task {what}s operand {}: `Access::pages_of_slot` goes with persistent tensors that have an \
                         index space of their own; neither is possible without the other",
                        access.operand
                    )));
                }
            }
        }
        for access in &task.writes {
            written[access.operand as usize].written += access.region.volume();
        }
    }
    Ok(written)
}

/// Checks that the tasks of an operator cover each of its outputs exactly once.
fn check_written(rank: u32, outputs: &[Written]) -> Result<(), Failure> {
    match outputs.iter().find(|output| !output.persistent && output.written != output.elements) {
        None => Ok(()),
        Some(Written { name, elements, written, .. }) => Err(Failure::Message(format!(
            "on rank {rank} its tasks write {written} of {elements} elements of output `{name}`; they must cover it once"
        ))),
    }
}

//! The plan that all ranks share.

use super::classes::{Classes, LocalClass};
use super::collective::{arrive_part, copy_part, gather_pieces, num_remote_events, reduce_part, tiles};
use super::{Dims, Exchange, Lowering, Part, PlanTensor, Slot, SlotKind};
use crate::builder::{BuildError, BuildOptions};
use crate::dtype::DType;
use crate::op_graph::{OpGraph, Role, Rows};
use crate::passes::{ALLGATHER, ALLREDUCE};
use crate::split::Sharding;
use crate::target::Backend;
use crate::task_graph::{Allreduce, Space};
use crate::task_type::{ExpansionOperand, Registry};
use std::collections::HashMap;
use std::sync::Arc;

/// Events below are the same in every graph: termination, begin, end.
pub(crate) const FIRST_EVENT: u32 = 3;
/// Where ranks end the iteration together: the event that peers trigger when they are through.
pub(crate) const CLOSING_EVENT: u32 = FIRST_EVENT;

/// An op graph after sharding and fusion, with the operators' share of the plan still to come.
pub(crate) struct Prepared {
    pub graph: OpGraph,
}

/// What all ranks share; see the module's page.
#[derive(Debug)]
pub(crate) struct Plan {
    pub graph: OpGraph,
    pub options: BuildOptions,
    pub tensors: Vec<PlanTensor>,
    pub slots: Vec<Slot>,
    pub exchanges: Vec<Exchange>,
    pub parts: Vec<Part>,
    /// For each rank and slot, the part, or [`super::NONE`].
    pub part_of: Vec<Vec<u32>>,
    pub op_names: Vec<String>,
    pub notes: Vec<String>,
}

impl Plan {
    pub fn new(prepared: Prepared, registry: &Registry, options: &BuildOptions) -> Result<Plan, BuildError> {
        let graph = prepared.graph;
        let world = options.world;
        let mut plan = Plan {
            tensors: graph.tensors.iter().enumerate().map(|(i, t)| plan_tensor(i, t, world)).collect(),
            graph: OpGraph::new("", graph.capacity),
            options: options.clone(),
            slots: Vec::new(),
            exchanges: Vec::new(),
            parts: Vec::new(),
            part_of: vec![Vec::new(); world as usize],
            op_names: Vec::new(),
            notes: Vec::new(),
        };
        let uses = Uses::new(&graph);
        let lowerings = plan.choose_lowerings(&graph, registry, &uses);
        let mut classes = Classes::new(&graph, registry, &options.target, world);
        let mut core_parts: HashMap<CoreKey, u32> = HashMap::new();
        // The exchange and receive buffer of a one-shot allreduce exist before the operator that pushes.
        for (index, op) in graph.ops.iter().enumerate() {
            match op.op_type.as_str() {
                ALLREDUCE => {
                    plan.op_names.push(op.name.clone());
                    plan.add_allreduce(&graph, index, lowerings[index], &mut core_parts)?;
                }
                ALLGATHER => {
                    plan.op_names.push(op.name.clone());
                    plan.add_allgather(&graph, index, &uses)?;
                }
                _ => {
                    let pushed = uses.pushed_by(&graph, index, &lowerings);
                    let class = classes.cut(op, pushed.is_some(), &mut plan.parts)?;
                    plan.add_compute(&graph, index, &class, pushed);
                }
            }
        }
        plan.number_remote_events()?;
        plan.graph = graph;
        Ok(plan)
    }

    /// The tensor that holds the memory of `tensor`, and where in it `tensor` starts on `rank`.
    pub fn root(&self, tensor: u32, rank: u32) -> (u32, super::overlap::Shift) {
        match &self.tensors[tensor as usize].alias {
            Some((root, dim, first)) => (*root, (*dim, first[rank as usize])),
            None => (tensor, (0, 0)),
        }
    }

    /// The part of a slot on a rank, if it has tasks there.
    pub fn part(&self, rank: u32, slot: usize) -> Option<&Part> {
        self.parts.get(self.part_of[rank as usize][slot] as usize)
    }

    /// The tensor lives across iterations, and may be written.
    pub fn is_persistent(&self, tensor: u32) -> bool {
        self.tensors[tensor as usize]
            .source
            .is_some_and(|s| matches!(self.graph.tensors[s as usize].role, Role::Persistent { .. }))
    }

    /// Both ranks are cut into the same tasks.
    pub fn same_cut(&self, a: u32, b: u32) -> bool {
        self.part_of[a as usize] == self.part_of[b as usize]
    }

    /// Makes room for [`CLOSING_EVENT`] on every rank.
    pub fn add_closing_event(&mut self) {
        self.exchanges.iter_mut().flat_map(|e| &mut e.first_event).for_each(|e| *e += 1);
    }

    fn choose_lowerings(
        &mut self,
        graph: &OpGraph,
        registry: &Registry,
        uses: &Uses,
    ) -> Vec<Option<Lowering>> {
        let (options, world) = (self.options.clone(), self.options.world);
        graph
            .ops
            .iter()
            .map(|op| {
                if op.op_type != ALLREDUCE {
                    return None;
                }
                if world == 1 {
                    return Some(Lowering::Alone);
                }
                let source = &graph.tensors[op.inputs[0] as usize];
                let bytes = source.dims.iter().product::<u64>() * 4;
                let pushable = uses.writer[op.inputs[0] as usize].is_some_and(|w| {
                    let producer = &graph.ops[w];
                    registry.get(&producer.op_type).is_some_and(|t| {
                        t.push_param().is_some()
                            && t.pushable_output()
                                .is_some_and(|o| producer.outputs.get(o) == Some(&op.inputs[0]))
                    })
                }) && uses.readers[op.inputs[0] as usize] == 1
                    && !source.output
                    && source.role == Role::Activation;
                let tiles = tiles(Lowering::TwoShot, &options.target, source.dims[1] as u32, world).len();
                let mut wanted = match options.allreduce {
                    Allreduce::CopyReduce => Lowering::CopyReduce,
                    Allreduce::OneShot => Lowering::OneShot,
                    Allreduce::TwoShot => Lowering::TwoShot,
                    Allreduce::Auto if bytes <= options.one_shot_bytes && pushable => Lowering::OneShot,
                    Allreduce::Auto if options.target.backend == Backend::Cuda => Lowering::TwoShot,
                    Allreduce::Auto => Lowering::CopyReduce,
                };
                if wanted == Lowering::OneShot && !pushable {
                    self.notes.push(format!(
                        "`{}`: `{}` can't be pushed by its producer, so copy-reduce takes the place of one-shot",
                        op.name, source.name
                    ));
                    wanted = Lowering::CopyReduce;
                }
                let target = &graph.tensors[op.outputs[0] as usize];
                if wanted == Lowering::TwoShot && target.role != Role::Activation {
                    self.notes.push(format!(
                        "`{}`: `{}` is persistent and not in symmetric memory, so copy-reduce takes the place of two-shot",
                        op.name, target.name
                    ));
                    wanted = Lowering::CopyReduce;
                }
                if wanted == Lowering::TwoShot && tiles < world as usize {
                    self.notes.push(format!(
                        "`{}`: {tiles} column tiles are fewer than {world} ranks, so copy-reduce takes the place of two-shot",
                        op.name
                    ));
                    wanted = Lowering::CopyReduce;
                }
                Some(wanted)
            })
            .collect()
    }

    fn add_tensor(&mut self, tensor: PlanTensor) -> u32 {
        self.tensors.push(tensor);
        self.tensors.len() as u32 - 1
    }

    fn add_slot(&mut self, kind: SlotKind, inputs: Vec<u32>, outputs: Vec<u32>, parts: impl Fn(u32) -> u32) {
        let op = self.op_names.len() as u32 - 1;
        self.slots.push(Slot { op, kind, inputs, outputs });
        for (rank, slots) in self.part_of.iter_mut().enumerate() {
            slots.push(parts(rank as u32));
        }
    }

    fn add_compute(
        &mut self,
        graph: &OpGraph,
        index: usize,
        class: &Arc<Vec<LocalClass>>,
        pushed: Option<u8>,
    ) {
        let op = &graph.ops[index];
        let mut temporaries = Vec::new();
        for (i, (suffix, ty)) in class[0].temporaries.iter().enumerate() {
            temporaries.push(self.add_tensor(PlanTensor {
                name: format!("{}{suffix}", op.name),
                dtype: ty.dtype,
                rows: ty.rows,
                source: None,
                activation: true,
                space: Space::Device,
                output: false,
                alias: None,
                dims: class.iter().map(|c| Dims::new(&c.temporaries[i].1.dims)).collect(),
                region_dims: None,
            }));
        }
        let receive = pushed.map(|o| {
            let source = &graph.tensors[op.outputs[o as usize] as usize];
            self.add_receive(&source.name, DType::F32Flagged, &source.dims)
        });
        for (i, step) in class[0].steps.iter().enumerate() {
            self.op_names.push(format!("{}{}", op.name, step.suffix));
            let resolve = |operands: &[ExpansionOperand]| -> Vec<u32> {
                operands
                    .iter()
                    .map(|operand| match *operand {
                        ExpansionOperand::Input(i) => op.inputs[i],
                        ExpansionOperand::Output(i) => op.outputs[i],
                        ExpansionOperand::Temporary(i) => temporaries[i],
                    })
                    .collect()
            };
            let mut outputs = resolve(&step.outputs);
            // Of several steps the one that writes the operator's output pushes.
            let push = pushed.and_then(|pushed| {
                let output = ExpansionOperand::Output(usize::from(pushed));
                step.outputs.iter().position(|&operand| operand == output).map(|at| at as u8)
            });
            if let (Some(at), Some(receive)) = (push, receive) {
                outputs[usize::from(at)] = receive;
            }
            self.add_slot(SlotKind::Compute { push }, resolve(&step.inputs), outputs, |rank| {
                class[rank as usize].steps[i].part
            });
        }
    }

    fn add_receive(&mut self, of: &str, dtype: DType, dims: &[u64]) -> u32 {
        let world = self.options.world;
        let dims = Dims::new(&[u64::from(world), dims[0], dims[1]]);
        self.add_tensor(PlanTensor {
            name: format!("{of}.received"),
            dtype,
            rows: Rows::Fixed,
            source: None,
            activation: true,
            space: Space::Symmetric,
            output: false,
            alias: None,
            dims: vec![dims; world as usize],
            region_dims: None,
        })
    }

    fn add_allreduce(
        &mut self,
        graph: &OpGraph,
        index: usize,
        lowering: Option<Lowering>,
        core_parts: &mut HashMap<CoreKey, u32>,
    ) -> Result<(), BuildError> {
        let (op, world) = (&graph.ops[index], self.options.world);
        let lowering = lowering.unwrap_or(Lowering::CopyReduce);
        let (source, output, residual) = (op.inputs[0], op.outputs[0], op.inputs.get(1).copied());
        let tensor = &graph.tensors[source as usize];
        let (rows, columns) = (tensor.dims[0] as u32, tensor.dims[1] as u32);
        let receive = match lowering {
            // The operator that pushes made it.
            Lowering::OneShot => self
                .slots
                .iter()
                .rev()
                .flat_map(|s| &s.outputs)
                .copied()
                .find(|&t| self.tensors[t as usize].name == format!("{}.received", tensor.name))
                .ok_or_else(|| BuildError::op(&op.name, "has no producer that pushes"))?,
            Lowering::Alone => source,
            _ => self.add_receive(&tensor.name, DType::F32, &tensor.dims),
        };
        let exchange = Exchange {
            lowering,
            receive,
            output,
            rows,
            tiles: tiles(lowering, &self.options.target, columns, world),
            rows_kind: rows_kind(tensor.rows),
            pieces: Vec::new(),
            to_self: false,
            first_event: Vec::new(),
        };
        let number = self.exchanges.len() as u32;
        self.exchanges.push(exchange);
        let key = |what: u8, rank: u32| CoreKey {
            what,
            lowering,
            rows,
            columns,
            rows_kind: rows_kind(tensor.rows),
            rank,
            residual: residual.is_some(),
        };
        let mut core = |plan: &mut Plan, what: u8| -> Vec<u32> {
            (0..world)
                .map(|rank| {
                    // Only two-shot deals tiles by rank; emission fills in a reduce's own rank.
                    let of = if lowering == Lowering::TwoShot { rank } else { 0 };
                    *core_parts.entry(key(what, of)).or_insert_with(|| {
                        let exchange = &plan.exchanges[number as usize];
                        let part = match what {
                            0 | 1 => copy_part(exchange, what, of, world),
                            2 | 3 => arrive_part(exchange, what - 2, of, world),
                            _ => reduce_part(exchange, residual.is_some(), of, world),
                        };
                        plan.parts.push(part);
                        plan.parts.len() as u32 - 1
                    })
                })
                .collect()
        };
        let copies = matches!(lowering, Lowering::CopyReduce | Lowering::TwoShot);
        if copies {
            let (copy, arrive) = (core(self, 0), core(self, 2));
            self.add_slot(SlotKind::Copy { exchange: number, stage: 0 }, vec![source], vec![], |r| {
                copy[r as usize]
            });
            self.add_slot(SlotKind::Arrive { exchange: number, stage: 0 }, vec![], vec![receive], |r| {
                arrive[r as usize]
            });
        }
        let reduce = core(self, 4);
        let mut inputs = if lowering == Lowering::OneShot { vec![receive] } else { vec![source, receive] };
        inputs.extend(residual);
        self.add_slot(SlotKind::Reduce { exchange: number }, inputs, vec![output], |r| reduce[r as usize]);
        if lowering == Lowering::TwoShot {
            self.tensors[output as usize].space = Space::Symmetric;
            let (copy, arrive) = (core(self, 1), core(self, 3));
            self.add_slot(SlotKind::Copy { exchange: number, stage: 1 }, vec![output], vec![], |r| {
                copy[r as usize]
            });
            self.add_slot(SlotKind::Arrive { exchange: number, stage: 1 }, vec![], vec![output], |r| {
                arrive[r as usize]
            });
        }
        Ok(())
    }

    fn add_allgather(&mut self, graph: &OpGraph, index: usize, uses: &Uses) -> Result<(), BuildError> {
        let (op, world) = (&graph.ops[index], self.options.world);
        let (source, output) = (op.inputs[0], op.outputs[0]);
        let tensor = &graph.tensors[source as usize];
        let pieces = gather_pieces(&tensor.dims, &tensor.sharding, world).ok_or_else(|| {
            BuildError::op(
                &op.name,
                format!("`{}` can't be gathered: ranks hold the same indices of it", tensor.name),
            )
        })?;
        self.tensors[output as usize].space = Space::Symmetric;
        let mut split_dim = 0;
        let mut alias = false;
        if let Sharding::Split { dim, parts } = &tensor.sharding {
            split_dim = *dim;
            // The producer writes its block in place, where that is one block of a tensor of this graph.
            alias = parts.len() == 1
                && tensor.role == Role::Activation
                && uses.writer[source as usize].is_some()
                && self.tensors[source as usize].alias.is_none()
                && self.tensors[source as usize].space == Space::Device
                && !tensor.output;
            if alias {
                let first = tensor.sharding.ranges(0, world).len();
                debug_assert_eq!(first, 1);
                let starts = (0..world)
                    .map(|r| tensor.sharding.ranges(r, world).first().map_or(0, |x| x.start as u32))
                    .collect();
                self.tensors[source as usize].alias = Some((output, *dim, starts));
            }
        }
        let exchange = Exchange {
            lowering: Lowering::Gather,
            receive: output,
            output,
            rows: 0,
            tiles: Vec::new(),
            rows_kind: if tensor.dims.len() == 2 && split_dim != 0 { rows_kind(tensor.rows) } else { 2 },
            pieces,
            to_self: !alias,
            first_event: Vec::new(),
        };
        let number = self.exchanges.len() as u32;
        let first = self.parts.len() as u32;
        for rank in 0..world {
            self.parts.push(copy_part(&exchange, 0, rank, world));
            self.parts.push(arrive_part(&exchange, 0, rank, world));
        }
        self.exchanges.push(exchange);
        self.add_slot(SlotKind::Copy { exchange: number, stage: 0 }, vec![source], vec![], |r| first + 2 * r);
        self.add_slot(SlotKind::Arrive { exchange: number, stage: 0 }, vec![], vec![output], |r| {
            first + 2 * r + 1
        });
        Ok(())
    }

    fn number_remote_events(&mut self) -> Result<(), BuildError> {
        let world = self.options.world;
        for rank in 0..world {
            let mut next = FIRST_EVENT;
            for exchange in &mut self.exchanges {
                exchange.first_event.push(next);
                next = num_remote_events(exchange, rank, world)
                    .checked_add(next)
                    .ok_or_else(|| BuildError::Graph("more than 2^32 events; use fewer tiles".into()))?;
            }
        }
        Ok(())
    }
}

#[derive(PartialEq, Eq, Hash, Clone, Copy)]
struct CoreKey {
    what: u8,
    lowering: Lowering,
    rows: u32,
    columns: u32,
    rows_kind: u32,
    rank: u32,
    residual: bool,
}

fn rows_kind(rows: Rows) -> u32 {
    match rows {
        Rows::Tokens => 0,
        Rows::Samples => 1,
        Rows::Fixed => 2,
    }
}

fn plan_tensor(index: usize, tensor: &crate::op_graph::Tensor, world: u32) -> PlanTensor {
    let region_dims = match &tensor.role {
        Role::Persistent { region_dims: Some(dims) } => Some(Dims::new(dims)),
        _ => None,
    };
    let dims = if tensor.sharding == Sharding::Replicated || tensor.sharding == Sharding::Partial {
        vec![Dims::new(&tensor.dims); world as usize]
    } else {
        (0..world).map(|r| Dims::new(&tensor.sharding.local_dims(&tensor.dims, r, world))).collect()
    };
    PlanTensor {
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        rows: tensor.rows,
        source: Some(index as u32),
        activation: tensor.role == Role::Activation,
        space: Space::Device,
        output: tensor.output,
        alias: None,
        dims,
        region_dims,
    }
}

/// Who writes and reads each tensor of an op graph.
struct Uses {
    writer: Vec<Option<usize>>,
    readers: Vec<u32>,
    only_reader: Vec<Option<usize>>,
}

impl Uses {
    fn new(graph: &OpGraph) -> Self {
        let n = graph.tensors.len();
        let mut uses = Uses { writer: vec![None; n], readers: vec![0; n], only_reader: vec![None; n] };
        for (index, op) in graph.ops.iter().enumerate() {
            op.outputs.iter().for_each(|&t| uses.writer[t as usize] = Some(index));
            for &t in &op.inputs {
                uses.readers[t as usize] += 1;
                uses.only_reader[t as usize] = Some(index);
            }
        }
        uses
    }

    /// The output of an operator that a one-shot allreduce reads.
    fn pushed_by(&self, graph: &OpGraph, index: usize, lowerings: &[Option<Lowering>]) -> Option<u8> {
        graph.ops[index]
            .outputs
            .iter()
            .position(|&t| {
                self.only_reader[t as usize]
                    .is_some_and(|r| lowerings[r] == Some(Lowering::OneShot) && graph.ops[r].inputs[0] == t)
            })
            .map(|o| o as u8)
    }
}

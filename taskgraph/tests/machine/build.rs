//! Turns task graphs into a program on words.

use super::model::{Class, Machine, Step, Word};
use std::collections::HashMap;
use taskgraph::task_graph::{Operand, Place, Placement, Task, TaskGraph, core_types};

/// Indices of the words that tasks access: rank, piece of memory, offset.
type Words = HashMap<(usize, u32, u64), Word>;

/// `classes[c][r]`; `program` has the class of each iteration.
pub fn build(classes: &[&[TaskGraph]], program: &[usize]) -> Machine {
    let mut pieces: HashMap<String, u32> = HashMap::new();
    let mut words = Words::new();
    let mut counters = 0;
    let mut built = Vec::new();
    for (c, graphs) in classes.iter().enumerate() {
        let mut class = Class {
            steps: Vec::new(),
            lists: Vec::new(),
            triggers: Vec::new(),
            launches: Vec::new(),
            dynamic: graphs[0].placement == Placement::Dynamic,
            counters,
            flagged: graphs[0].flag_numbers().into_iter().flatten().count() as u64,
        };
        let mut place = |graph: &TaskGraph, tensor: usize| {
            let t = &graph.tensors[tensor];
            let own = matches!(t.role, taskgraph::Role::Activation);
            let (name, offset) = match t.overlay {
                Some(o) if o.area.is_shared() => (format!("area {:?}", o.area), o.offset),
                Some(o) => (format!("{c} area {:?}", o.area), o.offset),
                None if own => (format!("{c} {}", t.name), 0),
                None => (t.name.clone(), 0),
            };
            let next = pieces.len() as u32;
            (*pieces.entry(name).or_insert(next), offset / 4)
        };
        let starts: Vec<Vec<(u32, u64)>> =
            graphs.iter().map(|graph| (0..graph.tensors.len()).map(|t| place(graph, t)).collect()).collect();
        for (rank, graph) in graphs.iter().enumerate() {
            let steps = graph.tasks.iter().map(|task| step(graphs, &starts, rank, task, &mut words));
            class.steps.push(steps.collect());
            class.lists.push(graph.worker_lists.clone());
            class.triggers.push(graph.events.iter().map(|e| e.num_triggers).collect());
            class.launches.push(graph.events.iter().map(|e| (e.first_task, e.last_task)).collect());
            counters += graph.events.len();
        }
        built.push(class);
    }
    Machine::of_program(built, program, words.len(), counters)
}

fn step(
    graphs: &[TaskGraph],
    starts: &[Vec<(u32, u64)>],
    rank: usize,
    task: &Task,
    known: &mut Words,
) -> Step {
    let graph = &graphs[rank];
    let name = graph.type_name(task);
    let copy = name == core_types::NVSHMEM_COPY;
    let numbers = graph.flag_numbers();
    let mut words = |operand: &Operand, skip: Option<u32>| -> Vec<(Word, u64)> {
        let tensor = &graph.tensors[operand.tensor as usize];
        let flagged = numbers[operand.tensor as usize].map_or(0, |n| u64::from(n) + 1);
        // Elements of less than four bytes are rounded up, because they would share a word with others.
        let size = (tensor.dtype.size() / 4).max(1);
        let mut offsets = vec![operand.offset / 4];
        for d in 0..usize::from(operand.ndim) {
            let stride = u64::from(operand.strides[d]) * size;
            let indices = (0..operand.dims[d]).filter(|i| d != 0 || Some(*i) != skip);
            let indices: Vec<u64> = indices.map(u64::from).collect();
            offsets = offsets.iter().flat_map(|&at| indices.iter().map(move |i| at + i * stride)).collect();
        }
        let owners = match operand.place {
            Place::Own => rank..rank + 1,
            Place::Peer(peer) => usize::from(peer)..usize::from(peer) + 1,
            Place::All => 0..graphs.len(),
        };
        let mut found = Vec::new();
        for owner in owners {
            // Tensors of another rank are found by their position in its memory.
            let name = &tensor.name;
            let there = graphs[owner].tensors.iter().position(|t| t.name == *name);
            let (piece, start) = starts[owner][there.unwrap_or(operand.tensor as usize)];
            for at in &offsets {
                // A flagged word is one word of eight bytes.
                for half in 0..if flagged > 0 { 1 } else { size } {
                    let next = known.len() as Word;
                    let word = *known.entry((owner, piece, start + at + half)).or_insert(next);
                    found.push((word, flagged));
                }
            }
        }
        found
    };
    // The second parameter of a sum is its own slot among those received: of its rank, or of its node.
    let own_slot = |input: usize, operand: &Operand| {
        let params = &graph.variants[usize::from(task.variant)].params;
        let received = name == core_types::REDUCE && input == 1 && params.len() >= 4 && params[3] & 1 == 0;
        (received && operand.ndim == 3).then(|| params[1])
    };
    let constant =
        |o: &&Operand| matches!(graph.tensors[o.tensor as usize].role, taskgraph::Role::Weight { .. });
    let inputs = graph.inputs(task).iter().enumerate().filter(|(_, o)| !constant(o));
    let mut dependencies: Vec<(u32, u32)> = task.dependencies.iter().map(|&e| (e, 0)).collect();
    dependencies.extend(task.carried.iter().copied());
    let mut reads = Vec::new();
    inputs.for_each(|(i, o)| reads.extend(words(o, own_slot(i, o))));
    let mut writes = Vec::new();
    graph.outputs(task).iter().for_each(|o| writes.extend(words(o, None)));
    Step {
        reads,
        writes,
        put: copy || task.trigger.is_some_and(|event| event.is_nvshmem()),
        copy,
        trigger: task.trigger,
        dependencies,
    }
}

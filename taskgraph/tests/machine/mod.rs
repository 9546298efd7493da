//! A machine that executes small task graphs on bytes, in every order that the protocol allows.
//!
//! It knows counters, lists, launches and memory, but no regions, clocks or proofs. Memory consists of words of four
//! bytes. A task writes a hash of everything that it has read, so two executions differ as soon as one task has read
//! something else. Tasks read all inputs in one step, and write all outputs in a later one. A put reads and writes at
//! any time after its task was taken. Flagged words are visible at once. With `lazy`, other writes become visible only
//! after the writer's next trigger, so a word publishes nothing else.
#![allow(dead_code)]

mod merge;

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use taskgraph::EventId;
use taskgraph::task_graph::{Operand, Place, Placement, Task, TaskGraph, core_types};

/// Result of an exploration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All executions gave the same values; the number of states explored, and whether these are all.
    Same { states: usize, all: bool },
    /// Two executions gave different values.
    Differs,
    /// An execution could not continue.
    Stuck,
}

/// A word of some rank's memory.
type Word = u32;

/// Indices of the words that tasks access: rank, piece of memory, offset.
type Words = HashMap<(usize, u32, u64), Word>;

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// A task with its resolved words.
struct Step {
    /// With the number of the flagged tensor, from 1; 0: not flagged.
    reads: Vec<(Word, u64)>,
    writes: Vec<(Word, u64)>,
    put: bool,
    copy: bool,
    trigger: Option<EventId>,
    dependencies: Vec<(u32, u32)>,
}

/// A graph class on all ranks.
struct Class {
    steps: Vec<Vec<Step>>,
    lists: Vec<Vec<Vec<u32>>>,
    triggers: Vec<Vec<u32>>,
    launches: Vec<Vec<(u32, u32)>>,
    dynamic: bool,
    counters: usize,
    flagged: u64,
}

impl Class {
    fn tag(&self, epoch: u32, number: u64) -> u64 {
        u64::from(epoch) * self.flagged + number
    }
}

pub struct Machine {
    classes: Vec<Class>,
    /// Class of each iteration, and how often that class has run before.
    program: Vec<(usize, u32)>,
    words: usize,
    counters: usize,
    world: usize,
}

/// A thread of the machine: a worker's list, a launched task, or a put.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Thread {
    rank: usize,
    iteration: usize,
    /// Tasks that remain, in reverse order.
    tasks: Vec<u32>,
    /// What the first of them has read.
    read: Option<(u64, Vec<u64>)>,
    /// Writes that are not yet visible to others.
    hidden: Vec<(Word, u64)>,
    put: bool,
    worker: bool,
}

#[derive(Clone)]
struct State {
    memory: Vec<u64>,
    counters: Vec<u32>,
    /// Current iteration of each rank.
    iteration: Vec<usize>,
    /// Dynamic: events of the rank's iteration that have launched.
    launched: Vec<Vec<bool>>,
    threads: Vec<Thread>,
    seen: u64,
}

impl Machine {
    /// `classes[c][r]`; `program` has the class of each iteration.
    pub fn new(classes: &[&[TaskGraph]], program: &[usize]) -> Machine {
        let mut machine = Machine::of_all_words(classes, program);
        machine.words = merge::merge(&mut machine.classes, machine.words);
        machine
    }

    /// The same with every word of memory, even those that change together.
    pub fn of_all_words(classes: &[&[TaskGraph]], program: &[usize]) -> Machine {
        let world = classes[0].len();
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
            let starts: Vec<Vec<(u32, u64)>> = graphs
                .iter()
                .map(|graph| (0..graph.tensors.len()).map(|t| place(graph, t)).collect())
                .collect();
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
        let mut runs = vec![0; classes.len()];
        let program = program
            .iter()
            .map(|&c| {
                runs[c] += 1;
                (c, runs[c] - 1)
            })
            .collect();
        Machine { classes: built, program, words: words.len(), counters, world }
    }

    /// Words of memory that it distinguishes.
    pub fn words(&self) -> usize {
        self.words
    }

    fn counter(&self, class: usize, rank: usize, event: u32) -> usize {
        let c = &self.classes[class];
        c.counters + c.triggers[..rank].iter().map(Vec::len).sum::<usize>() + event as usize
    }

    fn start(&self) -> State {
        let mut state = State {
            memory: vec![0; self.words],
            counters: vec![0; self.counters],
            iteration: vec![0; self.world],
            launched: vec![Vec::new(); self.world],
            threads: Vec::new(),
            seen: 0,
        };
        (0..self.world).for_each(|rank| self.begin(&mut state, rank));
        self.settle(&mut state);
        state
    }

    /// Publishes the rank's next iteration.
    fn begin(&self, state: &mut State, rank: usize) {
        let iteration = state.iteration[rank];
        let Some(&(class, _)) = self.program.get(iteration) else { return };
        let c = &self.classes[class];
        state.counters[self.counter(class, rank, EventId::BEGIN)] += 1;
        if c.dynamic {
            state.launched[rank] = vec![false; c.triggers[rank].len()];
            return;
        }
        for list in &c.lists[rank] {
            let tasks: Vec<u32> = list.iter().rev().copied().collect();
            if !tasks.is_empty() {
                state.threads.push(thread(rank, iteration, tasks, false, true));
            }
        }
    }

    fn ready(&self, state: &State, class: usize, epoch: u32, rank: usize, (event, back): (u32, u32)) -> bool {
        let wanted = (epoch + 1).saturating_sub(back) * self.classes[class].triggers[rank][event as usize];
        state.counters[self.counter(class, rank, event)] >= wanted
    }

    /// Steps that only count: launches and ends of iterations.
    fn settle(&self, state: &mut State) {
        loop {
            let mut moved = false;
            for rank in 0..self.world {
                let Some(&(class, epoch)) = self.program.get(state.iteration[rank]) else { continue };
                let c = &self.classes[class];
                if c.dynamic {
                    for event in 0..c.triggers[rank].len() as u32 {
                        let (first, last) = c.launches[rank][event as usize];
                        let due = event != EventId::TERMINATION
                            && !state.launched[rank][event as usize]
                            && self.ready(state, class, epoch, rank, (event, 0));
                        if due {
                            state.launched[rank][event as usize] = true;
                            for task in first..last {
                                state.threads.push(thread(
                                    rank,
                                    state.iteration[rank],
                                    vec![task],
                                    false,
                                    false,
                                ));
                            }
                            moved = true;
                        }
                    }
                }
                let busy = state.threads.iter().any(|t| t.rank == rank && t.worker);
                if !busy && self.ready(state, class, epoch, rank, (EventId::END_OF_GRAPH, 0)) {
                    state.iteration[rank] += 1;
                    self.begin(state, rank);
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        state.threads.sort_by_key(|t| hash(t));
    }

    fn enabled(&self, state: &State, t: &Thread) -> bool {
        let Some(&task) = t.tasks.last() else { return false };
        if t.read.is_some() {
            return true;
        }
        let (class, epoch) = self.program[t.iteration];
        let step = &self.classes[class].steps[t.rank][task as usize];
        if t.put {
            return true;
        }
        step.dependencies.iter().all(|&d| self.ready(state, class, epoch, t.rank, d))
            && step.reads.iter().filter(|(_, flagged)| *flagged > 0).all(|(w, flagged)| {
                state.memory[*w as usize] & 0xff == self.classes[class].tag(epoch, *flagged)
            })
    }

    fn apply(&self, state: &State, index: usize, lazy: bool) -> State {
        let mut next = state.clone();
        let mut t = next.threads.swap_remove(index);
        let (class, epoch) = self.program[t.iteration];
        let task = t.tasks[t.tasks.len() - 1];
        let step = &self.classes[class].steps[t.rank][task as usize];
        if step.put && !t.put {
            // Issued: it continues by itself.
            t.tasks.pop();
            next.threads.push(thread(t.rank, t.iteration, vec![task], true, false));
            // Its trigger publishes what its worker wrote before: the put carries it.
            t.hidden.drain(..).for_each(|(w, value)| next.memory[w as usize] = value);
            self.finish(&mut next, t);
            return next;
        }
        if t.read.is_none() {
            let value = |w: Word| {
                let own = t.hidden.iter().rev().find(|(at, _)| *at == w);
                own.map_or(next.memory[w as usize], |(_, value)| *value)
            };
            let values: Vec<u64> = step.reads.iter().map(|(w, _)| value(*w)).collect();
            let all = hash((t.rank, t.iteration, task, &values));
            next.seen ^= all;
            t.read = Some((all, values));
            next.threads.push(t);
            next.threads.sort_by_key(|t| hash(t));
            return next;
        }
        let (all, values) = t.read.take().unwrap_or_default();
        for (i, &(word, flagged)) in step.writes.iter().enumerate() {
            let value = if step.copy { values.get(i).copied().unwrap_or(0) } else { hash((all, i)) };
            if flagged > 0 {
                next.memory[word as usize] = value & !0xff | self.classes[class].tag(epoch, flagged);
            } else if lazy && !step.put {
                t.hidden.push((word, value));
            } else {
                next.memory[word as usize] = value;
            }
        }
        if let Some(event) = step.trigger {
            t.hidden.drain(..).for_each(|(w, value)| next.memory[w as usize] = value);
            next.counters[self.counter(class, usize::from(event.owner()), event.index())] += 1;
        }
        t.tasks.pop();
        self.finish(&mut next, t);
        next
    }

    fn finish(&self, next: &mut State, mut t: Thread) {
        if t.tasks.is_empty() {
            t.hidden.drain(..).for_each(|(w, value)| next.memory[w as usize] = value);
        } else {
            next.threads.push(t);
        }
        self.settle(next);
    }

    fn done(&self, state: &State) -> bool {
        state.threads.is_empty() && state.iteration.iter().all(|&i| i == self.program.len())
    }

    /// Explores all executions, up to `most` states; beyond that, `walks` random ones.
    pub fn explore(&self, most: usize, walks: usize, mut random: impl FnMut() -> u64) -> Outcome {
        let mut wanted = None;
        let mut total = 0;
        let mut all = true;
        for lazy in [false, true] {
            let mut known = HashSet::new();
            let mut open = vec![self.start()];
            while let Some(state) = open.pop() {
                let mut moves = 0;
                for index in 0..state.threads.len() {
                    if !self.enabled(&state, &state.threads[index]) {
                        continue;
                    }
                    moves += 1;
                    let next = self.apply(&state, index, lazy);
                    let key = hash((&next.memory, &next.counters, &next.iteration, &next.threads, next.seen));
                    if known.insert(key) {
                        open.push(next);
                    }
                }
                if moves == 0 {
                    if !self.done(&state) {
                        return Outcome::Stuck;
                    }
                    if *wanted.get_or_insert(state.seen) != state.seen {
                        return Outcome::Differs;
                    }
                }
                if known.len() > most {
                    all = false;
                    break;
                }
            }
            total += known.len();
            if !all {
                for _ in 0..walks {
                    match self.walk(lazy, &mut random) {
                        None => return Outcome::Stuck,
                        Some(seen) if *wanted.get_or_insert(seen) != seen => return Outcome::Differs,
                        Some(_) => {}
                    }
                }
            }
        }
        Outcome::Same { states: total, all }
    }

    /// One random execution in which some threads are slow; `None`: it got stuck.
    pub fn walk(&self, lazy: bool, random: &mut impl FnMut() -> u64) -> Option<u64> {
        let slow = random();
        let mut state = self.start();
        loop {
            let mut moves: Vec<usize> =
                (0..state.threads.len()).filter(|&i| self.enabled(&state, &state.threads[i])).collect();
            if moves.is_empty() {
                return self.done(&state).then_some(state.seen);
            }
            let quick: Vec<usize> = moves
                .iter()
                .copied()
                .filter(|&i| !(hash(&state.threads[i].tasks) ^ slow).is_multiple_of(3))
                .collect();
            if !quick.is_empty() && !random().is_multiple_of(8) {
                moves = quick;
            }
            let index = moves[(random() % moves.len() as u64) as usize];
            state = self.apply(&state, index, lazy);
        }
    }
}

fn thread(rank: usize, iteration: usize, tasks: Vec<u32>, put: bool, worker: bool) -> Thread {
    Thread { rank, iteration, tasks, read: None, hidden: Vec::new(), put, worker }
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
        put: copy || name == core_types::NVSHMEM_SIGNAL,
        copy,
        trigger: task.trigger,
        dependencies,
    }
}

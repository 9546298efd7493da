//! The program that the machine executes: tasks with their words, counters, lists and launches.

use std::ops::Range;
use taskgraph::EventId;

/// A word of some rank's memory.
pub type Word = u32;

/// A task with its resolved words.
pub struct Step {
    /// With the number of the flagged tensor, from 1; 0: not flagged.
    pub reads: Vec<(Word, u64)>,
    pub writes: Vec<(Word, u64)>,
    pub put: bool,
    pub copy: bool,
    pub trigger: Option<EventId>,
    pub dependencies: Vec<(u32, u32)>,
}

/// A graph class on all ranks.
pub struct Class {
    pub steps: Vec<Vec<Step>>,
    pub lists: Vec<Vec<Vec<u32>>>,
    pub triggers: Vec<Vec<u32>>,
    pub launches: Vec<Vec<(u32, u32)>>,
    pub dynamic: bool,
    /// Number of its first counter.
    pub counters: usize,
    pub flagged: u64,
}

impl Class {
    pub fn tag(&self, epoch: u32, number: u64) -> u64 {
        u64::from(epoch) * self.flagged + number
    }
}

/// A task of one iteration, in its place in a list or a launch. It is executed once.
pub struct Node {
    pub rank: usize,
    pub iteration: usize,
    pub task: u32,
}

/// What a node does at one time. A put is issued by its worker, and then reads and writes by itself.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Issue,
    Read,
    Write,
}

/// Number of the transition of a node.
pub fn transition(node: usize, phase: Phase) -> usize {
    3 * node + phase as usize
}

pub struct Machine {
    pub(super) classes: Vec<Class>,
    /// Class of each iteration, and how often that class has run before.
    pub(super) program: Vec<(usize, u32)>,
    pub(super) words: usize,
    pub(super) counters: usize,
    pub(super) world: usize,
    pub(super) nodes: Vec<Node>,
    /// By iteration and rank: the nodes of each list (static), or of each event's launch (dynamic).
    pub(super) lists: Vec<Vec<Vec<Range<usize>>>>,
    pub(super) launches: Vec<Vec<Vec<Range<usize>>>>,
}

impl Machine {
    pub(super) fn of_program(
        classes: Vec<Class>,
        program: &[usize],
        words: usize,
        counters: usize,
    ) -> Machine {
        let mut runs = vec![0; classes.len()];
        let mut machine = Machine {
            world: classes[0].steps.len(),
            classes: Vec::new(),
            program: Vec::new(),
            words,
            counters,
            nodes: Vec::new(),
            lists: Vec::new(),
            launches: Vec::new(),
        };
        for (iteration, &class) in program.iter().enumerate() {
            machine.program.push((class, runs[class]));
            runs[class] += 1;
            let c = &classes[class];
            let (mut lists, mut launches) = (Vec::new(), Vec::new());
            for rank in 0..machine.world {
                let mut nodes = |tasks: &mut dyn Iterator<Item = u32>| {
                    let first = machine.nodes.len();
                    machine.nodes.extend(tasks.map(|task| Node { rank, iteration, task }));
                    first..machine.nodes.len()
                };
                let of_lists = c.lists[rank].iter().filter(|_| !c.dynamic);
                lists.push(of_lists.map(|list| nodes(&mut list.iter().copied())).collect());
                let of_events = c.launches[rank].iter().filter(|_| c.dynamic);
                launches.push(of_events.map(|&(first, last)| nodes(&mut (first..last))).collect());
            }
            machine.lists.push(lists);
            machine.launches.push(launches);
        }
        machine.classes = classes;
        machine
    }

    /// Words of memory that it distinguishes.
    pub fn words(&self) -> usize {
        self.words
    }

    pub(super) fn step(&self, node: usize) -> &Step {
        let n = &self.nodes[node];
        &self.classes[self.program[n.iteration].0].steps[n.rank][n.task as usize]
    }

    pub(super) fn counter(&self, class: usize, rank: usize, event: u32) -> usize {
        let c = &self.classes[class];
        c.counters + c.triggers[..rank].iter().map(Vec::len).sum::<usize>() + event as usize
    }

    /// The count that a task of this epoch waits for, if it depends on the event of `back` epochs ago.
    pub(super) fn wanted(&self, class: usize, epoch: u32, rank: usize, (event, back): (u32, u32)) -> u32 {
        (epoch + 1).saturating_sub(back) * self.classes[class].triggers[rank][event as usize]
    }

    /// The counter that the node triggers.
    pub(super) fn triggered(&self, node: usize) -> Option<usize> {
        let class = self.program[self.nodes[node].iteration].0;
        let event = self.step(node).trigger?;
        Some(self.counter(class, usize::from(event.owner()), event.index()))
    }
}

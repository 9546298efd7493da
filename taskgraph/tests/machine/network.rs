//! What can happen if one thing does not.
//!
//! A gate fires once enough of its inputs have fired, and never goes back. The transitions of the machine, the starts and ends of
//! iterations, launches, counters and polls are gates, so whatever happens in some execution has fired. The reverse does not hold: a
//! poll's gate fires once the wanted tag may have been written, even if it has been overwritten since.

use super::model::{Machine, Phase, Word, transition};
use std::collections::HashMap;
use std::ops::Range;
use taskgraph::EventId;

#[derive(Default)]
pub struct Network {
    needed: Vec<u32>,
    feeds: Vec<Vec<usize>>,
    /// Launches of tasks, each with the end of its iteration.
    launches: Vec<(usize, usize)>,
}

impl Network {
    fn gate(&mut self, needed: u32) -> usize {
        self.needed.push(needed);
        self.feeds.push(Vec::new());
        self.needed.len() - 1
    }

    /// A gate that needs all of these.
    fn all(&mut self, inputs: &[usize]) -> usize {
        let gate = self.gate(0);
        inputs.iter().for_each(|&input| self.require(gate, input));
        gate
    }

    fn some(&mut self, needed: u32, inputs: &[usize]) -> usize {
        let gate = self.gate(needed);
        inputs.iter().for_each(|&input| self.feeds[input].push(gate));
        gate
    }

    fn require(&mut self, gate: usize, input: usize) {
        self.needed[gate] += 1;
        self.feeds[input].push(gate);
    }

    /// What fires if one gate never does. A gate that happens in some execution before `withheld` is among them.
    pub fn fired_without(&self, withheld: usize) -> Vec<bool> {
        let mut missing = self.needed.clone();
        let mut fired: Vec<bool> = missing.iter().map(|&n| n == 0).collect();
        fired[withheld] = false;
        let mut open: Vec<usize> = (0..fired.len()).filter(|&gate| fired[gate]).collect();
        while let Some(gate) = open.pop() {
            for &fed in &self.feeds[gate] {
                missing[fed] = missing[fed].saturating_sub(1);
                if missing[fed] == 0 && !fired[fed] && fed != withheld {
                    fired[fed] = true;
                    open.push(fed);
                }
            }
        }
        fired
    }

    /// Whether a rank may end an iteration without one of its launches, which then never happens.
    pub fn may_lose_a_launch(&self) -> bool {
        self.launches.iter().any(|&(launch, end)| self.fired_without(launch)[end])
    }
}

impl Machine {
    /// The gate of a transition has its number.
    pub(super) fn network(&self) -> Network {
        let mut network = Network::default();
        for _ in 0..3 * self.nodes.len() {
            network.gate(0);
        }
        // The start of each iteration on each rank, and the end of the last one.
        let bounds: Vec<Vec<usize>> =
            (0..=self.program.len()).map(|_| (0..self.world).map(|_| network.gate(0)).collect()).collect();
        let mut counts = self.counts(&bounds);
        let mut polls = self.polls();
        for (iteration, &(class, epoch)) in self.program.iter().enumerate() {
            let (starts, ends) = (&bounds[iteration], &bounds[iteration + 1]);
            for (rank, (&start, &end)) in starts.iter().zip(ends).enumerate() {
                let mut count = |network: &mut Network, on: (u32, u32)| {
                    let counter = self.counter(class, rank, on.0);
                    counts.reaches(network, counter, self.wanted(class, epoch, rank, on))
                };
                network.require(end, start);
                let ended = count(&mut network, (EventId::END_OF_GRAPH, 0));
                network.require(end, ended);
                let mut starts: Vec<(Range<usize>, usize)> = Vec::new();
                for list in self.lists[iteration][rank].iter().filter(|list| !list.is_empty()) {
                    network.require(end, self.last_of(list.end - 1));
                    starts.push((list.clone(), start));
                }
                for (event, nodes) in self.launches[iteration][rank].iter().enumerate() {
                    if event as u32 == EventId::TERMINATION || nodes.is_empty() {
                        continue;
                    }
                    let counted = count(&mut network, (event as u32, 0));
                    let launch = network.all(&[start, counted]);
                    network.launches.push((launch, end));
                    starts.extend(nodes.clone().map(|node| (node..node + 1, launch)));
                }
                for (list, start) in starts {
                    let mut before = start;
                    for node in list {
                        let step = self.step(node);
                        let [issue, read, write] =
                            [Phase::Issue, Phase::Read, Phase::Write].map(|phase| transition(node, phase));
                        let first = if step.put { issue } else { read };
                        network.require(first, before);
                        for &on in &step.dependencies {
                            let counted = count(&mut network, on);
                            network.require(first, counted);
                        }
                        for &(word, number) in step.reads.iter().filter(|(_, number)| *number > 0) {
                            let tag = self.classes[class].tag(epoch, number);
                            let polled = polls.sees(&mut network, word, tag);
                            network.require(first, polled);
                        }
                        if step.put {
                            network.require(read, issue);
                        }
                        network.require(write, read);
                        before = self.last_of(node);
                    }
                }
            }
        }
        network
    }

    /// The transition after which a worker goes on.
    fn last_of(&self, node: usize) -> usize {
        transition(node, if self.step(node).put { Phase::Issue } else { Phase::Write })
    }

    /// The gates that increment each counter.
    fn counts(&self, bounds: &[Vec<usize>]) -> Counts {
        let mut of = vec![Vec::new(); self.counters];
        for node in 0..self.nodes.len() {
            if let Some(counter) = self.triggered(node) {
                of[counter].push(transition(node, Phase::Write));
            }
        }
        for (&(class, _), starts) in self.program.iter().zip(bounds) {
            for (rank, &start) in starts.iter().enumerate() {
                of[self.counter(class, rank, EventId::BEGIN)].push(start);
            }
        }
        Counts { of, known: HashMap::new() }
    }

    /// The transitions that write each word, with the tag if it is known.
    fn polls(&self) -> Polls {
        let mut of: HashMap<Word, Vec<(usize, Option<u64>)>> = HashMap::new();
        for (node, n) in self.nodes.iter().enumerate() {
            let (class, epoch) = self.program[n.iteration];
            for &(word, number) in &self.step(node).writes {
                let tag = (number > 0).then(|| self.classes[class].tag(epoch, number) & 0xff);
                of.entry(word).or_default().push((transition(node, Phase::Write), tag));
            }
        }
        Polls { of, known: HashMap::new() }
    }
}

struct Counts {
    of: Vec<Vec<usize>>,
    known: HashMap<(usize, u32), usize>,
}

impl Counts {
    fn reaches(&mut self, network: &mut Network, counter: usize, count: u32) -> usize {
        *self.known.entry((counter, count)).or_insert_with(|| network.some(count, &self.of[counter]))
    }
}

struct Polls {
    of: HashMap<Word, Vec<(usize, Option<u64>)>>,
    known: HashMap<(Word, u64), usize>,
}

impl Polls {
    fn sees(&mut self, network: &mut Network, word: Word, tag: u64) -> usize {
        *self.known.entry((word, tag)).or_insert_with(|| {
            let writes = self.of.get(&word).into_iter().flatten();
            // Any value may look like the tag.
            let may = writes.filter(|(_, written)| written.is_none_or(|written| written == tag));
            // All words are 0 at the start.
            network.some(u32::from(tag != 0), &may.map(|(write, _)| *write).collect::<Vec<_>>())
        })
    }
}

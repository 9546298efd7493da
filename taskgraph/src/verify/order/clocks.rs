//! Computes the clocks of all held nodes.

use super::lanes::{Clocks, LANES, Lanes, lower, raise, turned_lanes};
use super::{Flagged, NONE, Order};
use crate::ids::EventId;
use smallvec::SmallVec;

impl Order<'_> {
    /// A chain of nodes for each held rank, each node before the next, from its begin event to its end event.
    fn chains(&self, flagged: Flagged) -> Vec<Vec<u32>> {
        let events = self.held_events();
        let held = self.graphs.held();
        let rank_of: Vec<u16> = held
            .iter()
            .enumerate()
            .flat_map(|(r, graph)| std::iter::repeat_n(r as u16, graph.events.len()))
            .chain(self.task_rank.iter().copied())
            .collect();
        let mut depth = vec![0u32; self.position.len()];
        let mut parent = vec![NONE; self.position.len()];
        for &node in &self.sequence {
            let next_depth = depth[node as usize] + 1;
            self.held_successors(node, flagged, |next| {
                let (next, by) = self.held(next);
                let same_rank = by == 0 && rank_of[next as usize] == rank_of[node as usize];
                if same_rank && depth[next as usize] < next_depth {
                    depth[next as usize] = next_depth;
                    parent[next as usize] = node;
                }
            });
        }
        (0..held.len())
            .map(|rank| {
                let begin = self.event_node(rank, EventId::BEGIN);
                let end = self.event_node(rank, EventId::END_OF_GRAPH);
                let mut chain = Vec::new();
                let mut at = end;
                while at != NONE && at != begin {
                    chain.push(at);
                    at = parent[at as usize];
                }
                chain.reverse();
                // An event before the first task is not known to come after this rank's begin.
                let first_task = chain.iter().position(|&n| n >= events).unwrap_or(chain.len());
                chain.drain(..first_task);
                let step = chain.len() / (usize::from(u16::MAX) - 8) + 1;
                let mut chosen = vec![begin];
                chosen.extend(chain.iter().rev().step_by(step).rev());
                if chain.is_empty() {
                    chosen.push(end);
                }
                chosen
            })
            .collect()
    }

    pub(super) fn clocks_of(&self, flagged: Flagged) -> Clocks {
        let blocks = self.blocks;
        let mut on_chain = vec![(0u16, 0u16); self.position.len()];
        for (rank, chain) in self.chains(flagged).into_iter().enumerate() {
            for (index, node) in chain.into_iter().enumerate() {
                on_chain[node as usize] = (rank as u16, index as u16 + 1);
            }
        }
        let on_chain = &on_chain;
        let this = self;
        let world = self.graphs.len();
        let forward = || {
            let mut last = vec![[0u16; LANES]; this.position.len() * blocks];
            let events = this.held_events() as usize;
            for (task, &rank) in this.task_rank.iter().enumerate() {
                let rank = rank as usize;
                last[(events + task) * blocks + rank / LANES][rank % LANES] = 1;
            }
            for &node in &this.sequence {
                let at = node as usize * blocks;
                let (rank, index) = on_chain[node as usize];
                if index > 0 {
                    last[at + rank as usize / LANES][rank as usize % LANES] = index;
                }
                let own: SmallVec<[Lanes; 1]> = SmallVec::from_slice(&last[at..at + blocks]);
                this.held_successors(node, flagged, |next| {
                    let (next, by) = this.held(next);
                    // Relative to the held node, ranks are turned back.
                    let own = turned_lanes(&own, (world - by as usize) % world, world);
                    raise(&mut last[next as usize * blocks..][..blocks], &own);
                });
            }
            last
        };
        let backward = || {
            let mut first = vec![[u16::MAX; LANES]; this.position.len() * blocks];
            for &node in this.sequence.iter().rev() {
                let at = node as usize * blocks;
                let mut own: SmallVec<[Lanes; 1]> = SmallVec::from_slice(&first[at..at + blocks]);
                this.held_successors(node, flagged, |next| {
                    let (next, by) = this.held(next);
                    let of_next =
                        turned_lanes(&first[next as usize * blocks..][..blocks], by as usize, world);
                    lower(&mut own, &of_next);
                });
                first[at..at + blocks].copy_from_slice(&own);
                let (rank, index) = on_chain[node as usize];
                if index > 0 {
                    first[at + rank as usize / LANES][rank as usize % LANES] = index;
                }
            }
            first
        };
        let (last, first) = std::thread::scope(|scope| {
            let first = std::thread::Builder::new().spawn_scoped(scope, backward);
            let last = forward();
            // If the system refuses a thread, this thread does both.
            (last, first.map_or_else(|_| backward(), |thread| thread.join().unwrap_or_default()))
        });
        Clocks { first, last }
    }
}

//! A step that all ranks take together, outside the kernel.

use crate::messages::{Messages, pack, unpack};
use crate::nodes::Nodes;
use crate::watch::Waiting;

/// A step that all ranks take together. Messages between nodes go from one node's first rank to another's, once for all ranks of the node.
pub(crate) struct Meeting<'a> {
    messages: Messages<'a>,
    nodes: &'a Nodes,
    rank: u32,
    step: u64,
    _waiting: Waiting<'a>,
}

impl<'a> Meeting<'a> {
    pub fn new(messages: Messages<'a>, nodes: &'a Nodes, rank: u32, step: u64, waiting: Waiting<'a>) -> Self {
        Meeting { messages, nodes, rank, step, _waiting: waiting }
    }

    fn send(&self, rank: u32, bytes: &[u8]) {
        self.messages.send(rank, self.step, bytes);
    }

    fn receive(&self, rank: u32) -> Vec<u8> {
        self.messages.receive(rank, self.step)
    }

    /// On rank 0: every rank's bytes, in rank order. Empty on other ranks.
    pub fn collect(&self, bytes: Vec<u8>) -> Vec<Vec<u8>> {
        let node = self.nodes.of_rank(self.rank);
        let first = self.nodes.first_of(node);
        if self.rank != first {
            self.send(first, &bytes);
            return Vec::new();
        }
        let mut own = bytes;
        let of_node = self.nodes.ranks_of(node).map(|rank| {
            let bytes = if rank == first { std::mem::take(&mut own) } else { self.receive(rank) };
            (rank, bytes)
        });
        if self.rank != 0 {
            let all: Vec<Vec<u8>> = of_node.map(|(_, bytes)| bytes).collect();
            self.send(0, &pack(&all));
            return Vec::new();
        }
        let mut all = vec![Vec::new(); self.nodes.of_ranks().len()];
        of_node.for_each(|(rank, bytes)| all[rank as usize] = bytes);
        for node in (0..self.nodes.count() as u32).filter(|&other| other != node) {
            let theirs = unpack(&self.receive(self.nodes.first_of(node)));
            self.nodes.ranks_of(node).zip(theirs).for_each(|(rank, bytes)| all[rank as usize] = bytes);
        }
        all
    }

    /// See [`World::clock_lead`]. Rank 0 asks one rank of each other node for the time. The fastest answer counts.
    pub fn clock_lead(&self, now: impl Fn() -> u64) -> i64 {
        const ROUNDS: u32 = 12;
        let (nodes, own, size) = (self.nodes, self.rank, self.nodes.of_ranks().len() as u32);
        let time = |bytes: &[u8]| numbers(bytes).first().copied().unwrap_or(0);
        if own != 0 {
            if nodes.share(0, own) {
                return 0;
            }
            for _ in 0..ROUNDS {
                self.receive(0);
                self.send(0, &now().to_ne_bytes());
            }
            return time(&self.receive(0)) as i64;
        }
        for rank in (1..size).filter(|&rank| !nodes.share(0, rank)) {
            let ask = |_| {
                let asked = now();
                // As long as the answer, so that both take the same time.
                self.send(rank, &asked.to_ne_bytes());
                let answer = time(&self.receive(rank));
                let took = now().saturating_sub(asked);
                (took, (asked + took / 2).wrapping_sub(answer))
            };
            let lead = (0..ROUNDS).map(ask).min().map_or(0, |(_, lead)| lead);
            self.send(rank, &lead.to_ne_bytes());
        }
        0
    }

    /// The bytes of rank 0, on every rank.
    pub fn spread(&self, bytes: Vec<u8>) -> Vec<u8> {
        let node = self.nodes.of_rank(self.rank);
        let first = self.nodes.first_of(node);
        let bytes = match self.rank {
            0 => bytes,
            rank if rank == first => self.receive(0),
            _ => return self.receive(first),
        };
        // Other nodes first, since their messages take longer.
        if self.rank == 0 {
            let others = (0..self.nodes.count() as u32).filter(|&other| other != node);
            others.for_each(|other| self.send(self.nodes.first_of(other), &bytes));
        }
        self.nodes.ranks_of(node).filter(|&rank| rank != first).for_each(|rank| self.send(rank, &bytes));
        bytes
    }
}

pub(crate) fn numbers(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect()
}

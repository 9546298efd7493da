//! Ranks on several nodes: which rank is on which node, and the proxy that sends between ranks without shared memory.

mod carrier;
mod carrying;
mod link;
mod proxy;
mod ring;
mod shared;
mod turns;

pub(crate) use proxy::{Carried, Proxy, Ringer};
pub(crate) use ring::mpk_put_with_signal;

/// The nodes of a job's ranks. Ranks on one node share memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// The node of each rank, numbered in the order of their first ranks.
    of: Vec<u32>,
    names: Vec<String>,
}

impl Nodes {
    /// All ranks on one node.
    pub fn one(ranks: u32, name: &str) -> Nodes {
        Nodes { of: vec![0; ranks as usize], names: vec![name.into()] }
    }

    /// Each rank gives a number for its node, and the node's name. Exactly the ranks that share memory give the same
    /// number.
    pub(crate) fn new(ranks: &[(u32, String)]) -> Nodes {
        let mut words: Vec<u32> = Vec::new();
        let mut nodes = Nodes { of: Vec::new(), names: Vec::new() };
        for (word, name) in ranks {
            let node = words.iter().position(|w| w == word).unwrap_or_else(|| {
                words.push(*word);
                nodes.names.push(name.clone());
                words.len() - 1
            });
            nodes.of.push(node as u32);
        }
        nodes
    }

    /// Number of nodes.
    pub fn count(&self) -> usize {
        self.names.len()
    }

    /// The node of each rank.
    pub fn of_ranks(&self) -> &[u32] {
        &self.of
    }

    /// The node of `rank`.
    pub(crate) fn of_rank(&self, rank: u32) -> u32 {
        self.of[rank as usize]
    }

    /// The ranks of `node`, in order.
    pub(crate) fn ranks_of(&self, node: u32) -> impl Iterator<Item = u32> {
        (0..).zip(&self.of).filter(move |(_, of)| **of == node).map(|(rank, _)| rank)
    }

    /// The first rank of `node`. Nodes are numbered in the order of their first ranks, so the first rank of node 0 is rank
    /// 0.
    pub(crate) fn first_of(&self, node: u32) -> u32 {
        self.ranks_of(node).next().unwrap_or(0)
    }

    /// Name of the node that `rank` is on.
    pub fn name_of(&self, rank: u32) -> &str {
        &self.names[self.of[rank as usize] as usize]
    }

    /// True if two ranks share memory.
    pub fn share(&self, a: u32, b: u32) -> bool {
        self.of[a as usize] == self.of[b as usize]
    }

    /// The ranks that do not share memory with `rank`.
    pub(crate) fn elsewhere(&self, rank: u32) -> Vec<u32> {
        (0..self.of.len() as u32).filter(|&other| !self.share(rank, other)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_counted_by_their_first_ranks() {
        let ranks = [(0, "a"), (1, "b"), (0, "a"), (1, "b"), (4, "a")].map(|(w, n)| (w, n.to_string()));
        let nodes = Nodes::new(&ranks);
        assert_eq!(nodes.of_ranks(), [0, 1, 0, 1, 2]);
        assert_eq!((nodes.count(), nodes.name_of(3), nodes.name_of(4)), (3, "b", "a"));
        assert!(nodes.share(1, 3) && !nodes.share(0, 4));
        assert_eq!(nodes.elsewhere(2), [1, 3, 4]);
        assert_eq!(nodes.ranks_of(1).collect::<Vec<_>>(), [1, 3]);
        assert_eq!([0, 1, 2].map(|node| nodes.first_of(node)), [0, 1, 4]);
        assert_eq!([0, 3, 4].map(|rank| nodes.of_rank(rank)), [0, 1, 2]);
        assert_eq!(Nodes::one(3, "x").elsewhere(1), [0u32; 0]);
    }
}

//! The hierarchical lowering of `allreduce`, for ranks on several nodes: reduce within each node, exchange the sums between nodes,
//! broadcast the result within each node. So each tile crosses the network once per pair of nodes, not per pair of ranks.
//!
//! Column tiles are distributed over the ranks of a node. The owner of a tile adds its node's summands in rank order, then the nodes'
//! sums in the order of nodes, then the residual. All ranks get the owner's bits, and all owners of a tile compute the same bits.
//! They differ from those of a sum in rank order over all ranks, unless every node has one rank. The sums of nodes travel as f32,
//! whatever the type of the summands.

use super::contract::{Buffer, Exchange, Lowered, Operand, Send, Step, TaskStep};
use crate::dtype::DType;
use crate::region::Region;
use crate::task_graph::core_types;
use crate::task_graph::sum_flags::RESIDUAL;
use crate::task_type::{Access, TaskSpec};
use std::ops::Range;

/// The hierarchical lowering.
pub(super) struct Hierarchical<'a> {
    pub rows: u32,
    pub columns: u32,
    pub tiles: Vec<Range<u32>>,
    pub rows_kind: u32,
    /// Element type of the summands.
    pub dtype: DType,
    pub residual: bool,
    /// The node of each rank, counted from 0.
    pub nodes: &'a [u32],
}

/// Summands of a node's ranks, `[place in the node, rows, columns]`.
const RECEIVED: Operand = Operand::Buffer(0);
/// The sum of this rank's node.
const OF_NODE: Operand = Operand::Buffer(1);
/// Sums of the other nodes, `[node, rows, columns]`.
const OF_NODES: Operand = Operand::Buffer(2);

impl Hierarchical<'_> {
    fn world(&self) -> u32 {
        self.nodes.len() as u32
    }

    fn count(&self) -> u32 {
        self.nodes.iter().max().map_or(1, |last| last + 1)
    }

    /// The ranks of a node, in order.
    fn members(&self, node: u32) -> Vec<u32> {
        (0..self.world()).filter(|&rank| self.nodes[rank as usize] == node).collect()
    }

    fn node(&self, rank: u32) -> u32 {
        self.nodes[rank as usize]
    }

    /// The rank's index within its node.
    fn place(&self, rank: u32) -> u32 {
        (0..rank).filter(|&other| self.node(other) == self.node(rank)).count() as u32
    }

    /// The rank of a node that sums this tile.
    fn owner(&self, node: u32, tile: usize) -> u32 {
        let members = self.members(node);
        members[tile % members.len()]
    }

    /// Index of a tile among its owner's tiles on this node.
    fn number(&self, node: u32, tile: usize) -> u32 {
        (tile / self.members(node).len()) as u32
    }

    fn tile(&self, tile: usize) -> Region {
        Region::whole(&[self.rows]).with(1, self.tiles[tile].start, self.tiles[tile].end)
    }

    /// The region of a tile in slots `first..last` of a buffer.
    fn slots(&self, tile: usize, first: u32, last: u32) -> Region {
        let slots = Region::whole(&[1, self.rows]).with(0, first, last);
        slots.with(2, self.tiles[tile].start, self.tiles[tile].end)
    }

    /// The steps.
    pub fn lower(&self) -> Lowered {
        let largest = (0..self.count()).map(|node| self.members(node).len()).max().unwrap_or(1) as u32;
        let buffer = |suffix, dtype, slots: Option<u32>| Buffer {
            suffix,
            dtype,
            dims: slots.into_iter().chain([self.rows, self.columns]).collect(),
            by_sender: false,
        };
        Lowered {
            buffers: vec![
                buffer(".received", self.dtype, Some(largest)),
                buffer(".of_node", DType::F32, None),
                buffer(".of_nodes", DType::F32, Some(self.count())),
            ],
            steps: vec![
                self.to_owners(),
                self.sum(RECEIVED),
                self.to_other_nodes(),
                self.sum(OF_NODES),
                self.to_others(),
            ],
            ..Lowered::default()
        }
    }

    fn exchange(
        &self,
        (source, target): (Operand, Operand),
        sends: impl Fn(u32) -> Vec<Send>,
        between_all: bool,
    ) -> Step {
        Step::Exchange(Exchange {
            source,
            target,
            rows_kind: self.rows_kind,
            sends: (0..self.world()).map(sends).collect(),
            rows_per_index: 0,
            between_all,
            completes: None,
            beside_producer: true,
        })
    }

    /// Sends summands to the owners of their tiles on the same node.
    fn to_owners(&self) -> Step {
        let sends = |rank| {
            let (node, place) = (self.node(rank), self.place(rank));
            let tiles = (0..self.tiles.len()).filter(|&tile| self.owner(node, tile) != rank);
            let send = |tile| Send {
                to: self.owner(node, tile),
                source: Some(self.tile(tile)),
                target: self.slots(tile, place, place + 1),
                event: self.number(node, tile),
            };
            tiles.map(send).collect()
        };
        self.exchange((Operand::Input(0), RECEIVED), sends, false)
    }

    /// Sends the node's sums to the owners of their tiles on the other nodes. Every rank hears from every other rank here.
    fn to_other_nodes(&self) -> Step {
        let sends = |rank| {
            let node = self.node(rank);
            let mut sends = Vec::new();
            for tile in (0..self.tiles.len()).filter(|&tile| self.owner(node, tile) == rank) {
                for other in (1..self.count()).map(|step| (node + step) % self.count()) {
                    sends.push(Send {
                        to: self.owner(other, tile),
                        source: Some(self.tile(tile)),
                        target: self.slots(tile, node, node + 1),
                        event: self.number(other, tile),
                    });
                }
            }
            sends
        };
        self.exchange((OF_NODE, OF_NODES), sends, false)
    }

    /// Sends results to the other ranks of the node.
    fn to_others(&self) -> Step {
        let sends = |rank| {
            let node = self.node(rank);
            let own = (0..self.tiles.len()).filter(|&tile| self.owner(node, tile) == rank);
            let others: Vec<u32> = self.members(node).into_iter().filter(|&other| other != rank).collect();
            own.flat_map(|tile| {
                let region = self.tile(tile);
                others.iter().map(move |&to| Send { to, source: Some(region), target: region, event: 0 })
            })
            .collect()
        };
        self.exchange((Operand::Output, Operand::Output), sends, false)
    }

    /// Sums each rank's tiles, either within the node (`received` is [`RECEIVED`]) or over the nodes.
    fn sum(&self, received: Operand) -> Step {
        let within = received == RECEIVED;
        let residual = self.residual && !within;
        let (own, output) = if within { (Operand::Input(0), OF_NODE) } else { (OF_NODE, Operand::Output) };
        let summands = |rank| if within { self.members(self.node(rank)).len() as u32 } else { self.count() };
        let mut inputs = vec![own, received];
        inputs.extend(residual.then_some(Operand::Input(1)));
        let tasks = |rank: u32| {
            let own = (0..self.tiles.len()).filter(|&tile| self.owner(self.node(rank), tile) == rank);
            let task = |tile| {
                let region = self.tile(tile);
                let mut task = TaskSpec {
                    cost: region.volume() * 4 * u64::from(summands(rank) + 2),
                    ..TaskSpec::default()
                };
                task.reads.push(Access::new(0, region));
                task.reads.push(Access::new(1, self.slots(tile, 0, summands(rank))));
                if residual {
                    task.reads.push(Access::new(2, region));
                }
                task.writes.push(Access::new(0, region));
                task
            };
            own.map(task).collect()
        };
        let params = |rank| {
            let own = if within { self.place(rank) } else { self.node(rank) };
            vec![summands(rank), own, self.rows_kind, if residual { RESIDUAL } else { 0 }]
        };
        Step::Tasks(TaskStep {
            task_type: core_types::REDUCE,
            inputs,
            outputs: vec![output],
            params: Vec::new(),
            rank_params: (0..self.world()).map(params).collect(),
            rank_param: None,
            stacked: None,
            tasks: (0..self.world()).map(tasks).collect(),
        })
    }
}

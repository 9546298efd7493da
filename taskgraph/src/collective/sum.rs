//! How an allreduce sums: which rank sums which tile, and the steps that send and sum tiles.

use super::contract::{Exchange, Operand, Send, Step, TaskStep};
use crate::dtype::DType;
use crate::region::Region;
use crate::target::Target;
use crate::task_graph::core_types;
use crate::task_graph::sum_flags::{FLAGGED, RESIDUAL};
use crate::task_type::{Access, TaskSpec};
use std::ops::Range;

/// The ways to carry out an allreduce.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Way {
    CopyReduce,
    OneShot,
    TwoShot,
    /// For several nodes; see `hierarchical.rs`.
    Hierarchical,
    /// For one rank: a sum with one summand.
    Alone,
}

/// Column tiles. Copies use coarser tiles, because each tile is copied to every peer.
pub(super) fn tiles(way: Way, target: &Target, columns: u32, world: u32) -> Vec<Range<u32>> {
    let mut target = target.clone();
    if way == Way::CopyReduce {
        target.max_tiles = (2 * target.max_tiles / world.max(1)).max(1);
    }
    target.column_tiles(columns, 1)
}

/// Minimum number of rows for cutting a two-shot sum into blocks of rows too.
const LEAST_ROWS_TO_CUT: u32 = 128;
/// Columns per tile in that case: whole cache lines and link packets.
const BLOCK_COLUMNS: u32 = 128;
/// Blocks are multiples of this many rows.
const BLOCK_ROWS: u32 = 16;

/// Tiles of a two-shot sum with `rows` rows: column tiles, how they are shared out, and blocks of rows. With many
/// rows, tiles are wide and low, so that all workers get some and a copy writes long contiguous ranges.
pub(super) fn two_shot_tiles(
    target: &Target,
    rows: u32,
    columns: u32,
    world: u32,
) -> (Vec<Range<u32>>, Shares, Vec<Range<u32>>) {
    let mut coarse = target.clone();
    if rows >= LEAST_ROWS_TO_CUT {
        coarse.max_tiles = coarse.max_tiles.min((columns / BLOCK_COLUMNS).max(world));
    }
    let of_blocks = coarse.column_tiles_of_blocks(columns, world);
    let side_by_side = of_blocks.is_some();
    let tiles = of_blocks.unwrap_or_else(|| coarse.column_tiles(columns, 1));
    let of_rank = (tiles.len() as u32 / world.max(1)).max(1);
    // Each rank sends a tile to every other rank. With many ranks, fewer tiles keep down the overhead of their tasks.
    let wanted = if world > 4 { target.workers / 2 } else { target.workers };
    let blocks = if rows >= LEAST_ROWS_TO_CUT { (wanted / of_rank).clamp(1, rows / BLOCK_ROWS) } else { 1 };
    let height = rows.div_ceil(blocks.max(1)).next_multiple_of(BLOCK_ROWS).max(1);
    let blocks = (0..rows.max(1)).step_by(height as usize).map(|first| first..(first + height).min(rows));
    let shares = if side_by_side { Shares::Columns } else { Shares::InTurn };
    (tiles, shares, blocks.collect())
}

/// Adjacent rows that one rank sums, if ranks sum rows. Blocks belong to the ranks in turn, so for any number of rows
/// in use, ranks have about the same share of them. The tile of a product with many rows is inside one block.
pub(crate) const OWNED_ROWS: u32 = 256;

/// Blocks of rows for a two-shot sum of which each rank sums a block of rows, in pieces of whole rows.
pub(super) fn row_blocks(target: &Target, rows: u32, world: u32) -> Vec<Range<u32>> {
    let share = rows / world.max(1);
    let height = share.div_ceil(target.workers.max(1)).next_power_of_two().min(OWNED_ROWS);
    (0..rows).step_by(height as usize).map(|first| first..first + height).collect()
}

/// How a two-shot sum is shared out.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Shares {
    /// Column tiles in turn.
    InTurn,
    /// Each rank has adjacent column tiles, the same number on every rank.
    Columns,
    /// Blocks of [`OWNED_ROWS`] rows in turn.
    Rows,
}

pub(super) struct Sum {
    pub rows: u32,
    /// Column tiles.
    pub tiles: Vec<Range<u32>>,
    pub shares: Shares,
    /// Blocks of rows. Each tile is summed separately in each block.
    pub blocks: Vec<Range<u32>>,
    pub rows_kind: u32,
    /// Element type of the summands.
    pub dtype: DType,
    pub residual: bool,
    pub world: u32,
    pub way: Way,
    /// The producers write their tiles into the receive buffers, each rank's own tiles too.
    pub stored: bool,
}

impl Sum {
    /// The rank that sums a tile of a block, if a single rank does.
    fn owner(&self, (block, tile): (usize, usize)) -> u32 {
        match self.shares {
            Shares::InTurn => tile as u32 % self.world,
            Shares::Columns => (tile / (self.tiles.len() / self.world as usize)) as u32,
            Shares::Rows => self.blocks[block].start / OWNED_ROWS % self.world,
        }
    }

    fn sums(&self, tile: (usize, usize), rank: u32) -> bool {
        self.way != Way::TwoShot || self.owner(tile) == rank
    }

    /// The other ranks, starting with the next one, so that ranks are alike.
    fn peers(&self, rank: u32) -> impl Iterator<Item = u32> {
        let world = self.world;
        (1..world).map(move |step| (rank + step) % world)
    }

    /// Rows and columns of a block.
    fn tile(&self, (block, tile): (usize, usize)) -> Region {
        let (rows, columns) = (&self.blocks[block], &self.tiles[tile]);
        Region::whole(&[self.rows]).with(0, rows.start, rows.end).with(1, columns.start, columns.end)
    }

    /// All pairs (block of rows, column tile) in the order in which `rank` processes them, columns first. If a rank's tiles are
    /// adjacent or it sums rows, it starts with those of the next rank and ends with its own.
    fn all(&self, rank: u32) -> impl Iterator<Item = (usize, usize)> {
        let (blocks, tiles) = (self.blocks.len(), self.tiles.len());
        let next = (rank as usize + 1) % self.world.max(1) as usize;
        let first = if self.shares == Shares::Columns { next * (tiles / self.world as usize) } else { 0 };
        let mut rows: Vec<usize> = (0..blocks).collect();
        if self.shares == Shares::Rows {
            rows.sort_by_key(|&block| (self.owner((block, 0)) + self.world - next as u32) % self.world);
        }
        rows.into_iter().flat_map(move |block| (0..tiles).map(move |t| (block, (first + t) % tiles)))
    }

    /// The columns of a tile in the receive buffer. With two-shot, only a rank's own tiles are there, next to each other.
    fn received(&self, tile: usize) -> Range<u32> {
        if self.way != Way::TwoShot || self.shares == Shares::Rows {
            return self.tiles[tile].clone();
        }
        let before = (0..tile).filter(|&other| self.owner((0, other)) == self.owner((0, tile)));
        let start = before.map(|other| self.tiles[other].end - self.tiles[other].start).sum();
        start..start + (self.tiles[tile].end - self.tiles[tile].start)
    }

    /// Rows and columns of a slot of the receive buffer, the same on all ranks.
    pub fn received_size(&self) -> (u32, u32) {
        let columns = (0..self.tiles.len()).map(|tile| self.received(tile).end).max().unwrap_or(0);
        (self.rows_of_slot(), columns)
    }

    /// Rows of a slot of the receive buffer. If ranks sum rows, only a rank's own rows are there.
    fn rows_of_slot(&self) -> u32 {
        if self.shares == Shares::Rows { self.rows / self.world } else { self.rows }
    }

    /// The region of the ranks' partial values of a tile in the receive buffer.
    fn slots(&self, (block, tile): (usize, usize)) -> Region {
        let (rows, columns) = (&self.blocks[block], self.received(tile));
        let of_slot = self.rows_of_slot();
        let all = Region::whole(&[self.world, of_slot]);
        let start = match self.shares {
            Shares::Rows => rows.start / OWNED_ROWS / self.world * OWNED_ROWS + rows.start % OWNED_ROWS,
            _ => rows.start,
        };
        all.with(1, start, start + (rows.end - rows.start)).with(2, columns.start, columns.end)
    }

    /// Sends partial tiles to the ranks that sum them, with one event per tile.
    pub fn to_owners(&self) -> Step {
        let sends = (0..self.world).map(|rank| {
            let mut sends = Vec::new();
            let mut next_event = vec![0; self.world as usize];
            for tile in self.all(rank) {
                for to in self.peers(rank).filter(|&p| self.sums(tile, p)) {
                    // The receiver numbers the tiles that it sums.
                    let event = next_event[to as usize];
                    next_event[to as usize] += 1;
                    let (source, target) = (Some(self.tile(tile)), self.slots(tile).with(0, rank, rank + 1));
                    sends.push(Send { to, source, target, event });
                }
            }
            sends
        });
        Step::Exchange(Exchange {
            source: Operand::Input(0),
            target: Operand::Buffer(0),
            rows_kind: self.rows_kind,
            sends: sends.collect(),
            rows_per_index: 1,
            between_all: true,
            completes: None,
            beside_producer: true,
        })
    }

    /// Sends sums to all other ranks, with one event.
    pub fn to_others(&self) -> Step {
        let sends = (0..self.world).map(|rank| {
            let own = self.all(rank).filter(|&tile| self.owner(tile) == rank);
            own.flat_map(|tile| {
                let region = self.tile(tile);
                self.peers(rank).map(move |to| Send { to, source: Some(region), target: region, event: 0 })
            })
            .collect()
        });
        Step::Exchange(Exchange {
            source: Operand::Output,
            target: Operand::Output,
            rows_kind: self.rows_kind,
            sends: sends.collect(),
            rows_per_index: 1,
            between_all: true,
            completes: Some(0),
            beside_producer: true,
        })
    }

    /// The reduce tasks. Operands: own partial tile and received slots (or only the flagged ones), and the residual.
    pub fn reduce(&self, received: Operand) -> Step {
        let flagged = self.way == Way::OneShot;
        let own_tiles = if self.stored { received } else { Operand::Input(0) };
        let mut inputs = if flagged { vec![received] } else { vec![own_tiles, received] };
        inputs.extend(self.residual.then_some(Operand::Input(1)));
        let tasks = (0..self.world).map(|rank| {
            let mut tasks = Vec::new();
            for tile in self.all(rank).filter(|&tile| self.sums(tile, rank)) {
                let own = self.tile(tile);
                let received = match self.way {
                    Way::Alone => own,
                    _ => self.slots(tile),
                };
                let mut task = TaskSpec::default();
                if self.stored {
                    task.reads.push(Access::inner(0, received.with(0, rank, rank + 1)));
                }
                let mut read = |region: Region| task.reads.push(Access::new(task.reads.len() as u8, region));
                if !flagged && !self.stored {
                    read(own);
                }
                read(received);
                if self.residual {
                    read(own);
                }
                task.writes.push(Access::new(0, own));
                task.args[0] = own.lo[0] as i32;
                task.cost = own.volume() * (self.dtype.size() * u64::from(self.world) + 8);
                tasks.push(task);
            }
            tasks
        });
        let flags = if flagged { FLAGGED } else { 0 } | if self.residual { RESIDUAL } else { 0 };
        Step::Tasks(TaskStep {
            task_type: core_types::REDUCE,
            inputs,
            outputs: vec![Operand::Output],
            params: vec![self.world, 0, self.rows_kind, flags],
            rank_params: Vec::new(),
            rank_param: Some(1),
            // With one rank, its own partial tile takes the place of the received ones.
            stacked: (self.way == Way::Alone).then_some(1),
            tasks: tasks.collect(),
        })
    }
}

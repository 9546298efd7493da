//! Collectives as slots: which copies, arrivals and sums they are made of, and how these are cut.

use super::{Exchange, GatherPiece, Lowering, Part};
use crate::region::Region;
use crate::split::Sharding;
use crate::target::Target;
use crate::task_graph::core_types;
use crate::task_type::{Access, TaskSpec};
use std::ops::Range;

/// Column tiles of an allreduce. Copies are cut coarser, since each tile is copied to every peer.
pub(crate) fn tiles(lowering: Lowering, target: &Target, columns: u32, world: u32) -> Vec<Range<u32>> {
    let mut target = target.clone();
    if lowering == Lowering::CopyReduce {
        target.max_tiles = (2 * target.max_tiles / world.max(1)).max(1);
    }
    target.column_tiles(columns, 1)
}

/// What each rank sends in a gather of a tensor with these global dimensions and sharding. `None` where ranks hold
/// the same indices.
pub(crate) fn gather_pieces(dims: &[u64], sharding: &Sharding, world: u32) -> Option<Vec<Vec<GatherPiece>>> {
    let Sharding::Split { dim, parts } = sharding else { return None };
    let whole: Vec<u32> = dims.iter().map(|&d| d as u32).collect();
    let mut total = 0;
    let ranks = (0..world)
        .map(|rank| {
            let (mut local, mut global) = (0u64, 0u64);
            let mut pieces = Vec::new();
            for (part, range) in parts.iter().zip(sharding.ranges(rank, world)) {
                let len = range.end - range.start;
                if len > 0 {
                    let (from, to) = (local as u32, (global + range.start) as u32);
                    pieces.push(GatherPiece {
                        source: Region::whole(&whole).with(*dim, from, from + len as u32),
                        target: Region::whole(&whole).with(*dim, to, to + len as u32),
                    });
                }
                local += len;
                global += part.len;
            }
            total += local;
            pieces
        })
        .collect();
    (total == dims[*dim]).then_some(ranks)
}

/// Tasks of the copies of `exchange` on `rank`: for each tile or block in order, one for each peer in order. A
/// rank with nothing to send signals instead. Regions are those of the source.
pub(crate) fn copy_part(exchange: &Exchange, stage: u8, rank: u32, world: u32) -> Part {
    let mut tasks = Vec::new();
    let mut push = |source: Option<Region>, count: u32, bytes: u64| {
        for _ in 0..count {
            tasks.push(TaskSpec {
                reads: source.iter().map(|r| Access::new(0, *r)).collect(),
                cost: bytes,
                ..TaskSpec::default()
            });
        }
    };
    match exchange.lowering {
        Lowering::Gather => {
            let peers = if exchange.to_self { world } else { world - 1 };
            for piece in &exchange.pieces[rank as usize] {
                push(Some(piece.source), peers, 8 * piece.source.volume());
            }
            if exchange.pieces[rank as usize].is_empty() {
                push(None, peers, 1);
            }
        }
        _ => {
            for (index, tile) in exchange.tiles.iter().enumerate() {
                let source = column_tile(exchange, tile);
                let owner = exchange.owner(index, world);
                let count = match (exchange.lowering, stage) {
                    (Lowering::TwoShot, 0) => u32::from(owner != rank),
                    (Lowering::TwoShot, _) if owner != rank => 0,
                    _ => world - 1,
                };
                push(Some(source), count, 8 * source.volume());
            }
        }
    }
    Part {
        type_name: core_types::NVSHMEM_COPY.into(),
        params: vec![exchange.rows_kind],
        scratch_bytes: 0,
        tasks,
    }
}

/// Where each task of [`copy_part`] sends: (tile or piece, peer); the piece is `None` for a mere signal.
pub(crate) fn copy_targets(
    exchange: &Exchange,
    stage: u8,
    rank: u32,
    world: u32,
) -> Vec<(Option<usize>, u32)> {
    let peers = |with_self: bool| (0..world).filter(move |&p| with_self || p != rank);
    match exchange.lowering {
        Lowering::Gather => {
            let pieces = exchange.pieces[rank as usize].len();
            if pieces == 0 {
                return peers(exchange.to_self).map(|p| (None, p)).collect();
            }
            (0..pieces).flat_map(|i| peers(exchange.to_self).map(move |p| (Some(i), p))).collect()
        }
        Lowering::TwoShot if stage == 0 => (0..exchange.tiles.len())
            .map(|i| (Some(i), exchange.owner(i, world)))
            .filter(|(_, owner)| *owner != rank)
            .collect(),
        Lowering::TwoShot => (0..exchange.tiles.len())
            .filter(|&i| exchange.owner(i, world) == rank)
            .flat_map(|i| peers(false).map(move |p| (Some(i), p)))
            .collect(),
        _ => (0..exchange.tiles.len()).flat_map(|i| peers(false).map(move |p| (Some(i), p))).collect(),
    }
}

/// What arrives on `rank`: one "task" for each event that peers trigger.
pub(crate) fn arrive_part(exchange: &Exchange, stage: u8, rank: u32, world: u32) -> Part {
    let mut tasks: Vec<TaskSpec> = Vec::new();
    let received = |tile: &Range<u32>| Region::whole(&[world, exchange.rows]).with(2, tile.start, tile.end);
    match (exchange.lowering, stage) {
        (Lowering::Gather, _) => {
            let mut task = TaskSpec::default();
            for (source, pieces) in exchange.pieces.iter().enumerate() {
                if source as u32 != rank || exchange.to_self {
                    task.writes.extend(pieces.iter().map(|p| Access::new(0, p.target)));
                }
            }
            tasks.push(task);
        }
        (Lowering::TwoShot, 1) => {
            let mut task = TaskSpec::default();
            for (index, tile) in exchange.tiles.iter().enumerate() {
                if exchange.owner(index, world) != rank {
                    task.writes.push(Access::new(0, column_tile(exchange, tile)));
                }
            }
            tasks.push(task);
        }
        _ => {
            for (index, tile) in exchange.tiles.iter().enumerate() {
                if exchange.lowering != Lowering::TwoShot || exchange.owner(index, world) == rank {
                    let mut task = TaskSpec::default();
                    task.writes.push(Access::new(0, received(tile)));
                    tasks.push(task);
                }
            }
        }
    }
    Part { type_name: String::new(), params: Vec::new(), scratch_bytes: 0, tasks }
}

/// Triggers of each event of [`arrive_part`].
pub(crate) fn arrive_triggers(exchange: &Exchange, stage: u8, rank: u32, world: u32) -> Vec<u32> {
    match (exchange.lowering, stage) {
        (Lowering::Gather, _) => {
            let from = |source: u32| exchange.pieces[source as usize].len().max(1) as u32;
            vec![(0..world).filter(|&s| s != rank || exchange.to_self).map(from).sum()]
        }
        (Lowering::TwoShot, 0) => vec![world - 1; exchange.owned(rank, world) as usize],
        (Lowering::TwoShot, _) => vec![exchange.tiles.len() as u32 - exchange.owned(rank, world)],
        (Lowering::CopyReduce, _) => vec![world - 1; exchange.tiles.len()],
        (Lowering::OneShot | Lowering::Alone, _) => Vec::new(),
    }
}

/// Number of events that peers trigger on `rank` for `exchange`.
pub(crate) fn num_remote_events(exchange: &Exchange, rank: u32, world: u32) -> u32 {
    let second = if exchange.lowering == Lowering::TwoShot { 1 } else { 0 };
    arrive_triggers(exchange, 0, rank, world).len() as u32 + second
}

/// The event on `peer` that a copy of `tile` triggers, counted from the exchange's first there.
pub(crate) fn remote_event(
    exchange: &Exchange,
    stage: u8,
    tile: Option<usize>,
    peer: u32,
    world: u32,
) -> u32 {
    match (exchange.lowering, stage) {
        (Lowering::TwoShot, 0) => tile.unwrap_or(0) as u32 / world,
        (Lowering::TwoShot, _) => exchange.owned(peer, world),
        (Lowering::Gather, _) => 0,
        _ => tile.unwrap_or(0) as u32,
    }
}

/// The sums of `rank`. Operands: own partial tile and received slots (or the flagged ones alone), the residual.
pub(crate) fn reduce_part(exchange: &Exchange, residual: bool, rank: u32, world: u32) -> Part {
    let flagged = exchange.lowering == Lowering::OneShot;
    let mut tasks = Vec::new();
    for (index, tile) in exchange.tiles.iter().enumerate() {
        if exchange.lowering == Lowering::TwoShot && exchange.owner(index, world) != rank {
            continue;
        }
        let own = column_tile(exchange, tile);
        let received = match exchange.lowering {
            Lowering::Alone => own,
            _ => Region::whole(&[world, exchange.rows]).with(2, tile.start, tile.end),
        };
        let mut task = TaskSpec::default();
        let mut operand = 0;
        let mut read = |region: Region| {
            task.reads.push(Access::new(operand, region));
            operand += 1;
        };
        if !flagged {
            read(own);
        }
        read(received);
        if residual {
            read(own);
        }
        task.writes.push(Access::new(0, own));
        task.cost = own.volume() * 4 * u64::from(world + 2);
        tasks.push(task);
    }
    let flags = u32::from(flagged) | (u32::from(residual) << 1);
    Part {
        type_name: core_types::REDUCE.into(),
        params: vec![world, rank, exchange.rows_kind, flags],
        scratch_bytes: 0,
        tasks,
    }
}

fn column_tile(exchange: &Exchange, tile: &Range<u32>) -> Region {
    Region::whole(&[exchange.rows]).with(1, tile.start, tile.end)
}

//! The blocks that move between ranks when a tensor's sharding changes.

use super::contract::{Operand, TaskStep};
use crate::op_graph::Rows;
use crate::region::{MAX_DIMS, Region};
use crate::split::Sharding;
use crate::target::Target;
use crate::task_graph::core_types;
use crate::task_type::{Access, TaskSpec};
use crate::tuning::Knob;

/// A copy is one task, so the time of a large block is that of one worker. Therefore blocks are sent in pieces.
pub(super) const PIECE_BYTES: Knob = Knob {
    name: "allgather.piece_bytes",
    default: 4 << 10,
    candidates: &[2 << 10, 4 << 10, 8 << 10, 16 << 10, 1 << 30],
    about: "blocks that ranks send to each other are cut into pieces of at least so many bytes, at most one for each worker",
};

/// A block that one rank holds and that another rank needs, or the same rank needs at another place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The rank that needs the block.
    pub to: u32,
    /// Its place in the holder's tensor.
    pub source: Region,
    /// Its place in the receiver's tensor.
    pub target: Region,
}

/// One piece of a rank's share of a dimension.
#[derive(Clone, Copy)]
struct Piece {
    local: u64,
    global: u64,
    len: u64,
}

/// The pieces that `rank` holds of the split dimension. Without a split, all of dimension 0.
fn pieces(dims: &[u64], sharding: &Sharding, rank: u32, world: u32) -> (usize, Vec<Piece>) {
    let Sharding::Split { dim, parts } = sharding else {
        return (0, vec![Piece { local: 0, global: 0, len: dims[0] }]);
    };
    let (mut local, mut start, mut held) = (0, 0, Vec::new());
    for (part, range) in parts.iter().zip(sharding.ranges(rank, world)) {
        let len = range.end - range.start;
        if len > 0 {
            held.push(Piece { local, global: start + range.start, len });
        }
        local += len;
        start += part.len;
    }
    (*dim, held)
}

/// The pieces that `rank` sends. Pieces that a lower rank holds too are sent by that rank.
fn sent(dims: &[u64], sharding: &Sharding, rank: u32, world: u32) -> (usize, Vec<Piece>) {
    let (dim, mut own) = pieces(dims, sharding, rank, world);
    for lower in 0..rank {
        for other in pieces(dims, sharding, lower, world).1 {
            // Shares of a part are in rank order, so a lower rank covers the beginning.
            for piece in &mut own {
                let end = other.global + other.len;
                if other.global <= piece.global && end > piece.global {
                    let shared = (end - piece.global).min(piece.len);
                    piece.local += shared;
                    piece.global += shared;
                    piece.len -= shared;
                }
            }
        }
    }
    own.retain(|p| p.len > 0);
    (dim, own)
}

/// True if an index of a tensor with these dimensions is on more than one rank.
pub(super) fn overlaps(dims: &[u64], sharding: &Sharding, world: u32) -> bool {
    let held: u64 = (0..world).flat_map(|r| pieces(dims, sharding, r, world).1).map(|p| p.len).sum();
    let dim = if let Sharding::Split { dim, .. } = sharding { *dim } else { 0 };
    held != dims[dim]
}

/// The moves of each rank that change the sharding of a tensor with global dimensions `dims` from `from` (split or replicated) to
/// `to`. For a replicated tensor, every rank has its share already.
pub fn moves(dims: &[u64], from: &Sharding, to: &Sharding, world: u32) -> Vec<Vec<Move>> {
    let wanted: Vec<(usize, Vec<Piece>)> = (0..world).map(|r| pieces(dims, to, r, world)).collect();
    (0..world)
        .map(|rank| {
            let replicated = *from == Sharding::Replicated;
            let (from_dim, own) =
                if replicated { pieces(dims, from, rank, world) } else { sent(dims, from, rank, world) };
            let mut list = Vec::new();
            for piece in &own {
                for (receiver, (to_dim, pieces)) in wanted.iter().enumerate() {
                    if replicated && receiver as u32 != rank {
                        continue;
                    }
                    for other in pieces {
                        list.extend(
                            meet(dims, (from_dim, piece), (*to_dim, other)).map(|(source, target)| Move {
                                to: receiver as u32,
                                source,
                                target,
                            }),
                        );
                    }
                }
            }
            list
        })
        .collect()
}

/// The overlap of two pieces, as the holder and the receiver see it.
fn meet(
    dims: &[u64],
    (from_dim, from): (usize, &Piece),
    (to_dim, to): (usize, &Piece),
) -> Option<(Region, Region)> {
    let whole: Vec<u32> = dims.iter().map(|&d| d as u32).collect();
    let at = |region: Region, dim: usize, start: u64, len: u64| {
        region.with(dim, start as u32, (start + len) as u32)
    };
    let whole = Region::whole(&whole);
    if from_dim == to_dim {
        let first = from.global.max(to.global);
        let len = (from.global + from.len).min(to.global + to.len).checked_sub(first).filter(|&l| l > 0)?;
        let source = at(whole, from_dim, from.local + first - from.global, len);
        return Some((source, at(whole, to_dim, to.local + first - to.global, len)));
    }
    let source = at(at(whole, from_dim, from.local, from.len), to_dim, to.global, to.len);
    let target = at(at(whole, to_dim, to.local, to.len), from_dim, from.global, from.len);
    Some((source, target))
}

/// Cuts a block of elements of `size` bytes into pieces for the workers of `machine`, which also send to the other `peers` - 1 peers. The
/// pieces are whole in the last dimensions as far as possible.
pub(super) fn cut(block: Move, size: u64, peers: u32, machine: &Target) -> Vec<Move> {
    let bytes = block.source.volume() * size;
    let most = u64::from(machine.max_tiles / peers.max(1)).max(1);
    let mut wanted = (bytes / machine.tuned(&PIECE_BYTES).max(1)).clamp(1, most) as u32;
    let mut pieces = vec![block];
    for dim in 0..MAX_DIMS {
        let extent = block.source.hi[dim] - block.source.lo[dim];
        // The last dimension that is longer than 1 may be that of columns.
        let is_last = (dim + 1..MAX_DIMS).all(|d| block.source.hi[d] - block.source.lo[d] <= 1);
        let unit = if is_last { machine.column_unit.max(1) } else { 1 };
        let units = extent.div_ceil(unit);
        let count = units.min(wanted).max(1);
        if count > 1 {
            let at = |i: u32| (u64::from(units) * u64::from(i) / u64::from(count)) as u32 * unit;
            let part = |region: Region, i: u32| {
                let (first, end) = (at(i), at(i + 1).min(extent));
                region.with(dim, region.lo[dim] + first, region.lo[dim] + end)
            };
            let parts = |m: Move| {
                (0..count).map(move |i| Move {
                    to: m.to,
                    source: part(m.source, i),
                    target: part(m.target, i),
                })
            };
            pieces = pieces.into_iter().flat_map(parts).collect();
        }
        wanted /= count;
    }
    pieces
}

/// Tasks that move the blocks that each rank holds itself (`list` has those of each rank) from `source` to `target`, cut along
/// the last dimension.
pub fn local_copies(
    list: &[Vec<Move>],
    (source, target): (Operand, Operand),
    last_dim: usize,
    rows_kind: u32,
    machine: &Target,
) -> TaskStep {
    let tasks = list.iter().map(|moves| {
        let mut tasks = Vec::new();
        for m in moves {
            let len = m.source.hi[last_dim] - m.source.lo[last_dim];
            for tile in machine.column_tiles(len, 1) {
                let cut =
                    |r: Region| r.with(last_dim, r.lo[last_dim] + tile.start, r.lo[last_dim] + tile.end);
                let mut task = TaskSpec { cost: 8 * cut(m.source).volume(), ..TaskSpec::default() };
                task.reads.push(Access::new(0, cut(m.source)));
                task.writes.push(Access::new(0, cut(m.target)));
                tasks.push(task);
            }
        }
        tasks
    });
    TaskStep {
        task_type: core_types::NVSHMEM_COPY,
        inputs: vec![source],
        outputs: vec![target],
        params: vec![rows_kind],
        rank_params: Vec::new(),
        rank_param: None,
        stacked: None,
        tasks: tasks.collect(),
    }
}

/// The number that tells copies and sums which rows of a tensor are in use.
pub fn rows_kind(rows: Rows) -> u32 {
    match rows {
        Rows::Tokens => 0,
        Rows::Samples => 1,
        Rows::Fixed => 2,
    }
}

/// The same for blocks of a tensor that is cut in `dims_cut`. Only whole rows can be counted.
pub(super) fn rows_kind_of_blocks(dims: &[u64], cut: &[Option<usize>], rows: Rows) -> u32 {
    if dims.len() == 2 && !cut.contains(&Some(0)) { rows_kind(rows) } else { rows_kind(Rows::Fixed) }
}

/// The dimension that a sharding splits.
pub(super) fn split_dim(sharding: &Sharding) -> Option<usize> {
    match sharding {
        Sharding::Split { dim, .. } => Some(*dim),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::split::{Part, Split};

    /// Each value is its global index. After the moves, each rank must hold what its new share says.
    fn check(dims: [u64; 2], from: &Sharding, to: &Sharding, world: u32) {
        let locals = |sharding: &Sharding, rank: u32| -> (Vec<u64>, Vec<u64>) {
            let (dim, held) = pieces(&dims, sharding, rank, world);
            let local = sharding.local_dims(&dims, rank, world);
            let index = |d: usize, i: u64| {
                let piece = held.iter().find(|p| d == dim && p.local <= i && i < p.local + p.len);
                piece.map_or(i, |p| p.global + i - p.local)
            };
            let values = (0..local[0])
                .flat_map(|r| (0..local[1]).map(move |c| (r, c)))
                .map(|(r, c)| index(0, r) * dims[1] + index(1, c))
                .collect();
            (local, values)
        };
        let mut got: Vec<Vec<Option<u64>>> = (0..world).map(|r| vec![None; locals(to, r).1.len()]).collect();
        for (rank, list) in moves(&dims, from, to, world).into_iter().enumerate() {
            let (local, values) = locals(from, rank as u32);
            for m in list {
                let width = locals(to, m.to).0[1];
                assert_eq!(m.source.volume(), m.target.volume());
                for r in 0..m.source.hi[0] - m.source.lo[0] {
                    for c in 0..m.source.hi[1] - m.source.lo[1] {
                        let value = values[(u64::from(m.source.lo[0] + r) * local[1]
                            + u64::from(m.source.lo[1] + c))
                            as usize];
                        let place = u64::from(m.target.lo[0] + r) * width + u64::from(m.target.lo[1] + c);
                        let slot = &mut got[m.to as usize][place as usize];
                        assert_eq!(*slot, None, "written twice");
                        *slot = Some(value);
                    }
                }
            }
        }
        for (rank, got) in got.into_iter().enumerate() {
            let wanted: Vec<Option<u64>> = locals(to, rank as u32).1.into_iter().map(Some).collect();
            assert_eq!(got, wanted, "{from:?} to {to:?}, rank {rank} of {world}");
        }
    }

    /// A block of many columns is copied in pieces that lie side by side.
    #[test]
    fn local_copies_cover_their_blocks_once() {
        let whole = Region::whole(&[4, 20]);
        let block = Region { lo: [0, 40, 0, 0], hi: [4, 60, 1, 1] };
        let list = [vec![Move { to: 0, source: whole, target: block }]];
        let step = local_copies(&list, (Operand::Input(0), Operand::Output), 1, 0, &Target::cpu(3));
        let columns = |a: &Access| (a.region.lo[1], a.region.hi[1]);
        let reads: Vec<_> = step.tasks[0].iter().map(|t| columns(&t.reads[0])).collect();
        let writes: Vec<_> = step.tasks[0].iter().map(|t| columns(&t.writes[0])).collect();
        assert_eq!((reads, writes), (vec![(0, 16), (16, 20)], vec![(40, 56), (56, 60)]));
    }

    /// A large block is sent in pieces that cover it once, and keep their places in source and target.
    #[test]
    fn pieces_cover_their_block_once() {
        let machine = Target { max_tiles: 132, ..Target::cpu(132) };
        let block = |dims: &[u32]| {
            let source = Region::whole(dims);
            let mut target = source;
            (target.lo[0], target.hi[0]) = (source.lo[0] + 5, source.hi[0] + 5);
            Move { to: 1, source, target }
        };
        let cases: [(&[u32], u64, u32, usize); 8] = [
            (&[1, 33, 8, 260], 4, 1, 66), // 274,560 bytes: two pieces for each of 33 parts
            (&[1, 33, 8, 260], 4, 3, 33), // three peers share 132 workers
            (&[1, 12, 8, 260], 4, 3, 24),
            (&[8, 128], 4, 1, 1), // 4 KiB
            (&[1, 75_968], 4, 1, 74),
            (&[4, 1000], 2, 1, 1),
            (&[300, 4096], 4, 1, 132),
            (&[16_384], 1, 1, 4),
        ];
        for (dims, size, peers, count) in cases {
            let whole = block(dims);
            let pieces = cut(whole, size, peers, &machine);
            assert_eq!(pieces.len(), count, "{dims:?}");
            assert_eq!(
                pieces.iter().map(|p| p.source.volume()).sum::<u64>(),
                whole.source.volume(),
                "{dims:?}"
            );
            for (i, piece) in pieces.iter().enumerate() {
                assert!(!piece.source.is_empty() && whole.source.contains(&piece.source));
                assert!(pieces[i + 1..].iter().all(|other| !other.source.overlaps(&piece.source)));
                for d in 0..MAX_DIMS {
                    let shift = if d == 0 { 5 } else { 0 };
                    assert_eq!(piece.target.lo[d], piece.source.lo[d] + shift);
                    assert_eq!(piece.target.hi[d], piece.source.hi[d] + shift);
                }
            }
        }
    }

    #[test]
    fn every_rank_gets_its_new_share_once() {
        let even = |unit| Split::Even { unit };
        let heads = Split::KeyValues { heads: 4, kv_heads: 2, head_dim: 5 };
        let dims = [6, 20];
        let shardings = [
            Sharding::Replicated,
            Sharding::split(0, 6, even(1)),
            Sharding::split(1, 20, even(1)),
            Sharding::split(1, 20, even(4)),
            Sharding::Split {
                dim: 1,
                parts: vec![Part { len: 8, split: even(1) }, Part { len: 12, split: even(2) }],
            },
            Sharding::Split {
                dim: 1,
                parts: vec![Part { len: 10, split: heads }, Part { len: 10, split: heads }],
            },
        ];
        for world in [1, 2, 4] {
            for from in &shardings {
                for to in &shardings {
                    check(dims, from, to, world);
                }
            }
        }
        check([3, 2], &Sharding::split(1, 2, even(1)), &Sharding::split(0, 3, even(1)), 5);
    }
}

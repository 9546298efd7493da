//! The blocks that move between ranks when a tensor's sharding changes.

use super::contract::{Operand, TaskStep};
use crate::op_graph::Rows;
use crate::region::{MAX_DIMS, Region};
use crate::split::Sharding;
use crate::target::{Target, even_ranges};
use crate::task_graph::core_types;
use crate::task_type::{Access, TaskSpec};
use crate::tuning::Knob;
use std::ops::Range;

/// A copy is one task, so a large block takes the time of one worker. `allgather` therefore sends it in pieces.
pub(super) const PIECE_BYTES: Knob = Knob {
    name: "allgather.piece_bytes",
    default: 4 << 10,
    candidates: &[1 << 10, 4 << 10, 16 << 10, 1 << 30],
    about: "where stores reach all ranks, an allgather sends in pieces of about so many bytes, at most one for each worker",
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

/// A contiguous part of what a rank holds of a dimension.
#[derive(Clone, Copy)]
struct Share {
    local: u64,
    global: u64,
    len: u64,
}

/// The shares that `rank` holds of the split dimension. Without a split, all of dimension 0.
fn shares(dims: &[u64], sharding: &Sharding, rank: u32, world: u32) -> (usize, Vec<Share>) {
    let Sharding::Split { dim, parts } = sharding else {
        return (0, vec![Share { local: 0, global: 0, len: dims[0] }]);
    };
    let (mut local, mut start, mut held) = (0, 0, Vec::new());
    for (part, range) in parts.iter().zip(sharding.ranges(rank, world)) {
        let len = range.end - range.start;
        if len > 0 {
            held.push(Share { local, global: start + range.start, len });
        }
        local += len;
        start += part.len;
    }
    (*dim, held)
}

/// The shares that `rank` sends. Those that a lower rank holds too are sent by that rank.
fn sent(dims: &[u64], sharding: &Sharding, rank: u32, world: u32) -> (usize, Vec<Share>) {
    let (dim, mut own) = shares(dims, sharding, rank, world);
    for lower in 0..rank {
        for other in shares(dims, sharding, lower, world).1 {
            // Shares of a part are in rank order, so a lower rank covers the beginning.
            for share in &mut own {
                let end = other.global + other.len;
                if other.global <= share.global && end > share.global {
                    let both = (end - share.global).min(share.len);
                    share.local += both;
                    share.global += both;
                    share.len -= both;
                }
            }
        }
    }
    own.retain(|p| p.len > 0);
    (dim, own)
}

/// True if an index of a tensor with these dimensions is on more than one rank.
pub(super) fn overlaps(dims: &[u64], sharding: &Sharding, world: u32) -> bool {
    let held: u64 = (0..world).flat_map(|r| shares(dims, sharding, r, world).1).map(|p| p.len).sum();
    let dim = if let Sharding::Split { dim, .. } = sharding { *dim } else { 0 };
    held != dims[dim]
}

/// The moves of each rank that change the sharding of a tensor with global dimensions `dims` from `from` (split or replicated) to
/// `to`. For a replicated tensor, every rank has its share already.
pub fn moves(dims: &[u64], from: &Sharding, to: &Sharding, world: u32) -> Vec<Vec<Move>> {
    let wanted: Vec<(usize, Vec<Share>)> = (0..world).map(|r| shares(dims, to, r, world)).collect();
    (0..world)
        .map(|rank| {
            let replicated = *from == Sharding::Replicated;
            let (from_dim, own) =
                if replicated { shares(dims, from, rank, world) } else { sent(dims, from, rank, world) };
            let mut list = Vec::new();
            for share in &own {
                for (receiver, (to_dim, shares)) in wanted.iter().enumerate() {
                    if replicated && receiver as u32 != rank {
                        continue;
                    }
                    for other in shares {
                        list.extend(
                            meet(dims, (from_dim, share), (*to_dim, other)).map(|(source, target)| Move {
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

/// The overlap of two shares, as the holder and the receiver see it.
fn meet(
    dims: &[u64],
    (from_dim, from): (usize, &Share),
    (to_dim, to): (usize, &Share),
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

/// Cuts a block into `most` pieces at most, if each has about the bytes that [`PIECE_BYTES`] says. An element has `size` bytes. Where only
/// rows in use are sent (`counts_rows`), every piece has all rows if possible, since a piece of unused rows would send nothing.
pub(super) fn in_pieces(block: Move, size: u64, most: u32, counts_rows: bool, machine: &Target) -> Vec<Move> {
    let source = block.source;
    let last = (0..MAX_DIMS).rev().find(|&dim| source.hi[dim] - source.lo[dim] > 1).unwrap_or(0);
    let bytes = source.volume() * size / machine.tuned(&PIECE_BYTES).max(1);
    let mut wanted = bytes.clamp(1, most.max(1).into()) as u32;
    let mut dims: Vec<usize> = (0..=last).collect();
    if counts_rows {
        dims.reverse();
    }
    let mut pieces = vec![block];
    for dim in dims {
        // Pieces of columns begin at multiples of the unit, so that copies stay aligned.
        let unit = if dim == last { machine.column_unit.max(1) } else { 1 };
        let extent = source.hi[dim] - source.lo[dim];
        let count = extent.div_ceil(unit).min(wanted);
        wanted /= count.max(1);
        if count < 2 {
            continue;
        }
        let part = |region: Region, range: &Range<u32>| {
            region.with(dim, region.lo[dim] + range.start, region.lo[dim] + range.end)
        };
        let ranges: Vec<Range<u32>> = even_ranges(extent, unit, count).collect();
        let parts = |m: &Move| -> Vec<Move> {
            let cut = |range| Move { to: m.to, source: part(m.source, range), target: part(m.target, range) };
            ranges.iter().map(cut).collect()
        };
        pieces = pieces.iter().flat_map(parts).collect();
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
            let (dim, held) = shares(&dims, sharding, rank, world);
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
        let machine = Target::cpu(132);
        let block = |dims: &[u32]| {
            let source = Region::whole(dims);
            Move { to: 1, source, target: source.with(0, source.lo[0] + 5, source.hi[0] + 5) }
        };
        // Dimensions, bytes of an element, most pieces, whether rows are counted; number of pieces, and elements of the smallest and of
        // the largest one.
        type Case = (&'static [u32], u64, u32, bool, usize, (u64, u64));
        let cases: [Case; 10] = [
            (&[1, 33, 8, 260], 4, 132, false, 66, (1040, 1040)),
            (&[1, 33, 8, 260], 4, 44, false, 33, (2080, 2080)),
            (&[1, 12, 8, 260], 4, 44, false, 24, (1040, 1040)),
            (&[8, 128], 4, 132, false, 1, (1024, 1024)), // 4 KiB
            (&[1, 75_968], 4, 132, false, 74, (1024, 1040)),
            (&[2, 4100], 4, 132, false, 8, (1024, 1028)),
            (&[300, 4096], 4, 132, false, 132, (2 * 4096, 3 * 4096)),
            (&[300, 4096], 4, 132, true, 132, (300 * 16, 300 * 32)),
            (&[128, 75_968], 4, 132, true, 132, (128 * 560, 128 * 576)),
            (&[16_384], 1, 132, false, 4, (4096, 4096)),
        ];
        for (dims, size, most, counts_rows, count, sizes) in cases {
            let whole = block(dims);
            let pieces = in_pieces(whole, size, most, counts_rows, &machine);
            assert_eq!(pieces.len(), count, "{dims:?}");
            let volumes = || pieces.iter().map(|p| p.source.volume());
            assert_eq!(volumes().sum::<u64>(), whole.source.volume(), "{dims:?}");
            assert_eq!((volumes().min(), volumes().max()), (Some(sizes.0), Some(sizes.1)), "{dims:?}");
            for (i, piece) in pieces.iter().enumerate() {
                assert!(whole.source.contains(&piece.source));
                assert!(pieces[i + 1..].iter().all(|other| !other.source.overlaps(&piece.source)));
                assert!(piece.source.lo[dims.len() - 1].is_multiple_of(machine.column_unit));
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

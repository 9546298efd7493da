//! `allreduce`: gives every rank the sum of a partial tensor over the ranks.

use super::contract::{
    Alone, Buffer, Collective, CollectiveOp, Consumer, Exchange, Lowered, Operand, Send, Step, TaskStep,
};
use super::hierarchical::Hierarchical;
use super::moves::rows_kind;
use crate::attribute::{Attribute, AttributeKind};
use crate::dtype::DType;
use crate::op_graph::Attrs;
use crate::region::Region;
use crate::split::Sharding;
use crate::target::{Backend, Target};
use crate::task_graph::{Allreduce, core_types};
use crate::task_type::{Access, Need, OpError, OpView, OperandView, ShardRule, TaskSpec, TensorType};
use crate::tuning::Knob;
use crate::words::counted;
use std::ops::Range;

/// `allreduce(x [, residual])`: the sum of a partial f32 tensor `[rows, columns]` over the ranks, in rank order. The residual is
/// added once. Attribute `dtype` (`f32`, `bf16`, `f16`): element type of the result; the default is f32.
///
/// All lowerings sum in rank order and give the same bits, except `hierarchical`: it first sums each node's ranks, then the nodes.
#[derive(Debug)]
pub struct AllReduce;

/// The attribute `dtype` of summing collectives.
pub(super) const SUM: &[Attribute] = &[Attribute::new("dtype", AttributeKind::DType)];

/// Largest sum that [`Allreduce::Auto`] pushes as flagged words.
const ONE_SHOT_BYTES: Knob = Knob {
    name: "allreduce.one_shot_bytes",
    default: 256 << 10,
    candidates: &[0, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20],
    about: "largest sum (bytes of one rank's part) for which --allreduce auto uses one-shot",
};

/// Largest sum (bytes of one rank's part) that is pushed if one-shot is requested. A rank receives twice the bytes of every rank's
/// part, in memory that only its graph uses: 32 MiB with four ranks. For larger sums two-shot sends fewer bytes.
const MOST_ONE_SHOT_BYTES: u64 = 4 << 20;

/// Bits of the last parameter of a `reduce` task.
const FLAGGED: u32 = 1;
const RESIDUAL: u32 = 2;

/// The ways to carry out an allreduce.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    CopyReduce,
    OneShot,
    TwoShot,
    /// For several nodes; see `hierarchical.rs`.
    Hierarchical,
    /// For one rank: a sum with one summand.
    Alone,
}

impl Collective for AllReduce {
    fn name(&self) -> &'static str {
        "allreduce"
    }

    fn attributes(&self) -> &'static [Attribute] {
        SUM
    }

    fn knobs(&self) -> &'static [&'static Knob] {
        &[&ONE_SHOT_BYTES]
    }

    fn infer(&self, op: &OpView<'_>) -> Result<TensorType, OpError> {
        let Some(input) = op.inputs.first().filter(|_| op.inputs.len() <= 2) else {
            return Err(OpError(format!(
                "allreduce takes a tensor and an optional residual, but {} inputs are given",
                op.inputs.len()
            )));
        };
        let dtype = sum_type(self.name(), op)?;
        if let Some(residual) = op.inputs.get(1)
            && (residual.ty.dims != input.ty.dims || residual.ty.dtype != DType::F32)
        {
            return Err(OpError(format!(
                "the residual `{}` is {} {:?}, but the sum is f32 {:?}; the dimensions must agree",
                residual.name, residual.ty.dtype, residual.ty.dims, input.ty.dims
            )));
        }
        Ok(TensorType { dtype, ..input.ty.clone() })
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        check_partial(self.name(), op, world)?;
        let mut inputs = vec![Need::Replicated; op.inputs.len()];
        inputs[0] = Need::AsIs;
        Ok(ShardRule { inputs, outputs: vec![Sharding::Replicated] })
    }

    fn reshards(&self, tensor: &OperandView<'_>, to: &Sharding) -> Option<Attrs> {
        (can_sum(tensor) && *to == Sharding::Replicated).then(Attrs::new)
    }

    fn alone(&self, op: &OpView<'_>) -> Alone {
        let dtype = op.outputs.first().map(|o| o.ty.dtype);
        match op.inputs.as_slice() {
            [input] if dtype == Some(input.ty.dtype) => Alone::Identity,
            [_, _] if dtype == Some(DType::F32) => Alone::Sum,
            _ => Alone::Lowered,
        }
    }

    /// Includes a sum of the result and a residual. The residual is added once, after the ranks' summands.
    fn absorb(&self, op: &OpView<'_>, consumer: &Consumer<'_>) -> Option<Attrs> {
        // a + b equals b + a bit for bit, so the allreduce may be either operand.
        let residual = consumer.view.inputs.get(1 - consumer.input.min(1))?;
        let (sum, output) = (&op.outputs.first()?.ty, consumer.view.outputs.first()?);
        let fits = consumer.is_sum
            && consumer.view.inputs.len() == 2
            && op.inputs.len() == 1
            && sum.dtype == DType::F32
            && residual.ty.dtype == DType::F32
            && *residual.sharding == Sharding::Replicated
            && residual.ty.dims == sum.dims
            && output.ty.dtype.is_float();
        fits.then(|| {
            let mut attrs = op.attrs.clone();
            attrs.insert("dtype".into(), output.ty.dtype.name().into());
            attrs
        })
    }

    fn lower(&self, op: &CollectiveOp<'_>) -> Result<Lowered, OpError> {
        let (source, world) = (&op.view.inputs[0], op.world());
        let mut lowered = Lowered::default();
        let way = choose(op, &mut lowered.notes);
        if way == Way::Hierarchical {
            let columns = source.ty.dims[1] as u32;
            let over_nodes = Hierarchical {
                rows: source.ty.dims[0] as u32,
                columns,
                tiles: tiles(way, &op.options.target, columns, world),
                rows_kind: rows_kind(source.ty.rows),
                residual: op.view.inputs.len() == 2,
                nodes: &op.options.nodes,
            };
            return Ok(Lowered { notes: lowered.notes, ..over_nodes.lower() });
        }
        let (rows, columns) = (source.ty.dims[0] as u32, source.ty.dims[1] as u32);
        let (tiles, side_by_side, blocks) = match way {
            Way::TwoShot => two_shot_tiles(&op.options.target, rows, columns, world),
            _ => (tiles(way, &op.options.target, columns, world), false, std::iter::once(0..rows).collect()),
        };
        lowered.dealt = side_by_side.then_some(1);
        let sum = Sum {
            rows,
            tiles,
            side_by_side,
            blocks,
            rows_kind: rows_kind(source.ty.rows),
            residual: op.view.inputs.len() == 2,
            world,
            way,
        };
        let received = |dtype, by_sender| Buffer {
            suffix: ".received",
            dtype,
            dims: vec![world, sum.rows, sum.received_columns()],
            by_sender,
        };
        match way {
            Way::Alone => lowered.steps.push(sum.reduce(Operand::Input(0))),
            Way::OneShot => {
                lowered.push = Some(0);
                lowered.buffers.push(received(DType::F32Flagged, false));
                lowered.steps.push(sum.reduce(Operand::Buffer(0)));
            }
            Way::CopyReduce | Way::TwoShot | Way::Hierarchical => {
                lowered.buffers.push(received(DType::F32, true));
                lowered.steps.push(sum.to_owners());
                lowered.steps.push(sum.reduce(Operand::Buffer(0)));
                if way == Way::TwoShot {
                    lowered.steps.push(sum.to_others());
                }
            }
        }
        Ok(lowered)
    }
}

/// The element type of a sum over the ranks, for collectives with an f32 input `[rows, columns]`.
pub(super) fn sum_type(name: &str, op: &OpView<'_>) -> Result<DType, OpError> {
    let input = &op.inputs[0];
    if input.ty.dtype != DType::F32 {
        return Err(OpError(format!(
            "{name} sums f32 tensors, but `{}` is {}; let its producer write f32",
            input.name, input.ty.dtype
        )));
    }
    if input.ty.dims.len() != 2 {
        return Err(OpError(format!(
            "{name} takes a tensor [rows, columns], but `{}` is {:?}",
            input.name, input.ty.dims
        )));
    }
    let Some(value) = op.attrs.get("dtype") else { return Ok(DType::F32) };
    serde_json::from_value::<DType>(value.clone())
        .ok()
        .filter(|d| d.is_float())
        .ok_or_else(|| OpError(format!("attribute `dtype` is {value}; expected f32, f16 or bf16")))
}

/// True if a collective can sum the tensor over the ranks.
pub(super) fn can_sum(tensor: &OperandView<'_>) -> bool {
    *tensor.sharding == Sharding::Partial && tensor.ty.dtype == DType::F32 && tensor.ty.dims.len() == 2
}

/// Checks that the first input is partial.
pub(super) fn check_partial(name: &str, op: &OpView<'_>, world: u32) -> Result<(), OpError> {
    if world == 1 || *op.inputs[0].sharding == Sharding::Partial {
        return Ok(());
    }
    Err(OpError(format!(
        "`{name}` takes a partial tensor, but `{}` is not partial; leave out this operator",
        op.inputs[0].name
    )))
}

fn choose(op: &CollectiveOp<'_>, notes: &mut Vec<String>) -> Way {
    let (source, options, world) = (&op.view.inputs[0], op.options, op.world());
    if world == 1 {
        return Way::Alone;
    }
    let last_node = options.nodes.iter().max().copied().unwrap_or(0);
    // Hierarchical saves network traffic only if there is a node with several ranks.
    let over_nodes = last_node > 0 && last_node + 1 < world;
    let bytes = source.ty.dims.iter().product::<u64>() * 4;
    let mut way = match options.allreduce {
        Allreduce::CopyReduce => Way::CopyReduce,
        Allreduce::OneShot => Way::OneShot,
        Allreduce::TwoShot => Way::TwoShot,
        Allreduce::Hierarchical if over_nodes => Way::Hierarchical,
        Allreduce::Hierarchical => {
            let (other, name, why) = match last_node {
                0 => (Way::TwoShot, "two-shot", "all ranks are on one node"),
                _ => (Way::CopyReduce, "copy-reduce", "every node has one rank"),
            };
            notes.push(format!("`{}`: {why}, so {name} replaces hierarchical", op.view.name));
            other
        }
        Allreduce::Auto if over_nodes => Way::Hierarchical,
        Allreduce::Auto if bytes <= options.target.tuned(&ONE_SHOT_BYTES) && op.can_push => Way::OneShot,
        Allreduce::Auto if options.target.backend == Backend::Cuda => Way::TwoShot,
        Allreduce::Auto => Way::CopyReduce,
    };
    let large = options.allreduce == Allreduce::OneShot && bytes > MOST_ONE_SHOT_BYTES;
    if way == Way::OneShot && (large || !op.can_push) {
        let (other, name) = match options.target.backend {
            Backend::Cuda => (Way::TwoShot, "two-shot"),
            Backend::Cpu => (Way::CopyReduce, "copy-reduce"),
        };
        let why = match op.can_push {
            true => format!("it is larger than {} MiB", MOST_ONE_SHOT_BYTES >> 20),
            false => "the producer of its input cannot push it".to_string(),
        };
        notes.push(format!("`{}`: {why}, so {name} replaces one-shot", op.view.name));
        way = other;
    }
    let tiles = tiles(Way::TwoShot, &options.target, source.ty.dims[1] as u32, world).len();
    if way == Way::TwoShot && tiles < world as usize {
        notes.push(format!(
            "`{}`: {} for {world} ranks, so copy-reduce replaces two-shot",
            op.view.name,
            counted(tiles, "column tile")
        ));
        way = Way::CopyReduce;
    }
    if way == Way::Hierarchical {
        let ranks_of = |node| options.nodes.iter().filter(|&&other| other == node).count();
        let largest = (0..=last_node).map(ranks_of).max().unwrap_or(1);
        if tiles < largest {
            notes.push(format!(
                "`{}`: {} for {largest} ranks of a node, so copy-reduce replaces hierarchical",
                op.view.name,
                counted(tiles, "column tile")
            ));
            way = Way::CopyReduce;
        }
    }
    way
}

/// Column tiles. Copies use coarser tiles, because each tile is copied to every peer.
fn tiles(way: Way, target: &Target, columns: u32, world: u32) -> Vec<Range<u32>> {
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

/// Tiles of a two-shot sum with `rows` rows: column tiles, whether each rank's tiles are adjacent, and blocks of rows. With many
/// rows, tiles are wide and low, so that all workers get some and a copy writes long contiguous ranges.
fn two_shot_tiles(
    target: &Target,
    rows: u32,
    columns: u32,
    world: u32,
) -> (Vec<Range<u32>>, bool, Vec<Range<u32>>) {
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
    (tiles, side_by_side, blocks.collect())
}

struct Sum {
    rows: u32,
    /// Column tiles.
    tiles: Vec<Range<u32>>,
    /// Each rank sums adjacent tiles, the same number on every rank. Otherwise tiles are assigned to ranks in turn.
    side_by_side: bool,
    /// Blocks of rows. Each tile is summed separately in each block.
    blocks: Vec<Range<u32>>,
    rows_kind: u32,
    residual: bool,
    world: u32,
    way: Way,
}

impl Sum {
    /// The rank that sums a tile, if a single rank does.
    fn owner(&self, tile: usize) -> u32 {
        match self.side_by_side {
            true => (tile / self.share()) as u32,
            false => tile as u32 % self.world,
        }
    }

    /// Number of column tiles per rank, if they are adjacent.
    fn share(&self) -> usize {
        self.tiles.len() / self.world as usize
    }

    fn sums(&self, tile: usize, rank: u32) -> bool {
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
    /// adjacent, it starts with those of the next rank.
    fn all(&self, rank: u32) -> impl Iterator<Item = (usize, usize)> {
        let tiles = self.tiles.len();
        let first = if self.side_by_side { (rank as usize + 1) * self.share() } else { 0 };
        (0..self.blocks.len()).flat_map(move |block| (0..tiles).map(move |i| (block, (first + i) % tiles)))
    }

    /// The columns of a tile in the receive buffer. With two-shot, only a rank's own tiles are there, next to each other.
    fn received(&self, tile: usize) -> Range<u32> {
        if self.way != Way::TwoShot {
            return self.tiles[tile].clone();
        }
        let before = (0..tile).filter(|&other| self.owner(other) == self.owner(tile));
        let start = before.map(|other| self.tiles[other].end - self.tiles[other].start).sum();
        start..start + (self.tiles[tile].end - self.tiles[tile].start)
    }

    /// Columns of the receive buffer, the same on all ranks.
    fn received_columns(&self) -> u32 {
        (0..self.tiles.len()).map(|tile| self.received(tile).end).max().unwrap_or(0)
    }

    /// The region of the ranks' partial values of a tile in the receive buffer.
    fn slots(&self, (block, tile): (usize, usize)) -> Region {
        let (rows, columns) = (&self.blocks[block], self.received(tile));
        let all = Region::whole(&[self.world, self.rows]);
        all.with(1, rows.start, rows.end).with(2, columns.start, columns.end)
    }

    /// Sends partial tiles to the ranks that sum them, with one event per tile.
    fn to_owners(&self) -> Step {
        let sends = (0..self.world).map(|rank| {
            let mut sends = Vec::new();
            let mut next_event = vec![0; self.world as usize];
            for tile in self.all(rank) {
                for to in self.peers(rank).filter(|&p| self.sums(tile.1, p)) {
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
            row_blocks: true,
            between_all: true,
            completes: None,
        })
    }

    /// Sends sums to all other ranks, with one event.
    fn to_others(&self) -> Step {
        let sends = (0..self.world).map(|rank| {
            let own = self.all(rank).filter(|&(_, tile)| self.owner(tile) == rank);
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
            row_blocks: true,
            between_all: true,
            completes: Some(0),
        })
    }

    /// The reduce tasks. Operands: own partial tile and received slots (or only the flagged ones), and the residual.
    fn reduce(&self, received: Operand) -> Step {
        let flagged = self.way == Way::OneShot;
        let mut inputs = if flagged { vec![received] } else { vec![Operand::Input(0), received] };
        inputs.extend(self.residual.then_some(Operand::Input(1)));
        let tasks = (0..self.world).map(|rank| {
            let mut tasks = Vec::new();
            for tile in self.all(rank).filter(|&(_, tile)| self.sums(tile, rank)) {
                let own = self.tile(tile);
                let received = match self.way {
                    Way::Alone => own,
                    _ => self.slots(tile),
                };
                let mut task = TaskSpec::default();
                let mut read = |region: Region| task.reads.push(Access::new(task.reads.len() as u8, region));
                if !flagged {
                    read(own);
                }
                read(received);
                if self.residual {
                    read(own);
                }
                task.writes.push(Access::new(0, own));
                task.args[0] = own.lo[0] as i32;
                task.cost = own.volume() * 4 * u64::from(self.world + 2);
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

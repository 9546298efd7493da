//! `allreduce`: gives every rank the sum of a partial tensor over the ranks.

use super::contract::{Alone, Buffer, Collective, CollectiveOp, Consumer, Lowered, Operand, SumRows};
use super::hierarchical::Hierarchical;
use super::moves::rows_kind;
use super::sum::{OWNED_ROWS, Shares, Sum, Way, row_blocks, tiles, two_shot_tiles};
use crate::attribute::{Attribute, AttributeKind};
use crate::blocks::Blocks;
use crate::dtype::DType;
use crate::op_graph::{Attrs, Rows};
use crate::split::Sharding;
use crate::target::Backend;
use crate::task_graph::Allreduce;
use crate::task_type::{Need, OpError, OpView, OperandView, ShardRule, TensorType};
use crate::tuning::Knob;
use crate::words::counted;

/// `allreduce(x [, residual])`: the sum of a partial tensor `[rows, columns]` over the ranks, in rank order. The residual is
/// added once. Attribute `dtype` (`f32`, `bf16`, `f16`): element type of the result; the default is f32.
///
/// The summands may be f32, bf16 or f16, and ranks send them in that type. They are summed in f32.
///
/// All lowerings sum in rank order and give the same bits, except `hierarchical`: it first sums each node's ranks, then the nodes.
#[derive(Debug)]
pub struct AllReduce;

/// The attribute `dtype` of summing collectives.
pub(super) const SUM: &[Attribute] = &[Attribute::new("dtype", AttributeKind::DType)];

/// Largest sum that [`Allreduce::Auto`] pushes as flagged words. Two ranks of a node push sums of twice this size, because each has only one
/// peer: on two H200s, a step of 16 rows of 32B (320 KiB) took 9.99 ms instead of 10.52. More ranks were not measured.
const ONE_SHOT_BYTES: Knob = Knob {
    name: "allreduce.one_shot_bytes",
    default: 256 << 10,
    candidates: &[0, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20],
    about: "largest sum (bytes of one rank's part) for which the lowering `auto` is one-shot; twice as much on two ranks",
};

/// Largest sum (bytes of one rank's part) that is pushed, also if one-shot is requested. A rank receives twice the bytes of every rank's
/// part, in memory that only its graph uses: 32 MiB with four ranks. For larger sums two-shot sends fewer bytes.
const MOST_ONE_SHOT_BYTES: u64 = 4 << 20;

/// Whether the tasks that sum rows also compute what the next operator begins with.
pub(crate) const JOINED_ROWS: Knob = Knob {
    name: "allreduce.joined_rows",
    default: 1,
    candidates: &[0, 1],
    about: "1: if rows of a sum stay with a rank, or are summed within it, one task sums and norms them; 0: two tasks",
};

/// The same for sums that every rank has, of summands that were copied or pushed to it, if [`Allreduce::Auto`] has chosen that. Then the
/// tasks sum whole rows instead of column tiles. With 2, also if the lowering was asked for: for tests where `auto` does not choose it.
pub(crate) const JOINED_SUMS: Knob = Knob {
    name: "allreduce.joined_sums",
    default: 1,
    candidates: &[0, 1, 2],
    about: "1: if every rank sums all rows, one task sums and norms them; 2: also if `copy-reduce` or `one-shot` is asked for; 0: two tasks",
};

/// The most bytes that a rank copies to its peers for a sum that is not pushed. Above that, each rank sums a share. On two H200s, a step of
/// 8B took 4.48 and 4.07 ms for 32 rows without and with copies, 5.38 and 4.99 ms for 64, 6.67 and 6.35 ms for 128. More ranks were not
/// measured.
const COPIED_BYTES: Knob = Knob {
    name: "allreduce.copied_bytes",
    default: 2 << 20,
    candidates: &[0, 1 << 20, 2 << 20, 4 << 20],
    about: "most bytes of summands that a rank copies to all its peers, if they are not pushed; with more, each rank sums a share",
};

/// Whether producers write the tiles that ranks sum into the memory of these ranks.
const STORED_TILES: Knob = Knob {
    name: "allreduce.stored_tiles",
    default: 1,
    candidates: &[0, 1],
    about: "1: if ranks sum rows that they own, products write their tiles into the owners' memory; 0: copies bring them",
};

impl Collective for AllReduce {
    fn name(&self) -> &'static str {
        "allreduce"
    }

    fn attributes(&self) -> &'static [Attribute] {
        SUM
    }

    fn knobs(&self) -> &'static [&'static Knob] {
        &[&ONE_SHOT_BYTES, &COPIED_BYTES, &JOINED_ROWS, &JOINED_SUMS, &STORED_TILES]
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
        (can_sum(tensor) && *to == Sharding::Replicated).then(|| sum_attrs(tensor))
    }

    fn alone(&self, op: &OpView<'_>) -> Alone {
        let dtype = op.outputs.first().map(|o| o.ty.dtype);
        match op.inputs.as_slice() {
            [input] if dtype == Some(input.ty.dtype) => Alone::Identity,
            [_, _] if dtype == Some(DType::F32) => Alone::Sum,
            _ => Alone::Lowered,
        }
    }

    /// Includes a sum of the result and a residual. The residual is added once, after the ranks' summands. A result in their type
    /// is then not rounded before, as in `linear_with_residual`.
    fn absorb(&self, op: &OpView<'_>, consumer: &Consumer<'_>) -> Option<Attrs> {
        // a + b equals b + a bit for bit, so the allreduce may be either operand.
        let residual = consumer.view.inputs.get(1 - consumer.input.min(1))?;
        let (sum, output) = (&op.outputs.first()?.ty, consumer.view.outputs.first()?);
        let fits = consumer.is_sum
            && consumer.view.inputs.len() == 2
            && op.inputs.len() == 1
            && (sum.dtype == DType::F32 || sum.dtype == op.inputs[0].ty.dtype)
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
                dtype: source.ty.dtype,
                residual: op.view.inputs.len() == 2,
                nodes: &op.options.nodes,
            };
            return Ok(Lowered { notes: lowered.notes, ..over_nodes.lower() });
        }
        let (rows, columns) = (source.ty.dims[0] as u32, source.ty.dims[1] as u32);
        let (tiles, shares, blocks) = match way {
            Way::TwoShot if op.rows != SumRows::Any => (
                std::iter::once(0..columns).collect(),
                Shares::Rows,
                row_blocks(&op.options.target, rows, world),
            ),
            Way::TwoShot => two_shot_tiles(&op.options.target, rows, columns, world),
            _ => {
                let tiles = tiles(way, &op.options.target, columns, world);
                (tiles, Shares::InTurn, std::iter::once(0..rows).collect())
            }
        };
        lowered.dealt = match shares {
            Shares::InTurn => None,
            Shares::Columns => Some(Blocks { dim: 1, size: columns / world }),
            Shares::Rows => Some(Blocks { dim: 0, size: OWNED_ROWS }),
        };
        let stored = shares == Shares::Rows && op.can_store && op.options.target.tuned(&STORED_TILES) == 1;
        let sum = Sum {
            rows,
            tiles,
            shares,
            blocks,
            rows_kind: rows_kind(source.ty.rows),
            dtype: source.ty.dtype,
            residual: op.view.inputs.len() == 2,
            world,
            way,
            stored,
        };
        let (slot_rows, slot_columns) = sum.received_size();
        let received = |dtype, by_sender| Buffer {
            suffix: ".received",
            dtype,
            dims: vec![world, slot_rows, slot_columns],
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
                lowered.buffers.push(received(source.ty.dtype, true));
                match stored {
                    true => lowered.stored_into = Some(0),
                    false => lowered.steps.push(sum.to_owners()),
                }
                lowered.steps.push(sum.reduce(Operand::Buffer(0)));
                if way == Way::TwoShot && op.rows != SumRows::Kept {
                    lowered.steps.push(sum.to_others());
                }
            }
        }
        Ok(lowered)
    }

    fn sums_rows(&self, op: &CollectiveOp<'_>) -> bool {
        let (input, world) = (&op.view.inputs[0], u64::from(op.world()));
        let f32_sum = op.view.outputs.first().is_some_and(|o| o.ty.dtype == DType::F32);
        f32_sum
            && choose(op, &mut Vec::new()) == Way::TwoShot
            && input.ty.dims[0].is_multiple_of(world * u64::from(OWNED_ROWS))
    }
}

/// The element type of a sum over the ranks, for collectives with an input `[rows, columns]`.
pub(super) fn sum_type(name: &str, op: &OpView<'_>) -> Result<DType, OpError> {
    let input = &op.inputs[0];
    if !input.ty.dtype.is_float() {
        return Err(OpError(format!(
            "{name} sums f32, bf16 or f16, but `{}` is {}; let its producer write one of these",
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
    *tensor.sharding == Sharding::Partial && tensor.ty.dtype.is_float() && tensor.ty.dims.len() == 2
}

/// The attributes with which the sum of a tensor has its type, so that readers get what they expect.
pub(super) fn sum_attrs(tensor: &OperandView<'_>) -> Attrs {
    let dtype = Some(tensor.ty.dtype).filter(|&dtype| dtype != DType::F32);
    dtype.map(|dtype| ("dtype".to_string(), dtype.name().into())).into_iter().collect()
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
    let dtype = source.ty.dtype;
    let bytes = source.ty.dims.iter().product::<u64>() * dtype.size();
    // An iteration may sample no row. Then no word is pushed, so the words order nothing between iterations.
    let sampled = source.ty.rows == Rows::Samples;
    // A flagged word holds an f32.
    let can_push = op.can_push && dtype == DType::F32 && !sampled;
    let one_peer = world == 2 && last_node == 0;
    let most_pushed = options.target.tuned(&ONE_SHOT_BYTES) * if one_peer { 2 } else { 1 };
    let most_pushed = most_pushed.min(MOST_ONE_SHOT_BYTES);
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
        Allreduce::Auto if bytes <= most_pushed && can_push => Way::OneShot,
        Allreduce::Auto if options.target.backend == Backend::Cpu => Way::CopyReduce,
        Allreduce::Auto if bytes * u64::from(world - 1) <= options.target.tuned(&COPIED_BYTES) => {
            Way::CopyReduce
        }
        Allreduce::Auto => Way::TwoShot,
    };
    let large = options.allreduce == Allreduce::OneShot && bytes > MOST_ONE_SHOT_BYTES;
    if way == Way::OneShot && (large || !can_push) {
        let (other, name) = match options.target.backend {
            Backend::Cuda => (Way::TwoShot, "two-shot"),
            Backend::Cpu => (Way::CopyReduce, "copy-reduce"),
        };
        let why = match op.can_push {
            true if can_push => format!("it is larger than {} MiB", MOST_ONE_SHOT_BYTES >> 20),
            true if sampled => "it has sampled rows, and there may be none".to_string(),
            true => format!("its input is {dtype}, and only f32 can be pushed"),
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

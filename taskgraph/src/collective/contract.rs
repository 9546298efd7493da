//! The trait of a collective.

use crate::attribute::Attribute;
use crate::blocks::Blocks;
use crate::dtype::DType;
use crate::op_graph::Attrs;
use crate::options::BuildOptions;
use crate::region::Region;
use crate::split::Sharding;
use crate::task_type::{OpError, OpView, OperandView, ShardRule, TaskSpec, TensorType};
use crate::tuning::Knob;
use std::fmt::Debug;

/// An operator that moves values between ranks or sums them over ranks. It has one output.
pub trait Collective: Debug + std::marker::Send + Sync {
    /// Name of the operator, e.g. `allreduce`.
    fn name(&self) -> &'static str;

    /// Its attributes. Others are refused.
    fn attributes(&self) -> &'static [Attribute] {
        &[]
    }

    /// Values that decide only how fast it is. Read with [`Target::tuned`](crate::Target::tuned).
    fn knobs(&self) -> &'static [&'static Knob] {
        &[]
    }

    /// Checks operands and attributes. Returns the output's type with global dimensions.
    fn infer(&self, op: &OpView<'_>) -> Result<TensorType, OpError>;

    /// The sharding that its inputs need, and that of its output, on `world` ranks.
    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError>;

    /// The attributes with which it gives `tensor` the sharding `to`, or `None` if it cannot. The builder inserts it where an
    /// operator needs that sharding.
    fn reshards(&self, tensor: &OperandView<'_>, to: &Sharding) -> Option<Attrs> {
        let _ = (tensor, to);
        None
    }

    /// What it becomes with one rank.
    fn alone(&self, op: &OpView<'_>) -> Alone {
        match (op.inputs.as_slice(), op.outputs.as_slice()) {
            ([input], [output]) if input.ty.dtype == output.ty.dtype => Alone::Identity,
            _ => Alone::Lowered,
        }
    }

    /// Whether it can include an operator that is the only reader of its result. Returns the attributes of the combined operator.
    /// The inputs of that are this one's inputs, then the consumer's other inputs in order.
    fn absorb(&self, op: &OpView<'_>, consumer: &Consumer<'_>) -> Option<Attrs> {
        let _ = (op, consumer);
        None
    }

    /// Whether it can be carried out with [`SumRows::Own`] and [`SumRows::Kept`]. Input 1 is then the residual.
    fn sums_rows(&self, op: &CollectiveOp<'_>) -> bool {
        let _ = op;
        false
    }

    /// The steps that carry it out.
    fn lower(&self, op: &CollectiveOp<'_>) -> Result<Lowered, OpError>;
}

/// What a collective becomes with one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alone {
    /// Its input: readers use the input instead, if names allow it.
    Identity,
    /// The sum of its two inputs, by a registered type that sums, if there is one.
    Sum,
    /// The result of [`Collective::lower`].
    Lowered,
}

/// An operator that reads a collective's result.
#[derive(Clone, Copy, Debug)]
pub struct Consumer<'a> {
    /// The operator.
    pub view: &'a OpView<'a>,
    /// The index of its input that the collective writes.
    pub input: usize,
    /// Its type says that it sums its two inputs ([`crate::TaskType::is_sum`]).
    pub is_sum: bool,
}

/// A collective to be lowered.
#[derive(Clone, Debug)]
pub struct CollectiveOp<'a> {
    /// Operands with global types, and their shardings.
    pub view: &'a OpView<'a>,
    /// The options that the graph is built with.
    pub options: &'a BuildOptions,
    /// The producer of input 0 can push it as flagged words, and it has no other reader.
    pub can_push: bool,
    /// Input 0 has no memory yet, so it may be placed inside the output ([`Lowered::input_in_output`]).
    pub can_place: bool,
    /// The producer of input 0 can write each of its tiles into the memory of the rank that sums its rows ([`Lowered::stored_into`]), if a
    /// rank sums the rows that it owns.
    pub can_store: bool,
    /// Whether ranks must sum rows. Not [`SumRows::Any`] only if [`Collective::sums_rows`].
    pub rows: SumRows,
}

/// Which rank sums what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SumRows {
    /// As the collective likes.
    #[default]
    Any,
    /// A rank sums the rows that it owns, because it has only these rows of the residual. All ranks get the result. Blocks of
    /// 256 rows belong to the ranks in turn.
    Own,
    /// The same, and only the owner of a row gets its sum. The other rows have no value.
    Kept,
}

impl CollectiveOp<'_> {
    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.options.world
    }
}

/// The lowering of a collective.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lowered {
    /// Deviations from the options, with their reasons.
    pub notes: Vec<String>,
    /// The producer of input 0 writes into this buffer, `[world, rows, columns]` of flagged words, on every rank.
    pub push: Option<usize>,
    /// Input 0 is split over the ranks in these blocks. Each rank's producer then begins with the next rank's block of a group, and
    /// ends with its own. So ranks are alike, and no two ranks send to one peer at the same time.
    pub dealt: Option<Blocks>,
    /// The producer of input 0 writes each of its tiles into this buffer, `[world, rows of a rank, columns]`, of the rank to which `dealt`
    /// gives the tile's rows, in the producer's slot. One event of that rank tells that all of its peers' tiles of a block have arrived. Input
    /// 0 has no memory of its own then, and no step reads it. What the producers send counts as step 0 where a step names an earlier one.
    pub stored_into: Option<usize>,
    /// Memory in the symmetric heap.
    pub buffers: Vec<Buffer>,
    /// Input 0 is inside the output: its producer writes its block there.
    pub input_in_output: Option<Placed>,
    /// The output is a block inside input 0.
    pub output_in_input: Option<Placed>,
    /// The output is inside a buffer.
    pub output_in_buffer: Option<(usize, Placed)>,
    /// The steps, in order.
    pub steps: Vec<Step>,
}

/// The place of a tensor that is a block of another tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Placed {
    /// The dimension along which blocks are cut.
    pub dim: usize,
    /// The first index of the block in that dimension, for each rank.
    pub first: Vec<u32>,
}

/// Memory of a collective in the symmetric heap; the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Suffix of its name, after the name of input 0.
    pub suffix: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub dims: Vec<u32>,
    /// Dimension 0 counts the sending ranks. A rank's own slot stays empty, unless the producer writes there ([`Lowered::stored_into`]).
    pub by_sender: bool,
}

/// An operand of a [`Step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// An input of the collective.
    Input(usize),
    /// Its output.
    Output,
    /// A buffer.
    Buffer(usize),
}

/// A step of a collective.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Ranks send to each other.
    Exchange(Exchange),
    /// Each rank works on its own.
    Tasks(TaskStep),
}

/// Sends between ranks. Each send is a copy, or only a signal, that triggers an event of the receiver.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    /// The operand that is sent.
    pub source: Operand,
    /// The operand that receives it: the output or a buffer. If it has one dimension more than the source, dimension 0 counts
    /// senders.
    pub target: Operand,
    /// The kind of rows in use: 0 token rows, 1 sample rows, 2 all rows.
    pub rows_kind: u32,
    /// The sends of each rank, in order.
    pub sends: Vec<Vec<Send>>,
    /// The rows that an index of dimension 0 stands for, if a sent block may begin at any index of it and rows in use are counted from
    /// row 0 of the tensor. 0: they are counted from the beginning of the block.
    pub rows_per_index: u32,
    /// Every rank hears from every other rank: a rank without data for a peer signals. That keeps ranks within one iteration of
    /// each other. False if other exchanges of the collective take care of that.
    pub between_all: bool,
    /// The index of an earlier step, an exchange (or what producers store) from which each rank made its share of this one in the step
    /// before. A rank that has all shares then knows that the earlier exchange is done on every rank. This is a hint to the memory plan;
    /// the verifier proves what follows from it.
    pub completes: Option<usize>,
    /// With static placement, the first copies go to the first workers and so on, as the tiles do that are sent. False: copies are dealt
    /// out like other tasks. If there are fewer than workers, they go to those that the last such operator has left out.
    pub beside_producer: bool,
}

/// One copy from a rank to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Send {
    /// The receiving rank.
    pub to: u32,
    /// The region that is sent, in the sender's index space. `None` is a signal without data.
    pub source: Option<Region>,
    /// The region where it arrives, in the receiver's index space. Not read if there is no data.
    pub target: Region,
    /// The receiver's event that it triggers, numbered within this exchange from 0 without gaps.
    pub event: u32,
}

/// Tasks of a registered or core type on each rank.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskStep {
    /// The task type.
    pub task_type: &'static str,
    /// Inputs of the tasks.
    pub inputs: Vec<Operand>,
    /// Outputs of the tasks.
    pub outputs: Vec<Operand>,
    /// The variant's parameters.
    pub params: Vec<u32>,
    /// The parameters of each rank, if they differ; otherwise empty.
    pub rank_params: Vec<Vec<u32>>,
    /// The index of the parameter that holds the rank's own number.
    pub rank_param: Option<usize>,
    /// The input whose views get an additional first dimension of size 1.
    pub stacked: Option<u8>,
    /// The tasks of each rank.
    pub tasks: Vec<Vec<TaskSpec>>,
}

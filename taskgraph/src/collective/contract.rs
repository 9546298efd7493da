//! What a collective is.

use crate::attribute::Attribute;
use crate::dtype::DType;
use crate::op_graph::Attrs;
use crate::options::BuildOptions;
use crate::region::Region;
use crate::split::Sharding;
use crate::task_type::{OpError, OpView, OperandView, ShardRule, TaskSpec, TensorType};
use crate::tuning::Knob;
use std::fmt::Debug;

/// An operator that moves or sums values between ranks. It has one output.
pub trait Collective: Debug + std::marker::Send + Sync {
    /// Name of the operator, e.g. `allreduce`.
    fn name(&self) -> &'static str;

    /// The attributes that it takes; others are refused.
    fn attributes(&self) -> &'static [Attribute] {
        &[]
    }

    /// What decides how fast it is and nothing else; read by [`Target::tuned`](crate::Target::tuned).
    fn knobs(&self) -> &'static [&'static Knob] {
        &[]
    }

    /// Checks operands and attributes; gives the output's type with global dimensions.
    fn infer(&self, op: &OpView<'_>) -> Result<TensorType, OpError>;

    /// What sharding it needs of its inputs, and that of its output, on `world` ranks.
    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError>;

    /// The attributes with which it turns `tensor` into one of sharding `to`; `None` where it cannot. The builder
    /// then inserts it where an operator needs that sharding.
    fn reshards(&self, tensor: &OperandView<'_>, to: &Sharding) -> Option<Attrs> {
        let _ = (tensor, to);
        None
    }

    /// What it is where there is one rank.
    fn alone(&self, op: &OpView<'_>) -> Alone {
        match (op.inputs.as_slice(), op.outputs.as_slice()) {
            ([input], [output]) if input.ty.dtype == output.ty.dtype => Alone::Identity,
            _ => Alone::Lowered,
        }
    }

    /// Whether it can take on an operator that alone reads its result: the attributes of the joint operator, whose
    /// inputs are this one's, then the consumer's others in order.
    fn absorb(&self, op: &OpView<'_>, consumer: &Consumer<'_>) -> Option<Attrs> {
        let _ = (op, consumer);
        None
    }

    /// How it is carried out.
    fn lower(&self, op: &CollectiveOp<'_>) -> Result<Lowered, OpError>;
}

/// What a collective is where there is one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alone {
    /// Its input: its users read that instead, where names allow it.
    Identity,
    /// The sum of its two inputs, by a registered type that sums, if there is one.
    Sum,
    /// What [`Collective::lower`] makes of it.
    Lowered,
}

/// The operator that reads a collective's result.
#[derive(Clone, Copy, Debug)]
pub struct Consumer<'a> {
    /// The operator.
    pub view: &'a OpView<'a>,
    /// Which of its inputs the collective writes.
    pub input: usize,
    /// Its type says that it sums its two inputs ([`crate::TaskType::is_sum`]).
    pub is_sum: bool,
}

/// A collective that is to be lowered.
#[derive(Clone, Debug)]
pub struct CollectiveOp<'a> {
    /// Operands with global types, and their shardings.
    pub view: &'a OpView<'a>,
    /// What the graph is built for.
    pub options: &'a BuildOptions,
    /// The producer of input 0 can push it as flagged words, and nobody else reads it.
    pub can_push: bool,
    /// Input 0 has no memory yet: it may be placed inside the output ([`Lowered::input_in_output`]).
    pub can_place: bool,
}

impl CollectiveOp<'_> {
    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.options.world
    }
}

/// How a collective is carried out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lowered {
    /// What was done otherwise than asked, and why.
    pub notes: Vec<String>,
    /// The producer of input 0 writes into this buffer, `[world, rows, columns]` of flagged words, on every rank.
    pub push: Option<usize>,
    /// Input 0 is dealt to the ranks in equal blocks along this dimension, rank r getting block r. Each rank's producer then
    /// begins with the block of the rank after it and ends with its own: so ranks are alike, and no two send to one peer
    /// at the same time.
    pub dealt: Option<usize>,
    /// Memory in the symmetric heap.
    pub buffers: Vec<Buffer>,
    /// Input 0 lies inside the output: its producer writes its block there.
    pub input_in_output: Option<Placed>,
    /// The output lies inside input 0, which it is a block of.
    pub output_in_input: Option<Placed>,
    /// The output lies inside a buffer.
    pub output_in_buffer: Option<(usize, Placed)>,
    /// In order.
    pub steps: Vec<Step>,
}

/// A tensor that is a block of another one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Placed {
    /// The dimension that is cut.
    pub dim: usize,
    /// For each rank, the first index of the block in that dimension.
    pub first: Vec<u32>,
}

/// Memory of a collective in the symmetric heap; the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Added to the name of input 0.
    pub suffix: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub dims: Vec<u32>,
    /// Dimension 0 counts the ranks that write, and a rank's own slot stays empty.
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
    /// Each rank works by itself.
    Tasks(TaskStep),
}

/// Sends between ranks: each is a copy (or a signal alone) that triggers an event of the receiver.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    /// What is sent.
    pub source: Operand,
    /// Where it arrives: the output or a buffer. With one dimension more than the source, dimension 0 counts senders.
    pub target: Operand,
    /// Which rows are in use: 0 token rows, 1 sample rows, 2 all.
    pub rows_kind: u32,
    /// For each rank what it sends, in order.
    pub sends: Vec<Vec<Send>>,
    /// What is sent begins at any row of `[rows, columns]`, and the rows in use are counted from row 0 of the tensor. False: from
    /// where it begins.
    pub row_blocks: bool,
    /// Every rank hears from every other one: where it has nothing to send, it signals. That keeps ranks within one iteration of
    /// each other. False where other exchanges of the collective see to that.
    pub between_all: bool,
    /// An earlier exchange (its place among the steps) of which each rank made a share by the step before this one, and
    /// what arrives here are the others' shares: who has both knows that the earlier one is done on every rank. It is
    /// a hint to the memory plan; the verifier proves what follows from it.
    pub completes: Option<usize>,
}

/// One copy from a rank to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Send {
    /// The peer.
    pub to: u32,
    /// What is sent, in the sender's own index space; `None` is a signal without data.
    pub source: Option<Region>,
    /// Where it arrives, in the receiver's index space; not read where there is no data.
    pub target: Region,
    /// Which of the receiver's events of this exchange it triggers, counted from 0 without gaps.
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
    /// For each rank its parameters, where they differ; otherwise empty.
    pub rank_params: Vec<Vec<u32>>,
    /// The parameter that is the rank's own number.
    pub rank_param: Option<usize>,
    /// The input whose views get a first dimension of one index.
    pub stacked: Option<u8>,
    /// For each rank its tasks.
    pub tasks: Vec<Vec<TaskSpec>>,
}

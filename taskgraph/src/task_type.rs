//! The contract of a task type: the meaning of its operator, how it is sharded, and how it is cut into tasks.
//!
//! Operators and task types share their names: after fusion, each operator is carried out by tasks of the type with the same
//! name. Collectives are carried out by copy, signal and reduce tasks, which this crate creates itself.

use crate::attribute::Attribute;
use crate::dtype::DType;
use crate::op_graph::{Attrs, Capacity, Role, Rows};
use crate::region::Region;
use crate::split::Sharding;
use crate::target::Target;
use crate::trust::Trust;
use crate::tuning::Knob;
use smallvec::SmallVec;
use std::fmt::Debug;
use std::ops::Range;

pub use crate::error::OpError;

/// Type and dimensions of a tensor, as inference uses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Dimensions: global in `infer` and `shard`, of one rank in `partition`.
    pub dims: Vec<u64>,
    /// What the first dimension counts.
    pub rows: Rows,
}

/// An operator with its operands, as passes present it to its contract.
#[derive(Clone, Debug)]
pub struct OpView<'a> {
    /// Name, for messages.
    pub name: &'a str,
    /// Constants.
    pub attrs: &'a Attrs,
    /// Inputs in order.
    pub inputs: Vec<OperandView<'a>>,
    /// Outputs in order. In `infer`, only those that are declared.
    pub outputs: Vec<OperandView<'a>>,
    /// The capacity of an iteration.
    pub capacity: Capacity,
}

/// One operand in an [`OpView`].
#[derive(Clone, Debug)]
pub struct OperandView<'a> {
    /// Tensor name.
    pub name: &'a str,
    /// Type and global dimensions.
    pub ty: TensorType,
    /// How it is split over the ranks (inputs in `shard`, all operands in `partition`).
    pub sharding: &'a Sharding,
    /// Its purpose.
    pub role: &'a Role,
}

/// The sharding that an operator needs for an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Need {
    /// Any sharding.
    AsIs,
    /// All of it on every rank. A partial input is allreduced, a split input is gathered.
    Replicated,
    /// This split. A replicated input is sliced, an input with another split is exchanged, a partial input is summed.
    Split(Sharding),
}

/// What an operator does for given shardings of its inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardRule {
    /// For each input. If an input does not have the needed sharding, a collective is inserted and `shard` is called again.
    pub inputs: Vec<Need>,
    /// Sharding of each output, if the inputs have the needed shardings.
    pub outputs: Vec<Sharding>,
}

/// An operator on one rank. The operands have the rank's own dimensions.
#[derive(Clone, Debug)]
pub struct LocalOp<'a> {
    /// The operator with global dimensions and shardings.
    pub global: &'a OpView<'a>,
    /// Local dimensions of the inputs.
    pub inputs: Vec<TensorType>,
    /// Local dimensions of the outputs.
    pub outputs: Vec<TensorType>,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
}

impl LocalOp<'_> {
    /// Global ranges of each part of input `index` that this rank holds. Empty if the input is not split.
    pub fn input_ranges(&self, index: usize) -> Vec<Range<u64>> {
        self.global.inputs[index].sharding.ranges(self.rank, self.world)
    }
}

/// A region of one operand that a task reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Index of the operand. In `reads` it counts inputs from 0, in `writes` outputs from 0.
    pub operand: u8,
    /// The box, in the operand's region space: its local dimensions, unless its role names another space.
    pub region: Region,
    /// Present if the bytes are known only at run time, so that the kernel gets the whole tensor. Says what the region stands
    /// for.
    pub trust: Option<Trust>,
    /// The kernel's view lacks the first dimension, in which the region has one index.
    pub inner: bool,
}

impl Access {
    /// The kernel's view is exactly the region.
    pub fn new(operand: u8, region: Region) -> Self {
        Access { operand, region, trust: None, inner: false }
    }
    /// The kernel's view is the region without its first dimension, in which the region has one index.
    pub fn inner(operand: u8, region: Region) -> Self {
        Access { inner: true, ..Access::new(operand, region) }
    }
    /// The kernel sees the whole tensor, but accesses only the rows of active slot `slot` of `of`. In `region`, the rows
    /// (dimension 0) are the slot's *share*: R slot/of .. R (slot + 1)/of of R rows. The share stands for rows that are known
    /// only at run time.
    pub fn rows_of_slot(operand: u8, region: Region, slot: u32, of: u32) -> Self {
        let trust = Trust::RowsOfSlot { slot, of, in_tiles: false };
        Access { trust: Some(trust), ..Access::new(operand, region) }
    }
    /// The kernel sees the whole cache, but accesses only the pages that `region` stands for, in the cache's own index space.
    pub fn pages_of_slot(operand: u8, region: Region) -> Self {
        Access { trust: Some(Trust::PagesOfSlot), ..Access::new(operand, region) }
    }
    /// The kernel sees the whole tensor, but accesses only rows that are assigned to task `task` of the `of` tasks that share
    /// the iteration's work. In `region`, the rows are the task's share, as for a slot in [`Access::rows_of_slot`].
    pub fn rows_of_units(operand: u8, region: Region, task: u32, of: u32) -> Self {
        let trust = Trust::RowsOfUnits { task, of, in_tiles: false };
        Access { trust: Some(trust), ..Access::new(operand, region) }
    }
    /// The rows of a slot or of units lie in tiles: in `region`, they are the share that [`crate::trust::share_of_tiles`] names.
    pub fn in_tiles(mut self) -> Self {
        if let Some(Trust::RowsOfSlot { in_tiles, .. } | Trust::RowsOfUnits { in_tiles, .. }) =
            &mut self.trust
        {
            *in_tiles = true;
        }
        self
    }
    /// The kernel sees the whole cache, but accesses only pages of the rows that are assigned to it. `region` stands for them,
    /// in the cache's own index space.
    pub fn pages_of_rows(operand: u8, region: Region) -> Self {
        Access { trust: Some(Trust::PagesOfRows), ..Access::new(operand, region) }
    }
}

/// A task before events and placement. The kernel's operands are `reads`, then `writes`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TaskSpec {
    /// Regions that it reads. An input that is also written is in both lists.
    pub reads: SmallVec<[Access; 6]>,
    /// Regions that it writes.
    pub writes: SmallVec<[Access; 2]>,
    /// Constants of this particular task.
    pub args: [i32; 8],
    /// Approximate number of bytes that it moves. Used to balance workers.
    pub cost: u64,
}

/// An operator cut into tasks.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Partition {
    /// Parameters of the variant (the words of the task type's `params.h` struct), the same for all tasks.
    pub params: Vec<u32>,
    /// Scratch memory that a worker needs for such a task, in bytes.
    pub scratch_bytes: u64,
    /// The tasks. Their writes cover the outputs exactly once. In an [`Expansion`], several operators may do so together.
    pub tasks: Vec<TaskSpec>,
}

/// Fuses `producer` into `consumer`, if the producer's first output is the consumer's input `consumer_input`, has no other
/// reader, and is no output of the graph.
///
/// The inputs of the fused operator are the producer's inputs, then the consumer's other inputs in order. It has the attributes
/// of both; where they collide, the consumer's value is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusion {
    /// The operator that is absorbed.
    pub producer: &'static str,
    /// The operator that absorbs it.
    pub consumer: &'static str,
    /// The index of the consumer's input that the producer writes.
    pub consumer_input: usize,
    /// The fused operator.
    pub fused: &'static str,
}

/// A task type. Each type is implemented in one folder of `kernels-cu/src/tasks`.
pub trait TaskType: Debug + Send + Sync {
    /// Name of the operator and of the task type, e.g. `rmsnorm_linear`.
    fn name(&self) -> &'static str;

    /// The attributes of the operator. Other attributes are refused, with this list in the message.
    fn attributes(&self) -> &'static [Attribute] {
        &[]
    }

    /// Values that decide only how fast its tasks are. Read with [`Target::tuned`].
    fn knobs(&self) -> &'static [&'static Knob] {
        &[]
    }

    /// Checks operands and attributes. Returns the types of the outputs, with global dimensions.
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError>;

    /// The operators that replace this one, if it only composes others. They replace it before sharding and fusion, so that
    /// each of them is sharded and fused like any other. Such a type has no tasks, so it needs only `infer` besides this.
    fn compose(&self, op: &OpView<'_>) -> Result<Option<Expansion>, OpError> {
        let _ = op;
        Ok(None)
    }

    /// The sharding rule of the operator on `world` ranks, for the shardings of its inputs. By default every rank computes all
    /// of it.
    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let _ = world;
        Ok(ShardRule {
            inputs: vec![Need::Replicated; op.inputs.len()],
            outputs: vec![Sharding::Replicated; op.outputs.len()],
        })
    }

    /// Cuts one rank's share into tasks. An operator that is always replaced by others ([`TaskType::compose`],
    /// [`TaskType::expand`]) does not need it.
    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let _ = (op, target);
        Err(OpError(format!("`{}` cannot run by itself, and no other operators replaced it", self.name())))
    }

    /// Inputs that are weights packed in tiles ([`crate::task_graph::TensorEntry::tiled`]). All other inputs are plain. Other tensors
    /// are refused there, and such weights elsewhere.
    fn tiled_inputs(&self) -> &'static [usize] {
        &[]
    }

    /// Packed inputs that are read as pairs of rows on this target ([`crate::task_graph::TensorEntry::paired`]). All readers of such a
    /// weight must agree. The regions of its tasks count rows as they lie in memory.
    fn paired_inputs(&self, target: &Target) -> &'static [usize] {
        let _ = target;
        &[]
    }

    /// Inputs that never change while the kernel runs: weights, constants, or inputs of the graph; others are refused. A loader may
    /// fetch them before the task's events.
    fn constant_inputs(&self) -> &'static [usize] {
        &[]
    }

    /// Inputs (by their place among the reads) of which a task reads only the rows that data select, such as an embedding
    /// table or the rows of slots, however large its view is. The simulator assumes that such a read is no larger than what the task writes.
    fn gathered_inputs(&self) -> &'static [usize] {
        &[]
    }

    /// The number of a sequence's last positions that a row sees, by the parameters of a task; `None` if it sees all. The simulator
    /// counts only their pages.
    fn seen_positions(&self, _params: &[u32]) -> Option<u32> {
        None
    }

    /// Whether the kernel reads rows and packed weights together, step by step along k, and holds all sums meanwhile. Otherwise it
    /// first prepares its rows, and then multiplies and stores one tile of the weight after the other. Only the simulator asks.
    fn holds_sums(&self) -> bool {
        false
    }

    /// Outputs that are written in place: pairs (input, output) that must be the same tensor. The kernel may write the output
    /// through the input's view. No other output of an operator may be one of its inputs.
    fn in_place(&self) -> &'static [(usize, usize)] {
        &[]
    }

    /// The output that can be pushed to every rank as flagged words (`one-shot` allreduce), if the kernel supports it.
    fn pushable_output(&self) -> Option<usize> {
        None
    }

    /// Index of the parameter word that is 1 if the output is pushed as flagged words, if that is supported.
    fn push_param(&self) -> Option<usize> {
        None
    }

    /// The most rows of an output that is pushed. With more, not every task might have a row in use, or pushing is slow.
    fn most_pushed_rows(&self, target: &Target) -> u64 {
        let _ = target;
        u64::MAX
    }

    /// The output that a task can write into the memory of a peer within reach of plain stores, if the kernel is fast at it. A task that
    /// does so writes nothing else.
    fn peer_output(&self, op: &LocalOp<'_>) -> Option<usize> {
        let _ = op;
        None
    }

    /// The output is the sum of the two inputs, so a summing collective may include it.
    fn is_sum(&self) -> bool {
        false
    }

    /// Whether the tasks of a sum in f32 can carry out this operator too, for the rows that they sum: those of a `reduce` whose rows stay with
    /// the rank, those of one whose summands were copied or pushed to it, and those of a sum within a rank ([`TaskType::sums_rows`]). The operator then reads
    /// each row of input 0 once, and its tasks have at most seven arguments. Such a task has the inputs of the sum, then the operator's
    /// other inputs; the sum, then the operator's outputs; the parameters of the sum, then the operator's; and the first argument of the
    /// sum, then the operator's.
    fn joins_sum(&self, op: &LocalOp<'_>) -> bool {
        let _ = op;
        false
    }

    /// Whether tasks of this sum, cut by whole rows instead of as [`TaskType::partition`] does, can carry out an operator that joins sums
    /// ([`TaskType::joins_sum`]). All inputs have the output's dimensions, and a row of the output depends on the same row of each. Such a
    /// task has operands, parameters and arguments as described there; the first argument is its first row, and the others of the sum
    /// are 0.
    fn sums_rows(&self, op: &LocalOp<'_>) -> bool {
        let _ = op;
        false
    }

    /// The outputs depend only on the values of the inputs, not on the batch (tokens, positions, rows in use). So with constant
    /// inputs they can be computed once.
    fn is_pure(&self) -> bool {
        false
    }

    /// True if running the operator has an effect besides its outputs. It is then kept even if no operator reads them.
    fn has_effects(&self) -> bool {
        false
    }

    /// Pairs of an input and an output that may share memory if no later operator reads the input. A task must
    /// read from that input only the elements that it writes to that output, each before it is written.
    fn may_overwrite(&self) -> &'static [(usize, usize)] {
        &[]
    }

    /// Fusions that result in this type.
    fn fusions(&self) -> &'static [Fusion] {
        &[]
    }

    /// Whether operators are fused into this one, which `op` describes. False keeps them apart.
    fn fuses(&self, op: &OpView<'_>, world: u32, target: &Target) -> bool {
        let _ = (op, world, target);
        true
    }

    /// The local type in which the operator prefers to read activation `input`, if another layout of the same numbers is
    /// better. If the writer of the activation supports it ([`TaskType::writes_as`]) and all readers want the same type, then
    /// [`TaskType::expand`] and [`TaskType::partition`] of both operators get this type as the local one.
    fn reads_as(&self, op: &LocalOp<'_>, input: usize, target: &Target) -> Option<TensorType> {
        let _ = (op, input, target);
        None
    }

    /// Whether the operator can write output `output` as the local type `ty`, which its reader prefers.
    fn writes_as(&self, op: &LocalOp<'_>, output: usize, ty: &TensorType, target: &Target) -> bool {
        let _ = (op, output, ty, target);
        false
    }

    /// The operators that replace this one if it is carried out by several task types, such as attention and its merge. Called
    /// after sharding and fusion, with local dimensions.
    fn expand(&self, op: &LocalOp<'_>, target: &Target) -> Result<Option<Expansion>, OpError> {
        let _ = (op, target);
        Ok(None)
    }
}

/// A temporary tensor of an [`Expansion`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Temporary {
    /// Suffix of its name, after the operator's name.
    pub suffix: &'static str,
    /// Its type. In [`TaskType::expand`] it has one rank's dimensions, in [`TaskType::compose`] global ones.
    pub ty: TensorType,
}

/// An operand of an operator of an [`Expansion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpansionOperand {
    /// Input of the operator that is replaced.
    Input(usize),
    /// Output of the operator that is replaced.
    Output(usize),
    /// A temporary.
    Temporary(usize),
}

/// One operator of an [`Expansion`].
#[derive(Clone, Debug, PartialEq)]
pub struct ExpandedOp {
    /// Task type.
    pub op_type: &'static str,
    /// Suffix of its name, after the name of the replaced operator.
    pub suffix: &'static str,
    /// Inputs.
    pub inputs: Vec<ExpansionOperand>,
    /// Outputs.
    pub outputs: Vec<ExpansionOperand>,
    /// Attributes. In [`TaskType::expand`] they are added to those of the replaced operator; in [`TaskType::compose`] they are
    /// all attributes.
    pub attrs: Attrs,
}

/// Operators that replace one operator, and the temporaries between them.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Expansion {
    /// Tensors between the operators.
    pub temporaries: Vec<Temporary>,
    /// In order.
    pub ops: Vec<ExpandedOp>,
}

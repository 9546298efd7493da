//! The contract of a task type: what an operator means, how it is sharded, and how it is cut into tasks.
//!
//! Operators and task types share their names: after fusion each operator is carried out by tasks of the type
//! of the same name (and, for collectives, by copy, signal and reduce tasks, which this crate makes itself).

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

/// Type and dimensions of a tensor, as inference sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Dimensions (global in `infer` and `shard`, of one rank in `partition`).
    pub dims: Vec<u64>,
    /// What the first dimension counts.
    pub rows: Rows,
}

/// An operator with its operands, as passes show it to its contract.
#[derive(Clone, Debug)]
pub struct OpView<'a> {
    /// Name, for messages.
    pub name: &'a str,
    /// Constants.
    pub attrs: &'a Attrs,
    /// Inputs in order.
    pub inputs: Vec<OperandView<'a>>,
    /// Outputs in order; in `infer` as far as they are declared.
    pub outputs: Vec<OperandView<'a>>,
    /// What an iteration has room for.
    pub capacity: Capacity,
}

/// One operand in an [`OpView`].
#[derive(Clone, Debug)]
pub struct OperandView<'a> {
    /// Tensor name.
    pub name: &'a str,
    /// Type and global dimensions.
    pub ty: TensorType,
    /// How it is spread over the ranks (inputs of `shard`, all in `partition`).
    pub sharding: &'a Sharding,
    /// What it is for.
    pub role: &'a Role,
}

/// What sharding an operator needs of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Need {
    /// As it is.
    AsIs,
    /// All of it on every rank: a partial input is allreduced, a split one gathered.
    Replicated,
    /// This split: a replicated input is sliced, one that is split otherwise exchanged, a partial one summed.
    Split(Sharding),
}

/// How an operator behaves under the shardings of its inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardRule {
    /// For each input. Where an input is not as needed, a collective is inserted and `shard` is asked again.
    pub inputs: Vec<Need>,
    /// Sharding of each output, given that the inputs are as needed.
    pub outputs: Vec<Sharding>,
}

/// An operator on one rank: operand dimensions are the rank's own.
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
    /// Global ranges of each part of input `index` that this rank holds; empty where it is not split.
    pub fn input_ranges(&self, index: usize) -> Vec<Range<u64>> {
        self.global.inputs[index].sharding.ranges(self.rank, self.world)
    }
}

/// A region of one operand that a task reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Index of the operand: inputs count from 0 in `reads`, outputs from 0 in `writes`.
    pub operand: u8,
    /// The box, in the operand's region space (its local dimensions unless its role names another).
    pub region: Region,
    /// The kernel gets the whole tensor, since the bytes are known at run time only: what the region stands for.
    pub trust: Option<Trust>,
}

impl Access {
    /// The kernel's view is the region itself.
    pub fn new(operand: u8, region: Region) -> Self {
        Access { operand, region, trust: None }
    }
    /// The kernel sees the whole tensor, but touches only the rows of active slot `slot` of `of`. In `region` the rows
    /// (dimension 0) are the slot's *share*, R slot/of .. R (slot + 1)/of of R; it stands for rows known at run time.
    pub fn rows_of_slot(operand: u8, region: Region, slot: u32, of: u32) -> Self {
        Access { operand, region, trust: Some(Trust::RowsOfSlot { slot, of }) }
    }
    /// The kernel sees the whole cache, but touches only the pages that `region`, in the cache's own index space,
    /// stands for.
    pub fn pages_of_slot(operand: u8, region: Region) -> Self {
        Access { operand, region, trust: Some(Trust::PagesOfSlot) }
    }
    /// The kernel sees the whole tensor, but touches only the rows of what falls to task `task` of `of`, which share the
    /// iteration's work. In `region` the rows are the task's share, as a slot's are in [`Access::rows_of_slot`].
    pub fn rows_of_units(operand: u8, region: Region, task: u32, of: u32) -> Self {
        Access { operand, region, trust: Some(Trust::RowsOfUnits { task, of }) }
    }
    /// The kernel sees the whole cache, but touches only pages of rows that fall to it; `region`, in the cache's own
    /// index space, stands for them.
    pub fn pages_of_rows(operand: u8, region: Region) -> Self {
        Access { operand, region, trust: Some(Trust::PagesOfRows) }
    }
}

/// One task before events and placement. The kernel's operands are `reads` then `writes`, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TaskSpec {
    /// Regions read; an input that is also written appears in both.
    pub reads: SmallVec<[Access; 6]>,
    /// Regions written.
    pub writes: SmallVec<[Access; 2]>,
    /// Constants of this one task.
    pub args: [i32; 8],
    /// Bytes it moves, roughly: used to balance workers.
    pub cost: u64,
}

/// An operator cut into tasks.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Partition {
    /// The variant's parameters (the words of the task type's `params.h` struct), the same for all tasks.
    pub params: Vec<u32>,
    /// Scratch memory that a worker needs for one of these tasks, bytes.
    pub scratch_bytes: u64,
    /// The tasks. Their writes cover the outputs exactly once.
    pub tasks: Vec<TaskSpec>,
}

/// Fuse `producer` into `consumer` where the producer's first output is the consumer's input
/// `consumer_input`, nobody else reads it and it is no output of the graph.
///
/// The fused operator's inputs are the producer's inputs, then the consumer's others in order; its attributes
/// are both sets together (the consumer's win).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusion {
    /// Operator that is absorbed.
    pub producer: &'static str,
    /// Operator that absorbs it.
    pub consumer: &'static str,
    /// Which of the consumer's inputs the producer writes.
    pub consumer_input: usize,
    /// The result.
    pub fused: &'static str,
}

/// A task type. One folder of `kernels-cu/src/tasks` implements it.
pub trait TaskType: Debug + Send + Sync {
    /// Name of the operator and of the task type, e.g. `rmsnorm_linear`.
    fn name(&self) -> &'static str;

    /// The attributes that the operator takes; others are refused with this list.
    fn attributes(&self) -> &'static [Attribute] {
        &[]
    }

    /// What decides how fast its tasks are and nothing else; read by [`Target::tuned`].
    fn knobs(&self) -> &'static [&'static Knob] {
        &[]
    }

    /// Checks operands and attributes; gives the outputs' types with global dimensions.
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError>;

    /// The operators that this one only composes, if it does: they replace it before sharding and fusion, so that
    /// each is sharded and fused like any other. Such a type has no tasks of its own, so `infer` is all else it needs.
    fn compose(&self, op: &OpView<'_>) -> Result<Option<Expansion>, OpError> {
        let _ = op;
        Ok(None)
    }

    /// How the operator behaves under the shardings of its inputs, on `world` ranks. By default every rank does all
    /// of it.
    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let _ = world;
        Ok(ShardRule {
            inputs: vec![Need::Replicated; op.inputs.len()],
            outputs: vec![Sharding::Replicated; op.outputs.len()],
        })
    }

    /// Cuts one rank's share into tasks. An operator that is always replaced by others ([`TaskType::compose`],
    /// [`TaskType::expand`]) needs none.
    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let _ = (op, target);
        Err(OpError(format!(
            "`{}` has no tasks of its own, and was not replaced by other operators",
            self.name()
        )))
    }

    /// Inputs that never change while the kernel runs, so that a loader may fetch them before the task's events.
    fn constant_inputs(&self) -> &'static [usize] {
        &[]
    }

    /// Inputs of a task, by their place among its reads, of which it takes only the rows that data name (a table of
    /// embeddings), however large its view is. The simulator takes such a read to be no larger than what the task writes.
    fn gathered_inputs(&self) -> &'static [usize] {
        &[]
    }

    /// Outputs that are written in place: (input, output) pairs that must be the same tensor. The kernel may write the
    /// output through the input's view. No other output of an operator may be one of its inputs.
    fn in_place(&self) -> &'static [(usize, usize)] {
        &[]
    }

    /// Output that can be pushed as flagged words to every rank (`one-shot` allreduce), if the kernel can.
    fn pushable_output(&self) -> Option<usize> {
        None
    }

    /// Index in the parameters of the word that is 1 where the output is pushed flagged, if it can be.
    fn push_param(&self) -> Option<usize> {
        None
    }

    /// The output is the sum of the two inputs: a collective that sums may take it on.
    fn is_sum(&self) -> bool {
        false
    }

    /// The outputs follow from the inputs' values alone, not from the batch (tokens, positions, rows in use): of
    /// constants they may be computed once.
    fn is_pure(&self) -> bool {
        false
    }

    /// Whether running the operator has an effect besides its outputs, so that it is kept where nobody reads them.
    fn has_effects(&self) -> bool {
        false
    }

    /// Pairs of an input and an output that may share memory where nobody reads the input afterwards: a task reads of
    /// that input only what it writes of that output, each element before it is written.
    fn may_overwrite(&self) -> &'static [(usize, usize)] {
        &[]
    }

    /// Fusions that end in this type.
    fn fusions(&self) -> &'static [Fusion] {
        &[]
    }

    /// Whether operators are to be fused into this one, given what it would be. False leaves them apart.
    fn fuses(&self, op: &OpView<'_>, world: u32, target: &Target) -> bool {
        let _ = (op, world, target);
        true
    }

    /// The local type in which the operator would rather read activation `input` than as it is, where that is another layout of
    /// the same numbers. If whoever writes the activation can ([`TaskType::writes_as`]) and all readers want the same,
    /// [`TaskType::expand`] and [`TaskType::partition`] of both find this type among the local ones.
    fn reads_as(&self, op: &LocalOp<'_>, input: usize, target: &Target) -> Option<TensorType> {
        let _ = (op, input, target);
        None
    }

    /// Whether the operator can write output `output` as the local type `ty`, which its reader wants.
    fn writes_as(&self, op: &LocalOp<'_>, output: usize, ty: &TensorType, target: &Target) -> bool {
        let _ = (op, output, ty, target);
        false
    }

    /// Operators that are carried out by further tasks of other types after this one's (attention's merge):
    /// given this operator, the operators that replace it. Runs after sharding and fusion, on local dimensions.
    fn expand(&self, op: &LocalOp<'_>, target: &Target) -> Result<Option<Expansion>, OpError> {
        let _ = (op, target);
        Ok(None)
    }
}

/// A temporary tensor of an [`Expansion`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Temporary {
    /// Added to the operator's name.
    pub suffix: &'static str,
    /// Type: of [`TaskType::expand`] with one rank's dimensions, of [`TaskType::compose`] with global ones.
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
    /// Added to the operator's name.
    pub suffix: &'static str,
    /// Inputs.
    pub inputs: Vec<ExpansionOperand>,
    /// Outputs.
    pub outputs: Vec<ExpansionOperand>,
    /// Attributes: of [`TaskType::expand`] added to those of the operator that is replaced, of [`TaskType::compose`]
    /// all.
    pub attrs: Attrs,
}

/// Operators that replace one, with the temporaries between them.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Expansion {
    /// Tensors between the operators.
    pub temporaries: Vec<Temporary>,
    /// In order.
    pub ops: Vec<ExpandedOp>,
}

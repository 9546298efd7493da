//! From an op graph to what each rank executes.
//!
//! [`build_all`] and [`build_rank`] run the passes ([`crate::passes`]) on a copy of the graph and lower it; for
//! several steps of one's own, [`Builder`] keeps what ranks share.

use crate::lower::{Prepared, Shared};
use crate::op_graph::OpGraph;
use crate::passes;
use crate::target::Target;
use crate::task_graph::{Allreduce, Placement, TaskGraph};
use crate::task_type::Registry;

/// Why a graph can't be built: what is wrong where, and what mends it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// An operator's operands, attributes, sharding or tasks.
    #[error("operator `{op}`: {message}")]
    Op {
        /// Name of the operator.
        op: String,
        /// What is wrong.
        message: String,
    },
    /// An operator type that is not registered.
    #[error("operator `{op}`: unknown type `{op_type}`; known are {known}")]
    UnknownOp {
        /// Name of the operator.
        op: String,
        /// Its type.
        op_type: String,
        /// Types that are registered.
        known: String,
    },
    /// A tensor's name, sizes or sharding.
    #[error("tensor `{tensor}`: {message}")]
    Tensor {
        /// Name of the tensor.
        tensor: String,
        /// What is wrong.
        message: String,
    },
    /// The graph as a whole.
    #[error("{0}")]
    Graph(String),
    /// The options.
    #[error("build options: {0}")]
    Options(String),
}

impl BuildError {
    pub(crate) fn op(op: &str, message: impl Into<String>) -> Self {
        BuildError::Op { op: op.to_string(), message: message.into() }
    }
    pub(crate) fn tensor(tensor: &str, message: impl Into<String>) -> Self {
        BuildError::Tensor { tensor: tensor.to_string(), message: message.into() }
    }
}

/// What graphs are built for.
#[derive(Clone, Debug, PartialEq)]
pub struct BuildOptions {
    /// Number of ranks.
    pub world: u32,
    /// Who places tasks.
    pub placement: Placement,
    /// How allreduces are carried out.
    pub allreduce: Allreduce,
    /// Largest payload (bytes of one rank's partial sums) that [`Allreduce::Auto`] pushes as flagged words.
    pub one_shot_bytes: u64,
    /// Machine.
    pub target: Target,
    /// False only to show what the protection is for: receive buffers are then shared without regard to the peers that
    /// may still read them. Such graphs don't pass the verifier.
    pub protected: bool,
}

impl BuildOptions {
    /// Static placement, allreduces by size.
    pub fn new(world: u32, target: Target) -> Self {
        BuildOptions {
            world,
            placement: Placement::Static,
            allreduce: Allreduce::Auto,
            one_shot_bytes: 256 << 10,
            target,
            protected: true,
        }
    }

    fn check(&self) -> Result<(), BuildError> {
        let error = |message: &str| Err(BuildError::Options(message.into()));
        if self.world == 0 || self.world > u32::from(u16::MAX) {
            return error("the number of ranks must be 1 to 65535");
        }
        if self.target.workers == 0 || self.target.max_tiles == 0 || self.target.column_unit == 0 {
            return error("the target needs at least one worker, one tile and a column unit");
        }
        Ok(())
    }
}

/// A graph after the passes that ranks share.
#[derive(Debug)]
pub struct Builder {
    shared: Shared,
}

impl Builder {
    /// Runs the passes and cuts operators into tasks, for all ranks.
    ///
    /// # Errors
    /// What [`crate::passes`] and the contracts of the operators say.
    pub fn new(graph: &OpGraph, registry: &Registry, options: &BuildOptions) -> Result<Self, BuildError> {
        options.check()?;
        let mut graph = graph.clone();
        passes::infer(&mut graph, registry)?;
        passes::shard(&mut graph, registry, options.world)?;
        passes::fuse(&mut graph, registry, options.world, &options.target)?;
        Ok(Builder { shared: Shared::new(Prepared { graph }, registry, options)? })
    }

    /// One rank's task graph.
    ///
    /// # Errors
    /// A region that its tensor's layout can't give a view of; a rank outside the world.
    pub fn rank(&self, rank: u32) -> Result<TaskGraph, BuildError> {
        self.shared.rank(rank)
    }

    /// All ranks' task graphs, in order.
    ///
    /// # Errors
    /// As [`Builder::rank`].
    pub fn all(&self) -> Result<Vec<TaskGraph>, BuildError> {
        self.shared.all()
    }

    /// What was done otherwise than asked, and why.
    pub fn notes(&self) -> &[String] {
        self.shared.notes()
    }

    /// The op graph after sharding and fusion.
    pub fn op_graph(&self) -> &OpGraph {
        self.shared.op_graph()
    }
}

/// Builds the task graph of one rank.
///
/// # Errors
/// See [`BuildError`].
pub fn build_rank(
    graph: &OpGraph,
    registry: &Registry,
    options: &BuildOptions,
    rank: u32,
) -> Result<TaskGraph, BuildError> {
    Builder::new(graph, registry, options)?.rank(rank)
}

/// Builds the task graphs of all ranks.
///
/// # Errors
/// See [`BuildError`].
pub fn build_all(
    graph: &OpGraph,
    registry: &Registry,
    options: &BuildOptions,
) -> Result<Vec<TaskGraph>, BuildError> {
    Builder::new(graph, registry, options)?.all()
}

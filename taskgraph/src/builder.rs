//! From an op graph to the task graph of each rank.
//!
//! [`build_all`] and [`build_rank`] run the passes ([`crate::passes`]) on a copy of the graph and lower it. [`Builder`] runs
//! the steps one by one, and keeps what ranks share.

pub use crate::error::BuildError;
use crate::lower::Shared;
pub use crate::lower::Spares;
use crate::op_graph::OpGraph;
pub use crate::options::BuildOptions;
use crate::passes::{Passes, check_all_roles};
use crate::registry::Registry;
use crate::task_graph::TaskGraph;
use crate::verify::Class;

/// A graph after the passes, which all ranks share.
#[derive(Debug)]
pub struct Builder {
    shared: Shared,
}

impl Builder {
    /// Runs the passes and cuts the operators into tasks, for all ranks.
    ///
    /// # Errors
    /// Those of [`crate::passes`] and of the operators' contracts.
    pub fn new(graph: &OpGraph, registry: &Registry, options: &BuildOptions) -> Result<Self, BuildError> {
        Builder::with_passes(graph, registry, options, &Passes::default())
    }

    /// Like [`Builder::new`], with the caller's list of passes.
    ///
    /// # Errors
    /// Those of [`Builder::new`]; also a pass that needs a property which the passes before it do not give.
    pub fn with_passes(
        graph: &OpGraph,
        registry: &Registry,
        options: &BuildOptions,
        passes: &Passes,
    ) -> Result<Self, BuildError> {
        options.check()?;
        let mut graph = graph.clone();
        passes.run(&mut graph, registry, options)?;
        check_all_roles(&graph, registry)?;
        Ok(Builder { shared: Shared::new(graph, registry, options)? })
    }

    /// The task graph of one rank.
    ///
    /// # Errors
    /// The tensor's layout allows no view of a region, or the rank is outside the world.
    pub fn rank(&self, rank: u32) -> Result<TaskGraph, BuildError> {
        self.shared.rank(rank, None)
    }

    /// The task graphs of all ranks, in order.
    ///
    /// # Errors
    /// Those of [`Builder::rank`].
    pub fn all(&self) -> Result<Vec<TaskGraph>, BuildError> {
        self.shared.all()
    }

    /// The ranks' graphs. If the ranks are alike, only rank 0's graph is kept: each other graph is compared with it while it is
    /// built, and its tasks and operands are not kept.
    ///
    /// # Errors
    /// Those of [`Builder::rank`].
    pub fn class(&self, spares: &Spares) -> Result<Class, BuildError> {
        self.shared.class(spares)
    }

    /// Like [`Builder::class`], but with `first` as rank 0's graph. Tests use it to show that a difference is found.
    ///
    /// # Errors
    /// Those of [`Builder::rank`].
    #[doc(hidden)]
    pub fn class_beside(&self, first: TaskGraph) -> Result<Class, BuildError> {
        self.shared.class_beside(first, &Spares::default())
    }

    /// Like [`Builder::class`], but `look` sees every graph: each graph is built completely, compared and dropped. Returns the
    /// results of `look` by rank.
    ///
    /// # Errors
    /// Those of [`Builder::rank`].
    pub fn class_seen<T: Send>(
        &self,
        spares: &Spares,
        look: impl Fn(&TaskGraph) -> T + Sync,
    ) -> Result<(Class, Vec<T>), BuildError> {
        self.shared.class_seen(spares, look)
    }

    /// Deviations from the options, with their reasons.
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

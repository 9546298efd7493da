//! From an op graph to what each rank executes.
//!
//! [`build_all`] and [`build_rank`] run the passes ([`crate::passes`]) on a copy of the graph and lower it; to
//! take the steps one by one, use [`Builder`], which keeps what ranks share.

pub use crate::error::BuildError;
use crate::lower::Shared;
pub use crate::lower::Spares;
use crate::op_graph::OpGraph;
pub use crate::options::BuildOptions;
use crate::passes::Passes;
use crate::registry::Registry;
use crate::task_graph::TaskGraph;
use crate::verify::Class;

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
        Builder::with_passes(graph, registry, options, &Passes::default())
    }

    /// The same with the caller's list of passes.
    ///
    /// # Errors
    /// As [`Builder::new`]; a pass that needs what the ones before it do not give.
    pub fn with_passes(
        graph: &OpGraph,
        registry: &Registry,
        options: &BuildOptions,
        passes: &Passes,
    ) -> Result<Self, BuildError> {
        options.check()?;
        let mut graph = graph.clone();
        passes.run(&mut graph, registry, options)?;
        Ok(Builder { shared: Shared::new(graph, registry, options)? })
    }

    /// One rank's task graph.
    ///
    /// # Errors
    /// A region that its tensor's layout can't give a view of; a rank outside the world.
    pub fn rank(&self, rank: u32) -> Result<TaskGraph, BuildError> {
        self.shared.rank(rank, None)
    }

    /// All ranks' task graphs, in order.
    ///
    /// # Errors
    /// As [`Builder::rank`].
    pub fn all(&self) -> Result<Vec<TaskGraph>, BuildError> {
        self.shared.all()
    }

    /// The ranks' graphs, of which rank 0's is kept alone if the others are alike: then each is compared with it as it is made,
    /// and its tasks and operands are not kept.
    ///
    /// # Errors
    /// As [`Builder::rank`].
    pub fn class(&self, spares: &Spares) -> Result<Class, BuildError> {
        self.shared.class(spares)
    }

    /// [`Builder::class`] where rank 0's graph is `first`, whoever made it: to test that a difference is found.
    ///
    /// # Errors
    /// As [`Builder::rank`].
    #[doc(hidden)]
    pub fn class_beside(&self, first: TaskGraph) -> Result<Class, BuildError> {
        self.shared.class_beside(first, &Spares::default())
    }

    /// The same, where `look` sees every graph: each is built whole, compared and dropped. What `look` returns comes back rank
    /// by rank.
    ///
    /// # Errors
    /// As [`Builder::rank`].
    pub fn class_seen<T: Send>(
        &self,
        spares: &Spares,
        look: impl Fn(&TaskGraph) -> T + Sync,
    ) -> Result<(Class, Vec<T>), BuildError> {
        self.shared.class_seen(spares, look)
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

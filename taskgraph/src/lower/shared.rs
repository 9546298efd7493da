//! What ranks share, and the ranks themselves, built on as many threads as there are cores.

use super::emit::emit;
use super::events::{Analysis, Links, analyse};
use super::memory::{Memory, plan_memory};
use super::order::Order;
use super::plan::Plan;
use crate::error::BuildError;
use crate::op_graph::OpGraph;
use crate::options::BuildOptions;
use crate::parallel;
use crate::registry::Registry;
use crate::task_graph::TaskGraph;

/// A plan with its dependencies and buffers.
#[derive(Debug)]
pub(crate) struct Shared {
    plan: Plan,
    analyses: Vec<Analysis>,
    /// For each rank its analysis; ranks that are cut alike share one.
    analysis_of: Vec<usize>,
    memory: Memory,
}

impl Shared {
    pub fn new(graph: OpGraph, registry: &Registry, options: &BuildOptions) -> Result<Self, BuildError> {
        let mut plan = Plan::new(graph, registry, options)?;
        let links = Links::new(&plan);
        let mut leaders: Vec<u32> = Vec::new();
        let analysis_of: Vec<usize> = (0..options.world)
            .map(|rank| match leaders.iter().position(|&l| plan.same_cut(l, rank)) {
                Some(found) => found,
                None => {
                    leaders.push(rank);
                    leaders.len() - 1
                }
            })
            .collect();
        let mut analyses = parallel::map(leaders.len(), |i| analyse(&plan, &links, leaders[i]));
        let order = Order::new(&plan, &links, &analyses.iter().collect::<Vec<_>>());
        let memory = plan_memory(&plan, &order);
        if memory.closing {
            plan.add_closing_event();
            analyses.iter_mut().for_each(|a| a.add_closing_event(options.world - 1));
        }
        Ok(Shared { plan, analyses, analysis_of, memory })
    }

    pub fn rank(&self, rank: u32) -> Result<TaskGraph, BuildError> {
        let Some(&analysis) = self.analysis_of.get(rank as usize) else {
            return Err(BuildError::Options(format!(
                "rank {rank} is not below the number of ranks, {}",
                self.analysis_of.len()
            )));
        };
        emit(&self.plan, &self.analyses[analysis], &self.memory, rank)
    }

    pub fn all(&self) -> Result<Vec<TaskGraph>, BuildError> {
        parallel::map(self.analysis_of.len(), |rank| self.rank(rank as u32)).into_iter().collect()
    }

    pub fn notes(&self) -> &[String] {
        &self.plan.notes
    }

    pub fn op_graph(&self) -> &OpGraph {
        &self.plan.graph
    }
}

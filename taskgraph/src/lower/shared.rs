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
use crate::verify::{Alike, Class};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Graphs that are not needed any more. The next ones take their memory: fresh memory costs more than what is written there.
#[derive(Debug, Default)]
pub struct Spares(Mutex<Vec<TaskGraph>>);

impl Spares {
    fn list(&self) -> std::sync::MutexGuard<'_, Vec<TaskGraph>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn take(&self) -> Option<TaskGraph> {
        self.list().pop()
    }

    fn put(&self, graph: TaskGraph) {
        self.list().push(graph);
    }
}

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

    pub fn rank(&self, rank: u32, spare: Option<TaskGraph>) -> Result<TaskGraph, BuildError> {
        let Some(&analysis) = self.analysis_of.get(rank as usize) else {
            return Err(BuildError::Options(format!(
                "rank {rank} is not below the number of ranks, {}",
                self.analysis_of.len()
            )));
        };
        emit(&self.plan, &self.analyses[analysis], &self.memory, rank, spare)
    }

    /// The ranks' graphs, of which rank 0's is kept alone if the others are alike. `look` sees each.
    pub fn class<T: Send>(
        &self,
        spares: &Spares,
        look: impl Fn(&TaskGraph) -> T + Sync,
    ) -> Result<(Class, Vec<T>), BuildError> {
        let world = self.analysis_of.len();
        let first = self.rank(0, spares.take())?;
        let mut seen = vec![look(&first)];
        if world > 1 && Alike::can_be_first(&first) {
            // Once one rank is not alike there is no need to look at the others here.
            let missed = AtomicBool::new(false);
            let compared = parallel::map(world - 1, |i| {
                if missed.load(Ordering::Relaxed) {
                    return Ok((None, None));
                }
                let mut graph = self.rank(i as u32 + 1, spares.take())?;
                let seen = look(&graph);
                let compared = Alike::compare(&first, &mut graph);
                if compared.is_none() {
                    missed.store(true, Ordering::Relaxed);
                }
                spares.put(graph);
                Ok::<_, BuildError>((compared, Some(seen)))
            });
            let (compared, others): (Vec<_>, Vec<_>) =
                compared.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
            match Alike::new(first, compared) {
                Ok(alike) => {
                    seen.extend(others.into_iter().flatten());
                    return Ok((Class::Alike(alike), seen));
                }
                Err(first) => spares.put(*first),
            }
        } else {
            spares.put(first);
        }
        let all = self.all()?;
        let seen = all.iter().map(look).collect();
        Ok((Class::All(all), seen))
    }

    pub fn all(&self) -> Result<Vec<TaskGraph>, BuildError> {
        parallel::map(self.analysis_of.len(), |rank| self.rank(rank as u32, None)).into_iter().collect()
    }

    pub fn notes(&self) -> &[String] {
        &self.plan.notes
    }

    pub fn op_graph(&self) -> &OpGraph {
        &self.plan.graph
    }
}

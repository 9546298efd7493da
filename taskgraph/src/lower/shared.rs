//! Builds the parts that ranks share, and the ranks themselves, on as many threads as there are cores.

use super::columns::Columns;
use super::emit::{compare, emit};
use super::events::{Analysis, Links, analyse};
use super::memory::{Memory, plan_memory};
use super::order::Order;
use super::plan::Plan;
use crate::error::BuildError;
use crate::op_graph::OpGraph;
use crate::options::BuildOptions;
use crate::parallel;
use crate::registry::Registry;
use crate::task_graph::{Placement, TaskGraph};
use crate::verify::{Alike, Class, Comparing};
use std::sync::{Mutex, PoisonError};

/// Graphs that are no longer needed. New graphs reuse their memory, because fresh memory costs more than the writes to it.
#[derive(Debug, Default)]
pub struct Spares {
    graphs: Mutex<Vec<TaskGraph>>,
    columns: Mutex<Vec<Columns>>,
}

fn locked<T>(list: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Spares {
    fn take(&self) -> Option<TaskGraph> {
        locked(&self.graphs).pop()
    }

    /// Adds a graph.
    pub fn put(&self, graph: TaskGraph) {
        locked(&self.graphs).push(graph);
    }
}

/// A plan with its dependencies and buffers.
#[derive(Debug)]
pub(crate) struct Shared {
    plan: Plan,
    analyses: Vec<Analysis>,
    /// The analysis of each rank. Ranks that are cut alike share one.
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
        emit(&self.plan, self.analysis(rank)?, &self.memory, rank, spare)
    }

    fn analysis(&self, rank: u32) -> Result<&Analysis, BuildError> {
        let number = self.analysis_of.get(rank as usize).ok_or_else(|| {
            let ranks = self.analysis_of.len();
            BuildError::Options(format!("rank {rank} does not exist; there are {ranks} ranks"))
        })?;
        Ok(&self.analyses[*number])
    }

    /// The ranks' graphs. If the ranks are alike, only rank 0's graph is kept, and no other graph ever exists as a whole.
    pub fn class(&self, spares: &Spares) -> Result<Class, BuildError> {
        self.class_beside(self.rank(0, spares.take())?, spares)
    }

    /// The same with `first` as rank 0's graph.
    pub fn class_beside(&self, first: TaskGraph, spares: &Spares) -> Result<Class, BuildError> {
        let dynamic = self.plan.options.placement == Placement::Dynamic;
        let graph = |rank: u32, comparing: &mut Comparing<'_>| {
            if dynamic {
                // The place of a task is known only at the end.
                let graph = self.rank(rank, spares.take())?;
                comparing.operands(&graph.operands);
                return Ok(graph);
            }
            let mut columns = locked(&spares.columns).pop().unwrap_or_default();
            let graph =
                compare(&self.plan, self.analysis(rank)?, &self.memory, rank, &mut columns, comparing)?;
            locked(&spares.columns).push(columns);
            Ok(graph)
        };
        let done = |graph: TaskGraph| {
            if dynamic {
                spares.put(graph);
            }
        };
        match Alike::find(first, graph, done)? {
            Ok(alike) => Ok(Class::Alike(Box::new(alike))),
            Err(first) => {
                spares.put(*first);
                Ok(Class::All(self.all()?))
            }
        }
    }

    /// Like [`Shared::class`], but `look` sees each graph.
    pub fn class_seen<T: Send>(
        &self,
        spares: &Spares,
        look: impl Fn(&TaskGraph) -> T + Sync,
    ) -> Result<(Class, Vec<T>), BuildError> {
        let first = self.rank(0, spares.take())?;
        let seen = Mutex::new(vec![(0, look(&first))]);
        let graph = |rank: u32, comparing: &mut Comparing<'_>| {
            let graph = self.rank(rank, spares.take())?;
            comparing.operands(&graph.operands);
            let found = look(&graph);
            seen.lock().unwrap_or_else(PoisonError::into_inner).push((rank, found));
            Ok(graph)
        };
        match Alike::find(first, graph, |graph| spares.put(graph))? {
            Ok(alike) => {
                let mut seen = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
                seen.sort_by_key(|(rank, _)| *rank);
                Ok((Class::Alike(Box::new(alike)), seen.into_iter().map(|(_, found)| found).collect()))
            }
            Err(first) => {
                spares.put(*first);
                let all = self.all()?;
                let seen = all.iter().map(look).collect();
                Ok((Class::All(all), seen))
            }
        }
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

//! Edges from flagged writes to their reads, on every rank: each word that is read must have exactly one writer.
//!
//! Flagged tensors of a graph may overlap, so that a word holds values of several tensors in turn. A word's tag is epoch x
//! flagged tensors + number of the tensor ([`TaskGraph::flag_numbers`]). With one writer per word of a tensor, no two writes of a
//! word have the same tag. A reader accepts only the tag that it waits for. So it is enough that a word is not written again
//! before its reader has read it. This is proven like any other reuse (see `overlay`): for reuse, a flagged edge orders what
//! follows its read. Tags have 32 bits and wrap around, and rows that are not in use keep old tags. All words are refreshed every
//! 2^14 epochs, and a graph has at most 2^16 flagged tensors, so no tag gets as old as 2^32 writes.
//!
//! A reader waits only for rows in use. Which rows these are is known only at run time, but the first row of an iteration is
//! always one of them. So only the writers of the first row of a reader come before it in every iteration ([`FlagEdges::next`]).
//! The work of another writer, and of the tasks before that in its list, may still be running.

use super::access::{Access, Memory, Symmetric};
use super::grid::{Grid, uncovered};
use super::lists::{Lists, bases};
use super::ranks::Ranks;
use super::report::{Names, Violation, ViolationKind};
use crate::dtype::DType;
use crate::region::Region;
use crate::task_graph::{TaskGraph, core_types};
use rustc_hash::FxHashSet;

/// Maximum number of flagged tensors of a graph; see the module's documentation.
const MOST: usize = 1 << 16;

/// Flagged edges between tasks, numbered over all ranks. If ranks are alike, only the edges of rank 0's tasks.
#[derive(Default)]
pub(super) struct FlagEdges {
    /// Readers that wait for a task's writes in every iteration.
    pub(super) next: Lists,
    /// Writers that a task waits for in every iteration.
    pub(super) previous: Lists,
    /// Readers that wait for a task's writes if its rows are in use.
    pub(super) readers: Lists,
    /// Writers that a task waits for if their rows are in use.
    pub(super) writers: Lists,
    /// Tensors (rank, number) whose written words are all read.
    pub(super) all_read: FxHashSet<(u32, u32)>,
}

impl FlagEdges {
    /// True if flagged words are read.
    pub(super) fn any(&self) -> bool {
        self.readers.any()
    }
}

/// A writer, a reader, and whether the reader waits for the writer in every iteration.
type Pair = (u32, u32, bool);

/// The part of `region` that a reader waits for in every iteration: the first row of tokens, if it has that. There may be no samples.
fn always_read(graph: &TaskGraph, task: u32, region: &Region) -> Option<Region> {
    const TOKENS: u32 = 0;
    const FIXED: u32 = 2;
    const ROWS: usize = 1;
    let task = graph.tasks.get(task as usize)?;
    if graph.type_names.get(usize::from(task.task_type))? != core_types::REDUCE {
        return None;
    }
    match graph.variants.get(usize::from(task.variant))?.params.get(2).copied() {
        // Dimensions [sender, row, column].
        Some(TOKENS) if graph.inputs(task).first()?.ndim == 3 && region.lo[ROWS] == 0 => {
            Some(region.with(ROWS, 0, 1))
        }
        Some(FIXED) => Some(*region),
        _ => None,
    }
}

/// All flagged edges. `ranks`: all of them, or 1 if they are alike.
pub(super) fn edges(
    graphs: Ranks<'_>,
    symmetric: &Symmetric,
    ranks: usize,
    violations: &mut Vec<Violation>,
) -> FlagEdges {
    let flagged = |g: &TaskGraph| g.tensors.iter().any(|t| t.dtype == DType::F32Flagged);
    if !graphs.iter().any(flagged) {
        return FlagEdges::default();
    }
    for graph in graphs.held() {
        let count = graph.flag_numbers().into_iter().flatten().count();
        if count > MOST {
            violations.push(Violation::new(
                ViolationKind::Structure,
                &[],
                format!(
                    "rank {} has {count} flagged tensors, but tags can distinguish only {MOST}",
                    graph.rank
                ),
            ));
        }
    }
    let (_, task_base) = bases(graphs);
    let found = crate::parallel::map(ranks, |owner| {
        let mut pairs = Vec::new();
        let mut violations = Vec::new();
        let order: Vec<u32> = (2..graphs[owner].tasks.len() as u32).collect();
        let wanted = |tensor: usize| graphs[owner].tensors[tensor].dtype == DType::F32Flagged;
        let memory = Memory::new(graphs, symmetric, owner, &order, wanted);
        let mut grid = Grid::default();
        let mut all_read = Vec::new();
        for tensor in (0..graphs[owner].tensors.len()).filter(|&t| wanted(t)) {
            if tensor_edges(graphs, &memory, tensor, &mut grid, &task_base, &mut pairs, &mut violations) {
                all_read.push((owner as u32, tensor as u32));
            }
        }
        (pairs, all_read, violations)
    });
    let mut pairs: Vec<Pair> = Vec::new();
    let mut all_read = FxHashSet::default();
    for (more, read, reports) in found {
        pairs.extend(more);
        all_read.extend(read);
        violations.extend(reports);
    }
    let (of_rank, all) = (task_base[1], task_base[graphs.len()]);
    let alike = ranks < graphs.len();
    if alike {
        let read = std::mem::take(&mut all_read);
        let turned = |rank| read.iter().map(move |&(_, tensor)| (rank, tensor));
        all_read.extend((0..graphs.len() as u32).flat_map(turned));
    }
    // Readers are on the memory's own rank. If ranks are alike, the writer is turned to rank 0, and its reader with it.
    let by_writer = |&(writer, reader, _): &Pair| match alike {
        true => (writer % of_rank, (reader + all - writer / of_rank * of_rank) % all),
        false => (writer, reader),
    };
    let by_reader = |&(writer, reader, _): &Pair| (reader, writer);
    let always = || pairs.iter().filter(|(_, _, always)| *always);
    let tasks = task_base[ranks] as usize;
    FlagEdges {
        next: Lists::new(tasks, always().map(by_writer)),
        previous: Lists::new(tasks, always().map(by_reader)),
        readers: Lists::new(tasks, pairs.iter().map(by_writer)),
        writers: Lists::new(tasks, pairs.iter().map(by_reader)),
        all_read,
    }
}

/// The edges of one tensor in one rank's memory, as (writer, reader). Returns true if all written words are read.
fn tensor_edges(
    graphs: Ranks<'_>,
    memory: &Memory<'_>,
    tensor: usize,
    grid: &mut Grid,
    task_base: &[u32],
    pairs: &mut Vec<Pair>,
    violations: &mut Vec<Violation>,
) -> bool {
    let accesses = memory.accesses(tensor);
    let always = |writer: &Access, reader: &Access| {
        always_read(&graphs[usize::from(reader.rank)], reader.task, &reader.region)
            .is_some_and(|region| writer.region.overlaps(&region))
    };
    let number = |rank: u16, task: u32| task_base[rank as usize] + task;
    let names = Names { graphs };
    let twice = |a: (u16, u32), b: (u16, u32), region: &Region| {
        Violation::new(
            ViolationKind::FlaggedCoverage,
            &[a, b],
            format!(
                "{} and {} both write flagged {} in one iteration; a reader could take either: a flagged word needs exactly one writer",
                names.task(a),
                names.task(b),
                names.region(memory.owner, tensor, region)
            ),
        )
    };
    let unwritten = |reader: (u16, u32), region: &Region| {
        Violation::new(
            ViolationKind::FlaggedCoverage,
            &[reader],
            format!(
                "{} polls flagged {}, which no task writes: it would wait forever",
                names.task(reader),
                names.region(memory.owner, tensor, region)
            ),
        )
    };
    if !grid.build(accesses.iter().map(|a| &a.region)) {
        // Too many cells, so compare pair by pair.
        for (i, reader) in accesses.iter().enumerate() {
            let region = &reader.region;
            let over = |a: &&Access| a.write && a.region.overlaps(region);
            if reader.write {
                if let Some(other) = accesses[..i].iter().find(over) {
                    violations.push(twice(other.place(), reader.place(), region));
                }
                continue;
            }
            let mut covers = Vec::new();
            for writer in accesses.iter().filter(over) {
                covers.push(writer.region);
                pairs.push((
                    number(writer.rank, writer.task),
                    number(reader.rank, reader.task),
                    always(writer, reader),
                ));
            }
            if let Some(rest) = uncovered(region, &covers) {
                violations.push(unwritten(reader.place(), &rest));
            }
        }
        return false;
    }
    let mut writer_of: Vec<u32> = vec![u32::MAX; grid.len()];
    for (index, writer) in accesses.iter().enumerate().filter(|(_, a)| a.write) {
        let region = &writer.region;
        let mut other = None;
        grid.visit(&grid.cells(region), |cell| {
            if writer_of[cell] != u32::MAX && other.is_none() {
                other = Some(writer_of[cell]);
            }
            writer_of[cell] = index as u32;
            true
        });
        if let Some(other) = other {
            violations.push(twice(accesses[other as usize].place(), writer.place(), region));
        }
    }
    let mut writers = Vec::new();
    let mut read = vec![false; grid.len()];
    for reader in accesses.iter().filter(|a| !a.write) {
        let region = &reader.region;
        writers.clear();
        let mut missing = false;
        grid.visit(&grid.cells(region), |cell| {
            missing |= writer_of[cell] == u32::MAX;
            read[cell] = true;
            if writers.last() != Some(&writer_of[cell]) {
                writers.push(writer_of[cell]);
            }
            true
        });
        if missing {
            let written = accesses.iter().filter(|a| a.write).map(|a| a.region);
            let covers: Vec<_> = written.filter(|w| w.overlaps(region)).collect();
            violations.push(unwritten(reader.place(), &uncovered(region, &covers).unwrap_or(*region)));
            continue;
        }
        writers.sort_unstable();
        writers.dedup();
        for &writer in &writers {
            let writer = &accesses[writer as usize];
            pairs.push((
                number(writer.rank, writer.task),
                number(reader.rank, reader.task),
                always(writer, reader),
            ));
        }
    }
    read.iter().zip(&writer_of).all(|(read, writer)| *read || *writer == u32::MAX)
}

//! Products whose tiles go straight into the memory of the ranks that sum them ([`crate::collective::Lowered::stored_into`]).
//!
//! Such a step becomes two slots. In the first, each task writes a tile of another rank's rows into that rank's receive buffer and triggers
//! an event there. In the second, the tasks write the tiles of the rank's own rows into its own part of its buffer. Nothing is copied, and
//! the tiles travel while the next ones are computed.

use super::classes::Classes;
use super::collectives::{BLOCKS, Uses, add, arrive_part, table};
use super::owned::Owned;
use super::types::{LocalClass, Part, Table};
use crate::collective::{Exchange, OWNED_ROWS, Operand, Send, SumRows};
use crate::error::BuildError;
use crate::op_graph::{OpGraph, Role};
use crate::options::BuildOptions;
use crate::region::Region;
use crate::task_type::{Access, ExpansionOperand, TaskSpec};
use rustc_hash::FxHashMap;
use std::rc::Rc;
use std::sync::Arc;

/// For each operator: whether it is a collective that sums rows with their owners, and the producer of its first input can store each tile
/// with its owner.
pub(super) fn can_store(
    graph: &OpGraph,
    options: &BuildOptions,
    uses: &Uses,
    owned: &Owned,
    classes: &mut Classes<'_>,
    parts: &mut Vec<Part>,
) -> Result<Vec<bool>, BuildError> {
    let mut can = vec![false; graph.ops.len()];
    if options.world < 2 || !options.all_within_reach() {
        return Ok(can);
    }
    for (index, op) in graph.ops.iter().enumerate() {
        let summands = &graph.tensors[op.inputs.first().map_or(0, |&tensor| tensor as usize)];
        if owned.rows[index] == SumRows::Any || summands.role != Role::Activation || summands.output {
            continue;
        }
        let Some((writer, _)) = uses.only_link(op.inputs[0]) else { continue };
        let writer = &graph.ops[writer];
        let kept = |&tensor: &u32| !matches!(graph.tensors[tensor as usize].role, Role::Persistent { .. });
        let Some(output) = writer.outputs.iter().position(|&tensor| tensor == op.inputs[0]) else { continue };
        // A later operator may write a persistent input while peers still wait for what is made of it.
        let fits = writer.outputs.len() == 1 && writer.inputs.iter().all(kept);
        if classes.is_collective(writer) || !fits {
            continue;
        }
        let own = owned.input_of(&writer.inputs);
        let class = classes.cut(writer, false, Some((output, BLOCKS)), own, parts)?;
        can[index] = storing_step(&class, output, parts).is_some();
    }
    Ok(can)
}

/// The step that writes `output`, if each of its tasks can store what it writes with one owner.
fn storing_step(class: &[LocalClass], output: usize, parts: &[Part]) -> Option<usize> {
    let operand = ExpansionOperand::Output(output);
    let mut writers = (0..class[0].steps.len()).filter(|&s| class[0].steps[s].outputs.contains(&operand));
    let step = writers.next()?;
    let read = class[0].steps.iter().any(|other| other.inputs.contains(&operand));
    let of_own = class[0].own.is_some_and(|own| own.step == step);
    let known = &class[0].steps[step];
    if writers.next().is_some() || read || of_own || known.outputs.len() != 1 || known.stores != Some(0) {
        return None;
    }
    let world = class.len() as u32;
    let fits = class.iter().enumerate().all(|(rank, local)| {
        let Some(part) = parts.get(local.steps[step].part as usize) else { return false };
        let owners: Option<Vec<u32>> = part.tasks.iter().map(|task| owner(task, world)).collect();
        // Every rank hears from every other one, and the slot of its own tiles is not empty.
        owners.is_some_and(|owners| (0..world).all(|other| owners.contains(&other)))
            && (rank == 0 || local.steps[step].stores == known.stores)
    });
    fits.then_some(step)
}

/// The rank that sums what the task writes, if one rank does.
fn owner(task: &TaskSpec, world: u32) -> Option<u32> {
    let [write] = task.writes[..] else { return None };
    let plain = write == Access::new(0, write.region) && !write.region.is_empty();
    plain.then(|| BLOCKS.owner(&write.region, world)).flatten()
}

/// The parts of the two slots on each rank, and what is sent.
pub(super) struct Stored {
    pub table: Arc<Table>,
    pub to_peers: Vec<u32>,
    pub arrive: Vec<u32>,
    pub own: Vec<u32>,
}

/// A step of an operator that stores its output with the owners.
pub(super) struct Storing {
    pub step: usize,
    pub tiles: Rc<Stored>,
    /// The receive buffer.
    pub buffer: u32,
    /// All buffers of the collective.
    pub buffers: Vec<u32>,
}

/// Splits steps, and remembers the results, so that equal layers share them.
#[derive(Default)]
pub(super) struct Stores {
    by_parts: FxHashMap<Vec<u32>, Rc<Stored>>,
}

impl Stores {
    /// The step of `class` that writes `output` straight to the owners, split.
    pub fn split(
        &mut self,
        class: &[LocalClass],
        output: usize,
        parts: &mut Vec<Part>,
    ) -> Option<(usize, Rc<Stored>)> {
        let step = storing_step(class, output, parts)?;
        let key: Vec<u32> = class.iter().map(|local| local.steps[step].part).collect();
        if let Some(known) = self.by_parts.get(&key) {
            return Some((step, known.clone()));
        }
        let world = class.len() as u32;
        let (mut sends, mut to_peers, mut own) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, &part) in (0..world).zip(&key) {
            let part = parts[part as usize].clone();
            let (mut of_rank, mut remote, mut local) = (Vec::new(), Vec::new(), Vec::new());
            for mut task in part.tasks.iter().cloned() {
                let (region, to) = (task.writes[0].region, owner(&task, world)?);
                let (group, target) = place(&region, rank, world);
                if to == rank {
                    task.writes[0] = Access::inner(0, target);
                    local.push(task);
                } else {
                    of_rank.push(Send { to, source: Some(region), target, event: group });
                    remote.push(task);
                }
            }
            sends.push(of_rank);
            to_peers.push(Part { tasks: remote, ..part.clone() });
            own.push(Part { tasks: local, ..part });
        }
        let exchange = Exchange {
            source: Operand::Input(0),
            target: Operand::Buffer(0),
            rows_kind: 0,
            sends,
            rows_per_index: 0,
            between_all: true,
            completes: None,
            beside_producer: true,
        };
        let table = Arc::new(table(&exchange.sends, world));
        let arrivals = (0..world).map(|rank| arrive_part(&exchange, &table, rank, Some(world))).collect();
        let stored = Rc::new(Stored {
            to_peers: add(to_peers, parts),
            arrive: add(arrivals, parts),
            own: add(own, parts),
            table,
        });
        self.by_parts.insert(key, stored.clone());
        Some((step, stored))
    }
}

/// Where `rank` stores a region of rows: the number of its block among the owner's blocks, and its place in the owner's buffer
/// `[world, rows of a rank, columns]`.
fn place(region: &Region, rank: u32, world: u32) -> (u32, Region) {
    let ([row, first, ..], [end_row, end, ..]) = (region.lo, region.hi);
    let group = row / OWNED_ROWS / world;
    let start = group * OWNED_ROWS + row % OWNED_ROWS;
    let slot = Region { lo: [rank, start, first, 0], hi: [rank + 1, start + (end_row - row), end, 1] };
    (group, slot)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank's blocks lie one after the other in its buffer, each sender's in the sender's slot.
    #[test]
    fn blocks_of_a_rank_are_adjacent_in_its_buffer() {
        let whole = Region::whole(&[8 * OWNED_ROWS, 96]);
        for (row, group, start) in [
            (0, 0, 0),
            (OWNED_ROWS, 0, 0),
            (3 * OWNED_ROWS + 128, 0, 128),
            (4 * OWNED_ROWS, 1, OWNED_ROWS),
            (7 * OWNED_ROWS + 128, 1, OWNED_ROWS + 128),
        ] {
            let tile = whole.with(0, row, row + 128).with(1, 32, 64);
            let (found, at) = place(&tile, 2, 4);
            assert_eq!((found, at.lo, at.hi), (group, [2, start, 32, 0], [3, start + 128, 64, 1]));
        }
    }
}

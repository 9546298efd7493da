//! The step of an operator that each rank carries out for its own rows of a sum (`owned`), and how it sends them to the others.

use super::types::{Dims, LocalClass, OwnStep, Part};
use crate::blocks::Blocks;
use crate::collective::{Exchange, OWNED_ROWS, Operand, Send, rows_kind};
use crate::op_graph::Rows;
use crate::options::BuildOptions;
use crate::region::Region;
use crate::task_type::{ExpansionOperand, TaskSpec, TensorType};

/// Restricts the step that reads `input` to the rank's own rows. `None` unless one step reads it, each of its tasks reads and writes
/// rows of one rank, and it writes one temporary.
pub(super) fn own_step(
    class: &[LocalClass],
    input: usize,
    rows: u64,
    parts: &mut Vec<Part>,
) -> Option<Vec<LocalClass>> {
    let world = class.len() as u32;
    let operand = ExpansionOperand::Input(input);
    let reads = |inputs: &[ExpansionOperand]| inputs.iter().filter(|&&o| o == operand).count();
    let mut steps = class[0].steps.iter().enumerate().filter(|(_, step)| reads(&step.inputs) > 0);
    let (step, known) = steps.next()?;
    let [ExpansionOperand::Temporary(temporary)] = known.outputs[..] else { return None };
    if steps.next().is_some() || reads(&known.inputs) != 1 {
        return None;
    }
    let at = known.inputs.iter().position(|&o| o == operand)?;
    let of_written = block_of(&class[0].temporaries[temporary].1, rows)?;
    let owner_of = |size: u32, region: &Region| Blocks { dim: 0, size }.owner(region, world);
    let owner = |task: &TaskSpec| {
        let reads = task.reads.iter().filter(|a| usize::from(a.operand) == at);
        let reads = reads.map(|a| owner_of(OWNED_ROWS, &a.region));
        let mut all = reads.chain(task.writes.iter().map(|w| owner_of(of_written, &w.region)));
        let first = all.next()??;
        all.all(|other| other == Some(first)).then_some(first)
    };
    let mut restricted = class.to_vec();
    for (rank, local) in restricted.iter_mut().enumerate() {
        let part = parts.get(local.steps[step].part as usize)?;
        let owners: Option<Vec<u32>> = part.tasks.iter().map(owner).collect();
        let own = part.tasks.iter().zip(owners?).filter(|(_, owner)| *owner == rank as u32);
        let part = Part { tasks: own.map(|(task, _)| task.clone()).collect(), ..part.clone() };
        if part.tasks.is_empty() {
            return None;
        }
        local.steps[step].part = parts.len() as u32;
        local.own = Some(OwnStep { step, input, temporary, block: of_written });
        parts.push(part);
    }
    Some(restricted)
}

/// The indices of the first dimension of this type that stand for [`OWNED_ROWS`] rows, if it has `rows` rows: as `[rows, columns]`, or
/// as tiles `[row tiles, column tiles, rows, columns]`.
pub(super) fn block_of(ty: &TensorType, rows: u64) -> Option<u32> {
    let per_index = match ty.dims[..] {
        [_, _] => 1,
        [_, _, of_tile, _] => of_tile,
        _ => return None,
    };
    let fits =
        ty.dims[0].checked_mul(per_index) == Some(rows) && u64::from(OWNED_ROWS).is_multiple_of(per_index);
    fits.then(|| OWNED_ROWS / per_index as u32)
}

/// Each rank sends its own blocks of a temporary, in pieces for about as many tasks as there are workers. `kind`: of the rows for which
/// the indices stand.
pub(super) fn spread(own: OwnStep, dims: &Dims, kind: Rows, options: &BuildOptions) -> Exchange {
    let (world, dims, block) = (options.world, dims.as_slice(), own.block);
    let share = dims[0] / world;
    let wanted = options.target.workers.div_ceil(world - 1).max(1);
    let (height, across) = match dims.len() {
        2 => ((share / wanted).clamp(1, block), 1),
        _ => (1, (wanted / share.max(1)).clamp(1, dims[1].max(1))),
    };
    let sends = (0..world).map(|rank| {
        let mut sends = Vec::new();
        let own = (0..dims[0] / block).filter(|b| b % world == rank);
        for row in own.flat_map(|b| (b * block..(b + 1) * block).step_by(height as usize)) {
            let rows = Region::whole(dims).with(0, row, (row + height).min((row / block + 1) * block));
            for part in 0..across {
                let region = match across {
                    1 => rows,
                    _ => rows.with(1, dims[1] * part / across, dims[1] * (part + 1) / across),
                };
                for to in (1..world).map(|step| (rank + step) % world) {
                    sends.push(Send { to, source: Some(region), target: region, event: 0 });
                }
            }
        }
        sends
    });
    Exchange {
        source: Operand::Output,
        target: Operand::Output,
        rows_kind: rows_kind(kind),
        sends: sends.collect(),
        rows_per_index: OWNED_ROWS / block,
        between_all: true,
        completes: None,
        beside_producer: true,
    }
}

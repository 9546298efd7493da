//! Orders the tasks of each rank so that ranks are alike.
//!
//! If ranks own blocks of a tensor, task i of one rank should be for the blocks of task i of another, turned. Then the verifier proves one
//! rank for all of them.

use super::own_rows::block_of;
use super::types::{LocalClass, Part, Step};
use crate::blocks::Blocks;
use crate::region::Region;
use crate::task_type::{Access, ExpansionOperand, TaskSpec, TensorType};
use crate::trust::Trust;
use rustc_hash::FxHashMap;

/// Reorders the tasks of each rank. `outputs`: the operator's outputs on rank 0. `rows`: blocks of this many rows have owners, so a step
/// that writes such rows begins with the rank's own. `dealt`: an output that goes to the owners of these blocks. The step that writes it
/// begins with the next rank's and ends with the rank's own. The order stays if the tasks of one block have no match in another.
pub(super) fn turn(
    mut class: Vec<LocalClass>,
    outputs: &[TensorType],
    rows: Option<u64>,
    dealt: Option<(usize, Blocks)>,
    parts: &mut Vec<Part>,
) -> Vec<LocalClass> {
    let world = class.len() as u32;
    for index in 0..class[0].steps.len() {
        let step = &class[0].steps[index];
        let dealt = dealt.and_then(|(output, blocks)| Some((position(step, output)?, blocks, 1)));
        let by_rows = || {
            let (operand, blocks) = written_rows(&class[0], step, outputs, rows?)?;
            Some((operand, blocks, 0))
        };
        let Some((operand, blocks, ahead)) = dealt.or_else(by_rows) else { continue };
        let turned: Option<Vec<Part>> = (0..world)
            .map(|rank| {
                let part = parts.get(class[rank as usize].steps[index].part as usize)?;
                let tasks = turned(&part.tasks, operand, blocks, world, (rank + ahead) % world)?;
                Some(Part { tasks, ..part.clone() })
            })
            .collect();
        for (local, part) in class.iter_mut().zip(turned.into_iter().flatten()) {
            if parts[local.steps[index].part as usize] != part {
                local.steps[index].part = parts.len() as u32;
                parts.push(part);
            }
        }
    }
    class
}

fn position(step: &Step, output: usize) -> Option<usize> {
    step.outputs.iter().position(|&o| o == ExpansionOperand::Output(output))
}

/// The first operand that the step writes and that has blocks of rows with owners.
fn written_rows(
    class: &LocalClass,
    step: &Step,
    outputs: &[TensorType],
    rows: u64,
) -> Option<(usize, Blocks)> {
    step.outputs.iter().enumerate().find_map(|(operand, written)| {
        let ty = match *written {
            ExpansionOperand::Output(output) => outputs.get(output)?,
            ExpansionOperand::Temporary(temporary) => &class.temporaries.get(temporary)?.1,
            ExpansionOperand::Input(_) => return None,
        };
        let size = block_of(ty, rows)?;
        Some((operand, Blocks { dim: 0, size }))
    })
}

/// Reorders the tasks so that each writes what the task at its place wrote, turned by `by` ranks. A task that does not write `operand`
/// writes one other operand, whose rows are in the same blocks.
fn turned(tasks: &[TaskSpec], operand: usize, blocks: Blocks, world: u32, by: u32) -> Option<Vec<TaskSpec>> {
    let written = |task: &TaskSpec| -> Option<(u8, Region)> {
        let is_wanted = |w: &&Access| usize::from(w.operand) == operand;
        let wanted = task.writes.iter().filter(is_wanted).count();
        let mut writes = task.writes.iter().filter(|w| wanted == 0 || is_wanted(w));
        let write = writes.next()?;
        (writes.next().is_none() && write.trust.is_none()).then_some((write.operand, write.region))
    };
    let at: FxHashMap<(u8, Region), &TaskSpec> =
        tasks.iter().map(|task| Some((written(task)?, task))).collect::<Option<_>>()?;
    let place = |task: &TaskSpec| {
        let (operand, region) = written(task)?;
        let mut turned = TaskSpec::clone(at.get(&(operand, blocks.turned(&region, world, by)?))?);
        // The region for the pages of a task's rows is named after the task's place, not after its rows.
        let accesses = turned.reads.iter_mut().chain(&mut turned.writes);
        for (to, from) in accesses.zip(task.reads.iter().chain(&task.writes)) {
            if from.trust == Some(Trust::PagesOfRows) {
                *to = *from;
            }
        }
        Some(turned)
    };
    tasks.iter().map(place).collect()
}

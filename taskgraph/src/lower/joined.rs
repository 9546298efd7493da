//! Sums that are joined with what is computed from their rows.
//!
//! If a rank keeps the rows that it sums ([`super::owned`]), and the next operator begins with something row by row, one task can do both
//! for the same rows. It reads the summands, and writes the sum and what is computed from it. That saves a wait and reading the sum
//! again.

use super::types::{LocalClass, OwnStep, Part, Slot, SlotKind};
use crate::collective::SUM_FOLLOWED;
use crate::region::Region;
use crate::task_graph::core_types;
use crate::task_type::{Access, ExpansionOperand, TaskSpec};
use rustc_hash::FxHashMap;

/// Index of the parameter of a `reduce` that holds its flags.
const FLAGS: usize = 3;

/// Joins parts, and remembers the results, so that equal layers share them.
#[derive(Debug, Default)]
pub(super) struct Joins {
    by_parts: FxHashMap<(u32, u32), Option<u32>>,
}

impl Joins {
    /// The parts of each rank that do the work of the sum `slot` and of the operator's first step, which is `own`. `None` if they
    /// remain apart: the slot is no sum of the step's input, the step's type does not join sums, or the tasks have different rows.
    pub fn join(
        &mut self,
        slot: &Slot,
        sums: &[u32],
        class: &[LocalClass],
        own: OwnStep,
        tensor: u32,
        parts: &mut Vec<Part>,
    ) -> Option<Vec<u32>> {
        let step = &class[0].steps[own.step];
        if own.step != 0 || !step.joins_sum || slot.kind != SlotKind::Collective || slot.outputs != [tensor] {
            return None;
        }
        let input = step.inputs.iter().position(|&o| o == ExpansionOperand::Input(own.input))?;
        let rows = class.iter().map(|local| local.steps[own.step].part);
        sums.iter().zip(rows).map(|(&sum, rows)| self.join_parts(sum, rows, input as u8, parts)).collect()
    }

    fn join_parts(&mut self, sum: u32, rows: u32, input: u8, parts: &mut Vec<Part>) -> Option<u32> {
        if let Some(&known) = self.by_parts.get(&(sum, rows)) {
            return known;
        }
        let joined = parts.get(sum as usize).zip(parts.get(rows as usize));
        let joined = joined.and_then(|(sum, rows)| join(sum, rows, input));
        let number = joined.map(|part| {
            parts.push(part);
            parts.len() as u32 - 1
        });
        self.by_parts.insert((sum, rows), number);
        number
    }
}

/// One part for both. `input` is the operand of `rows` that `sum` writes. A task of one and a task of the other have the same rows.
///
/// Inputs: those of the sum, then the other ones of `rows`. Outputs: the sum, then those of `rows`. Parameters: those of the sum, then
/// those of `rows`. Arguments: the first one of the sum, then those of `rows`.
fn join(sum: &Part, rows: &Part, input: u8) -> Option<Part> {
    if sum.type_name != core_types::REDUCE || sum.stacked.is_some() || sum.tasks.len() != rows.tasks.len() {
        return None;
    }
    let read = |task: &TaskSpec| -> Option<Region> {
        let mut of_sum = task.reads.iter().filter(|access| access.operand == input);
        let access = of_sum.next()?;
        (of_sum.next().is_none() && *access == Access::new(input, access.region)).then_some(access.region)
    };
    let at: FxHashMap<Region, &TaskSpec> =
        rows.tasks.iter().map(|task| Some((read(task)?, task))).collect::<Option<_>>()?;
    let tasks = sum.tasks.iter().map(|of_sum| {
        let [written] = of_sum.writes[..] else { return None };
        let of_rows = at.get(&written.region)?;
        let mut task = of_sum.clone();
        let summands = task.reads.len() as u8;
        let others = of_rows.reads.iter().filter(|access| access.operand != input);
        task.reads.extend(others.map(|access| {
            let before = u8::from(access.operand > input);
            Access { operand: summands + access.operand - before, ..*access }
        }));
        task.writes
            .extend(of_rows.writes.iter().map(|access| Access { operand: 1 + access.operand, ..*access }));
        let (last, args) = of_rows.args.split_last()?;
        task.args[1..].copy_from_slice(args);
        task.cost += of_rows.cost;
        (*last == 0).then_some(task)
    });
    let mut params = sum.params.clone();
    *params.get_mut(FLAGS)? |= SUM_FOLLOWED;
    params.extend(&rows.params);
    Some(Part {
        type_name: sum.type_name.clone(),
        params,
        rank_param: sum.rank_param,
        stacked: None,
        scratch_bytes: sum.scratch_bytes.max(rows.scratch_bytes),
        tasks: tasks.collect::<Option<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(first: u32) -> Region {
        Region::whole(&[8, 4]).with(0, first, first + 4)
    }

    fn part(type_name: &str, params: Vec<u32>, tasks: Vec<TaskSpec>) -> Part {
        Part { type_name: type_name.into(), params, rank_param: None, stacked: None, scratch_bytes: 0, tasks }
    }

    fn task(reads: &[Access], writes: &[Access], args: [i32; 8]) -> TaskSpec {
        TaskSpec { reads: reads.into(), writes: writes.into(), args, cost: 1 }
    }

    /// Two operands of each task are numbered anew, and each sum finds the task with its rows, in whatever order they are.
    #[test]
    fn operands_parameters_and_arguments_follow_those_of_the_sum() {
        let weight = Region::whole(&[4]);
        let of_sum = |first: u32| {
            let summands = [Access::new(0, rows(first)), Access::new(1, rows(first))];
            task(&summands, &[Access::new(0, rows(first))], [first as i32, 0, 0, 0, 0, 0, 0, 0])
        };
        let of_rows = |first: u32| {
            let reads = [Access::new(0, weight), Access::new(1, rows(first)), Access::new(2, weight)];
            task(&reads, &[Access::new(0, rows(first))], [10 + first as i32, 20, 0, 0, 0, 0, 0, 0])
        };
        let sum = part(core_types::REDUCE, vec![2, 0, 0, 2], vec![of_sum(0), of_sum(4)]);
        let step = part("step", vec![7, 8], vec![of_rows(4), of_rows(0)]);
        let joined = join(&sum, &step, 1).expect("the tasks have the same rows");
        assert_eq!(joined.type_name, core_types::REDUCE);
        assert_eq!(joined.params, [2, 0, 0, 2 | SUM_FOLLOWED, 7, 8]);
        for (task, first) in joined.tasks.iter().zip([0, 4]) {
            let reads = [(0, rows(first)), (1, rows(first)), (2, weight), (3, weight)];
            let expected = reads.map(|(operand, region)| Access::new(operand, region));
            assert_eq!(task.reads[..], expected);
            assert_eq!(task.writes[..], [Access::new(0, rows(first)), Access::new(1, rows(first))]);
            assert_eq!(task.args, [first as i32, 10 + first as i32, 20, 0, 0, 0, 0, 0]);
            assert_eq!(task.cost, 2);
        }
        // Another operand is the sum; other rows.
        assert!(join(&sum, &step, 0).is_none());
        let other = part("step", vec![], vec![of_rows(0), of_rows(2)]);
        assert!(join(&sum, &other, 1).is_none());
    }
}

//! Sums that are joined with what is computed from their rows.
//!
//! If a rank keeps the rows that it sums ([`super::owned`]), sums all rows like every other rank, or sums the parts of a product of its
//! own, and the next operator begins with something row by row, one task can do both for the same rows. It reads the summands, and writes
//! the sum and what is computed from it. That saves a wait and reading the sum again.
//!
//! A *whole sum* is one that every rank has, of summands that were copied or pushed to it.

use super::one_event::OneEvent;
use super::types::{LocalClass, Part, Slot, SlotKind, Step};
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{core_types, sum_flags};
use crate::task_type::{Access, ExpansionOperand, TaskSpec};
use rustc_hash::FxHashMap;

/// Index of the parameter of a `reduce` that holds its flags.
const FLAGS: usize = 3;

/// Joins parts, and remembers the results, so that equal layers share them.
#[derive(Debug, Default)]
pub(super) struct Joins {
    by_parts: FxHashMap<(u32, u32, u8), Option<u32>>,
    /// Index of the last slot that is a step whose tasks may have whole rows.
    sums_rows: Option<usize>,
    /// Sums are joined whose rows stay with a rank, and sums within a rank.
    pub within: bool,
    /// Whole sums are joined.
    pub whole: bool,
    /// The exchanges of whole sums.
    pub one_event: OneEvent,
}

impl Joins {
    /// Called with each step of an operator that has become slot `slot`.
    pub fn note(&mut self, slot: usize, step: &Step) {
        if step.sums_rows {
            self.sums_rows = Some(slot);
        }
    }

    /// The parts of each rank that do the work of the last slot, a sum, and of the operator's first step, and the step's input that is the
    /// sum. `None` if they remain apart: the slot is no sum of an input, or a sum that is not to be joined; the step's type does not join
    /// sums; or the tasks have different rows.
    pub fn join(
        &mut self,
        slots: &[Slot],
        sums: &[u32],
        op_inputs: &[u32],
        class: &[LocalClass],
        parts: &mut Vec<Part>,
    ) -> Option<(ExpansionOperand, Vec<u32>)> {
        let (step, slot) = (&class[0].steps[0], slots.last()?);
        let [sum] = slot.outputs[..] else { return None };
        let read = |&operand: &ExpansionOperand| match operand {
            ExpansionOperand::Input(input) => op_inputs.get(input) == Some(&sum),
            _ => false,
        };
        let own = class[0].own;
        let input = step.inputs.iter().position(read).filter(|_| step.joins_sum)?;
        // A collective may also end with copies within a rank.
        let is_reduce =
            |&sum: &u32| parts.get(sum as usize).is_some_and(|p| p.type_name == core_types::REDUCE);
        let joins = match (slot.kind, own) {
            (SlotKind::Collective, _) if !sums.iter().all(is_reduce) => false,
            (SlotKind::Collective, None) => self.whole,
            (SlotKind::Collective, Some(own)) => {
                self.within && own.step == 0 && step.inputs[input] == ExpansionOperand::Input(own.input)
            }
            (SlotKind::Compute { push: None }, None) => {
                self.within && self.sums_rows == Some(slots.len() - 1)
            }
            _ => false,
        };
        if !joins {
            return None;
        }
        let rows = class.iter().map(|local| local.steps[0].part);
        let joined = sums.iter().zip(rows).map(|(&sum, rows)| self.join_parts(sum, rows, input as u8, parts));
        Some((step.inputs[input], joined.collect::<Option<_>>()?))
    }

    fn join_parts(&mut self, sum: u32, rows: u32, input: u8, parts: &mut Vec<Part>) -> Option<u32> {
        if let Some(&known) = self.by_parts.get(&(sum, rows, input)) {
            return known;
        }
        let joined = parts.get(sum as usize).zip(parts.get(rows as usize));
        let joined = joined.and_then(|(sum, rows)| match sum.type_name == core_types::REDUCE {
            true => {
                join(sum, rows, input).or_else(|| join(&received_in_rows(sum, rows, input)?, rows, input))
            }
            false => join(&in_rows(sum, rows, input)?, rows, input),
        });
        let number = joined.map(|part| {
            parts.push(part);
            parts.len() as u32 - 1
        });
        self.by_parts.insert((sum, rows, input), number);
        number
    }
}

/// The only region that a task reads of operand `input`.
fn read(task: &TaskSpec, input: u8) -> Option<Region> {
    let mut of_input = task.reads.iter().filter(|access| access.operand == input);
    let access = of_input.next()?;
    (of_input.next().is_none() && *access == Access::new(input, access.region)).then_some(access.region)
}

/// The regions that the tasks of a sum write, if each has one.
fn written(sum: &Part) -> Option<Vec<Region>> {
    let region = |task: &TaskSpec| match task.writes[..] {
        [written] if written == Access::new(0, written.region) => Some(written.region),
        _ => None,
    };
    sum.tasks.iter().map(region).collect()
}

/// The rows of each task of `rows`, in order. `None` if these tasks do not have every row of `tiles` once.
fn rows_in_turn(tiles: &[Region], rows: &Part, input: u8) -> Option<Vec<Region>> {
    let all = tiles.iter().copied().reduce(|a, b| a.hull(&b))?;
    let regions: Vec<Region> = rows.tasks.iter().map(|task| read(task, input)).collect::<Option<_>>()?;
    let complete = |regions: &[Region]| regions.iter().map(Region::volume).sum::<u64>() == all.volume();
    let in_turn = |pair: &[Region]| pair[0].hi[0] == pair[1].lo[0];
    let of_rows = |region: &Region| *region == all.with(0, region.lo[0], region.hi[0]);
    let fits = all.lo == [0; MAX_DIMS] && complete(tiles) && complete(&regions);
    (fits && regions.iter().all(of_rows) && regions.windows(2).all(in_turn)).then_some(regions)
}

/// `sum` with these tasks: for each region, its reads and its first argument, the first row.
fn with_rows(sum: &Part, regions: &[Region], reads: impl Fn(Region) -> Vec<Access>) -> Option<Part> {
    let volume: u64 = regions.iter().map(Region::volume).sum();
    let cost: u64 = sum.tasks.iter().map(|task| task.cost).sum();
    let tasks = regions.iter().map(|&region| {
        let mut args = [0; 8];
        args[0] = i32::try_from(region.lo[0]).ok()?;
        Some(TaskSpec {
            reads: reads(region).into_iter().collect(),
            writes: [Access::new(0, region)].into_iter().collect(),
            args,
            cost: cost * region.volume() / volume.max(1),
        })
    });
    Some(Part { tasks: tasks.collect::<Option<_>>()?, ..sum.clone() })
}

/// The sum in the rows of the tasks of `rows`. `None` if these do not have every row once.
fn in_rows(sum: &Part, rows: &Part, input: u8) -> Option<Part> {
    let tiles = written(sum)?;
    let alike = |(task, tile): (&TaskSpec, &Region)| {
        let same = |(operand, access): (usize, &Access)| *access == Access::new(operand as u8, *tile);
        task.args == [0; 8] && task.reads.iter().enumerate().all(same)
    };
    if !sum.tasks.iter().zip(&tiles).all(alike) {
        return None;
    }
    let regions = rows_in_turn(&tiles, rows, input)?;
    let summands = sum.tasks[0].reads.len() as u8;
    with_rows(sum, &regions, |region| (0..summands).map(|operand| Access::new(operand, region)).collect())
}

/// The same for a `reduce`, if it sums all rows and the buffer of the received summands `[rank, rows, columns]` is like the sum. Its other
/// operands are like the sum.
fn received_in_rows(sum: &Part, rows: &Part, input: u8) -> Option<Part> {
    let tiles = written(sum)?;
    let (first, tile) = (sum.tasks.first()?, tiles.first()?);
    let of_ranks = |region: &Region, tile: &Region| {
        let mut of_ranks = *region;
        (of_ranks.lo[1], of_ranks.hi[1]) = (tile.lo[0], tile.hi[0]);
        (of_ranks.lo[2], of_ranks.hi[2]) = (tile.lo[1], tile.hi[1]);
        of_ranks
    };
    // The operand that has another region than the sum.
    let received = first.reads.iter().position(|access| access.region != *tile)?;
    let slots = first.reads[received].region;
    let alike = |(task, tile): (&TaskSpec, &Region)| {
        let expected = |operand: usize| match operand == received {
            true => of_ranks(&slots, tile),
            false => *tile,
        };
        let same =
            |(operand, access): (usize, &Access)| *access == Access::new(operand as u8, expected(operand));
        let args = task.args == [tile.lo[0] as i32, 0, 0, 0, 0, 0, 0, 0];
        args && task.reads.len() == first.reads.len() && task.reads.iter().enumerate().all(same)
    };
    if !sum.tasks.iter().zip(&tiles).all(alike) {
        return None;
    }
    let regions = rows_in_turn(&tiles, rows, input)?;
    let summands = first.reads.len();
    with_rows(sum, &regions, |region| {
        let of = |operand: usize| if operand == received { of_ranks(&slots, &region) } else { region };
        (0..summands).map(|operand| Access::new(operand as u8, of(operand))).collect()
    })
}

/// One part for both. `input` is the operand of `rows` that `sum` writes. A task of one and a task of the other have the same rows.
///
/// Inputs: those of the sum, then the other ones of `rows`. Outputs: the sum, then those of `rows`. Parameters: those of the sum, then
/// those of `rows`. Arguments: the first one of the sum, then those of `rows`.
fn join(sum: &Part, rows: &Part, input: u8) -> Option<Part> {
    if sum.stacked.is_some() || sum.tasks.len() != rows.tasks.len() {
        return None;
    }
    let at: FxHashMap<Region, &TaskSpec> =
        rows.tasks.iter().map(|task| Some((read(task, input)?, task))).collect::<Option<_>>()?;
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
    if sum.type_name == core_types::REDUCE {
        *params.get_mut(FLAGS)? |= sum_flags::FOLLOWED;
    }
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
        assert_eq!(joined.params, [2, 0, 0, 2 | sum_flags::FOLLOWED, 7, 8]);
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

    /// A sum in column tiles gets the rows of the step's tasks, if these have every row once.
    #[test]
    fn a_sum_within_a_rank_takes_the_rows_of_the_step() {
        let whole = Region::whole(&[8, 6]);
        let tile = |first: u32, end: u32| {
            let tile = whole.with(1, first, end);
            task(&[Access::new(0, tile), Access::new(1, tile)], &[Access::new(0, tile)], [0; 8])
        };
        let of_rows = |first: u32, end: u32| {
            let rows = whole.with(0, first, end);
            task(&[Access::new(0, rows)], &[Access::new(0, rows)], [first as i32, 0, 0, 0, 0, 0, 0, 0])
        };
        let sum = part("add", vec![5], vec![tile(0, 4), tile(4, 6)]);
        let step = part("step", vec![7], vec![of_rows(0, 3), of_rows(3, 8)]);
        let of_whole_rows = in_rows(&sum, &step, 0).expect("every row once");
        let joined = join(&of_whole_rows, &step, 0).expect("the same rows");
        assert_eq!(joined.params, [5, 7]);
        for (task, (first, end)) in joined.tasks.iter().zip([(0, 3), (3, 8)]) {
            let rows = whole.with(0, first, end);
            assert_eq!(task.reads[..], [Access::new(0, rows), Access::new(1, rows)]);
            assert_eq!(task.writes[..], [Access::new(0, rows), Access::new(1, rows)]);
            assert_eq!(task.args[..2], [first as i32, first as i32]);
        }
        let refused = |sum: &[TaskSpec], step: &[TaskSpec]| {
            in_rows(&part("add", vec![], sum.to_vec()), &part("step", vec![], step.to_vec()), 0).is_none()
        };
        let (tiles, rows) = ([tile(0, 4), tile(4, 6)], [of_rows(0, 3), of_rows(3, 8)]);
        assert!(!refused(&tiles, &rows));
        // A row is missing, or there twice; rows that are not whole; columns that nobody writes; a sum of other elements.
        assert!(refused(&tiles, &[of_rows(0, 3), of_rows(4, 8)]));
        assert!(refused(&tiles, &[of_rows(0, 4), of_rows(3, 8)]));
        assert!(refused(&tiles, &[of_rows(0, 8), of_rows(0, 8)]));
        assert!(refused(&tiles, &[tile(0, 4), tile(4, 6)]));
        assert!(refused(&tiles[..1], &rows));
        let mut shifted = tile(4, 6);
        shifted.reads[1].region = whole.with(1, 0, 2);
        assert!(refused(&[tile(0, 4), shifted], &rows));
    }

    /// The same for a sum that every rank has. The received summands have a dimension for the ranks.
    #[test]
    fn a_sum_of_received_tiles_takes_the_rows_of_the_step() {
        let (whole, slots) = (Region::whole(&[8, 6]), Region::whole(&[2, 8, 6]));
        let tile = |first: u32, end: u32| {
            let own = whole.with(1, first, end);
            let reads = [Access::new(0, own), Access::new(1, slots.with(2, first, end)), Access::new(2, own)];
            task(&reads, &[Access::new(0, own)], [0; 8])
        };
        let of_rows = |first: u32, end: u32| {
            let rows = whole.with(0, first, end);
            task(&[Access::new(0, rows)], &[Access::new(0, rows)], [0; 8])
        };
        let step = part("step", vec![7], vec![of_rows(0, 3), of_rows(3, 8)]);
        let sum = |tasks: &[TaskSpec]| part(core_types::REDUCE, vec![2, 0, 0, 2], tasks.to_vec());
        let taken = received_in_rows(&sum(&[tile(0, 4), tile(4, 6)]), &step, 0).expect("every row once");
        for (task, (first, end)) in taken.tasks.iter().zip([(0, 3), (3, 8)]) {
            let rows = whole.with(0, first, end);
            let received = slots.with(1, first, end);
            assert_eq!(
                task.reads[..],
                [Access::new(0, rows), Access::new(1, received), Access::new(2, rows)]
            );
            assert_eq!(task.writes[..], [Access::new(0, rows)]);
            assert_eq!(task.args, [first as i32, 0, 0, 0, 0, 0, 0, 0]);
        }
        // The summands of other columns, or of other rows than the sum; a tile is missing.
        let changed = |change: &dyn Fn(&mut TaskSpec)| {
            let mut changed = tile(4, 6);
            change(&mut changed);
            received_in_rows(&sum(&[tile(0, 4), changed]), &step, 0)
        };
        assert!(changed(&|_| ()).is_some());
        assert!(changed(&|task| task.reads[1].region = slots.with(2, 3, 5)).is_none());
        assert!(changed(&|task| task.reads[1].region = slots.with(1, 0, 7).with(2, 4, 6)).is_none());
        assert!(changed(&|task| task.reads[2].region = whole.with(1, 0, 2)).is_none());
        assert!(changed(&|task| task.args[0] = 1).is_none());
        assert!(changed(&|task| task.args[1] = 1).is_none());
        assert!(received_in_rows(&sum(&[tile(0, 4)]), &step, 0).is_none());
    }
}

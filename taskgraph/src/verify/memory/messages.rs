//! Messages about accesses that are not ordered, and about reads of what has not been written.

use super::{Sweep, across_message};
use crate::region::{MAX_DIMS, Region};
use crate::verify::access::Access;
use crate::verify::grid::uncovered;
use crate::verify::order::NONE;
use crate::verify::report::{Violation, ViolationKind};

impl Sweep<'_, '_> {
    fn task_name(&self, task: u32) -> ((u16, u32), String) {
        let (rank, index) = self.order.task_place(task);
        let place = (rank as u16, index);
        (place, self.names.task(place))
    }

    /// A conflicting access of `task`, and its overlap with `region`.
    fn meets(&self, accesses: &[Access], task: u32, region: &Region, write: Option<bool>) -> (bool, Region) {
        let mine = accesses.iter().filter(|a| self.number(a) == task && write.is_none_or(|w| a.write == w));
        let mut found = (false, *region);
        for access in mine {
            let other = &access.region;
            if other.overlaps(region) {
                for d in 0..MAX_DIMS {
                    found.1.lo[d] = region.lo[d].max(other.lo[d]);
                    found.1.hi[d] = region.hi[d].min(other.hi[d]);
                }
                found.0 = access.write;
                if access.write {
                    break;
                }
            }
        }
        found
    }

    pub(super) fn report_unwritten(&mut self, tensor: usize, before: &[Access], access: &Access) {
        let region = &access.region;
        let writers = before.iter().filter(|a| a.write);
        let covers: Vec<Region> = writers.map(|a| a.region).collect();
        let rest = uncovered(region, &covers).unwrap_or(*region);
        let message = format!(
            "{} reads {}, which no task writes before it in the iteration",
            self.names.task(access.place()),
            self.names.region(self.memory.owner, tensor, &rest)
        );
        self.violations.push(Violation::new(ViolationKind::Unwritten, &[access.place()], message));
    }

    pub(super) fn report_unordered(
        &mut self,
        tensor: usize,
        accesses: &[Access],
        earlier: u32,
        access: &Access,
    ) {
        let (place, name) = self.task_name(earlier);
        let only_writes = if access.write { None } else { Some(true) };
        let (writes, region) = self.meets(accesses, earlier, &access.region, only_writes);
        let verb = |write: bool| if write { "writes" } else { "reads" };
        let trigger = match self.order.trigger(earlier) {
            NONE => "which triggers no event".to_string(),
            event => {
                let (rank, index) = self.order.event_place(event);
                format!("which triggers event {index} of rank {rank}")
            }
        };
        let message = format!(
            "{name} {} {} and {} {} it, but nothing orders the two: the latter waits for events {:?}, and neither \
             these, its worker's list nor flagged words lead back to the former, {trigger}",
            verb(writes),
            self.names.region(self.memory.owner, tensor, &region),
            self.names.task(access.place()),
            verb(access.write),
            self.order.task(self.number(access)).dependencies.as_slice(),
        );
        self.violations.push(Violation::new(ViolationKind::Unordered, &[place, access.place()], message));
    }

    pub(super) fn report_across(&mut self, tensor: usize, accesses: &[Access], earlier: u32, later: u32) {
        let ((first, first_name), (second, second_name)) = (self.task_name(earlier), self.task_name(later));
        let of_later = accesses.iter().find(|a| self.number(a) == later);
        let region = of_later.map_or(Region::whole(&[]), |a| a.region);
        let (writes, region) = self.meets(accesses, earlier, &region, None);
        let message = across_message(self.order, self.order, earlier, later, (&first_name, &second_name))
            + &format!(
                ": {}, which the former {} and the latter {}",
                self.names.region(self.memory.owner, tensor, &region),
                if writes { "writes" } else { "reads" },
                if of_later.is_some_and(|a| a.write) { "writes" } else { "reads" },
            );
        self.violations.push(Violation::new(ViolationKind::UnorderedAcrossEpochs, &[first, second], message));
    }
}

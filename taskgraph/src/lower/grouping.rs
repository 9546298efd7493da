//! The events of a slot's tasks, which depend only on the overlaps with later slots. So they are worked out once for equal layers.
//!
//! A task triggers one event, so events partition the tasks of a slot: two tasks share an event if some task of another slot needs
//! both. The result is the coarsest partition that is fine enough. For two regular grids, it is that of their greatest common
//! divisor.

use super::overlap::Overlap;
use super::types::NONE;
use smallvec::SmallVec;

/// Every task of the later slot waits for every task of the earlier one.
pub(crate) const ALL: u8 = 1;
/// Every task of the later slot waits for some task of the earlier one.
pub(crate) const SOME: u8 = 2;
/// For every task of the earlier slot, a task of the later one waits.
pub(crate) const COVERED: u8 = 4;

/// All that the events of a slot depend on. Equal layers have equal keys.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct GroupingKey {
    pub tasks: usize,
    pub is_share: bool,
    /// Each overlap, the number of its consumers, and whether its words are flagged. The overlaps live as long as the key.
    pub overlaps: SmallVec<[(*const Overlap, usize, bool); 4]>,
}

/// The events of a slot, counted from 0.
pub(super) struct Grouping {
    /// The event that each task triggers, or [`NONE`].
    pub event_of: Vec<u32>,
    /// Number of triggers of each event.
    pub triggers: Vec<u32>,
    /// For each overlap, the event that each consumer waits for, or [`NONE`], and the flags of the link. Nothing if its words are
    /// flagged.
    pub links: Vec<(Vec<u32>, u8)>,
}

impl Grouping {
    /// `overlaps`: each with the number of consumers, and whether its words are flagged.
    pub fn new(n: usize, is_share: bool, overlaps: &[(&Overlap, usize, bool)]) -> Grouping {
        let mut groups = Groups::new(n);
        let by_event = || overlaps.iter().filter(|(_, _, flagged)| !flagged);
        let any_event = by_event().next().is_some();
        if by_event().any(|(found, _, _)| found.every) || is_share && any_event {
            groups.join_all();
        } else {
            for (found, consumers, _) in by_event() {
                (0..*consumers).for_each(|consumer| groups.join(found.row(consumer)));
            }
        }
        let mut event_of = vec![NONE; n];
        let mut triggers = Vec::new();
        for task in 0..n {
            if groups.used[task] {
                let root = groups.find(task);
                if event_of[root] == NONE {
                    event_of[root] = triggers.len() as u32;
                    triggers.push(0);
                }
                event_of[task] = event_of[root];
                triggers[event_of[root] as usize] += 1;
            }
        }
        let unused = groups.used.iter().any(|u| !u);
        let link = |&(found, consumers, flagged): &(&Overlap, usize, bool)| {
            if flagged {
                return (Vec::new(), 0);
            }
            if found.every || is_share {
                return (vec![event_of.first().copied().unwrap_or(NONE); consumers], ALL | SOME | COVERED);
            }
            let wait = |consumer: usize| found.row(consumer).first().map_or(NONE, |&p| event_of[p as usize]);
            let waits: Vec<u32> = (0..consumers).map(wait).collect();
            let some = !waits.contains(&NONE);
            let mut touched = vec![false; triggers.len()];
            waits.iter().filter(|&&event| event != NONE).for_each(|&event| touched[event as usize] = true);
            let covered = !unused && !touched.contains(&false);
            (waits, flags(some && covered && triggers.len() == 1, some, covered))
        };
        let links = overlaps.iter().map(link).collect();
        Grouping { event_of, triggers, links }
    }
}

pub(super) fn flags(all: bool, some: bool, covered: bool) -> u8 {
    (u8::from(all) * ALL) | (u8::from(some) * SOME) | (u8::from(covered) * COVERED)
}

/// Union-find over the tasks of a slot.
struct Groups {
    parent: Vec<u32>,
    used: Vec<bool>,
}

impl Groups {
    fn new(n: usize) -> Self {
        Groups { parent: (0..n as u32).collect(), used: vec![false; n] }
    }

    fn find(&mut self, mut task: usize) -> usize {
        while self.parent[task] as usize != task {
            self.parent[task] = self.parent[self.parent[task] as usize];
            task = self.parent[task] as usize;
        }
        task
    }

    fn join(&mut self, tasks: &[u32]) {
        let Some(&first) = tasks.first() else { return };
        self.used[first as usize] = true;
        let mut root = self.find(first as usize);
        for &task in &tasks[1..] {
            self.used[task as usize] = true;
            let other = self.find(task as usize);
            let (low, high) = (root.min(other), root.max(other));
            self.parent[high] = low as u32;
            root = low;
        }
    }

    fn join_all(&mut self) {
        self.parent.fill(0);
        self.used.fill(true);
    }
}

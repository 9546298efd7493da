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
/// Every task of the later slot waits for some task of this slot, or of another one that writes the same tensor and has such a link.
pub(crate) const JOINT: u8 = 8;

/// All that the events of a slot depend on. Equal layers have equal keys.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct GroupingKey {
    pub tasks: usize,
    pub is_share: bool,
    /// The links to later slots. The overlaps live as long as the key.
    pub links: SmallVec<[LinkKey; 4]>,
}

/// What the events of a slot depend on, for one of its links.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct LinkKey {
    pub overlap: *const Overlap,
    /// The later slot: the number of the slot's first link to it.
    pub to: usize,
    /// Tasks of the later slot.
    pub consumers: usize,
    pub flagged: bool,
}

/// The events of a slot, counted from 0.
pub(super) struct Grouping {
    /// The event that each task triggers, or [`NONE`].
    pub event_of: Vec<u32>,
    /// Number of triggers of each event.
    pub triggers: Vec<u32>,
    /// In the order of the links.
    pub links: Vec<Waits>,
}

/// The tasks that wait for a slot's events because of one link. There are none if its words are flagged.
pub(super) struct Waits {
    /// The event that each consumer waits for, or [`NONE`].
    pub events: Vec<u32>,
    pub flags: u8,
    /// Without [`COVERED`]: the place of a link to another slot, with whose consumers those of this one wait for every task.
    pub partner: Option<usize>,
}

impl Grouping {
    /// `links`: each with its overlap.
    pub fn new(n: usize, is_share: bool, links: &[(&Overlap, LinkKey)]) -> Grouping {
        let mut groups = Groups::new(n);
        let by_event = || links.iter().filter(|(_, link)| !link.flagged);
        let any_event = by_event().next().is_some();
        if by_event().any(|(found, _)| found.every) || is_share && any_event {
            groups.join_all();
        } else {
            for (found, link) in by_event() {
                (0..link.consumers).for_each(|consumer| groups.join(found.row(consumer)));
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
        let waits = |&(found, link): &(&Overlap, LinkKey)| -> Vec<u32> {
            if link.flagged {
                return Vec::new();
            }
            if found.every || is_share {
                return vec![event_of.first().copied().unwrap_or(NONE); link.consumers];
            }
            let wait = |consumer: usize| found.row(consumer).first().map_or(NONE, |&p| event_of[p as usize]);
            (0..link.consumers).map(wait).collect()
        };
        let waits: Vec<Vec<u32>> = links.iter().map(waits).collect();
        // The links to a slot count together: it may read one half of a product through one link, and the other half through
        // another.
        let mut touched = vec![vec![false; triggers.len()]; links.len()];
        for ((_, link), waits) in links.iter().zip(&waits) {
            for &event in waits.iter().filter(|&&event| event != NONE) {
                touched[link.to][event as usize] = true;
            }
        }
        let flags_of = |(found, link): &(&Overlap, LinkKey), waits: &[u32]| {
            if link.flagged {
                return 0;
            }
            if found.every || is_share {
                return ALL | SOME | COVERED;
            }
            let some = !waits.contains(&NONE);
            let covered = !unused && !touched[link.to].contains(&false);
            flags(some && !waits.is_empty() && !unused && triggers.len() == 1, some, covered)
        };
        let flags: Vec<u8> = links.iter().zip(&waits).map(|(link, waits)| flags_of(link, waits)).collect();
        let partner_of = |place: usize| {
            let own = &touched[links[place].1.to];
            let completes = |other: &usize| own.iter().zip(&touched[*other]).all(|(a, b)| *a || *b);
            let wanted = flags[place] & COVERED == 0 && !unused && !links[place].1.flagged;
            wanted.then(|| (0..links.len()).find(completes)).flatten()
        };
        let partners: Vec<Option<usize>> = (0..links.len()).map(partner_of).collect();
        let links = waits.into_iter().zip(flags).zip(partners);
        let links = links.map(|((events, flags), partner)| Waits { events, flags, partner }).collect();
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

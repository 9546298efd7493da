//! Static placement: which worker runs which task.

use super::types::Part;

/// Which workers get the tasks of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turns {
    /// In turn, if the tasks cost about the same.
    Own,
    /// The same, from the worker on that follows those of the slot before: the two are one list of tasks.
    GoOn,
    /// Task `t` of `n` goes to the worker that has the same share of the slot before: copies and sums follow the tile that they handle.
    Follow,
}

/// Assigns the tasks of slots to workers. Lists are in slot order, which is a topological order for all ranks. So a worker never
/// waits for a task that comes later in its list.
#[derive(Debug)]
pub(crate) struct Dealer {
    workers: u32,
    /// Where the last slot with fewer tasks than workers stopped.
    next: u32,
    /// Where the last slot stopped whose tasks were dealt in turn.
    end: u32,
}

impl Dealer {
    pub fn new(workers: u32) -> Self {
        Dealer { workers: workers.max(1), next: 0, end: 0 }
    }

    /// Workers of the tasks of one slot.
    pub fn deal(&mut self, part: &Part, turns: Turns) -> Vec<u32> {
        let n = part.tasks.len();
        let w = self.workers as usize;
        if turns == Turns::Follow {
            return (0..n).map(|t| (t * w / n) as u32).collect();
        }
        let (least, most) =
            part.tasks.iter().fold((u64::MAX, 0), |(lo, hi), t| (lo.min(t.cost), hi.max(t.cost)));
        if n > w && most > least + least / 4 {
            return self.by_cost(part);
        }
        // With several tasks for each worker, a type may count on their turns when it orders them.
        let start = match turns {
            Turns::GoOn => self.end,
            _ if n < w => self.next,
            _ => 0,
        };
        self.end = ((u64::from(start) + n as u64) % u64::from(self.workers)) as u32;
        if n < w {
            self.next = self.end;
        }
        (0..n as u32).map(|t| (start + t) % self.workers).collect()
    }

    /// Largest first, each to the worker with the least work in this slot.
    fn by_cost(&mut self, part: &Part) -> Vec<u32> {
        let mut order: Vec<u32> = (0..part.tasks.len() as u32).collect();
        order.sort_by_key(|&t| (std::cmp::Reverse(part.tasks[t as usize].cost), t));
        let mut load: std::collections::BinaryHeap<std::cmp::Reverse<(u64, u32)>> =
            (0..self.workers).map(|w| std::cmp::Reverse((0, w))).collect();
        let mut worker = vec![0; part.tasks.len()];
        for task in order {
            if let Some(mut top) = load.peek_mut() {
                worker[task as usize] = top.0.1;
                top.0.0 += part.tasks[task as usize].cost.max(1);
            }
        }
        worker
    }
}

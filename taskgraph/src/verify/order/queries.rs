//! Questions to an order.

use super::{Bound, LANES, NONE, Order, Proof, Search};

impl<'g> Order<'g> {
    /// By clocks: `earlier` comes before `later`, or they are the same chain element.
    pub(super) fn clocks(&self, earlier: u32, later: u32) -> bool {
        let (b, a) = (earlier as usize * self.blocks, later as usize * self.blocks);
        (0..self.blocks).any(|block| {
            let (first, last) = (&self.first[b + block], &self.last[a + block]);
            (0..LANES).fold(false, |any, lane| any | (first[lane] <= last[lane]))
        })
    }

    /// True where `node` comes before the end event of `rank`.
    pub(in crate::verify) fn reaches_end(&self, node: u32, rank: usize) -> bool {
        self.first[node as usize * self.blocks + rank / LANES][rank % LANES] != u16::MAX
    }

    /// True where `node` comes after the begin event of `rank`.
    pub(in crate::verify) fn after_begin(&self, node: u32, rank: usize) -> bool {
        self.last[node as usize * self.blocks + rank / LANES][rank % LANES] != 0
    }

    /// Whether task `earlier` comes before task `later` in the same iteration.
    pub(in crate::verify) fn before(&self, earlier: u32, later: u32, search: &mut Search) -> Proof {
        let trigger = self.trigger[earlier as usize];
        let rank = self.task_rank[later as usize] as usize;
        let dependencies = &self.graphs[rank].tasks[(later - self.task_base[rank]) as usize].dependencies;
        let base = self.event_base[rank];
        if trigger != NONE {
            if dependencies.iter().any(|&e| base + e == trigger) {
                return Proof::Events;
            }
            if dependencies.iter().any(|&e| self.clocks(trigger, base + e)) {
                return Proof::Events;
            }
        }
        if self.flags.previous.get(later).contains(&earlier) {
            return Proof::Tasks;
        }
        let events = self.events();
        if self.node_before(events + earlier, events + later, search) { Proof::Tasks } else { Proof::Missing }
    }

    /// True where nothing that a rank's tasks wait for leads to the task: no event, no place in a list after
    /// another task, no flagged word.
    pub(in crate::verify) fn waits_for_nothing(&self, task: u32) -> bool {
        self.task(task).dependencies.is_empty()
            && self.worker_previous[task as usize] == NONE
            && self.flags.previous.get(task).is_empty()
    }

    /// Rank of a task.
    pub(in crate::verify) fn rank(&self, task: u32) -> usize {
        usize::from(self.task_rank[task as usize])
    }

    /// What holds for all of a set of earlier tasks, to compare with many later ones.
    pub(in crate::verify) fn no_tasks(&self) -> Bound {
        Bound { first: vec![[0; LANES]; self.blocks], last: vec![[u16::MAX; LANES]; self.blocks] }
    }

    /// Adds a task to the set.
    pub(in crate::verify) fn add(&self, bound: &mut Bound, task: u32) {
        let at = (self.events() + task) as usize * self.blocks;
        for block in 0..self.blocks {
            for lane in 0..LANES {
                bound.first[block][lane] = bound.first[block][lane].max(self.first[at + block][lane]);
                bound.last[block][lane] = bound.last[block][lane].min(self.last[at + block][lane]);
            }
        }
    }

    /// By clocks: all tasks of the set come before `later` in the same iteration.
    pub(in crate::verify) fn all_before(&self, bound: &Bound, later: u32) -> bool {
        let a = (self.events() + later) as usize * self.blocks;
        (0..self.blocks).any(|block| {
            let (first, last) = (&bound.first[block], &self.last[a + block]);
            (0..LANES).fold(false, |any, lane| any | (first[lane] <= last[lane]))
        })
    }

    /// Whether a node comes before another, in the same iteration.
    fn node_before(&self, earlier: u32, later: u32, search: &mut Search) -> bool {
        if earlier == later {
            return false;
        }
        if self.clocks(earlier, later) {
            return true;
        }
        let floor = self.position[earlier as usize];
        if self.position[later as usize] < floor {
            return false;
        }
        search.start(self.position.len());
        search.push(later);
        while let Some(node) = search.stack.pop() {
            let mut found = false;
            self.predecessors(node, |p| {
                found |= p == earlier;
                if self.position[p as usize] > floor {
                    search.push(p);
                }
            });
            if found {
                return true;
            }
        }
        false
    }

    /// Whether task `earlier` of one iteration comes before task `later` of the next one; of the same graph
    /// where `same_graph`, so that carried events count.
    pub(in crate::verify) fn before_in_next(&self, earlier: u32, later: u32, search: &mut Search) -> bool {
        let events = self.events();
        self.crosses_barrier(earlier, self, later)
            || (self.has_carried && {
                self.carried_into(later, search).into_iter().any(|e| {
                    e == self.trigger[earlier as usize] || self.node_before(events + earlier, e, search)
                })
            })
    }

    /// Whether task `earlier` of this graph comes before task `later` of the graph that follows, by the
    /// barrier between a rank's end event and its next begin event.
    pub(in crate::verify) fn crosses_barrier(&self, earlier: u32, next: &Order<'_>, later: u32) -> bool {
        let b = (self.events() + earlier) as usize * self.blocks;
        let a = (next.events() + later) as usize * next.blocks;
        (0..self.blocks.min(next.blocks)).any(|block| {
            let (first, last) = (&self.first[b + block], &next.last[a + block]);
            (0..LANES).any(|lane| first[lane] != u16::MAX && last[lane] != 0)
        })
    }

    /// Events of the previous iteration that a task waits for through carried events, its own or those of tasks
    /// before it.
    fn carried_into(&self, task: u32, search: &mut Search) -> Vec<u32> {
        let events = self.events();
        let mut found = Vec::new();
        search.start(self.position.len());
        search.push(events + task);
        while let Some(node) = search.stack.pop() {
            if node >= events {
                let (rank, _) = self.task_place(node - events);
                let carried = self.task(node - events).carried.iter().filter(|(_, back)| *back == 1);
                found.extend(carried.map(|(event, _)| self.event_node(rank, *event)));
            }
            self.predecessors(node, |p| search.push(p));
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

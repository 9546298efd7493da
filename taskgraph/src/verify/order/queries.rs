//! Questions to an order.

use super::{Bound, Clocks, Flagged, Kind, LANES, NONE, Order, Proof, Search};
use smallvec::smallvec;

impl<'g> Order<'g> {
    fn clock(&self, weak: bool) -> &Clocks {
        match &self.weak {
            Some(clocks) if weak => clocks,
            _ => &self.strong,
        }
    }

    /// By clocks: `earlier` comes before `later`, or they are the same chain element.
    fn by_clocks(&self, weak: bool, earlier: u32, later: u32) -> bool {
        let clocks = self.clock(weak);
        let (b, a) = (earlier as usize * self.blocks, later as usize * self.blocks);
        (0..self.blocks).any(|block| {
            let (first, last) = (&clocks.first[b + block], &clocks.last[a + block]);
            (0..LANES).fold(false, |any, lane| any | (first[lane] <= last[lane]))
        })
    }

    /// The node after which all that a task does is done.
    fn done(&self, task: u32) -> u32 {
        if self.puts[task as usize] && self.trigger[task as usize] != NONE {
            self.trigger[task as usize]
        } else {
            self.events() + task
        }
    }

    /// True where task `task` comes before the end event of `rank`, as far as its worker is concerned.
    pub(in crate::verify) fn reaches_end(&self, task: u32, rank: usize, weak: bool) -> bool {
        let node = (self.events() + task) as usize;
        self.clock(weak).first[node * self.blocks + rank / LANES][rank % LANES] != u16::MAX
    }

    /// True where all that the task does is done before the end event of `rank`.
    pub(in crate::verify) fn done_at_end(&self, task: u32, rank: usize) -> bool {
        let node = self.done(task) as usize;
        self.clock(true).first[node * self.blocks + rank / LANES][rank % LANES] != u16::MAX
    }

    /// True where the task comes after the begin event of `rank`.
    pub(in crate::verify) fn after_begin(&self, task: u32, rank: usize) -> bool {
        let node = (self.events() + task) as usize;
        self.clock(true).last[node * self.blocks + rank / LANES][rank % LANES] != 0
    }

    /// Whether task `earlier` comes before task `later` in the same iteration.
    pub(in crate::verify) fn before(
        &self,
        earlier: u32,
        later: u32,
        kind: Kind,
        search: &mut Search,
    ) -> Proof {
        let trigger = self.trigger[earlier as usize];
        let rank = self.task_rank[later as usize] as usize;
        let dependencies = &self.graphs[rank].tasks[(later - self.task_base[rank]) as usize].dependencies;
        let base = self.event_base[rank];
        let weak = kind != Kind::Data;
        if trigger != NONE {
            if dependencies.iter().any(|&e| base + e == trigger) {
                return Proof::Events;
            }
            if dependencies.iter().any(|&e| self.by_clocks(weak, trigger, base + e)) {
                return Proof::Events;
            }
        }
        let events = self.events();
        let found = match kind {
            Kind::Data => self.node_before(false, self.done(earlier), events + later, search),
            Kind::Reuse => self.node_before(true, self.done(earlier), events + later, search),
            Kind::Overwrite => self.released_before(earlier, events + later, search),
        };
        if found { Proof::Tasks } else { Proof::Missing }
    }

    /// Task `later` polls flagged words of `earlier`.
    pub(in crate::verify) fn polls(&self, earlier: u32, later: u32) -> bool {
        self.flags.writers.get(later).contains(&earlier)
    }

    /// All words of this flagged tensor of `owner`'s memory that are written are read.
    pub(in crate::verify) fn all_read(&self, owner: usize, tensor: usize) -> bool {
        self.flags.all_read.contains(&(owner as u32, tensor as u32))
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

    /// What holds for all of a set of earlier tasks, to compare with many later ones; by the weak order or the strong.
    pub(in crate::verify) fn no_tasks(&self, weak: bool) -> Bound {
        Bound {
            weak,
            first: smallvec![[0; LANES]; self.blocks],
            last: smallvec![[u16::MAX; LANES]; self.blocks],
        }
    }

    /// Adds a task to the set.
    pub(in crate::verify) fn add(&self, bound: &mut Bound, task: u32) {
        let clocks = self.clock(bound.weak);
        let done = self.done(task) as usize * self.blocks;
        let at = (self.events() + task) as usize * self.blocks;
        for block in 0..self.blocks {
            for lane in 0..LANES {
                bound.first[block][lane] = bound.first[block][lane].max(clocks.first[done + block][lane]);
                bound.last[block][lane] = bound.last[block][lane].min(clocks.last[at + block][lane]);
            }
        }
    }

    /// Adds what a task wrote: it is released by the event that the task triggers. Without one the set is before nothing.
    pub(in crate::verify) fn add_written(&self, bound: &mut Bound, task: u32) {
        self.add(bound, task);
        let trigger = self.trigger[task as usize];
        let clocks = self.clock(bound.weak);
        for block in 0..self.blocks {
            for lane in 0..LANES {
                let after = match trigger {
                    NONE => u16::MAX,
                    event => clocks.first[event as usize * self.blocks + block][lane],
                };
                bound.first[block][lane] = bound.first[block][lane].max(after);
            }
        }
    }

    /// By clocks: all tasks of the set come before `later` in the same iteration.
    pub(in crate::verify) fn all_before(&self, bound: &Bound, later: u32) -> bool {
        let clocks = self.clock(bound.weak);
        let a = (self.events() + later) as usize * self.blocks;
        (0..self.blocks).any(|block| {
            let (first, last) = (&bound.first[block], &clocks.last[a + block]);
            (0..LANES).fold(false, |any, lane| any | (first[lane] <= last[lane]))
        })
    }

    /// Whether a node comes before another, in the same iteration.
    fn node_before(&self, weak: bool, earlier: u32, later: u32, search: &mut Search) -> bool {
        if earlier == later {
            return earlier < self.events();
        }
        if self.by_clocks(weak, earlier, later) {
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
            self.predecessors(node, Flagged::of(weak), |p| {
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

    /// Whether what task `earlier` wrote is released by an event, or seen by `later` itself, before node `later`.
    fn released_before(&self, earlier: u32, later: u32, search: &mut Search) -> bool {
        let trigger = self.trigger[earlier as usize];
        if trigger != NONE && self.node_before(true, trigger, later, search) {
            return true;
        }
        if self.puts[earlier as usize] {
            return false;
        }
        let start = self.events() + earlier;
        if self.node_before(false, start, later, search) {
            return true;
        }
        if self.weak.is_none() {
            return false;
        }
        // A later task of the same list may have triggered an event, and that one leads on by the weak order.
        let floor = self.position[start as usize];
        search.start(self.position.len());
        search.push(later);
        let mut released = std::mem::take(&mut search.events);
        released.clear();
        while let Some(node) = search.stack.pop() {
            if node < self.events() {
                released.push(node);
            }
            self.predecessors(node, Flagged::Always, |p| {
                if self.position[p as usize] > floor {
                    search.push(p);
                }
            });
        }
        let found = released.iter().any(|&event| self.node_before(false, start, event, search));
        search.events = released;
        found
    }

    /// Whether task `earlier` of one iteration comes before task `later` of the next one; of the same graph, so that
    /// carried events count.
    pub(in crate::verify) fn before_in_next(
        &self,
        earlier: u32,
        later: u32,
        kind: Kind,
        search: &mut Search,
    ) -> bool {
        self.crosses_barrier(earlier, self, later, kind)
            || (self.has_carried && {
                self.carried_into(later, kind, search).into_iter().any(|e| {
                    e == self.trigger[earlier as usize]
                        || match kind {
                            Kind::Data => self.node_before(false, self.done(earlier), e, search),
                            Kind::Reuse => self.node_before(true, self.done(earlier), e, search),
                            Kind::Overwrite => self.released_before(earlier, e, search),
                        }
                })
            })
    }

    /// Whether task `earlier` of this graph comes before task `later` of the graph that follows, by the
    /// barrier between a rank's end event and its next begin event.
    pub(in crate::verify) fn crosses_barrier(
        &self,
        earlier: u32,
        next: &Order<'_>,
        later: u32,
        kind: Kind,
    ) -> bool {
        let a = (next.events() + later) as usize * next.blocks;
        let crosses = |out: &Clocks, into: &Clocks, b: usize| {
            (0..self.blocks.min(next.blocks)).any(|block| {
                let (first, last) = (&out.first[b * self.blocks + block], &into.last[a + block]);
                (0..LANES).any(|lane| first[lane] != u16::MAX && last[lane] != 0)
            })
        };
        let done = self.done(earlier) as usize;
        match (kind, self.trigger[earlier as usize]) {
            (Kind::Data, _) => crosses(&self.strong, &next.strong, done),
            (Kind::Reuse, _) => crosses(self.clock(true), next.clock(true), done),
            // What was written is released by the event that the task triggers, or by a later one of its list.
            (Kind::Overwrite, trigger) => {
                trigger != NONE && crosses(self.clock(true), next.clock(true), trigger as usize)
                    || crosses(&self.strong, next.clock(true), done)
            }
        }
    }

    /// Events of the previous iteration that a task waits for through carried events, its own or those of tasks
    /// before it.
    fn carried_into(&self, task: u32, kind: Kind, search: &mut Search) -> Vec<u32> {
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
            self.predecessors(node, Flagged::of(kind != Kind::Data), |p| search.push(p));
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

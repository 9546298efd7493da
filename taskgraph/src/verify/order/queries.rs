//! Queries of an order.

use super::lanes::{Bound, Clocks, LANES, Lanes, lower, raise, turned_lanes};
use super::{Flagged, Kind, NONE, Order, Proof, Search};
use smallvec::{SmallVec, smallvec};

/// True if `has` holds on some rank.
fn some_lane(first: &[Lanes], last: &[Lanes], has: impl Fn(u16, u16) -> bool) -> bool {
    first.iter().zip(last).any(|(a, b)| (0..LANES).fold(false, |any, lane| any | has(a[lane], b[lane])))
}

impl<'g> Order<'g> {
    fn clock(&self, weak: bool) -> &Clocks {
        match &self.weak {
            Some(clocks) if weak => clocks,
            _ => &self.strong,
        }
    }

    /// The first element of each rank's chain after the node.
    fn first_after(&self, clocks: &Clocks, node: u32) -> SmallVec<[Lanes; 1]> {
        let (held, by) = self.held(node);
        turned_lanes(
            &clocks.first[held as usize * self.blocks..][..self.blocks],
            by as usize,
            self.graphs.len(),
        )
    }

    /// The last element of each rank's chain before the node.
    fn last_before(&self, clocks: &Clocks, node: u32) -> SmallVec<[Lanes; 1]> {
        let (held, by) = self.held(node);
        turned_lanes(
            &clocks.last[held as usize * self.blocks..][..self.blocks],
            by as usize,
            self.graphs.len(),
        )
    }

    /// Calls `then` with the clock of a node, without a copy if it need not be turned.
    #[inline]
    fn with(&self, clocks: &[Lanes], node: u32, then: impl FnOnce(&[Lanes])) {
        let (held, by) = self.held(node);
        let held = &clocks[held as usize * self.blocks..][..self.blocks];
        match by {
            0 => then(held),
            _ => then(&turned_lanes(held, by as usize, self.graphs.len())),
        }
    }

    /// By clocks: `earlier` comes before `later`, or they are the same chain element.
    fn by_clocks(&self, weak: bool, earlier: u32, later: u32) -> bool {
        let clocks = self.clock(weak);
        let (first, last) = (self.first_after(clocks, earlier), self.last_before(clocks, later));
        some_lane(&first, &last, |first, last| first <= last)
    }

    /// The node after which everything that a task does is done.
    fn done(&self, task: u32) -> u32 {
        let (held, _) = self.held_task(task);
        if self.puts[held as usize] && self.trigger[held as usize] != NONE {
            self.trigger(task)
        } else {
            self.events() + task
        }
    }

    /// The rank of the node after which everything that a task does is done.
    pub(in crate::verify) fn rank_done(&self, task: u32) -> usize {
        let done = self.done(task);
        match done.checked_sub(self.events()) {
            Some(task) => self.rank(task),
            None => self.event_place(done).0,
        }
    }

    /// True if the worker has finished task `task` before the end event of `rank`. A put of the task may complete
    /// later.
    pub(in crate::verify) fn reaches_end(&self, task: u32, rank: usize, weak: bool) -> bool {
        let first = self.first_after(self.clock(weak), self.events() + task);
        first[rank / LANES][rank % LANES] != u16::MAX
    }

    /// True if everything that the task does is done before the end event of `rank`.
    pub(in crate::verify) fn done_at_end(&self, task: u32, rank: usize) -> bool {
        self.first_after(self.clock(true), self.done(task))[rank / LANES][rank % LANES] != u16::MAX
    }

    /// True if the task comes after the begin event of `rank`.
    pub(in crate::verify) fn after_begin(&self, task: u32, rank: usize) -> bool {
        self.last_before(self.clock(true), self.events() + task)[rank / LANES][rank % LANES] != 0
    }

    /// How task `earlier` is known to come before task `later` in the same iteration.
    pub(in crate::verify) fn before(
        &self,
        earlier: u32,
        later: u32,
        kind: Kind,
        search: &mut Search,
    ) -> Proof {
        let trigger = self.trigger(earlier);
        let (rank, index) = self.task_place(later);
        let dependencies = &self.graphs[rank].tasks[index as usize].dependencies;
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

    /// True if task `later` polls flagged words of `earlier`.
    pub(in crate::verify) fn polls(&self, earlier: u32, later: u32) -> bool {
        let (held, by) = self.held_task(later);
        self.flags.writers.get(held).iter().any(|&writer| self.turned_task(writer, by) == earlier)
    }

    /// True if all written words of this flagged tensor in `owner`'s memory are read.
    pub(in crate::verify) fn all_read(&self, owner: usize, tensor: usize) -> bool {
        self.flags.all_read.contains(&(owner as u32, tensor as u32))
    }

    /// True if nothing that a rank's tasks wait for leads to the task: no event, no earlier task of a list, no flagged word.
    pub(in crate::verify) fn waits_for_nothing(&self, task: u32) -> bool {
        let (held, _) = self.held_task(task);
        self.task(task).dependencies.is_empty()
            && self.worker_previous[held as usize] == NONE
            && self.flags.previous.get(held).is_empty()
    }

    /// Rank of a task.
    pub(in crate::verify) fn rank(&self, task: u32) -> usize {
        self.task_place(task).0
    }

    /// An empty set of earlier tasks, to be compared with many later ones, in the weak or the strong order.
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
        self.with(&clocks.first, self.done(task), |first| raise(&mut bound.first, first));
        self.with(&clocks.last, self.events() + task, |last| lower(&mut bound.last, last));
    }

    /// Adds the writes of a task, which the event that it triggers releases. Without such an event, the set comes before nothing.
    pub(in crate::verify) fn add_written(&self, bound: &mut Bound, task: u32) {
        self.add(bound, task);
        match self.trigger(task) {
            NONE => bound.first.fill([u16::MAX; LANES]),
            event => {
                let clocks = self.clock(bound.weak);
                self.with(&clocks.first, event, |first| raise(&mut bound.first, first));
            }
        }
    }

    /// By clocks: all tasks of the set come before `later` in the same iteration.
    pub(in crate::verify) fn all_before(&self, bound: &Bound, later: u32) -> bool {
        let last = self.last_before(self.clock(bound.weak), self.events() + later);
        some_lane(&bound.first, &last, |first, last| first <= last)
    }

    /// True if a node comes before another in the same iteration.
    fn node_before(&self, weak: bool, earlier: u32, later: u32, search: &mut Search) -> bool {
        if earlier == later {
            return earlier < self.events();
        }
        if self.by_clocks(weak, earlier, later) {
            return true;
        }
        let floor = self.position(earlier);
        if self.position(later) < floor {
            return false;
        }
        search.start(self.nodes());
        search.push(later);
        while let Some(node) = search.stack.pop() {
            let mut found = false;
            self.predecessors(node, Flagged::of(weak), |p| {
                found |= p == earlier;
                if self.position(p) > floor {
                    search.push(p);
                }
            });
            if found {
                return true;
            }
        }
        false
    }

    /// True if the writes of task `earlier` are released by an event, or seen by `later` itself, before node `later`.
    fn released_before(&self, earlier: u32, later: u32, search: &mut Search) -> bool {
        let trigger = self.trigger(earlier);
        if trigger != NONE && self.node_before(true, trigger, later, search) {
            return true;
        }
        if self.puts[self.held_task(earlier).0 as usize] {
            return false;
        }
        let start = self.events() + earlier;
        if self.node_before(false, start, later, search) {
            return true;
        }
        if self.weak.is_none() {
            return false;
        }
        // A later task of the same list may have triggered an event, which leads on in the weak order.
        let floor = self.position(start);
        search.start(self.nodes());
        search.push(later);
        let mut released = std::mem::take(&mut search.events);
        released.clear();
        while let Some(node) = search.stack.pop() {
            if node < self.events() {
                released.push(node);
            }
            self.predecessors(node, Flagged::Always, |p| {
                if self.position(p) > floor {
                    search.push(p);
                }
            });
        }
        let found = released.iter().any(|&event| self.node_before(false, start, event, search));
        search.events = released;
        found
    }

    /// How task `earlier` of one iteration is known to come before task `later` of the next, both of the same graph, so that
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
                    e == self.trigger(earlier)
                        || match kind {
                            Kind::Data => self.node_before(false, self.done(earlier), e, search),
                            Kind::Reuse => self.node_before(true, self.done(earlier), e, search),
                            Kind::Overwrite => self.released_before(earlier, e, search),
                        }
                })
            })
    }

    /// True if task `earlier` of this graph comes before task `later` of the following graph, because of the barrier between a
    /// rank's end event and its next begin event.
    pub(in crate::verify) fn crosses_barrier(
        &self,
        earlier: u32,
        next: &Order<'_>,
        later: u32,
        kind: Kind,
    ) -> bool {
        let crosses = |out: &Clocks, into: &Clocks, node: u32| {
            let (first, last) = (self.first_after(out, node), next.last_before(into, next.events() + later));
            some_lane(&first, &last, |first, last| first != u16::MAX && last != 0)
        };
        let done = self.done(earlier);
        match (kind, self.trigger(earlier)) {
            (Kind::Data, _) => crosses(&self.strong, &next.strong, done),
            (Kind::Reuse, _) => crosses(self.clock(true), next.clock(true), done),
            // A write is released by the event that the task triggers, or by a later one of its list.
            (Kind::Overwrite, trigger) => {
                trigger != NONE && crosses(self.clock(true), next.clock(true), trigger)
                    || crosses(&self.strong, next.clock(true), done)
            }
        }
    }

    /// Events of the previous iteration that a task waits for through carried events, either its own or those of tasks before it.
    fn carried_into(&self, task: u32, kind: Kind, search: &mut Search) -> Vec<u32> {
        let events = self.events();
        let mut found = Vec::new();
        search.start(self.nodes());
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

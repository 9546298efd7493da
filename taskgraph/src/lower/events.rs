//! Dependencies of one rank, derived from the regions that tasks access. `grouping` says which tasks share an event.

use super::grouping::{ALL, COVERED, Grouping, GroupingKey, JOINT, LinkKey, SOME, flags};
use super::overlap::{Overlap, Shift, Side, overlap};
use super::plan::Plan;
use super::types::{CLOSING_EVENT, FIRST_EVENT, NONE, Part, SlotKind};
use crate::collective::rows_kind;
use crate::dtype::DType;
use crate::ids::EventId;
use crate::op_graph::Rows;
use crate::task_graph::{Placement, core_types};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::rc::Rc;

/// Two slots that access the same tensor, the later one after the earlier one. At least one of them writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub from: u32,
    pub to: u32,
    from_side: Side,
    to_side: Side,
    from_tensor: u32,
    pub to_tensor: u32,
    /// The words carry their epoch, so the writers on every rank come before the reader without an event.
    pub flagged: bool,
}

/// The links of a plan, by their earlier slot.
#[derive(Debug)]
pub(crate) struct Links {
    pub all: Vec<Link>,
    first: Vec<u32>,
}

impl Links {
    pub fn new(plan: &Plan) -> Self {
        let mut touched: Vec<Vec<(u32, Side, u32)>> = vec![Vec::new(); plan.tensors.len()];
        let mut all = Vec::new();
        let root = |t: u32| plan.root(t, 0).0;
        for (to, slot) in plan.slots.iter().enumerate() {
            let to = to as u32;
            let reads = slot.inputs.iter().enumerate().map(|(i, &t)| (Side::Read(i as u8), t));
            let writes = slot.outputs.iter().enumerate().map(|(i, &t)| (Side::Write(i as u8), t));
            for (to_side, to_tensor) in reads.clone().chain(writes.clone()) {
                let tensor = &plan.tensors[root(to_tensor) as usize];
                for &(from, from_side, from_tensor) in &touched[root(to_tensor) as usize] {
                    let conflict = match (from_side, to_side) {
                        (Side::Write(_), Side::Read(_)) => true,
                        (Side::Read(_), Side::Write(_)) => !tensor.activation,
                        _ => false,
                    };
                    if conflict {
                        let flagged = tensor.dtype == DType::F32Flagged;
                        all.push(Link { from, to, from_side, to_side, from_tensor, to_tensor, flagged });
                    }
                }
            }
            for (side, tensor) in reads.chain(writes) {
                // A tensor that no task writes cannot cause conflicts; weights would only make the lists longer.
                let known = &plan.tensors[root(tensor) as usize];
                if known.activation || plan.is_persistent(root(tensor)) {
                    touched[root(tensor) as usize].push((to, side, tensor));
                }
            }
        }
        all.sort_by_key(|l| l.from);
        let mut first = vec![0; plan.slots.len() + 1];
        all.iter().for_each(|l| first[l.from as usize + 1] += 1);
        for i in 1..first.len() {
            first[i] += first[i - 1];
        }
        Links { all, first }
    }

    fn from(&self, slot: usize) -> std::ops::Range<usize> {
        self.first[slot] as usize..self.first[slot + 1] as usize
    }
}

/// Dependencies and events of one rank. Tasks are counted from 0 in slot order. Arrivals have no tasks.
#[derive(Debug)]
pub(crate) struct Analysis {
    /// First task of each slot, then the number of tasks.
    pub first_task: Vec<u32>,
    /// Events that each task waits for. If empty, it waits only for the begin.
    pub dependencies: Dependencies,
    /// The event that each task triggers; [`NONE`] for those that trigger peers' events.
    pub trigger: Vec<u32>,
    /// Number of triggers of each event. Those of event 2 are counted at the end.
    pub num_triggers: Vec<u32>,
    /// Peers trigger the events from 3 up to this one.
    pub first_local_event: u32,
    /// Remote events that no task waits for, with their slots.
    pub unwatched: Vec<(u32, u32)>,
    /// [`ALL`], [`SOME`], [`COVERED`] and [`JOINT`] for each link.
    pub flags: Vec<u8>,
    /// For each link, another later slot, or [`NONE`]: for every task of the earlier slot, a task of one of the two waits.
    pub partner: Vec<u32>,
}

/// For each task the events that it waits for: the begin event where there is no other.
#[derive(Debug)]
pub(crate) struct Dependencies {
    /// Where those of each task begin, and the end.
    pub first: Vec<u32>,
    pub events: Vec<u32>,
}

impl Dependencies {
    fn new(of_tasks: &[SmallVec<[u32; 2]>]) -> Self {
        let mut all = Dependencies { first: Vec::with_capacity(of_tasks.len() + 1), events: Vec::new() };
        all.events.reserve(of_tasks.iter().map(|events| events.len().max(1)).sum());
        all.first.push(0);
        for events in of_tasks {
            match events.is_empty() {
                true => all.events.push(EventId::BEGIN),
                false => all.events.extend_from_slice(events),
            }
            all.first.push(all.events.len() as u32);
        }
        all
    }

    pub fn of(&self, task: usize) -> &[u32] {
        &self.events[self.first[task] as usize..self.first[task + 1] as usize]
    }
}

impl Analysis {
    /// Makes room for [`CLOSING_EVENT`] with this many triggers.
    pub fn add_closing_event(&mut self, num_triggers: u32) {
        let shift = |event: &mut u32| {
            if *event >= CLOSING_EVENT && *event != NONE {
                *event += 1;
            }
        };
        self.dependencies.events.iter_mut().for_each(shift);
        self.trigger.iter_mut().for_each(shift);
        self.unwatched.iter_mut().for_each(|(event, _)| shift(event));
        self.num_triggers.insert(CLOSING_EVENT as usize, num_triggers);
        self.first_local_event += 1;
    }
}

/// Derives the dependencies of one rank.
pub(crate) fn analyse(plan: &Plan, links: &Links, rank: u32) -> Analysis {
    let num_slots = plan.slots.len();
    let mut first_task = Vec::with_capacity(num_slots + 1);
    let mut total = 0u32;
    for (index, slot) in plan.slots.iter().enumerate() {
        first_task.push(total);
        if !matches!(slot.kind, SlotKind::Arrive { .. }) {
            total += plan.part(rank, index).map_or(0, |p| p.tasks.len() as u32);
        }
    }
    first_task.push(total);

    let mut num_triggers = vec![0u32; FIRST_EVENT as usize];
    num_triggers[EventId::BEGIN as usize] = 1;
    let mut event_slot = vec![0u32; FIRST_EVENT as usize];
    let mut arrival_event = vec![NONE; num_slots];
    for (index, slot) in plan.slots.iter().enumerate() {
        if let SlotKind::Arrive { exchange } = slot.kind {
            arrival_event[index] = num_triggers.len() as u32;
            num_triggers.extend(&plan.exchanges[exchange as usize].table.triggers[rank as usize]);
            event_slot.resize(num_triggers.len(), index as u32);
        }
    }
    let first_local_event = num_triggers.len() as u32;
    let mut state = Builder {
        dependencies: vec![SmallVec::new(); total as usize],
        trigger: vec![EventId::END_OF_GRAPH; total as usize],
        num_triggers,
        event_slot,
        unwatched: Vec::new(),
        flags: vec![0; links.all.len()],
        partner: vec![NONE; links.all.len()],
        joint: FxHashMap::default(),
        groupings: FxHashMap::default(),
        first_task,
        dynamic: plan.options.placement == Placement::Dynamic,
    };
    let mut cache: FxHashMap<Touching, Rc<Overlap>> = FxHashMap::default();
    let mut certain_flags: FxHashMap<Touching, u8> = FxHashMap::default();
    for (index, slot) in plan.slots.iter().enumerate() {
        let Some(part) = plan.part(rank, index) else { continue };
        let n = part.tasks.len();
        if slot.kind.sends().is_some() {
            let tasks = state.first_task[index] as usize..state.first_task[index + 1] as usize;
            state.trigger[tasks].fill(NONE);
            continue;
        }
        let mut overlaps: Vec<(usize, Rc<Overlap>)> = Vec::new();
        for number in links.from(index) {
            let link = &links.all[number];
            let Some(later) = plan.part(rank, link.to as usize) else { continue };
            let from_shift = plan.root(link.from_tensor, rank).1;
            let to_shift = plan.root(link.to_tensor, rank).1;
            let key = (
                plan.part_of[rank as usize][index],
                link.from_side,
                from_shift,
                plan.part_of[rank as usize][link.to as usize],
                link.to_side,
                to_shift,
            );
            let found = cache
                .entry(key)
                .or_insert_with(|| {
                    Rc::new(overlap(part, link.from_side, from_shift, later, link.to_side, to_shift))
                })
                .clone();
            if link.flagged {
                state.flags[number] = *certain_flags.entry(key).or_insert_with(|| {
                    let certain = always_read(later, link.to_side);
                    let certain = overlap(part, link.from_side, from_shift, &certain, link.to_side, to_shift);
                    plain_flags(&certain, later.tasks.len(), n)
                });
            }
            overlaps.push((number, found));
        }
        match slot.kind {
            SlotKind::Arrive { exchange } => {
                let completes = plan.exchanges[exchange as usize].completes.is_some();
                state.arrivals(links, &overlaps, index, n, arrival_event[index], completes);
            }
            _ => state.slot(plan, links, &overlaps, index, n),
        }
    }
    state.drop_implied();
    for (_, numbers) in state.joint.into_values().filter(|(waiting, _)| !waiting.contains(&false)) {
        numbers.into_iter().for_each(|number| state.flags[number] |= JOINT);
    }
    Analysis {
        first_task: state.first_task,
        dependencies: Dependencies::new(&state.dependencies),
        trigger: state.trigger,
        num_triggers: state.num_triggers,
        first_local_event,
        unwatched: state.unwatched,
        flags: state.flags,
        partner: state.partner,
    }
}

/// An operand of a part with its shift, and an operand of another part with its shift.
type Touching = (u32, Side, Shift, u32, Side, Shift);

struct Builder {
    first_task: Vec<u32>,
    dependencies: Vec<SmallVec<[u32; 2]>>,
    trigger: Vec<u32>,
    num_triggers: Vec<u32>,
    event_slot: Vec<u32>,
    unwatched: Vec<(u32, u32)>,
    flags: Vec<u8>,
    partner: Vec<u32>,
    /// By later slot and tensor: which tasks of the slot wait for some writer of the tensor, and the links through which they do.
    joint: FxHashMap<(u32, u32), (Vec<bool>, Vec<usize>)>,
    groupings: FxHashMap<GroupingKey, Rc<Grouping>>,
    dynamic: bool,
}

impl Builder {
    fn consumers(&self, slot: u32) -> std::ops::Range<usize> {
        self.first_task[slot as usize] as usize..self.first_task[slot as usize + 1] as usize
    }

    fn depend(&mut self, task: usize, event: u32) {
        if !self.dependencies[task].contains(&event) {
            self.dependencies[task].push(event);
        }
    }

    /// Events of a slot whose tasks run on this rank.
    fn slot(&mut self, plan: &Plan, links: &Links, overlaps: &[(usize, Rc<Overlap>)], slot: usize, n: usize) {
        // A sum that ranks compute in shares has one event, even if its readers need only parts of it. A task that has
        // seen this event and the other ranks' shares knows that everything before them is done
        // (`order::after_both_halves`).
        let is_share = matches!(plan.slots.get(slot + 1).map(|s| s.kind), Some(SlotKind::Copy { exchange })
            if plan.exchanges[exchange as usize].completes.is_some());
        let to = |place: usize| links.all[overlaps[place].0].to;
        let link_key = |place: usize| LinkKey {
            overlap: Rc::as_ptr(&overlaps[place].1),
            to: (0..place).find(|&other| to(other) == to(place)).unwrap_or(place),
            consumers: self.consumers(to(place)).len(),
            flagged: links.all[overlaps[place].0].flagged,
        };
        let key = GroupingKey { tasks: n, is_share, links: (0..overlaps.len()).map(link_key).collect() };
        let grouping = match self.groupings.get(&key) {
            Some(grouping) => grouping.clone(),
            None => {
                let links = overlaps.iter().zip(&key.links).map(|((_, found), &link)| (&**found, link));
                let grouping = Rc::new(Grouping::new(n, is_share, &links.collect::<Vec<_>>()));
                self.groupings.insert(key, grouping.clone());
                grouping
            }
        };
        let (first, base) = (self.first_task[slot] as usize, self.num_triggers.len() as u32);
        self.num_triggers.extend(&grouping.triggers);
        self.event_slot.resize(self.num_triggers.len(), slot as u32);
        for (trigger, &event) in self.trigger[first..first + n].iter_mut().zip(&grouping.event_of) {
            if event != NONE {
                *trigger = base + event;
            }
        }
        for ((number, found), waits) in overlaps.iter().zip(&grouping.links) {
            let link = links.all[*number];
            let consumers = self.consumers(link.to);
            if link.flagged {
                if self.dynamic {
                    self.launch_with_producers(consumers, found, first, n);
                }
                continue;
            }
            self.flags[*number] = waits.flags;
            self.partner[*number] = waits.partner.map_or(NONE, to);
            if waits.flags & SOME == 0 {
                let tensor = plan.root(link.to_tensor, 0).0;
                let joint = self.joint.entry((link.to, tensor));
                let (waiting, numbers) = joint.or_insert_with(|| (vec![false; consumers.len()], Vec::new()));
                waiting.iter_mut().zip(&waits.events).for_each(|(w, &event)| *w |= event != NONE);
                numbers.push(*number);
            }
            for (consumer, &event) in consumers.zip(&waits.events) {
                if event != NONE {
                    self.depend(consumer, base + event);
                }
            }
        }
    }

    /// A task that polls flagged words is launched together with its rank's own tasks that write them. If it were launched by
    /// earlier events, it would poll in vain until then.
    fn launch_with_producers(
        &mut self,
        consumers: std::ops::Range<usize>,
        found: &Overlap,
        first: usize,
        n: usize,
    ) {
        for (i, consumer) in consumers.enumerate() {
            let producers = if found.every { 0..n as u32 } else { 0..found.row(i).len() as u32 };
            for number in producers {
                let producer = if found.every { number } else { found.row(i)[number as usize] };
                for event in self.dependencies[first + producer as usize].clone() {
                    self.depend(consumer, event);
                }
            }
        }
    }

    /// The dependents of events that peers trigger. Task `i` of the arrival is event `first + i`. If the arrival `completes` what the
    /// ranks share out, every dependent waits for all of it, so that it knows what [`super::order`] derives from that.
    fn arrivals(
        &mut self,
        links: &Links,
        overlaps: &[(usize, Rc<Overlap>)],
        slot: usize,
        n: usize,
        first: u32,
        completes: bool,
    ) {
        let mut watched = vec![false; n];
        for (number, found) in overlaps {
            let consumers = self.consumers(links.all[*number].to);
            let every = found.every || completes;
            self.flags[*number] =
                if every { ALL | SOME | COVERED } else { plain_flags(found, consumers.len(), n) };
            for (i, consumer) in consumers.enumerate() {
                if every {
                    (0..n as u32).for_each(|e| self.depend(consumer, first + e));
                } else {
                    found.row(i).iter().for_each(|&e| self.depend(consumer, first + e));
                    found.row(i).iter().for_each(|&e| watched[e as usize] = true);
                }
            }
            if every {
                watched.fill(true);
            }
        }
        self.unwatched.extend((0..n).filter(|&i| !watched[i]).map(|i| (first + i as u32, slot as u32)));
    }

    /// Removes a dependency that another one implies: a task that triggers the other event waits for it, or for an event that
    /// does, and so on.
    fn drop_implied(&mut self) {
        let mut before: Vec<SmallVec<[u32; 4]>> = vec![SmallVec::new(); self.num_triggers.len()];
        let mut added = None;
        for (dependencies, &trigger) in self.dependencies.iter().zip(&self.trigger) {
            let same = (trigger, dependencies);
            if trigger != NONE && trigger > EventId::END_OF_GRAPH && added.replace(same) != Some(same) {
                let known = &mut before[trigger as usize];
                for event in dependencies {
                    if known.len() < MOST_KNOWN && !known.contains(event) {
                        known.push(*event);
                    }
                }
            }
        }
        let mut last: (SmallVec<[u32; 2]>, SmallVec<[u32; 2]>) = Default::default();
        let mut visited: Vec<u32> = Vec::new();
        for dependencies in &mut self.dependencies {
            if dependencies.len() < 2 {
                continue;
            }
            if *dependencies != last.0 {
                last.0.clone_from(dependencies);
                last.1 = dependencies
                    .iter()
                    .filter(|&&event| {
                        !dependencies.iter().any(|&other| {
                            other != event && reaches(&before, &self.event_slot, other, event, &mut visited)
                        })
                    })
                    .copied()
                    .collect();
            }
            dependencies.clone_from(&last.1);
        }
    }
}

/// Limits of the search for implied dependencies: predecessors kept per event, and events checked.
const MOST_KNOWN: usize = 16;
const MOST_VISITED: usize = 48;

fn reaches(
    before: &[SmallVec<[u32; 4]>],
    event_slot: &[u32],
    from: u32,
    target: u32,
    visited: &mut Vec<u32>,
) -> bool {
    visited.clear();
    visited.push(from);
    let mut next = 0;
    while next < visited.len() {
        for &event in &before[visited[next] as usize] {
            if event == target {
                return true;
            }
            if event_slot[event as usize] > event_slot[target as usize]
                && visited.len() < MOST_VISITED
                && !visited.contains(&event)
            {
                visited.push(event);
            }
        }
        next += 1;
    }
    false
}

/// The reads of flagged words that a part waits for in every iteration. The first token row is always in use; there may
/// be no sample row in use. A writer of other rows may have nothing to write, and then orders nothing.
fn always_read(part: &Part, side: Side) -> Part {
    const ROWS: usize = 1;
    let tokens = part.params.get(2) == Some(&rows_kind(Rows::Tokens));
    let fixed = part.params.get(2) == Some(&rows_kind(Rows::Fixed));
    let known = part.type_name == core_types::REDUCE;
    let mut tasks = part.tasks.clone();
    for access in tasks.iter_mut().flat_map(|t| &mut t.reads).filter(|a| Side::Read(a.operand) == side) {
        match known {
            true if tokens && access.region.lo[ROWS] == 0 => access.region.hi[ROWS] = 1,
            true if fixed => {}
            _ => access.region.hi[ROWS] = access.region.lo[ROWS],
        }
    }
    Part {
        type_name: part.type_name.clone(),
        params: Vec::new(),
        rank_param: None,
        stacked: part.stacked,
        scratch_bytes: 0,
        tasks,
    }
}

fn plain_flags(found: &Overlap, consumers: usize, n: usize) -> u8 {
    if found.every {
        return ALL | SOME | COVERED;
    }
    let mut touched = vec![false; n];
    let (mut all, mut some) = (true, true);
    for consumer in 0..consumers {
        let row = found.row(consumer);
        all &= row.len() == n;
        some &= !row.is_empty();
        row.iter().for_each(|&p| touched[p as usize] = true);
    }
    flags(all, some, touched.iter().all(|t| *t))
}

//! The order of slots over all ranks: the proof that buffers may be shared.
//!
//! For two slots, "before" means that every task of one slot is done before any task of the other starts. It is derived for the
//! slots' own rank and for the other ranks; the latter only follows from what ranks send and from flagged words. Everything here
//! holds on all ranks, so that all ranks draw the same conclusions.

use super::events::{Analysis, Links};
use super::grouping::{ALL, COVERED, JOINT, SOME};
use super::plan::Plan;
use super::types::{NONE, SlotKind, Table};

/// A set of slots.
#[derive(Clone, Debug)]
struct Set(Vec<u64>);

impl Set {
    fn new(n: usize) -> Self {
        Set(vec![0; n.div_ceil(64)])
    }
    fn insert(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }
    fn contains(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }
    fn add(&mut self, other: &Set) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }
    fn keep(&mut self, other: &Set) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a &= b);
    }
}

/// A link from the slot `from`.
#[derive(Clone, Copy, Debug)]
struct Incoming {
    from: u32,
    flagged: bool,
    /// Those that hold on all ranks.
    flags: u8,
    /// [`Analysis::partner`], if it is the same on all ranks.
    partner: u32,
    tensor: u32,
}

#[derive(Clone, Debug)]
struct Known {
    /// Slots of the same rank that are before this one.
    own: Set,
    /// Slots that are before this one on every other rank.
    other: Set,
    /// Slots of the same rank whose tasks are each before some task of this one.
    own_covered: Set,
    /// The same for every other rank.
    other_covered: Set,
}

/// The order of a plan's slots.
#[derive(Debug)]
pub(crate) struct Order {
    known: Vec<Known>,
    end: Set,
    begin: usize,
}

impl Order {
    pub fn new(plan: &Plan, links: &Links, analyses: &[&Analysis]) -> Self {
        let begin = plan.slots.len();
        let empty = Set::new(begin + 1);
        let mut incoming: Vec<Vec<Incoming>> = vec![Vec::new(); begin];
        for (number, link) in links.all.iter().enumerate() {
            let flags = analyses.iter().fold(ALL | SOME | COVERED | JOINT, |all, a| all & a.flags[number]);
            let partner = analyses.first().map_or(NONE, |a| a.partner[number]);
            let partner = if analyses.iter().all(|a| a.partner[number] == partner) { partner } else { NONE };
            let tensor = plan.root(link.to_tensor, 0).0;
            let link_in = Incoming { from: link.from, flagged: link.flagged, flags, partner, tensor };
            incoming[link.to as usize].push(link_in);
        }
        let mut known: Vec<Known> = Vec::with_capacity(begin);
        let mut end = empty.clone();
        for (index, slot) in plan.slots.iter().enumerate() {
            let mut k = Known {
                own: empty.clone(),
                other: empty.clone(),
                own_covered: empty.clone(),
                other_covered: empty.clone(),
            };
            let everywhere = (0..plan.options.world).all(|r| plan.part(r, index).is_some());
            match slot.kind {
                SlotKind::Arrive { exchange } => {
                    let table = &plan.exchanges[exchange as usize].table;
                    arrive(&mut k, &known[index - 1], table, plan.options.world);
                }
                _ if everywhere => {
                    k.own.insert(begin);
                    for &Incoming { from, flagged, flags, .. } in &incoming[index] {
                        follow(&mut k, from as usize, &known[from as usize], flagged, flags);
                    }
                    follow_together(&mut k, &known, &incoming[index]);
                    for &Incoming { from, flags, .. } in &incoming[index] {
                        let sum = (from as usize).wrapping_sub(2);
                        let sums = |link: &Incoming| link.from as usize == sum && link.flags & ALL != 0;
                        if flags & ALL != 0
                            && let Some(first) = completes(plan, from)
                            && incoming[index].iter().any(sums)
                        {
                            after_both_halves(&mut k, plan, &known, &incoming, first, from as usize);
                        }
                    }
                }
                _ => {}
            }
            k.own_covered.add(&k.own);
            k.other_covered.add(&k.other);
            end.add(&k.other_covered);
            known.push(k);
        }
        Order { known, end, begin }
    }

    /// True if `earlier` is before `later` on the same rank.
    pub fn own(&self, earlier: usize, later: usize) -> bool {
        self.known[later].own.contains(earlier)
    }
    /// True if `earlier` on every other rank is before `later` on this one.
    pub fn other(&self, earlier: usize, later: usize) -> bool {
        self.known[later].other.contains(earlier)
    }
    /// True if every other rank has begun the iteration before `later` on this one.
    pub fn begin_elsewhere(&self, later: usize) -> bool {
        self.known[later].other.contains(self.begin)
    }
    /// True if `earlier` on every other rank is before the end of the iteration on this one.
    pub fn before_end(&self, earlier: usize) -> bool {
        self.end.contains(earlier)
    }
}

/// The slot of the copies or stores of the exchange that this arrival completes ([`crate::collective::Exchange::completes`]).
fn completes(plan: &Plan, slot: u32) -> Option<usize> {
    let SlotKind::Arrive { exchange } = plan.slots[slot as usize].kind else { return None };
    plan.exchanges[exchange as usize].completes.map(|slot| slot as usize)
}

/// The consequences of all sums of a two-shot allreduce, or of all that was computed from them: the rank's own, and those that arrived
/// (slot `arrival`). Each tile was summed from the partial tiles of all ranks. So on every rank, the tasks that wrote partial tiles are
/// done, and all that was sent in the first half has arrived. No single slot shows this, because the tiles are distributed over the ranks.
fn after_both_halves(
    k: &mut Known,
    plan: &Plan,
    known: &[Known],
    incoming: &[Vec<Incoming>],
    first: usize,
    arrival: usize,
) {
    // The slots that wrote partial tiles, and those whose tasks are each before such a task; the sums.
    let (writers, sums): (Vec<usize>, Option<usize>) = match plan.slots[first].kind {
        // Tiles for peers, their arrival, own tiles. The sums read the receive buffer, and other operators may be in between.
        SlotKind::Store { exchange } => {
            let own = first + 2;
            let before_either = incoming[first].iter().filter(|link| link.partner as usize == own);
            let before_either = before_either.map(|link| link.from as usize);
            let buffer = plan.exchanges[exchange as usize].target;
            let sums = (own + 1..known.len()).find(|&slot| plan.slots[slot].inputs.contains(&buffer));
            (before_either.chain([first, own]).collect(), sums)
        }
        // Copies of what earlier slots wrote, their arrival, sums.
        _ => {
            let source = |slot: &usize| plan.slots[*slot].outputs.contains(&plan.slots[first].inputs[0]);
            ((0..first).filter(source).collect(), Some(first + 2))
        }
    };
    // Also the slot that made the shares, if it is not the sums.
    for of_first in [first, first + 1, arrival - 2].into_iter().chain(sums) {
        k.own.insert(of_first);
        k.other.insert(of_first);
    }
    for writer in writers {
        let before = &known[writer];
        for all in [&mut k.own, &mut k.other] {
            all.insert(writer);
            all.add(&before.own_covered);
            all.add(&before.other_covered);
        }
    }
}

fn follow(k: &mut Known, from: usize, p: &Known, flagged: bool, flags: u8) {
    if flags & ALL != 0 {
        k.own.insert(from);
        k.own.add(&p.own_covered);
        k.other.add(&p.other_covered);
        if flagged {
            k.other.insert(from);
            k.other.add(&p.own_covered);
            k.own.add(&p.other_covered);
        }
    } else if flags & SOME != 0 {
        k.own.add(&p.own);
        k.other.add(&p.other);
        if flagged {
            k.other.add(&p.own);
            k.own.add(&p.other);
        }
    }
    if flags & COVERED != 0 {
        k.own_covered.insert(from);
        k.own_covered.add(&p.own_covered);
        k.other_covered.add(&p.other_covered);
        if flagged {
            k.other_covered.insert(from);
            k.other_covered.add(&p.own_covered);
            k.own_covered.add(&p.other_covered);
        }
    }
}

/// What a slot learns from several slots together that write parts of one tensor. Tasks that each follow one of them know what all of them
/// know. A slot whose tasks are each before a task of this slot, or of another that this slot covers, is covered too.
fn follow_together(k: &mut Known, known: &[Known], incoming: &[Incoming]) {
    let is_joint = |link: &&Incoming| link.flags & JOINT != 0 && !link.flagged;
    for (at, first) in incoming.iter().enumerate().filter(|(_, link)| is_joint(link)) {
        let others = || incoming.iter().filter(is_joint).filter(|other| other.tensor == first.tensor);
        if incoming[..at].iter().filter(is_joint).any(|other| other.tensor == first.tensor) {
            continue;
        }
        let (mut own, mut other) =
            (known[first.from as usize].own.clone(), known[first.from as usize].other.clone());
        for link in others() {
            own.keep(&known[link.from as usize].own);
            other.keep(&known[link.from as usize].other);
        }
        k.own.add(&own);
        k.other.add(&other);
    }
    for link in incoming.iter().filter(|link| link.partner != NONE) {
        if k.own_covered.contains(link.partner as usize) || k.own.contains(link.partner as usize) {
            let before = &known[link.from as usize];
            k.own_covered.insert(link.from as usize);
            k.own_covered.add(&before.own_covered);
            k.other_covered.add(&before.other_covered);
        }
    }
}

/// What an arrival learns from the peers' sends `c`. If a peer's send follows something on all ranks other than its own, that
/// includes this rank and, with three ranks or more, every other rank.
fn arrive(k: &mut Known, c: &Known, table: &Table, world: u32) {
    if !table.from_all {
        return; // an event may know nothing about some peer
    }
    k.other.add(&c.own);
    k.own.add(&c.other);
    if world >= 3 {
        k.other.add(&c.other);
    }
    if !table.to_all {
        return; // a peer copies only some of its tiles to this rank
    }
    k.other_covered.add(&c.own_covered);
    k.own_covered.add(&c.other_covered);
    if table.one_event {
        k.other.add(&c.own_covered);
        k.own.add(&c.other_covered);
    }
}

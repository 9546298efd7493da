//! Graphs that follow each other: where the summaries of their accesses do not show an order, the accesses are looked at one by
//! one, and that decides.

use crate::expect;
use crate::verify_support::kept::kept;
use crate::verify_support::*;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{Place, Space, TaskGraph};
use taskgraph::verify::{Proven, ViolationKind, may_follow, verify_every_rank, verify_succession};
use taskgraph::{DType, EventId, Region};

/// True if the summaries alone show that the graphs may follow each other. Each of them must be safe by itself.
fn summaries_suffice(classes: &[Vec<TaskGraph>]) -> bool {
    let proven = classes.iter().map(|graphs| match Proven::new(kept(graphs), drop) {
        Ok(proven) => proven,
        Err(found) => panic!("'{}' is refused alone: {}", graphs[0].name, found[0]),
    });
    may_follow(&proven.collect::<Vec<_>>())
}

/// `kept` in rank 0's memory: one slot for each rank.
fn add_kept(b: &mut RankBuilder) -> (u32, [Region; 2]) {
    let kept = Role::Persistent { region_dims: None };
    let kept = b.tensor("kept", DType::F32, &[2, 2, 4], Space::Symmetric, kept);
    (kept, [0, 1].map(|slot| Region::whole(&[2, 2, 4]).with(0, slot, slot + 1)))
}

/// Events of rank 1: rank 0 has begun the graph or read a slot, and it has what was sent into the other slot.
const TOLD: u32 = 3;
const DONE: u32 = 4;
/// Events of rank 0: what was sent into each slot is there.
const ARRIVED: [u32; 2] = [3, 4];

/// Rank 0 reads both slots of `kept`. Rank 1 knows only of the read of slot 0.
fn reads() -> Vec<TaskGraph> {
    let mut graphs: Vec<TaskGraph> = (0..2)
        .map(|rank| {
            let mut b = RankBuilder::new(rank, 2, 1);
            b.graph.name = "reads".into();
            let (kept, slots) = add_kept(&mut b);
            let mut waits = 1;
            if rank == 0 {
                let read = b.event(false);
                let slot = slots.map(|slot| b.at(kept, slot, Place::Own));
                b.task(0, LINEAR, "read0", &slot[..1], &[], &[1], Some(EventId::local(0, read)));
                b.task(0, SIGNAL, "tell", &[], &[], &[read], Some(EventId::nvshmem(1, TOLD)));
                b.task(0, LINEAR, "read1", &slot[1..], &[], &[1], None);
            } else {
                waits = b.event(true);
                assert_eq!(waits, TOLD);
            }
            b.task(0, LINEAR, "last", &[], &[], &[waits], Some(EventId::local(rank as u16, 2)));
            b.graph
        })
        .collect();
    count_triggers(&mut graphs);
    graphs
}

/// Rank 1 sends into both slots of `kept`: into `first` at once, into the other one when rank 0 has begun the graph.
fn sends(first: usize) -> Vec<TaskGraph> {
    let mut graphs: Vec<TaskGraph> = (0..2)
        .map(|rank| {
            let mut b = RankBuilder::new(rank, 2, 2);
            b.graph.name = format!("sends {first} first");
            let (kept, slots) = add_kept(&mut b);
            let weight = Role::Weight { parts: Vec::new() };
            let weight = b.tensor("w", DType::F32, &[2, 4], Space::Device, weight);
            let weight = b.all(weight);
            let events = [b.event(true), b.event(true)];
            assert_eq!((events, events), (ARRIVED, [TOLD, DONE]));
            if rank == 0 {
                b.task(0, SIGNAL, "tell", &[], &[], &[1], Some(EventId::nvshmem(1, TOLD)));
                b.task(0, SIGNAL, "done", &[], &[], &[ARRIVED[first]], Some(EventId::nvshmem(1, DONE)));
                let after = [ARRIVED[1 - first]];
                b.task(0, LINEAR, "last", &[], &[], &after, Some(EventId::local(0, 2)));
            } else {
                for slot in [first, 1 - first] {
                    let target = b.inner(kept, slots[slot], Place::Peer(0));
                    let after = if slot == first { 1 } else { TOLD };
                    let arrived = Some(EventId::nvshmem(0, ARRIVED[slot]));
                    b.task(0, COPY, &format!("send{slot}"), &[weight], &[target], &[after], arrived);
                }
                b.task(0, LINEAR, "last", &[], &[], &[DONE], Some(EventId::local(1, 2)));
            }
            b.graph
        })
        .collect();
    count_triggers(&mut graphs);
    graphs
}

/// In the summaries, both slots count together: rank 0's end comes after both reads, rank 1's does not; rank 1's begin comes before
/// both sends, rank 0's does not. So the summaries show no order, whichever slot rank 1 sends into first. Slot by slot, there
/// is one if that is the slot of whose read rank 1 knows.
#[test]
fn accesses_decide_what_summaries_do_not_show() {
    for (first, ordered) in [(0, true), (1, false)] {
        let classes = [reads(), sends(first)];
        assert!(!summaries_suffice(&classes), "the summaries show it, so nothing is looked at");
        let found = verify_succession(&classes).map(drop);
        assert_eq!(found, verify_every_rank(&classes).map(drop));
        if ordered {
            assert_eq!(found, Ok(()));
            continue;
        }
        let found = found.expect_err("accepted, though nothing orders the read and the send");
        let (read, send) = (find(&classes[0][0], "read1", 0), find(&classes[1][1], "send1", 0));
        let words = ["('send1')", "('read1')", "'kept' in rank 0's memory"];
        expect(&found, ViolationKind::UnorderedAcrossEpochs, &[(0, read), (1, send)], &words);
        assert_eq!(found.len(), 1, "only one pair is not ordered");
    }
}

/// What a graph does with `kept` in rank 0's memory, before two sums of flagged words. Only the sums tell rank 1 that rank 0 is
/// done with it.
#[derive(Clone, Copy, Debug)]
enum Use {
    /// Rank 1 sends into it at once, then rank 0 reads it.
    Exchanges,
    /// Rank 0 tells rank 1 that it has begun, for which rank 1's first summand waits. Then rank 0 writes it. `released`: with an
    /// event that its first summand waits for.
    Writes { released: bool },
}

fn used(of: Use, name: &str) -> Vec<TaskGraph> {
    let mut graphs: Vec<TaskGraph> = chain(2, 1, 1, 2, Lowering::Flagged)
        .into_iter()
        .map(|graph| {
            let mut b = RankBuilder { graph };
            b.graph.name = name.into();
            let rank = b.graph.rank;
            let (kept, slots) = add_kept(&mut b);
            let slot = b.at(kept, slots[1], Place::Own);
            let weight = Role::Weight { parts: Vec::new() };
            let weight = b.tensor("sent", DType::F32, &[2, 4], Space::Device, weight);
            let weight = b.all(weight);
            let push = find(&b.graph, "l0.linear", 0) as usize;
            match of {
                Use::Exchanges if rank == 1 => {
                    let target = b.inner(kept, slots[1], Place::Peer(0));
                    let arrived = Some(EventId::nvshmem(0, b.graph.events.len() as u32));
                    b.task(0, COPY, "send", &[weight], &[target], &[1], arrived);
                }
                Use::Exchanges => {
                    let arrived = b.event(true);
                    b.task(0, LINEAR, "read", &[slot], &[], &[arrived], None);
                }
                Use::Writes { .. } if rank == 1 => {
                    let told = b.event(true);
                    b.graph.tasks[push].dependencies.push(told);
                    return b.graph;
                }
                Use::Writes { released } => {
                    let told = Some(EventId::nvshmem(1, b.graph.events.len() as u32));
                    let mut written = None;
                    if released {
                        let event = b.event(false);
                        b.graph.tasks[push].dependencies.push(event);
                        written = Some(EventId::local(0, event));
                    }
                    b.task(0, LINEAR, "write", &[weight], &[slot], &[1], written);
                    b.graph.worker_lists[0].rotate_right(1);
                    b.task(0, SIGNAL, "tell", &[], &[], &[1], told);
                }
            }
            // It comes first.
            b.graph.worker_lists[0].rotate_right(1);
            b.graph
        })
        .collect();
    count_triggers(&mut graphs);
    graphs
}

/// Rank 0's read comes before rank 1's next send in the weak order only, which is enough. So does its write if an event
/// releases it.
#[test]
fn the_weak_order_is_enough_before_a_remote_write_if_writes_are_released() {
    for (of, ordered) in [
        (Use::Exchanges, true),
        (Use::Writes { released: true }, true),
        (Use::Writes { released: false }, false),
    ] {
        let classes = [used(of, "first"), used(Use::Exchanges, "second")];
        assert_eq!(summaries_suffice(&classes), ordered, "{of:?}");
        let found = verify_succession(&classes).map(drop);
        assert_eq!(found, verify_every_rank(&classes).map(drop), "{of:?}");
        if ordered {
            assert_eq!(found, Ok(()), "{of:?}");
            continue;
        }
        let found = found.expect_err("accepted, though the write may still be hidden");
        let words = ["('write') of rank 0", "('send') of rank 1", "'kept' in rank 0's memory"];
        expect(&found, ViolationKind::UnorderedAcrossEpochs, &[], &words);
        assert_eq!(found.len(), 1, "only one pair is not ordered");
    }
}

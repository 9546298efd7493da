//! Graphs that follow each other: accesses of two ranks to one persistent tensor, of which exactly one pair is not ordered.

use crate::expect;
use crate::verify_support::*;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{Place, Space, TaskGraph};
use taskgraph::verify::{ViolationKind, verify, verify_every_rank, verify_succession};
use taskgraph::{DType, EventId, Region};

/// What a graph does with `kept` in rank 0's memory.
#[derive(Clone, Copy, Debug)]
enum Use {
    /// Rank 0 reads it.
    Reads,
    /// Rank 0 writes it.
    Writes,
    /// Rank 1 sends into it. `starts`: only after rank 0 has begun the graph. `arrives`: before rank 0 ends the graph.
    Sends { starts: bool, arrives: bool },
}

/// An event of rank 1: rank 0 has begun the graph, or has what was sent.
const TOLD: u32 = 3;
/// An event of rank 0: what rank 1 has sent is there.
const ARRIVED: u32 = 3;

/// A graph of two ranks that use `kept` in this way.
fn graphs(of: Use) -> Vec<TaskGraph> {
    let mut graphs: Vec<TaskGraph> = (0..2).map(|rank| graph(of, rank)).collect();
    count_triggers(&mut graphs);
    graphs
}

fn graph(of: Use, rank: u32) -> TaskGraph {
    let mut b = RankBuilder::new(rank, 2, 1);
    b.graph.name = format!("{of:?}");
    let kept = Role::Persistent { region_dims: None };
    let kept = b.tensor("kept", DType::F32, &[2, 2, 4], Space::Symmetric, kept);
    let slot = Region::whole(&[2, 2, 4]).with(0, 1, 2);
    let weight = b.tensor("w", DType::F32, &[2, 4], Space::Device, Role::Weight { parts: Vec::new() });
    let weight = b.all(weight);
    let mut waits = 1;
    match of {
        Use::Sends { starts, .. } if rank == 1 => {
            assert_eq!(b.event(true), TOLD);
            let target = b.inner(kept, slot, Place::Peer(0));
            let after = if starts { TOLD } else { 1 };
            b.task(0, COPY, "send", &[weight], &[target], &[after], Some(EventId::nvshmem(0, ARRIVED)));
            waits = TOLD;
        }
        Use::Sends { starts, arrives } => {
            assert_eq!(b.event(true), ARRIVED);
            let after = if starts { 1 } else { ARRIVED };
            let tell = b.task(0, SIGNAL, "tell", &[], &[], &[after], Some(EventId::nvshmem(1, TOLD)));
            if arrives {
                waits = ARRIVED;
            } else {
                // It arrives before rank 1 sends again.
                b.graph.tasks[tell as usize].carried.push((ARRIVED, 1));
            }
        }
        Use::Reads if rank == 0 => {
            let read = b.at(kept, slot, Place::Own);
            b.task(0, LINEAR, "read", &[read], &[], &[1], None);
        }
        Use::Writes if rank == 0 => {
            let written = b.at(kept, slot, Place::Own);
            b.task(0, LINEAR, "write", &[weight], &[written], &[1], None);
        }
        _ => {}
    }
    b.task(0, LINEAR, "last", &[weight], &[], &[waits], Some(EventId::local(rank as u16, 2)));
    b.graph
}

#[test]
fn each_pair_of_accesses_in_graphs_that_follow_each_other_is_ordered() {
    let sends = |starts, arrives| Use::Sends { starts, arrives };
    for (of, other, unordered) in [
        (sends(true, true), Use::Reads, None),
        (sends(true, true), Use::Writes, None),
        // No event shows that the sent data has arrived.
        (sends(true, false), Use::Reads, Some(["('read')", "('send')"])),
        (sends(true, false), Use::Writes, Some(["('write')", "('send')"])),
        // Rank 1 may be in the next graph while rank 0 is still in this one.
        (sends(false, true), Use::Reads, Some(["('send')", "('read')"])),
        (sends(false, true), Use::Writes, Some(["('send')", "('write')"])),
    ] {
        let classes = [graphs(of), graphs(other)];
        for class in &classes {
            if let Err(found) = verify(class) {
                panic!("{of:?} and {other:?}: refused alone: {}", found[0]);
            }
        }
        let found = verify_succession(&classes).map(drop);
        assert_eq!(found, verify_every_rank(&classes).map(drop), "{of:?} and {other:?}");
        let Some([later, earlier]) = unordered else {
            assert_eq!(found, Ok(()), "{of:?} and {other:?}");
            continue;
        };
        let found = found.expect_err("accepted, though nothing orders them");
        expect(&found, ViolationKind::UnorderedAcrossEpochs, &[], &[later, earlier, "'kept'"]);
        assert_eq!(found.len(), 1, "only one pair is not ordered");
    }
}

//! Correct graphs pass. If they are broken in one place, they are refused, and the error names the tasks
//! concerned.

mod bytes;
mod placement;
mod succession;
mod summaries;
#[path = "../verify_support/mod.rs"]
mod verify_support;

use taskgraph::op_graph::Role;
use taskgraph::task_graph::{EventType, Place, Space, TaskGraph};
use taskgraph::verify::{Violation, ViolationKind, verify, verify_succession};
use taskgraph::{Backend, DType, EventId};
use verify_support::*;

/// Verifies a correct graph after `break_it` has changed it; returns the violations.
fn broken(
    world: u32,
    layers: u32,
    lowering: Lowering,
    break_it: impl FnOnce(&mut Vec<TaskGraph>),
) -> Vec<Violation> {
    let mut graphs = chain(world, 2, 2, layers, lowering);
    if let Err(found) = verify(&graphs) {
        panic!("refused before it was broken: {}", found[0]);
    }
    break_it(&mut graphs);
    verify(&graphs).expect_err("accepted though broken")
}

/// Expects a violation of this kind that names these tasks and contains all of these words.
#[track_caller]
fn expect(found: &[Violation], kind: ViolationKind, tasks: &[(u32, u32)], words: &[&str]) {
    let fits = |v: &Violation| {
        v.kind == kind
            && tasks.iter().all(|t| v.tasks.contains(t))
            && words.iter().all(|w| v.message.contains(w))
    };
    let all: Vec<String> = found.iter().map(|v| format!("{:?} {:?}: {v}", v.kind, v.tasks)).collect();
    assert!(found.iter().any(fits), "no {kind:?} {tasks:?} {words:?} in:\n{}", all.join("\n"));
}

#[test]
fn correct_graphs_pass() {
    for lowering in [Lowering::Copy, Lowering::Flagged] {
        for world in [2, 3, 4] {
            for layers in [2, 3] {
                let graphs = chain(world, 3, 4, layers, lowering);
                match verify(&graphs) {
                    Ok(report) => {
                        assert_eq!(report.tasks, graphs.iter().map(|g| g.tasks.len()).sum::<usize>());
                    }
                    Err(found) => panic!("{lowering:?} {world} ranks {layers} layers: {}", found[0]),
                }
                let other = graphs.clone();
                assert!(verify_succession(&[graphs, other]).is_ok());
            }
        }
    }
    assert!(verify(&chain(9, 1, 1, 2, Lowering::Flagged)).is_ok(), "more ranks than one block of clocks");
    assert!(verify(&chain(9, 1, 1, 2, Lowering::Copy)).is_ok());
}

#[test]
fn a_dropped_dependency_is_an_unordered_pair() {
    let found = broken(2, 2, Lowering::Copy, |g| {
        let reduce = find(&g[1], "l1.reduce", 0) as usize;
        g[1].tasks[reduce].dependencies.remove(1);
    });
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let (copy, reduce) = (find(&graphs[0], "l1.copy", 0), find(&graphs[1], "l1.reduce", 0));
    expect(
        &found,
        ViolationKind::Unordered,
        &[(0, copy), (1, reduce)],
        &["'l1.copy') of rank 0", "'l1.receive' [0..1, 0..2, 0..4] in rank 1's memory", "nothing orders"],
    );
}

#[test]
fn a_dependency_on_the_wrong_tile_is_an_unordered_pair() {
    let found = broken(2, 2, Lowering::Copy, |g| {
        let (a, b) = (find(&g[0], "l0.reduce", 0), find(&g[0], "l0.reduce", 1));
        g[0].tasks[a as usize].dependencies = g[0].tasks[b as usize].dependencies.clone();
    });
    expect(&found, ViolationKind::Unordered, &[], &["'l0.receive' [1..2, 0..2, 0..4] in rank 0's memory"]);
}

#[test]
fn wrong_trigger_counts() {
    let found = broken(2, 2, Lowering::Copy, |g| {
        let event = g[0].tasks[find(&g[0], "l0.linear", 0) as usize].trigger.unwrap();
        g[0].events[event.index() as usize].num_triggers += 1;
    });
    expect(&found, ViolationKind::Triggers, &[], &["waits for 2 triggers", "but gets 1 ", "'l0.linear'"]);

    let found = broken(3, 2, Lowering::Copy, |g| {
        let copy = find(&g[2], "l0.copy", 0) as usize;
        let other = g[2].tasks[copy + 1].trigger.unwrap();
        let wrong = EventId::nvshmem(g[2].tasks[copy].trigger.unwrap().owner(), other.index() + 2);
        g[2].tasks[copy].trigger = Some(wrong);
    });
    expect(&found, ViolationKind::Triggers, &[], &["waits for 2 triggers", "but gets 1 "]);
    expect(&found, ViolationKind::Triggers, &[], &["waits for 2 triggers", "but gets 3 ", "'l0.copy'"]);

    let found = broken(2, 2, Lowering::Copy, |g| {
        let event = g[0].tasks[find(&g[0], "l0.linear", 0) as usize].trigger.unwrap();
        g[0].events[event.index() as usize].remote = true;
    });
    expect(&found, ViolationKind::Triggers, &[], &["other ranks trigger it"]);
}

#[test]
fn worker_order_against_the_events_is_a_cycle() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let (linear, copy) = (find(&graphs[0], "l0.linear", 0), find(&graphs[0], "l0.copy", 0));
    let found = broken(2, 2, Lowering::Copy, |g| {
        assert_eq!(g[0].worker_lists[0][..2], [linear, copy]);
        g[0].worker_lists[0].swap(0, 1);
    });
    expect(
        &found,
        ViolationKind::Cycle,
        &[(0, linear), (0, copy)],
        &["wait for each other", "'l0.copy') of rank 0"],
    );
}

#[test]
fn a_task_waits_for_as_many_events_as_its_description_can_count() {
    let copy = find(&chain(2, 2, 2, 2, Lowering::Copy)[0], "l0.copy", 0);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let dependencies = &mut g[0].tasks[copy as usize].dependencies;
        let event = dependencies[0];
        dependencies.resize(1 << 16, event);
    });
    expect(&found, ViolationKind::Structure, &[(0, copy)], &["depends on more than 65535 events"]);
}

#[test]
fn worker_order_against_flagged_words_of_another_rank_is_a_cycle() {
    let found = broken(2, 2, Lowering::Flagged, |g| {
        for graph in g.iter_mut() {
            for list in &mut graph.worker_lists {
                // Each rank polls before it pushes.
                list.swap(0, 1);
            }
        }
    });
    expect(&found, ViolationKind::Cycle, &[], &["'l0.reduce') of rank 0", "'l0.linear')"]);
}

#[test]
fn one_allreduce_alone_needs_a_buffer_free_edge() {
    let graphs = chain(2, 2, 2, 1, Lowering::Copy);
    let found = verify(&graphs).expect_err("the next copy may overwrite what a slow peer has not read");
    let (copy, reduce) = (find(&graphs[0], "l0.copy", 0), find(&graphs[1], "l0.reduce", 0));
    expect(
        &found,
        ViolationKind::UnorderedAcrossEpochs,
        &[(0, copy), (1, reduce)],
        &["may run in the next iteration before", "'l0.receive'", "rank 1's memory"],
    );

    let mut freed = buffer_free_chain();
    if let Err(found) = verify(&freed) {
        panic!("{}", found[0]);
    }
    let (copy, linear) = (find(&freed[0], "l0.copy", 0), find(&freed[0], "l0.linear", 0));
    freed[0].tasks[linear as usize].carried.clear();
    let found = verify(&freed).expect_err("the copy no longer waits");
    expect(&found, ViolationKind::UnorderedAcrossEpochs, &[(0, copy), (1, reduce)], &["carried event"]);

    let mut late = buffer_free_chain();
    late[0].tasks[linear as usize].carried[0].1 = 2;
    assert!(verify(&late).is_err(), "waiting for two epochs back is not enough");
}

/// One allreduce of two ranks and one worker each, which waits for the peer's "buffer free" of the previous epoch.
fn buffer_free_chain() -> Vec<TaskGraph> {
    let mut graphs = chain(2, 1, 2, 1, Lowering::Copy);
    for graph in &mut graphs {
        let mut event = graph.events[2];
        (event.event_type, event.remote) = (EventType::Empty, true);
        graph.events.push(event);
    }
    let free = graphs[0].events.len() as u32 - 1;
    for (rank, graph) in graphs.iter_mut().enumerate() {
        let y_event = graph.tasks[find(graph, "l0.reduce", 0) as usize].trigger.unwrap().index();
        let last = find(graph, "last", 0);
        let mut signal = graph.tasks[last as usize].clone();
        signal.task_type = SIGNAL;
        signal.variant = SIGNAL;
        (signal.num_inputs, signal.num_outputs) = (0, 0);
        signal.dependencies = smallvec::smallvec![y_event];
        signal.trigger = Some(EventId::nvshmem(1 - rank as u16, free));
        graph.tasks.push(signal);
        let index = graph.tasks.len() as u32 - 1;
        let at = graph.worker_lists[0].len() - 1;
        graph.worker_lists[0].insert(at, index);
        // First in the list: what it writes is the source of a put, and all copies come after it.
        let linear = find(graph, "l0.linear", 0);
        graph.tasks[linear as usize].carried.push((free, 1));
    }
    count_triggers(&mut graphs);
    graphs
}

#[test]
fn one_allreduce_of_three_ranks_may_count_triggers_of_the_next_epoch() {
    // There are only arrivals: rank 1 may send its second summand before rank 2 has sent its first.
    let found = verify(&chain(3, 2, 1, 1, Lowering::Copy)).unwrap_err();
    expect(
        &found,
        ViolationKind::CounterAcrossEpochs,
        &[],
        &["whose counter would then be complete without the former"],
    );
    assert!(verify(&chain(3, 2, 1, 2, Lowering::Copy)).is_ok());
}

#[test]
fn two_writers() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let (a, b) = (find(&graphs[0], "l0.linear", 0), find(&graphs[0], "l0.linear", 1));
    let found = broken(2, 2, Lowering::Copy, |g| {
        let graph = &mut g[0];
        let from = graph.tasks[a as usize].first_operand + 2;
        let to = graph.tasks[b as usize].first_operand + 2;
        graph.operands[to as usize] = graph.operands[from as usize];
    });
    expect(&found, ViolationKind::Unordered, &[(0, a), (0, b)], &["writes 'l0.partial' [0..2, 0..4]"]);
    expect(&found, ViolationKind::Unwritten, &[], &["'l0.partial' [0..2, 4..8]"]);

    let found = broken(2, 2, Lowering::Flagged, |g| {
        let graph = &mut g[0];
        let from = graph.tasks[a as usize].first_operand + 2;
        let to = graph.tasks[find(graph, "l0.linear", 1) as usize].first_operand + 2;
        graph.operands[to as usize] = graph.operands[from as usize];
    });
    expect(&found, ViolationKind::FlaggedCoverage, &[], &["exactly one writer"]);
    expect(&found, ViolationKind::FlaggedCoverage, &[], &["which no task writes"]);
}

#[test]
fn out_of_range() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let reduce = find(&graphs[0], "l1.reduce", 1);
    let operand = |g: &TaskGraph| g.tasks[reduce as usize].first_operand as usize;
    let found = broken(2, 2, Lowering::Copy, |g| {
        let at = operand(&g[0]);
        g[0].operands[at].region.hi[1] += 1;
    });
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["input 0 of 'l0.y' accesses", "outside"]);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let at = operand(&g[0]);
        g[0].operands[at].offset += 4;
    });
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["ends at byte"]);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let at = operand(&g[0]);
        g[0].operands[at].offset -= 4;
    });
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["leaves its region"]);
    // It may not leave its region even within what its operator writes as a whole.
    let first = find(&graphs[0], "l1.reduce", 0);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let task = &g[0].tasks[first as usize];
        let output = task.first_operand as usize + usize::from(task.num_inputs);
        g[0].operands[output].dims[1] += 1;
    });
    expect(&found, ViolationKind::Structure, &[(0, first)], &["output 0", "leaves its region"]);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let at = operand(&g[0]);
        g[0].operands[at].tensor = 99;
    });
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["does not exist"]);
    let found = broken(2, 2, Lowering::Copy, |g| g[0].tasks[reduce as usize].first_operand = u32::MAX);
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["operands that do not exist"]);
    let found = broken(2, 2, Lowering::Copy, |g| g[0].tasks[reduce as usize].dependencies[0] = 1000);
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["event that does not exist"]);
    let found = broken(2, 2, Lowering::Copy, |g| g[0].tasks[reduce as usize].variant = 1000);
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["variant 1000"]);
    let found = broken(2, 2, Lowering::Copy, |g| g[0].events.truncate(2));
    expect(&found, ViolationKind::Structure, &[], &["event 2"]);
    let found = broken(2, 2, Lowering::Copy, |g| {
        g[0].tasks.clear();
    });
    expect(&found, ViolationKind::Structure, &[], &["task 0 must be terminate"]);
}

#[test]
fn only_weights_are_packed_in_tiles() {
    let found = broken(2, 2, Lowering::Copy, |g| {
        g[0].tensors.iter_mut().filter(|t| t.name == "l0.y").for_each(|t| t.tiled = true);
    });
    expect(&found, ViolationKind::Structure, &[], &["'l0.y' is packed in tiles, but is not a weight"]);
}

#[test]
fn only_packed_matrices_of_whole_pairs_have_paired_rows() {
    let paired = |backend, rows| {
        broken(2, 2, Lowering::Copy, move |g| {
            for graph in g.iter_mut() {
                graph.backend = backend;
                for t in graph.tensors.iter_mut().filter(|t| t.name == "w") {
                    (t.tiled, t.paired, t.dims[0]) = (true, true, rows);
                }
            }
        })
    };
    let text = "has paired rows, but is not a packed matrix of whole pairs";
    expect(&paired(Backend::Cpu, 32), ViolationKind::Structure, &[], &["'w'", text]);
    expect(&paired(Backend::Cuda, 40), ViolationKind::Structure, &[], &["'w'", text]);
}

#[test]
fn a_task_writes_on_the_rank_whose_event_it_triggers() {
    let graphs = chain(3, 2, 2, 2, Lowering::Copy);
    let copy = find(&graphs[0], "l0.copy", 0);
    let linear = find(&graphs[0], "l0.linear", 0);
    let at =
        |g: &TaskGraph, task: u32, operand: u32| (g.tasks[task as usize].first_operand + operand) as usize;
    let found = broken(3, 2, Lowering::Copy, |g| {
        let output = at(&g[0], copy, 1);
        g[0].operands[output].place = Place::Peer(2);
    });
    expect(&found, ViolationKind::Structure, &[(0, copy)], &["not the owner of the event"]);
    let found = broken(3, 2, Lowering::Copy, |g| {
        let output = at(&g[0], copy, 1);
        g[0].operands[output].place = Place::Own;
    });
    expect(&found, ViolationKind::Structure, &[(0, copy)], &["trigger's owner is a peer"]);
    let found = broken(3, 2, Lowering::Copy, |g| {
        let event = g[0].tasks[copy as usize].trigger.unwrap();
        g[0].tasks[copy as usize].trigger = Some(EventId::local(event.owner(), event.index()));
    });
    expect(&found, ViolationKind::Structure, &[(0, copy)], &["without the NVSHMEM tag"]);
    let found =
        broken(3, 2, Lowering::Copy, |g| g[0].tasks[linear as usize].trigger = Some(EventId::nvshmem(1, 3)));
    expect(&found, ViolationKind::Structure, &[(0, linear)], &["not all of its outputs are on that rank"]);
    // Its output on a rank that its event does not tell, or one of two.
    let symmetric = |g: &mut [TaskGraph], first: Place, event: EventId| {
        let output = at(&g[0], linear, u32::from(g[0].tasks[linear as usize].num_inputs));
        let tensor = g[0].operands[output].tensor as usize;
        g.iter_mut().for_each(|graph| graph.tensors[tensor].space = Space::Symmetric);
        g[0].operands[output].place = first;
        g[0].tasks[linear as usize].trigger = Some(event);
    };
    let found = broken(3, 2, Lowering::Copy, |g| symmetric(g, Place::Peer(2), EventId::nvshmem(1, 3)));
    expect(
        &found,
        ViolationKind::Structure,
        &[(0, linear)],
        &["event 3 of rank 1", "not all of its outputs are on that rank"],
    );
    let pushes = chain(3, 2, 2, 2, Lowering::Flagged);
    let pushing = find(&pushes[0], "l0.linear", 0);
    let found = broken(3, 2, Lowering::Flagged, |g| {
        let output = at(&g[0], pushing, u32::from(g[0].tasks[pushing as usize].num_inputs));
        g[0].operands[output].place = Place::Peer(1);
        g[0].tasks[pushing as usize].trigger = Some(EventId::nvshmem(1, 3));
    });
    expect(&found, ViolationKind::Structure, &[(0, pushing)], &["flagged words go to every rank"]);
    let found = broken(3, 2, Lowering::Copy, |g| symmetric(g, Place::Peer(2), EventId::local(0, 2)));
    expect(&found, ViolationKind::Structure, &[(0, linear)], &["not the owner of the event"]);
    let found =
        broken(3, 2, Lowering::Copy, |g| g[0].tasks[linear as usize].trigger = Some(EventId::nvshmem(9, 3)));
    expect(&found, ViolationKind::Structure, &[(0, linear)], &["rank 9"]);
    let found = broken(3, 2, Lowering::Copy, |g| {
        let input = at(&g[0], linear, 0);
        g[0].operands[input].place = Place::Peer(1);
    });
    expect(&found, ViolationKind::Structure, &[(0, linear)], &["no task may load from a peer"]);
    let found = broken(3, 2, Lowering::Copy, |g| {
        let receive = g[0].tensors.iter().position(|t| t.name == "l0.receive").unwrap();
        g[0].tensors[receive].space = Space::Device;
    });
    expect(&found, ViolationKind::Structure, &[(0, copy)], &["not symmetric"]);
    let found = broken(3, 2, Lowering::Copy, |g| {
        let receive = g[1].tensors.iter().position(|t| t.name == "l0.receive").unwrap();
        g[1].tensors[receive].bytes += 256;
    });
    expect(&found, ViolationKind::Structure, &[], &["offsets of symmetric memory must agree", "rank 1"]);
}

#[test]
fn writing_a_constant() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let linear = find(&graphs[0], "l0.linear", 0);
    let found = broken(2, 2, Lowering::Copy, |g| {
        g[0].tasks[linear as usize].num_inputs -= 1;
        g[0].tasks[linear as usize].num_outputs += 1;
    });
    expect(&found, ViolationKind::WritesConstant, &[(0, linear)], &["writes 'w', which is constant"]);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let task = &mut g[0].tasks[linear as usize];
        (task.num_inputs, task.num_outputs) = (task.num_inputs - 1, task.num_outputs + 1);
        let first = task.first_operand as usize;
        g[0].operands.swap(first, first + 1);
    });
    expect(&found, ViolationKind::WritesConstant, &[(0, linear)], &["writes 'x', which is an input"]);
}

#[test]
fn a_task_that_does_nothing_has_no_operands() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let linear = find(&graphs[0], "l0.linear", 0);
    for task_type in [EMPTY, SIGNAL] {
        let found = broken(2, 2, Lowering::Copy, |g| {
            let task = &mut g[0].tasks[linear as usize];
            (task.task_type, task.variant) = (task_type, task_type);
        });
        expect(&found, ViolationKind::Structure, &[(0, linear)], &["reads and writes nothing"]);
    }
}

#[test]
fn reading_unwritten_memory() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let reduce = find(&graphs[1], "l0.reduce", 0);
    let found = broken(2, 2, Lowering::Copy, |g| {
        // Reads its own slot of the receive tensor, which no rank sends.
        let at = g[1].tasks[reduce as usize].first_operand as usize + 2;
        let operand = &mut g[1].operands[at];
        (operand.offset, operand.dims[0]) = (0, 2);
        (operand.region.lo[0], operand.region.hi[0]) = (0, 2);
    });
    expect(
        &found,
        ViolationKind::Unwritten,
        &[(1, reduce)],
        &["'l0.receive' [1..2, 0..2, 0..4]", "no task writes"],
    );
}

#[test]
fn work_left_at_the_end() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let found = broken(2, 2, Lowering::Copy, |g| {
        // The last task no longer waits for the reduces: the end may come first.
        let last = find(&g[0], "last", 0);
        let graph = &mut g[0];
        graph.tasks[last as usize].dependencies = smallvec::smallvec![1];
        graph.tasks[last as usize].num_inputs = 0;
        graph.worker_lists[0].retain(|&t| t != last);
        graph.worker_lists[1].insert(0, last);
        graph.tasks[last as usize].worker = Some(1);
    });
    let reduce = find(&graphs[0], "l1.reduce", 0);
    expect(
        &found,
        ViolationKind::Residual,
        &[(0, reduce)],
        &["may still run when the iteration of rank 0 has ended"],
    );
}

#[test]
fn tasks_without_a_start() {
    let found = broken(2, 2, Lowering::Copy, |g| {
        let first = g[0].worker_lists[0][0];
        g[0].tasks[first as usize].dependencies.clear();
    });
    expect(&found, ViolationKind::Unreachable, &[], &["waits for nothing"]);
}

#[test]
fn graphs_that_follow_each_other_agree_on_shared_tensors() {
    let persistent = |rows: u32| {
        let mut graphs = chain(2, 2, 2, 2, Lowering::Copy);
        for graph in &mut graphs {
            let mut b = RankBuilder { graph: graph.clone() };
            b.tensor("kv", DType::F32, &[rows, 4], Space::Device, Role::Persistent { region_dims: None });
            *graph = b.graph;
        }
        graphs
    };
    assert!(verify_succession(&[persistent(2), persistent(2)]).is_ok());
    let found = verify_succession(&[persistent(2), persistent(3)]).unwrap_err();
    expect(&found, ViolationKind::Shared, &[], &["'kv'", "persists across graphs"]);
    // One graph writes what the other loads before its tasks may start, because it is constant there.
    let mut writes = chain(2, 2, 2, 2, Lowering::Copy);
    let weights = writes.iter_mut().flat_map(|g| &mut g.tensors).filter(|t| t.name == "w");
    weights.for_each(|t| t.role = Role::Persistent { region_dims: None });
    let found = verify_succession(&[chain(2, 2, 2, 2, Lowering::Copy), writes]).unwrap_err();
    expect(&found, ViolationKind::Shared, &[], &["'w'", "a weight", "persistent"]);
    let found = verify_succession(&[persistent(2), chain(3, 2, 2, 2, Lowering::Copy)]).unwrap_err();
    expect(&found, ViolationKind::Shared, &[], &["2 ranks"]);
}

#[test]
fn a_graph_may_not_write_what_the_graph_before_it_still_reads_elsewhere() {
    // Graph A: rank 1 sends into rank 0's persistent tensor, and rank 0 reads it. Graph B does the same. Each
    // alone is safe because of an event that frees the buffer, but carried events belong to one graph only.
    let shared = || {
        let mut graphs = buffer_free_chain();
        for graph in &mut graphs {
            let receive = graph.tensors.iter().position(|t| t.name == "l0.receive").unwrap();
            graph.tensors[receive].role = Role::Persistent { region_dims: None };
        }
        graphs
    };
    assert!(verify(&shared()).is_ok());
    let mut second = shared();
    second.iter_mut().for_each(|g| g.name = "second".into());
    let found = verify_succession(&[shared(), second]).unwrap_err();
    expect(&found, ViolationKind::UnorderedAcrossEpochs, &[], &["'l0.receive'", "'second'", "'hand-built'"]);
}

#[test]
fn statistics() {
    // 3 ranks, 2 tiles, 2 layers.
    let graphs = chain(3, 2, 2, 2, Lowering::Copy);
    let stats = taskgraph::stats::stats(&graphs);
    assert_eq!(stats.tasks_by_type["sum"], 3 * 2 * 2);
    assert_eq!(stats.tasks_by_type["nvshmem_copy"], 3 * 2 * 2 * 2);
    assert_eq!(stats.tasks_by_type["linear"], 3 * (2 * 2 + 1));
    assert_eq!(stats.tasks_by_type.values().sum::<usize>(), stats.tasks);
    assert_eq!(stats.events_by_type.values().sum::<usize>(), stats.events);
    assert_eq!(stats.events_by_type["end_of_task_graph"], 3);
    assert_eq!(stats.constant_bytes, 8 * 8 * 2);
    assert_eq!(stats.symmetric_bytes, 2 * 3 * 2 * 8 * 4);
    assert_eq!(stats.remote_triggers, 2 * 2, "tiles x layers to each peer");
    assert!(stats.to_string().contains("24 tasks of type nvshmem_copy"));
}

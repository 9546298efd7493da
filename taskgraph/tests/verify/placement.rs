//! Workers' lists of static placement, and launches of dynamic placement.

use super::verify_support::*;
use super::{broken, expect};
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{EventType, Place, Placement, Space, TaskGraph};
use taskgraph::verify::{ViolationKind, verify};
use taskgraph::{DType, EventId, Region};

#[test]
fn worker_lists() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let reduce = find(&graphs[0], "l0.reduce", 0);
    let found = broken(2, 2, Lowering::Copy, |g| g[0].worker_lists[0].retain(|&t| t != reduce));
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["in no worker's list"]);
    let found = broken(2, 2, Lowering::Copy, |g| g[0].worker_lists[1].push(reduce));
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["more than one place"]);
    let found = broken(2, 2, Lowering::Copy, |g| g[0].tasks[reduce as usize].worker = Some(1));
    expect(&found, ViolationKind::Structure, &[(0, reduce)], &["names another worker"]);
    let found = broken(2, 2, Lowering::Copy, |g| g[0].worker_lists[1].push(12345));
    expect(&found, ViolationKind::Structure, &[], &["12345"]);
    let found = broken(2, 2, Lowering::Copy, |g| g[1].placement = Placement::Dynamic);
    expect(&found, ViolationKind::Structure, &[], &["differ in placement"]);
}

/// The chain of one rank under dynamic placement: linear, then reduce, then last, each launched by one event.
fn dynamic() -> Vec<TaskGraph> {
    let mut b = RankBuilder::new(0, 1, 2);
    let x = b.tensor("x", DType::F32, &[4, 8], Space::Device, Role::Input);
    let y = b.tensor("y", DType::F32, &[4, 8], Space::Device, Role::Activation);
    let after = b.event(false);
    for tile in 0..2 {
        let region = Region::whole(&[4, 8]).with(1, tile * 4, tile * 4 + 4);
        let (input, output) = (b.all(x), b.at(y, region, Place::Own));
        b.task(0, LINEAR, "first", &[input], &[output], &[1], Some(EventId::local(0, after)));
    }
    let input = [b.all(y)];
    b.task(0, LINEAR, "second", &input, &[], &[after], Some(EventId::local(0, 2)));
    let mut graph = b.graph;
    graph.placement = Placement::Dynamic;
    graph.worker_lists = Vec::new();
    graph.tasks.iter_mut().for_each(|t| t.worker = None);
    (graph.events[1].first_task, graph.events[1].last_task) = (2, 4);
    let event = &mut graph.events[after as usize];
    (event.event_type, event.first_task, event.last_task) = (EventType::LaunchTasks, 4, 5);
    let mut graphs = vec![graph];
    count_triggers(&mut graphs);
    graphs
}

#[test]
fn dynamic_launches() {
    assert!(verify(&dynamic()).is_ok());
    let mut g = dynamic();
    g[0].events[1].last_task = 3;
    expect(&verify(&g).unwrap_err(), ViolationKind::Structure, &[(0, 3)], &["launched by no event"]);
    let mut g = dynamic();
    g[0].events[3].first_task = 3;
    expect(&verify(&g).unwrap_err(), ViolationKind::Structure, &[(0, 3)], &["launched twice"]);
    let mut g = dynamic();
    g[0].tasks[4].dependencies.push(1);
    expect(&verify(&g).unwrap_err(), ViolationKind::Structure, &[(0, 4)], &["exactly that one"]);
    let mut g = dynamic();
    g[0].events[3].event_type = EventType::EndOfTaskGraph;
    assert!(verify(&g).is_err());
    let mut g = dynamic();
    // Both launched at once: the reader no longer waits.
    (g[0].events[1].last_task, g[0].events[3].last_task) = (5, 4);
    g[0].tasks[4].dependencies[0] = 1;
    g[0].tasks[2].trigger = Some(EventId::local(0, 2));
    g[0].tasks[3].trigger = Some(EventId::local(0, 2));
    g[0].events.pop();
    count_triggers(&mut g);
    expect(&verify(&g).unwrap_err(), ViolationKind::Unordered, &[(0, 4)], &["'first'", "'second'", "'y'"]);
}

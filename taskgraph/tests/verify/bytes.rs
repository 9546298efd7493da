//! Decisions on bytes: copies, views, puts and flagged words.

use super::verify_support::*;
use super::{broken, expect};
use taskgraph::op_graph::{Capacity, Role, Rows};
use taskgraph::task_graph::{Place, Space, TaskGraph};
use taskgraph::trust::Trust;
use taskgraph::verify::{ViolationKind, verify};
use taskgraph::{DType, EventId, Region};

/// Copies from two ranks into the same bytes of a third rank's memory.
#[test]
fn copies_of_two_ranks_into_the_same_bytes_are_refused() {
    let graphs = chain(3, 2, 2, 2, Lowering::Copy);
    let (one, two) = (find(&graphs[1], "l0.copy", 0), find(&graphs[2], "l0.copy", 0));
    let found = broken(3, 2, Lowering::Copy, |g| {
        let at = |g: &TaskGraph, t: u32| g.tasks[t as usize].first_operand as usize + 1;
        let (from, to) = (at(&g[1], one), at(&g[2], two));
        assert_eq!((g[1].operands[from].place, g[2].operands[to].place), (Place::Peer(0), Place::Peer(0)));
        g[2].operands[to] = g[1].operands[from];
    });
    expect(
        &found,
        ViolationKind::Unordered,
        &[(1, one), (2, two)],
        &[
            "'l0.receive' [1..2, 0..2, 0..4] in rank 0's memory",
            "'l0.copy') of rank 1",
            "'l0.copy') of rank 2",
        ],
    );
}

/// Views count, not regions: a region that is too small does not hide bytes.
#[test]
fn a_view_beyond_its_region_is_refused() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let (a, b) = (find(&graphs[0], "l0.linear", 0), find(&graphs[0], "l0.linear", 1));
    let output = |g: &TaskGraph, t: u32| g.tasks[t as usize].first_operand as usize + 2;
    let found = broken(2, 2, Lowering::Copy, |g| {
        let at = output(&g[0], a);
        g[0].operands[at].dims[1] = 8;
    });
    expect(&found, ViolationKind::Structure, &[(0, a)], &["leaves its region"]);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let at = output(&g[0], a);
        g[0].operands[at].dims[1] = 8;
        g[0].operands[at].region.hi[1] = 8;
    });
    expect(&found, ViolationKind::Unordered, &[(0, a), (0, b)], &["'l0.partial' [0..2, 4..8]"]);
    // Every second row of both tiles: not a box, but bytes all the same.
    let found = broken(2, 2, Lowering::Copy, |g| {
        let at = output(&g[0], a);
        (g[0].operands[at].dims, g[0].operands[at].strides) = ([2, 2, 1, 1], [8, 6, 1, 1]);
        g[0].operands[at].region.hi[1] = 8;
    });
    expect(&found, ViolationKind::Unordered, &[(0, a), (0, b)], &["'l0.partial' [0..1, 6..7]"]);
}

/// A share of no rows would hide the access, although the kernel's view has all of them.
#[test]
fn a_share_of_no_rows_is_refused() {
    let a = find(&chain(2, 2, 2, 2, Lowering::Copy)[0], "l0.linear", 0);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let at = g[0].tasks[a as usize].first_operand as usize + 2;
        let operand = &mut g[0].operands[at];
        operand.region.hi[0] = 0;
        operand.trust = Some(Trust::RowsOfUnits { task: 0, of: 1000, in_tiles: false });
    });
    expect(&found, ViolationKind::Structure, &[(0, a)], &["share, which must not be empty"]);
}

/// Rows of a slot may belong to any unit, so two writers are disjoint only if both have slots or both have units.
#[test]
fn shares_of_slots_and_of_units_may_meet() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let tasks = [find(&graphs[0], "l0.linear", 0), find(&graphs[0], "l0.linear", 1)];
    let slot = |slot| Trust::RowsOfSlot { slot, of: 2, in_tiles: false };
    let unit = |task| Trust::RowsOfUnits { task, of: 2, in_tiles: false };
    let verdict = |trusts: [Trust; 2]| {
        let mut g = chain(2, 2, 2, 2, Lowering::Copy);
        g.iter_mut().for_each(|graph| graph.capacity = Capacity { rows: 2, samples: 2, active: 2 });
        for (share, (task, trust)) in tasks.iter().zip(trusts).enumerate() {
            let at = g[0].tasks[*task as usize].first_operand as usize + 2;
            let operand = &mut g[0].operands[at];
            (operand.offset, operand.dims[1]) = (0, 8);
            operand.region = Region { lo: [share as u32, 0, 0, 0], hi: [share as u32 + 1, 8, 1, 1] };
            operand.trust = Some(trust);
        }
        let found = verify(&g).err().unwrap_or_default();
        found.iter().any(|v| tasks.iter().all(|&task| v.tasks.contains(&(0, task))))
    };
    assert!(!verdict([slot(0), slot(1)]));
    assert!(!verdict([unit(0), unit(1)]));
    assert!(verdict([slot(0), unit(1)]));
    assert!(verdict([unit(0), slot(1)]));
}

/// The host reads outputs after the iteration, so tasks must write all of them.
#[test]
fn an_output_that_is_not_written_is_refused() {
    let found = broken(2, 2, Lowering::Copy, |g| {
        for graph in g.iter_mut() {
            // No task writes a rank's own part of the receive buffer.
            graph.tensors.iter_mut().find(|t| t.name == "l0.receive").expect("the buffer").output = true;
        }
    });
    expect(&found, ViolationKind::Unwritten, &[], &["no task writes 'l0.receive'", "part of an output"]);
}

#[test]
fn impossible_sizes_are_refused() {
    let found = broken(2, 2, Lowering::Copy, |g| g[0].workers = 0);
    expect(&found, ViolationKind::Structure, &[], &["rank 0: has no workers"]);
    let found = broken(2, 2, Lowering::Copy, |g| {
        g[1].tensors.iter_mut().find(|t| t.name == "l0.partial").expect("the tensor").bytes = 1 << 60;
    });
    expect(&found, ViolationKind::Structure, &[], &["rank 1: tensor 'l0.partial'", "more than any memory"]);
    let found = broken(2, 2, Lowering::Copy, |g| {
        g.iter_mut().for_each(|graph| graph.capacity.active = u32::MAX);
    });
    expect(&found, ViolationKind::Structure, &[], &["active slots, but only for"]);
}

/// The strides of a tensor without elements may be 0, so nothing can be divided by them.
#[test]
fn elements_of_a_tensor_without_elements_are_refused() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let a = find(&graphs[0], "l0.linear", 0);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let operand = g[0].operands[g[0].tasks[a as usize].first_operand as usize + 2];
        let tensor = &mut g[0].tensors[operand.tensor as usize];
        (tensor.dims[0], tensor.strides) = (0, vec![0, 0]);
    });
    expect(&found, ViolationKind::Structure, &[(0, a)], &["has elements, but the tensor [0, 8] has none"]);
}

#[test]
fn a_copy_into_another_shape_is_refused() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let copy = find(&graphs[0], "l0.copy", 0);
    let found = broken(2, 2, Lowering::Copy, |g| {
        let at = g[0].tasks[copy as usize].first_operand as usize + 1;
        g[0].operands[at].dims[1] = 2;
    });
    expect(
        &found,
        ViolationKind::Structure,
        &[(0, copy)],
        &["f32 [2, 4] of 'l0.partial' into f32 [2, 2] of 'l0.receive'"],
    );
}

/// A put is done when the event that it triggers is ready, not when its worker continues.
#[test]
fn the_source_of_a_put_may_not_be_written_before_it_is_done() {
    let graphs = chain(2, 2, 2, 2, Lowering::Copy);
    let copy = find(&graphs[0], "l0.copy", 0);
    let found = broken(2, 2, Lowering::Copy, |g| {
        for graph in g.iter_mut() {
            // The task after the copy in its list writes the copy's source.
            let list = &mut graph.worker_lists[0];
            let at = list.iter().position(|&t| t == copy).unwrap();
            let next = list[at + 1];
            let source = graph.operands[graph.tasks[copy as usize].first_operand as usize];
            let task = &graph.tasks[next as usize];
            let output = task.first_operand as usize + usize::from(task.num_inputs);
            graph.operands[output] = source;
        }
    });
    expect(&found, ViolationKind::Unordered, &[(0, copy)], &["'l0.copy') of rank 0 reads 'l0.partial'"]);
}

/// Two ranks: each writes `data`, then pushes a flagged word. A task that has polled the words reads `data`. A second
/// round of words tells the peers that the first was read.
fn published_by_a_word(event: bool) -> Vec<TaskGraph> {
    let mut graphs: Vec<TaskGraph> = (0..2)
        .map(|rank| {
            let mut b = RankBuilder::new(rank, 2, 2);
            let own = rank as u16;
            let x = b.tensor("x", DType::F32, &[4], Space::Device, Role::Input);
            let data = b.tensor("data", DType::F32, &[4], Space::Device, Role::Activation);
            let words = |b: &mut RankBuilder, name: &str| {
                b.tensor(name, DType::F32Flagged, &[2, 1, 4], Space::Symmetric, Role::Activation)
            };
            let (words, answer) = (words(&mut b, "words"), words(&mut b, "answer"));
            let sum = |b: &mut RankBuilder, name: &str| {
                let sum = b.tensor(name, DType::F32, &[1, 4], Space::Device, Role::Activation);
                [b.all(sum)]
            };
            let sums = [sum(&mut b, "sum"), sum(&mut b, "sum of answers")];
            let (written, end) = (b.event(false), Some(EventId::local(own, 2)));
            let slot = Region::whole(&[2, 1, 4]).with(0, rank, rank + 1);
            let input = [b.all(x)];
            let output = [b.all(data)];
            b.task(0, LINEAR, "write", &input, &output, &[1], Some(EventId::local(own, written)));
            let push = [b.at(words, slot, Place::All)];
            b.task(0, LINEAR, "push", &input, &push, &[1], None);
            let poll = [b.all(words)];
            b.task(1, REDUCE, "poll", &poll, &sums[0], &[1], None);
            let read = [b.all(data)];
            b.task(1, LINEAR, "read", &read, &[], &[if event { written } else { 1 }], None);
            let push = [b.at(answer, slot, Place::All)];
            b.task(1, LINEAR, "answer", &input, &push, &[1], end);
            let poll = [b.all(answer)];
            b.task(0, REDUCE, "end", &poll, &sums[1], &[written], end);
            b.graph
        })
        .collect();
    count_triggers(&mut graphs);
    graphs
}

#[test]
fn a_flagged_word_publishes_nothing_but_itself() {
    if let Err(found) = verify(&published_by_a_word(true)) {
        panic!("{}", found[0]);
    }
    let graphs = published_by_a_word(false);
    let found = verify(&graphs).expect_err("the word is relaxed: `data` may not be there yet");
    let (write, read) = (find(&graphs[0], "write", 0), find(&graphs[0], "read", 0));
    expect(&found, ViolationKind::Unordered, &[(0, write), (0, read)], &["'data'", "nothing orders"]);
}

/// What comes after the read of a flagged word also comes after the reads that its writer made before.
#[test]
fn a_flagged_word_orders_reuse() {
    let mut graphs = published_by_a_word(true);
    for graph in &mut graphs {
        // `push` reads the data, `read` writes it.
        let (push, read) = (find(graph, "push", 0) as usize, find(graph, "read", 0) as usize);
        let data = graph.tensors.iter().position(|t| t.name == "data").unwrap();
        let b = RankBuilder { graph: graph.clone() };
        graph.operands[graph.tasks[push].first_operand as usize] = b.all(data as u32);
        graph.tasks[push].dependencies = graph.tasks[find(graph, "end", 0) as usize].dependencies.clone();
        (graph.tasks[read].num_inputs, graph.tasks[read].num_outputs) = (0, 1);
    }
    if let Err(found) = verify(&graphs) {
        panic!("{}", found[0]);
    }
    for graph in &mut graphs {
        // Without the poll nothing orders the two.
        let poll = find(graph, "poll", 0) as usize;
        let task = &mut graph.tasks[poll];
        (task.task_type, task.variant, task.num_inputs, task.num_outputs) = (LINEAR, LINEAR, 0, 0);
    }
    let found = verify(&graphs).unwrap_err();
    let (push, read) = (find(&graphs[0], "push", 0), find(&graphs[0], "read", 0));
    expect(&found, ViolationKind::Unordered, &[(0, push), (0, read)], &["'data'"]);
}

/// One rank: `data` is read and then pushed as `row` of two rows of flagged words; another worker pushes the other
/// row. A task that has polled both rows, or only that `row`, writes `data` again.
fn reused_after_a_push_of(row: u32, rows_kind: u32, both: bool) -> Vec<TaskGraph> {
    let mut b = RankBuilder::new(0, 1, 3);
    b.graph.variants[usize::from(REDUCE)].params = vec![1, 0, rows_kind, 1];
    let x = b.tensor("x", DType::F32, &[4], Space::Device, Role::Input);
    let data = b.tensor("data", DType::F32, &[4], Space::Device, Role::Activation);
    let words = b.tensor("words", DType::F32Flagged, &[1, 2, 4], Space::Symmetric, Role::Activation);
    // The rows of a buffer stand for those of another tensor.
    b.graph.tensors[words as usize].rows = Rows::Fixed;
    let sum = b.tensor("sum", DType::F32, &[2, 4], Space::Device, Role::Activation);
    let (written, end) = (b.event(false), Some(EventId::local(0, 2)));
    let (input, whole) = ([b.all(x)], [b.all(data)]);
    b.task(0, LINEAR, "write", &input, &whole, &[1], Some(EventId::local(0, written)));
    let of_row = |row: u32| Region::whole(&[1, 2, 4]).with(1, row, row + 1);
    let push = [b.at(words, of_row(row), Place::All)];
    b.task(0, LINEAR, "push", &whole, &push, &[written], end);
    let other = [b.at(words, of_row(1 - row), Place::All)];
    b.task(1, LINEAR, "other", &input, &other, &[1], end);
    let (poll, sum) = match both {
        true => (b.all(words), b.all(sum)),
        false => {
            let row_of_sum = Region::whole(&[2, 4]).with(0, row, row + 1);
            (b.at(words, of_row(row), Place::Own), b.at(sum, row_of_sum, Place::Own))
        }
    };
    b.task(2, REDUCE, "poll", &[poll], &[sum], &[written], None);
    b.task(2, LINEAR, "again", &input, &whole, &[1], end);
    let mut graphs = vec![b.graph];
    count_triggers(&mut graphs);
    graphs
}

/// A reader waits for the rows in use. Of the token rows only the first is always in use, so only the task that pushes
/// it comes before the reader in every iteration.
#[test]
fn a_push_of_rows_that_may_be_out_of_use_orders_nothing() {
    const TOKENS: u32 = 0;
    const SAMPLES: u32 = 1;
    const FIXED: u32 = 2;
    for (row, rows_kind, both) in
        [(0, TOKENS, true), (0, FIXED, true), (1, FIXED, true), (0, TOKENS, false), (1, FIXED, false)]
    {
        if let Err(found) = verify(&reused_after_a_push_of(row, rows_kind, both)) {
            panic!("row {row}, kind {rows_kind}, both {both}: {}", found[0]);
        }
    }
    // The first row of a task is not the first row of tokens.
    for (row, rows_kind, both) in
        [(1, TOKENS, true), (0, SAMPLES, true), (1, SAMPLES, true), (1, TOKENS, false), (0, SAMPLES, false)]
    {
        let graphs = reused_after_a_push_of(row, rows_kind, both);
        let found = verify(&graphs).expect_err("the push may have nothing to push");
        let (push, again) = (find(&graphs[0], "push", 0), find(&graphs[0], "again", 0));
        expect(&found, ViolationKind::Unordered, &[(0, push), (0, again)], &["'data'"]);
    }
}

//! Results in `MPK_LAYOUT_WIDE`: their values, and the graphs in which they are written.

use super::graph_test::graph_of;
use super::test::case;
use super::test_case::Case;
use crate::registry::registry;
use serde_json::json;
use taskgraph::op_graph::Attrs;
use taskgraph::split::Split;
use taskgraph::target::device;
use taskgraph::verify::verify;
use taskgraph::{BuildOptions, DType, Target, TaskGraph, TensorId, build_all};

/// Each element is where the layout says, and no other is written. In the second row tile too, and in narrow tiles on a rank with a part
/// of the heads.
#[test]
fn wide_results_equal_the_reference() {
    for (dtype, wide) in [(DType::Bf16, 64), (DType::Bf16, 16), (DType::F16, 64), (DType::F16, 16)] {
        for (heads, kv_heads, head_dim) in [(4, 2, 64), (2, 1, 128)] {
            let one = Case { wide, ..case(dtype, heads, kv_heads, head_dim) };
            let slots = vec![(37, 1), (0, 126), (5, 7)];
            Case { slots: slots.clone(), qk_norm: true, ..one.clone() }.verify();
            Case { slots: vec![(150, 1), (40, 2)], splits: 3, ..one.clone() }.verify();
            Case { slots, prefill: Some(7), ..one.clone() }.verify();
        }
        let of_several = Case { wide, kv_heads_of_task: 2, ..case(dtype, 8, 4, 64) };
        Case { slots: (0..9).map(|i| (i * 5, 1)).collect(), ..of_several }.verify();
    }
    // A head that is no multiple of 32.
    for head_dim in [16, 80] {
        let slots = vec![(37, 1), (0, 40), (5, 7)];
        Case { slots, wide: 16, ..case(DType::Bf16, 4, 2, head_dim) }.verify();
    }
    let on_ranks = Case { wide: 16, world: 2, ..case(DType::Bf16, 8, 4, 64) };
    Case { slots: vec![(37, 1), (0, 40), (5, 7)], ..on_ranks.clone() }.verify();
    Case { slots: vec![(150, 1), (40, 2)], splits: 3, ..on_ranks }.verify();
    // More slots and units than a tile has rows.
    let slots: Vec<_> = (0..150).map(|i| (i % 7, 1)).collect();
    for prefill in [None, Some(140)] {
        Case { slots: slots.clone(), prefill, wide: 64, ..case(DType::Bf16, 1, 1, 64) }.verify();
    }
}

/// Attention of heads of this size, and the product that reads it, on `world` ranks.
fn with_product(world: u32, active: u32, rows: u32, head_dim: u64, target: &Target) -> Vec<TaskGraph> {
    let mut g = graph_of(world, target, active, rows, head_dim, json!({}));
    let attended = TensorId(g.ops[0].outputs[0]);
    g.tensor_mut(attended).output = false;
    let weight = g.weight(
        "o.weight",
        DType::Bf16,
        &[256, 8 * head_dim],
        Some((1, Split::Queries { heads: 8, head_dim })),
    );
    let product = g.op("o", "linear", &[attended, weight], Attrs::new());
    g.tensor_mut(product).output = true;
    let graphs = build_all(&g, &registry(), &BuildOptions::new(world, target.clone()));
    graphs.unwrap_or_else(|e| panic!("{rows} rows of {head_dim}: {e}"))
}

/// The numbers of the tasks of a type.
fn of(graph: &TaskGraph, name: &str) -> Vec<usize> {
    (0..graph.tasks.len()).filter(|&t| graph.type_name(&graph.tasks[t]) == name).collect()
}

/// The task type that writes the result.
fn writer(graph: &TaskGraph) -> &'static str {
    let types = ["attention_prefill", "attention_merge", "attention"];
    types.into_iter().find(|name| !of(graph, name).is_empty()).expect("attention")
}

/// No task changes the layout between attention and a wide product, if a head has whole column tiles.
#[test]
fn wide_products_read_what_attention_writes() {
    let target = Target::cuda(device("h200").unwrap());
    for (world, active, rows, head_dim, columns) in [
        (1, 8, 8, 128, None), // the product is not wide
        (1, 32, 32, 64, Some(16)),
        (1, 128, 128, 128, Some(16)),
        (1, 200, 200, 64, Some(64)),
        (1, 4, 300, 128, Some(64)),
        (1, 4, 100, 64, Some(16)),
        (1, 40, 40, 96, Some(16)),
        (1, 200, 200, 96, Some(0)), // half a column tile
        (1, 40, 40, 16, Some(16)),
        (2, 8, 8, 128, None),
        (2, 32, 32, 128, Some(16)),
        (2, 60, 60, 64, Some(16)),
        (2, 200, 200, 64, Some(0)), // each rank may begin with another row tile
    ] {
        let what = format!("{world} ranks, {active} slots, {rows} rows of {head_dim}");
        let graphs = with_product(world, active, rows, head_dim, &target);
        if let Err(violations) = verify(&graphs) {
            panic!("{what}: {}", violations[0]);
        }
        let graph = &graphs[0];
        assert_eq!(!of(graph, "wide_linear").is_empty(), columns.is_some(), "{what}");
        assert_eq!(!of(graph, "wide_rows").is_empty(), columns == Some(0), "{what}");
        let codes = crate::gpu::task_codes(&graphs).unwrap();
        let code = &codes.expressions.iter().find(|e| e.task_type == writer(graph)).unwrap().code;
        for width in [16, 64] {
            assert_eq!(code.ends_with(&format!(", {width}>")), columns == Some(width), "{what}: {code}");
        }
    }
}

/// Rows of a slot may be anywhere. So each tile of the product waits for all slots, even a tile of some rows of a row tile.
#[test]
fn a_wide_product_waits_for_every_slots_rows() {
    for (rows, head_dim) in [(32, 64), (200, 64)] {
        let target = Target::cuda(device("h200").unwrap());
        let mut graphs = with_product(1, rows, rows, head_dim, &target);
        verify(&graphs).unwrap();
        let (writers, readers) = (of(&graphs[0], writer(&graphs[0])), of(&graphs[0], "wide_linear"));
        assert!(!writers.is_empty() && readers.len() > 1);
        for &reader in &readers {
            let graph = &graphs[0];
            let [event] = graph.tasks[reader].dependencies[..] else { panic!("one event") };
            let triggers = |w: &&usize| graph.tasks[**w].trigger.map(|e| e.index()) == Some(event);
            assert_eq!(writers.iter().filter(triggers).count(), writers.len());
        }
        // A graph in which one slot's task triggers the product's own event instead is refused.
        let event = graphs[0].tasks[readers[0]].dependencies[0] as usize;
        let last = writers[writers.len() - 1];
        let after = graphs[0].tasks[readers[0]].trigger.unwrap();
        graphs[0].tasks[last].trigger = Some(after);
        graphs[0].events[event].num_triggers -= 1;
        graphs[0].events[after.index() as usize].num_triggers += 1;
        let what = format!(
            "{rows} rows: task {last} no longer triggers event {event} of tasks {readers:?}, but {after:?}"
        );
        let problem = verify(&graphs).err().unwrap_or_else(|| panic!("{what}"))[0].to_string();
        assert!(problem.contains("'out'"), "{what}: {problem}");
    }
}

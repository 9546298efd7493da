//! Task types without kernels, graphs of them, and a check of the resulting task graphs.

mod owned;
mod types;
mod unrolled;

pub use owned::*;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use taskgraph::task_graph::{EventType, Task};
use taskgraph::*;
pub use types::*;
pub use unrolled::Unrolled;

pub fn attrs(value: serde_json::Value) -> Attrs {
    value.as_object().cloned().unwrap_or_default()
}

pub fn registry() -> Registry {
    let mut registry = Registry::default();
    for pushable in
        [("linear", false, true), ("linear_plain", false, false), ("linear_with_residual", true, false)]
    {
        registry.register(Arc::new(Linear { name: pushable.0, residual: pushable.1, pushable: pushable.2 }));
    }
    registry.register(Arc::new(Elementwise("add")));
    registry.register(Arc::new(Elementwise("scale")));
    registry.register(Arc::new(Twice));
    registry.register(Arc::new(Grid));
    registry.register(Arc::new(Records));
    registry.register(Arc::new(Rows));
    registry.register(Arc::new(Product));
    registry.register(Arc::new(RowsProduct));
    registry
}

pub fn capacity() -> Capacity {
    Capacity { rows: 4, samples: 4, active: 4 }
}

/// The outline of a decoder: `layers` times (column-parallel linear, row-parallel linear, allreduce, add), then
/// logits, records of each rank's share, and a reader of all of them.
pub fn decoder(layers: usize, width: u64, inner: u64, vocabulary: u64, linear: &str, world: u32) -> OpGraph {
    let mut g = OpGraph::new("decoder", capacity());
    let none = attrs(json!({}));
    let mut x = g.input("x", DType::F32, &[4, width]);
    let even = |unit| Split::Even { unit };
    for l in 0..layers {
        let up = g.weight(&format!("up{l}"), DType::F32, &[inner, width], Some((0, even(1))));
        let down = g.weight(&format!("down{l}"), DType::F32, &[width, inner], Some((1, even(1))));
        let h = g.op(&format!("h{l}"), "linear", &[x, up], none.clone());
        let s = g.op(&format!("s{l}"), "scale", &[h], none.clone());
        let p = g.op(&format!("p{l}"), linear, &[s, down], none.clone());
        x = g.op(&format!("x{l}"), "add", &[p, x], none.clone());
    }
    let head = g.weight("head", DType::F32, &[vocabulary, width], Some((0, even(1))));
    let logits = g.op("logits", "linear", &[x, head], none.clone());
    let records = g.op("records", "records", &[logits], attrs(json!({"world": [world]})));
    let reduced = g.op(
        "best",
        "grid",
        &[records],
        attrs(json!({"dims": [4, 2], "write": [2, 1], "read": [[1, 1, 2, 1]]})),
    );
    g.tensor_mut(reduced).output = true;
    g
}

/// How a rank's graph sums over the ranks, as its tasks show: each kind of allreduce, and the number of sums.
pub fn ways(graph: &TaskGraph) -> BTreeMap<&'static str, usize> {
    let mut found = BTreeMap::new();
    let named = |name: &str| graph.tensors.iter().any(|t| t.name == name);
    let of_type = |name: &'static str| graph.tasks.iter().skip(2).filter(move |t| graph.type_name(t) == name);
    for (received, tensor) in graph.tensors.iter().enumerate() {
        let Some(summands) = tensor.name.strip_suffix(".received") else { continue };
        let reads = |task: &&Task| graph.inputs(task).iter().any(|o| o.tensor as usize == received);
        let sums: Vec<u32> =
            of_type("reduce").filter(reads).flat_map(|t| graph.outputs(t)).map(|o| o.tensor).collect();
        let is_sent = || of_type("nvshmem_copy").any(|t| sums.contains(&graph.inputs(t)[0].tensor));
        let way = match tensor.dtype {
            DType::F32Flagged => "one-shot",
            _ if named(&format!("{summands}.of_nodes")) => "hierarchical",
            _ if is_sent() => "two-shot",
            _ => "copy-reduce",
        };
        *found.entry(way).or_default() += 1;
    }
    found
}

/// Dynamic placement: each task has one launching event, and the ranges match.
pub fn assert_launches(g: &TaskGraph) {
    let mut launched = vec![0; g.tasks.len()];
    for (e, event) in g.events.iter().enumerate() {
        for t in event.first_task..event.last_task {
            launched[t as usize] += 1;
            let wanted = &g.tasks[t as usize].dependencies;
            assert_eq!(wanted.as_slice(), [e as u32], "task {t}");
        }
        let launches = matches!(
            event.event_type,
            EventType::LaunchTasks | EventType::LaunchMassiveTasks | EventType::LaunchDependentTasks
        );
        assert_eq!(launches, e != 0 && e != 2);
        assert!(!launches || event.last_task > event.first_task || e == 1, "event {e} launches nothing");
    }
    assert!(launched[2..].iter().all(|&n| n == 1));
}

/// Builds the graphs, and checks everything that must hold for every graph.
pub fn check(graph: &OpGraph, options: &BuildOptions) -> Vec<TaskGraph> {
    let registry = registry();
    let builder = Builder::new(graph, &registry, options).unwrap_or_else(|e| panic!("{e}"));
    let graphs = builder.all().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(graphs, builder.all().unwrap());
    for g in &graphs {
        assert_eq!(*g, build_rank(graph, &registry, options, g.rank).unwrap());
        match options.placement {
            Placement::Static => {
                let mut seen: Vec<u32> = g.worker_lists.iter().flatten().copied().collect();
                seen.sort_unstable();
                assert_eq!(seen, (2..g.tasks.len() as u32).collect::<Vec<_>>());
            }
            Placement::Dynamic => assert_launches(g),
        }
        let symmetric = |g: &TaskGraph| -> Vec<_> {
            let s = g.tensors.iter().filter(|t| t.space == taskgraph::task_graph::Space::Symmetric);
            s.map(|t| (t.name.clone(), t.bytes)).collect()
        };
        assert_eq!(symmetric(g), symmetric(&graphs[0]), "symmetric memory differs between ranks");
        for o in &g.operands {
            let entry = &g.tensors[o.tensor as usize];
            if o.dims[..o.ndim as usize].iter().all(|&d| d > 0) {
                let last: u64 =
                    (0..o.ndim as usize).map(|d| u64::from(o.dims[d] - 1) * u64::from(o.strides[d])).sum();
                assert!(
                    entry.tiled || o.offset + (last + 1) * entry.dtype.size() <= entry.bytes,
                    "{options:?}: {o:?} {entry:?}"
                );
            }
        }
    }
    if let Err(violations) = taskgraph::verify::verify(&graphs) {
        panic!("{options:?}: {}", violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
    }
    let unrolled = Unrolled::new(&graphs, 3);
    unrolled.assert_race_free();
    unrolled.assert_end_is_last();
    unrolled.assert_values(builder.op_graph(), &options.nodes);
    graphs
}

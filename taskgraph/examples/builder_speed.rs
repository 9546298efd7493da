//! Time to build (and verify) all ranks' graphs of decoders of real width, with task types that have no kernels.
//! `cargo run --release -p mpk-taskgraph --example builder_speed`

#[path = "../tests/builder_support/mod.rs"]
#[allow(dead_code)]
mod builder_support;

use builder_support::{attrs, registry};
use serde_json::json;
use std::time::Instant;
use taskgraph::*;

struct Shape {
    name: &'static str,
    layers: usize,
    hidden: u64,
    qkv: u64,
    attention: u64,
    inner: u64,
}

fn graph(s: &Shape, rows: u64, world: u32) -> OpGraph {
    let capacity = Capacity { rows: rows as u32, samples: rows as u32, active: rows as u32 };
    let mut g = OpGraph::new(s.name, capacity);
    let none = || attrs(json!({}));
    let (columns, depth) = (Split::Even { unit: 16 }, Split::Even { unit: 16 });
    let mut x = g.input("x", DType::F32, &[rows, s.hidden]);
    for l in 0..s.layers {
        let weight = |g: &mut OpGraph, name: &str, n: u64, k: u64, dim: usize| {
            g.weight(
                &format!("weight.{l}.{name}"),
                DType::Bf16,
                &[n, k],
                Some((dim, if dim == 0 { columns } else { depth })),
            )
        };
        let q = weight(&mut g, "q", s.attention, s.hidden, 0);
        let kv = weight(&mut g, "kv", s.qkv - s.attention, s.hidden, 0);
        let o = weight(&mut g, "o", s.hidden, s.attention, 1);
        let up = weight(&mut g, "up", s.inner, s.hidden, 0);
        let down = weight(&mut g, "down", s.hidden, s.inner, 1);
        let a = g.op(&format!("{l}.q"), "linear", &[x, q], none());
        let _ = g.op(&format!("{l}.kv"), "linear", &[x, kv], none());
        let a = g.op(&format!("{l}.attention"), "scale", &[a], none());
        let a = g.op(&format!("{l}.o"), "linear", &[a, o], none());
        x = g.op(&format!("{l}.add1"), "add", &[a, x], none());
        let h = g.op(&format!("{l}.up"), "linear", &[x, up], none());
        let h = g.op(&format!("{l}.silu"), "scale", &[h], none());
        let h = g.op(&format!("{l}.down"), "linear", &[h, down], none());
        x = g.op(&format!("{l}.add2"), "add", &[h, x], none());
    }
    let head = g.weight("head", DType::Bf16, &[151_936, s.hidden], Some((0, columns)));
    let logits = g.op("logits", "linear", &[x, head], none());
    let records = g.op("records", "records", &[logits], attrs(json!({"world": [world]})));
    let best = g.op(
        "best",
        "grid",
        &[records],
        attrs(json!({"dims": [rows, 2], "write": [rows, 1], "read": [[1, 1, rows, 1]]})),
    );
    g.tensor_mut(best).output = true;
    g
}

fn main() {
    let shapes = [
        Shape { name: "0.6B", layers: 28, hidden: 1024, qkv: 4096, attention: 2048, inner: 3072 },
        Shape { name: "8B", layers: 36, hidden: 4096, qkv: 6144, attention: 4096, inner: 12_288 },
        Shape { name: "32B", layers: 64, hidden: 5120, qkv: 10_240, attention: 8192, inner: 25_600 },
        Shape { name: "70B", layers: 80, hidden: 8192, qkv: 10_240, attention: 8192, inner: 28_672 },
    ];
    let device = taskgraph::target::device("h200").expect("a row of the table");
    let registry = registry();
    let world = 8;
    for (rows, placement, allreduce) in [
        (8, Placement::Static, Allreduce::Auto),
        (8, Placement::Dynamic, Allreduce::Auto),
        (512, Placement::Static, Allreduce::Auto),
        (8, Placement::Static, Allreduce::CopyReduce),
    ] {
        for shape in &shapes {
            let options =
                BuildOptions { placement, allreduce, ..BuildOptions::new(world, Target::cuda(device)) };
            let graph = graph(shape, rows, world);
            let start = Instant::now();
            let builder = Builder::new(&graph, &registry, &options).unwrap_or_else(|e| panic!("{e}"));
            let shared = start.elapsed();
            let graphs = builder.all().unwrap_or_else(|e| panic!("{e}"));
            let build = start.elapsed();
            let start = Instant::now();
            let verified = verify::verify(&graphs).is_ok();
            println!(
                "{:5} rows {rows} {placement:?} {allreduce:?}: {} tasks per rank, shared {shared:.1?}, build {build:.1?}, verify {:.1?} ({verified})",
                shape.name,
                graphs[0].tasks.len(),
                start.elapsed(),
            );
        }
    }
}

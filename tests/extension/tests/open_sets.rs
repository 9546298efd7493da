//! Additions of another crate are built, fused, verified and run like built-in
//! ones.

use extension::{count::Count, registry};
use kernels_cu::testing::{TestBatch, TestOp, TestTensor};
use serde_json::json;
use taskgraph::task_graph::core_types;
use taskgraph::{Attrs, BuildOptions, Builder, Capacity, DType, OpGraph, Passes, Split, Target, verify};

fn graph() -> OpGraph {
    OpGraph::new("own", Capacity { rows: 4, samples: 4, active: 1 })
}

#[test]
fn the_kernel_of_a_task_type_runs() {
    registry();
    let x = [1.0, -2.0, 0.5, 3.0, 4.0, -0.0];
    let mut inputs = [TestTensor::new(DType::F32, &[2, 3], &x)];
    let op = TestOp::new("negate", json!({}), 2).workers(2);
    let y = op.run(&mut inputs, &mut TestBatch::rows(2)).unwrap();
    assert_eq!(y[0].values(), x.map(|v| -v));
}

#[test]
fn the_parts_of_a_composition_fuse_and_a_pass_sees_them() {
    let registry = registry();
    for (world, wanted) in [
        (1, vec![("linear_with_residual", 1), ("negate", 1)]),
        (2, vec![("allreduce", 1), ("linear", 1), ("negate", 1), ("slice", 1)]),
    ] {
        let mut g = graph();
        let x = g.input("x", DType::F32, &[4, 32]);
        let w = g.weight("w", DType::F32, &[32, 32], (world > 1).then_some((1, Split::Even { unit: 1 })));
        let y = g.op("y", "block", &[x, w], Attrs::new());
        g.output(y);
        let count = Count::default();
        let mut passes = Passes::default();
        passes.insert_after("fuse", count.clone()).unwrap();
        let options = BuildOptions::new(world, Target::cpu(2));
        let builder = Builder::with_passes(&g, &registry, &options, &passes).unwrap();
        assert!(verify::verify(&builder.all().unwrap()).is_ok());
        let counts = count.0.lock().unwrap();
        assert_eq!(counts.iter().map(|(name, n)| (name.as_str(), *n)).collect::<Vec<_>>(), wanted);
    }
}

#[test]
fn a_collective_is_lowered_and_proven() {
    let mut g = graph();
    let x = g.input("x", DType::F32, &[4, 32]);
    let a = g.op("a", "negate", &[x], Attrs::new());
    let b = g.op("b", "rotate", &[a], Attrs::new());
    let c = g.op("c", "negate", &[b], Attrs::new());
    g.output(c);
    for world in [2, 3] {
        let options = BuildOptions::new(world, Target::cpu(2));
        let graphs = Builder::new(&g, &registry(), &options).unwrap().all().unwrap();
        if let Err(violations) = verify::verify(&graphs) {
            panic!("{}", violations[0]);
        }
        for graph in &graphs {
            let copies = graph.tasks.iter().filter(|t| graph.type_name(t) == core_types::NVSHMEM_COPY);
            assert_eq!(copies.count(), 1);
        }
    }
}

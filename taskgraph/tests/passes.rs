//! The results of the passes on a graph.

#[allow(dead_code)]
mod builder_support;

use builder_support::*;
use serde_json::json;
use std::sync::{Arc, Mutex};
use taskgraph::op_graph::Op;
use taskgraph::passes::{Evaluate, FoldConstants};
use taskgraph::task_type::{ExpandedOp, Expansion, ExpansionOperand, OpError, OpView, Temporary, TensorType};
use taskgraph::*;

fn ops(graph: &OpGraph, world: u32) -> Vec<String> {
    let options = BuildOptions::new(world, Target::cpu(2));
    let builder = Builder::new(graph, &registry(), &options).unwrap();
    builder.op_graph().ops.iter().map(|op| op.name.clone()).collect()
}

#[test]
fn unused_operators_are_not_run() {
    let mut g = OpGraph::new("dead", capacity());
    let x = g.input("x", DType::F32, &[4, 32]);
    let a = g.op("a", "scale", &[x], Attrs::new());
    let dead = g.op("dead", "scale", &[a], Attrs::new());
    g.op("deader", "scale", &[dead], Attrs::new());
    assert_eq!(ops(&g, 1), ["a", "dead", "deader"], "a graph that wants nothing is run for its time");
    g.tensor_mut(a).output = true;
    assert_eq!(ops(&g, 1), ["a"]);
    check(&g, &BuildOptions::new(2, Target::cpu(2)));
}

#[test]
fn equal_operators_run_once() {
    let mut g = OpGraph::new("twins", capacity());
    let x = g.input("x", DType::F32, &[4, 32]);
    let a = g.op("a", "scale", &[x], Attrs::new());
    let b = g.op("b", "scale", &[x], Attrs::new());
    let a2 = g.op("a2", "scale", &[a], Attrs::new());
    let b2 = g.op("b2", "scale", &[b], Attrs::new());
    let sum = g.op("sum", "add", &[a2, b2], Attrs::new());
    g.tensor_mut(sum).output = true;
    assert_eq!(ops(&g, 1), ["a", "a2", "sum"]);
    // The name of the wanted tensor stays, whichever of the two has it.
    g.tensor_mut(b).output = true;
    let graphs = check(&g, &BuildOptions::new(2, Target::cpu(2)));
    assert!(graphs[0].tensors.iter().any(|t| t.name == "b" && t.output));
    assert_eq!(ops(&g, 1), ["a", "a2", "sum"]);
    g.tensor_mut(a).output = true;
    assert_eq!(ops(&g, 1), ["a", "b", "a2", "sum"], "two wanted names stay two");
}

/// A block that only composes others: `add(linear(x, w), x)`.
#[derive(Debug)]
struct Block;

impl TaskType for Block {
    fn name(&self) -> &'static str {
        "block"
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![op.inputs[0].ty.clone()])
    }
    fn compose(&self, op: &OpView<'_>) -> Result<Option<Expansion>, OpError> {
        let [x, w] = [0, 1].map(ExpansionOperand::Input);
        let (t, y) = (ExpansionOperand::Temporary(0), ExpansionOperand::Output(0));
        let part = |op_type, suffix, inputs: &[_], output| ExpandedOp {
            op_type,
            suffix,
            inputs: inputs.to_vec(),
            outputs: vec![output],
            attrs: Attrs::new(),
        };
        Ok(Some(Expansion {
            temporaries: vec![Temporary { suffix: ".product", ty: op.inputs[0].ty.clone() }],
            ops: vec![part("linear", ".linear", &[x, w], t), part("add", "", &[t, x], y)],
        }))
    }
}

/// The parts of a composition are sharded and fused like any other operators.
#[test]
fn compositions_expand_before_fusion() {
    let mut registry = registry();
    registry.register(Arc::new(Block));
    for (world, dim, wanted) in
        [(1, 0, vec!["linear_with_residual"]), (2, 1, vec!["slice", "linear", "allreduce"])]
    {
        let mut g = OpGraph::new("block", capacity());
        let x = g.input("x", DType::F32, &[4, 32]);
        let w = g.weight("w", DType::F32, &[32, 32], Some((dim, Split::Even { unit: 1 })));
        let y = g.op("y", "block", &[x, w], Attrs::new());
        g.tensor_mut(y).output = true;
        let options = BuildOptions::new(world, Target::cpu(2));
        let builder = Builder::new(&g, &registry, &options).unwrap();
        let types: Vec<&str> = builder.op_graph().ops.iter().map(|op| op.op_type.as_str()).collect();
        assert_eq!(types, wanted);
        assert!(verify::verify(&builder.all().unwrap()).is_ok());
    }
}

#[test]
fn unknown_attributes_are_refused_with_the_list() {
    let mut g = OpGraph::new("attributes", capacity());
    let x = g.input("x", DType::F32, &[4, 32]);
    let y = g.op("y", "grid", &[x], attrs(json!({"dims": [4, 4], "wirte": [1, 1]})));
    g.tensor_mut(y).output = true;
    let error = build_all(&g, &registry(), &BuildOptions::new(1, Target::cpu(1))).unwrap_err().to_string();
    assert!(
        error.contains("operator `y`: unknown attribute `wirte`; `grid` takes `dims`, `write`"),
        "{error}"
    );
}

#[derive(Debug, Default)]
struct Doubles(Mutex<Vec<String>>);

impl Evaluate for Doubles {
    fn evaluate(&self, graph: &OpGraph, op: &Op) -> Result<bool, OpError> {
        let name = graph.tensors[op.outputs[0] as usize].name.clone();
        self.0.lock().unwrap().push(name);
        Ok(op.op_type == "scale")
    }
}

#[test]
fn operators_of_constants_become_constants() {
    let mut g = OpGraph::new("fold", capacity());
    let x = g.input("x", DType::F32, &[4, 32]);
    let c = g.constant("c", DType::F32, &[4, 32]);
    let d = g.op("d", "scale", &[c], Attrs::new());
    let e = g.op("e", "scale", &[d], Attrs::new());
    let y = g.op("y", "add", &[x, e], Attrs::new());
    g.tensor_mut(y).output = true;
    let doubles = Arc::new(Doubles::default());
    let mut passes = Passes::default();
    passes.insert_before("shard", FoldConstants(doubles.clone())).unwrap();
    let options = BuildOptions::new(2, Target::cpu(2));
    let builder = Builder::with_passes(&g, &registry(), &options, &passes).unwrap();
    assert_eq!(builder.op_graph().ops.len(), 1);
    assert_eq!(*doubles.0.lock().unwrap(), ["d", "e"]);
    let graphs = builder.all().unwrap();
    assert!(verify::verify(&graphs).is_ok());
    let constants: Vec<&str> =
        graphs[0].tensors.iter().filter(|t| t.role == Role::Constant).map(|t| t.name.as_str()).collect();
    assert_eq!(constants, ["e"], "what only folded operators read is not loaded");
}

//! Proves that random valid graphs are accepted, and that the CPU target gives the results of a sequential reference in
//! f64, on 1 to 4 ranks, with both placements and each lowering, while one rank is stalled on purpose.
//!
//! A job has several independent graphs, because starting ranks takes longer than running them. `MPK_RANDOM_GRAPHS=2000` is
//! the long run, starting at `MPK_SEED`; it prints its counts.

use mpk_tests::random::Random;
use mpk_tests::reference::{self, values};
use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

fn even(dim: usize) -> Value {
    json!({"dim": dim, "kind": "even"})
}

/// Graphs of a job, and the expected value of each of their outputs.
struct Graphs {
    random: Random,
    rows: usize,
    tensors: Vec<Value>,
    ops: Vec<Value>,
    expected: BTreeMap<String, Vec<f64>>,
}

impl Graphs {
    fn tensor(&mut self, name: &str, kind: &str, dims: &[usize], shard: Value) -> Vec<f64> {
        let values = values(self.random.next(), dims.iter().product());
        self.tensors.push(json!({"name": name, "kind": kind, "dtype": "f32", "dims": dims,
                                 "data": {"values": values}, "shard": shard}));
        values
    }

    fn op(&mut self, op: &str, inputs: &[&str], output: &str, attrs: Value) {
        self.ops.push(json!({"op": op, "inputs": inputs, "outputs": [output], "attrs": attrs}));
    }

    /// A chain of layers, each of which may need its input sharded differently from the output of the layer before.
    fn add(&mut self, graph: usize) {
        let mut width = self.random.pick(&[5, 16, 24, 40]);
        let mut name = format!("g{graph}.x");
        let spread = self.random.pick(&[json!("replicated"), json!("replicated"), even(0), even(1)]);
        let mut x = self.tensor(&name, "input", &[self.rows, width], spread);
        for layer in 0..1 + self.random.below(3) {
            let at = |what: &str| format!("g{graph}.{what}{layer}");
            let weight = self.random.pick(&[json!("replicated"), even(0), even(1)]);
            let next = at("y");
            match self.random.below(4) {
                0 => {
                    let n = self.random.pick(&[7, 20, 48]);
                    let w = self.tensor(&at("w"), "weight", &[n, width], weight);
                    self.op("linear", &[&name, &at("w")], &next, json!({}));
                    x = reference::linear(&x, &w, width, None);
                    width = n;
                }
                1 => {
                    let w = self.tensor(&at("w"), "weight", &[width], json!("replicated"));
                    self.op("rmsnorm", &[&name, &at("w")], &next, json!({"eps": 0.01}));
                    x = reference::rmsnorm(&x, &w, 0.01);
                }
                2 => {
                    let inner = self.random.pick(&[6, 17, 32]);
                    let half = json!({"len": inner, "split": {"kind": "even"}});
                    let halves = json!({"dim": 0, "parts": [half, half]});
                    let gate_up = self.tensor(&at("w"), "weight", &[2 * inner, width], halves);
                    self.op("linear", &[&name, &at("w")], &at("h"), json!({}));
                    self.op("silu_mul", &[&at("h")], &next, json!({}));
                    x = reference::silu_mul(&reference::linear(&x, &gate_up, width, None), inner);
                    width = inner;
                }
                _ => {
                    let inner = self.random.pick(&[6, 17, 32]);
                    let up = self.tensor(&at("u"), "weight", &[inner, width], even(0));
                    let down = self.tensor(&at("w"), "weight", &[width, inner], even(1));
                    self.op("linear", &[&name, &at("u")], &at("h"), json!({}));
                    self.op("linear", &[&at("h"), &at("w")], &at("p"), json!({}));
                    self.op("add", &[&at("p"), &name], &next, json!({}));
                    let h = reference::linear(&x, &up, width, None);
                    let p = reference::linear(&h, &down, inner, None);
                    x = p.iter().zip(&x).map(|(a, b)| a + b).collect();
                }
            }
            name = next;
        }
        self.expected.insert(name, x);
    }
}

#[test]
fn random_graphs_give_what_a_sequential_reference_gives() {
    const TOGETHER: usize = 8;
    let wanted = number("MPK_RANDOM_GRAPHS", 48) as usize;
    let first = number("MPK_SEED", 1);
    let mut done = 0;
    for seed in first.. {
        if done >= wanted {
            break;
        }
        let mut random = Random(seed);
        let rows = 1 + random.below(6);
        let mut graphs =
            Graphs { random, rows, tensors: Vec::new(), ops: Vec::new(), expected: BTreeMap::new() };
        (0..TOGETHER).for_each(|graph| graphs.add(graph));
        let random = &mut graphs.random;
        let ranks = 1 + random.below(4) as u32;
        let placement = random.pick(&["static", "dynamic"]);
        let lowering = random.pick(&["copy-reduce", "one-shot", "two-shot"]);
        let workers = (1 + random.below(3)).to_string();
        // Each graph has at least one operator, so there are that many.
        let (rank, op, milliseconds) =
            (random.below(ranks as usize), random.below(TOGETHER), 1 + random.below(30));
        let stall = format!("{rank}:{op}:{milliseconds}");
        let outputs: Vec<&String> = graphs.expected.keys().collect();
        let graph = json!({"rows": rows, "tensors": graphs.tensors, "ops": graphs.ops, "outputs": outputs});
        let model = ModelFile::new(json!({"schema": "mpk-model/1", "graph": graph}));
        let how = ["--placement", placement, "--allreduce", lowering, "--workers", &workers];
        let what = format!("seed {seed}, {ranks} ranks, {how:?}, stalled by {stall}");
        println!("{what}");
        let run = Job::new(ranks).arg(model.path()).args(how).args(["--debug-stall", &stall]).run_json();
        for (name, expected) in &graphs.expected {
            let found = &run.outputs[name].values;
            assert_eq!(found.len(), expected.len(), "{what}: {name}");
            let largest = expected.iter().fold(1.0, |m: f64, v| m.max(v.abs()));
            for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert!(
                    (found - expected).abs() <= 1e-4 * largest,
                    "{what}: element {i} of {name} is {found}, expected {expected}"
                );
            }
        }
        done += TOGETHER;
    }
    println!("{done} random graphs: all accepted, each as the sequential reference");
}

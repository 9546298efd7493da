//! The verifier on the builder's graphs.

#[allow(dead_code)]
mod builder_support;

use builder_support::{attrs, decoder, registry};
use serde_json::json;
use std::time::Instant;
use taskgraph::json::{from_json, to_json};
use taskgraph::target::device;
use taskgraph::task_graph::{Task, core_types};
use taskgraph::verify::{Violation, ViolationKind, verify, verify_succession};
use taskgraph::*;

fn build(layers: usize, options: &BuildOptions) -> Vec<TaskGraph> {
    let graph = decoder(layers, 64, 40, 50, "linear", options.world);
    Builder::new(&graph, &registry(), options).unwrap().all().unwrap()
}

fn settings() -> Vec<BuildOptions> {
    let mut all = Vec::new();
    for world in [1, 2, 3, 4] {
        for placement in [Placement::Static, Placement::Dynamic] {
            for allreduce in [Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot] {
                for workers in [1, 3] {
                    let options = BuildOptions::new(world, Target::cpu(workers));
                    all.push(BuildOptions { placement, allreduce, ..options });
                }
            }
        }
    }
    for nodes in topologies() {
        for placement in [Placement::Static, Placement::Dynamic] {
            for workers in [1, 3] {
                let options = BuildOptions::new(nodes.len() as u32, Target::cpu(workers));
                let allreduce = Allreduce::Hierarchical;
                all.push(BuildOptions { placement, allreduce, nodes: nodes.clone(), ..options });
            }
        }
    }
    all
}

/// Possible node layouts of ranks: even and uneven nodes, ranks dealt round robin, and the plain cases
/// that need no hierarchy.
fn topologies() -> Vec<Vec<u32>> {
    let all: [&[u32]; 8] = [
        &[0, 0],
        &[0, 1],
        &[0, 0, 1],
        &[0, 1, 0, 1],
        &[0, 0, 1, 1],
        &[0, 0, 1, 1, 2, 2],
        &[0, 0, 0, 0, 1, 1, 1, 1],
        &[0, 1, 1, 1, 2],
    ];
    all.map(<[u32]>::to_vec).to_vec()
}

#[test]
fn built_graphs_are_safe_and_read_back_equal() {
    for options in settings() {
        let graphs = build(2, &options);
        if let Err(found) = verify(&graphs) {
            panic!("{options:?}: {:?} {}", found[0].kind, found[0]);
        }
        for graph in &graphs {
            let back = from_json(to_json(graph).as_bytes()).unwrap();
            assert!(&back == graph, "{options:?}");
        }
    }
}

#[test]
fn built_graphs_may_follow_each_other() {
    for options in settings() {
        let mut other = build(1, &options);
        other.iter_mut().for_each(|g| g.name = "other".into());
        if let Err(found) = verify_succession(&[build(2, &options), other]) {
            panic!("{options:?}: {}", found[0]);
        }
    }
}

/// Layers that share receive buffers without regard to the peers are refused.
#[test]
fn unprotected_reuse_is_refused() {
    for world in [2, 3] {
        let options = BuildOptions {
            allreduce: Allreduce::CopyReduce,
            protected: false,
            ..BuildOptions::new(world, Target::cpu(3))
        };
        let found = verify(&build(4, &options)).expect_err("shared without order");
        let race = |kind: &ViolationKind| format!("{kind:?}").to_lowercase().contains("unordered");
        assert!(found.iter().all(|v| race(&v.kind)), "{:?} {}", found[0].kind, found[0]);
    }
}

/// Most dropped dependencies are refused, and every wrong trigger is.
#[test]
fn built_graphs_lose_nothing_unnoticed() {
    let mut noticed = 0;
    let mut unnoticed = 0;
    // With one worker, the order of its list makes most dependencies superfluous.
    for options in settings().into_iter().filter(|o| o.target.workers > 1) {
        let graphs = build(2, &options);
        for (rank, index) in (0..graphs.len()).flat_map(|r| (2..graphs[r].tasks.len()).map(move |t| (r, t))) {
            if (index + rank) % 5 != 0 {
                continue;
            }
            let mut broken = graphs.clone();
            broken[rank].tasks[index].trigger = Some(EventId::local(rank as u16, 2));
            if broken[rank].tasks[index].trigger != graphs[rank].tasks[index].trigger {
                let found = verify(&broken).expect_err("another trigger");
                assert!(
                    matches!(found[0].kind, ViolationKind::Triggers | ViolationKind::Structure),
                    "{}",
                    found[0]
                );
            }
            let mut broken = graphs.clone();
            let task = &mut broken[rank].tasks[index];
            if task.dependencies.as_slice() != [EventId::BEGIN] && !task.dependencies.is_empty() {
                task.dependencies = smallvec::smallvec![EventId::BEGIN];
                match verify(&broken) {
                    Ok(_) => unnoticed += 1,
                    Err(_) => noticed += 1,
                }
            }
        }
    }
    // A worker's list or another dependency may give the same order.
    assert!(noticed > 5 * unnoticed && noticed > 200, "{noticed} {unnoticed}");
}

/// Expects a violation of the structure that contains these words.
#[track_caller]
fn refused(graphs: &[TaskGraph], words: &str) {
    let found = verify(graphs).expect_err("accepted though broken");
    let fits = |v: &Violation| v.kind == ViolationKind::Structure && v.message.contains(words);
    assert!(found.iter().any(fits), "no '{words}' in: {}", found[0]);
}

/// Index of the first such task.
fn find(graph: &TaskGraph, fits: impl Fn(&Task) -> bool) -> usize {
    graph.tasks.iter().position(fits).expect("a task of this kind")
}

/// Operators on `x` [16, 16], each on the result of the one before, for one rank and one worker. The last result is an output.
fn in_a_row(op_type: &str, names: &[&str]) -> Vec<TaskGraph> {
    let mut g = OpGraph::new("in a row", Capacity { rows: 16, samples: 1, active: 1 });
    let mut x = g.input("x", DType::F32, &[16, 16]);
    for name in names {
        let mut inputs = vec![x];
        if op_type == "linear" {
            inputs.push(g.weight(&format!("{name}.weight"), DType::F32, &[16, 16], None));
        }
        x = g.op(name, op_type, &inputs, attrs(json!({})));
    }
    g.tensor_mut(x).output = true;
    let graphs = build_all(&g, &registry(), &BuildOptions::new(1, Target::cpu(1))).unwrap();
    if let Err(found) = verify(&graphs) {
        panic!("refused before it was broken: {}", found[0]);
    }
    graphs
}

/// A product reads all of its input for each element, so no part of its result may be where the input is.
#[test]
fn a_task_may_not_write_a_tensor_that_overlaps_its_input() {
    let graphs = in_a_row("linear", &["h", "i", "y"]);
    let tensor = |name: &str| graphs[0].tensors.iter().position(|t| t.name == name).unwrap();
    let (h, i) = (tensor("h"), tensor("i"));
    for shift in [0, 16, 512, 1008] {
        let mut broken = graphs.clone();
        let mut overlay = graphs[0].tensors[h].overlay.unwrap();
        overlay.offset += shift;
        broken[0].tensors[i].overlay = Some(overlay);
        refused(&broken, "writes 'i', which shares memory with 'h'");
    }
}

/// In place means the same view. One column further, each element but the last of a row is overwritten before it is read.
#[test]
fn a_task_may_not_write_other_elements_than_it_reads_in_place() {
    let graphs = in_a_row("scale", &["a", "b", "y"]);
    let graph = &graphs[0];
    let in_place = find(graph, |t| {
        let written = graph.outputs(t);
        graph.inputs(t).iter().any(|read| written.iter().any(|w| w.tensor == read.tensor))
    });
    let at = graph.tasks[in_place].first_operand as usize;
    let mut broken = graphs.clone();
    let read = &mut broken[0].operands[at];
    read.offset += 4;
    read.dims[1] -= 1;
    refused(&broken, "they are not the same view");
}

#[test]
fn copies_have_the_parameter_that_their_code_reads() {
    let options = BuildOptions { allreduce: Allreduce::CopyReduce, ..BuildOptions::new(2, Target::cpu(1)) };
    let graphs = build(1, &options);
    assert!(verify(&graphs).is_ok());
    let of_type = |name: &str| find(&graphs[0], |t| graphs[0].type_name(t) == name);
    let copy = of_type(core_types::NVSHMEM_COPY);
    let mut broken = graphs.clone();
    broken[0].tasks[copy].variant = graphs[0].tasks[of_type("linear")].variant;
    refused(&broken, "which is not of its type");
    let variant = usize::from(graphs[0].tasks[copy].variant);
    let changes: [(&[u32], &str); 4] = [
        (&[], "a copy has exactly one"),
        (&[0, 0], "a copy has exactly one"),
        (&[77], "counts rows of kind 77"),
        (&[1], "counts rows of kind 1"),
    ];
    for (params, words) in changes {
        // On one rank, on the other one, and on both, so that they are alike.
        for ranks in [0..1, 1..2, 0..2] {
            let mut broken = graphs.clone();
            for graph in &mut broken[ranks] {
                assert_eq!(graph.variants[variant].params, [0], "token rows");
                graph.variants[variant].params = params.to_vec();
            }
            refused(&broken, words);
        }
    }
}

#[test]
fn sums_have_the_operands_that_their_code_reads() {
    for allreduce in [Allreduce::CopyReduce, Allreduce::OneShot] {
        let options = BuildOptions { allreduce, ..BuildOptions::new(2, Target::cpu(1)) };
        let graphs = build(1, &options);
        assert!(verify(&graphs).is_ok());
        let sum = find(&graphs[0], |t| graphs[0].type_name(t) == core_types::REDUCE);
        let task = &graphs[0].tasks[sum];
        let (inputs, variant) = (usize::from(task.num_inputs), usize::from(task.variant));
        // The last inputs are what was received and the residual.
        let output = task.first_operand as usize + inputs;
        let (received, residual) = (output - 2, output - 1);
        let changed = |words: &str, change: &dyn Fn(&mut TaskGraph)| {
            let mut broken = graphs.clone();
            change(&mut broken[0]);
            refused(&broken, words);
        };
        changed("0 outputs", &|g: &mut TaskGraph| g.tasks[sum].num_outputs = 0);
        changed(&format!("has {} inputs, 1 outputs", inputs - 1), &|g: &mut TaskGraph| {
            g.operands[residual] = g.operands[output];
            g.tasks[sum].num_inputs -= 1;
        });
        changed("it must read", &|g: &mut TaskGraph| g.operands[output].dims[0] = 1);
        changed("it must read", &|g: &mut TaskGraph| g.operands[received].dims[0] = 1);
        changed("it must read", &|g: &mut TaskGraph| g.operands[residual].dims[1] -= 1);
        let wrong: [(usize, u32, &str); 5] = [
            (1, 2, "the second must be less than the first"),
            (2, 77, "counts rows of kind 77"),
            (3, 8, "the fourth at most 7"),
            (3, task_flags(&graphs[0], sum) ^ 2, "exactly"),
            (3, task_flags(&graphs[0], sum) | 4, "at least 2 outputs"),
        ];
        for (word, value, words) in wrong {
            changed(words, &|g: &mut TaskGraph| g.variants[variant].params[word] = value);
        }
        changed("a sum has at least four", &|g: &mut TaskGraph| g.variants[variant].params.truncate(3));
    }
}

/// The last parameter of a sum.
fn task_flags(graph: &TaskGraph, task: usize) -> u32 {
    graph.variants[usize::from(graph.tasks[task].variant)].params[3]
}

/// `cargo test --release -p mpk-taskgraph --test verify_builder -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn time_at_size() {
    let target = Target::cuda(device("h200").unwrap());
    for allreduce in [Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot] {
        for (layers, width, inner) in
            [(28, 1024, 3072), (36, 4096, 12288), (64, 5120, 25600), (80, 8192, 28672)]
        {
            let options = BuildOptions { allreduce, ..BuildOptions::new(8, target.clone()) };
            let graph = decoder(layers, width, inner, 151_936, "linear", 8);
            let start = Instant::now();
            let graphs = Builder::new(&graph, &registry(), &options).unwrap().all().unwrap();
            let built = start.elapsed();
            let start = Instant::now();
            match verify(&graphs) {
                Ok(report) => println!(
                    "{allreduce:?} {layers} layers: built in {built:?}, verified in {:?}: {report}, {} searches",
                    start.elapsed(),
                    report.searches
                ),
                Err(found) => println!("{allreduce:?} {layers} layers: {:?} {}", start.elapsed(), found[0]),
            }
            let start = Instant::now();
            let text = to_json(&graphs[0]);
            let written = start.elapsed();
            let start = Instant::now();
            assert!(from_json(text.as_bytes()).unwrap() == graphs[0]);
            println!(
                "  {} MB written in {written:?}, read in {:?}; digest in {:?}",
                text.len() >> 20,
                start.elapsed(),
                {
                    let start = Instant::now();
                    std::hint::black_box(taskgraph::digest::digest(&graphs[0]));
                    start.elapsed()
                }
            );
        }
    }
}

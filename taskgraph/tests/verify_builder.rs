//! The verifier on the builder's graphs.

#[allow(dead_code)]
mod builder_support;

use builder_support::{decoder, registry};
use std::time::Instant;
use taskgraph::json::{from_json, to_json};
use taskgraph::target::device;
use taskgraph::verify::{ViolationKind, verify, verify_succession};
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

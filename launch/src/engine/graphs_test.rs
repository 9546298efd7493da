//! Tests of the memory plan for models of real shape, made from their configuration alone.

use super::*;
use crate::model::families::{GraphOptions, op_graphs, parse_config};
use crate::model::hf_config::WeightDtype;
use crate::model::model_json::{AllreduceDtype, Runtime, Sizes};
use crate::model::shapes;
use taskgraph::Target;
use taskgraph::stats::stats;
use taskgraph::target::device;
use taskgraph::verify::ranks_are_alike;

struct Run {
    shape: &'static str,
    ranks: u32,
    allreduce: Allreduce,
    placement: Placement,
    chunk: u32,
    max_seq_len: u32,
    allreduce_dtype: AllreduceDtype,
}

impl Run {
    fn runtime(&self) -> Runtime {
        Runtime { allreduce_dtype: self.allreduce_dtype, ..Runtime::default() }
    }
}

/// The op graphs of one slot, on H200s, and how they are built.
fn graphs(run: &Run, sampling: bool) -> (Vec<OpGraph>, BuildOptions) {
    let json = shapes::config(run.shape).unwrap();
    let config = parse_config(run.shape, "", json.as_object().unwrap(), || Ok(WeightDtype::Bf16)).unwrap();
    let target = Target::cuda(device("h200").unwrap());
    let pages = run.max_seq_len / 64;
    let sizes = Sizes {
        max_batch: 1,
        max_seq_len: run.max_seq_len,
        page_size: 64,
        pages_per_slot: pages,
        num_pages: pages,
        prefill_chunk: run.chunk,
    };
    let mut options = GraphOptions::new(&config, &run.runtime(), 0, run.ranks, &target);
    options.sampling = sampling;
    let graphs = op_graphs(&config, &sizes, &options);
    let options = BuildOptions {
        allreduce: run.allreduce,
        placement: run.placement,
        ..BuildOptions::new(run.ranks, target)
    };
    (graphs, options)
}

/// The prefill graph.
fn prefill(run: &Run) -> Builder {
    let (mut graphs, options) = graphs(run, false);
    let prefill = graphs.pop().unwrap();
    assert_eq!(prefill.capacity.rows, run.chunk);
    Builder::new(&prefill, &kernels_cu::registry::registry(), &options).unwrap()
}

/// Activations of that graph in MiB: in device memory, and in the symmetric heap.
fn mebibytes(run: &Run) -> (u64, u64) {
    let found = stats(&[prefill(run).rank(0).unwrap()]);
    let up = |bytes: u64| bytes.div_ceil(1 << 20);
    println!("{} {} {:?}: {found}", run.shape, run.ranks, run.allreduce);
    (up(found.device_bytes), up(found.symmetric_bytes))
}

const BASE: Run = Run {
    shape: "qwen3-8b",
    ranks: 4,
    allreduce: Allreduce::TwoShot,
    placement: Placement::Static,
    chunk: 256,
    max_seq_len: 16384,
    allreduce_dtype: AllreduceDtype::F32,
};

#[test]
fn layers_share_the_memory_of_a_two_shot_prefill() {
    for placement in [Placement::Static, Placement::Dynamic] {
        let (device, symmetric) = mebibytes(&Run { placement, ..BASE });
        assert!(device <= 60 && symmetric <= 40, "{placement:?}: {device} MiB, symmetric {symmetric} MiB");
    }
}

#[test]
fn layers_share_flagged_words() {
    for placement in [Placement::Static, Placement::Dynamic] {
        let (_, symmetric) = mebibytes(&Run { allreduce: Allreduce::OneShot, placement, ..BASE });
        assert!(symmetric <= 200, "{placement:?}: {symmetric} MiB");
    }
    let llama = Run { shape: "llama3-70b", allreduce: Allreduce::OneShot, ..BASE };
    let (_, symmetric) = mebibytes(&llama);
    assert!(symmetric <= 600, "{symmetric} MiB");
}

#[test]
fn a_prefill_of_2048_rows_has_room() {
    let long = Run { chunk: 2048, max_seq_len: 2048, ..BASE };
    let (alone, _) = mebibytes(&Run { ranks: 1, allreduce: Allreduce::Auto, ..long });
    let (of_four, _) = mebibytes(&long);
    assert!(alone <= 400 && of_four <= 200, "{alone} MiB on one rank, {of_four} MiB on four");
}

/// Prompts on GPUs send their summands as bf16, which takes half the memory.
#[test]
fn rounded_summands_take_half_the_memory() {
    let long = Run { ranks: 2, chunk: 2048, max_seq_len: 2048, ..BASE };
    let (_, of_f32) = mebibytes(&long);
    for allreduce_dtype in [AllreduceDtype::Auto, AllreduceDtype::Activation] {
        let (_, rounded) = mebibytes(&Run { allreduce_dtype, ..long });
        assert!(rounded < of_f32, "{allreduce_dtype:?}: {rounded} MiB instead of {of_f32}");
    }
}

/// Several tasks share the k of some of these products. Their sums reach the next layer through several links.
#[test]
fn layers_share_the_parts_of_products() {
    for (ranks, chunk) in [(1, 128), (1, 256), (4, 256)] {
        let run = Run { ranks, chunk, allreduce: Allreduce::Auto, max_seq_len: 2048, ..BASE };
        let (device, _) = mebibytes(&run);
        assert!(device <= 40, "{ranks} ranks, {chunk} rows: {device} MiB");
    }
}

/// Because ranks are alike, only one of them is verified. This makes `--check` fast.
#[test]
fn ranks_are_alike_where_sums_are_dealt_to_them() {
    for placement in [Placement::Static, Placement::Dynamic] {
        let graphs = prefill(&Run { placement, ..BASE }).all().unwrap();
        assert!(ranks_are_alike(&graphs), "{placement:?}");
        // Rank r sums up the r-th part of the columns.
        let first = |g: &TaskGraph| {
            let sum = g.tasks.iter().find(|t| g.type_name(t) == "reduce").unwrap();
            g.outputs(sum)[0].region.lo[1]
        };
        assert_eq!(graphs.iter().map(first).collect::<Vec<_>>(), [0, 1024, 2048, 3072]);
    }
}

/// What several ranks send early, workers would otherwise wait for at the end.
#[test]
fn lists_are_merged_and_sent_before_the_second_pass_of_sampling() {
    let run = Run { allreduce: Allreduce::Auto, max_seq_len: 2048, ..BASE };
    let (graphs, options) = graphs(&run, true);
    let built = Builder::new(&graphs[0], &kernels_cu::registry::registry(), &options).unwrap().all().unwrap();
    assert!(ranks_are_alike(&built));
    let mut steps: Vec<&str> = built[0].tasks.iter().map(|task| built[0].op_name(task)).collect();
    steps.retain(|name| name.starts_with("sample_"));
    steps.dedup();
    let wanted = [
        "sample_partial",
        "sample_partial.allgather",
        "sample_merge",
        "sample_merge.allgather",
        "sample_weigh",
        "sample_weigh.allgather",
        "sample_reduce",
    ];
    assert_eq!(steps, wanted);
}

/// With many rows, ranks own blocks of rows. The first sum of rank r is of its first block.
#[test]
fn ranks_are_alike_where_they_own_rows() {
    for (ranks, chunk) in [(2, 512), (2, 2048), (4, 1024)] {
        for placement in [Placement::Static, Placement::Dynamic] {
            let run = Run { ranks, chunk, placement, max_seq_len: 2048, ..BASE };
            let graphs = prefill(&run).all().unwrap();
            assert!(ranks_are_alike(&graphs), "{ranks} ranks, {chunk} rows, {placement:?}");
            for (rank, graph) in (0..).zip(&graphs) {
                let sum = graph.tasks.iter().find(|t| graph.type_name(t) == "reduce").unwrap();
                assert_eq!(graph.outputs(sum)[0].region.lo[..2], [256 * rank, 0]);
            }
        }
    }
}

/// The graphs of a model with one layer on two ranks.
fn one_layer(max_seq_len: u32) -> (Vec<OpGraph>, GraphBuild) {
    let mut json = shapes::config("qwen3-0.6b").unwrap();
    json["num_hidden_layers"] = 1.into();
    let config = parse_config("one-layer", "", json.as_object().unwrap(), || Ok(WeightDtype::Bf16)).unwrap();
    let target = Target::cpu(2);
    let pages = max_seq_len / 64;
    let sizes = Sizes {
        max_batch: 1,
        max_seq_len,
        page_size: 64,
        pages_per_slot: pages,
        num_pages: pages,
        prefill_chunk: 16,
    };
    let options = GraphOptions::new(&config, &Runtime::default(), 0, 2, &target);
    let build = GraphBuild { decode: BuildOptions::new(2, target), prefill: Placement::Static, places: None };
    (op_graphs(&config, &sizes, &options), build)
}

/// If the proofs of single classes do not show that graphs may follow each other, the graphs are built again, and these decide.
#[test]
fn graphs_of_all_ranks_decide_what_the_summaries_do_not_show() {
    let registry = kernels_cu::registry::registry();
    let (good, options) = one_layer(1024);
    assert!(good.len() > 1);
    // The KV cache of the second graph is smaller than that of the first.
    let bad = vec![good[0].clone(), one_layer(512).0.pop().unwrap()];
    let proofs = |ops: &[OpGraph]| {
        let spares = Spares::default();
        let make = |builder: &Builder| builder.class(&spares);
        let found = build_then(ops, &registry, &options, make, |class| proven(class, &spares)).unwrap().0;
        assert!(found.iter().all(Option::is_some), "each graph is safe by itself");
        found
    };
    let decided = |proofs, ops: &[OpGraph]| {
        verify_proven(proofs, ops, &registry, &options).map_err(|error| error.to_string())
    };
    assert_eq!(decided(proofs(&good), &good), Ok(()));
    assert_eq!(decided(proofs(&bad), &good), Ok(()));
    assert_eq!(decided(vec![None, None], &good), Ok(()));
    let error = decided(proofs(&bad), &bad).unwrap_err();
    assert!(error.contains("persists across graphs"), "{error}");
    assert_eq!(decided(vec![None, None], &bad), Err(error));
}

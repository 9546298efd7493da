//! Attention and argmax through the graph builder and the verifier.

use super::{kv_dims, kv_region_dims, kv_sharding, qkv_sharding};
use crate::registry::registry;
use crate::tasks::argmax_partial::tiles;
use serde_json::json;
use taskgraph::op_graph::{Attrs, Tensor};
use taskgraph::verify::verify;
use taskgraph::{
    BuildOptions, Capacity, DType, OpGraph, Placement, Role, Rows, Sharding, Split, Target, TensorId,
    build_all,
};

fn attrs(value: serde_json::Value) -> Attrs {
    value.as_object().cloned().unwrap_or_default()
}

fn tensor(name: &str, dtype: DType, dims: &[u64], rows: Rows, role: Role, sharding: Sharding) -> Tensor {
    Tensor { name: name.to_string(), dtype, dims: dims.to_vec(), rows, role, sharding, output: false }
}

/// The projections are represented by inputs that are already split.
fn graph(world: u32, target: &Target, active: u32, rows: u32) -> OpGraph {
    graph_of(world, target, active, rows, 16, json!({}))
}

/// With more attributes of attention.
pub(super) fn graph_of(
    world: u32,
    target: &Target,
    active: u32,
    rows: u32,
    head_dim: u64,
    more: serde_json::Value,
) -> OpGraph {
    let (heads, kv_heads, vocabulary, max_batch) = (8u64, 2u64, 331u64, u64::from(active).max(8));
    let mut graph = OpGraph::new("test", Capacity { rows, samples: active, active });
    let add = |graph: &mut OpGraph, name, dtype, dims: &[u64], rows, role, sharding| -> TensorId {
        graph.add_tensor(tensor(name, dtype, dims, rows, role, sharding))
    };
    let persistent = |region_dims| Role::Persistent { region_dims };
    let qkv = add(
        &mut graph,
        "qkv",
        DType::Bf16,
        &[u64::from(rows), (heads + 2 * kv_heads) * head_dim],
        Rows::Tokens,
        Role::Input,
        qkv_sharding(1, heads, kv_heads, head_dim),
    );
    let cache = add(
        &mut graph,
        "kv.0",
        DType::Bf16,
        &kv_dims(64, kv_heads, 16, head_dim),
        Rows::Fixed,
        persistent(Some(kv_region_dims(active, kv_heads))),
        kv_sharding(heads, kv_heads),
    );
    let rope = add(
        &mut graph,
        "rope",
        DType::F32,
        &[256, head_dim],
        Rows::Fixed,
        Role::Constant,
        Sharding::Replicated,
    );
    let logits = add(
        &mut graph,
        "logits",
        DType::F32,
        &[u64::from(active), vocabulary],
        Rows::Samples,
        Role::Input,
        Sharding::split(1, vocabulary, Split::Even { unit: 16 }),
    );
    let out = add(&mut graph, "out", DType::Bf16, &[], Rows::Tokens, Role::Activation, Sharding::Replicated);
    let batch = |graph: &mut OpGraph, name, dtype, dims: &[u64]| {
        add(graph, name, dtype, dims, Rows::Fixed, persistent(None), Sharding::Replicated)
    };
    let next = batch(&mut graph, "batch.next_token", DType::I32, &[max_batch]);
    let top_token = batch(&mut graph, "batch.top_token", DType::I32, &[max_batch, 5]);
    let top_logprob = batch(&mut graph, "batch.top_logprob", DType::F32, &[max_batch, 5]);
    let of_attention = json!({"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim});
    let mut of_attention = attrs(of_attention);
    of_attention.extend(attrs(more));
    graph.op_into("attention", "attention", &[qkv, cache, rope], &[out, cache], of_attention);
    graph.tensor_mut(out).output = world == 1;
    let of_partial = json!({"top_k": 5, "slices": world, "tiles": tiles(vocabulary, world, target)});
    let partials = graph.op("partials", "argmax_partial", &[logits], attrs(of_partial));
    let of_reduce = attrs(json!({"top_k": 5}));
    graph.op_into("argmax", "argmax_reduce", &[partials], &[next, top_token, top_logprob], of_reduce);
    graph
}

#[test]
fn graphs_with_attention_and_argmax_pass_the_verifier() {
    for world in [1, 2, 4, 8] {
        for workers in [1, 2, 7, 132] {
            // What dynamic placement adds on several ranks does not depend on these operators.
            let placements = [Placement::Static, Placement::Dynamic];
            for placement in placements.into_iter().take(if world == 1 { 2 } else { 1 }) {
                for (active, rows) in [(1, 1), (4, 4), (4, 48)] {
                    let target = Target::cpu(workers);
                    let graph = graph(world, &target, active, rows);
                    let mut options = BuildOptions::new(world, target);
                    options.placement = placement;
                    let what = format!("{world} ranks, {workers} workers, {placement:?}, {active} slots");
                    let graphs = match build_all(&graph, &registry(), &options) {
                        Ok(graphs) => graphs,
                        Err(error) => panic!("{what}: {error}"),
                    };
                    if let Err(violations) = verify(&graphs) {
                        panic!("{what}: {}", violations[0]);
                    }
                    if let Err(error) = crate::gpu::task_codes(&graphs) {
                        panic!("{what}: {error}");
                    }
                    let merges =
                        graphs[0].tasks.iter().filter(|t| graphs[0].type_name(t) == "attention_merge");
                    let split = workers >= 2 * active * if world == 1 { 2 } else { 1 };
                    assert_eq!(merges.count() > 0, split, "{what}");
                }
            }
        }
    }
}

/// Attention, then an rmsnorm that does not fuse, for two slots.
fn attention_then_norm() -> OpGraph {
    let target = Target::cpu(1);
    let mut g = graph(1, &target, 2, 8);
    let weight = g.weight("norm.weight", DType::Bf16, &[128], None);
    let attention = g.ops[0].outputs[0];
    g.tensor_mut(TensorId(attention)).output = false;
    let norm = g.op("norm", "rmsnorm", &[TensorId(attention), weight], Attrs::new());
    g.tensor_mut(norm).output = true;
    g
}

#[test]
fn a_reader_of_rows_waits_for_every_slots_rows() {
    // All rows may belong to one slot: a row block of the norm needs every slot's attention.
    for workers in [1, 4] {
        let target = Target::cpu(workers);
        let options = BuildOptions::new(1, target);
        let mut graphs = build_all(&attention_then_norm(), &registry(), &options).unwrap();
        verify(&graphs).unwrap();
        let of = |name: &str| -> Vec<usize> {
            (0..graphs[0].tasks.len())
                .filter(|&t| graphs[0].op_name(&graphs[0].tasks[t]).starts_with(name))
                .collect()
        };
        let last = if of("attention.merge").is_empty() { "attention" } else { "attention.merge" };
        let (writers, readers) = (of(last), of("norm"));
        assert!(writers.len() >= 4 && !readers.is_empty());
        for &reader in &readers {
            let [event] = graphs[0].tasks[reader].dependencies[..] else { panic!("one event") };
            let triggers = |w: &&usize| graphs[0].tasks[**w].trigger.map(|e| e.index()) == Some(event);
            assert_eq!(writers.iter().filter(triggers).count(), writers.len());
        }
        // A graph in which one slot's task does not count is refused.
        let event = graphs[0].tasks[readers[0]].dependencies[0] as usize;
        graphs[0].tasks[writers[0]].trigger = Some(taskgraph::EventId::local(0, 2));
        graphs[0].events[event].num_triggers -= 1;
        graphs[0].events[2].num_triggers += 1;
        assert!(verify(&graphs).is_err() || workers == 1, "a list of one worker orders it all the same");
    }
}

#[test]
fn a_cache_that_is_declared_as_another_tensor_is_refused() {
    let mut g = graph(1, &Target::cpu(1), 2, 8);
    let cache = g.ops[0].outputs[1];
    let mut other = g.tensor(TensorId(cache)).clone();
    other.name = "cache2".into();
    let other = g.add_tensor(other);
    g.ops[0].outputs[1] = other.0;
    let error = build_all(&g, &registry(), &BuildOptions::new(1, Target::cpu(1))).unwrap_err().to_string();
    assert!(
        error.contains("`attention`") && error.contains("in place") && error.contains("`cache2`"),
        "{error}"
    );
}

/// Graphs of many rows use the steps for many rows: on Hopper by default, elsewhere on request.
#[test]
fn graphs_of_many_rows_pass_the_verifier() {
    let device = |name| Target::cuda(taskgraph::target::device(name).unwrap());
    for world in [1, 2, 4] {
        for placement in [Placement::Static, Placement::Dynamic] {
            for (target, rows, head_dim, more, prefills) in [
                (device("h200"), 256, 64, json!({}), true),
                (device("h200"), 300, 128, json!({}), true),
                (device("h200"), 300, 96, json!({}), false),
                (device("h200"), 300, 64, json!({"prefill": false}), false),
                (device("h200"), 4, 64, json!({}), false),
                (device("a100"), 256, 64, json!({}), false),
                (device("b200"), 256, 64, json!({}), false),
                (Target::cpu(5), 256, 64, json!({}), false),
                (Target::cpu(5), 48, 16, json!({"prefill": true}), true),
            ] {
                let graph = graph_of(world, &target, 4, rows, head_dim, more);
                let mut options = BuildOptions::new(world, target.clone());
                options.placement = placement;
                let what = format!("{world} ranks, {rows} rows of {head_dim}, {placement:?}, {target:?}");
                let graphs =
                    build_all(&graph, &registry(), &options).unwrap_or_else(|e| panic!("{what}: {e}"));
                if let Err(violations) = verify(&graphs) {
                    panic!("{what}: {}", violations[0]);
                }
                if target.wide
                    && let Err(error) = crate::gpu::task_codes(&graphs)
                {
                    panic!("{what}: {error}");
                }
                let of = |name| graphs[0].tasks.iter().filter(|t| graphs[0].type_name(t) == name).count();
                assert_eq!(of("attention_append") > 0, prefills, "{what}");
                let tasks = if prefills { (target.workers as usize).min(rows as usize) } else { 0 };
                assert_eq!(of("attention_prefill"), tasks, "{what}");
                assert_eq!(of("attention_prefill_merge"), tasks, "{what}");
            }
        }
    }
}

/// In graphs with as many slots as the knob says, keys and values come through the ring; the tasks are the same.
#[test]
fn the_knob_decides_which_graphs_are_streamed() {
    for (least, slots, streamed) in
        [(None, 1, true), (Some(4), 4, true), (Some(5), 4, false), (Some(1), 1, true)]
    {
        let mut target = Target::cuda(taskgraph::target::device("h200").unwrap());
        let plain = BuildOptions::new(1, target.clone());
        if let Some(least) = least {
            target.tuning.set("attention.streamed_slots", least);
        }
        let graph = graph_of(1, &target, slots, slots, 64, json!({}));
        let graphs = build_all(&graph, &registry(), &BuildOptions::new(1, target)).unwrap();
        verify(&graphs).unwrap();
        let codes = crate::gpu::task_codes(&graphs).unwrap();
        let of_attention = codes.expressions.iter().find(|e| e.task_type == "attention").unwrap();
        // The template's argument after `partial`, which has a default.
        assert_eq!(
            of_attention.code.matches(", ").count() == 5,
            streamed,
            "{least:?}: {}",
            of_attention.code
        );
        let without = build_all(&graph, &registry(), &plain).unwrap();
        assert_eq!(graphs[0].tasks, without[0].tasks);
    }
}

#[test]
fn prefill_is_refused_where_it_is_impossible() {
    let target = Target::cuda(taskgraph::target::device("a100").unwrap());
    let graph = graph_of(1, &target, 4, 256, 64, json!({"prefill": true}));
    let error = build_all(&graph, &registry(), &BuildOptions::new(1, target)).unwrap_err().to_string();
    assert!(error.contains("`prefill`") && error.contains("tensor cores"), "{error}");
}

/// The GPU code copies blocks of 8 positions. With smaller pages, prompts have the attention of decode steps.
#[test]
fn small_pages_have_no_prefill() {
    let target = Target::cuda(taskgraph::target::device("h200").unwrap());
    let build = |positions: u64, more| {
        let mut graph = graph_of(1, &target, 4, 256, 64, more);
        let cache = graph.tensors.iter_mut().find(|t| t.name == "kv.0").unwrap();
        cache.dims[2] = positions;
        build_all(&graph, &registry(), &BuildOptions::new(1, target.clone()))
    };
    for (positions, prefills) in [(1, false), (4, false), (8, true), (256, true)] {
        let graphs = build(positions, json!({})).unwrap();
        let graph = &graphs[0];
        let found = graph.tasks.iter().any(|t| graph.type_name(t) == "attention_prefill");
        assert_eq!(found, prefills, "pages of {positions}");
    }
    let error = build(4, json!({"prefill": true})).unwrap_err().to_string();
    assert!(error.contains("`prefill`") && error.contains("multiple of 8"), "{error}");
}

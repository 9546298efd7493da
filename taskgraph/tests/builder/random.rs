//! Random operators on random grids.

use super::*;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Operators on their own grids; each reads some of the tensors before it.
#[derive(Clone, Debug)]
struct Node {
    dims: Vec<u64>,
    write: Vec<u64>,
    inputs: Vec<(prop::sample::Index, [u64; 4])>,
    partial: bool,
    wanted: bool,
}

fn node() -> impl Strategy<Value = Node> {
    let dims = prop_oneof![
        3 => (1u64..5, 1u64..40).prop_map(|(a, b)| vec![a, b]),
        1 => (1u64..4, 1u64..4, 1u64..6).prop_map(|(a, b, c)| vec![a, b, c]),
        1 => (1u64..3, 1u64..3, 1u64..3, 1u64..5).prop_map(|(a, b, c, d)| vec![a, b, c, d]),
        1 => (1u64..30).prop_map(|a| vec![a]),
    ];
    let inputs =
        prop::collection::vec((any::<prop::sample::Index>(), [1u64..5, 1u64..5, 1u64..4, 1u64..4]), 0..4);
    (dims, [1u64..4, 1u64..5, 1u64..3, 1u64..3], inputs, any::<bool>(), prop::bool::weighted(0.2)).prop_map(
        |(dims, write, inputs, partial, wanted)| {
            let write = dims.iter().zip(write).map(|(&d, w)| w.min(d)).collect();
            Node { partial: partial && dims.len() == 2, dims, write, inputs, wanted }
        },
    )
}

const LOWERINGS: [Allreduce; 4] =
    [Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot, Allreduce::Hierarchical];

/// The node of each rank: two ranks per node, or ranks assigned to two nodes in turn, or the first rank alone.
fn of_ranks(world: u32, topology: usize) -> Vec<u32> {
    (0..world).map(|rank| [rank / 2, rank % 2, rank.min(1)][topology]).collect()
}

fn graph(nodes: &[Node]) -> OpGraph {
    let mut g = OpGraph::new("random", capacity());
    let mut tensors = vec![g.input("x", DType::F32, &[3, 17])];
    for (i, node) in nodes.iter().enumerate() {
        let inputs: Vec<TensorId> = node.inputs.iter().map(|(index, _)| *index.get(&tensors)).collect();
        let dims_of = |t: &TensorId| -> Vec<u64> {
            tensors
                .iter()
                .position(|x| x == t)
                .map_or(vec![], |p| if p == 0 { vec![3, 17] } else { nodes[p - 1].dims.clone() })
        };
        let read: Vec<Vec<u64>> = inputs
            .iter()
            .zip(&node.inputs)
            .map(|(t, (_, cells))| dims_of(t).iter().zip(cells).map(|(&d, &c)| c.min(d)).collect())
            .collect();
        let mut a = json!({"dims": node.dims, "write": node.write, "read": read});
        if node.partial {
            a["partial"] = json!(true);
        }
        let t = g.op(&format!("t{i}"), "grid", &inputs, attrs(a));
        g.tensor_mut(t).output = node.wanted;
        tensors.push(t);
    }
    g
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_graph_is_race_free_and_reads_what_was_written(
        nodes in prop::collection::vec(node(), 1..9),
        world in 1u32..4,
        workers in 1u32..5,
        dynamic in any::<bool>(),
        lowering in 0usize..4,
        topology in 0usize..3,
    ) {
        let o = BuildOptions {
            placement: if dynamic { Placement::Dynamic } else { Placement::Static },
            allreduce: LOWERINGS[lowering],
            nodes: of_ranks(world, topology),
            ..options(world, workers)
        };
        check(&graph(&nodes), &o);
    }
}

/// Decoders whose sums have enough columns for two-shot and hierarchical.
#[test]
fn sums_of_each_kind_are_race_free_and_read_what_was_written() {
    // Packed weights are cut at multiples of 16 rows.
    let sizes = (1usize..3, 1u64..8, 1u64..4, 1u64..4);
    let machine = (2u32..5, 1u32..4, any::<bool>(), 0usize..4, 0usize..3);
    let ways_seen = RefCell::new(BTreeMap::new());
    let config = ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() };
    let run = TestRunner::new(config).run(&(sizes, machine), |(sizes, machine)| {
        let ((layers, width, inner, records), (world, workers, dynamic, lowering, topology)) =
            (sizes, machine);
        let o = BuildOptions {
            placement: if dynamic { Placement::Dynamic } else { Placement::Static },
            allreduce: LOWERINGS[lowering],
            nodes: of_ranks(world, topology),
            target: Target { max_tiles: 8, ..Target::cpu(workers) },
            ..options(world, workers)
        };
        let ranks = u64::from(world);
        let g = decoder(layers, width * 16, inner * ranks, records * ranks, "linear", world);
        for (way, sums) in ways(&check(&g, &o)[0]) {
            prop_assert_eq!(sums, layers, "{}", way);
            *ways_seen.borrow_mut().entry(way).or_insert(0) += 1;
        }
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{error}"));
    let seen = ways_seen.into_inner();
    println!("{seen:?}");
    // The graphs are random, so a way may be rare.
    let expected = ["copy-reduce", "one-shot", "two-shot", "hierarchical"];
    assert!(expected.iter().all(|way| seen.get(way).is_some_and(|&graphs| graphs >= 2)), "{seen:?}");
}

fn owned_shape() -> impl Strategy<Value = OwnedShape> {
    let height = prop::sample::select(vec![64u64, 128, 256]);
    let cut = prop::sample::select(vec![0u64, 128, 256]);
    let tile = prop::sample::select(vec![0u64, 16, 64]);
    let rest = (1u64..3, 1u64..5, 1usize..4, any::<bool>(), any::<bool>());
    (height, cut, tile, rest).prop_map(
        |(height, cut, tile, (blocks, columns, layers, two_readers, whole))| {
            let layers = layers + usize::from(whole);
            OwnedShape { blocks, columns, height, cut, tile, layers, two_readers, whole }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Sums whose rows stay with the ranks that sum them: every rank reads the rows of each block that their owner has written.
    #[test]
    fn sums_that_stay_with_their_owners_are_race_free_and_read_what_was_written(
        shape in owned_shape(),
        world in 2u32..5,
        workers in 1u32..4,
        dynamic in any::<bool>(),
        within_reach in any::<bool>(),
        stored in any::<bool>(),
    ) {
        let placement = if dynamic { Placement::Dynamic } else { Placement::Static };
        let mut o = shape.options(BuildOptions { placement, within_reach, ..options(world, workers) });
        o.target.tuning.set("allreduce.stored_tiles", stored.into());
        let graphs = check(&shape.graph("owned", world), &o);
        // The first layer reads the input. An output is whole on every rank.
        let wanted = (shape.layers - 1) * (1 + usize::from(shape.two_readers)) + usize::from(!shape.whole);
        for graph in &graphs {
            prop_assert_eq!(owned_steps(graph), wanted);
            // The first reader of a sum joins it, if their tasks have the same rows.
            let of_sum = (256 * shape.blocks).div_ceil(u64::from(workers)).next_power_of_two().min(256);
            let wanted = if of_sum == shape.height { shape.layers - usize::from(shape.whole) } else { 0 };
            prop_assert_eq!(joined_sums(graph), wanted);
            // Products store tiles of one owner with it, if they can.
            let of_peers = (256 * shape.blocks * u64::from(world - 1)).checked_div(shape.cut).filter(|_| within_reach && stored);
            prop_assert_eq!(stored_tiles(graph), shape.layers * of_peers.unwrap_or(0) as usize);
        }
        prop_assert!(verify::ranks_are_alike(&graphs));
    }

    /// Sums of copied summands, which every rank has: the tasks that sum also carry out the first step of the first reader, and wait once
    /// for all that arrives.
    #[test]
    fn copied_sums_that_are_joined_are_race_free_and_read_what_was_written(
        shape in owned_shape(),
        world in 2u32..6,
        workers in 1u32..4,
        dynamic in any::<bool>(),
        within_reach in any::<bool>(),
    ) {
        let placement = if dynamic { Placement::Dynamic } else { Placement::Static };
        let o = shape.options(BuildOptions { placement, within_reach, ..options(world, workers) });
        let mut o = BuildOptions { allreduce: Allreduce::Auto, ..o };
        o.target.tuning.set("allreduce.one_shot_bytes", 0);
        let graphs = check(&shape.graph("copied", world), &o);
        for graph in &graphs {
            prop_assert_eq!(owned_steps(graph), 0);
            prop_assert_eq!(joined_sums(graph), shape.layers - usize::from(shape.whole));
            let joined = graph.tasks.iter().filter(|t| graph.type_name(t) == core_types::REDUCE && t.num_outputs == 2);
            for task in joined {
                let remote = task.dependencies.iter().filter(|&&event| graph.events[event as usize].remote);
                // With dynamic placement, another task may wait for both events.
                prop_assert!(remote.count() == 1 || dynamic);
            }
        }
        prop_assert!(verify::ranks_are_alike(&graphs));
        // Who asks for copies gets one sum for each tile that is copied, unless the knob says otherwise.
        o.allreduce = Allreduce::CopyReduce;
        let asked = check(&shape.graph("copied", world), &o);
        prop_assert!(asked.iter().all(|graph| joined_sums(graph) == 0));
        o.target.tuning.set("allreduce.joined_sums", 2);
        let joined = check(&shape.graph("copied", world), &o);
        prop_assert!(joined.iter().zip(&graphs).all(|(a, b)| joined_sums(a) == joined_sums(b)));
    }
}

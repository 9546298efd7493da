//! Valid graphs, drawn at random.

use crate::builder_support::{OwnedShape, attrs, registry};
use crate::random::Random;
use crate::verify_support::{Lowering, chain};
use serde_json::json;
use taskgraph::task_graph::{Placement, TaskGraph};
use taskgraph::*;

/// A random small graph of operators: chains of products, sums over ranks, residuals, norms that need whole rows.
fn op_graph(random: &mut Random, world: u32, name: &str) -> OpGraph {
    let rows = 1 + random.below(2) as u64;
    let capacity = Capacity { rows: rows as u32, samples: rows as u32, active: 1 };
    let mut g = OpGraph::new(name, capacity);
    // Packed weights are cut at multiples of 16 rows. With fewer, a two-shot or hierarchical sum would have one tile.
    let width = if random.chance(50) { 16 * u64::from(world) } else { random.pick(&[4, 6, 8]) };
    let even = Split::Even { unit: 1 };
    let none = || attrs(json!({}));
    let mut x = g.input("x", DType::F32, &[rows, width]);
    let mut known = vec![x];
    for layer in 0..1 + random.below(2) {
        match random.below(8) {
            0 => x = g.op(&format!("scale{layer}"), "scale", &[x], none()),
            1 => x = g.op(&format!("twice{layer}"), "twice", &[x], none()),
            _ => {
                let inner = random.pick(&[4, 6]);
                let linear = if random.chance(70) { "linear" } else { "linear_plain" };
                let up = g.weight(&format!("{name}.up{layer}"), DType::F32, &[inner, width], Some((0, even)));
                let down =
                    g.weight(&format!("{name}.down{layer}"), DType::F32, &[width, inner], Some((1, even)));
                let h = g.op(&format!("h{layer}"), "linear", &[x, up], none());
                let p = g.op(&format!("p{layer}"), linear, &[h, down], none());
                let residual = known[random.below(known.len())];
                x = g.op(&format!("x{layer}"), "add", &[p, residual], none());
            }
        }
        known.push(x);
    }
    if random.chance(30) {
        let head = g.weight(&format!("{name}.head"), DType::F32, &[6, width], Some((0, even)));
        let logits = g.op("logits", "linear", &[x, head], none());
        let records = g.op("records", "records", &[logits], attrs(json!({"world": [world]})));
        let whole = attrs(json!({"dims": [rows, 2], "write": [1, 1], "read": [[1, 1, 1, 1]]}));
        x = g.op("best", "grid", &[records], whole);
    }
    g.tensor_mut(x).output = true;
    g
}

/// A valid graph of all ranks, from the builder or by hand.
pub fn valid(
    random: &mut Random,
    name: &str,
    like: Option<&BuildOptions>,
) -> Option<(Vec<TaskGraph>, OpGraph, BuildOptions)> {
    let mut options = BuildOptions::new(1 + random.below(3) as u32, Target::cpu(1 + random.below(2) as u32));
    options.placement = random.pick(&[Placement::Static, Placement::Dynamic]);
    options.allreduce = lowering(random);
    // A column tile for each rank, which two-shot and hierarchical sums need. Sums of three ranks over nodes are rare otherwise.
    options.target.max_tiles = random.pick(&[options.target.workers, 3]);
    if random.chance(15) {
        (options.world, options.allreduce) = (3, Allreduce::Hierarchical);
    }
    // Nodes of two ranks. With three ranks the last one is alone, so that `hierarchical` has a real hierarchy.
    options.nodes = (0..options.world).map(|rank| rank / 2).collect();
    if random.chance(50) {
        // Blocks are sent in pieces.
        options.target.tuning.set("allgather.piece_bytes", 16);
    }
    let shape = owned_shape(random);
    if let Some(like) = like {
        options = like.clone();
    } else if options.world > 1 && random.chance(15) {
        options = shape.options(options);
        // Only ranks of one node store tiles with each other.
        if random.chance(50) {
            options.nodes.clear();
            options.target.tuning.set("allreduce.stored_tiles", 1);
        }
    }
    if is_for_owned(&options) && (like.is_none() || random.chance(50)) {
        let op_graph = shape.graph(name, options.world);
        let graphs = build_all(&op_graph, &registry(), &options).unwrap_or_else(|e| panic!("{shape:?}: {e}"));
        return Some((graphs, op_graph, options));
    }
    let op_graph = op_graph(random, options.world, name);
    let graphs = build_all(&op_graph, &registry(), &options).ok()?;
    Some((graphs, op_graph, options))
}

/// A small graph with a sum whose rows stay with their owners.
pub fn owned_shape(random: &mut Random) -> OwnedShape {
    let whole = random.chance(30);
    OwnedShape {
        blocks: 1,
        columns: 1,
        height: random.pick(&[128, 256]),
        cut: random.pick(&[0, 256]),
        tile: random.pick(&[0, 64]),
        layers: 1 + usize::from(whole),
        two_readers: random.chance(20),
        whole,
    }
}

/// Only these options allow two-shot allreduces of narrow tensors.
fn is_for_owned(options: &BuildOptions) -> bool {
    options.target.column_unit == 1
}

pub fn lowering(random: &mut Random) -> Allreduce {
    random.pick(&[Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot, Allreduce::Hierarchical])
}

pub fn by_hand(random: &mut Random) -> Vec<TaskGraph> {
    let lowering = random.pick(&[Lowering::Copy, Lowering::Flagged]);
    chain(2 + random.below(2) as u32, 1 + random.below(2) as u32, 1 + random.below(2) as u32, 2, lowering)
}

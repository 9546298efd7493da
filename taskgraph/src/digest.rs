//! A fingerprint of a task graph, to compare the graphs that ranks have built.

use crate::op_graph::Role;
use crate::task_graph::{Place, TaskGraph};
use crate::trust::Trust;
use xxhash_rust::xxh3::Xxh3;

/// XXH3 over the whole graph, field by field in a fixed order. It is the same on every machine and in every build.
/// Equal graphs have equal digests; different graphs have different digests, except by chance.
pub fn digest(graph: &TaskGraph) -> u64 {
    let mut hash = Hasher { hash: Xxh3::new(), buffer: Vec::with_capacity(1 << 16) };
    let h = &mut hash;
    h.text(&graph.name);
    h.words(&[graph.rank, graph.world, graph.placement as u32, graph.backend as u32, graph.workers]);
    h.words(&[graph.capacity.rows, graph.capacity.samples, graph.capacity.active]);
    h.count(graph.type_names.len());
    graph.type_names.iter().for_each(|n| h.text(n));
    h.count(graph.ops.len());
    graph.ops.iter().for_each(|n| h.text(n));
    h.count(graph.tensors.len());
    for t in &graph.tensors {
        h.text(&t.name);
        h.words(&[
            t.dtype as u32,
            t.space as u32,
            u32::from(t.tiled) + 2 * u32::from(t.paired),
            u32::from(t.output),
            t.rows as u32,
        ]);
        h.long(t.bytes);
        for list in [&t.dims, &t.strides, &t.region_dims] {
            h.count(list.len());
            h.words(list);
        }
        match t.overlay {
            None => h.words(&[0]),
            Some(overlay) => {
                h.words(&[1 + overlay.area as u32]);
                h.long(overlay.offset);
            }
        }
        h.role(&t.role);
        h.count(t.parts.len());
        for part in &t.parts {
            h.text(&part.source);
            h.longs(&part.dims);
            match &part.range {
                None => h.long(u64::MAX),
                Some((dim, range)) => h.longs(&[*dim as u64, range.start, range.end]),
            }
        }
    }
    h.count(graph.variants.len());
    for v in &graph.variants {
        h.words(&[u32::from(v.task_type), v.scratch_bytes]);
        h.count(v.params.len());
        h.words(&v.params);
    }
    h.count(graph.operands.len());
    for o in &graph.operands {
        let place = match o.place {
            Place::Own => 0,
            Place::All => 1,
            Place::Peer(peer) => 2 + u32::from(peer),
        };
        h.words(&[o.tensor, u32::from(o.ndim), place]);
        h.long(o.offset);
        for list in [&o.dims, &o.strides, &o.region.lo, &o.region.hi] {
            h.words(list);
        }
        h.words(&match o.trust {
            None => [0, 0, 0],
            Some(Trust::PagesOfSlot) => [1, 0, 0],
            Some(Trust::RowsOfSlot { slot, of, in_tiles }) => [if in_tiles { 5 } else { 2 }, slot, of],
            Some(Trust::RowsOfUnits { task, of, in_tiles }) => [if in_tiles { 6 } else { 3 }, task, of],
            Some(Trust::PagesOfRows) => [4, 0, 0],
        });
    }
    h.count(graph.tasks.len());
    for t in &graph.tasks {
        h.words(&[u32::from(t.task_type), u32::from(t.variant), t.first_operand, u32::from(t.num_inputs)]);
        h.words(&[
            u32::from(t.num_outputs),
            t.worker.map_or(u32::MAX, |w| w),
            u32::from(t.worker.is_some()),
            t.op,
        ]);
        h.long(t.trigger.map_or(u64::MAX, |e| e.0));
        h.count(t.dependencies.len());
        h.words(&t.dependencies);
        h.count(t.carried.len());
        t.carried.iter().for_each(|&(event, back)| h.words(&[event, back]));
        t.args.iter().for_each(|&a| h.words(&[a as u32]));
    }
    h.count(graph.events.len());
    for e in &graph.events {
        h.words(&[e.event_type as u32, e.num_triggers, e.first_task, e.last_task, u32::from(e.remote)]);
    }
    h.count(graph.worker_lists.len());
    for list in &graph.worker_lists {
        h.count(list.len());
        h.words(list);
    }
    hash.finish()
}

struct Hasher {
    hash: Xxh3,
    buffer: Vec<u8>,
}

impl Hasher {
    fn words(&mut self, words: &[u32]) {
        words.iter().for_each(|w| self.buffer.extend_from_slice(&w.to_le_bytes()));
        if self.buffer.len() >= 1 << 15 {
            self.hash.update(&self.buffer);
            self.buffer.clear();
        }
    }
    fn long(&mut self, value: u64) {
        self.words(&[value as u32, (value >> 32) as u32]);
    }
    fn longs(&mut self, values: &[u64]) {
        self.count(values.len());
        values.iter().for_each(|&v| self.long(v));
    }
    fn count(&mut self, count: usize) {
        self.long(count as u64);
    }
    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.buffer.extend_from_slice(text.as_bytes());
    }
    fn role(&mut self, role: &Role) {
        match role {
            Role::Weight { parts } => {
                self.words(&[0]);
                self.count(parts.len());
                for part in parts {
                    self.text(&part.source);
                    self.longs(&part.dims);
                }
            }
            Role::Constant => self.words(&[1]),
            Role::Input => self.words(&[2]),
            Role::Activation => self.words(&[3]),
            Role::Persistent { region_dims } => {
                self.words(&[4, u32::from(region_dims.is_some())]);
                self.longs(region_dims.as_deref().unwrap_or(&[]));
            }
        }
    }
    fn finish(mut self) -> u64 {
        self.hash.update(&self.buffer);
        self.hash.digest()
    }
}

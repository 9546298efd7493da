//! A brute-force check of finished task graphs that knows nothing of the builder. It unrolls iterations of all ranks, finds the
//! happens-before order by graph search, and follows values.

use super::owned::{BETWEEN, STEP};
use std::collections::HashMap;
use taskgraph::task_graph::{Area, Operand, Place, Task, core_types};
use taskgraph::*;

type Node = usize;

/// An access to memory: node, whether it writes, region, (rank, tensor name).
struct Touch {
    node: Node,
    write: bool,
    region: Region,
}

pub struct Unrolled<'a> {
    graphs: &'a [TaskGraph],
    epochs: usize,
    base: Vec<usize>,
    next: Vec<Vec<Node>>,
    reach: Vec<Vec<u64>>,
    order: Vec<Node>,
}

impl<'a> Unrolled<'a> {
    fn node(&self, epoch: usize, rank: usize, task: usize) -> Node {
        epoch * self.base[self.graphs.len()] + self.base[rank] + task
    }

    /// Unrolls iterations; panics if triggers do not add up or something waits in a cycle.
    pub fn new(graphs: &'a [TaskGraph], epochs: usize) -> Self {
        let mut base = vec![0];
        for g in graphs {
            // One more node, for the end of the iteration.
            base.push(base[base.len() - 1] + g.tasks.len() + 1);
        }
        let n = epochs * base[graphs.len()];
        let mut u =
            Unrolled { graphs, epochs, base, next: vec![Vec::new(); n], reach: vec![], order: vec![] };
        let mut triggers: HashMap<(usize, u32), Vec<(usize, usize)>> = HashMap::new();
        for (r, g) in graphs.iter().enumerate() {
            assert_eq!(g.rank as usize, r);
            for (t, task) in g.tasks.iter().enumerate() {
                if let Some(e) = task.trigger {
                    let event = &graphs[e.owner() as usize].events[e.index() as usize];
                    assert_eq!(event.remote, e.is_nvshmem(), "local and remote triggers never mix");
                    assert!(e.is_nvshmem() || e.owner() as usize == r, "local triggers do not cross ranks");
                    // A copy may go to the rank's own memory, and a product to a peer's.
                    let there = |o: &Operand| o.place == Place::Peer(e.owner());
                    let remote = g.type_name(task) == core_types::NVSHMEM_SIGNAL
                        || g.outputs(task).iter().any(|o| matches!(o.place, Place::Peer(_)));
                    assert_eq!(e.is_nvshmem(), remote);
                    assert!(!remote || g.outputs(task).iter().all(there));
                    triggers.entry((e.owner() as usize, e.index())).or_default().push((r, t));
                } else {
                    // The order of its worker's list leads to a task that does.
                    let later = |list: &Vec<u32>| {
                        list.iter().position(|&i| i as usize == t).map(|p| list[p..].to_vec())
                    };
                    let later = g.worker_lists.iter().find_map(later).unwrap_or_default();
                    let tells = |i: &u32| g.tasks[*i as usize].trigger.is_some_and(|e| !e.is_nvshmem());
                    assert!(
                        t == 0 || later.iter().any(tells),
                        "task {t} triggers nothing, nor do those after it"
                    );
                }
            }
        }
        for (r, g) in graphs.iter().enumerate() {
            for (e, event) in g.events.iter().enumerate() {
                let count = triggers.get(&(r, e as u32)).map_or(0, Vec::len);
                assert_eq!(count as u32, event.num_triggers, "rank {r} event {e}");
                assert!(e == 0 || count > 0);
            }
        }
        for epoch in 0..epochs {
            for (r, g) in graphs.iter().enumerate() {
                let end = u.node(epoch, r, g.tasks.len());
                for &(fr, ft) in &triggers[&(r, 2)] {
                    let from = u.node(epoch, fr, ft);
                    u.next[from].push(end);
                }
                if epoch > 0 {
                    let (from, to) = (u.node(epoch - 1, r, g.tasks.len()), u.node(epoch, r, 1));
                    u.next[from].push(to);
                }
                for (t, task) in g.tasks.iter().enumerate().skip(2) {
                    assert!(!task.dependencies.is_empty());
                    let to = u.node(epoch, r, t);
                    for d in &task.dependencies {
                        for &(fr, ft) in &triggers[&(r, *d)] {
                            let from = u.node(epoch, fr, ft);
                            u.next[from].push(to);
                        }
                    }
                    for &(back, n) in &task.carried {
                        if epoch >= n as usize {
                            for &(fr, ft) in &triggers[&(r, back)] {
                                let from = u.node(epoch - n as usize, fr, ft);
                                u.next[from].push(to);
                            }
                        }
                    }
                }
                for list in &g.worker_lists {
                    for pair in list.windows(2) {
                        let (from, to) =
                            (u.node(epoch, r, pair[0] as usize), u.node(epoch, r, pair[1] as usize));
                        u.next[from].push(to);
                    }
                }
            }
        }
        u.flag_edges();
        u.close();
        u
    }

    fn flag_edges(&mut self) {
        for epoch in 0..self.epochs {
            for (r, g) in self.graphs.iter().enumerate() {
                for (t, task) in g.tasks.iter().enumerate() {
                    for input in g.inputs(task) {
                        let entry = &g.tensors[input.tensor as usize];
                        if entry.dtype != DType::F32Flagged {
                            continue;
                        }
                        let to = self.node(epoch, r, t);
                        for (pr, pg) in self.graphs.iter().enumerate() {
                            for (pt, producer) in pg.tasks.iter().enumerate() {
                                for out in pg.outputs(producer) {
                                    let same = pg.tensors[out.tensor as usize].name == entry.name;
                                    if same && out.region.overlaps(&input.region) {
                                        assert_eq!(out.place, Place::All);
                                        let from = self.node(epoch, pr, pt);
                                        self.next[from].push(to);
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    fn close(&mut self) {
        let n = self.next.len();
        let mut degree = vec![0; n];
        self.next.iter().flatten().for_each(|&t| degree[t] += 1);
        let mut order: Vec<Node> = (0..n).filter(|&i| degree[i] == 0).collect();
        let mut at = 0;
        while at < order.len() {
            for &t in &self.next[order[at]] {
                degree[t] -= 1;
                if degree[t] == 0 {
                    order.push(t);
                }
            }
            at += 1;
        }
        assert_eq!(order.len(), n, "tasks wait in a circle");
        let words = n.div_ceil(64);
        let mut reach = vec![vec![0u64; words]; n];
        for &i in order.iter().rev() {
            let mut set = vec![0u64; words];
            for &t in &self.next[i] {
                set[t / 64] |= 1 << (t % 64);
                set.iter_mut().zip(&reach[t]).for_each(|(a, b)| *a |= b);
            }
            reach[i] = set;
        }
        (self.reach, self.order) = (reach, order);
    }

    pub fn before(&self, a: Node, b: Node) -> bool {
        self.reach[a][b / 64] >> (b % 64) & 1 == 1
    }

    fn task(&self, node: Node) -> Option<(usize, usize, &'a Task)> {
        let per_epoch = self.base[self.graphs.len()];
        let (epoch, rest) = (node / per_epoch, node % per_epoch);
        let rank = self.base.iter().rposition(|&b| b <= rest)?;
        self.graphs[rank].tasks.get(rest - self.base[rank]).map(|t| (epoch, rank, t))
    }

    fn places(&self, rank: usize, place: Place) -> Vec<usize> {
        match place {
            Place::Own => vec![rank],
            Place::Peer(p) => vec![p as usize],
            Place::All => (0..self.graphs.len()).collect(),
        }
    }

    /// Any two tasks that access the same memory, at least one of them writing, are ordered, also across iterations.
    pub fn assert_race_free(&self) {
        let mut touched: HashMap<(usize, &str), Vec<Touch>> = HashMap::new();
        for node in 0..self.next.len() {
            let Some((_, rank, task)) = self.task(node) else { continue };
            let g = &self.graphs[rank];
            for (write, operands) in [(false, g.inputs(task)), (true, g.outputs(task))] {
                for o in operands {
                    for place in self.places(rank, o.place) {
                        let name = g.tensors[o.tensor as usize].name.as_str();
                        touched.entry((place, name)).or_default().push(Touch {
                            node,
                            write,
                            region: o.region,
                        });
                    }
                }
            }
        }
        assert_eq!(self.overlay_race(), None);
        for ((rank, name), list) in &touched {
            for (i, a) in list.iter().enumerate() {
                for b in &list[..i] {
                    if a.node != b.node && (a.write || b.write) && a.region.overlaps(&b.region) {
                        assert!(
                            self.before(a.node, b.node) || self.before(b.node, a.node),
                            "rank {rank} {name}: {:?} {:?} and {:?} {:?} are not ordered",
                            self.describe(a.node),
                            a.region,
                            self.describe(b.node),
                            b.region
                        );
                    }
                }
            }
        }
    }

    /// Tensors with bytes in common: accesses to these bytes through one tensor are ordered with writes through the
    /// other. Returns a pair that is not.
    pub fn overlay_race(&self) -> Option<String> {
        struct Bytes {
            node: Node,
            write: bool,
            tensor: u32,
            first: u64,
            end: u64,
        }
        let mut touched: HashMap<(usize, Area), Vec<Bytes>> = HashMap::new();
        for node in 0..self.next.len() {
            let Some((_, rank, task)) = self.task(node) else { continue };
            let g = &self.graphs[rank];
            for (write, operands) in [(false, g.inputs(task)), (true, g.outputs(task))] {
                for o in operands {
                    let entry = &g.tensors[o.tensor as usize];
                    let dims = &o.dims[..o.ndim as usize];
                    let Some(overlay) = entry.overlay.filter(|_| !dims.contains(&0)) else { continue };
                    let last: u64 =
                        dims.iter().zip(o.strides).map(|(&d, s)| u64::from(d - 1) * u64::from(s)).sum();
                    let first = overlay.offset + o.offset;
                    let end = first + (last + 1) * entry.dtype.size();
                    for place in self.places(rank, o.place) {
                        // Symmetric tensors have the same numbers on all ranks.
                        touched.entry((place, overlay.area)).or_default().push(Bytes {
                            node,
                            write,
                            tensor: o.tensor,
                            first,
                            end,
                        });
                    }
                }
            }
        }
        for ((rank, area), list) in &touched {
            for (i, a) in list.iter().enumerate() {
                for b in list[..i].iter().filter(|b| b.tensor != a.tensor) {
                    let meet = (a.write || b.write) && a.first < b.end && b.first < a.end && a.node != b.node;
                    if meet && !self.before(a.node, b.node) && !self.before(b.node, a.node) {
                        return Some(format!(
                            "rank {rank} {area:?}: {} and {} are not ordered",
                            self.describe(a.node),
                            self.describe(b.node),
                        ));
                    }
                }
            }
        }
        None
    }

    fn describe(&self, node: Node) -> String {
        self.task(node).map_or("end".into(), |(epoch, rank, t)| {
            let g = &self.graphs[rank];
            format!("epoch {epoch} rank {rank} {} of {}", g.type_name(t), g.op_name(t))
        })
    }

    /// Every task except signals happens before the end of its own rank's iteration.
    pub fn assert_end_is_last(&self) {
        for epoch in 0..self.epochs {
            for (r, g) in self.graphs.iter().enumerate() {
                let end = self.node(epoch, r, g.tasks.len());
                for (t, task) in g.tasks.iter().enumerate().skip(2) {
                    let node = self.node(epoch, r, t);
                    assert!(
                        g.type_name(task) == core_types::NVSHMEM_SIGNAL || self.before(node, end),
                        "{} may run past the end",
                        self.describe(node)
                    );
                    assert!(self.before(self.node(epoch, r, 1), node) || self.graphs.len() > 1);
                }
            }
        }
    }

    /// Runs all tasks in one order (any order gives the same, except for races) with tags as values: each task must
    /// read what the operator before it wrote in this iteration, on the right rank. `nodes` has the node of each rank, if a sum
    /// may be hierarchical.
    pub fn assert_values(&self, ops: &OpGraph, nodes: &[u32]) {
        #[derive(Clone, Copy, PartialEq, Debug)]
        struct Tag {
            tensor: u32,
            rank: usize,
            epoch: usize,
            /// The first two indices where it was computed.
            at: [u32; 2],
        }
        let names: HashMap<&str, usize> =
            ops.ops.iter().enumerate().map(|(i, o)| (o.name.as_str(), i)).collect();
        let writer: HashMap<u32, usize> =
            ops.ops.iter().enumerate().flat_map(|(i, o)| o.outputs.iter().map(move |&t| (t, i))).collect();
        // Gathered tensors hold what their source's writer wrote.
        let tag_of = |mut tensor: u32| {
            while let Some(&w) = writer.get(&tensor) {
                if !["allgather", "all_to_all", "slice"].contains(&ops.ops[w].op_type.as_str()) {
                    break;
                }
                tensor = ops.ops[w].inputs[0];
            }
            tensor
        };
        let mut memory: HashMap<(usize, &str), HashMap<[u32; 4], Tag>> = HashMap::new();
        let cells = |r: &Region| {
            let mut all = Vec::new();
            for a in r.lo[0]..r.hi[0] {
                for b in r.lo[1]..r.hi[1] {
                    for c in r.lo[2]..r.hi[2] {
                        (r.lo[3]..r.hi[3]).for_each(|d| all.push([a, b, c, d]));
                    }
                }
            }
            all
        };
        for &node in &self.order {
            let Some((epoch, rank, task)) = self.task(node) else { continue };
            let g = &self.graphs[rank];
            // The first step of `rows_product` writes a temporary, which the second one reads.
            let (base, first_step) = match g.op_name(task).strip_suffix(STEP) {
                Some(base) => (base, true),
                None => (g.op_name(task), false),
            };
            let Some(&op) = names.get(base) else { continue };
            let temporary = (ops.tensors.len() + op) as u32;
            let op = &ops.ops[op];
            let reads_temporary = op.op_type == "rows_product" && !first_step;
            let name = |tensor: u32| g.tensors[tensor as usize].name.as_str();
            let kind = g.type_name(task);
            // The first sum of a hierarchical allreduce writes the sum of the rank's node, which the second one reads.
            let of_node = |o: &Operand| name(o.tensor).ends_with(".of_node");
            let first_sum = kind == core_types::REDUCE && g.outputs(task).iter().any(of_node);
            let later = !first_sum && g.inputs(task).first().is_some_and(of_node);
            // The slot of a received summand that the task itself has, and whether a rank sends into a slot.
            let own_slot = match kind {
                core_types::REDUCE if first_sum || later => g.variants[usize::from(task.variant)].params[1],
                _ => rank as u32,
            };
            let sends = |sender: usize, slot: u32| match (first_sum, later) {
                (true, _) => {
                    let of_node = (0..g.world as usize).filter(|&r| nodes[r] == nodes[rank]);
                    of_node.clone().nth(slot as usize) == Some(sender)
                }
                (_, true) => nodes[sender] == slot,
                _ => sender == slot as usize,
            };
            for (i, input) in g.inputs(task).iter().enumerate() {
                let entry = &g.tensors[input.tensor as usize];
                let flagged = entry.dtype == DType::F32Flagged;
                let pushed = g.tensors[g.inputs(task)[0].tensor as usize].dtype == DType::F32Flagged;
                let stands_for_source = i == 0 || (i == 1 && !pushed);
                let received = kind == core_types::REDUCE && (flagged || (i == 1 && !pushed)) && g.world > 1;
                let logical = match kind {
                    core_types::REDUCE if stands_for_source && later => temporary,
                    core_types::REDUCE if stands_for_source => op.inputs[0],
                    core_types::REDUCE => op.inputs[1],
                    core_types::NVSHMEM_COPY if first_step || later => temporary,
                    _ if reads_temporary && i == 0 => temporary,
                    core_types::NVSHMEM_COPY => {
                        // The second half of a two-shot allreduce copies the sum.
                        if op.op_type == "allreduce"
                            && g.tensors[g.outputs(task)[0].tensor as usize].dims.len() == 2
                        {
                            op.outputs[0]
                        } else {
                            op.inputs[0]
                        }
                    }
                    _ => op.inputs[i],
                };
                let known = ops.tensors.get(tag_of(logical) as usize);
                if known.is_some_and(|t| t.role != Role::Activation) {
                    continue;
                }
                let wanted_name = known.map_or("a temporary", |t| &t.name);
                for cell in cells(&input.region) {
                    // The receiver's own slot of a copied tensor stays empty.
                    if received && !flagged && cell[0] == own_slot {
                        continue;
                    }
                    let found = memory.get(&(rank, name(input.tensor))).and_then(|m| m.get(&cell)).copied();
                    let wanted = tag_of(logical);
                    assert!(
                        found.is_some_and(|t| t.tensor == wanted && t.epoch == epoch),
                        "{} reads {found:?} at {cell:?} of {}, wanted {} (tensor {wanted})",
                        self.describe(node),
                        name(input.tensor),
                        wanted_name,
                    );
                    if received {
                        assert!(
                            found.is_some_and(|t| sends(t.rank, cell[0])),
                            "{found:?} in slot {}",
                            cell[0]
                        );
                    }
                    // A slot has the peer's values of the rows and columns that are summed, and a temporary those of its own place.
                    // The rank's own summands may be in its own slot.
                    let first = g.inputs(task)[0].tensor;
                    let stored = kind == core_types::REDUCE
                        && g.tensors[first as usize].dims.len() == 3
                        && g.inputs(task).get(1).is_some_and(|second| second.tensor == first);
                    let own = if stored { g.outputs(task) } else { g.inputs(task) }[0].region.lo;
                    if stored && i == 0 {
                        assert!(cell[0] as usize == rank && found.is_some_and(|t| t.rank == rank));
                    }
                    let placed = match (received && !flagged || stored && i == 0, logical == temporary) {
                        (true, _) => Some([0, 1].map(|d| own[d] + cell[d + 1] - input.region.lo[d + 1])),
                        (_, true) => Some([cell[0], cell[1]]),
                        _ => None,
                    };
                    if let (Some(placed), Some(found)) = (placed, found) {
                        assert_eq!(found.at, placed, "{} at {cell:?}", self.describe(node));
                    }
                }
            }
            for (o, output) in g.outputs(task).iter().enumerate() {
                for place in self.places(rank, output.place) {
                    let from = g.inputs(task).first().map(|i| (name(i.tensor), i.region.lo));
                    for cell in cells(&output.region) {
                        let tag = if kind == core_types::NVSHMEM_COPY {
                            let (source, lo) = from.expect("a copy has a source");
                            let mut at = cell;
                            if output.ndim as usize + 1 == g.tensors[output.tensor as usize].dims.len() {
                                at = [0, 1, 2, 3].map(|d| match d < 2 {
                                    true => cell[d + 1] - output.region.lo[d + 1] + lo[d],
                                    false => 0,
                                });
                            } else {
                                (0..4).for_each(|d| at[d] = cell[d] - output.region.lo[d] + lo[d]);
                            }
                            match memory.get(&(rank, source)).and_then(|m| m.get(&at)) {
                                Some(tag) => *tag,
                                None => continue, // of an input
                            }
                        } else {
                            // A sum may also be the first step of the operator that reads it.
                            let joined = name(output.tensor).strip_suffix(BETWEEN).filter(|_| o == 1);
                            let tensor = match joined {
                                Some(reader) => (ops.tensors.len() + names[reader]) as u32,
                                None if first_step || first_sum => temporary,
                                None => tag_of(op.outputs[o]),
                            };
                            // A tile that is stored with its owner is for the rows that its task has read.
                            let stored =
                                kind == "product" && g.tensors[output.tensor as usize].dims.len() == 3;
                            let input = g.inputs(task).first().filter(|_| stored);
                            let at = input.map_or([cell[0], cell[1]], |input| {
                                let tile = g.tensors[input.tensor as usize].dims.get(2).copied();
                                let [lo, _, within, _] = input.region.lo;
                                [lo * tile.unwrap_or(1) + within + cell[1] - output.region.lo[1], cell[2]]
                            });
                            Tag { tensor, rank, epoch, at }
                        };
                        memory.entry((place, name(output.tensor))).or_default().insert(cell, tag);
                    }
                }
            }
        }
    }
}

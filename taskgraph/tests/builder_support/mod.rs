//! Task types without kernels, and a brute-force check of finished task graphs that knows nothing of the builder:
//! it unrolls two iterations of all ranks, works out what happens before what by graph search, and follows values.

use serde_json::json;
use std::collections::HashMap;
use std::sync::Arc;
use taskgraph::task_graph::{Area, EventType, Place, Task, core_types};
use taskgraph::task_type::{
    Access, ExpandedOp, Expansion, ExpansionOperand, Fusion, LocalOp, Need, OpError, OpView, Partition,
    ShardRule, TaskSpec, Temporary, TensorType,
};
use taskgraph::*;

pub fn attrs(value: serde_json::Value) -> Attrs {
    value.as_object().cloned().unwrap_or_default()
}

/// Output `[rows, n]` from input `[rows, k]` and weight `[n, k]`; column tiles, each reads all of the input.
#[derive(Debug)]
pub struct Linear {
    pub name: &'static str,
    /// Operands before the weight that have the output's columns (tile read).
    pub residual: bool,
    pub pushable: bool,
}

impl TaskType for Linear {
    fn name(&self) -> &'static str {
        self.name
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let (x, w) = (&op.inputs[0].ty, &op.inputs[1].ty);
        if x.dims[1] != w.dims[1] {
            return Err(OpError(format!("depth {} and {}", x.dims[1], w.dims[1])));
        }
        Ok(vec![TensorType { dtype: DType::F32, dims: vec![x.dims[0], w.dims[0]], rows: x.rows }])
    }
    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        let mut inputs = vec![Need::Replicated; op.inputs.len()];
        inputs[1] = Need::AsIs;
        let output = match op.inputs[1].sharding {
            Sharding::Split { dim: 0, parts } => Sharding::Split { dim: 1, parts: parts.clone() },
            Sharding::Split { parts, .. } => {
                inputs[0] = Need::Split(Sharding::Split { dim: 1, parts: parts.clone() });
                Sharding::Partial
            }
            _ => Sharding::Replicated,
        };
        Ok(ShardRule { inputs, outputs: vec![output] })
    }
    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (rows, k) = (op.inputs[0].dims[0] as u32, op.inputs[1].dims[1] as u32);
        let n = op.outputs[0].dims[1] as u32;
        let tasks = target
            .column_tiles(n, 1)
            .into_iter()
            .map(|tile| {
                let mut task = TaskSpec { cost: u64::from(tile.end - tile.start), ..TaskSpec::default() };
                task.reads.push(Access::new(0, Region::whole(&[rows, op.inputs[0].dims[1] as u32])));
                task.reads.push(Access::new(1, Region::whole(&[n, k]).with(0, tile.start, tile.end)));
                let columns = Region::whole(&[rows, n]).with(1, tile.start, tile.end);
                if self.residual {
                    task.reads.push(Access::new(2, columns));
                }
                task.writes.push(Access::new(0, columns));
                task
            })
            .collect();
        Ok(Partition { params: vec![k, 0], scratch_bytes: 64, tasks })
    }
    fn pushable_output(&self) -> Option<usize> {
        self.pushable.then_some(0)
    }
    fn push_param(&self) -> Option<usize> {
        Some(1)
    }
    fn fusions(&self) -> &'static [Fusion] {
        match self.name {
            "linear_with_residual" => &[Fusion {
                producer: "linear",
                consumer: "add",
                consumer_input: 0,
                fused: "linear_with_residual",
            }],
            _ => &[],
        }
    }
}

/// Element by element, one or two inputs, column tiles.
#[derive(Debug)]
pub struct Elementwise(pub &'static str);

impl TaskType for Elementwise {
    fn name(&self) -> &'static str {
        self.0
    }
    fn is_sum(&self) -> bool {
        self.0 == "add"
    }
    fn is_pure(&self) -> bool {
        true
    }
    fn may_overwrite(&self) -> &'static [(usize, usize)] {
        &[(1, 0), (0, 0)]
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![op.inputs[0].ty.clone()])
    }
    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        let split = matches!(op.inputs[0].sharding, Sharding::Split { .. }) && op.inputs.len() == 1;
        Ok(ShardRule {
            inputs: vec![if split { Need::AsIs } else { Need::Replicated }; op.inputs.len()],
            outputs: vec![if split { op.inputs[0].sharding.clone() } else { Sharding::Replicated }],
        })
    }
    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (rows, n) = (op.outputs[0].dims[0] as u32, op.outputs[0].dims[1] as u32);
        let tasks = target
            .column_tiles(n, 1)
            .into_iter()
            .map(|tile| {
                let region = Region::whole(&[rows, n]).with(1, tile.start, tile.end);
                TaskSpec {
                    reads: (0..op.inputs.len()).map(|i| Access::new(i as u8, region)).collect(),
                    writes: [Access::new(0, region)].into_iter().collect(),
                    ..TaskSpec::default()
                }
            })
            .collect();
        Ok(Partition { params: vec![], scratch_bytes: 0, tasks })
    }
}

/// Any grid: attribute `dims`, `write` (cells in each dimension), `read` (for each input the cells that its
/// dimensions are read in; the output cell `c` of `n` reads cells `c*m/n ..= ((c+1)*m-1)/n` of `m`), `partial`.
#[derive(Debug)]
pub struct Grid;

const GRID_ATTRIBUTES: &[Attribute] = &[
    Attribute::new("dims", AttributeKind::Any),
    Attribute::new("write", AttributeKind::Any),
    Attribute::new("read", AttributeKind::Any),
    Attribute::new("partial", AttributeKind::Any),
];
const RECORDS_ATTRIBUTES: &[Attribute] = &[Attribute::new("world", AttributeKind::Any)];

fn numbers(op: &OpView<'_>, name: &str) -> Vec<u64> {
    serde_json::from_value(op.attrs.get(name).cloned().unwrap_or_default()).unwrap_or_default()
}

fn cell(len: u32, cells: u32, at: u32) -> (u32, u32) {
    (
        (u64::from(len) * u64::from(at) / u64::from(cells)) as u32,
        (u64::from(len) * u64::from(at + 1) / u64::from(cells)) as u32,
    )
}

impl TaskType for Grid {
    fn name(&self) -> &'static str {
        "grid"
    }
    fn attributes(&self) -> &'static [Attribute] {
        GRID_ATTRIBUTES
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let dims = numbers(op, "dims");
        let mut types = vec![TensorType { dtype: DType::F32, dims, rows: Rows::Fixed }];
        // A persistent tensor behind the first output is written in place.
        types.extend(op.outputs[1..].iter().map(|o| o.ty.clone()));
        Ok(types)
    }
    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        let output = match op.attrs.get("partial") {
            Some(_) => Sharding::Partial,
            None => Sharding::Replicated,
        };
        let mut outputs = vec![output];
        outputs.resize(op.outputs.len(), Sharding::Replicated);
        Ok(ShardRule { inputs: vec![Need::Replicated; op.inputs.len()], outputs })
    }
    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let dims: Vec<u32> = op.outputs[0].dims.iter().map(|&d| d as u32).collect();
        let write = numbers(op.global, "write");
        let read: Vec<Vec<u64>> =
            serde_json::from_value(op.global.attrs.get("read").cloned().unwrap_or(json!([]))).unwrap();
        let total: u64 = write.iter().product();
        let mut tasks = Vec::new();
        for index in 0..total {
            let mut rest = index;
            let mut region = Region::whole(&dims);
            for d in (0..dims.len()).rev() {
                let (lo, hi) = cell(dims[d], write[d] as u32, (rest % write[d]) as u32);
                region = region.with(d, lo, hi);
                rest /= write[d];
            }
            if region.is_empty() {
                continue;
            }
            let mut task = TaskSpec { cost: region.volume(), ..TaskSpec::default() };
            for (i, input) in op.inputs.iter().enumerate() {
                let mut from = Region::whole(&input.dims.iter().map(|&d| d as u32).collect::<Vec<_>>());
                let mut rest = index;
                for (d, &cells) in read.get(i).map_or(&[][..], Vec::as_slice).iter().enumerate().rev() {
                    let (n, m) = (write.get(d).copied().unwrap_or(1), cells);
                    let c = rest % n;
                    rest /= n;
                    let (first, last) = (c * m / n, ((c + 1) * m - 1) / n);
                    let len = input.dims[d] as u32;
                    from =
                        from.with(d, cell(len, m as u32, first as u32).0, cell(len, m as u32, last as u32).1);
                }
                task.reads.push(Access::new(i as u8, from));
            }
            task.writes.push(Access::new(0, region));
            for (o, output) in op.outputs.iter().enumerate().skip(1) {
                let len = output.dims[0] as u32;
                let (lo, hi) = cell(len, total as u32, index as u32);
                let all = Region::whole(&output.dims.iter().map(|&d| d as u32).collect::<Vec<_>>());
                task.writes.push(Access::new(o as u8, all.with(0, lo, hi)));
            }
            tasks.push(task);
        }
        Ok(Partition { params: vec![1], scratch_bytes: 0, tasks })
    }
}

/// `[world, tiles, rows, 2]`, of which each rank writes its slice, from `[rows, columns]`.
#[derive(Debug)]
pub struct Records;

impl TaskType for Records {
    fn name(&self) -> &'static str {
        "records"
    }
    fn attributes(&self) -> &'static [Attribute] {
        RECORDS_ATTRIBUTES
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let world = numbers(op, "world")[0];
        let dims = vec![world, 3, op.inputs[0].ty.dims[0], 2];
        Ok(vec![TensorType { dtype: DType::U32, dims, rows: Rows::Fixed }])
    }
    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        let world = numbers(op, "world")[0];
        Ok(ShardRule {
            inputs: vec![Need::AsIs],
            outputs: vec![Sharding::split(0, world, Split::Even { unit: 1 })],
        })
    }
    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let (rows, columns) = (op.inputs[0].dims[0] as u32, op.inputs[0].dims[1] as u32);
        let tasks = (0..3)
            .map(|t| {
                let (lo, hi) = cell(columns, 3, t);
                TaskSpec {
                    reads: [Access::new(0, Region::whole(&[rows, columns]).with(1, lo, hi))]
                        .into_iter()
                        .collect(),
                    writes: [Access::new(0, Region::whole(&[1, 3, rows, 2]).with(1, t, t + 1))]
                        .into_iter()
                        .collect(),
                    ..TaskSpec::default()
                }
            })
            .collect();
        Ok(Partition { params: vec![], scratch_bytes: 0, tasks })
    }
}

/// Carried out by two `scale` steps with a temporary between them.
#[derive(Debug)]
pub struct Twice;

impl TaskType for Twice {
    fn name(&self) -> &'static str {
        "twice"
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        Elementwise("twice").infer(op)
    }
    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        Elementwise("twice").shard(op, world)
    }
    fn partition(&self, _: &LocalOp<'_>, _: &Target) -> Result<Partition, OpError> {
        Err(OpError("is always expanded".into()))
    }
    fn expand(&self, op: &LocalOp<'_>, _: &Target) -> Result<Option<Expansion>, OpError> {
        let step = |suffix, input, output| ExpandedOp {
            op_type: "scale",
            suffix,
            inputs: vec![input],
            outputs: vec![output],
            attrs: Attrs::new(),
        };
        Ok(Some(Expansion {
            temporaries: vec![Temporary { suffix: ".half", ty: op.outputs[0].clone() }],
            ops: vec![
                step("", ExpansionOperand::Input(0), ExpansionOperand::Temporary(0)),
                step(".second", ExpansionOperand::Temporary(0), ExpansionOperand::Output(0)),
            ],
        }))
    }
}

pub fn registry() -> Registry {
    let mut registry = Registry::default();
    for pushable in
        [("linear", false, true), ("linear_plain", false, false), ("linear_with_residual", true, false)]
    {
        registry.register(Arc::new(Linear { name: pushable.0, residual: pushable.1, pushable: pushable.2 }));
    }
    registry.register(Arc::new(Elementwise("add")));
    registry.register(Arc::new(Elementwise("scale")));
    registry.register(Arc::new(Twice));
    registry.register(Arc::new(Grid));
    registry.register(Arc::new(Records));
    registry
}

pub fn capacity() -> Capacity {
    Capacity { rows: 4, samples: 4, active: 4 }
}

/// A decoder's outline: `layers` times (column-parallel linear, row-parallel linear, allreduce, add), then logits,
/// records of each rank's share, and one reader of them all.
pub fn decoder(layers: usize, width: u64, inner: u64, vocabulary: u64, linear: &str, world: u32) -> OpGraph {
    let mut g = OpGraph::new("decoder", capacity());
    let none = attrs(json!({}));
    let mut x = g.input("x", DType::F32, &[4, width]);
    let even = |unit| Split::Even { unit };
    for l in 0..layers {
        let up = g.weight(&format!("up{l}"), DType::F32, &[inner, width], Some((0, even(1))));
        let down = g.weight(&format!("down{l}"), DType::F32, &[width, inner], Some((1, even(1))));
        let h = g.op(&format!("h{l}"), "linear", &[x, up], none.clone());
        let s = g.op(&format!("s{l}"), "scale", &[h], none.clone());
        let p = g.op(&format!("p{l}"), linear, &[s, down], none.clone());
        x = g.op(&format!("x{l}"), "add", &[p, x], none.clone());
    }
    let head = g.weight("head", DType::F32, &[vocabulary, width], Some((0, even(1))));
    let logits = g.op("logits", "linear", &[x, head], none.clone());
    let records = g.op("records", "records", &[logits], attrs(json!({"world": [world]})));
    let reduced = g.op(
        "best",
        "grid",
        &[records],
        attrs(json!({"dims": [4, 2], "write": [2, 1], "read": [[1, 1, 2, 1]]})),
    );
    g.tensor_mut(reduced).output = true;
    g
}

type Node = usize;

/// What touches memory: node, written, region, (rank, tensor name).
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

    /// Unrolls iterations; panics where triggers do not add up or something waits in a circle.
    pub fn new(graphs: &'a [TaskGraph], epochs: usize) -> Self {
        let mut base = vec![0];
        for g in graphs {
            // One more node for the end of the iteration.
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
                    assert!(e.is_nvshmem() || e.owner() as usize == r, "only copies and signals cross ranks");
                    // A copy may be to the rank's own memory.
                    let own = g.outputs(task).first().is_some_and(|o| o.place == Place::Own);
                    let remote = match g.type_name(task) {
                        core_types::NVSHMEM_COPY => !own,
                        name => name == core_types::NVSHMEM_SIGNAL,
                    };
                    assert_eq!(e.is_nvshmem(), remote);
                    triggers.entry((e.owner() as usize, e.index())).or_default().push((r, t));
                } else {
                    // The order of its worker's list leads on to one that does.
                    let later = |list: &Vec<u32>| {
                        list.iter().position(|&i| i as usize == t).map(|p| list[p..].to_vec())
                    };
                    let later = g.worker_lists.iter().find_map(later).unwrap_or_default();
                    let tells = |i: &u32| g.tasks[*i as usize].trigger.is_some_and(|e| !e.is_nvshmem());
                    assert!(
                        t == 0 || later.iter().any(tells),
                        "task {t} triggers nothing, nor do those behind it"
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

    /// Any two tasks that touch the same memory, one of them writing, are ordered; also across iterations.
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

    /// Tensors with bytes in common: what touches these bytes through the one and what writes them through the other
    /// is ordered. A pair that is not.
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
                        // Tensors have the same numbers on all ranks where they are symmetric.
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

    /// Every task but signals happens before the end of its own rank's iteration.
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

    /// Runs all tasks in one order (any is as good, races apart) with tags for values: each task must read what the
    /// operator before it wrote in this iteration, on the rank whose it should be.
    pub fn assert_values(&self, ops: &OpGraph) {
        #[derive(Clone, Copy, PartialEq, Debug)]
        struct Tag {
            tensor: u32,
            rank: usize,
            epoch: usize,
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
            let Some(&op) = names.get(g.op_name(task)) else { continue };
            let op = &ops.ops[op];
            let name = |tensor: u32| g.tensors[tensor as usize].name.as_str();
            let kind = g.type_name(task);
            for (i, input) in g.inputs(task).iter().enumerate() {
                let entry = &g.tensors[input.tensor as usize];
                let flagged = entry.dtype == DType::F32Flagged;
                let pushed = g.tensors[g.inputs(task)[0].tensor as usize].dtype == DType::F32Flagged;
                let stands_for_source = i == 0 || (i == 1 && !pushed);
                let received = kind == core_types::REDUCE && (flagged || (i == 1 && !pushed)) && g.world > 1;
                let logical = match kind {
                    core_types::REDUCE if stands_for_source => op.inputs[0],
                    core_types::REDUCE => op.inputs[1],
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
                if ops.tensors[tag_of(logical) as usize].role != Role::Activation {
                    continue;
                }
                for cell in cells(&input.region) {
                    // The receiver's own slot of what is copied stays empty.
                    if received && !flagged && cell[0] as usize == rank {
                        continue;
                    }
                    let found = memory.get(&(rank, name(input.tensor))).and_then(|m| m.get(&cell)).copied();
                    let wanted = tag_of(logical);
                    assert!(
                        found.is_some_and(|t| t.tensor == wanted && t.epoch == epoch),
                        "{} reads {found:?} at {cell:?} of {}, wanted {} (tensor {wanted})",
                        self.describe(node),
                        name(input.tensor),
                        ops.tensors[wanted as usize].name,
                    );
                    if received {
                        assert_eq!(found.map(|t| t.rank), Some(cell[0] as usize), "a peer's slot");
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
                                at = [cell[1], cell[2], 0, 0];
                            } else {
                                (0..4).for_each(|d| at[d] = cell[d] - output.region.lo[d] + lo[d]);
                            }
                            match memory.get(&(rank, source)).and_then(|m| m.get(&at)) {
                                Some(tag) => *tag,
                                None => continue, // of an input
                            }
                        } else {
                            Tag { tensor: tag_of(op.outputs[o]), rank, epoch }
                        };
                        memory.entry((place, name(output.tensor))).or_default().insert(cell, tag);
                    }
                }
            }
        }
    }
}

/// Dynamic placement: one launching event for each task, ranges that say the same.
pub fn assert_launches(g: &TaskGraph) {
    let mut launched = vec![0; g.tasks.len()];
    for (e, event) in g.events.iter().enumerate() {
        for t in event.first_task..event.last_task {
            launched[t as usize] += 1;
            let wanted = &g.tasks[t as usize].dependencies;
            assert_eq!(wanted.as_slice(), [e as u32], "task {t}");
        }
        let launches = matches!(
            event.event_type,
            EventType::LaunchTasks | EventType::LaunchMassiveTasks | EventType::LaunchDependentTasks
        );
        assert_eq!(launches, e != 0 && e != 2);
        assert!(!launches || event.last_task > event.first_task || e == 1, "event {e} launches nothing");
    }
    assert!(launched[2..].iter().all(|&n| n == 1));
}

/// Builds and checks everything that holds for every graph.
pub fn check(graph: &OpGraph, options: &BuildOptions) -> Vec<TaskGraph> {
    let registry = registry();
    let builder = Builder::new(graph, &registry, options).unwrap_or_else(|e| panic!("{e}"));
    let graphs = builder.all().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(graphs, builder.all().unwrap());
    for g in &graphs {
        assert_eq!(*g, build_rank(graph, &registry, options, g.rank).unwrap());
        match options.placement {
            Placement::Static => {
                let mut seen: Vec<u32> = g.worker_lists.iter().flatten().copied().collect();
                seen.sort_unstable();
                assert_eq!(seen, (2..g.tasks.len() as u32).collect::<Vec<_>>());
            }
            Placement::Dynamic => assert_launches(g),
        }
        let symmetric = |g: &TaskGraph| -> Vec<_> {
            let s = g.tensors.iter().filter(|t| t.space == taskgraph::task_graph::Space::Symmetric);
            s.map(|t| (t.name.clone(), t.bytes)).collect()
        };
        assert_eq!(symmetric(g), symmetric(&graphs[0]), "symmetric memory differs between ranks");
        for o in &g.operands {
            let entry = &g.tensors[o.tensor as usize];
            if o.dims[..o.ndim as usize].iter().all(|&d| d > 0) {
                let last: u64 =
                    (0..o.ndim as usize).map(|d| u64::from(o.dims[d] - 1) * u64::from(o.strides[d])).sum();
                assert!(
                    entry.tiled || o.offset + (last + 1) * entry.dtype.size() <= entry.bytes,
                    "{options:?}: {o:?} {entry:?}"
                );
            }
        }
    }
    if let Err(violations) = taskgraph::verify::verify(&graphs) {
        panic!("{options:?}: {}", violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
    }
    let unrolled = Unrolled::new(&graphs, 3);
    unrolled.assert_race_free();
    unrolled.assert_end_is_last();
    unrolled.assert_values(builder.op_graph());
    graphs
}

//! Graphs with sums whose rows stay with the ranks that sum them, and the operators that these need.

use super::attrs;
use super::types::Linear;
use serde_json::json;
use taskgraph::task_graph::{Place, Task, core_types};
use taskgraph::task_type::{
    Access, ExpandedOp, Expansion, ExpansionOperand, LocalOp, OpError, OpView, Partition, ShardRule,
    TaskSpec, Temporary, TensorType,
};
use taskgraph::*;

/// Rows of a block that one rank owns.
pub const BLOCK: u64 = 256;
/// Suffix of the step that ranks carry out for their own rows.
pub const STEP: &str = ".rows";
/// Suffix of what it writes.
pub const BETWEEN: &str = ".between";

const LINEAR: Linear = Linear { name: "linear", residual: false, pushable: false };
const PRODUCT_ATTRIBUTES: &[Attribute] = &[Attribute::new("cut", AttributeKind::Any)];
const ROWS_ATTRIBUTES: &[Attribute] = &[
    Attribute::new("cut", AttributeKind::Any),
    Attribute::new("height", AttributeKind::Any),
    Attribute::new("tile", AttributeKind::Any),
];

fn number(op: &OpView<'_>, name: &str) -> u32 {
    op.attrs.get(name).and_then(|v| v.as_u64()).unwrap_or(0) as u32
}

/// Rows `first..end` of a tensor `[rows, columns]` or `[row tiles, column tiles, rows, columns]`.
fn rows_of(ty: &TensorType, first: u32, end: u32) -> Region {
    let dims: Vec<u32> = ty.dims.iter().map(|&d| d as u32).collect();
    let per_index = if dims.len() == 4 { dims[2] } else { 1 };
    Region::whole(&dims).with(0, first / per_index, end / per_index)
}

/// Row by row. Attribute `height`: rows of a task.
#[derive(Debug)]
pub struct Rows;

impl TaskType for Rows {
    fn name(&self) -> &'static str {
        "rows"
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![op.inputs[0].ty.clone()])
    }
    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        LINEAR.shard(op, world)
    }
    fn partition(&self, op: &LocalOp<'_>, _: &Target) -> Result<Partition, OpError> {
        let (rows, height) = (op.inputs[0].dims[0] as u32, number(op.global, "height"));
        let tasks = (0..rows).step_by(height as usize).map(|first| {
            let end = (first + height).min(rows);
            let mut task = TaskSpec { cost: u64::from(height), ..TaskSpec::default() };
            task.reads.push(Access::new(0, rows_of(&op.inputs[0], first, end)));
            task.writes.push(Access::new(0, rows_of(&op.outputs[0], first, end)));
            task
        });
        Ok(Partition { params: vec![], scratch_bytes: 0, tasks: tasks.collect() })
    }
    fn joins_sum(&self, _: &LocalOp<'_>) -> bool {
        true
    }
}

/// Output `[rows, n]` from input and weight `[n, k]`, in blocks of rows. Attribute `cut`: rows of a task; 0: all.
#[derive(Debug)]
pub struct Product;

impl TaskType for Product {
    fn name(&self) -> &'static str {
        "product"
    }
    fn attributes(&self) -> &'static [Attribute] {
        PRODUCT_ATTRIBUTES
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        LINEAR.infer(op)
    }
    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        LINEAR.shard(op, world)
    }
    fn partition(&self, op: &LocalOp<'_>, _: &Target) -> Result<Partition, OpError> {
        let (rows, n) = (op.outputs[0].dims[0] as u32, op.outputs[0].dims[1] as u32);
        let k = op.inputs[1].dims[1] as u32;
        let cut = Some(number(op.global, "cut")).filter(|&cut| cut > 0).unwrap_or(rows);
        let tasks = (0..rows).step_by(cut as usize).map(|first| {
            let end = (first + cut).min(rows);
            let mut task = TaskSpec { cost: u64::from(cut), ..TaskSpec::default() };
            task.reads.push(Access::new(0, rows_of(&op.inputs[0], first, end)));
            task.reads.push(Access::new(1, Region::whole(&[n, k])));
            task.writes.push(Access::new(0, rows_of(&op.outputs[0], first, end)));
            task
        });
        let tasks = tasks.collect();
        Ok(Partition { params: vec![k], scratch_bytes: 0, tasks })
    }
    fn peer_output(&self, _: &LocalOp<'_>) -> Option<usize> {
        Some(0)
    }
    fn tiled_inputs(&self) -> &'static [usize] {
        &[1]
    }
}

/// [`Rows`], then [`Product`]. Attribute `tile`: the temporary between them is in tiles of this many rows; 0: it is not.
#[derive(Debug)]
pub struct RowsProduct;

impl TaskType for RowsProduct {
    fn name(&self) -> &'static str {
        "rows_product"
    }
    fn attributes(&self) -> &'static [Attribute] {
        ROWS_ATTRIBUTES
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        LINEAR.infer(op)
    }
    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        LINEAR.shard(op, world)
    }
    fn partition(&self, _: &LocalOp<'_>, _: &Target) -> Result<Partition, OpError> {
        Err(OpError("is always expanded".into()))
    }
    fn tiled_inputs(&self) -> &'static [usize] {
        &[1]
    }
    fn expand(&self, op: &LocalOp<'_>, _: &Target) -> Result<Option<Expansion>, OpError> {
        use ExpansionOperand::{Input, Output, Temporary as Between};
        let (mut ty, tile) = (op.inputs[0].clone(), u64::from(number(op.global, "tile")));
        if let Some(tiles) = ty.dims[0].checked_div(tile) {
            ty.dims = vec![tiles, 1, tile, ty.dims[1]];
        }
        let step = |op_type, suffix, inputs, output| ExpandedOp {
            op_type,
            suffix,
            inputs,
            outputs: vec![output],
            attrs: Attrs::new(),
        };
        Ok(Some(Expansion {
            temporaries: vec![Temporary { suffix: BETWEEN, ty }],
            ops: vec![
                step("rows", STEP, vec![Input(0)], Between(0)),
                step("product", "", vec![Between(0), Input(1)], Output(0)),
            ],
        }))
    }
}

/// Shape of a graph with such sums.
#[derive(Clone, Debug)]
pub struct OwnedShape {
    /// Blocks of each rank.
    pub blocks: u64,
    pub columns: u64,
    /// Rows of a task of the step that each rank carries out for its own rows. Not more than a block, or no sum stays with its owners.
    pub height: u64,
    /// Rows of a task of a product; 0: all.
    pub cut: u64,
    /// Rows of a tile of what the step writes, or 0.
    pub tile: u64,
    /// Layers, each with a sum.
    pub layers: usize,
    /// Two operators read each sum, besides the next sum.
    pub two_readers: bool,
    /// The last sum is an output, so every rank gets all of it.
    pub whole: bool,
}

impl OwnedShape {
    /// The same options with the allreduce that such sums need. It takes at least one column tile for each rank.
    pub fn options(&self, options: BuildOptions) -> BuildOptions {
        let max_tiles = options.target.max_tiles.max(options.world);
        let target = Target { max_tiles, column_unit: 1, ..options.target };
        BuildOptions { allreduce: Allreduce::TwoShot, target, ..options }
    }

    pub fn graph(&self, name: &str, world: u32) -> OpGraph {
        let rows = BLOCK * self.blocks * u64::from(world);
        let capacity = Capacity { rows: rows as u32, samples: 1, active: 1 };
        let mut g = OpGraph::new(name, capacity);
        let (columns, inner) = (self.columns.max(world.into()), u64::from(world));
        let of_rows = || attrs(json!({"cut": self.cut, "height": self.height, "tile": self.tile}));
        let even = Split::Even { unit: 1 };
        let mut x = g.input("x", DType::F32, &[rows, columns]);
        for layer in 0..self.layers {
            let up = g.weight(&format!("{name}.up{layer}"), DType::F32, &[inner, columns], Some((0, even)));
            let h = g.op(&format!("h{layer}"), "rows_product", &[x, up], of_rows());
            let down =
                g.weight(&format!("{name}.down{layer}"), DType::F32, &[columns, inner], Some((1, even)));
            let p = g.op(&format!("p{layer}"), "product", &[h, down], attrs(json!({"cut": self.cut})));
            // Between the product and its sum.
            if self.two_readers {
                let side = g.weight(&format!("{name}.side{layer}"), DType::F32, &[1, columns], None);
                let y = g.op(&format!("y{layer}"), "rows_product", &[x, side], of_rows());
                g.tensor_mut(y).output = true;
            }
            x = g.op(&format!("x{layer}"), "add", &[p, x], attrs(json!({})));
        }
        if !self.whole {
            let head = g.weight(&format!("{name}.head"), DType::F32, &[1, columns], None);
            x = g.op("last", "rows_product", &[x, head], of_rows());
        }
        g.tensor_mut(x).output = true;
        g
    }
}

/// The number of sums whose tasks also carry out the first step of the next operator.
pub fn joined_sums(graph: &TaskGraph) -> usize {
    let joined = |t: &&Task| graph.type_name(t) == core_types::REDUCE && t.num_outputs == 2;
    let mut ops: Vec<u32> = graph.tasks.iter().filter(joined).map(|t| t.op).collect();
    ops.sort_unstable();
    ops.dedup();
    ops.len()
}

/// The number of operators whose first step each rank carries out for its own rows and sends to the others.
pub fn owned_steps(graph: &TaskGraph) -> usize {
    let sends = graph.tasks.iter().filter(|t| graph.type_name(t) == core_types::NVSHMEM_COPY);
    let mut names: Vec<&str> = sends.map(|t| graph.op_name(t)).filter(|name| name.ends_with(STEP)).collect();
    names.sort_unstable();
    names.dedup();
    names.len()
}

/// The tiles that products store with the ranks that sum them.
pub fn stored_tiles(graph: &TaskGraph) -> usize {
    let stores = |t: &&Task| {
        let outputs = graph.outputs(t);
        graph.type_name(t) == "product" && outputs.iter().any(|o| matches!(o.place, Place::Peer(_)))
    };
    graph.tasks.iter().filter(stores).count()
}

//! Task types without kernels.

use serde_json::json;
use taskgraph::task_type::{
    Access, ExpandedOp, Expansion, ExpansionOperand, Fusion, LocalOp, Need, OpError, OpView, Partition,
    ShardRule, TaskSpec, Temporary, TensorType,
};
use taskgraph::*;

/// Output `[rows, n]` from input `[rows, k]` and weight `[n, k]`; column tiles, each reads all of the input.
#[derive(Debug)]
pub struct Linear {
    pub name: &'static str,
    /// Operands before the weight have the output's columns, and are read by tile.
    pub residual: bool,
    pub pushable: bool,
}

impl TaskType for Linear {
    fn name(&self) -> &'static str {
        self.name
    }
    fn attributes(&self) -> &'static [Attribute] {
        LINEAR_ATTRIBUTES
    }
    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let (x, w) = (&op.inputs[0].ty, &op.inputs[1].ty);
        if x.dims[1] != w.dims[1] {
            return Err(OpError(format!("depth {} and {}", x.dims[1], w.dims[1])));
        }
        let dtype = op.attrs.get("output_dtype").cloned().map(serde_json::from_value);
        let dtype = dtype.transpose().map_err(|e| OpError(e.to_string()))?.unwrap_or(DType::F32);
        let dtype = if self.residual { DType::F32 } else { dtype };
        Ok(vec![TensorType { dtype, dims: vec![x.dims[0], w.dims[0]], rows: x.rows }])
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
    fn tiled_inputs(&self) -> &'static [usize] {
        &[1]
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

/// Any grid: attributes `dims`, `write` (cells in each dimension), `read` (for each input, the cells in which
/// its dimensions are read; output cell `c` of `n` reads cells `c*m/n ..= ((c+1)*m-1)/n` of `m`), `partial`.
#[derive(Debug)]
pub struct Grid;

const GRID_ATTRIBUTES: &[Attribute] = &[
    Attribute::new("dims", AttributeKind::Any),
    Attribute::new("write", AttributeKind::Any),
    Attribute::new("read", AttributeKind::Any),
    Attribute::new("partial", AttributeKind::Any),
];
const LINEAR_ATTRIBUTES: &[Attribute] = &[Attribute::new("output_dtype", AttributeKind::DType)];
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
        // A persistent tensor after the first output is written in place.
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

/// `[world, tiles, rows, 2]` from `[rows, columns]`; each rank writes its own slice.
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

/// Runs as two `scale` steps with a temporary between them.
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

//! Products of many rows: when the linear family becomes `wide_rows` and `wide_linear`, and how these are partitioned.
//!
//! There are two operators so that a norm, an activation function or a change of layout is computed once per row, and not by
//! each task that reads the row.

use crate::abi;
use crate::tasks::contract;
use crate::tasks::linear_knobs::{
    LEAST_HALVED, LEAST_PARTIAL_ROWS, LEAST_QUARTERED, LEAST_ROUNDED, LEAST_ROWS, LEAST_STACKED,
    LEAST_TALL_ROWS, MOST_QUARTERED_ROWS, SHARED_TALL_ROWS, TALL_ROWS,
};
use crate::tasks::source::Source;
use serde_json::json;
use taskgraph::op_graph::Attrs;
use taskgraph::task_type::{ExpandedOp, Expansion, ExpansionOperand, LocalOp, Temporary, TensorType};
use taskgraph::{DType, Rows, Target};

/// The minimum number of rows and columns of a weight. Each rank has at least 16 indices of the split dimension.
const LEAST_WEIGHT: u64 = 64;

/// The dimensions of `[rows, columns]` in `MPK_LAYOUT_WIDE`.
pub fn wide_dims(rows: u64, columns: u64) -> Vec<u64> {
    let (tile, width) = (u64::from(abi::MPK_WIDE_ROWS), u64::from(abi::MPK_WIDE_COLUMNS));
    vec![rows.div_ceil(tile), columns.div_ceil(width), tile, width]
}

/// The same with column tiles of half the width.
pub fn narrow_dims(rows: u64, columns: u64) -> Vec<u64> {
    let dims = wide_dims(rows, columns);
    vec![dims[0], 2 * dims[1], dims[2], u64::from(abi::MPK_WIDE_NARROW)]
}

/// Whether this local type has the narrower column tiles.
pub fn is_narrow(ty: &TensorType) -> bool {
    is_wide(ty) && ty.dims[3] == u64::from(abi::MPK_WIDE_NARROW)
}

/// Whether a tile of a product of `rows` rows has all rows.
fn is_tall(rows: u64, world: u32, target: &Target) -> bool {
    let most = target.tuned(if world == 1 { &TALL_ROWS } else { &SHARED_TALL_ROWS });
    rows <= most && rows <= u64::from(TALL_WIDTHS[TALL_WIDTHS.len() - 1])
}

/// The dimensions in which a product reads `[rows, columns]`.
fn dims_of(rows: u64, columns: u64, world: u32, target: &Target) -> Vec<u64> {
    if is_tall(rows, world, target) { narrow_dims(rows, columns) } else { wide_dims(rows, columns) }
}

/// `[rows, columns]` as two summands, one after the other. The readers add them.
fn stacked(rows: u64, columns: u64) -> TensorType {
    TensorType { dtype: DType::F32, dims: vec![2, rows, columns], rows: Rows::Fixed }
}

/// The rows and columns of an activation of this local type, and whether it is two summands.
pub fn matrix(ty: &TensorType) -> Option<(u32, u32, bool)> {
    let [.., rows, columns] = ty.dims[..] else { return None };
    let stacked = ty.dims.len() == 3;
    (stacked || ty.dims.len() == 2).then_some((rows.try_into().ok()?, columns.try_into().ok()?, stacked))
}

/// The properties of a member of the linear family that decide its expansion.
#[derive(Debug)]
pub struct Product {
    /// How the left side is computed.
    pub source: Source,
    /// The output is silu(gate) * up.
    pub gated: bool,
    /// The index of the weight among the inputs.
    pub weight: usize,
    /// The index of the bias.
    pub bias: Option<usize>,
    /// The index of the residual.
    pub residual: Option<usize>,
    /// The rows are those that are sampled.
    pub gathers: bool,
}

/// Whether this type is in `MPK_LAYOUT_WIDE`.
pub fn is_wide(ty: &TensorType) -> bool {
    ty.dims.len() == 4
}

/// The type in which a wide product wants an input: x in `MPK_LAYOUT_WIDE`, if it needs no norm, gather or rounding. If a tile has all
/// rows, a normed x and the residual as two summands.
pub fn reads_as(product: &Product, op: &LocalOp<'_>, input: usize, target: &Target) -> Option<TensorType> {
    expand(product, op, target)?;
    let normed = input == 0 && product.source == Source::RmsNorm;
    if normed || product.residual == Some(input) {
        let [rows, columns] = op.inputs[input].dims[..] else { return None };
        let fits = op.world == 1 && op.inputs[input].dtype == DType::F32 && is_tall(rows, op.world, target);
        return fits.then(|| stacked(rows, columns));
    }
    if input != 0 {
        return None;
    }
    let (x, weight) = (&op.inputs[0], &op.inputs[product.weight]);
    let as_it_is = product.source == Source::Plain && !product.gathers && x.dtype == weight.dtype;
    let rows = *op.global.outputs[0].ty.dims.first()?;
    as_it_is.then_some(TensorType {
        dtype: x.dtype,
        dims: dims_of(rows, *weight.dims.get(1)?, op.world, target),
        rows: Rows::Fixed,
    })
}

/// Whether the output can be written as `ty`. The tile of a gated product must have whole column tiles of that layout. Tasks that share
/// the k of a tile write one summand each.
pub fn writes_as(product: &Product, op: &LocalOp<'_>, ty: &TensorType, target: &Target) -> bool {
    let [rows, columns] = op.outputs[0].dims[..] else { return false };
    if ty.dims.len() == 3 {
        let halved = op.world == 1 && is_tall(rows, op.world, target) && is_halved(product, op, target, true);
        return halved && *ty == stacked(rows, columns) && expand(product, op, target).is_some();
    }
    if !product.gated {
        return false;
    }
    let fits = match is_tall(rows, op.world, target) {
        // No task would write the padding of an odd number of column tiles.
        true => columns.is_multiple_of(u64::from(abi::MPK_WIDE_COLUMNS)),
        false => {
            let tile = choose(rows as u32, columns as u32, true, target.workers);
            tile.output_columns(true) == abi::MPK_WIDE_COLUMNS
        }
    };
    fits && ty.dtype == op.outputs[0].dtype
        && ty.dims == dims_of(rows, columns, op.world, target)
        && expand(product, op, target).is_some()
}

/// The expansion into rows and their product; `None` if the product is not wide. The same on all ranks.
pub fn expand(product: &Product, op: &LocalOp<'_>, target: &Target) -> Option<Expansion> {
    let (x, weight, out) = (&op.inputs[0], &op.inputs[product.weight], &op.outputs[0]);
    let rows = *op.global.outputs[0].ty.dims.first()?;
    let whole = &op.global.inputs[product.weight].ty.dims;
    let partial = is_partial(product, op);
    let least = match partial {
        true => &LEAST_PARTIAL_ROWS,
        false if is_tall(rows, op.world, target) => &LEAST_TALL_ROWS,
        false => &LEAST_ROWS,
    };
    let fits = target.wide
        && rows >= target.tuned(least)
        && whole.iter().all(|&d| d >= LEAST_WEIGHT && d / u64::from(op.world) >= 16)
        && weight.dtype.size() == 2
        && (out.dtype == weight.dtype || out.dtype == DType::F32 && !product.gated)
        && (product.source != Source::SiluMul || x.dtype == weight.dtype);
    if !fits {
        return None;
    }
    let (source, normed) = match product.source {
        Source::Plain => ("plain", None),
        Source::RmsNorm => ("norm", Some(1)),
        Source::SiluMul => ("silu_mul", None),
    };
    let input = ExpansionOperand::Input;
    let optional = [product.bias, product.residual].into_iter().flatten().map(input);
    let stacked = out.dims.len() == 3;
    let parts = if stacked { 2 } else { parts(product, op, target) };
    let (mut temporaries, mut ops) = (Vec::new(), Vec::new());
    let mut made_x = input(0);
    if !is_wide(x) {
        made_x = ExpansionOperand::Temporary(0);
        let dims = dims_of(rows, *weight.dims.get(1)?, op.world, target);
        temporaries.push(Temporary {
            suffix: ".wide",
            ty: TensorType { dtype: weight.dtype, dims, rows: Rows::Fixed },
        });
        ops.push(ExpandedOp {
            op_type: "wide_rows",
            suffix: ".rows",
            inputs: std::iter::once(0).chain(normed).map(input).collect(),
            outputs: vec![made_x],
            attrs: attrs(json!({"source": source, "act_dtype": weight.dtype.name()})),
        });
    }
    let made = if parts > 1 && !stacked {
        let first = temporaries.len();
        let suffixes = [".first", ".second", ".third", ".fourth"].into_iter().take(parts as usize);
        let ty = TensorType { dtype: DType::F32, ..out.clone() };
        temporaries.extend(suffixes.map(|suffix| Temporary { suffix, ty: ty.clone() }));
        (first..temporaries.len()).map(ExpansionOperand::Temporary).collect()
    } else {
        vec![ExpansionOperand::Output(0)]
    };
    ops.push(ExpandedOp {
        op_type: "wide_linear",
        suffix: "",
        inputs: [made_x, input(product.weight)].into_iter().chain(optional).collect(),
        outputs: made.clone(),
        attrs: attrs(json!({"gated": product.gated, "has_bias": product.bias.is_some(),
            "has_residual": product.residual.is_some(), "parts": parts})),
    });
    if parts > 1 && !stacked {
        let mut summands: Vec<ExpansionOperand> = made;
        summands.swap(0, 1); // the first part includes the residual
        ops.push(ExpandedOp {
            op_type: "add",
            suffix: ".sum",
            inputs: summands,
            outputs: vec![ExpansionOperand::Output(0)],
            attrs: Attrs::new(),
        });
    }
    Some(Expansion { temporaries, ops })
}

/// Whether each rank has a part of every sum.
fn is_partial(product: &Product, op: &LocalOp<'_>) -> bool {
    op.world > 1 && contract::split_columns(op.global.inputs[product.weight].sharding).is_some()
}

/// How many tasks share the k of a tile, if readers do not add the parts themselves.
fn parts(product: &Product, op: &LocalOp<'_>, target: &Target) -> u32 {
    let (out, weight) = (&op.outputs[0], &op.inputs[product.weight]);
    let ([rows, columns], [_, k]) = (&out.dims[..], &weight.dims[..]) else { return 1 };
    if is_halved(product, op, target, false) {
        return 2;
    }
    let fits = !product.gated
        && !product.gathers
        && FEW.iter().all(|few| *rows > u64::from(few.width))
        && *rows <= target.tuned(&MOST_QUARTERED_ROWS)
        && *k >= target.tuned(if out.dtype == DType::F32 { &LEAST_QUARTERED } else { &LEAST_ROUNDED })
        && (out.dtype == DType::F32 || op.world == 1 || is_partial(product, op));
    if !fits {
        return 1;
    }
    fastest_parts(*rows as u32, *columns as u32, *k as u32, target.workers)
}

/// The number of tasks that share the k of a tile for which the product and the sum of its parts are ready first.
fn fastest_parts(rows: u32, columns: u32, k: u32, workers: u32) -> u32 {
    let time = |parts: &u32| {
        let tile = best_parted(rows, columns, *parts, workers);
        // A task takes some thousand clocks in addition to its k.
        let task = u64::from(k.div_ceil(*parts).div_ceil(64)) * tile.clocks + 5000;
        let sum = if *parts == 1 { 0 } else { clocks_of_sum(rows, columns, *parts, workers) };
        tile.waves(rows, columns, false, *parts, workers) * task + sum
    };
    [1, 2, 4].into_iter().min_by_key(time).unwrap_or(1)
}

/// The clocks from a product's last task to the end of the sum of its parts: the hop, the first loads, and the transfer from the L2
/// cache (H200: 6 us for two parts of 128 x 4,096 sums).
fn clocks_of_sum(rows: u32, columns: u32, parts: u32, workers: u32) -> u64 {
    let bytes = u64::from(rows) * u64::from(columns) * 4 * u64::from(parts + 1);
    8000 + bytes / (u64::from(workers.max(1)) * 30)
}

/// The tile of a product if `parts` tasks share the k of a tile, and a tile does not have all rows.
pub fn parted(rows: u32, columns: u32, gated: bool, parts: u32, workers: u32) -> Tile {
    if parts == 1 || FEW.iter().any(|few| rows <= few.width) {
        return choose(rows, columns, gated, workers);
    }
    best_parted(rows, columns, parts, workers)
}

fn best_parted(rows: u32, columns: u32, parts: u32, workers: u32) -> Tile {
    let time = |tile: &&Tile| tile.waves(rows, columns, false, parts, workers) * tile.clocks;
    *PARTED.iter().min_by_key(time).unwrap_or(&PARTED[0])
}

/// Whether two tasks share the k of a tile. They do in products of few rows with at most half as many tiles as there are workers.
/// `stacked`: the readers add the halves.
fn is_halved(product: &Product, op: &LocalOp<'_>, target: &Target, stacked: bool) -> bool {
    let (out, weight) = (&op.outputs[0], &op.inputs[product.weight]);
    let ([rows, columns], [_, k]) = (&out.dims[..], &weight.dims[..]) else { return false };
    let tile = match is_tall(*rows, op.world, target) {
        true => halved_tall(*rows as u32),
        false => choose(*rows as u32, *columns as u32, product.gated, target.workers),
    };
    !product.gated
        && !product.gathers
        && out.dtype == DType::F32
        && (FEW.contains(&tile) || is_tall(*rows, op.world, target) && op.world == 1)
        && *rows <= u64::from(tile.width)
        && *k >= target.tuned(if stacked { &LEAST_STACKED } else { &LEAST_HALVED })
        && 2 * columns.div_ceil(u64::from(tile.high)) <= u64::from(target.workers)
}

fn attrs(value: serde_json::Value) -> Attrs {
    match value {
        serde_json::Value::Object(fields) => fields,
        _ => Attrs::new(),
    }
}

/// A tile: `high` rows of the weight (in a gated product half of them are gates), and `tokens` times `width` rows of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows of the weight. Of 128, each of the two warpgroups has half; of another number, both have all.
    pub high: u32,
    /// The number of tiles of rows of x.
    pub tokens: u32,
    /// The rows of x in each of them.
    pub width: u32,
    /// The clocks for 64 k: of the tensor cores or, if that is more, of the reads and writes of shared memory.
    clocks: u64,
}

/// The tiles that the GPU code supports, best first. Each is a main loop in the kernel, and there are registers for only a few of
/// them (`gpu/wide_linear.cuh`).
const TILES: [Tile; 3] = [
    Tile { high: 128, tokens: 2, width: 128, clocks: 1024 },
    Tile { high: 128, tokens: 1, width: 128, clocks: 640 },
    Tile { high: 64, tokens: 1, width: 64, clocks: 320 },
];
/// The tiles of which several tasks may share the k.
const PARTED: [Tile; 2] = [TILES[0], TILES[1]];
/// The tiles for few rows, where memory bandwidth for the weights is the limit.
const FEW: [Tile; 2] = [
    Tile { high: 64, tokens: 1, width: 32, clocks: 256 },
    Tile { high: 64, tokens: 1, width: 64, clocks: 320 },
];

impl Tile {
    /// The tile's columns of the output.
    pub fn output_columns(&self, gated: bool) -> u32 {
        self.high / (1 + u32::from(gated))
    }

    /// The most tasks that one of `workers` gets, for a product of this size where `parts` tasks share the k of a tile.
    fn waves(&self, rows: u32, columns: u32, gated: bool, parts: u32, workers: u32) -> u64 {
        let tiles = columns.div_ceil(self.output_columns(gated)) * rows.div_ceil(self.tokens * self.width);
        u64::from((tiles * parts).div_ceil(workers.max(1)))
    }

    /// How many column tiles are computed for all rows before the next ones, so that a wave of tasks reads each weight and each row
    /// from memory once.
    pub fn group(&self) -> u32 {
        8 * self.tokens.max(1)
    }
}

/// The tile with which `workers` finish first.
pub fn choose(rows: u32, columns: u32, gated: bool, workers: u32) -> Tile {
    if let Some(few) = FEW.iter().find(|tile| rows <= tile.width) {
        return *few;
    }
    let time = |tile: &&Tile| tile.waves(rows, columns, gated, 1, workers) * tile.clocks;
    *TILES.iter().min_by_key(time).unwrap_or(&TILES[0])
}

/// The rows of x in tiles that have all rows (`gpu/wide_tall.cuh`).
const TALL_WIDTHS: [u32; 2] = [32, 64];

fn tall(high: u32, rows: u32) -> Tile {
    let width =
        TALL_WIDTHS.into_iter().find(|width| rows <= *width).unwrap_or(TALL_WIDTHS[TALL_WIDTHS.len() - 1]);
    Tile { high, tokens: 1, width, clocks: 0 }
}

/// The tile of a product if a tile has all rows and two tasks share its k.
pub fn halved_tall(rows: u32) -> Tile {
    tall(64, rows)
}

/// The tile with all rows with which `workers` finish first. A multiprocessor loads a fixed number of bytes per microsecond, of weights and
/// rows together.
pub fn choose_tall(rows: u32, columns: u32, gated: bool, workers: u32) -> Tile {
    let time = |tile: &Tile| {
        columns.div_ceil(tile.output_columns(gated)).div_ceil(workers.max(1)) * (tile.high + tile.width)
    };
    // Among equally fast tiles the first is taken. In a gated product a tile has whole column tiles of the layout.
    let highs: &[u32] = if gated { &[64, 192] } else { &[64, 192, 48, 32] };
    highs.iter().map(|&high| tall(high, rows)).min_by_key(time).unwrap_or(tall(64, rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_take_smaller_tiles_so_that_all_workers_have_one() {
        let shape = |t: Tile| (t.high, t.tokens, t.width);
        assert_eq!(shape(choose(2048, 6144, false, 132)), (128, 2, 128));
        assert_eq!(shape(choose(512, 4096, false, 132)), (128, 1, 128));
        assert_eq!(shape(choose(256, 4096, false, 132)), (128, 1, 128));
        assert_eq!(shape(choose(2048, 12288, true, 132)), (128, 2, 128));
        assert_eq!(shape(choose(33, 4096, false, 132)), (64, 1, 64));
        assert_eq!(shape(choose(16, 12288, true, 132)), (64, 1, 32));
        assert_eq!(shape(choose_tall(33, 4096, false, 132)), (32, 1, 64));
        assert_eq!(shape(choose_tall(32, 6144, false, 132)), (48, 1, 32));
        assert_eq!(shape(choose_tall(16, 12288, true, 132)), (192, 1, 32));
        assert_eq!(shape(choose_tall(16, 12288, true, 400)), (64, 1, 32));
    }

    #[test]
    fn tasks_share_k_where_that_pays_for_the_sum() {
        let shape = |rows, columns, k, workers| {
            let parts = fastest_parts(rows, columns, k, workers);
            let tile = best_parted(rows, columns, parts, workers);
            (parts, tile.high, tile.tokens * tile.width)
        };
        // The down and output projections of 8B on an H200. If the output projection of 512 rows had two parts, their sum would
        // cost more time than it saves.
        assert_eq!(shape(128, 4096, 12288, 132), (4, 128, 128));
        assert_eq!(shape(128, 4096, 4096, 132), (4, 128, 128));
        assert_eq!(shape(256, 4096, 12288, 132), (4, 128, 256));
        assert_eq!(shape(512, 4096, 12288, 132), (2, 128, 256));
        assert_eq!(shape(512, 4096, 4096, 132), (1, 128, 128));
        // The waves are full without parts.
        assert_eq!(shape(1024, 4096, 12288, 132), (1, 128, 256));
        assert_eq!(shape(2048, 4096, 12288, 132), (1, 128, 256));
        assert_eq!(fastest_parts(512, 4096, 12288, 4), 1);
    }
}

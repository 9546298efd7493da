//! Products of many rows: when the linear family becomes `wide_rows` and `wide_linear`, and how these are partitioned.
//!
//! There are two operators so that a norm, an activation function or a change of layout is computed once per row, and not by
//! each task that reads the row.

use crate::abi;
use crate::tasks::contract;
use crate::tasks::linear_knobs::{
    BROAD_ROWS, LEAST_BROAD_ROUNDED, LEAST_CUT_ROWS, LEAST_HALVED, LEAST_PARTIAL_ROWS, LEAST_QUARTERED,
    LEAST_ROUNDED, LEAST_ROWS, LEAST_STACKED, LEAST_TALL_ROWS, MOST_QUARTERED_ROWS, SHARED_BROAD_ROWS,
    SHARED_TALL_ROWS, TALL_GATED_128, TALL_ROWS,
};
use crate::tasks::source::Source;
use crate::tasks::wide_tile::{
    Cut, FEW, MOST_BROAD_ROWS, MOST_TALL_ROWS, TallTiles, choose, cut, fastest_parts, tall_width,
};
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

/// The same with narrower column tiles. If a tile of the product has all rows, a column tile has just these rows, so that
/// adjacent column tiles lie next to each other, and one copy brings several of them.
pub fn narrow_dims(rows: u64, columns: u64) -> Vec<u64> {
    let dims = wide_dims(rows, columns);
    let height = tall_width(rows).map_or(dims[2], u64::from);
    let narrow = u64::from(abi::MPK_WIDE_NARROW);
    vec![dims[0], dims[1] * dims[3] / narrow, height, narrow]
}

/// Whether this local type has the narrower column tiles.
pub fn is_narrow(ty: &TensorType) -> bool {
    is_wide(ty) && ty.dims[3] == u64::from(abi::MPK_WIDE_NARROW)
}

/// Whether a tile of a product of `rows` rows has all rows.
fn is_tall(rows: u64, world: u32, target: &Target) -> bool {
    let most = target.tuned(if world == 1 { &TALL_ROWS } else { &SHARED_TALL_ROWS });
    rows <= most && rows <= u64::from(MOST_TALL_ROWS)
}

/// The tiles that have all rows, on this target.
pub fn tall_tiles(target: &Target) -> TallTiles {
    TallTiles { gated_128: target.tuned(&TALL_GATED_128) != 0 }
}

/// Whether a tile has all rows, and more than a tall one can have.
fn is_broad(rows: u64, world: u32, target: &Target) -> bool {
    let most = target.tuned(if world == 1 { &BROAD_ROWS } else { &SHARED_BROAD_ROWS });
    rows > u64::from(MOST_TALL_ROWS) && rows <= most.min(u64::from(MOST_BROAD_ROWS))
}

/// Whether a tile has all rows of x. Then the column tiles of x are narrow.
fn has_all_rows(rows: u64, world: u32, target: &Target) -> bool {
    is_tall(rows, world, target) || is_broad(rows, world, target)
}

/// The dimensions in which a product reads `[rows, columns]`.
fn dims_of(rows: u64, columns: u64, world: u32, target: &Target) -> Vec<u64> {
    if has_all_rows(rows, world, target) { narrow_dims(rows, columns) } else { wide_dims(rows, columns) }
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
    let fits = match has_all_rows(rows, op.world, target) {
        // No task would write the padding of the last column tiles.
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
    let fits = target.wide
        && rows >= least_rows(product, op, rows, target)
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
    let Cut { first_row, parts } = if stacked { Cut::all(2) } else { cut_of(product, op, target) };
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
    let mut summands = Vec::new();
    if parts > 1 && !stacked {
        let first = temporaries.len();
        let suffixes = [".first", ".second", ".third", ".fourth"].into_iter().take(parts as usize);
        let dims = vec![out.dims[0] - u64::from(first_row), out.dims[1]];
        // Row r of a part of the last rows is not the batch's row r.
        let rows = if first_row > 0 { Rows::Fixed } else { out.rows };
        let ty = TensorType { dtype: DType::F32, dims, rows };
        temporaries.extend(suffixes.map(|suffix| Temporary { suffix, ty: ty.clone() }));
        summands.extend((first..temporaries.len()).map(ExpansionOperand::Temporary));
    }
    let whole = (first_row > 0 || summands.is_empty()).then_some(ExpansionOperand::Output(0));
    ops.push(ExpandedOp {
        op_type: "wide_linear",
        suffix: "",
        inputs: [made_x, input(product.weight)].into_iter().chain(optional).collect(),
        outputs: whole.iter().chain(&summands).copied().collect(),
        attrs: attrs(json!({"gated": product.gated, "has_bias": product.bias.is_some(),
            "has_residual": product.residual.is_some(), "parts": parts, "first_row": first_row})),
    });
    if !summands.is_empty() {
        summands.swap(0, 1); // the first part includes the residual
        ops.push(ExpandedOp {
            op_type: "add",
            suffix: ".sum",
            inputs: summands,
            outputs: vec![ExpansionOperand::Output(0)],
            attrs: attrs(json!({"first_row": first_row})),
        });
    }
    Some(Expansion { temporaries, ops })
}

/// The fewest rows for which the product is wide.
fn least_rows(product: &Product, op: &LocalOp<'_>, rows: u64, target: &Target) -> u64 {
    if !is_partial(product, op) {
        let tall = is_tall(rows, op.world, target);
        return target.tuned(if tall { &LEAST_TALL_ROWS } else { &LEAST_ROWS });
    }
    // The tiles of other products have half as many columns. If each worker gets one of these at most, half of the workers would get no
    // wide tile. Then a step of 16 rows on two H200s (0.6B: 64 tiles for 132 workers) would take 1.28 ms instead of 1.18 ms.
    let columns = op.outputs[0].dims.last().copied().unwrap_or(0);
    let one_each = columns.div_ceil(target.column_unit.into()) <= target.workers.into();
    target.tuned(&LEAST_PARTIAL_ROWS).max(if one_each { target.tuned(&LEAST_ROWS) } else { 0 })
}

/// Whether each rank has a part of every sum.
fn is_partial(product: &Product, op: &LocalOp<'_>) -> bool {
    op.world > 1 && contract::split_columns(op.global.inputs[product.weight].sharding).is_some()
}

/// The tiles that are cut, if readers do not add the parts themselves.
fn cut_of(product: &Product, op: &LocalOp<'_>, target: &Target) -> Cut {
    let (out, weight) = (&op.outputs[0], &op.inputs[product.weight]);
    let ([rows, columns], [_, k]) = (&out.dims[..], &weight.dims[..]) else { return Cut::NONE };
    if is_halved(product, op, target, false) {
        return Cut::all(2);
    }
    let broad = is_broad(*rows, op.world, target);
    let least = match (out.dtype, broad) {
        (DType::F32, _) => &LEAST_QUARTERED,
        (_, false) => &LEAST_ROUNDED,
        (_, true) => &LEAST_BROAD_ROUNDED,
    };
    let fits = !product.gated
        && !product.gathers
        && FEW.iter().all(|few| *rows > u64::from(few.width))
        && *k >= target.tuned(least)
        && (out.dtype == DType::F32 || op.world == 1 || is_partial(product, op));
    let size = (*rows as u32, *columns as u32, *k as u32);
    if fits && *rows <= target.tuned(&MOST_QUARTERED_ROWS) {
        return Cut::all(fastest_parts(size.0, size.1, size.2, target.workers, broad));
    }
    let cuts = fits && *rows >= target.tuned(&LEAST_CUT_ROWS);
    let cut = cuts.then(|| cut(size.0, size.1, size.2, op.world, target.workers)).flatten();
    cut.unwrap_or(Cut::NONE)
}

/// Whether two tasks share the k of a tile. They do in products of few rows with at most half as many tiles as there are workers.
/// `stacked`: the readers add the halves.
fn is_halved(product: &Product, op: &LocalOp<'_>, target: &Target, stacked: bool) -> bool {
    let (out, weight) = (&op.outputs[0], &op.inputs[product.weight]);
    let ([rows, columns], [_, k]) = (&out.dims[..], &weight.dims[..]) else { return false };
    let tile = match is_tall(*rows, op.world, target) {
        true => tall_tiles(target).halved(*rows as u32),
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

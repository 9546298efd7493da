//! For tests of tasks that sum some rows of a tensor and norm them ([`TaskType::joins_sum`](taskgraph::TaskType::joins_sum)).

use crate::abi::mpk_wide_rows_params;
use crate::layout::{narrow_index, wide_index};
use crate::tasks::wide::{narrow_dims, wide_dims};
use taskgraph::task_type::Access;
use taskgraph::{DType, Region};

const EPS: f32 = 1e-3;
/// Rows of the tensor, of which the task has some, and of which some of those are in use.
pub(crate) const ROWS: u32 = 200;
const FIRST: u32 = 128;
const HEIGHT: u32 = 32;
pub(crate) const USED: u32 = 141;
/// The task's arguments: those of the sum, then those of `wide_rows`.
pub(crate) const ARGS: [i32; 8] = [FIRST as i32, FIRST as i32, 0, HEIGHT as i32, 0, 0, 0, 0];

/// The task's rows in a tensor of these dimensions, in which `dim` numbers the rows.
pub(crate) fn rows_of(dims: &[u32], dim: usize) -> Access {
    Access::new(0, Region::whole(dims).with(dim, FIRST, FIRST + HEIGHT))
}

/// The dimensions of the normed rows, and those of the task. `narrow`: they have the narrower column tiles.
pub(crate) fn normed_rows(columns: u32, narrow: bool) -> (Vec<u32>, Access) {
    let dims_of = if narrow { narrow_dims } else { wide_dims };
    let dims: Vec<u32> = dims_of(ROWS.into(), columns.into()).iter().map(|&d| d as u32).collect();
    let region = Region::whole(&dims).with(0, FIRST / 128, FIRST / 128 + 1).with(2, 0, HEIGHT);
    (dims, Access::new(0, region))
}

/// The parameters of the norm.
pub(crate) fn params(columns: u32) -> mpk_wide_rows_params {
    mpk_wide_rows_params { source: 1, gather: 0, rows_kind: 0, rows: ROWS, columns, eps: EPS }
}

/// The memory that the task needs, in bytes.
pub(crate) fn scratch_bytes(columns: u32) -> u64 {
    u64::from(4 * columns + 2 * columns.next_multiple_of(64))
}

/// The sums are `sum_of` each element, bit for bit. Their norm is the one in double precision, rounded. No other row is written.
pub(crate) fn check(
    what: &str,
    (sums, normed, narrow): (&[f32], &[f32], bool),
    sum_of: impl Fn(usize) -> f32,
    (weight, act): (&[f32], DType),
) {
    let k = weight.len();
    let place_of = |row, column| match narrow {
        true => narrow_index(128, row, column, k),
        false => wide_index(row, column, k),
    };
    for row in 0..ROWS as usize {
        let at = row * k..(row + 1) * k;
        let place = |column: usize| normed[place_of(row, column)];
        if !(FIRST as usize..USED as usize).contains(&row) {
            assert!(sums[at].iter().all(|v| v.is_nan()), "{what}: summed row {row}");
            assert!((0..k).all(|c| place(c).is_nan()), "{what}: normed row {row}");
            continue;
        }
        let expected: Vec<f32> = at.clone().map(&sum_of).collect();
        assert_eq!(sums[at], expected, "{what}: row {row}");
        let exact: Vec<f64> = expected.iter().map(|&v| f64::from(v)).collect();
        let mean = exact.iter().map(|v| v * v).sum::<f64>() / k as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        let unit = if act == DType::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
        for column in 0..k {
            let (wanted, found) = (exact[column] * scale * f64::from(weight[column]), place(column));
            let fits = (f64::from(found) - wanted).abs() <= unit * wanted.abs() + 1e-6;
            assert!(fits, "{what}: row {row}, column {column}: {found}, {wanted}");
        }
        assert!((k..k.next_multiple_of(64)).all(|c| place(c) == 0.0), "{what}: padding of row {row}");
    }
}

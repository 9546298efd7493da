//! For tests of tasks that sum some rows of a tensor and norm them ([`TaskType::joins_sum`](taskgraph::TaskType::joins_sum)).

use crate::abi::mpk_wide_rows_params;
use crate::layout::{narrow_index, wide_index};
use crate::tasks::wide::{narrow_dims, wide_dims};
use taskgraph::task_type::Access;
use taskgraph::{DType, Region};

const EPS: f32 = 1e-3;

/// The rows of a task.
#[derive(Clone, Copy)]
pub(crate) struct TaskRows {
    /// The normed rows have the narrower column tiles.
    pub(crate) narrow: bool,
    /// Rows of the tensor.
    pub(crate) all: u32,
    /// The first of the task's rows, and their number.
    first: u32,
    height: u32,
    /// Rows of the tensor that are in use. They end among the task's.
    pub(crate) used: u32,
}

/// In the second of two row tiles.
pub(crate) const WIDE: TaskRows = TaskRows { narrow: false, all: 200, first: 128, height: 32, used: 141 };
/// Inside the only row tile, which has 64 rows.
pub(crate) const NARROW: TaskRows = TaskRows { narrow: true, all: 50, first: 32, height: 16, used: 41 };

impl TaskRows {
    /// The task's arguments: those of the sum, then those of `wide_rows`.
    pub(crate) fn args(self) -> [i32; 8] {
        let (first, height) = (self.first as i32, self.height as i32);
        [first, first, 0, height, 0, 0, 0, 0]
    }

    /// The rows in a tensor of these dimensions, in which `dim` numbers the rows.
    pub(crate) fn within(self, dims: &[u32], dim: usize) -> Access {
        Access::new(0, Region::whole(dims).with(dim, self.first, self.first + self.height))
    }

    /// The dimensions of the normed rows, and those of the task.
    pub(crate) fn normed(self, columns: u32) -> (Vec<u32>, Access) {
        let dims_of = if self.narrow { narrow_dims } else { wide_dims };
        let dims: Vec<u32> = dims_of(self.all.into(), columns.into()).iter().map(|&d| d as u32).collect();
        let (tile, first) = (self.first / dims[2], self.first % dims[2]);
        let region = Region::whole(&dims).with(0, tile, tile + 1).with(2, first, first + self.height);
        (dims, Access::new(0, region))
    }

    /// The parameters of the norm.
    pub(crate) fn params(self, columns: u32) -> mpk_wide_rows_params {
        mpk_wide_rows_params { source: 1, gather: 0, rows_kind: 0, rows: self.all, columns, eps: EPS }
    }

    /// The sums are `sum_of` each element, bit for bit. Their norm is the one in double precision, rounded. No other row is written.
    pub(crate) fn check(
        self,
        what: &str,
        (sums, normed): (&[f32], &[f32]),
        sum_of: impl Fn(usize) -> f32,
        (weight, act): (&[f32], DType),
    ) {
        let k = weight.len();
        let tile_rows = self.normed(k as u32).0[2] as usize;
        let place_of = |row, column| match self.narrow {
            true => narrow_index(tile_rows, row, column, k),
            false => wide_index(row, column, k),
        };
        for row in 0..self.all as usize {
            let at = row * k..(row + 1) * k;
            let place = |column: usize| normed[place_of(row, column)];
            if !(self.first as usize..self.used as usize).contains(&row) {
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
}

/// The memory that the task needs, in bytes.
pub(crate) fn scratch_bytes(columns: u32) -> u64 {
    u64::from(4 * columns + 2 * columns.next_multiple_of(64))
}

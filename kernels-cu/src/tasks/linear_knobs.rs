//! The knobs of products, which `mpk-bench tune` measures. The defaults were measured on H200s.

use taskgraph::Knob;

/// With at least this many workers, each gates its own outputs instead of all inputs.
pub const GATING_WORKERS: Knob = Knob {
    name: "linear.gating_workers",
    default: 32,
    candidates: &[1, 32, 1 << 16],
    about: "gated products: minimum number of workers for which each worker gates its own outputs; with fewer, each reader gates its inputs",
};

/// The fewest rows of an iteration for which products become wide, if a tile does not have all rows. On one H200
/// (8B), a step of 16 rows takes 5.60 ms without wide products and 5.85 ms with them; a step of 32 rows takes 7.6 and 6.4 ms.
pub const LEAST_ROWS: Knob = Knob {
    name: "wide.least_rows",
    default: 17,
    candidates: &[9, 17, 33, 65],
    about: "fewest rows of an iteration for which products have wide tiles",
};

/// The fewest rows for which products become wide if each rank has a part of every sum. With 65 and with 17, a step on two H200s (8B)
/// took 4.98 and 4.45 ms for 32 rows, 7.09 and 5.38 ms for 64 rows. With 17 and with 9, it took 3.37 and 3.30 ms for 16 rows, 3.26 and
/// 3.28 ms for 12 rows; with 32B 11.30 and 10.48 ms for 16 rows, 10.50 and 10.09 ms for 12 rows. More ranks were not measured. Products
/// with few columns need [`LEAST_ROWS`], too (`least_rows` in `wide.rs`).
pub const LEAST_PARTIAL_ROWS: Knob = Knob {
    name: "wide.least_partial_rows",
    default: 9,
    candidates: &[9, 17, 33, 65, 129],
    about: "fewest rows of an iteration for which row-parallel products with many columns have wide tiles on several ranks",
};

/// The most rows of an iteration for which wide products push their sums to the other ranks as they compute them. Above that, their sums
/// are copied, or summed by shares. More than 16 was not measured.
pub const PUSHED_ROWS: Knob = Knob {
    name: "wide.pushed_rows",
    default: 16,
    candidates: &[0, 16, 32, 64],
    about: "most rows of an iteration for which wide products push their sums to the other ranks as they compute them",
};

/// The fewest columns of a weight that two tasks share if there are too few tiles for the workers. On an H200, a
/// multiprocessor takes 0.44 us for 128 columns, independently of the others, and adding both halves takes 4 us. So
/// 12,288 columns of 32 rows take 42 us if they are not shared, and 28 us if they are. Sharing products of 4,096
/// columns as well reduced a step of batch 64 (8B) from 7.63 to 7.56 ms.
pub const LEAST_HALVED: Knob = Knob {
    name: "wide.least_halved_columns",
    default: 4096,
    candidates: &[2048, 4096, 6144, 12288, 1 << 20],
    about: "fewest columns of a weight that two tasks share if there are too few tiles for the workers",
};

/// On one rank, the most rows of an iteration for which a tile has all rows. Without and with such tiles, a step on an H200
/// (8B) took 5.98 and 5.52 ms for 16 rows, 6.69 and 6.44 ms for 32 rows, 7.57 and 7.35 ms for 64 rows.
pub const TALL_ROWS: Knob = Knob {
    name: "wide.tall_rows",
    default: 64,
    candidates: &[0, 32, 64],
    about: "on one rank, most rows of an iteration for which a tile of a wide product has all rows and up to 192 columns",
};

/// Like [`TALL_ROWS`], on several ranks. Without and with such tiles, and with those of [`LEAST_PARTIAL_ROWS`], a step on two H200s (8B)
/// took 3.82 and 3.59 ms for 16 rows, 4.79 and 4.45 ms for 32 rows, 6.89 and 5.38 ms for 64 rows.
pub const SHARED_TALL_ROWS: Knob = Knob {
    name: "wide.shared_tall_rows",
    default: 64,
    candidates: &[0, 32, 64],
    about: "on several ranks, most rows of an iteration for which a tile of a wide product has all rows and up to 192 columns",
};

/// Like [`TALL_ROWS`], for more than 64 rows. Without and with such tiles, a step of 128 rows on an H100 (8B) took 11.34 and 10.95 ms.
pub const BROAD_ROWS: Knob = Knob {
    name: "wide.broad_rows",
    default: 128,
    candidates: &[0, 128],
    about: "on one rank, most rows of an iteration for which a tile of a wide product has all of more than 64 rows and up to 192 columns",
};

/// Like [`BROAD_ROWS`], on several ranks. Without and with such tiles, a step of 128 rows on two H200s (8B) took 6.61 and 6.58 ms.
pub const SHARED_BROAD_ROWS: Knob = Knob {
    name: "wide.shared_broad_rows",
    default: 0,
    candidates: &[0, 128],
    about: "on several ranks, most rows of an iteration for which a tile of a wide product has all of more than 64 rows and up to 192 columns",
};

/// Like [`LEAST_ROWS`], if a tile has all rows.
pub const LEAST_TALL_ROWS: Knob = Knob {
    name: "wide.least_tall_rows",
    default: 9,
    candidates: &[3, 5, 9, 17],
    about: "fewest rows of an iteration for which a tile of a wide product has all rows",
};

/// Whether a tile that has all rows may have 64 gates and their ups, between the 32 and 96 that it may always have, and the 48 of up to 32
/// rows. Without and with such tiles, a step on two H200s (8B) took 3.61 and 3.54 ms for 16 rows, 4.50 and 4.46 ms for 32 rows, 5.41 ms for
/// 64 rows.
pub const TALL_GATED_128: Knob = Knob {
    name: "wide.tall_gated_128",
    default: 1,
    candidates: &[0, 1],
    about: "1: a tile of a gated wide product that has all rows may have 64 gates and their ups; 0: 32 or 96, and 48 with up to 32 rows",
};

/// Like [`LEAST_HALVED`], if a tile has all rows. Then the readers add the halves.
pub const LEAST_STACKED: Knob = Knob {
    name: "wide.least_stacked_columns",
    default: 2048,
    candidates: &[2048, 4096, 6144, 12288, 1 << 20],
    about: "fewest columns of a weight that two tasks share if the readers add up their halves",
};

/// The fewest columns of a weight that several tasks share in products of more than 64 rows. If they are not shared, the tiles of 65
/// to 128 rows are 64 x 64 and read twice as many bytes per product (H200, 8B, batch 128: 3 MB per task of `down` instead of 1.5).
pub const LEAST_QUARTERED: Knob = Knob {
    name: "wide.least_quartered_columns",
    default: 4096,
    candidates: &[2048, 4096, 6144, 12288, 1 << 20],
    about: "fewest columns of a weight whose tiles of 128 rows two or four tasks share, if there are too few tiles for the workers",
};

/// The most rows of such products. With 256, a prompt of 240 tokens takes 9.09 ms instead of 10.15 ms (8B, H200).
pub const MOST_QUARTERED_ROWS: Knob = Knob {
    name: "wide.most_quartered_rows",
    default: 256,
    candidates: &[128, 256, 512, 2048],
    about: "most rows of an iteration for which two or four tasks share every tile of 128 rows of the weight",
};

/// The fewest columns of a weight that several tasks share if the output is rounded; then the sum of the parts is rounded. For up to
/// [`MOST_QUARTERED_ROWS`], and for tiles that are cut ([`LEAST_CUT_ROWS`]). Tiles with all rows have [`LEAST_BROAD_ROUNDED`].
pub const LEAST_ROUNDED: Knob = Knob {
    name: "wide.least_rounded_columns",
    default: 4096,
    candidates: &[2048, 4096, 1 << 20],
    about: "fewest columns of a weight whose tiles of 128 rows two or four tasks share, if there are too few tiles for the workers and the output is rounded to the weight's type",
};

/// Like [`LEAST_ROUNDED`], if a tile has all of more than 64 rows. If four tasks share `qkv`, a step of batch 128 takes 8.50 ms, and 8.24 ms
/// if none do (8B, one H200): each task then has tiles of 64 rows, and their sum is not a step of its own. Weights with fewer than 6,144
/// rows, which leave more workers without a tile, were not measured.
pub const LEAST_BROAD_ROUNDED: Knob = Knob {
    name: "wide.least_broad_rounded_columns",
    default: 1 << 20,
    candidates: &[4096, 1 << 20],
    about: "as wide.least_rounded_columns, if a tile has all of more than 64 rows",
};

/// The fewest rows of an iteration for which the last tiles of a product are cut.
pub const LEAST_CUT_ROWS: Knob = Knob {
    name: "wide.least_cut_rows",
    default: 1024,
    candidates: &[512, 1024, 1280, 1 << 20],
    about: "fewest rows of an iteration for which tasks share the tiles that are left for the last wave",
};

/// The most rows of an iteration for which several tasks share the k of a tile of 16 columns, if there are too few tiles for the
/// workers. The readers add their sums. Not measured.
pub const MOST_PARTED_ROWS: Knob = Knob {
    name: "linear.most_parted_rows",
    default: 8,
    candidates: &[0, 1, 8, 16],
    about: "most rows of an iteration for which several tasks share a tile of 16 columns, if there are too few for the workers; 0: none",
};

/// The fewest columns of a weight for each of the tasks that share a tile. Not measured.
pub const LEAST_PART_COLUMNS: Knob = Knob {
    name: "linear.least_part_columns",
    default: 512,
    candidates: &[16, 256, 512, 1024, 2048],
    about: "fewest columns of a weight for each of the tasks that share a tile of 16 columns",
};

/// All of them.
pub const KNOBS: &[&Knob] = &[
    &GATING_WORKERS,
    &LEAST_ROWS,
    &LEAST_PARTIAL_ROWS,
    &PUSHED_ROWS,
    &LEAST_HALVED,
    &TALL_ROWS,
    &SHARED_TALL_ROWS,
    &BROAD_ROWS,
    &SHARED_BROAD_ROWS,
    &LEAST_TALL_ROWS,
    &TALL_GATED_128,
    &LEAST_STACKED,
    &LEAST_QUARTERED,
    &MOST_QUARTERED_ROWS,
    &LEAST_ROUNDED,
    &LEAST_BROAD_ROUNDED,
    &LEAST_CUT_ROWS,
    &MOST_PARTED_ROWS,
    &LEAST_PART_COLUMNS,
];

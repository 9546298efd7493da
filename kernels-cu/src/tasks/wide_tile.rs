//! The sizes of a wide product's tiles. The fastest size is chosen, and the number of tasks that share the k of a tile.

/// A tile: `high` rows of the weight (in a gated product half of them are gates), and `tokens` times `width` rows of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows of the weight. Of 128 in a tile that does not have all rows of x, each of the two warpgroups has half; otherwise both have all.
    pub high: u32,
    /// The number of tiles of rows of x.
    pub tokens: u32,
    /// The rows of x in each of them.
    pub width: u32,
    /// The clocks for 64 k: of the tensor cores or, if that is more, of the reads and writes of shared memory.
    clocks: u64,
}

impl std::fmt::Display for Tile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tiles of {} columns and {} x {} rows", self.high, self.tokens, self.width)
    }
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
pub const FEW: [Tile; 2] = [
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

    /// The clocks of a task with one of `parts` of k. It takes some thousand in addition to its k.
    fn clocks_of_task(&self, k: u32, parts: u32) -> u64 {
        u64::from(k.div_ceil(parts).div_ceil(64)) * self.clocks + 5000
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
const TALL_WIDTHS: [u32; 3] = [16, 32, 64];
/// The most rows of x in such a tile.
pub const MOST_TALL_ROWS: u32 = TALL_WIDTHS[TALL_WIDTHS.len() - 1];

/// Whether a tile that has all of `width` rows of x, and `high` rows of the weight, has the code of `gpu/wide_narrow.cuh`.
pub const fn is_narrow_tile(high: u32, width: u32) -> bool {
    width <= 32 && (high == 32 || high == 96)
}

/// The rows of x in a tile that has all of `rows` rows. `None` if there are too many.
pub fn tall_width(rows: u64) -> Option<u32> {
    TALL_WIDTHS.into_iter().find(|&width| rows <= u64::from(width))
}

/// Which tiles with all rows there are.
#[derive(Clone, Copy, Debug)]
pub struct TallTiles {
    /// In gated products, tiles may have 128 rows of the weight.
    pub gated_128: bool,
}

impl TallTiles {
    fn tile(self, high: u32, rows: u32) -> Tile {
        let width = tall_width(rows.into()).unwrap_or(MOST_TALL_ROWS);
        Tile { high, tokens: 1, width, clocks: 0 }
    }

    /// The tile if two tasks share its k.
    pub fn halved(self, rows: u32) -> Tile {
        self.tile(64, rows)
    }

    /// The tile with which `workers` finish first. A multiprocessor loads a fixed number of bytes per microsecond, of weights and
    /// rows together.
    pub fn choose(self, rows: u32, columns: u32, gated: bool, workers: u32) -> Tile {
        let time = |tile: &Tile| {
            columns.div_ceil(tile.output_columns(gated)).div_ceil(workers.max(1)) * (tile.high + tile.width)
        };
        // Among equally fast tiles the first is taken. In a gated product a tile has whole column tiles of the layout.
        let highs: &[u32] = match gated {
            true if self.gated_128 => &[64, 192, 128, 96],
            true => &[64, 192, 96],
            false => &[64, 192, 48, 32, 96],
        };
        let tiles = highs.iter().map(|&high| self.tile(high, rows));
        // With stages of 64 rows, every second one would be half empty. So a step of 64 rows of 8B took 4.70 ms instead of 4.51 (two H200).
        let tiles = tiles.filter(|tile| tile.high != 96 || is_narrow_tile(tile.high, tile.width));
        tiles.min_by_key(time).unwrap_or(self.tile(64, rows))
    }
}

/// The most rows of x in a broad tile, which has all rows (`gpu/wide_broad.cuh`).
pub const MOST_BROAD_ROWS: u32 = 128;
/// The broad tiles. If most workers have one, the bytes from the L2 cache are the limit, of weights and rows together: about 20 for each
/// clock (H100: 192 tiles of 128 rows of a weight of 4,096 columns take 85 us).
const BROAD: [Tile; 3] = [broad(128), broad(192), broad(64)];

const fn broad(high: u32) -> Tile {
    Tile { high, tokens: 1, width: MOST_BROAD_ROWS, clocks: (high + MOST_BROAD_ROWS) as u64 * 64 * 2 / 20 }
}

/// The broad tile with which `workers` finish first if `parts` tasks share its k.
pub fn choose_broad(columns: u32, gated: bool, parts: u32, workers: u32) -> Tile {
    let time = |tile: &&Tile| tile.waves(MOST_BROAD_ROWS, columns, gated, parts, workers) * tile.clocks;
    *BROAD.iter().min_by_key(time).unwrap_or(&BROAD[0])
}

/// The number of tasks that share the k of a tile for which the product and the sum of its parts are ready first. `broad`: the tiles are.
pub fn fastest_parts(rows: u32, columns: u32, k: u32, workers: u32, broad: bool) -> u32 {
    let time = |parts: &u32| {
        let tile = match broad {
            true => choose_broad(columns, false, *parts, workers),
            false => best_parted(rows, columns, *parts, workers),
        };
        let sum = if *parts == 1 { 0 } else { clocks_of_sum(rows, columns, *parts, workers) };
        tile.waves(rows, columns, false, *parts, workers) * tile.clocks_of_task(k, *parts) + sum
    };
    [1, 2, 4].into_iter().min_by_key(time).unwrap_or(1)
}

/// The tile of a product of which some tiles are cut.
pub const CUT: Tile = TILES[0];

/// Which tiles are cut: several tasks share their k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The first row of these tiles.
    pub first_row: u32,
    /// How many tasks share the k of such a tile.
    pub parts: u32,
}

impl Cut {
    /// No tile is cut.
    pub const NONE: Cut = Cut::all(1);

    /// All tiles are cut into this many parts.
    pub const fn all(parts: u32) -> Cut {
        Cut { first_row: 0, parts }
    }
}

/// Workers compute tiles in waves. If few tiles are left for the last wave, most workers wait for them. Then the tiles of the last rows
/// are *cut*: several tasks share the k of each. `None` if that does not save a tenth of the time; the parts take memory.
///
/// Row tiles may belong to the `world` ranks in turn. So each rank has as many that are cut as the others, and as many that are not.
pub fn cut(rows: u32, columns: u32, k: u32, world: u32, workers: u32) -> Option<Cut> {
    let (across, down) = (columns.div_ceil(CUT.high), rows.div_ceil(CUT.tokens * CUT.width));
    if !down.is_multiple_of(world) {
        return None;
    }
    let waves = |tasks: u32| u64::from(tasks.div_ceil(workers.max(1)));
    let time = |cut: &Cut| {
        let whole = cut.first_row / (CUT.tokens * CUT.width);
        // In tasks with a part of k. A worker cannot have less than a whole tile.
        let turns = waves(across * down * cut.parts).max(waves(across * whole) * u64::from(cut.parts));
        turns * CUT.clocks_of_task(k, cut.parts)
            + clocks_of_sum(rows - cut.first_row, columns, cut.parts, workers)
    };
    let plain = choose(rows, columns, false, workers);
    let plain = plain.waves(rows, columns, false, 1, workers) * plain.clocks_of_task(k, 1);
    let cuts = (1..down)
        .filter(|whole| whole.is_multiple_of(world))
        .flat_map(|whole| [2, 4].map(|parts| Cut { first_row: whole * CUT.tokens * CUT.width, parts }));
    cuts.min_by_key(time).filter(|best| time(best) * 10 <= plain * 9)
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
        let tall = TallTiles { gated_128: false };
        assert_eq!(shape(tall.choose(33, 4096, false, 132)), (32, 1, 64));
        assert_eq!(shape(tall.choose(32, 6144, false, 132)), (48, 1, 32));
        assert_eq!(shape(tall.choose(16, 12288, true, 132)), (192, 1, 16));
        assert_eq!(shape(tall.choose(16, 12288, true, 400)), (64, 1, 16));
        let tall = TallTiles { gated_128: true };
        assert_eq!(shape(tall.choose(16, 4096, false, 132)), (32, 1, 16));
        assert_eq!(shape(tall.halved(17)), (64, 1, 32));
        // Half of the gates and ups of 8B are one wave of these tiles. If there is code for 96 rows, most workers have one.
        assert_eq!(shape(tall.choose(16, 6144, true, 132)), (96, 1, 16));
        assert_eq!(shape(tall.choose(33, 6144, true, 132)), (128, 1, 64));
        assert_eq!(shape(tall.choose(64, 12288, true, 132)), (192, 1, 64));
    }

    #[test]
    fn the_tiles_of_a_short_last_wave_are_cut() {
        let cut_of =
            |rows, columns, k, world| cut(rows, columns, k, world, 132).map(|c| (c.first_row, c.parts));
        let cut =
            |rows, columns, k, workers| cut(rows, columns, k, 1, workers).map(|c| (c.first_row, c.parts));
        // The down and output projections of 8B: 160 tiles for 132 workers.
        assert_eq!(cut(1280, 4096, 12288, 132), Some((1024, 4)));
        assert_eq!(cut(1280, 4096, 4096, 132), Some((1024, 4)));
        assert_eq!(cut(1536, 4096, 12288, 132), Some((1024, 2)));
        // The waves are full; the sum costs too much; one row tile; no row tile is a whole wave.
        assert_eq!(cut(2048, 4096, 12288, 132), None);
        assert_eq!(cut(1024, 4096, 12288, 132), None);
        assert_eq!(cut(1280, 4096, 256, 132), None);
        assert_eq!(cut(256, 4096, 12288, 132), None);
        assert_eq!(cut(1280, 4096, 12288, 4), None);
        // On several ranks.
        assert_eq!(cut_of(1536, 4096, 6144, 2), Some((1024, 2)));
        assert_eq!(cut_of(1536, 4096, 4096, 4), None);
        assert_eq!(cut_of(1280, 4096, 6144, 2), None);
    }

    #[test]
    fn tasks_share_k_where_that_pays_for_the_sum() {
        let shape = |rows, columns, k, workers| {
            let parts = fastest_parts(rows, columns, k, workers, false);
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
        assert_eq!(fastest_parts(512, 4096, 12288, 4, false), 1);
    }
    #[test]
    fn broad_tiles_fill_one_wave() {
        let shape = |columns, k, workers| {
            let parts = fastest_parts(128, columns, k, workers, true);
            (parts, choose_broad(columns, false, parts, workers).high)
        };
        // The products of 8B: gate and up, qkv, down and output.
        assert_eq!(choose_broad(12288, true, 1, 132).high, 192);
        assert_eq!(shape(6144, 4096, 132), (4, 192));
        assert_eq!(shape(4096, 12288, 132), (4, 128));
        assert_eq!(shape(4096, 4096, 132), (4, 128));
        // Few columns are left to many workers, and many to few.
        assert_eq!(choose_broad(4096, true, 1, 132).high, 64);
        assert_eq!(shape(4096, 4096, 4), (1, 192));
    }
}

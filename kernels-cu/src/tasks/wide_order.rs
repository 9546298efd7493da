//! The order of the tiles of a wide product, which decides the worker of each: workers get tasks in turn.

/// All tiles (column, row) in the order of the tasks: group by group of `group` column tiles, in a group row tile by row tile, and the
/// columns of each. So a wave of tasks reads each weight and each row from memory once.
///
/// Often only the first rows are in use. So each group begins with the row tile that lets `workers` share the tiles in use as evenly as
/// possible, for any number of rows in use.
pub fn in_order(columns: u32, rows: u32, group: u32, workers: u32) -> Vec<(u32, u32)> {
    let (group, workers) = (group.max(1), workers.max(1) as usize);
    let mut order: Vec<(u32, u32)> = Vec::with_capacity((columns * rows) as usize);
    let mut loads =
        Loads { rows: rows as usize, of: vec![0; rows as usize * workers], most: vec![0; rows as usize] };
    for first in (0..columns).step_by(group as usize) {
        let width = group.min(columns - first);
        let begin = order.len();
        let tiles = |shift: u32| {
            (0..width * rows)
                .map(move |i| ((begin + i as usize) % workers, ((i / width + shift) % rows) as usize))
        };
        let shift = (0..rows).min_by_key(|&shift| loads.with(tiles(shift))).unwrap_or(0);
        loads.add(tiles(shift));
        order.extend((0..width * rows).map(|i| (first + i % width, (i / width + shift) % rows)));
    }
    order
}

/// The numbers of tiles in use of each worker, for each number of row tiles in use.
struct Loads {
    rows: usize,
    /// By worker, and then by the last row tile in use.
    of: Vec<u32>,
    /// The highest of all workers, by the last row tile in use.
    most: Vec<u32>,
}

impl Loads {
    fn add(&mut self, tiles: impl Iterator<Item = (usize, usize)>) {
        for (worker, row) in tiles {
            for last in row..self.rows {
                let load = &mut self.of[worker * self.rows + last];
                *load += 1;
                self.most[last] = self.most[last].max(*load);
            }
        }
    }

    /// The cost of adding `tiles`, each (worker, row tile): the sum of the highest loads, then the sum of the loads that
    /// these workers already have. Lower is better.
    fn with(&self, tiles: impl Iterator<Item = (usize, usize)>) -> (u32, u32) {
        let (mut most, mut others) = (self.most.clone(), 0);
        for (worker, row) in tiles {
            let loads = &self.of[worker * self.rows..][..self.rows];
            for (most, load) in most.iter_mut().zip(loads).skip(row) {
                *most = (*most).max(load + 1);
                others += load;
            }
        }
        (most.iter().sum(), others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_comes_once() {
        for (columns, rows, group, workers) in
            [(1, 1, 8, 3), (16, 8, 8, 132), (17, 3, 4, 5), (96, 16, 8, 78), (5, 2, 16, 1)]
        {
            let mut all = in_order(columns, rows, group, workers);
            assert_eq!(all.len() as u32, columns * rows);
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len() as u32, columns * rows);
            assert_eq!(all.last(), Some(&(columns - 1, rows - 1)));
        }
    }

    /// The products of Qwen3-8B with graphs of up to 2,048 rows on 132 workers, on one and two ranks: for any number of row tiles in use, no
    /// worker has more than one tile above its share.
    #[test]
    fn workers_share_the_tiles_in_use() {
        let workers = 132;
        for (columns, rows, group) in [
            (192, 8, 16),
            (96, 8, 16),
            (32, 8, 16),
            (48, 8, 16),
            (24, 16, 8),
            (96, 4, 16),
            (192, 4, 16),
            (32, 8, 8),
            (48, 4, 8),
        ] {
            let order = in_order(columns, rows, group, workers);
            for used in 1..=rows {
                let mut loads = vec![0; workers as usize];
                for (task, _) in order.iter().enumerate().filter(|(_, (_, row))| *row < used) {
                    loads[task % workers as usize] += 1;
                }
                let (most, share) =
                    (loads.iter().max().copied().unwrap_or(0), (columns * used).div_ceil(workers));
                assert!(most <= share + 1, "{columns} x {rows}, {used} in use: {most} tiles, not {share}");
            }
        }
    }
}

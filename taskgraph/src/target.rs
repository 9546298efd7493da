//! The target that graphs are built for: the table of hardware facts, and the numbers that tiling needs.

use crate::tuning::{Knob, Tuning};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The kind of machine that runs the tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// Threads of an MPI process.
    #[default]
    Cpu,
    /// One persistent kernel on an NVIDIA GPU.
    Cuda,
}

impl Backend {
    /// Packed matrices are padded with zeros to a multiple of this number of columns.
    pub const fn tile_k(self) -> u32 {
        match self {
            Backend::Cpu => 2,
            Backend::Cuda => 16,
        }
    }

    /// In a paired matrix ([`crate::task_graph::TensorEntry::paired`]) this number of rows of each half alternate. `None`: the
    /// backend has no paired matrices.
    pub const fn pair_rows(self) -> Option<u32> {
        match self {
            Backend::Cpu => None,
            Backend::Cuda => Some(8),
        }
    }
}

/// A row of the hardware table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    /// Name on the command line (`--device`).
    pub name: &'static str,
    /// Substring of the name that the driver reports.
    pub driver_name: &'static str,
    /// Compute capability times ten, with the suffix that tuned code is compiled for.
    pub architecture: &'static str,
    /// Streaming multiprocessors, one worker each.
    pub sms: u32,
    /// Maximum shared memory of a block, in bytes.
    pub shared_memory: u32,
    /// Size of the L2 cache in bytes.
    pub l2: u64,
    /// Published bandwidth of the device memory, in bytes per second.
    pub memory_bandwidth: f64,
}

/// The hardware table. `memory_bandwidth` is the published figure; benchmarks measure their own.
pub const DEVICES: &[Device] = &[
    Device {
        name: "a100",
        driver_name: "A100",
        architecture: "sm_80",
        sms: 108,
        shared_memory: 163 << 10,
        l2: 40 << 20,
        memory_bandwidth: 2.039e12,
    },
    Device {
        name: "h100",
        driver_name: "H100",
        architecture: "sm_90a",
        sms: 132,
        shared_memory: 227 << 10,
        l2: 50 << 20,
        memory_bandwidth: 3.35e12,
    },
    Device {
        name: "h200",
        driver_name: "H200",
        architecture: "sm_90a",
        sms: 132,
        shared_memory: 227 << 10,
        l2: 50 << 20,
        memory_bandwidth: 4.8e12,
    },
    Device {
        name: "b200",
        driver_name: "B200",
        architecture: "sm_100a",
        sms: 148,
        shared_memory: 227 << 10,
        l2: 126 << 20,
        memory_bandwidth: 8.0e12,
    },
];

/// The row named `name`, if it exists.
pub fn device(name: &str) -> Option<&'static Device> {
    DEVICES.iter().find(|d| d.name.eq_ignore_ascii_case(name))
}

/// The facts that partitioning and placement need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Target {
    /// Kind of machine.
    pub backend: Backend,
    /// Number of workers per rank.
    pub workers: u32,
    /// Column tiles are multiples of this number of output columns, except for the last tile.
    pub column_unit: u32,
    /// Maximum number of tasks that one operator's columns are cut into.
    pub max_tiles: u32,
    /// Products of many rows use wide tiles, on tensor cores that multiply 64 rows at once (Hopper).
    pub wide: bool,
    /// Measured values that replace defaults.
    #[serde(default, skip_serializing_if = "Tuning::is_empty")]
    pub tuning: Tuning,
}

impl Target {
    /// The CPU target with `workers` threads per rank.
    pub fn cpu(workers: u32) -> Self {
        let workers = workers.max(1);
        Target {
            backend: Backend::Cpu,
            workers,
            column_unit: 16,
            max_tiles: workers,
            wide: false,
            tuning: Tuning::default(),
        }
    }

    /// A GPU of the hardware table, with one worker per multiprocessor.
    pub fn cuda(device: &Device) -> Self {
        Target {
            backend: Backend::Cuda,
            workers: device.sms,
            column_unit: 16,
            max_tiles: device.sms,
            wide: device.architecture == "sm_90a",
            tuning: Tuning::default(),
        }
    }

    /// The value of a knob.
    pub fn tuned(&self, knob: &Knob) -> u64 {
        self.tuning.of(knob)
    }

    /// Cuts an operator's `columns` output columns into ranges. There are at most `max_tiles`; they are multiples of
    /// `column_unit` (the last may be short) and as even as the unit allows. They are aligned to `align` if they are at
    /// least that wide. Zero columns give no range.
    pub fn column_tiles(&self, columns: u32, align: u32) -> Vec<Range<u32>> {
        let unit = if align > self.column_unit
            && align.is_multiple_of(self.column_unit)
            && columns.div_ceil(align) >= self.max_tiles
        {
            align
        } else {
            self.column_unit
        };
        even_ranges(columns, unit, columns.div_ceil(unit).min(self.max_tiles.max(1))).collect()
    }

    /// Like [`Target::column_tiles`] for columns that consist of `blocks` of the same width. Each block is cut the same way,
    /// and no tile spans two blocks. `None` if a block ends inside a unit, or if there are more blocks than `max_tiles`.
    pub fn column_tiles_of_blocks(&self, columns: u32, blocks: u32) -> Option<Vec<Range<u32>>> {
        let width = columns.checked_div(blocks)?;
        let fits = columns == width * blocks && width > 0 && width.is_multiple_of(self.column_unit);
        if !fits || self.max_tiles < blocks {
            return None;
        }
        let of_block = Target { max_tiles: self.max_tiles / blocks, ..self.clone() }.column_tiles(width, 1);
        let shifted =
            |block: u32| of_block.iter().map(move |t| block * width + t.start..block * width + t.end);
        Some((0..blocks).flat_map(shifted).collect())
    }
}

/// Cuts `0..extent` into `count` ranges that begin at multiples of `unit`, as even as that allows.
pub(crate) fn even_ranges(extent: u32, unit: u32, count: u32) -> impl Iterator<Item = Range<u32>> {
    let units = u64::from(extent.div_ceil(unit));
    let at = move |i: u32| ((units * u64::from(i) / u64::from(count.max(1))) as u32 * unit).min(extent);
    (0..count).map(move |i| at(i)..at(i + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_all_columns_once() {
        for columns in [0u32, 1, 15, 16, 17, 203, 331, 4096, 18_992] {
            for workers in [1, 2, 7, 132] {
                for align in [1, 64, 128] {
                    let tiles = Target::cpu(workers).column_tiles(columns, align);
                    let mut next = 0;
                    for tile in &tiles {
                        assert_eq!(tile.start, next);
                        assert!(tile.end > tile.start && tile.start % 16 == 0);
                        next = tile.end;
                    }
                    assert_eq!(next, columns);
                    assert!(tiles.len() as u32 <= workers);
                }
            }
        }
    }

    #[test]
    fn tiles_of_blocks_lie_in_one_block_each() {
        let target = Target::cpu(132);
        let tiles = target.column_tiles_of_blocks(5120, 8).unwrap();
        assert_eq!(tiles.len(), 128);
        assert_eq!(tiles.iter().map(|t| t.end - t.start).sum::<u32>(), 5120);
        for (one, next) in tiles.iter().zip(&tiles[1..]) {
            assert_eq!(one.end, next.start);
            assert_eq!(one.start / 640, (one.end - 1) / 640);
        }
        assert_eq!(tiles[0].len(), tiles[16].len());
        // Blocks that end inside a unit; more blocks than tiles; no columns.
        assert_eq!(target.column_tiles_of_blocks(40, 4), None);
        assert_eq!(Target::cpu(2).column_tiles_of_blocks(5120, 8), None);
        assert_eq!(target.column_tiles_of_blocks(0, 8), None);
    }
}

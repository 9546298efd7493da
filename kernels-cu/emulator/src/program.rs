//! A decoded PTX file: instructions over register offsets, and their source positions.

use crate::instruction::Instruction;
use crate::parse::Place;
use std::collections::HashMap;
use std::sync::Arc;

/// Start of the generic addresses of a block's shared memory, and of a thread's local memory.
pub(crate) const SHARED_WINDOW: u64 = 1 << 56;
pub(crate) const LOCAL_WINDOW: u64 = 2 << 56;

/// Special registers with constant values, in the order of `Program::specials`.
pub(crate) const SPECIALS: [&str; 20] = [
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%warpid",
    "%lanemask_eq",
    "%lanemask_lt",
    "%lanemask_le",
    "%lanemask_gt",
    "%lanemask_ge",
    "%smid",
];

/// A kernel that can be launched.
#[derive(Debug)]
pub(crate) struct Entry {
    pub start: u32,
    /// Offset in local memory and bytes of each parameter.
    pub parameters: Vec<(u64, u64)>,
}

/// A decoded PTX file.
#[derive(Debug)]
pub struct Program {
    pub(crate) instructions: Vec<Instruction>,
    pub(crate) places: Vec<Place>,
    pub(crate) lists: Vec<u32>,
    pub(crate) texts: Vec<String>,
    pub(crate) entries: HashMap<String, Entry>,
    /// First instruction and name of each function.
    pub(crate) functions: Vec<(u32, String)>,
    pub(crate) files: HashMap<u32, String>,
    pub(crate) constants: Arc<Vec<u64>>,
    /// The registers of `SPECIALS`.
    pub(crate) specials: Vec<u32>,
    pub(crate) register_bytes: usize,
    /// Per thread: parameters and local variables.
    pub(crate) local_bytes: u64,
    /// Static shared memory; the dynamic part comes after it.
    pub(crate) shared_bytes: u64,
    /// Variables of the whole program. They never move, because their addresses are constants.
    pub(crate) globals: Vec<Box<[u64]>>,
    /// Whether the sums of a `wgmma` can be read at once. PTX of a quick compile moves them to local memory before the kernel waits.
    pub(crate) sums_at_once: bool,
}

/// A line of PTX for which `sums_at_once` holds.
pub const SUMS_AT_ONCE: &str = "// sums of products can be read at once";

impl Program {
    /// Instructions that would be errors if executed: opcode and line of the PTX.
    pub fn unsupported(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().map(String::as_str)
    }

    /// Names of the kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Number of instructions.
    pub fn len(&self) -> usize {
        self.instructions.len()
    }

    /// Whether there are no instructions.
    pub fn is_empty(&self) -> bool {
        self.instructions.is_empty()
    }

    /// A text that says where the instruction `at` comes from.
    pub(crate) fn place(&self, at: u32) -> String {
        let Some(place) = self.places.get(at as usize) else { return format!("instruction {at}") };
        let function = self.functions.iter().rev().find(|f| f.0 <= at).map_or("?", |f| &f.1);
        let mut text = format!("{function}, PTX line {}", place.line);
        if let Some(file) = self.files.get(&place.file) {
            let file = file.split("/./").last().unwrap_or(file);
            text += &format!(", {file}:{}", place.source_line);
        }
        text
    }
}

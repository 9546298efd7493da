//! One memory-mapped safetensors file.

use std::{
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use memmap2::{Mmap, UncheckedAdvice};
use safetensors::{
    SafeTensorError, SafeTensors,
    tensor::{Metadata, TensorInfo},
};

use crate::model::{error::InputError, files};

/// A page fault may also map up to this many bytes before the page. Linux maps 64 KB by default, or a larger folio.
const MAPPED_WITH_A_FAULT: usize = 2 << 20;

/// A mapped file whose header has been checked: offsets are contiguous, match shapes and dtypes, and cover the file.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) path: PathBuf,
    file: File,
    map: Mmap,
    /// Offset of the tensors' bytes.
    data: usize,
    metadata: Metadata,
}

impl Shard {
    pub(super) fn open(path: &Path) -> Result<Self, InputError> {
        let file = files::open(path)?;
        let length = file.metadata().map_err(|e| InputError::unreadable(path, e))?;
        if length.len() == 0 {
            return Err(inconsistent(path, "is empty".into()));
        }
        // SAFETY: the map is read-only and private to this process. The user must not shorten or rewrite a checkpoint
        // while it is loaded. A change could show up as different bytes, or as SIGBUS.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| InputError::unreadable(path, e))?;
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|error| inconsistent(path, header_problem(&error, &map)))?;
        Ok(Self { path: path.into(), file, map, data: header + 8, metadata })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = String> + '_ {
        self.metadata.offset_keys().into_iter()
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// The range of tensor `name` in the file, if it exists.
    pub(super) fn range(&self, info: &TensorInfo) -> Option<Range<usize>> {
        let (begin, end) = info.data_offsets;
        let (begin, end) = (self.data + begin, self.data + end);
        self.map.get(begin..end).map(|_| begin..end)
    }

    /// The bytes [begin, end) of the file. The range must be inside it.
    pub(super) fn bytes(&self, begin: usize, end: usize) -> &[u8] {
        &self.map[begin..end]
    }

    /// Reads bytes starting at `begin` without mapping them. Returns false if the system refuses.
    pub(super) fn read(&self, begin: usize, out: &mut [u8]) -> bool {
        self.file.read_exact_at(out, begin as u64).is_ok()
    }

    /// Releases the memory of all pages that [begin, end) touches. Reading them again maps the file again.
    pub(super) fn release(&self, begin: usize, end: usize) {
        let page = rustix::param::page_size();
        // Rounded outward, so that ranges that are released one after the other leave no page between them. The begin
        // moves further back, because a page fault also maps neighbours that are still in memory, even released ones.
        let begin = begin.saturating_sub(MAPPED_WITH_A_FAULT) / page * page;
        let end = end.next_multiple_of(page).min(self.map.len());
        if begin < end {
            // SAFETY: the pages belong to a file mapping that is never written, so dropping them loses nothing, even
            // for readers of the rest of the first and last page. The next access maps the file's page again. A failure
            // only costs memory.
            let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, begin, end - begin) };
        }
    }
}

fn inconsistent(path: &Path, problem: String) -> InputError {
    InputError::Checkpoint { path: path.into(), problem, fix: "download or copy the file again".into() }
}

/// What is wrong with the header of `file`.
pub(crate) fn header_problem(error: &SafeTensorError, file: &[u8]) -> String {
    if files::is_lfs_pointer(file) {
        return "is a Git LFS pointer, not the weights themselves".into();
    }
    let length = file.len();
    match error {
        SafeTensorError::HeaderTooSmall => {
            format!("is truncated: it has only {length} bytes, and a safetensors file starts with 8 bytes")
        }
        SafeTensorError::InvalidHeaderLength | SafeTensorError::HeaderTooLarge => {
            let header = file.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
            format!(
                "is truncated or not a safetensors file: it has {length} bytes, its header should have {header}"
            )
        }
        SafeTensorError::MetadataIncompleteBuffer => match described_length(file) {
            Some(described) if described > length as u64 => {
                format!("is truncated: its header describes {described} bytes, the file has {length}")
            }
            Some(described) => {
                format!("has an inconsistent header: it describes {described} bytes, the file has {length}")
            }
            None => format!("has an inconsistent header: {error}"),
        },
        other => format!("has an inconsistent header: {other}"),
    }
}

/// File length according to the header.
fn described_length(file: &[u8]) -> Option<u64> {
    let header = u64::from_le_bytes(*file.first_chunk()?);
    let start = header.checked_add(8)?;
    let text = file.get(8..usize::try_from(start).ok()?)?;
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(text).ok()?;
    let ends = header.iter().filter(|(name, _)| *name != "__metadata__");
    let end = ends.filter_map(|(_, info)| info.get("data_offsets")?.get(1)?.as_u64()).max();
    start.checked_add(end.unwrap_or(0))
}

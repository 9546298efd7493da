//! What was proven before: verifying the graphs of a large model takes longer than the rest of a warm start.
//!
//! A proof is an empty file whose name is a hash of the graphs' digests and of the program that proved them.

use kernels_cu::gpu::Cache;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;

/// Proofs of fewer tasks than this are not worth a file.
pub const WORTHWHILE_TASKS: usize = 20_000;

/// A folder of proofs, beside that of compiled kernels.
#[derive(Clone, Debug)]
pub struct Proofs {
    folder: PathBuf,
}

impl Proofs {
    /// Where the cache of compiled kernels is, if there can be one.
    pub fn from_environment() -> Option<Proofs> {
        let cache = Cache::from_environment().ok()?;
        Some(Proofs { folder: cache.folder().parent()?.join("proofs") })
    }

    /// Whether graphs with these digests were proven by this program.
    pub fn has(&self, digests: &[u64]) -> bool {
        self.file(digests).is_some_and(|file| file.is_file())
    }

    /// Notes that they are. Where the file can't be written, they are proven again next time.
    pub fn add(&self, digests: &[u64]) {
        let Some(file) = self.file(digests) else { return };
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
        if let Err(error) = made.and_then(|()| std::fs::write(&file, b"")) {
            tracing::debug!("{}: {error}", file.display());
        }
    }

    fn file(&self, digests: &[u64]) -> Option<PathBuf> {
        let program = std::fs::metadata("/proc/self/exe").ok()?;
        let name = |salt: u64| {
            let mut hash = DefaultHasher::new();
            (salt, env!("CARGO_PKG_VERSION"), program.len(), program.mtime(), program.mtime_nsec())
                .hash(&mut hash);
            digests.hash(&mut hash);
            hash.finish()
        };
        Some(self.folder.join(format!("{:016x}{:016x}", name(1), name(2))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_proven_is_known_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let proofs = Proofs { folder: folder.path().join("a/proofs") };
        assert!(!proofs.has(&[1, 2]));
        proofs.add(&[1, 2]);
        assert!(proofs.has(&[1, 2]));
        for other in [&[2, 1][..], &[1], &[1, 2, 0], &[]] {
            assert!(!proofs.has(other), "{other:?}");
        }
    }
}

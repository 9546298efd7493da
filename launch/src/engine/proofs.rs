//! Remembers which graphs were verified before. For a large model, verifying takes longer than the rest of a warm
//! start.
//!
//! A proof is an empty file. Its name is a hash of the graphs' digests and of the program that verified them.

use kernels_cu::gpu::{Cache, PrivateFolder};
use std::hash::{Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Graphs with fewer tasks than this are verified so fast that a file is not worth it.
pub const WORTHWHILE_TASKS: usize = 20_000;

/// The folder of proofs, next to the cache of compiled kernels. A file in it makes this process skip the verification,
/// so only this user may be able to write to the folder.
#[derive(Clone, Debug)]
pub struct Proofs {
    folder: PrivateFolder,
}

impl Proofs {
    /// The folder next to the cache of compiled kernels, if such a folder can be trusted.
    pub fn from_environment() -> Option<Proofs> {
        let cache = Cache::from_environment().ok()?;
        Proofs::below(cache.folder().parent()?)
    }

    fn below(folder: &Path) -> Option<Proofs> {
        let folder = PrivateFolder::new(folder.join("proofs"));
        match folder.check() {
            Ok(()) => Some(Proofs { folder }),
            Err(problem) => {
                tracing::warn!(
                    "the folder of proofs {} is not used: it {problem}; set MPK_CACHE_DIR to a folder of your own",
                    folder.path().display()
                );
                None
            }
        }
    }

    /// True if this program has verified graphs with these digests.
    pub fn has(&self, digests: &[u64]) -> bool {
        self.file(digests).is_some_and(|file| file.is_file())
    }

    /// Records that the graphs were verified. If the file cannot be written, they are verified again next time.
    pub fn add(&self, digests: &[u64]) {
        let Some(file) = self.file(digests) else { return };
        let made = self.folder.create();
        if let Err(problem) = made.and_then(|()| std::fs::write(&file, b"").map_err(|e| e.to_string())) {
            tracing::debug!("{}: {problem}", file.display());
        }
    }

    fn file(&self, digests: &[u64]) -> Option<PathBuf> {
        let program = std::fs::metadata("/proc/self/exe").ok()?;
        let name = |salt: u64| {
            let mut hash = Xxh3::new();
            (salt, env!("CARGO_PKG_VERSION"), program.len(), program.mtime(), program.mtime_nsec())
                .hash(&mut hash);
            digests.hash(&mut hash);
            hash.finish()
        };
        Some(self.folder.path().join(format!("{:016x}{:016x}", name(1), name(2))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_recorded_proofs_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let proofs = Proofs::below(&folder.path().join("a")).unwrap();
        assert!(!proofs.has(&[1, 2]));
        proofs.add(&[1, 2]);
        assert!(proofs.has(&[1, 2]));
        for other in [&[2, 1][..], &[1], &[1, 2, 0], &[]] {
            assert!(!proofs.has(other), "{other:?}");
        }
    }

    #[test]
    fn proofs_of_another_user_are_not_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let proofs = Proofs::below(folder.path()).unwrap();
        proofs.add(&[1]);
        assert!(Proofs::below(folder.path()).is_some_and(|proofs| proofs.has(&[1])));
        // Only root can change the owner of a file.
        if std::os::unix::fs::chown(proofs.folder.path(), Some(65534), None).is_ok() {
            assert!(Proofs::below(folder.path()).is_none());
        }
    }
}

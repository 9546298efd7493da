//! The folder of compiled kernels. Files are named `KEY-TOOLCHAIN.EXTENSION`: TOOLCHAIN is the hash of the toolchain,
//! and KEY the hash of everything else that determines the file.
//!
//! A file is written under a temporary name and renamed, so it is either complete or absent. It ends with its length
//! and a checksum. During a compilation, `KEY.lock` is locked and `KEY.build` holds intermediate files. The lock ends
//! with its process, and the next holder removes what another process left behind.

use super::private_folder::{PrivateFolder, remove};
use super::{GpuError, ToolchainIdentity};
use crate::signals::Held;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use xxhash_rust::xxh3::xxh3_128;

/// A subfolder of the folder that the user names. Only this program uses it.
const SUBFOLDER: &str = "kernels";
/// If the folder is larger than this, the oldest files are removed.
const MOST_BYTES: u64 = 2 << 30;
const MAGIC: &[u8; 8] = b"mpkcache";
/// Length of the content, length of the description, checksum of both, magic.
const TRAILER_BYTES: usize = 8 + 8 + 16 + 8;

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PrivateFolder,
}

/// The description inside a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Description {
    /// The toolchain that made it.
    pub toolchain: ToolchainIdentity,
    /// The output of nvcc.
    pub log: String,
}

/// A file of the cache.
#[derive(Debug)]
pub(super) struct Entry {
    pub path: PathBuf,
    pub description: Description,
    pub content: Vec<u8>,
}

impl Cache {
    /// `$MPK_CACHE_DIR`, otherwise `$XDG_CACHE_HOME/mpk`, otherwise `~/.cache/mpk`.
    ///
    /// # Errors
    /// None of the variables is set.
    pub fn from_environment() -> Result<Self, GpuError> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        variable("MPK_CACHE_DIR")
            .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("mpk")))
            .or_else(|| variable("HOME").map(|folder| folder.join(".cache/mpk")))
            .map(Cache::new)
            .ok_or_else(|| problem(Path::new("~/.cache/mpk"), "HOME is not set"))
    }

    /// A cache in a folder of the caller's. A relative path starts at the current folder.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Cache { folder: PrivateFolder::new(folder.into().join(SUBFOLDER)) }
    }

    /// The folder with the files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Code from the folder runs in this process, so only this user may be able to write there. The folder need not
    /// exist.
    ///
    /// # Errors
    /// It is not a folder, or belongs to another user; see [`PrivateFolder::check`].
    pub fn check(&self) -> Result<(), GpuError> {
        self.folder.check().map_err(|e| problem(self.folder(), e))
    }

    /// The file of `key`: the one made with `toolchain`, or without a toolchain the newest one. Damaged files, and
    /// files made with another toolchain than their name says, are ignored.
    pub(super) fn find(
        &self,
        key: &str,
        extension: &str,
        toolchain: Option<&ToolchainIdentity>,
    ) -> Result<Option<Entry>, GpuError> {
        self.check()?;
        let paths = match toolchain {
            Some(toolchain) => vec![self.path(key, extension, toolchain)],
            None => self.newest_first(key, extension)?,
        };
        for path in paths {
            match read(&path) {
                Ok((description, content)) if toolchain.is_none_or(|t| *t == description.toolchain) => {
                    return Ok(Some(Entry { path, description, content }));
                }
                Ok(_) => {
                    tracing::warn!("ignoring {}, which was built with another toolchain", path.display())
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => tracing::warn!("ignoring {}: {error}", path.display()),
            }
        }
        Ok(None)
    }

    /// The file of `key`, after another process may have made it. Reports no problems, because [`Cache::find`] has
    /// reported them.
    pub(super) fn made_meanwhile(
        &self,
        key: &str,
        extension: &str,
        toolchain: &ToolchainIdentity,
    ) -> Option<Entry> {
        let path = self.path(key, extension, toolchain);
        let (description, content) = read(&path).ok()?;
        (description.toolchain == *toolchain).then_some(Entry { path, description, content })
    }

    /// Stores a file, either completely or not at all.
    pub(super) fn store(
        &self,
        key: &str,
        extension: &str,
        description: &Description,
        content: &[u8],
        build: &Build,
    ) -> Result<PathBuf, GpuError> {
        let path = self.path(key, extension, &description.toolchain);
        let whole = build.folder().join("entry");
        fs::write(&whole, encode(description, content)).map_err(|e| problem(&whole, e))?;
        if path.is_dir() {
            remove(&path).map_err(|e| problem(&path, e))?;
        }
        fs::rename(&whole, &path).map_err(|e| problem(&path, e))?;
        self.prune(&path);
        Ok(path)
    }

    /// Locks `key`, after waiting for another process that compiles it, and returns an empty folder to build in.
    pub(super) fn build(&self, key: &str) -> Result<Build, GpuError> {
        self.folder.create().map_err(|e| problem(self.folder(), e))?;
        let lock = Lock::wait(self.folder().join(format!("{key}.lock")))?;
        let signals = Held::new();
        self.remove_abandoned();
        let folder = self.folder().join(format!("{key}.build"));
        remove(&folder).map_err(|e| problem(&folder, e))?;
        DirBuilder::new().mode(0o700).create(&folder).map_err(|e| problem(&folder, e))?;
        Ok(Build { folder, _lock: lock, _signals: signals })
    }

    fn path(&self, key: &str, extension: &str, toolchain: &ToolchainIdentity) -> PathBuf {
        self.folder().join(format!("{key}-{}.{extension}", toolchain.key()))
    }

    fn newest_first(&self, key: &str, extension: &str) -> Result<Vec<PathBuf>, GpuError> {
        let (prefix, suffix) = (format!("{key}-"), format!(".{extension}"));
        let mut list: Vec<(SystemTime, PathBuf)> = self
            .folder
            .files()
            .map_err(|e| problem(self.folder(), e))?
            .into_iter()
            .filter(|(_, name, _)| name.starts_with(&prefix) && name.ends_with(&suffix))
            .map(|(path, _, metadata)| (metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), path))
            .collect();
        list.sort_unstable_by(|a, b| b.cmp(a));
        Ok(list.into_iter().map(|(_, path)| path).collect())
    }

    /// Removes the build folders of processes that have ended.
    fn remove_abandoned(&self) {
        for (path, name, _) in self.folder.files().unwrap_or_default() {
            let Some(key) = name.strip_suffix(".build") else { continue };
            if let Ok(Some(_lock)) = Lock::attempt(&self.folder().join(format!("{key}.lock"))) {
                let _ = remove(&path);
            }
        }
    }

    /// Removes the oldest files if there are too many, but never `kept`.
    fn prune(&self, kept: &Path) {
        let mut files = self.folder.files().unwrap_or_default();
        files.retain(|(path, _, metadata)| metadata.is_file() && path != kept);
        files.sort_by_key(|(_, _, metadata)| std::cmp::Reverse(metadata.modified().ok()));
        let mut sum = 0;
        for (path, _, metadata) in files {
            sum += metadata.len();
            if sum > MOST_BYTES {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// The right to compile a key, with a folder for it. A signal waits until both are dropped.
#[derive(Debug)]
pub(super) struct Build {
    folder: PathBuf,
    _lock: Lock,
    // Declared last, because fields are dropped in this order.
    _signals: Held,
}

impl Build {
    /// Empty at first.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Build {
    fn drop(&mut self) {
        let _ = remove(&self.folder);
    }
}

/// An exclusive lock on a file. The file is removed with the lock.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Waits until the lock is free. Its holder is compiling, and the lock ends with that process.
    fn wait(path: PathBuf) -> Result<Self, GpuError> {
        let started = Instant::now();
        let mut next_message = Duration::from_secs(2);
        loop {
            if let Some(lock) = Lock::attempt(&path).map_err(|e| problem(&path, e))? {
                return Ok(lock);
            }
            if started.elapsed() >= next_message {
                tracing::info!("waiting for another process that is compiling the same kernel");
                next_message *= 4;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The lock, if it is free.
    fn attempt(path: &Path) -> io::Result<Option<Self>> {
        let open =
            || OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = open()?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            locked => locked?,
        }
        // The previous holder may have removed the file after we opened it.
        let ours = file.metadata()?;
        match fs::metadata(path) {
            Ok(there) if there.ino() == ours.ino() && there.dev() == ours.dev() => {
                Ok(Some(Lock { path: path.to_path_buf(), _file: file }))
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Removed while it is still locked, so nobody else can have locked this file.
        let _ = fs::remove_file(&self.path);
    }
}

fn problem(path: &Path, problem: impl ToString) -> GpuError {
    GpuError::Cache { path: path.to_path_buf(), problem: problem.to_string() }
}

fn read(path: &Path) -> io::Result<(Description, Vec<u8>)> {
    decode(fs::read(path)?).ok_or_else(|| io::Error::other("it is damaged"))
}

/// The content comes first, so that tools and the loader can read the file as what it is.
fn encode(description: &Description, content: &[u8]) -> Vec<u8> {
    // A struct of strings and numbers can always be written as JSON.
    let description = serde_json::to_vec(description).unwrap_or_default();
    let mut bytes = Vec::with_capacity(content.len() + description.len() + TRAILER_BYTES);
    bytes.extend_from_slice(content);
    bytes.extend_from_slice(&description);
    let checksum = xxh3_128(&bytes);
    bytes.extend_from_slice(&(content.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&(description.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes.extend_from_slice(MAGIC);
    bytes
}

fn decode(mut bytes: Vec<u8>) -> Option<(Description, Vec<u8>)> {
    let (body, trailer) = bytes.split_at_checked(bytes.len().checked_sub(TRAILER_BYTES)?)?;
    let number = |at: usize| Some(u64::from_le_bytes(trailer.get(at..at + 8)?.try_into().ok()?));
    let (content_bytes, description_bytes) = (number(0)?, number(8)?);
    let checksum = u128::from_le_bytes(trailer.get(16..32)?.try_into().ok()?);
    let whole = trailer.ends_with(MAGIC)
        && content_bytes.checked_add(description_bytes) == Some(body.len() as u64)
        && xxh3_128(body) == checksum;
    if !whole {
        return None;
    }
    let description = serde_json::from_slice(&body[content_bytes as usize..]).ok()?;
    bytes.truncate(content_bytes as usize);
    Some((description, bytes))
}

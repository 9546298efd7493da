//! Folders whose content this process trusts: kernels that it runs, notes of what is proven.

use rustix::process::geteuid;
use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A folder that belongs to the user of this process, and that nobody else can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivateFolder {
    path: PathBuf,
}

impl PrivateFolder {
    /// The folder at `path`, which need not be there yet; a relative one is below the current folder.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        PrivateFolder { path: std::path::absolute(&path).unwrap_or(path) }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whoever else owns the folder could put anything there, so it is refused; root is no exception, on either side. A
    /// folder of ours that others can write to is closed to them, and what they left there is removed. One that is not
    /// there yet is fine.
    ///
    /// # Errors
    /// It is no folder, or another user's; the text says which.
    pub fn check(&self) -> Result<(), String> {
        let metadata = match fs::metadata(&self.path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        if !metadata.is_dir() {
            return Err("is not a folder".into());
        }
        let user = geteuid().as_raw();
        if metadata.uid() != user {
            return Err(format!(
                "belongs to user {}, but only a folder of your own (user {user}) is trusted",
                metadata.uid()
            ));
        }
        if metadata.mode() & 0o022 != 0 {
            self.close(user).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Makes it where it is not there yet.
    ///
    /// # Errors
    /// It can't be made, or those of [`PrivateFolder::check`].
    pub fn create(&self) -> Result<(), String> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        made.map_err(|e| e.to_string())?;
        self.check()
    }

    /// Path, name and metadata of all that is in it; nothing where it is not there.
    ///
    /// # Errors
    /// It can't be read.
    pub fn files(&self) -> io::Result<Vec<(PathBuf, String, Metadata)>> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut list = Vec::new();
        for entry in entries {
            let entry = entry?;
            // What another process removes meanwhile is not there.
            if let Ok(metadata) = entry.metadata() {
                list.push((entry.path(), entry.file_name().to_string_lossy().into_owned(), metadata));
            }
        }
        Ok(list)
    }

    /// From now on only `user`, its owner, can write there.
    fn close(&self, user: u32) -> io::Result<()> {
        tracing::warn!("other users could write to {}: from now on they can't", self.path.display());
        fs::set_permissions(&self.path, Permissions::from_mode(0o700))?;
        for (path, _, metadata) in self.files()? {
            if metadata.uid() != user {
                tracing::warn!("{} belongs to user {} and is removed", path.display(), metadata.uid());
                remove(&path)?;
            }
        }
        Ok(())
    }
}

/// Removes a file or folder that may not be there.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => fs::remove_file(path),
        removed => removed,
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, symlink};

    #[test]
    fn only_a_folder_of_ones_own_is_trusted() {
        let root = tempfile::tempdir().unwrap();
        let folder = PrivateFolder::new(root.path().join("a/b"));
        folder.check().unwrap();
        assert!(!folder.path().exists(), "a check makes nothing");
        folder.create().unwrap();
        assert_eq!(fs::metadata(folder.path()).unwrap().mode() & 0o777, 0o700);

        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        folder.check().unwrap();
        assert_eq!(fs::metadata(folder.path()).unwrap().mode() & 0o777, 0o700, "closed");

        fs::write(root.path().join("file"), "").unwrap();
        assert!(PrivateFolder::new(root.path().join("file")).check().is_err());

        // Root's own, to others; another user's, to root.
        let root_owned = PrivateFolder::new("/usr");
        if !geteuid().is_root() {
            assert!(root_owned.check().is_err_and(|problem| problem.contains("user 0")));
            return;
        }
        chown(folder.path(), Some(65534), None).unwrap();
        symlink(folder.path(), root.path().join("link")).unwrap();
        for theirs in [folder, PrivateFolder::new(root.path().join("link"))] {
            for problem in [theirs.check(), theirs.create()] {
                assert!(problem.is_err_and(|problem| problem.contains("user 65534")));
            }
        }
    }
}

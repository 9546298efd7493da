//! Folders whose content this process trusts: kernels that it runs, and records of what is proven.

use rustix::process::geteuid;
use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A folder that belongs to the user of this process, and that only this user can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivateFolder {
    path: PathBuf,
}

impl PrivateFolder {
    /// The folder at `path`, which need not exist. A relative path starts at the current folder.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        PrivateFolder { path: std::path::absolute(&path).unwrap_or(path) }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Another owner of the folder could put anything into it, and another owner of a folder or link above it could replace it. Both are
    /// refused. root is no exception, except that root's own folders above it are trusted. If others can write to a folder of
    /// ours, their permission is removed, and so are the files that they left there. The folder need not exist.
    ///
    /// # Errors
    /// It is not a folder, or it belongs to another user or is in another user's folder. The text says which; its subject is the folder.
    pub fn check(&self) -> Result<(), String> {
        self.check_itself()?;
        let user = geteuid().as_raw();
        let unknown = unknown_users();
        let is_trusted = |owner: u32| owner == user || owner == 0 || unknown(owner);
        let refused = |path: &Path, owner: u32| {
            Err(format!("is in {}, which belongs to user {owner}, who could replace it", path.display()))
        };
        // Along the path as written: a link on the way leads where its owner wants.
        for path in self.path.ancestors() {
            if let Ok(metadata) = fs::symlink_metadata(path)
                && !is_trusted(metadata.uid())
            {
                return refused(path, metadata.uid());
            }
        }
        // And along the path that it resolves to.
        let real = self.path.ancestors().find_map(|path| fs::canonicalize(path).ok());
        for path in real.iter().flat_map(|real| real.ancestors()) {
            match fs::metadata(path) {
                Ok(metadata) if !is_trusted(metadata.uid()) => return refused(path, metadata.uid()),
                _ => {}
            }
        }
        Ok(())
    }

    /// [`PrivateFolder::check`] for the folder itself.
    fn check_itself(&self) -> Result<(), String> {
        let metadata = match fs::metadata(&self.path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(format!("cannot be read: {error}")),
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
            self.close(user)
                .map_err(|e| format!("is writable by other users and cannot be made private: {e}"))?;
        }
        Ok(())
    }

    /// Creates it if it does not exist.
    ///
    /// # Errors
    /// It cannot be created, or the errors of [`PrivateFolder::check`].
    pub fn create(&self) -> Result<(), String> {
        self.check()?;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        made.map_err(|e| format!("cannot be created: {e}"))?;
        self.check()
    }

    /// Path, name and metadata of everything in it. Empty if it does not exist.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn files(&self) -> io::Result<Vec<(PathBuf, String, Metadata)>> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut list = Vec::new();
        for entry in entries {
            let entry = entry?;
            // A file that another process removes meanwhile is skipped.
            if let Ok(metadata) = entry.metadata() {
                list.push((entry.path(), entry.file_name().to_string_lossy().into_owned(), metadata));
            }
        }
        Ok(list)
    }

    /// From now on, only `user`, its owner, can write there.
    fn close(&self, user: u32) -> io::Result<()> {
        tracing::warn!(
            "other users could write to {}; this permission has been removed",
            self.path.display()
        );
        fs::set_permissions(&self.path, Permissions::from_mode(0o700))?;
        for (path, _, metadata) in self.files()? {
            if metadata.uid() != user {
                tracing::warn!("removing {}, which belongs to user {}", path.display(), metadata.uid());
                remove(&path)?;
            }
        }
        Ok(())
    }
}

/// Recognises users that this process cannot know. In a user namespace, all unmapped users, including the system's root, appear as
/// nobody.
fn unknown_users() -> impl Fn(u32) -> bool {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let nobody = read("/proc/sys/kernel/overflowuid").trim().parse::<u32>().ok();
    let map = read("/proc/self/uid_map");
    let is_mapped = |user: u32| {
        map.lines().any(|line| {
            let mut numbers = line.split_whitespace().map_while(|word| word.parse::<u64>().ok());
            let (first, count) = (numbers.next(), numbers.nth(1));
            first.zip(count).is_some_and(|(first, count)| (first..first + count).contains(&user.into()))
        })
    };
    let unknown = nobody.filter(|&nobody| !map.is_empty() && !is_mapped(nobody));
    move |user| Some(user) == unknown
}

/// Removes a file or folder that may not exist.
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
    fn only_the_users_own_folder_is_trusted() {
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
        // The text of the problem continues a sentence about the folder.
        let problem = PrivateFolder::new(root.path().join("file/x")).check().unwrap_err();
        assert!(problem.starts_with("cannot be read: "), "{problem}");

        assert!((0..1000).all(|user| !unknown_users()(user)), "users of this system are known");

        // Root's folder for others; another user's folder for root.
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

        // Our own or a missing folder, inside another user's folder or reached through another user's link.
        let theirs = root.path().join("theirs");
        fs::create_dir_all(theirs.join("ours")).unwrap();
        chown(&theirs, Some(65534), None).unwrap();
        fs::create_dir(root.path().join("real")).unwrap();
        symlink(root.path().join("real"), root.path().join("their-link")).unwrap();
        std::os::unix::fs::lchown(root.path().join("their-link"), Some(65534), None).unwrap();
        symlink(&theirs, root.path().join("our-link")).unwrap();
        for path in [
            "theirs/ours",
            "theirs/ours/new",
            "theirs/new",
            "their-link/new",
            "our-link/ours",
            "our-link/new",
        ] {
            let folder = PrivateFolder::new(root.path().join(path));
            for problem in [folder.check(), folder.create()] {
                assert!(problem.is_err_and(|problem| problem.contains("user 65534")), "{path}");
            }
        }
        assert!(!theirs.join("new").exists(), "nothing is made there");
    }
}

//! Where pip puts NVSHMEM: the folder `nvidia/nvshmem` among the packages of a Python installation.
//!
//! Python itself is not run, because every rank searches at every start. The folders follow from the place of `python3`:
//!
//! 1. the virtual environment that `VIRTUAL_ENV` names;
//! 2. the installation of the first `python3` on `PATH`, and the one that this `python3` links to;
//! 3. `/usr/local`, which pip uses for root on a distribution's Python;
//! 4. the user's packages: `PYTHONUSERBASE`, or `~/.local`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// NVSHMEM's package.
const PACKAGE: &str = "nvidia/nvshmem";

/// The folders that hold `lib/` and `include/` of NVSHMEM's package, in order. If an installation of Python lacks the
/// package, a pattern that no file matches stands for it, so that an error can name it.
#[must_use]
pub fn packages() -> Vec<PathBuf> {
    packages_of(&|name| std::env::var_os(name))
}

/// [`packages`] under these environment variables.
fn packages_of(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let named = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let python = std::env::split_paths(&variable("PATH").unwrap_or_default())
        .map(|folder| folder.join("python3"))
        .find(|path| path.is_absolute() && path.is_file());
    let linked = python.as_ref().and_then(|python| python.canonicalize().ok());
    // PREFIX/bin/python3
    let prefix = |python: PathBuf| Some(python.parent()?.parent()?.to_path_buf());
    let user = named("PYTHONUSERBASE").or_else(|| Some(named("HOME")?.join(".local")));
    let prefixes = [
        named("VIRTUAL_ENV"),
        python.and_then(prefix),
        linked.and_then(prefix),
        Some("/usr/local".into()),
        user,
    ];
    let mut found = Vec::new();
    for prefix in prefixes.into_iter().flatten().filter(|prefix| prefix.is_absolute()) {
        let folder = package_in(&prefix);
        if !found.contains(&folder) {
            found.push(folder);
        }
    }
    found
}

/// The package of the newest Python in `prefix` that has it.
fn package_in(prefix: &Path) -> PathBuf {
    // `python3` without a number is the folder that all of Debian's Pythons share.
    let version = |name: &str| name.strip_prefix("python3")?.trim_start_matches('.').parse().ok().or(Some(0));
    let mut found: Vec<(u32, PathBuf)> = Vec::new();
    for library in ["lib", "lib64"] {
        for entry in std::fs::read_dir(prefix.join(library)).into_iter().flatten().flatten() {
            let Some(version) = version(&entry.file_name().to_string_lossy()) else { continue };
            let folders =
                ["site-packages", "dist-packages"].map(|name| entry.path().join(name).join(PACKAGE));
            found
                .extend(folders.into_iter().filter(|folder| folder.is_dir()).map(|folder| (version, folder)));
        }
    }
    // The first of the largest: `lib` is often the same folder as `lib64`.
    let newest = found.into_iter().rev().max_by_key(|(version, _)| *version);
    newest.map_or_else(|| prefix.join("lib/python3*/*-packages").join(PACKAGE), |(_, folder)| folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// A folder that is removed at the end of the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("nvshmem-sys-{}-{name}", std::process::id()));
            fs::create_dir_all(&folder).expect("a folder");
            Scratch(folder.canonicalize().expect("a path"))
        }

        /// Makes a folder.
        fn folder(&self, path: &str) -> PathBuf {
            let folder = self.0.join(path);
            fs::create_dir_all(&folder).expect("a folder");
            folder
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn packages_are_found_in_the_order_of_the_places() {
        let scratch = Scratch::new("order");
        let package = |prefix: &str, rest: &str| scratch.folder(&format!("{prefix}/lib/{rest}/{PACKAGE}"));
        let environment = package("environment", "python3.12/site-packages");
        let linked = package("installed", "python3.9/site-packages");
        let user = package("home/.local", "python3.11/site-packages");
        fs::write(scratch.folder("installed/bin").join("python3.9"), "").expect("a file");
        let bin = scratch.folder("links/bin");
        symlink(scratch.0.join("installed/bin/python3.9"), bin.join("python3")).expect("a link");
        let variable = |name: &str| match name {
            "VIRTUAL_ENV" => Some(scratch.0.join("environment").into()),
            "PATH" => Some(format!("relative:{}:/usr/bin", bin.display()).into()),
            "HOME" => Some(scratch.0.join("home").into()),
            _ => None,
        };
        let found = packages_of(&variable);
        assert_eq!(found.len(), 5, "{found:?}");
        assert_eq!(found[0], environment);
        assert_eq!(
            found[1],
            scratch.0.join("links/lib/python3*/*-packages/nvidia/nvshmem"),
            "named in errors"
        );
        assert_eq!(found[2], linked);
        assert!(found[3].starts_with("/usr/local/lib"), "{found:?}");
        assert_eq!(found[4], user);
    }

    #[test]
    fn the_newest_python_of_an_installation_comes_first() {
        let scratch = Scratch::new("newest");
        for name in ["lib/python3/dist-packages", "lib64/python3.9/site-packages"] {
            scratch.folder(&format!("{name}/{PACKAGE}"));
        }
        let newest = scratch.folder(&format!("lib/python3.10/dist-packages/{PACKAGE}"));
        // These have no such package.
        for name in ["lib/python3.13/site-packages", "lib/python2.7/site-packages/nvidia/nvshmem", "lib/perl"]
        {
            scratch.folder(name);
        }
        assert_eq!(package_in(&scratch.0), newest);
    }

    #[test]
    fn without_python_only_the_fixed_places_are_left() {
        let found = packages_of(&|name| (name == "PATH").then(|| "/no/such/folder".into()));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("/usr/local"));
    }
}

//! Where pip puts NVSHMEM: the folder `nvidia/nvshmem` among the packages of a Python installation.
//!
//! Python itself is not run, because every rank searches at every start. The folders follow from the environment and from the place of
//! `python3`:
//!
//! 1. the folders in `PYTHONPATH`;
//! 2. the virtual environment that `VIRTUAL_ENV` names;
//! 3. the installation of the first `python3` on `PATH`, and those of the files that it links to, one after the other. If it is a shim
//!    of pyenv, the installation that `PYENV_VERSION` or the file `version` of pyenv names. A folder's `.python-version` is not read;
//! 4. `/usr/local`, which pip uses for root on a distribution's Python;
//! 5. the user's packages: `PYTHONUSERBASE`, or `~/.local`.

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
    let paths = |name| std::env::split_paths(&variable(name).unwrap_or_default()).collect::<Vec<_>>();
    let user = named("PYTHONUSERBASE").or_else(|| Some(named("HOME")?.join(".local")));
    let mut prefixes: Vec<PathBuf> = named("VIRTUAL_ENV").into_iter().collect();
    let pythons = paths("PATH").into_iter().map(|folder| folder.join("python3"));
    for python in pythons.filter(|path| path.is_absolute() && path.is_file()) {
        let Some(root) = shims_of(&python) else {
            prefixes.extend(links(python).iter().filter_map(|python| prefix(python)));
            break;
        };
        // Without a version, or with `system`, a shim runs the next `python3` on PATH.
        let version = named("PYENV_VERSION")
            .or_else(|| Some(std::fs::read_to_string(root.join("version")).ok()?.into()));
        let version =
            version.and_then(|text| Some(text.to_str()?.split([':', '\n']).next()?.trim().to_string()));
        if let Some(version) = version.filter(|version| !version.is_empty() && version != "system") {
            prefixes.push(root.join("versions").join(version));
            break;
        }
    }
    prefixes.push("/usr/local".into());
    prefixes.extend(user);
    let mut found: Vec<PathBuf> =
        paths("PYTHONPATH").into_iter().filter(|folder| folder.is_absolute()).collect();
    found.iter_mut().for_each(|folder| folder.push(PACKAGE));
    found.retain(|folder| folder.is_dir());
    for prefix in prefixes.into_iter().filter(|prefix| prefix.is_absolute()) {
        let folder = package_in(&prefix);
        if !found.contains(&folder) {
            found.push(folder);
        }
    }
    found
}

/// PREFIX of PREFIX/bin/python3.
fn prefix(python: &Path) -> Option<PathBuf> {
    Some(python.parent()?.parent()?.to_path_buf())
}

/// PYENV_ROOT of PYENV_ROOT/shims/python3. A shim is a script; a program or a link may be in a folder of this name by chance.
fn shims_of(python: &Path) -> Option<PathBuf> {
    use std::io::Read;
    let folder = python.parent().filter(|folder| folder.ends_with("shims"))?;
    let mut begin = [0; 2];
    std::fs::File::open(python).ok()?.read_exact(&mut begin).ok()?;
    (begin == *b"#!").then(|| folder.parent().map(Path::to_path_buf))?
}

/// A file, and the files that it links to, one after the other. Any of them may belong to a virtual environment.
fn links(file: PathBuf) -> Vec<PathBuf> {
    /// As in the kernel's own limit.
    const MOST: usize = 40;
    let next = |file: &PathBuf| Some(file.parent()?.join(std::fs::read_link(file).ok()?));
    let mut all: Vec<PathBuf> = std::iter::successors(Some(file), next).take(MOST).collect();
    // The folders of a path may be links too.
    all.extend(all.last().and_then(|last| last.canonicalize().ok()));
    all
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
    fn pythonpath_comes_first() {
        let scratch = Scratch::new("pythonpath");
        let (first, second) =
            (scratch.folder(&format!("first/{PACKAGE}")), scratch.folder(&format!("second/{PACKAGE}")));
        let environment = scratch.folder(&format!("environment/lib/python3.12/site-packages/{PACKAGE}"));
        let at = |name: &str| scratch.0.join(name).display().to_string();
        let path = format!("relative:{}::{}:{}", at("first"), at("without"), at("second"));
        let found = packages_of(&|name| match name {
            "PYTHONPATH" => Some(path.clone().into()),
            "VIRTUAL_ENV" => Some(at("environment").into()),
            _ => None,
        });
        assert_eq!(found[..3], [first, second, environment], "{found:?}");
    }

    /// A link to a virtual environment's `python3`, which is itself a link, by way of a relative link.
    #[test]
    fn every_link_is_followed() {
        let scratch = Scratch::new("every-link");
        let environment = scratch.folder(&format!("environment/lib/python3.12/site-packages/{PACKAGE}"));
        let installed = scratch.folder(&format!("installed/lib/python3.12/site-packages/{PACKAGE}"));
        fs::write(scratch.folder("installed/bin").join("python3.12"), "").expect("a file");
        symlink("../../installed/bin/python3.12", scratch.folder("environment/bin").join("python3"))
            .expect("a link");
        symlink("../../environment/bin/python3", scratch.folder("links/bin").join("python3"))
            .expect("a link");
        let bin = scratch.0.join("links/bin");
        let found = packages_of(&|name| (name == "PATH").then(|| bin.clone().into()));
        let at = |folder: &PathBuf| {
            found.iter().position(|found| found.canonicalize().ok().as_ref() == Some(folder))
        };
        assert!(at(&environment).is_some() && at(&environment) < at(&installed), "{found:?}");
    }

    #[test]
    fn a_shim_of_pyenv_stands_for_its_version() {
        let scratch = Scratch::new("pyenv");
        let package =
            |prefix: &str| scratch.folder(&format!("{prefix}/lib/python3.12/site-packages/{PACKAGE}"));
        let (wanted, other) = (package("pyenv/versions/3.12.4"), package("pyenv/versions/other"));
        let system = package("system");
        let shims = scratch.folder("pyenv/shims");
        fs::write(shims.join("python3"), "#!/usr/bin/env bash\n").expect("a file");
        fs::write(scratch.folder("system/bin").join("python3"), "").expect("a file");
        let path = format!("{}:{}", shims.display(), scratch.0.join("system/bin").display());
        let first = |version: Option<&str>| {
            let found = packages_of(&|name| match name {
                "PATH" => Some(path.clone().into()),
                "PYENV_VERSION" => version.map(Into::into),
                _ => None,
            });
            found[0].clone()
        };
        assert_eq!(first(None), system, "pyenv has no version");
        fs::write(scratch.0.join("pyenv/version"), "3.12.4\n").expect("a file");
        assert_eq!(first(None), wanted);
        assert_eq!(first(Some("other:3.12.4")), other);
        assert_eq!(first(Some("system")), system);
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

//! Where to look for the host library:
//!
//! 1. `NVSHMEM_HOME`, if it is set: `lib/` and `lib64/` under it, and nowhere else;
//! 2. for a program that still lies where it was built: the folder that `scripts/setup.sh --nvshmem` fills
//!    there;
//! 3. the loader's own search (`LD_LIBRARY_PATH`, the loader's cache, the system folders);
//! 4. the packages of Python ([`crate::packages()`]).
//!
//! A program that was copied elsewhere does not use the folder where it was built: on another machine that folder may
//! belong to anyone.

use crate::packages::packages;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// The host library's file name; it carries the ABI's major version.
pub const FILE_NAME: &str = "libnvshmem_host.so.3";

/// The repository that this crate was built from.
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Cargo's target folder, which may be outside the repository.
const BUILT_TO: &str = concat!(env!("OUT_DIR"), "/../../../..");

/// The set-up's folder there.
const SETUP_FOLDER: &str = ".setup/nvidia/nvshmem";

/// The variable that names the library's folder.
const VARIABLE: &str = "NVSHMEM_HOME";

/// The origin of a place among Python's packages.
const PACKAGES: &str = "Python's packages";

/// One place where the library may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// A path, or a bare file name for the loader's search.
    pub path: PathBuf,
    /// Why this place: the variable, the set-up, the loader or Python's packages.
    pub origin: &'static str,
}

/// A place that was tried, and what was wrong there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The place.
    pub candidate: Candidate,
    /// What was wrong.
    pub problem: String,
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.candidate.path.display(), self.candidate.origin, self.problem)
    }
}

impl Probe {
    /// Whether the variable alone decided where to look.
    pub(crate) fn of_variable(probes: &[Self]) -> bool {
        probes.iter().any(|probe| probe.candidate.origin == VARIABLE)
    }

    /// All probes, each on a line.
    pub(crate) fn list(probes: &[Self]) -> String {
        probes.iter().map(|probe| format!("\n  {probe}")).collect()
    }
}

/// The places to try, in order, given the value of `NVSHMEM_HOME`.
#[must_use]
pub fn candidates(nvshmem_home: Option<OsString>) -> Vec<Candidate> {
    candidates_for(std::env::current_exe().ok().as_deref(), nvshmem_home, packages)
}

/// [`candidates`] of the program at `program`, where Python has `packages`.
fn candidates_for(
    program: Option<&Path>,
    nvshmem_home: Option<OsString>,
    packages: impl Fn() -> Vec<PathBuf>,
) -> Vec<Candidate> {
    let below = |root: PathBuf, origin| {
        ["lib", "lib64"]
            .map(|folder| Candidate { path: root.join(folder).join(FILE_NAME), origin })
            .into_iter()
    };
    match nvshmem_home {
        Some(home) if !home.is_empty() => below(home.into(), VARIABLE).collect(),
        _ => built_at(program)
            .into_iter()
            .flat_map(|repository| below(repository.join(SETUP_FOLDER), "scripts/setup.sh").take(1))
            .chain([Candidate { path: FILE_NAME.into(), origin: "the loader's search" }])
            .chain(packages().into_iter().flat_map(|folder| below(folder, PACKAGES).take(1)))
            .collect(),
    }
}

/// The repository that the program was built from, if the program still lies where it was built.
fn built_at(program: Option<&Path>) -> Option<PathBuf> {
    let program = program?.canonicalize().ok()?;
    let mut homes = [REPOSITORY, BUILT_TO].iter().filter_map(|home| Path::new(home).canonicalize().ok());
    // A crate built from a package has no repository around it.
    let repository =
        Path::new(REPOSITORY).canonicalize().ok().filter(|r| r.join("scripts/setup.sh").is_file())?;
    homes.any(|home| program.starts_with(home)).then_some(repository)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_excludes_every_other_place() {
        let paths: Vec<_> = candidates(Some("/opt/nvshmem".into())).into_iter().map(|c| c.path).collect();
        assert_eq!(
            paths,
            [
                PathBuf::from("/opt/nvshmem/lib/libnvshmem_host.so.3"),
                PathBuf::from("/opt/nvshmem/lib64/libnvshmem_host.so.3")
            ]
        );
    }

    #[test]
    fn the_error_names_the_variable_only_where_it_decided() {
        let text = |home| {
            let probe = |candidate| Probe { candidate, problem: "is not there".into() };
            let probes = candidates(home).into_iter().map(probe).collect();
            crate::Error::NotFound { probes }.help().expect("a help")
        };
        let (set, unset) = (text(Some("/opt/nvshmem".into())), text(None));
        assert!(set.contains("unset NVSHMEM_HOME"), "{set}");
        assert!(!unset.contains("unset") && unset.starts_with("set NVSHMEM_HOME to"), "{unset}");
    }

    #[test]
    fn a_copied_program_does_not_look_where_it_was_built() {
        let folder = std::env::temp_dir();
        for program in [None, Some(folder.as_path()), Some(Path::new("/no/such/program"))] {
            let found = candidates_for(program, None, Vec::new);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(found[0].path, PathBuf::from(FILE_NAME));
        }
    }

    #[test]
    fn without_the_variable_the_setup_comes_first_and_pythons_packages_last() {
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        for unset in [None, Some(OsString::new())] {
            let packages = || ["/a/nvidia/nvshmem", "/b/nvidia/nvshmem"].map(PathBuf::from).to_vec();
            let found = candidates_for(Some(&own), unset, packages);
            assert_eq!(found.len(), 4);
            assert!(found[0].path.ends_with(".setup/nvidia/nvshmem/lib/libnvshmem_host.so.3"));
            assert_eq!(found[1].path, PathBuf::from(FILE_NAME), "a bare name makes the loader search");
            assert_eq!(found[2].path, PathBuf::from("/a/nvidia/nvshmem/lib/libnvshmem_host.so.3"));
            assert_eq!(found[3].path, PathBuf::from("/b/nvidia/nvshmem/lib/libnvshmem_host.so.3"));
            let text =
                crate::Library::load_from(found[2..].to_vec()).expect_err("no such folders").to_string();
            assert!(
                found[2..].iter().all(|c| text.contains(&format!("{} (Python's", c.path.display()))),
                "{text}"
            );
        }
    }
}

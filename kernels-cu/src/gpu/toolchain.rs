//! Finds nvcc and NVSHMEM's files.

use super::{Architecture, GpuError, NvshmemVersion, ToolchainIdentity, nvcc};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The oldest CUDA release that compiles the sources.
const OLDEST_CUDA: (u32, u32) = (12, 4);
/// The oldest NVSHMEM that has all functions that they call.
const OLDEST_NVSHMEM: NvshmemVersion = NvshmemVersion { major: 3, minor: 4, patch: 0 };

/// The repository that this crate was built from, and the folder of its set-up.
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const SETUP_FOLDER: &str = ".setup/nvidia";
/// The folder that Cargo built to, which may be elsewhere.
const BUILT_TO: &str = concat!(env!("OUT_DIR"), "/../../../..");
const SETUP: &str = "scripts/setup.sh";

/// Time limit for `nvcc --version`.
const VERSION_LIMIT: Duration = Duration::from_secs(20);

/// A CUDA compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvcc {
    /// The program.
    pub path: PathBuf,
    /// Its release, e.g. (13, 0).
    pub release: (u32, u32),
    /// Its build description.
    pub build: String,
}

/// NVSHMEM's headers and device library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvshmemFiles {
    /// Folder of the headers.
    pub include: PathBuf,
    /// Folder of `libnvshmem_device.a`.
    pub lib: PathBuf,
    /// Version of the headers.
    pub version: NvshmemVersion,
    /// Length of `libnvshmem_device.a`.
    pub device_bytes: u64,
}

/// The tools that compile a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// The compiler.
    pub nvcc: Nvcc,
    /// NVSHMEM, if it is needed.
    pub nvshmem: Option<NvshmemFiles>,
}

impl Toolchain {
    /// Looks for an nvcc that compiles for `architecture`, and for NVSHMEM if it is needed: in the places of
    /// [`NvshmemFiles::find`], which end with `packages`.
    ///
    /// # Errors
    /// What is missing or too old, the places that were searched, and the command that installs it.
    pub fn find(architecture: Architecture, nvshmem: bool, packages: &[PathBuf]) -> Result<Self, GpuError> {
        let nvcc = Nvcc::find(Some(architecture))?;
        Ok(Toolchain { nvcc, nvshmem: nvshmem.then(|| NvshmemFiles::find(packages)).transpose()? })
    }

    /// The properties that affect the compiled code.
    pub fn identity(&self) -> ToolchainIdentity {
        ToolchainIdentity {
            nvcc: self.nvcc.build.clone(),
            nvshmem: self.nvshmem.as_ref().map(|files| files.version),
            nvshmem_device_bytes: self.nvshmem.as_ref().map_or(0, |files| files.device_bytes),
        }
    }
}

impl Nvcc {
    /// The first of `$CUDA_HOME`, `$CUDA_PATH`, `$PATH`, `/usr/local/cuda` and the set-up's folder that works and is
    /// new enough for `architecture`, or without an architecture for any.
    ///
    /// # Errors
    /// There is none.
    pub fn find(architecture: Option<Architecture>) -> Result<Self, GpuError> {
        Nvcc::first(nvcc_candidates(&|name| env::var_os(name)), architecture)
    }

    fn first(
        candidates: Vec<Candidate<PathBuf>>,
        architecture: Option<Architecture>,
    ) -> Result<Self, GpuError> {
        let oldest = architecture.map_or(OLDEST_CUDA, Architecture::oldest_cuda);
        let reason = architecture.map(|architecture| format!(", for {architecture}")).unwrap_or_default();
        let what = format!("nvcc of CUDA {}.{} or later{reason}", oldest.0, oldest.1);
        first(what, None, candidates, PathBuf::as_path, |path| Nvcc::at(path, oldest))
    }

    /// The nvcc at `path`, if it is not older than `oldest`.
    fn at(path: &Path, oldest: (u32, u32)) -> Result<Self, String> {
        if !path.is_file() {
            return Err("does not exist".to_string());
        }
        let text = nvcc::version_text(path, VERSION_LIMIT)?;
        let (release, build) = parse_version(&text).ok_or("--version prints no release")?;
        if release < oldest {
            return Err(format!("has CUDA {}.{}, which is too old", release.0, release.1));
        }
        Ok(Nvcc { path: path.to_path_buf(), release, build })
    }
}

/// `Cuda compilation tools, release 13.0, V13.0.88` and `Build cuda_13.0.r13.0/compiler.36424714_0`.
fn parse_version(text: &str) -> Option<((u32, u32), String)> {
    let tools = text.lines().find(|line| line.contains(", release "))?;
    let release = tools.split(", release ").nth(1)?.split(',').next()?;
    let (major, minor) = release.trim().split_once('.')?;
    let build = text.lines().find_map(|line| line.strip_prefix("Build ")).unwrap_or_default();
    let full = tools.rsplit(", ").next()?;
    Some(((major.parse().ok()?, minor.parse().ok()?), format!("{full} {build}").trim().to_string()))
}

impl NvshmemFiles {
    /// Only in `$NVSHMEM_HOME` if that is set. Otherwise in the first of the set-up's folder, `/usr/local/nvshmem`,
    /// the folders of Linux distributions, and `packages`: the folders where pip may have installed NVSHMEM.
    ///
    /// # Errors
    /// The files are missing or too old.
    pub fn find(packages: &[PathBuf]) -> Result<Self, GpuError> {
        let what = format!("NVSHMEM {OLDEST_NVSHMEM} or later (headers and libnvshmem_device.a)");
        let home = env::var_os("NVSHMEM_HOME").filter(|home| !home.is_empty());
        let variable = home.is_some().then_some("NVSHMEM_HOME");
        let candidates = nvshmem_candidates(home, packages);
        first(what, variable, candidates, |place| &place.0, |(include, lib)| NvshmemFiles::at(include, lib))
    }

    /// The files in these folders.
    fn at(include: &Path, lib: &Path) -> Result<Self, String> {
        let header = include.join("non_abi/nvshmem_version.h");
        let text = std::fs::read_to_string(&header).map_err(|e| format!("{}: {e}", header.display()))?;
        let number = |name: &str| {
            let name = format!("NVSHMEM_VENDOR_{name}_VERSION");
            let line = text.lines().find_map(|l| l.strip_prefix("#define ")?.trim().strip_prefix(&name));
            line.and_then(|value| value.trim().parse().ok())
                .ok_or_else(|| format!("{} does not define {name}", header.display()))
        };
        let version =
            NvshmemVersion { major: number("MAJOR")?, minor: number("MINOR")?, patch: number("PATCH")? };
        if version < OLDEST_NVSHMEM {
            return Err(format!("has version {version}, which is too old"));
        }
        let library = lib.join("libnvshmem_device.a");
        let device_bytes =
            std::fs::metadata(&library).map_err(|e| format!("{}: {e}", library.display()))?.len();
        Ok(NvshmemFiles { include: include.to_path_buf(), lib: lib.to_path_buf(), version, device_bytes })
    }
}

/// A place to check, and the reason for it.
struct Candidate<P> {
    place: P,
    origin: &'static str,
}

/// Folders of the headers and of the library.
type NvshmemPlace = (PathBuf, PathBuf);

/// The first place that works. `variable` is the variable that excludes all other places.
fn first<P, T>(
    what: String,
    variable: Option<&'static str>,
    candidates: Vec<Candidate<P>>,
    path: impl Fn(&P) -> &Path,
    at: impl Fn(&P) -> Result<T, String>,
) -> Result<T, GpuError> {
    let mut probes: Vec<String> = Vec::new();
    for Candidate { place, origin } in candidates {
        match at(&place) {
            Ok(found) => {
                tracing::debug!("{what}: {} ({origin})", path(&place).display());
                return Ok(found);
            }
            Err(problem) => {
                let probe = format!("  {} ({origin}): {problem}", path(&place).display());
                // A missing header is found once per folder of the library.
                if !probes.contains(&probe) {
                    probes.push(probe);
                }
            }
        }
    }
    Err(GpuError::NotFound { what, probes: probes.join("\n"), variable })
}

/// The set-up's folder, for a program that is still where it was built. A program that was copied elsewhere does not
/// look there, because on another machine that folder may belong to anybody.
fn setup_folder(program: Option<PathBuf>) -> Option<PathBuf> {
    let program = program?.canonicalize().ok()?;
    let mut homes = [REPOSITORY, BUILT_TO].iter().filter_map(|home| Path::new(home).canonicalize().ok());
    // A package has no repository around it.
    let repository =
        Path::new(REPOSITORY).canonicalize().ok().filter(|r| r.join("scripts/setup.sh").is_file())?;
    homes.any(|home| program.starts_with(home)).then(|| repository.join(SETUP_FOLDER))
}

/// A folder named by a variable, made absolute because nvcc runs in another folder.
fn named(folder: OsString) -> PathBuf {
    std::path::absolute(&folder).unwrap_or_else(|_| folder.into())
}

fn nvcc_candidates(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<Candidate<PathBuf>> {
    let mut list = Vec::new();
    let mut add = |place: PathBuf, origin| list.push(Candidate { place, origin });
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = variable(name).filter(|home| !home.is_empty()) {
            add(named(home).join("bin/nvcc"), name);
        }
    }
    let in_path = env::split_paths(&variable("PATH").unwrap_or_default())
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join("nvcc"))
        .find(|path| path.is_file());
    add(in_path.unwrap_or_else(|| "nvcc".into()), "PATH");
    add("/usr/local/cuda/bin/nvcc".into(), "the usual place");
    if let Some(setup) = setup_folder(env::current_exe().ok()) {
        add(setup.join("cu13/bin/nvcc"), SETUP);
    }
    list
}

fn nvshmem_candidates(home: Option<OsString>, packages: &[PathBuf]) -> Vec<Candidate<NvshmemPlace>> {
    let mut list = Vec::new();
    let mut add = |include: PathBuf, lib: PathBuf, origin| {
        list.push(Candidate { place: (include, lib), origin });
    };
    if let Some(home) = home {
        let home = named(home);
        for lib in ["lib", "lib64"] {
            add(home.join("include"), home.join(lib), "NVSHMEM_HOME");
        }
        return list;
    }
    if let Some(setup) = setup_folder(env::current_exe().ok()) {
        let setup = setup.join("nvshmem");
        add(setup.join("include"), setup.join("lib"), SETUP);
    }
    let usual = Path::new("/usr/local/nvshmem");
    for lib in ["lib", "lib64"] {
        add(usual.join("include"), usual.join(lib), "the usual place");
    }
    let system = format!("/usr/lib/{}-linux-gnu", env::consts::ARCH);
    for cuda in ["13", "12"] {
        let include = PathBuf::from(format!("/usr/include/nvshmem_{cuda}"));
        let lib = Path::new(&system).join("nvshmem").join(cuda);
        add(include, lib, "the distribution's place");
    }
    for folder in packages {
        add(folder.join("include"), folder.join("lib"), "Python's packages");
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn versions_are_read() {
        let text = "nvcc: NVIDIA (R) Cuda compiler driver\nCopyright (c) 2005-2025 NVIDIA Corporation\n\
                    Built on Wed_Aug_20_01:58:59_PM_PDT_2025\nCuda compilation tools, release 13.0, V13.0.88\n\
                    Build cuda_13.0.r13.0/compiler.36424714_0\n";
        let (release, build) = parse_version(text).unwrap();
        assert_eq!(release, (13, 0));
        assert_eq!(build, "V13.0.88 cuda_13.0.r13.0/compiler.36424714_0");
        assert_eq!(parse_version("something else"), None);
    }

    #[test]
    fn nvshmem_is_read_from_its_headers_and_missing_files_are_named() {
        let root = tempfile::tempdir().unwrap();
        let (include, lib) = (root.path().join("include"), root.path().join("lib"));
        fs::create_dir_all(include.join("non_abi")).unwrap();
        fs::create_dir_all(&lib).unwrap();
        let header = |version: &str| {
            let [major, minor, patch] = [0, 1, 2].map(|i| version.split('.').nth(i).unwrap());
            let text = format!(
                "#define NVSHMEM_VENDOR_MAJOR_VERSION {major}\n#define NVSHMEM_VENDOR_MINOR_VERSION {minor}\n\
                 #define NVSHMEM_VENDOR_PATCH_VERSION {patch}\n"
            );
            fs::write(include.join("non_abi/nvshmem_version.h"), text).unwrap();
        };
        assert!(NvshmemFiles::at(&include, &lib).unwrap_err().contains("nvshmem_version.h"));
        header("3.3.20");
        assert!(NvshmemFiles::at(&include, &lib).unwrap_err().contains("3.3.20, which is too old"));
        header("3.8.0");
        assert!(NvshmemFiles::at(&include, &lib).unwrap_err().contains("libnvshmem_device.a"));
        fs::write(lib.join("libnvshmem_device.a"), "1234").unwrap();
        let files = NvshmemFiles::at(&include, &lib).unwrap();
        assert_eq!((files.version.to_string().as_str(), files.device_bytes), ("3.8.0", 4));
    }

    #[test]
    fn the_places_are_tried_in_order_and_the_error_names_them() {
        let variable = |name: &str| match name {
            "CUDA_HOME" => Some(OsString::from("/a")),
            "CUDA_PATH" => Some(OsString::new()),
            _ => Some(OsString::from("/no/such:/folder")),
        };
        let list = nvcc_candidates(&variable);
        let origins: Vec<&str> = list.iter().map(|c| c.origin).collect();
        assert_eq!(origins, ["CUDA_HOME", "PATH", "the usual place", SETUP]);
        assert_eq!(list[0].place, Path::new("/a/bin/nvcc"));
        assert!(list[3].place.ends_with(".setup/nvidia/cu13/bin/nvcc"));
        let nothing: Result<(), GpuError> =
            first("nvcc".to_string(), None, list, PathBuf::as_path, |_| Err("does not exist".to_string()));
        let error = nothing.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("/a/bin/nvcc (CUDA_HOME): does not exist"), "{text}");
        assert!(error.help().is_some_and(|help| help.contains("scripts/setup.sh --cuda")), "{text}");
    }

    #[test]
    fn a_copied_program_does_not_look_where_it_was_built() {
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        assert!(setup_folder(Some(own)).is_some_and(|folder| folder.ends_with(SETUP_FOLDER)));
        for elsewhere in [None, Some(env::temp_dir()), Some("/no/such/program".into())] {
            assert_eq!(setup_folder(elsewhere), None);
        }
    }

    #[test]
    fn a_variable_that_excludes_the_other_places_is_named_first_and_each_problem_once() {
        let list = nvshmem_candidates(Some("/n".into()), &["/package".into()]);
        assert!(list.iter().all(|c| c.origin == "NVSHMEM_HOME"));
        let at = |place: &NvshmemPlace| NvshmemFiles::at(&place.0, &place.1);
        let error =
            first("NVSHMEM".to_string(), Some("NVSHMEM_HOME"), list, |place| &place.0, at).unwrap_err();
        let text = error.to_string();
        let help = error.help().unwrap();
        assert!(help.starts_with("unset NVSHMEM_HOME, which excludes all other places"), "{help}");
        assert!(help.contains("scripts/setup.sh --cuda"), "{help}");
        assert_eq!(text.matches("nvshmem_version.h").count(), 1, "{text}");
    }

    #[test]
    fn relative_folders_of_variables_become_absolute() {
        let list = nvcc_candidates(&|_| Some("some/cuda".into()));
        assert_eq!(list[0].place, env::current_dir().unwrap().join("some/cuda/bin/nvcc"));
        let list = nvshmem_candidates(Some("some/nvshmem".into()), &[]);
        assert!(list.iter().all(|c| c.place.0.is_absolute() && c.place.1.is_absolute()));
    }

    #[test]
    fn pythons_packages_are_the_last_place_for_nvshmem_and_are_named() {
        let root = tempfile::tempdir().unwrap();
        let package = |name: &str| root.path().join(name).join("nvidia/nvshmem");
        let packages = [package("empty"), package("full")];
        fs::create_dir_all(packages[1].join("include/non_abi")).unwrap();
        fs::create_dir_all(packages[1].join("lib")).unwrap();
        let list = nvshmem_candidates(None, &packages);
        let ours = list.iter().rev().map(|c| c.place.0.parent().unwrap()).take(2);
        assert!(ours.eq(packages.iter().rev().map(PathBuf::as_path)), "they are not the last two places");
        let find = || {
            let list = nvshmem_candidates(None, &packages).into_iter();
            let ours = list.filter(|c| c.origin == "Python's packages").collect();
            let at = |place: &NvshmemPlace| NvshmemFiles::at(&place.0, &place.1);
            first("NVSHMEM".to_string(), None, ours, |place| &place.0, at)
        };
        let text = find().unwrap_err().to_string();
        for folder in &packages {
            assert!(
                text.contains(&format!("{} (Python's packages)", folder.join("include").display())),
                "{text}"
            );
        }
        let header = "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION 8\n\
                      #define NVSHMEM_VENDOR_PATCH_VERSION 0\n";
        fs::write(packages[1].join("include/non_abi/nvshmem_version.h"), header).unwrap();
        fs::write(packages[1].join("lib/libnvshmem_device.a"), "").unwrap();
        assert_eq!(find().unwrap().lib, packages[1].join("lib"));
    }

    /// The fake nvcc with the behaviour that its name determines.
    fn stand_in(folder: &Path, name: &str) -> Candidate<PathBuf> {
        let place = folder.join(name);
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gpu/testdata/nvcc");
        std::os::unix::fs::symlink(own, &place).unwrap();
        Candidate { place, origin: "PATH" }
    }

    #[test]
    fn the_search_continues_after_an_nvcc_that_is_too_old_for_the_gpu() {
        let folder = tempfile::tempdir().unwrap();
        let places = ["nvcc-12.6", "nvcc-12.8"].map(|name| stand_in(folder.path(), name).place);
        let list = || places.clone().map(|place| Candidate { place, origin: "PATH" });
        let found = |architecture| Nvcc::first(list().into(), architecture).unwrap().release;
        assert_eq!(found(None), (12, 6));
        assert_eq!(found(Some(Architecture::Sm90a)), (12, 6));
        assert_eq!(found(Some(Architecture::Sm100a)), (12, 8));
        let [old, _] = list();
        let error = Nvcc::first(vec![old], Some(Architecture::Sm100a)).unwrap_err().to_string();
        assert!(error.contains("nvcc of CUDA 12.8 or later, for sm_100a"), "{error}");
        assert!(error.contains("has CUDA 12.6, which is too old"), "{error}");
    }

    #[test]
    fn an_nvcc_that_does_not_end_is_abandoned() {
        let folder = tempfile::tempdir().unwrap();
        let hangs = stand_in(folder.path(), "nvcc-hangs");
        let error = nvcc::version_text(&hangs.place, Duration::from_millis(100)).unwrap_err();
        assert!(error.contains("does not end within 0.1 s"), "{error}");
    }
}

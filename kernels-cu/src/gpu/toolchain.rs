//! Where nvcc and NVSHMEM's files for it are.

use super::{GpuError, NvshmemVersion, ToolchainIdentity};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest CUDA release that compiles the sources.
const OLDEST_CUDA: (u32, u32) = (12, 4);
/// The oldest NVSHMEM that has what they call.
const OLDEST_NVSHMEM: NvshmemVersion = NvshmemVersion { major: 3, minor: 4, patch: 0 };

/// The set-up's folder, below the repository that this crate was built from.
const SETUP_FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../.setup/nvidia");
const SETUP: &str = "scripts/setup.sh";

/// A CUDA compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvcc {
    /// The program.
    pub path: PathBuf,
    /// Its release, e.g. (13, 0).
    pub release: (u32, u32),
    /// What it says of its build.
    pub build: String,
}

/// NVSHMEM's headers and device library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvshmemFiles {
    /// Folder of the headers.
    pub include: PathBuf,
    /// Folder of `libnvshmem_device.a`.
    pub lib: PathBuf,
    /// Of the headers.
    pub version: NvshmemVersion,
    /// Length of `libnvshmem_device.a`.
    pub device_bytes: u64,
}

/// What compiles a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// The compiler.
    pub nvcc: Nvcc,
    /// NVSHMEM, where it is wanted.
    pub nvshmem: Option<NvshmemFiles>,
}

impl Toolchain {
    /// Looks for nvcc, and for NVSHMEM if it is wanted.
    ///
    /// # Errors
    /// What is missing or too old, where it was looked for, and the command that installs it.
    pub fn find(nvshmem: bool) -> Result<Self, GpuError> {
        Ok(Toolchain { nvcc: Nvcc::find()?, nvshmem: nvshmem.then(NvshmemFiles::find).transpose()? })
    }

    /// What of it decides the code that it makes.
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
    /// new enough.
    ///
    /// # Errors
    /// There is none.
    pub fn find() -> Result<Self, GpuError> {
        let (major, minor) = OLDEST_CUDA;
        let what = format!("nvcc of CUDA {major}.{minor} or later");
        let candidates = nvcc_candidates(&|name| env::var_os(name));
        first(what, candidates, PathBuf::as_path, |path| Nvcc::at(path))
    }

    /// The one at `path`.
    fn at(path: &Path) -> Result<Self, String> {
        if !path.is_file() {
            return Err("is not there".to_string());
        }
        let output = Command::new(path).arg("--version").output().map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let (release, build) =
            parse_version(&text).ok_or_else(|| format!("--version gives no release ({})", output.status))?;
        if release < OLDEST_CUDA {
            return Err(format!("is of CUDA {}.{}: too old", release.0, release.1));
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
    /// In `$NVSHMEM_HOME` and nowhere else, if that is set; else the first of the set-up's folder,
    /// `/usr/local/nvshmem` and where Linux distributions put it.
    ///
    /// # Errors
    /// They are not there, or too old.
    pub fn find() -> Result<Self, GpuError> {
        let what = format!("NVSHMEM {OLDEST_NVSHMEM} or later (headers and libnvshmem_device.a)");
        let candidates = nvshmem_candidates(env::var_os("NVSHMEM_HOME"));
        first(what, candidates, |place| &place.0, |(include, lib)| NvshmemFiles::at(include, lib))
    }

    /// Those at these folders.
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
            return Err(format!("is {version}: too old"));
        }
        let library = lib.join("libnvshmem_device.a");
        let device_bytes =
            std::fs::metadata(&library).map_err(|e| format!("{}: {e}", library.display()))?.len();
        Ok(NvshmemFiles { include: include.to_path_buf(), lib: lib.to_path_buf(), version, device_bytes })
    }
}

/// A place to look at, and why there.
struct Candidate<P> {
    place: P,
    origin: &'static str,
}

/// Folders of the headers and of the library.
type NvshmemPlace = (PathBuf, PathBuf);

fn first<P, T>(
    what: String,
    candidates: Vec<Candidate<P>>,
    path: impl Fn(&P) -> &Path,
    at: impl Fn(&P) -> Result<T, String>,
) -> Result<T, GpuError> {
    let mut probes = Vec::new();
    for Candidate { place, origin } in candidates {
        match at(&place) {
            Ok(found) => {
                tracing::debug!("{what}: {} ({origin})", path(&place).display());
                return Ok(found);
            }
            Err(problem) => probes.push(format!("  {} ({origin}): {problem}", path(&place).display())),
        }
    }
    Err(GpuError::NotFound { what, probes: probes.join("\n") })
}

fn nvcc_candidates(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<Candidate<PathBuf>> {
    let mut list = Vec::new();
    let mut add = |place: PathBuf, origin| list.push(Candidate { place, origin });
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = variable(name).filter(|home| !home.is_empty()) {
            add(Path::new(&home).join("bin/nvcc"), name);
        }
    }
    let in_path = env::split_paths(&variable("PATH").unwrap_or_default())
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join("nvcc"))
        .find(|path| path.is_file());
    add(in_path.unwrap_or_else(|| "nvcc".into()), "PATH");
    add("/usr/local/cuda/bin/nvcc".into(), "the usual place");
    add(Path::new(SETUP_FOLDER).join("cu13/bin/nvcc"), SETUP);
    list
}

fn nvshmem_candidates(home: Option<OsString>) -> Vec<Candidate<NvshmemPlace>> {
    let mut list = Vec::new();
    let mut add = |include: PathBuf, lib: PathBuf, origin| {
        list.push(Candidate { place: (include, lib), origin });
    };
    if let Some(home) = home.filter(|home| !home.is_empty()) {
        let home = PathBuf::from(home);
        for lib in ["lib", "lib64"] {
            add(home.join("include"), home.join(lib), "NVSHMEM_HOME");
        }
        return list;
    }
    let setup = Path::new(SETUP_FOLDER).join("nvshmem");
    add(setup.join("include"), setup.join("lib"), SETUP);
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
    fn nvshmem_is_read_from_its_headers_and_what_lacks_is_said() {
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
        assert!(NvshmemFiles::at(&include, &lib).unwrap_err().contains("3.3.20: too old"));
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
            first("nvcc".to_string(), list, PathBuf::as_path, |_| Err("is not there".to_string()));
        let text = nothing.unwrap_err().to_string();
        assert!(text.contains("/a/bin/nvcc (CUDA_HOME): is not there"), "{text}");
        assert!(text.contains("scripts/setup.sh --cuda"), "{text}");
        assert!(nvshmem_candidates(Some("/n".into())).iter().all(|c| c.origin == "NVSHMEM_HOME"));
    }
}

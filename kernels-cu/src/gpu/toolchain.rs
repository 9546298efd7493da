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
        first(format!("nvcc of CUDA {major}.{minor} or later"), nvcc_candidates(&|name| env::var_os(name)), |path| {
            Nvcc::at(path)
        })
    }

    /// The one at `path`.
    fn at(path: &Path) -> Result<Self, String> {
        if !path.is_file() {
            return Err("is not there".to_string());
        }
        let output = Command::new(path).arg("--version").output().map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let (release, build) = parse_version(&text)
            .ok_or_else(|| format!("--version gives no release ({})", output.status))?;
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
        let candidates = nvshmem_candidates(env::var_os("NVSHMEM_HOME"));
        let origin = |c: &(PathBuf, PathBuf, &'static str)| Candidate { path: c.0.clone(), origin: c.2 };
        let list = candidates.iter().map(origin).collect();
        first(format!("NVSHMEM {OLDEST_NVSHMEM} or later (headers, libnvshmem_device.a)"), list, |include| {
            let lib = candidates.iter().filter(|c| c.0 == include).map(|c| c.1.as_path());
            let mut problem = String::new();
            for lib in lib {
                match NvshmemFiles::at(include, lib) {
                    Ok(files) => return Ok(files),
                    Err(p) => problem = p,
                }
            }
            Err(problem)
        })
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

/// A place to look at, and why.
struct Candidate {
    path: PathBuf,
    origin: &'static str,
}

fn first<T>(
    what: String,
    candidates: Vec<Candidate>,
    at: impl Fn(&Path) -> Result<T, String>,
) -> Result<T, GpuError> {
    let mut probes = Vec::new();
    for Candidate { path, origin } in candidates {
        match at(&path) {
            Ok(found) => {
                if !probes.is_empty() {
                    tracing::debug!("{what}: {} ({origin})", path.display());
                }
                return Ok(found);
            }
            Err(problem) => probes.push(format!("  {} ({origin}): {problem}", path.display())),
        }
    }
    Err(GpuError::NotFound { what, probes: probes.join("\n") })
}

fn nvcc_candidates(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<Candidate> {
    let mut list = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = variable(name).filter(|home| !home.is_empty()) {
            list.push(Candidate { path: Path::new(&home).join("bin/nvcc"), origin: name });
        }
    }
    let in_path = env::split_paths(&variable("PATH").unwrap_or_default())
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join("nvcc"))
        .find(|path| path.is_file());
    list.push(Candidate { path: in_path.unwrap_or_else(|| "nvcc".into()), origin: "PATH" });
    list.push(Candidate { path: "/usr/local/cuda/bin/nvcc".into(), origin: "the usual place" });
    list.push(Candidate { path: Path::new(SETUP_FOLDER).join("cu13/bin/nvcc"), origin: SETUP });
    list
}

/// Folders of headers and of the library, and why there.
fn nvshmem_candidates(home: Option<OsString>) -> Vec<(PathBuf, PathBuf, &'static str)> {
    let below = |root: PathBuf, origin| {
        ["lib", "lib64"].map(|lib| (root.join("include"), root.join(lib), origin)).to_vec()
    };
    if let Some(home) = home.filter(|home| !home.is_empty()) {
        return below(home.into(), "NVSHMEM_HOME");
    }
    let mut list = below(Path::new(SETUP_FOLDER).join("nvshmem"), SETUP);
    list.truncate(1);
    list.extend(below("/usr/local/nvshmem".into(), "the usual place"));
    for cuda in [13, 12] {
        let include = PathBuf::from(format!("/usr/include/nvshmem_{cuda}"));
        for lib in ["/usr/lib64", concat!("/usr/lib/", "x86_64-linux-gnu"), "/usr/lib/aarch64-linux-gnu"] {
            let lib = PathBuf::from(lib).join(format!("nvshmem/{cuda}"));
            list.push((include.clone(), lib, "the distribution's place"));
        }
    }
    list
}

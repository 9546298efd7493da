//! The region sanitizer of the CPU target. With `MPK_SANITIZE=1`, every access of every task's kernel is compared with
//! the bytes that the task declared and with the list of other memory that tasks may access (`parts.cpp`). Any other
//! access is reported before it happens, and ends the run.
//!
//! `src/cpu/sanitizer` contains the check. On first use, the kernels are compiled a second time for it, from this
//! crate's sources, so it needs a developer's checkout. A normal build does not contain it.

use crate::abi::{self, KernelFn};
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use taskgraph::task_graph::{Operand, Space};
use taskgraph::{TaskGraph, Trust};

/// The sanitizer is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the region sanitizer (MPK_SANITIZE) cannot be used: {0}")]
pub struct SanitizerError(String);

impl SanitizerError {
    /// How to fix it.
    pub fn help(&self) -> &'static str {
        "run it on a machine with the sources of this build and a C++20 compiler"
    }
}

type DeclareFn = unsafe extern "C" fn(*const abi::mpk_operand, u32, u32, *const u32, *const u32);
type ForgetFn = unsafe extern "C" fn(*const abi::mpk_operand, u64);
type NameFn = unsafe extern "C" fn(*const abi::mpk_operand, *const libc::c_char, u64, u64, u64, u32);
type ForgetNamesFn = unsafe extern "C" fn(*const abi::mpk_operand);

/// The compiled kernels. They stay loaded until the process ends.
struct Library {
    handle: *mut libc::c_void,
    declare: DeclareFn,
    forget: ForgetFn,
    name: NameFn,
    forget_names: ForgetNamesFn,
}

// SAFETY: the handle is only given to dlsym, which any thread may call; the functions lock what they share.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// True if the environment asks for it.
pub fn enabled() -> bool {
    std::env::var_os("MPK_SANITIZE").is_some_and(|value| !value.is_empty() && value != "0")
}

/// The checked kernel of the task type `name`; `None` if the type has none.
///
/// # Errors
/// The sources are missing or do not compile.
pub fn kernel(name: &str) -> Result<Option<KernelFn>, SanitizerError> {
    let library = library()?;
    let found = library.symbol(&format!("mpk_sanitized_{name}"));
    // SAFETY: build.sh creates functions of this type under these names.
    Ok(found.map(|address| unsafe { std::mem::transmute::<*mut libc::c_void, KernelFn>(address) }))
}

/// The checked test of the flagged words of task type `name`; `None` if the type has none.
///
/// # Errors
/// Those of [`kernel`].
pub fn ready(name: &str) -> Result<Option<KernelFn>, SanitizerError> {
    kernel(&format!("{name}_ready"))
}

/// Declares what the operands of `graph` stand for whose bytes are known only at run time, and the names of its tensors
/// for reports. The kernels find the operands at `operands`, and each tensor at its address in `addresses`.
///
/// # Errors
/// Those of [`kernel`].
pub fn declare(
    graph: &TaskGraph,
    operands: *const abi::mpk_operand,
    addresses: impl Iterator<Item = u64>,
) -> Result<(), SanitizerError> {
    forget(operands, graph.operands.len())?;
    for (tensor, address) in graph.tensors.iter().zip(addresses) {
        let elements = tensor.strides.first().map_or(1, |&stride| u64::from(stride));
        let symmetric = tensor.space == Space::Symmetric;
        name_tensor(
            operands,
            &tensor.name,
            (address, tensor.bytes),
            elements * tensor.dtype.size(),
            symmetric,
        )?;
    }
    for (index, operand) in graph.operands.iter().enumerate() {
        let Some(trust) = operand.trust else { continue };
        let (kind, slot, lo, hi) = match trust {
            Trust::RowsOfSlot { slot, in_tiles, .. } => {
                let (lo, hi) = in_view(graph, operand);
                (if in_tiles { 3 } else { 0 }, slot, lo, hi)
            }
            Trust::PagesOfSlot => (1, operand.region.lo[0], operand.region.lo, operand.region.hi),
            Trust::PagesOfRows => (2, 0, operand.region.lo, operand.region.hi),
            // No narrower than the view.
            Trust::RowsOfUnits { .. } => continue,
        };
        // SAFETY: the address is a key that is not dereferenced; `lo` and `hi` have four words each.
        unsafe { (library()?.declare)(operands.wrapping_add(index), kind, slot, lo.as_ptr(), hi.as_ptr()) };
    }
    Ok(())
}

/// Names a tensor of the graph whose operands are at `operands`, for reports: its address and size in bytes, and the size of
/// a row.
///
/// # Errors
/// Those of [`kernel`].
#[allow(clippy::not_unsafe_ptr_arg_deref, reason = "the address is a key, nothing is read there")]
pub fn name_tensor(
    operands: *const abi::mpk_operand,
    name: &str,
    (address, bytes): (u64, u64),
    row_bytes: u64,
    symmetric: bool,
) -> Result<(), SanitizerError> {
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: the address of the operands is a key that is not dereferenced; the name is copied.
    unsafe {
        (library()?.name)(operands, name.as_ptr(), address, bytes, row_bytes, u32::from(symmetric));
    }
    Ok(())
}

/// Forgets the declarations of `count` operands at this address, and the names of their tensors.
///
/// # Errors
/// Those of [`kernel`].
#[allow(clippy::not_unsafe_ptr_arg_deref, reason = "the address is a key, nothing is read there")]
pub fn forget(operands: *const abi::mpk_operand, count: usize) -> Result<(), SanitizerError> {
    // SAFETY: the addresses are keys that are not dereferenced.
    unsafe {
        (library()?.forget)(operands, count as u64);
        (library()?.forget_names)(operands);
    }
    Ok(())
}

/// The region of the operand, relative to the first element of its view.
fn in_view(graph: &TaskGraph, operand: &Operand) -> ([u32; 4], [u32; 4]) {
    let tensor = &graph.tensors[operand.tensor as usize];
    let (mut lo, mut hi) = (operand.region.lo, operand.region.hi);
    let mut rest = operand.offset / tensor.dtype.size();
    for (d, &stride) in tensor.strides.iter().enumerate() {
        let first = (rest / u64::from(stride.max(1))) as u32;
        rest %= u64::from(stride.max(1));
        lo[d] = lo[d].saturating_sub(first);
        hi[d] = hi[d].saturating_sub(first);
    }
    (lo, hi)
}

fn library() -> Result<&'static Library, SanitizerError> {
    static LIBRARY: OnceLock<Result<Library, SanitizerError>> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::open().map_err(SanitizerError)).as_ref().map_err(Clone::clone)
}

impl Library {
    fn open() -> Result<Library, String> {
        let path = built()?;
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
        // SAFETY: the library is ours; its initialisers only allocate memory.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(format!("{} cannot be loaded", path.display()));
        }
        let missing = || format!("{} lacks a function", path.display());
        let symbol = |name| symbol(handle, name).ok_or_else(missing);
        tracing::debug!("every access is checked by {}", path.display());
        let (declare, forget) = (symbol("mpk_sanitizer_declare")?, symbol("mpk_sanitizer_forget")?);
        let (name, forget_names) = (symbol("mpk_sanitizer_name")?, symbol("mpk_sanitizer_forget_names")?);
        // SAFETY: operands.cpp and report.cpp define functions of these types under these names.
        unsafe {
            Ok(Library {
                handle,
                declare: std::mem::transmute::<*mut libc::c_void, DeclareFn>(declare),
                forget: std::mem::transmute::<*mut libc::c_void, ForgetFn>(forget),
                name: std::mem::transmute::<*mut libc::c_void, NameFn>(name),
                forget_names: std::mem::transmute::<*mut libc::c_void, ForgetNamesFn>(forget_names),
            })
        }
    }

    fn symbol(&self, name: &str) -> Option<*mut libc::c_void> {
        symbol(self.handle, name)
    }
}

fn symbol(handle: *mut libc::c_void, name: &str) -> Option<*mut libc::c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: the handle is open, the name ends with 0.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// The library for the current sources, compiled if necessary.
fn built() -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["include", "protocol", "src/cpu", "src/tasks"] {
        sources(&root.join(folder), &mut files)
            .map_err(|e| format!("{}: {e}", root.join(folder).display()))?;
    }
    files.sort();
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for file in &files {
        hash.update(file.as_os_str().as_bytes());
        hash.update(&fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?);
    }
    hash.update(std::env::var_os("CXX").unwrap_or_default().as_bytes());
    let library = Path::new(env!("OUT_DIR")).join(format!("sanitized-{:016x}.so", hash.digest()));
    let lock = library.with_extension("lock");
    let file = File::create(&lock).map_err(|e| format!("{}: {e}", lock.display()))?;
    file.lock().map_err(|e| format!("{}: {e}", lock.display()))?;
    if library.exists() {
        return Ok(library);
    }
    let output = Command::new("bash")
        .arg(root.join("src/cpu/sanitizer/build.sh"))
        .arg(&library)
        .output()
        .map_err(|e| format!("bash: {e}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(library)
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, found)?;
        } else if path.extension().is_some_and(|e| e == "h" || e == "cpp" || e == "inc" || e == "sh") {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod test;

//! The region sanitizer of the CPU target. With `MPK_SANITIZE=1`, every access of every task's kernel is compared with
//! the bytes that the task declared. An access to other bytes ends the run, and stderr names the task.
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
use taskgraph::task_graph::Operand;
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

/// The compiled kernels. They stay loaded until the process ends.
struct Library {
    handle: *mut libc::c_void,
    declare: DeclareFn,
    forget: ForgetFn,
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

/// Declares what the operands of `graph` stand for whose bytes are known only at run time. The kernels find them at
/// `operands`.
///
/// # Errors
/// Those of [`kernel`].
pub fn declare(graph: &TaskGraph, operands: *const abi::mpk_operand) -> Result<(), SanitizerError> {
    forget(operands, graph.operands.len())?;
    for (index, operand) in graph.operands.iter().enumerate() {
        let Some(trust) = operand.trust else { continue };
        let (kind, slot, lo, hi) = match trust {
            Trust::RowsOfSlot { slot, .. } => {
                let (lo, hi) = in_view(graph, operand);
                (0, slot, lo, hi)
            }
            Trust::PagesOfSlot => (1, operand.region.lo[0], operand.region.lo, operand.region.hi),
            // No narrower than the view.
            Trust::RowsOfUnits { .. } | Trust::PagesOfRows => continue,
        };
        // SAFETY: the address is a key that is not dereferenced; `lo` and `hi` have four words each.
        unsafe { (library()?.declare)(operands.wrapping_add(index), kind, slot, lo.as_ptr(), hi.as_ptr()) };
    }
    Ok(())
}

/// Forgets the declarations of `count` operands at this address.
///
/// # Errors
/// Those of [`kernel`].
#[allow(clippy::not_unsafe_ptr_arg_deref, reason = "the address is a key, nothing is read there")]
pub fn forget(operands: *const abi::mpk_operand, count: usize) -> Result<(), SanitizerError> {
    // SAFETY: the addresses are keys that are not dereferenced.
    unsafe { (library()?.forget)(operands, count as u64) };
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
        let (declare, forget) = (symbol("mpk_sanitizer_declare")?, symbol("mpk_sanitizer_forget")?);
        // SAFETY: regions.cpp defines functions of these types under these names.
        let (declare, forget) = unsafe {
            (
                std::mem::transmute::<*mut libc::c_void, DeclareFn>(declare),
                std::mem::transmute::<*mut libc::c_void, ForgetFn>(forget),
            )
        };
        Ok(Library { handle, declare, forget })
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
mod tests {
    use crate::testing::{TestBatch, TestRank, TestTask, TestTensor, call_kernel};
    use taskgraph::task_type::Access;
    use taskgraph::{DType, Region};

    /// `add` of four rows of 8, with the rows that the task declares for each operand. With `slot`, the output stands
    /// for the single row of this slot.
    fn add_rows(rows: [u32; 3], slot: Option<u32>) -> i32 {
        let values = vec![1.0; 32];
        let mut tensors: Vec<TestTensor> =
            (0..3).map(|_| TestTensor::new(DType::F32, &[4, 8], &values)).collect();
        let view =
            |t: &mut TestTensor, rows: u32| t.view(&Access::new(0, Region::whole(&[4, 8]).with(0, 0, rows)));
        let declared: Vec<_> = tensors.iter_mut().zip(rows).map(|(t, rows)| view(t, rows)).collect();
        let memory: Vec<_> = tensors.iter_mut().map(|t| view(t, 4)).collect();
        let task = TestTask {
            params: crate::abi::params_words(&crate::abi::mpk_add_params { rows_kind: 0 }),
            inputs: declared[..2].to_vec(),
            outputs: declared[2..].to_vec(),
            ..TestTask::default()
        };
        let kernel = super::kernel("add").unwrap().unwrap();
        super::forget(memory.as_ptr(), memory.len()).unwrap();
        super::forget(task.outputs.as_ptr(), 1).unwrap();
        if let Some(slot) = slot {
            let declare = super::library().unwrap().declare;
            // SAFETY: as in `declare`.
            unsafe { declare(task.outputs.as_ptr(), 0, slot, [0; 4].as_ptr(), [4, 8, 1, 1].as_ptr()) };
        }
        call_kernel(kernel, "add", &task, &memory, &mut TestBatch::rows(4), &TestRank::default())
    }

    #[test]
    fn a_row_beyond_the_declared_ones_is_seen() {
        let refused = crate::abi::MPK_ABORT_KERNEL as i32;
        assert_eq!(add_rows([4, 4, 4], None), 0);
        assert_eq!(add_rows([4, 2, 4], None), refused, "reads rows 2 and 3 of input 1");
        assert_eq!(add_rows([2, 2, 2], None), 0, "no more rows than the output has");
        assert_eq!(add_rows([4, 4, 4], Some(1)), refused, "writes rows of other slots");
        assert_eq!(add_rows([4, 4, 4], None), 0);
    }
}

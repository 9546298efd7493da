//! Limits of this process that a library below us would end it at, with a status that says nothing.

use crate::model::app_error::AppError;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Open files that a process without MPI takes, checkpoint aside.
const FILES_ALONE: u64 = 16;
/// Open files that MPI takes on top, beside some for each rank of the node. Open MPI 4 was seen to need 20.
const FILES_OF_MPI: u64 = 32;
/// Address space that MPI takes with its plug-ins; without it, MPI ends the process.
const ADDRESSES_OF_MPI: u64 = 512 << 20;
/// The limit of open files is raised to this where that is allowed: shards, peers and a GPU's driver each take some.
const FILES_WANTED: u64 = 1 << 16;

/// Raises the limit of open files as far as is allowed, and checks that this process has what it takes to start; with
/// `ranks_here` ranks of an MPI job on this node, if it is one of a job.
///
/// # Errors
/// A limit is too low.
pub fn check(ranks_here: Option<u32>) -> Result<(), AppError> {
    raise_open_files();
    let files = FILES_ALONE + ranks_here.map_or(0, |ranks| FILES_OF_MPI + u64::from(ranks));
    let limit = getrlimit(Resource::Nofile).current;
    if let Some(limit) = limit.filter(|&limit| limit < files) {
        return Err(AppError::environment(format!(
            "a process may have only {limit} files open at a time here, but at least {files} are needed; raise the limit (`ulimit -n 4096`)"
        )));
    }
    let limit = getrlimit(Resource::As).current.filter(|_| ranks_here.is_some());
    if let Some(limit) = limit.filter(|&limit| limit < ADDRESSES_OF_MPI) {
        return Err(AppError::environment(format!(
            "a process may have only {limit} bytes of address space here, but MPI needs at least {ADDRESSES_OF_MPI}; raise the limit (`ulimit -v unlimited`)"
        )));
    }
    Ok(())
}

/// Ranks of this job on this node, as the launcher says.
pub fn ranks_here() -> Option<u32> {
    let variables = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"];
    let number = variables.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
    number.or_else(distributed::launcher::launched_ranks)
}

fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(FILES_WANTED, |most| most.min(FILES_WANTED));
    if limit.current.is_some_and(|limit| limit < wanted) {
        // Where it is refused, the old one holds and is checked.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit });
    }
}

/// Bytes that could not be had when memory was asked for last; 0 as long as there was always enough.
static LACKING: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator for programs, which end with status 3 where memory is lacking, instead of by SIGABRT.
///
/// Call [`Allocator::install`] first. Callers that can do without the memory get their error as usual: only an abort
/// after memory was refused means that it could not be done without.
pub struct Allocator;

impl Allocator {
    /// From now on, an abort for lack of memory is an exit with status 3.
    pub fn install(&self) {
        let handler = on_abort as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: the handler calls only what a signal handler may call.
        unsafe { libc::signal(libc::SIGABRT, handler) };
    }
}

extern "C" fn on_abort(signal: libc::c_int) {
    const MESSAGE: &str = "error: out of memory; free some, or raise its limit (`ulimit -v unlimited`)\n";
    // SAFETY: write, _exit, signal and raise may be called in a signal handler; the message is a live buffer.
    unsafe {
        if LACKING.load(Ordering::Relaxed) != 0 {
            libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
            libc::_exit(3);
        }
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

impl Allocator {
    /// Relaxed: the thread that aborts is the one that was refused, or another one to which the same happened.
    fn note(&self, address: *mut u8, bytes: usize) -> *mut u8 {
        if address.is_null() {
            LACKING.store(bytes.max(1), Ordering::Relaxed);
        }
        address
    }
}

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        self.note(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        self.note(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        self.note(unsafe { System.realloc(address, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(address, layout) }
    }
}

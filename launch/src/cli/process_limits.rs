//! Limits of this process that would make a library below us end it without a useful message.

use crate::model::app_error::AppError;
use crate::model::chat_template::limit::{self, Excess};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Open files that a process without MPI needs, apart from the checkpoint.
const FILES_ALONE: u64 = 16;
/// Additional open files that MPI needs, apart from those for each rank of the node. Open MPI 4 was seen to need 20.
const FILES_OF_MPI: u64 = 32;
/// Address space that MPI and its plug-ins need. With less, MPI ends the process.
const ADDRESSES_OF_MPI: u64 = 512 << 20;
/// The limit of open files is raised to this value if allowed. Checkpoint shards, peers and the GPU driver each need
/// some.
const FILES_WANTED: u64 = 1 << 16;

/// Raises the limit of open files as far as allowed, and checks that the process has what it needs to start.
/// `ranks_here` is the number of the job's ranks on this node, or `None` without an MPI job.
///
/// # Errors
/// A limit is too low.
pub fn check(ranks_here: Option<u32>) -> Result<(), AppError> {
    raise_open_files();
    let files = FILES_ALONE + ranks_here.map_or(0, |ranks| FILES_OF_MPI + u64::from(ranks));
    let limit = getrlimit(Resource::Nofile).current;
    if let Some(limit) = limit.filter(|&limit| limit < files) {
        return Err(AppError::environment(format!(
            "the limit of open files is {limit}, but at least {files} are needed; raise it with `ulimit -n 4096`"
        )));
    }
    let limit = getrlimit(Resource::As).current.filter(|_| ranks_here.is_some());
    if let Some(limit) = limit.filter(|&limit| limit < ADDRESSES_OF_MPI) {
        return Err(AppError::environment(format!(
            "the limit of address space is {limit} bytes, but MPI needs at least {ADDRESSES_OF_MPI}; raise it with `ulimit -v unlimited`"
        )));
    }
    Ok(())
}

fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(FILES_WANTED, |most| most.min(FILES_WANTED));
    if limit.current.is_some_and(|limit| limit < wanted) {
        // If this is refused, the old limit stays in force and is checked.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit });
    }
}

/// Size of the last allocation that failed; 0 if none has failed.
static LACKING: AtomicUsize = AtomicUsize::new(0);

/// Large allocations ask for huge pages, because page faults are a tenth of the time to build and verify graphs.
const HUGE_PAGE: usize = 2 << 20;
/// An allocation of this size contains a whole huge page, wherever it starts.
const LARGE: usize = 2 * HUGE_PAGE;

/// Allocations below this size come from arenas, whose memory is used again without being cleared by the system.
#[cfg(target_env = "gnu")]
const OF_ITS_OWN: libc::c_int = 32 << 20;
/// An arena keeps this much free memory. It is also the most that glibc would choose by itself.
#[cfg(target_env = "gnu")]
const KEPT: libc::c_int = 64 << 20;
/// An arena grows by this much more than it needs.
#[cfg(target_env = "gnu")]
const MORE: libc::c_int = 16 << 20;

/// Asks for huge pages. A system that has none ignores this.
fn advise(address: *mut u8, bytes: usize) {
    let (start, end) =
        (address.addr().next_multiple_of(HUGE_PAGE), (address.addr() + bytes) & !(HUGE_PAGE - 1));
    if !address.is_null() && start < end {
        // SAFETY: the range is inside an allocation of this process, and the advice does not change its contents.
        unsafe { libc::madvise(address.with_addr(start).cast(), end - start, libc::MADV_HUGEPAGE) };
    }
}

/// The system's allocator. With it, a program that runs out of memory exits with status 3 instead of dying by SIGABRT, and one whose chat
/// template needs too much memory or time exits with status 2.
///
/// Call [`Allocator::install`] first. Callers that handle a failed allocation get their error as usual. Only an abort
/// after a failed allocation is taken as a lack of memory.
pub struct Allocator;

impl Allocator {
    /// From now on, an abort for lack of memory becomes an exit with status 3, and freed memory is kept for a while.
    pub fn install(&self) {
        // A refused option changes only the speed.
        #[cfg(target_env = "gnu")]
        for (option, bytes) in
            [(libc::M_MMAP_THRESHOLD, OF_ITS_OWN), (libc::M_TRIM_THRESHOLD, KEPT), (libc::M_TOP_PAD, MORE)]
        {
            // SAFETY: the options are glibc's, and it takes its own lock.
            unsafe { libc::mallopt(option, bytes) };
        }
        let handler = on_abort as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: the handler calls only functions that are allowed in a signal handler.
        unsafe { libc::signal(libc::SIGABRT, handler) };
    }
}

extern "C" fn on_abort(signal: libc::c_int) {
    const MESSAGE: &str =
        "error: out of memory; free memory, or raise the limit with `ulimit -v unlimited`\n";
    // SAFETY: write, _exit, signal and raise may be called in a signal handler; the message is a live buffer.
    unsafe {
        if LACKING.load(Ordering::Relaxed) != 0 {
            libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
            libc::_exit(3);
        }
        // Rust aborts when a stack overflows.
        if limit::is_rendering() {
            end_of_rendering(Excess::Depth);
        }
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// Counts memory of a chat template that is being rendered.
#[inline]
fn count(bytes: i64) {
    if let Some(excess) = limit::count(bytes) {
        end_of_rendering(excess);
    }
}

/// Ends the process. Nothing may be allocated here.
#[cold]
fn end_of_rendering(excess: Excess) -> ! {
    let message = match excess {
        Excess::Memory => {
            "error: the checkpoint's chat template needs far more memory than its messages; use another chat template\n"
        }
        Excess::Time => {
            "error: the checkpoint's chat template takes more than 30 s; use another chat template\n"
        }
        Excess::Depth => {
            "error: the checkpoint's chat template nests values too deeply; use another chat template\n"
        }
    };
    // SAFETY: the message is a live buffer, and nothing is used after the end of the process.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::_exit(2);
    }
}

impl Allocator {
    /// Relaxed: the thread that aborts is the one whose allocation failed, or another thread with the same problem.
    fn note(&self, address: *mut u8, bytes: usize) -> *mut u8 {
        if address.is_null() {
            LACKING.store(bytes.max(1), Ordering::Relaxed);
        }
        if bytes >= LARGE {
            advise(address, bytes);
        }
        address
    }
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller keeps the contract.
        self.note(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller keeps the contract.
        self.note(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes as i64 - layout.size() as i64);
        // SAFETY: the caller keeps the contract.
        self.note(unsafe { System.realloc(address, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(address, layout) }
    }
}

//! Ends a process that cannot wait for anything any more.

use crate::mpi_files;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time limit for the work that remains at the end.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// The same limit on several nodes after a signal: a launcher that ends its ranks gives them one second.
pub(super) const HURRY: Duration = Duration::from_millis(150);
/// The run failed.
const STATUS: i32 = 4;

/// Time limit for MPI_Abort on several nodes: enough to send the message. The launcher kills a rank that stays in the call, and its
/// exit status is lost.
pub(super) const WORD: Duration = Duration::from_millis(300);

/// Runs `last`, then ends the process, and the job if MPI is up, with status 4. Nothing can delay this for longer than `patience`:
/// neither a pipe that nobody reads, nor a launcher that does not answer. The launcher gets `word` after `last`.
pub(super) fn end(last: impl FnOnce() + Send + 'static, mpi: bool, patience: Duration, word: Duration) -> ! {
    let told = Arc::new(AtomicBool::new(false));
    let of_thread = told.clone();
    let work = move || {
        last();
        mpi_files::remove_half_made_windows();
        of_thread.store(true, Ordering::Relaxed);
        if mpi {
            // SAFETY: MPI is initialised and not finalised, and may be called from any thread of a process that is
            // about to end.
            unsafe { mpi::ffi::MPI_Abort(mpi::ffi::RSMPI_COMM_WORLD, STATUS) };
        }
    };
    if let Ok(thread) = std::thread::Builder::new().name("end".into()).spawn(work) {
        let begin = Instant::now();
        let mut since = None;
        while begin.elapsed() < patience && (mpi || !thread.is_finished()) {
            if told.load(Ordering::Relaxed) && since.get_or_insert_with(Instant::now).elapsed() > word {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    // SAFETY: ends the process, so nothing of it is used afterwards.
    unsafe { libc::_exit(STATUS) }
}

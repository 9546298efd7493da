//! The end of a process that can't wait for anything any more.

use crate::mpi_files;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What has to be done at the end has this long.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// The same on several nodes after a signal: a launcher that ends its ranks gives them a second.
pub(super) const HURRY: Duration = Duration::from_millis(150);
/// The run failed.
const STATUS: i32 = 4;

/// How long MPI_Abort has on several nodes: enough to send word. A rank that stays in it is killed by the launcher, and its status is
/// lost.
pub(super) const WORD: Duration = Duration::from_millis(300);

/// Does `last` and ends the process, and the job if MPI is up, with status 4. Nothing holds it up for longer than
/// `patience`: not a pipe that nobody reads, and not a launcher that does not answer, which has `word` after `last`.
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
    // SAFETY: ends the process; nothing of it is used any more.
    unsafe { libc::_exit(STATUS) }
}

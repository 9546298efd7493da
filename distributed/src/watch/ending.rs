//! The end of a process that can't wait for anything any more.

use std::time::Duration;

/// What has to be done at the end has this long.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// The same on several nodes after a signal: a launcher that ends its ranks gives them a second.
pub(super) const HURRY: Duration = Duration::from_millis(150);
/// The run failed.
const STATUS: i32 = 4;

/// Does `last` and ends the process, and the job if MPI is up, with status 4. Nothing holds it up for longer than
/// `patience`: not a pipe that nobody reads, and not a launcher that does not answer.
pub(super) fn end(last: impl FnOnce() + Send + 'static, mpi: bool, patience: Duration) -> ! {
    let work = move || {
        last();
        if mpi {
            // SAFETY: MPI is initialised and not finalised, and may be called from any thread of a process that is
            // about to end.
            unsafe { mpi::ffi::MPI_Abort(mpi::ffi::RSMPI_COMM_WORLD, STATUS) };
        }
    };
    if let Ok(thread) = std::thread::Builder::new().name("end".into()).spawn(work) {
        let begin = std::time::Instant::now();
        while begin.elapsed() < patience && (mpi || !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    // SAFETY: ends the process; nothing of it is used any more.
    unsafe { libc::_exit(STATUS) }
}

//! Errors of MPI calls whose callers do not handle them.
//!
//! By default, such an error ends the process. Its status is then the error's number, and no message names the rank
//! that caused it. Open MPI's code that prints the error is not thread-safe (see `watch/ending.rs`).

use crate::watch::Watch;
use mpi::ffi;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

static WATCH: OnceLock<Watch> = OnceLock::new();

/// An MPI error handler, without the arguments that differ between MPI libraries.
type Handler = unsafe extern "C" fn(*mut ffi::MPI_Comm, *mut c_int);

/// From now on, an error of a call on `communicator`, or on one that is made from it, goes to [`Watch::call_failed`].
pub(crate) fn watch_errors(communicator: &SimpleCommunicator, watch: &Watch) {
    let _ = WATCH.set(watch.clone());
    let mut handler = MaybeUninit::uninit();
    // SAFETY: a live communicator, and a valid out-pointer, which the first call sets if it succeeds. Both types are a function's address.
    // C passes the named arguments of a variadic function as those of any other (x86-64 and AArch64 on Linux), and further ones are not
    // read.
    unsafe {
        let function: unsafe extern "C" fn(*mut ffi::MPI_Comm, *mut c_int, ...) =
            std::mem::transmute(on_error as Handler);
        if ffi::MPI_Comm_create_errhandler(Some(function), handler.as_mut_ptr()) == 0 {
            ffi::MPI_Comm_set_errhandler(communicator.as_raw(), handler.assume_init());
        }
    }
}

/// Called by MPI, in the thread whose call has failed. MPI holds no locks then.
unsafe extern "C" fn on_error(_: *mut ffi::MPI_Comm, code: *mut c_int) {
    // SAFETY: MPI passes a pointer to the code.
    let code = unsafe { *code };
    if let Some(watch) = WATCH.get() {
        watch.call_failed(&format!("{} (MPI's error {code})", text(code)));
    }
}

/// MPI's words for an error.
fn text(code: c_int) -> String {
    let (mut bytes, mut length) = ([0_u8; ffi::MPI_MAX_ERROR_STRING as usize], 0);
    // SAFETY: room for the longest text.
    let known = unsafe { ffi::MPI_Error_string(code, bytes.as_mut_ptr().cast(), &mut length) } == 0;
    let length = if known { length.max(0) as usize } else { 0 };
    String::from_utf8_lossy(&bytes[..length.min(bytes.len())]).into_owned()
}

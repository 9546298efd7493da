//! Sends Open MPI's own messages about lost connections to the log.
//!
//! Open MPI 4 hands such a message to the launcher. The call that noticed the loss then waits until the launcher has
//! taken the message. While mpirun ends the job's ranks, it takes no message for seconds. During that time this rank
//! could neither send to the other nodes nor receive from them, although a report of the lost rank is needed at that
//! moment.

use std::ffi::{CStr, c_char, c_int, c_void};

/// The variable in which Open MPI keeps the function that shows a message. Its arguments: a file, a topic in it,
/// whether to draw lines around the message, and the values that the text contains.
const VARIABLE: &CStr = c"opal_show_help";

type Show = unsafe extern "C" fn(*const c_char, *const c_char, bool) -> c_int;

/// From now on, Open MPI's messages go to the log (`MPK_LOG=debug`). `library` is what the MPI library says about itself. Other libraries,
/// and other versions of Open MPI, where the name may be a function's, are left alone.
pub(crate) fn take_to_log(library: &str) {
    if !library.starts_with("Open MPI v4.") {
        return;
    }
    // SAFETY: looks up a name.
    let found: *mut c_void = unsafe { libc::dlsym(libc::RTLD_DEFAULT, VARIABLE.as_ptr()) };
    if !found.is_null() {
        // SAFETY: in all releases of Open MPI 4, a variable that holds a function's address, which Open MPI loads before each call. `to_log` leaves the further
        // arguments of this variadic function alone (see `mpi_errors`). All aligned addresses are written at once.
        unsafe { found.cast::<Show>().write_volatile(to_log) };
    }
}

unsafe extern "C" fn to_log(file: *const c_char, topic: *const c_char, _: bool) -> c_int {
    // SAFETY: Open MPI passes strings, or null.
    let text =
        |text: *const c_char| unsafe { (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy()) };
    tracing::debug!("Open MPI: {} ({})", text(topic).unwrap_or_default(), text(file).unwrap_or_default());
    0
}

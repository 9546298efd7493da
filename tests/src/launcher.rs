//! Recognises failures of mpirun itself at its end, as opposed to failures of the job's ranks.

use std::path::Path;

/// The status with which mpirun would have ended, if it crashed during its clean-up.
///
/// PMIx's server, a part of mpirun, may call a null pointer in `PMIx_server_finalize` if a rank ended while MPI started
/// (seen with Open MPI 4.1.4 and PMIx 4.2.2, in about one of a thousand such ends). By then its ranks have ended, and it
/// has printed the status or the signal of the first one that failed.
pub fn status_before_crash(signal: Option<i32>, stderr: &str) -> Option<i32> {
    if signal != Some(libc::SIGSEGV) || !stderr.contains("PMIx_server_finalize") {
        return None;
    }
    let number_after = |words: &str| -> Option<i32> {
        let (_, rest) = stderr.split_once(words)?;
        rest.split_whitespace().next()?.parse().ok()
    };
    // Instead of a status, it names the signal that ended a rank.
    number_after("Exit code:").or_else(|| number_after("exited on signal ").map(|signal| 128 + signal))
}

/// Whether mpirun made this file or folder for itself; it stays if mpirun crashed or was killed.
pub fn is_its_own(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str().to_string_lossy().starts_with("ompi."))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_crash_in_the_clean_up_is_recognised() {
        let text =
            "  Process name: [[6799,1],1]\n  Exit code:    4\n--\n[vm:1] PMIx_server_finalize(+0xb08)\n";
        assert_eq!(status_before_crash(Some(libc::SIGSEGV), text), Some(4));
        let by_signal = "rank 0 with PID 0 on node vm exited on signal 2 (Interrupt).\n[vm:1] PMIx_server_finalize(+0xb08)\n";
        assert_eq!(status_before_crash(Some(libc::SIGSEGV), by_signal), Some(130));
        assert_eq!(status_before_crash(Some(libc::SIGKILL), text), None);
        assert_eq!(status_before_crash(None, text), None);
        assert_eq!(status_before_crash(Some(libc::SIGSEGV), "PMIx_server_finalize"), None);
        assert_eq!(status_before_crash(Some(libc::SIGSEGV), "Exit code: 4"), None);
        assert!(is_its_own(Path::new("/tmp/x/ompi.vm.0/pid.1/file")));
        assert!(!is_its_own(Path::new("/tmp/x/mpk/file")));
    }
}

//! Jobs take turns, because each uses the whole machine. cargo-nextest has its own rules for that (.config/nextest.toml).

use crate::places::profile_folder;
use std::fs::File;
use std::os::fd::AsRawFd;

/// One job at a time, among all test binaries built into the same folder.
pub struct Turn {
    // Closing it ends the turn. `None` under cargo-nextest.
    _lock: Option<File>,
}

impl Turn {
    /// Waits for the turn.
    ///
    /// # Panics
    /// The lock file cannot be created.
    pub fn take() -> Self {
        if std::env::var_os("NEXTEST").is_some() {
            return Turn { _lock: None };
        }
        let path = profile_folder().join("mpk-tests.lock");
        let lock = File::create(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        // SAFETY: the descriptor is open for as long as `lock` lives.
        let result = unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) };
        assert_eq!(result, 0, "{}: {}", path.display(), std::io::Error::last_os_error());
        Turn { _lock: Some(lock) }
    }
}

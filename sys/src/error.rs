use std::path::PathBuf;

use crate::locate::Probe;
use crate::types::InitStatus;
use crate::version::Version;

/// What went wrong, and where. [`Error::help`] says how to fix it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The host library was not found in any of the searched places.
    #[error("NVSHMEM's host library was not found in these places:{}", Probe::list(.probes))]
    NotFound {
        /// Every place tried, with what was wrong there.
        probes: Vec<Probe>,
    },

    /// The library was opened but lacks a function that this crate binds.
    #[error("{} lacks a function that is needed: {source}", .path.display())]
    Symbol {
        /// The library's path.
        path: PathBuf,
        /// The loader's message, which names the function.
        source: libloading::Error,
    },

    /// The library is of a version that this crate does not work with.
    #[error(
        "{} is NVSHMEM {found}, but version {} or a later {}.x is needed",
        .path.display(), Version::OLDEST, Version::OLDEST.major
    )]
    Version {
        /// The library's path.
        path: PathBuf,
        /// The library's version.
        found: Version,
    },

    /// A call that needs an initialised library came before initialisation or after finalisation.
    #[error("{function} needs an initialised NVSHMEM, but it is {status}")]
    NotInitialized {
        /// The C function.
        function: &'static str,
        /// The library's state.
        status: InitStatus,
    },

    /// Initialisation was asked for twice.
    #[error("NVSHMEM is already {status} in this process, and it can be initialised only once")]
    AlreadyInitialized {
        /// The library's state.
        status: InitStatus,
    },

    /// Initialisation returned success, but NVSHMEM is not ready: the ranks found each other, but the GPU or
    /// the transports did not come up.
    #[error("NVSHMEM is {status} after its initialisation")]
    Incomplete {
        /// The library's state.
        status: InitStatus,
    },

    /// An argument was refused before the call was made.
    #[error("{function}: {argument} {problem}")]
    Argument {
        /// The C function.
        function: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// What is wrong with it.
        problem: String,
    },

    /// The call returned an error status.
    #[error("{function} failed with status {status} ({})", status_name(*.status))]
    Call {
        /// The C function.
        function: &'static str,
        /// What it returned.
        status: i32,
    },

    /// The symmetric heap has too little free memory.
    #[error("{function} could not allocate {bytes} bytes of symmetric memory")]
    OutOfSymmetricMemory {
        /// The C function.
        function: &'static str,
        /// The bytes asked for.
        bytes: usize,
    },

    /// The host library does not export the collective launch (it does from NVSHMEM 3.8 on).
    #[error(
        "NVSHMEM {version} does not export {function} from its host library (3.8 is the first that does)"
    )]
    NoCollectiveLaunch {
        /// The C function.
        function: &'static str,
        /// The library's version.
        version: Version,
    },
}

impl Error {
    /// How to fix it, where that is known.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        let text = match self {
            Error::NotFound { probes } => {
                let set = if Probe::of_variable(probes) {
                    "unset NVSHMEM_HOME, which excludes all other places, or set it to"
                } else {
                    "set NVSHMEM_HOME to"
                };
                let file = crate::locate::FILE_NAME;
                return Some(format!(
                    "{set} the folder that holds lib/{file}, or run scripts/setup.sh --nvshmem"
                ));
            }
            Error::Symbol { .. } => {
                return Some(format!(
                    "set NVSHMEM_HOME to an installation of NVSHMEM {} or later, or run scripts/setup.sh --nvshmem",
                    Version::OLDEST
                ));
            }
            Error::Version { .. } => {
                "set NVSHMEM_HOME to such an installation, or run scripts/setup.sh --nvshmem"
            }
            Error::Incomplete { .. } => {
                "check that a CUDA context is current and that each PE reaches its peers; NVSHMEM_DEBUG=INFO makes \
                 NVSHMEM say more, and NVSHMEM_REMOTE_TRANSPORT=none leaves out the network between nodes"
            }
            Error::Call { .. } => "set NVSHMEM_DEBUG=WARN to see more of NVSHMEM's messages",
            Error::OutOfSymmetricMemory { .. } => "set NVSHMEM_SYMMETRIC_SIZE to a larger heap on every rank",
            Error::NoCollectiveLaunch { .. } => {
                "launch through a shim that is linked with libnvshmem_device.a, or use cuLaunchCooperativeKernel"
            }
            Error::NotInitialized { .. } | Error::AlreadyInitialized { .. } | Error::Argument { .. } => {
                return None;
            }
        };
        Some(text.into())
    }
}

/// The name that the headers give a status.
fn status_name(status: i32) -> &'static str {
    use crate::sys;
    match u32::try_from(status) {
        Ok(sys::NVSHMEMX_ERROR_INVALID_VALUE) => "invalid value",
        Ok(sys::NVSHMEMX_ERROR_OUT_OF_MEMORY) => "out of memory",
        Ok(sys::NVSHMEMX_ERROR_NOT_SUPPORTED) => "not supported",
        Ok(sys::NVSHMEMX_ERROR_SYMMETRY) => "arguments differ between PEs",
        Ok(sys::NVSHMEMX_ERROR_GPU_NOT_SELECTED) => "no CUDA device is selected",
        Ok(sys::NVSHMEMX_ERROR_COLLECTIVE_LAUNCH_FAILED) => "collective launch failed",
        Ok(sys::NVSHMEMX_ERROR_INTERNAL) => "internal error",
        _ => "unknown status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program shows the help on a separate line, so the message must not contain it.
    #[test]
    fn message_and_help_are_apart() {
        let version = Version::OLDEST;
        let path = PathBuf::from("libnvshmem_host.so.3");
        let errors = [
            Error::NotFound { probes: Vec::new() },
            Error::Version { path, found: version },
            Error::Incomplete { status: InitStatus::NotInitialized },
            Error::Call { function: "nvshmem_init", status: 7 },
            Error::OutOfSymmetricMemory { function: "nvshmem_align", bytes: 64 },
            Error::NoCollectiveLaunch { function: "nvshmemx_collective_launch", version },
        ];
        for error in errors {
            let help = error.help().unwrap_or_else(|| panic!("no help: {error}"));
            assert!(!error.to_string().contains(&help) && !error.to_string().contains("; "), "{error}");
        }
        assert_eq!(Error::Argument { function: "f", argument: "pe", problem: "is -1".into() }.help(), None);
    }
}

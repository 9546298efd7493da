use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::locate::{self, Candidate, Probe};
use crate::sys;
use crate::types::Dim3;
use crate::version::Version;

/// `int nvshmemx_collective_launch(func, grid, block, args, shared bytes, stream)`.
pub(crate) type CollectiveLaunch = unsafe extern "C" fn(
    *const c_void,
    Dim3,
    Dim3,
    *mut *mut c_void,
    usize,
    sys::cudaStream_t,
) -> std::ffi::c_int;

/// NVSHMEM's host library, opened, with every bound function resolved and the version checked.
///
/// A process has one NVSHMEM: two `Library` values are two handles to the same state. NVSHMEM is initialised for
/// serialised host calls, so each call waits for the one before it, even from another handle or thread. If a peer never
/// makes a collective call, all later calls of this process wait forever. The library is never unloaded, because it has
/// threads and exit handlers of its own.
pub struct Library {
    functions: ManuallyDrop<sys::Functions>,
    pub(crate) collective_launch: Option<CollectiveLaunch>,
    path: PathBuf,
    version: Version,
}

/// Held by the thread that is calling NVSHMEM. One for the process, like NVSHMEM's state.
static TURN: Mutex<()> = Mutex::new(());

/// The functions, while no other thread of this process calls one.
pub(crate) struct Calls<'a> {
    functions: &'a sys::Functions,
    _turn: MutexGuard<'static, ()>,
}

impl<'a> Calls<'a> {
    /// Waits for the turn.
    fn of(functions: &'a sys::Functions) -> Self {
        // The lock guards no data, so a panic of its last holder leaves nothing half-written.
        Calls { functions, _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

impl Deref for Calls<'_> {
    type Target = sys::Functions;

    fn deref(&self) -> &sys::Functions {
        self.functions
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("path", &self.path)
            .field("version", &self.version)
            .field("collective_launch", &self.collective_launch.is_some())
            .finish_non_exhaustive()
    }
}

impl Library {
    /// Opens the first library found in the order that [`locate`] describes.
    ///
    /// # Errors
    /// [`Error::NotFound`] with every place tried, [`Error::Symbol`] and [`Error::Version`] for a library
    /// that does not fit.
    pub fn load() -> Result<Self, Error> {
        Self::load_from(locate::candidates(std::env::var_os("NVSHMEM_HOME")))
    }

    /// Opens the library at `path`.
    ///
    /// # Errors
    /// As [`Library::load`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::load_from(vec![Candidate { path: path.into(), origin: "the path given" }])
    }

    /// Opens the first of `candidates` that the loader accepts.
    ///
    /// # Errors
    /// As [`Library::load`].
    pub fn load_from(candidates: Vec<Candidate>) -> Result<Self, Error> {
        let mut probes = Vec::new();
        for candidate in candidates {
            // The loader's own message for a missing path is long and speaks of shared objects.
            let bare = candidate.path.components().count() == 1;
            if !bare && !candidate.path.is_file() {
                probes.push(Probe { candidate, problem: "no such file".into() });
                continue;
            }
            // SAFETY: the library's initialisers are NVSHMEM's own; the file was named by the user, by the
            // set-up or by the loader's configuration.
            match unsafe { libloading::Library::new(&candidate.path) } {
                Ok(library) => return Self::from_handle(library, candidate.path),
                Err(error) => probes.push(Probe { candidate, problem: error.to_string() }),
            }
        }
        Err(Error::NotFound { probes })
    }

    fn from_handle(library: libloading::Library, path: PathBuf) -> Result<Self, Error> {
        // SAFETY: the signature is the one of NVSHMEM's device/nvshmemx_collective_launch_apis.h; where
        // the symbol has C++ linkage (before 3.8) it is not exported under this name.
        let collective_launch = unsafe { library.get::<CollectiveLaunch>(b"nvshmemx_collective_launch\0") }
            .ok()
            .map(|symbol| *symbol);
        // SAFETY: the table's signatures were generated from NVSHMEM's headers, and the file's name carries
        // the ABI's major version; the version is checked below before anything else is called.
        let functions = match unsafe { sys::Functions::from_library(library) } {
            Ok(functions) => ManuallyDrop::new(functions),
            Err(source) => return Err(Error::Symbol { path, source }),
        };
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        let calls = Calls::of(&functions);
        // SAFETY: the three pointers are valid for the call, which needs no initialisation.
        unsafe { calls.nvshmemx_vendor_get_version_info(&mut major, &mut minor, &mut patch) };
        drop(calls);
        let [major, minor, patch] = [major, minor, patch].map(|part| u32::try_from(part).unwrap_or(0));
        let version = Version { major, minor, patch };
        if !version.is_supported() {
            return Err(Error::Version { path, found: version });
        }
        Ok(Self { functions, collective_launch, path, version })
    }

    /// Waits until no other call runs in this process.
    pub(crate) fn calls(&self) -> Calls<'_> {
        Calls::of(&self.functions)
    }

    /// The path that was opened: a bare file name if the loader's search found it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The host library's version. Compare it with [`crate::HEADER_VERSION`] and with the device library's
    /// before code is launched that was compiled against them.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Whether the host library exports `nvshmemx_collective_launch`.
    #[must_use]
    pub fn has_collective_launch(&self) -> bool {
        self.collective_launch.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_from_3_4_to_below_4_are_supported() {
        let version = |major, minor, patch| Version { major, minor, patch };
        assert!(version(3, 4, 0).is_supported() && version(3, 4, 5).is_supported());
        assert!(version(3, 10, 0).is_supported(), "numbers, not text, are compared");
        assert!(!version(3, 3, 99).is_supported());
        assert!(!version(4, 0, 0).is_supported() && !version(0, 0, 0).is_supported());
    }

    /// Handles may be shared and sent, since calls wait for each other.
    #[test]
    fn one_call_at_a_time() {
        fn shared<T: Send + Sync>() {}
        shared::<Library>();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(TURN.try_lock().is_err(), "a second call has to wait");
        drop(turn);
    }

    #[test]
    fn a_missing_library_names_every_place_and_the_fix() {
        let missing = PathBuf::from("/nonexistent/libnvshmem_host.so.3");
        let error = Library::open(&missing).expect_err("there is no such file");
        let (text, help) = (error.to_string(), error.help().expect("a help"));
        assert!(text.contains("/nonexistent/libnvshmem_host.so.3 (the path given): no such file"), "{text}");
        assert!(help.contains("NVSHMEM_HOME") && help.contains("scripts/setup.sh --nvshmem"), "{help}");
    }

    #[test]
    fn a_file_that_is_no_library_is_reported_with_the_loaders_reason() {
        let text = Library::open(Path::new("/etc/passwd")).expect_err("not a library").to_string();
        assert!(text.contains("/etc/passwd") && !text.contains("no such file"), "{text}");
    }

    #[test]
    fn a_library_without_the_functions_is_refused_by_name() {
        // Every test machine has libc, and it exports no function of NVSHMEM.
        let libc = vec![Candidate { path: "libc.so.6".into(), origin: "test" }];
        match Library::load_from(libc).expect_err("libc is not NVSHMEM") {
            Error::Symbol { source, .. } => assert!(source.to_string().contains("nvshmem"), "{source}"),
            other => panic!("{other}"),
        }
    }
}

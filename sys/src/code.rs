//! Device code that is loaded separately from the program, and its collective launch.

use std::ffi::c_void;

use crate::error::Error;
use crate::library::Library;
use crate::result::check;
use crate::sys;
use crate::types::Dim3;

/// Separately loaded code, and its launch.
impl Library {
    /// Gives the device code of a loaded library its NVSHMEM state. Once for each library, before its first
    /// kernel that uses NVSHMEM.
    ///
    /// # Safety
    /// `library` is a loaded `CUlibrary` that is linked with NVSHMEM's device library.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Call`].
    pub unsafe fn culibrary_init(&self, library: sys::CUlibrary) -> Result<(), Error> {
        const FUNCTION: &str = "nvshmemx_culibrary_init";
        let calls = self.ready(FUNCTION)?;
        // SAFETY: the caller's promise.
        check(FUNCTION, unsafe { calls.nvshmemx_culibrary_init(library) })
    }

    /// Undoes [`Library::culibrary_init`], before the library is unloaded.
    ///
    /// # Safety
    /// `library` was given to [`Library::culibrary_init`], and none of its kernels is running.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Call`].
    pub unsafe fn culibrary_finalize(&self, library: sys::CUlibrary) -> Result<(), Error> {
        const FUNCTION: &str = "nvshmemx_culibrary_finalize";
        let calls = self.ready(FUNCTION)?;
        // SAFETY: the caller's promise.
        check(FUNCTION, unsafe { calls.nvshmemx_culibrary_finalize(library) })
    }

    /// [`Library::culibrary_init`] for a `CUmodule`.
    ///
    /// # Safety
    /// `module` is a loaded `CUmodule` that is linked with NVSHMEM's device library.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Call`].
    pub unsafe fn cumodule_init(&self, module: sys::CUmodule) -> Result<(), Error> {
        const FUNCTION: &str = "nvshmemx_cumodule_init";
        let calls = self.ready(FUNCTION)?;
        // SAFETY: the caller's promise.
        check(FUNCTION, unsafe { calls.nvshmemx_cumodule_init(module) })
    }

    /// Undoes [`Library::cumodule_init`], before the module is unloaded.
    ///
    /// # Safety
    /// `module` was given to [`Library::cumodule_init`], and none of its kernels is running.
    ///
    /// # Errors
    /// [`Error::NotInitialized`], [`Error::Call`].
    pub unsafe fn cumodule_finalize(&self, module: sys::CUmodule) -> Result<(), Error> {
        const FUNCTION: &str = "nvshmemx_cumodule_finalize";
        let calls = self.ready(FUNCTION)?;
        // SAFETY: the caller's promise.
        check(FUNCTION, unsafe { calls.nvshmemx_cumodule_finalize(module) })
    }

    /// Launches a kernel on every PE so that all blocks of all PEs run at the same time. Collective.
    ///
    /// # Safety
    /// `function` is a kernel (a `CUfunction` or `CUkernel` of this context), `arguments` points to as many
    /// pointers to arguments as it takes, of its types, and `stream` is a stream of this context or null.
    ///
    /// # Errors
    /// [`Error::NoCollectiveLaunch`] before NVSHMEM 3.8, [`Error::NotInitialized`], [`Error::Call`].
    pub unsafe fn collective_launch(
        &self,
        function: *const c_void,
        grid: Dim3,
        block: Dim3,
        arguments: *mut *mut c_void,
        shared_bytes: usize,
        stream: sys::cudaStream_t,
    ) -> Result<(), Error> {
        const FUNCTION: &str = "nvshmemx_collective_launch";
        let launch = self
            .collective_launch
            .ok_or_else(|| Error::NoCollectiveLaunch { function: FUNCTION, version: self.version() })?;
        let _turn = self.ready(FUNCTION)?;
        // SAFETY: the caller's promise.
        check(FUNCTION, unsafe { launch(function, grid, block, arguments, shared_bytes, stream) })
    }
}

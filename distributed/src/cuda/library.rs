//! A cubin in a GPU's context, its kernels, and their launch.

use super::device::{Context, is_stuck};
use super::driver::{check, describe};
use super::memory::Stream;
use crate::error::{Error, Result};
use cudarc::driver::{result, sys};
use std::ffi::{CStr, c_void};
use std::sync::Arc;

/// A loaded cubin.
#[derive(Debug)]
pub struct Library {
    context: Arc<Context>,
    raw: sys::CUlibrary,
}

// SAFETY: a library is a handle that any thread may use.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// A kernel of a [`Library`].
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    kernel: sys::CUkernel,
    function: sys::CUfunction,
}

// SAFETY: a kernel is a handle that any thread may use.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Number of blocks, threads per block, and dynamic shared memory per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of blocks.
    pub blocks: u32,
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
}

impl Library {
    /// Loads `cubin`, an ELF file for this GPU's architecture.
    ///
    /// # Errors
    /// The driver refuses it.
    pub fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Library> {
        context.make_current()?;
        let mut raw = std::ptr::null_mut();
        let none = std::ptr::null_mut();
        // SAFETY: a context is current; no options; the driver reads the size from the ELF header and copies the
        // code (CU_LIBRARY_BINARY_IS_PRESERVED is not set).
        let result = unsafe {
            sys::cuLibraryLoadData(
                &mut raw,
                cubin.as_ptr().cast::<c_void>(),
                std::ptr::null_mut(),
                none,
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                0,
            )
        };
        match result.result() {
            Ok(()) => Ok(Library { context: context.clone(), raw }),
            Err(error) => Err(Error::Cubin {
                device: context.gpu().ordinal,
                name: context.gpu().name.clone(),
                reason: describe(error),
            }),
        }
    }

    /// The kernel called `name`.
    ///
    /// # Errors
    /// The cubin has no kernel of that name.
    pub fn kernel(&self, name: &'static CStr) -> Result<Kernel> {
        self.context.make_current()?;
        let (mut kernel, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the library is live; the name ends in a zero byte; the out-pointer is valid.
        match unsafe { sys::cuLibraryGetKernel(&mut kernel, self.raw, name.as_ptr()) }.result() {
            Ok(()) => {}
            Err(error) => {
                return Err(Error::Cubin {
                    device: self.context.gpu().ordinal,
                    name: self.context.gpu().name.clone(),
                    reason: format!("kernel {}: {}", name.to_string_lossy(), describe(error)),
                });
            }
        }
        // SAFETY: the kernel is live, a context is current, the out-pointer is valid.
        check("cuKernelGetFunction", unsafe { sys::cuKernelGetFunction(&mut function, kernel) }.result())?;
        Ok(Kernel { kernel, function })
    }

    pub(crate) fn raw(&self) -> sys::CUlibrary {
        self.raw
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if !is_stuck() && self.context.make_current().is_ok() {
            // SAFETY: loaded in `load`, unloaded once; none of its kernels runs (`CudaRank::run` waits or marks it stuck).
            let _ = unsafe { sys::cuLibraryUnload(self.raw) };
        }
    }
}

impl Kernel {
    /// The handle that NVSHMEM's collective launch takes.
    pub(crate) fn handle(self) -> *const c_void {
        self.kernel.cast_const().cast()
    }

    /// Allows the kernel to use the dynamic shared memory of `shape`, and checks that all blocks can run at once on the GPU.
    ///
    /// # Errors
    /// They do not fit.
    pub fn prepare(self, context: &Context, shape: Shape) -> Result<()> {
        context.make_current()?;
        let gpu = context.gpu();
        let misfit = |problem: String| Error::Residency {
            device: gpu.ordinal,
            name: gpu.name.clone(),
            blocks: shape.blocks,
            problem,
        };
        if !gpu.cooperative {
            return Err(misfit("it cannot launch cooperative kernels".into()));
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: kernel and device are live.
        let result = unsafe {
            sys::cuKernelSetAttribute(attribute, shape.shared_bytes as i32, self.kernel, context.device())
        };
        if let Err(error) = result.result() {
            return Err(misfit(format!(
                "a block needs {} bytes of shared memory, but the GPU has only {} ({})",
                shape.shared_bytes,
                gpu.shared_memory,
                describe(error)
            )));
        }
        // SAFETY: the function is live.
        check("cuFuncSetAttribute", unsafe {
            result::function::set_function_attribute(self.function, attribute, shape.shared_bytes as i32)
        })?;
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        // SAFETY: the function is live.
        let threads = unsafe { result::function::get_function_attribute(self.function, most) };
        let threads = check("cuFuncGetAttribute", threads)?;
        if threads < shape.threads as i32 {
            return Err(misfit(format!(
                "a block has {} threads, but the kernel allows only {threads}",
                shape.threads
            )));
        }
        // SAFETY: the function is live.
        let per_sm = check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            result::occupancy::max_active_block_per_multiprocessor(
                self.function,
                shape.threads as i32,
                shape.shared_bytes as usize,
            )
        })?;
        let resident = per_sm.max(0) as u32 * gpu.sms;
        if shape.blocks > resident {
            return Err(misfit(format!("only {per_sm} blocks fit on each of {} multiprocessors", gpu.sms)));
        }
        Ok(())
    }

    /// Launches the kernel with all blocks running at once.
    ///
    /// # Safety
    /// `arguments` points to as many arguments as the kernel takes, with the right types. Everything that they point to on the
    /// device lives until the kernel has ended.
    pub unsafe fn launch_cooperative(
        self,
        shape: Shape,
        stream: &Stream,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: as the caller guarantees; function and stream belong to the same context.
        check("cuLaunchCooperativeKernel", unsafe {
            result::launch_cooperative_kernel(
                self.function,
                (shape.blocks, 1, 1),
                (shape.threads, 1, 1),
                shape.shared_bytes,
                stream.raw(),
                arguments,
            )
        })
    }

    /// Launches the kernel.
    ///
    /// # Safety
    /// That of [`Kernel::launch_cooperative`].
    pub unsafe fn launch(self, shape: Shape, stream: &Stream, arguments: &mut [*mut c_void]) -> Result<()> {
        // SAFETY: as the caller guarantees; function and stream belong to the same context.
        check("cuLaunchKernel", unsafe {
            result::launch_kernel(
                self.function,
                (shape.blocks, 1, 1),
                (shape.threads, 1, 1),
                shape.shared_bytes,
                stream.raw(),
                arguments,
            )
        })
    }
}

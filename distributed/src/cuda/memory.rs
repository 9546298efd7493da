//! Device memory, pinned host memory and streams, each with one owner.

use super::device::{Context, is_stuck};
use super::driver::{check, describe};
use crate::error::{Error, Result};
use crate::image::Image;
use cudarc::driver::result::stream::{self, StreamKind};
use cudarc::driver::{DriverError, result, sys};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// Device memory.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: u64,
    len: u64,
}

impl DeviceBuffer {
    /// `len` bytes (at least 1) for `what`, not initialised, aligned to 256.
    ///
    /// # Errors
    /// There is not enough memory, or the driver fails.
    pub fn new(context: &Arc<Context>, what: &str, len: u64) -> Result<DeviceBuffer> {
        context.make_current()?;
        // SAFETY: a context is current, and nothing reads the memory before it is written.
        match unsafe { result::malloc_sync(len.max(1) as usize) } {
            Ok(address) => Ok(DeviceBuffer { context: context.clone(), address, len }),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Err(Error::DeviceMemory {
                device: format!("GPU {} ({})", context.gpu().ordinal, context.gpu().name),
                ranks: 1,
                free: context.free_memory().unwrap_or(0),
                needed: len,
                parts: what.to_string(),
            }),
            Err(error) => Err(Error::Cuda { call: "cuMemAlloc", reason: describe(error) }),
        }
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Sets all bytes to `value`, in the order of `stream`.
    ///
    /// # Errors
    /// The driver fails.
    pub fn fill(&self, value: u8, stream: &Stream) -> Result<()> {
        // SAFETY: the range is this buffer's own.
        unsafe { stream.memset(self.address, value, self.len) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if !is_stuck() && self.context.make_current().is_ok() {
            // SAFETY: allocated in `new`, freed once. The call waits for kernels that use it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Zeroed host memory that the GPU accesses at the same address.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Arc<Context>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its memory. It is accessed through raw pointers whose users order the accesses.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; `&PinnedBuffer` only returns the address.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `len` zeroed bytes for `what`.
    ///
    /// # Errors
    /// There is not enough memory, or the driver fails.
    pub fn new(context: &Arc<Context>, what: &str, len: usize) -> Result<PinnedBuffer> {
        context.make_current()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let refused =
            |reason: String| Error::PinnedMemory { what: what.to_string(), bytes: len as u64, reason };
        // SAFETY: a context is current; the bytes are set below, before anything reads them.
        let start = unsafe { result::malloc_host(len.max(1), flags) }.map_err(|e| refused(describe(e)))?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| refused("address 0".into()))?;
        let buffer = PinnedBuffer { context: context.clone(), start, len };
        let mut device = 0;
        // SAFETY: `start` is pinned memory of this context; the out-pointer is valid.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut device, start.as_ptr().cast(), 0).result()
        })?;
        if device != start.as_ptr() as u64 {
            return Err(refused("the GPU sees it at another address".into()));
        }
        // SAFETY: `len` bytes were allocated.
        unsafe { std::ptr::write_bytes(start.as_ptr(), 0, len) };
        Ok(buffer)
    }

    /// First byte, for host and GPU.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The bytes, for filling them while no copy reads them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes, and `&mut self` excludes other users in Rust.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The buffer as an image whose bytes the kernel uses in place.
    pub(crate) fn into_image(self) -> Image {
        let (start, len) = (self.as_ptr(), self.len);
        // SAFETY: zeroed in `new`, not null, and owned by the buffer that the image keeps.
        unsafe { Image::of(start, len, start as u64, Box::new(self)) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if !is_stuck() && self.context.make_current().is_ok() {
            // SAFETY: allocated in `new`, freed once.
            let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
        }
    }
}

/// A queue of work for a GPU: done in order, independent of other streams.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: a stream is a handle; the driver orders calls of several threads.
unsafe impl Send for Stream {}

impl Stream {
    /// A new stream.
    ///
    /// # Errors
    /// The driver fails.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        context.make_current()?;
        let raw = check("cuStreamCreate", stream::create(StreamKind::NonBlocking))?;
        Ok(Stream { context: context.clone(), raw })
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// True if all work so far is done.
    ///
    /// # Errors
    /// A part of the work failed.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the stream is live.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            state => check("cuStreamQuery", state.result()).map(|()| true),
        }
    }

    /// Waits for all work so far.
    ///
    /// # Errors
    /// A part of the work failed.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the stream is live.
        check("cuStreamSynchronize", unsafe { stream::synchronize(self.raw) })
    }

    /// Sets `len` bytes of device memory.
    ///
    /// # Safety
    /// They are device memory of this context that nobody else uses before the stream has set them.
    pub unsafe fn memset(&self, address: u64, value: u8, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.context.make_current()?;
        // SAFETY: as the caller guarantees.
        check("cuMemsetD8Async", unsafe { result::memset_d8_async(address, value, len as usize, self.raw) })
    }

    /// Copies `len` bytes of host memory to the device. Memory that is not pinned has been read when the call returns; pinned
    /// memory is read when the stream gets to the copy.
    ///
    /// # Safety
    /// Both are live and `len` bytes long, and nobody else uses the device memory before the copy is done.
    pub unsafe fn to_device(&self, address: u64, source: *const u8, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.context.make_current()?;
        // SAFETY: as the caller guarantees.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, source.cast::<c_void>(), len as usize, self.raw).result()
        })
    }

    /// Copies `len` bytes of device memory to the host. They have arrived after [`Stream::wait`].
    ///
    /// # Safety
    /// Both are live and `len` bytes long until the copy is done, and nobody uses the host memory before.
    pub unsafe fn to_host(&self, target: *mut u8, address: u64, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.context.make_current()?;
        // SAFETY: as the caller guarantees.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(target.cast::<c_void>(), address, len as usize, self.raw).result()
        })
    }

    /// Reads `len` bytes of device memory, and waits for them.
    ///
    /// # Safety
    /// They are device memory of this context.
    pub unsafe fn read(&self, address: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        // SAFETY: as the caller guarantees; the vector lives until the wait below.
        unsafe { self.to_host(bytes.as_mut_ptr(), address, len) }?;
        self.wait()?;
        Ok(bytes)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !is_stuck() && self.context.make_current().is_ok() {
            // SAFETY: created in `new`, destroyed once.
            let _ = unsafe { stream::destroy(self.raw) };
        }
    }
}

//! The GPU's access to its rank's proxy, for a kernel that puts through its host (`Transport::Host`): the proxy's rings, and
//! their description in the GPU's memory.

use super::device::{Context, is_stuck};
use super::driver::{check, describe};
use super::memory::{DeviceBuffer, Stream};
use crate::error::{Error, Result};
use crate::nodes::Proxy;
use cudarc::driver::sys;
use kernels_cu::abi;
use std::ffi::c_void;
use std::sync::Arc;

/// Memory of this process that a GPU accesses at the same address, as long as this value lives.
struct Shared {
    context: Arc<Context>,
    start: *mut u8,
}

impl Shared {
    /// # Safety
    /// This many bytes are live until the result is dropped.
    unsafe fn new(context: &Arc<Context>, start: *mut u8, bytes: usize) -> Result<Shared> {
        context.make_current()?;
        let refused =
            |reason| Error::PinnedMemory { what: "the proxy's ring".into(), bytes: bytes as u64, reason };
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: a context is current, and the bytes are live, as the caller guarantees.
        unsafe { sys::cuMemHostRegister_v2(start.cast::<c_void>(), bytes, flags) }
            .result()
            .map_err(|error| refused(describe(error)))?;
        let shared = Shared { context: context.clone(), start };
        let mut device = 0;
        // SAFETY: registered just now; the out-pointer is valid.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut device, start.cast(), 0).result()
        })?;
        if device == start as u64 {
            Ok(shared)
        } else {
            Err(refused("the GPU sees it at another address".into()))
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !is_stuck() && self.context.make_current().is_ok() {
            // SAFETY: registered in `new`, once.
            let _ = unsafe { sys::cuMemHostUnregister(self.start.cast()) };
        }
    }
}

/// The GPU's side of the proxy's rings.
pub(super) struct HostRing {
    description: DeviceBuffer,
    _shared: Shared,
}

// SAFETY: the address is only given to the driver.
unsafe impl Send for HostRing {}

impl HostRing {
    /// For the proxy of this rank, which lives longer than the rank's memory.
    pub fn new(context: &Arc<Context>, stream: &Stream, proxy: &Proxy) -> Result<HostRing> {
        let (start, bytes) = proxy.memory();
        // SAFETY: the proxy keeps its memory until the process finalises MPI, which is after all ranks' memory is freed.
        let shared = unsafe { Shared::new(context, start, bytes) }?;
        let mut ring = proxy.ring_for_device();
        let size = size_of::<abi::mpk_proxy>() as u64;
        let stage = size.next_multiple_of(256);
        let bytes = stage + u64::from(abi::MPK_INBOX_STAGE);
        let description = DeviceBuffer::new(context, "the proxy's description", bytes)?;
        ring.stage = (description.address() + stage) as *mut u8;
        // SAFETY: copies the bytes of a live value before the wait ends; nobody else knows the buffer.
        unsafe { stream.to_device(description.address(), (&raw const ring).cast(), size) }?;
        stream.wait()?;
        Ok(HostRing { description, _shared: shared })
    }

    /// The kernel's address of the `mpk_proxy`.
    pub fn address(&self) -> u64 {
        self.description.address()
    }
}

/// Applies a frame to the heap at `heap` while no kernel runs. The proxy has checked the frame.
pub(super) fn bring(stream: &Stream, heap: u64, bytes: &[u8]) -> Result<()> {
    let (head, payload) = bytes.split_at(size_of::<abi::mpk_frame>());
    // SAFETY: has the size of the struct, which consists of numbers.
    let frame = unsafe { head.as_ptr().cast::<abi::mpk_frame>().read_unaligned() };
    let at = heap + frame.offset;
    match frame.kind {
        abi::MPK_FRAME_ROWS => {
            let rows = payload.chunks_exact(frame.row_bytes.max(1) as usize).take(frame.rows as usize);
            for (row, source) in rows.enumerate() {
                let to = at + row as u64 * frame.stride;
                // SAFETY: the target is in the heap, which no kernel uses now; the source lives until the wait.
                unsafe { stream.to_device(to, source.as_ptr(), source.len() as u64) }?;
            }
        }
        abi::MPK_FRAME_ADD => {
            // SAFETY: as above.
            let before = unsafe { stream.read(at, 8) }?;
            let before = before.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
            let after = before.wrapping_add(frame.value).to_ne_bytes();
            // SAFETY: as above; the wait is in this function.
            unsafe { stream.to_device(at, after.as_ptr(), 8) }?;
            stream.wait()?;
        }
        // SAFETY: as above.
        _ => unsafe { stream.to_device(at, payload.as_ptr(), u64::from(frame.rows) * 8) }?,
    }
    stream.wait()
}

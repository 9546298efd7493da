//! The symmetric heap of the CPU target: an MPI shared-memory window within a node.

use crate::error::{Error, Result};
use crate::memory::HugeBuffer;
use crate::world::World;
use mpi::ffi;
use mpi::traits::*;

/// Memory at the same offset on every rank, reachable by stores from every rank of the node.
pub struct SymmetricHeap {
    bases: Vec<*mut u8>,
    rank: usize,
    backing: Backing,
}

enum Backing {
    Window(ffi::MPI_Win),
    // One rank without MPI.
    Own(#[allow(dead_code, reason = "owns the mapping that `bases` points into")] HugeBuffer),
}

impl SymmetricHeap {
    /// Collective: `bytes` zeroed bytes on every rank (the same number everywhere).
    pub fn allocate(world: &World, bytes: usize) -> Result<Self> {
        let rank = world.rank() as usize;
        let Some(node) = world.node_communicator() else {
            let own = HugeBuffer::new(0, "the symmetric heap", bytes)?;
            return Ok(SymmetricHeap { bases: vec![own.as_ptr()], rank, backing: Backing::Own(own) });
        };
        if world.node_size() != world.size() {
            return Err(Error::SeveralNodes {
                ranks: world.size(),
                here: world.node_size(),
                node: world.node_name(),
            });
        }
        // A full file system would end the job inside MPI, or by a bus error at the first store.
        if let Some(free) = shared_memory_free()
            && (bytes as u64).saturating_mul(u64::from(world.node_size())) > free
        {
            return Err(Error::SharedMemory { bytes: bytes as u64, ranks: world.node_size(), free });
        }
        let mut window = std::mem::MaybeUninit::uninit();
        let mut own: *mut u8 = std::ptr::null_mut();
        // SAFETY: a collective call on the node's communicator with valid out-pointers; the window is freed in
        // `free`. Errors are fatal by MPI's default handler, so the results are set when it returns.
        unsafe {
            ffi::MPI_Win_allocate_shared(
                bytes as ffi::MPI_Aint,
                1,
                ffi::RSMPI_INFO_NULL,
                node.as_raw(),
                (&raw mut own).cast(),
                window.as_mut_ptr(),
            );
        }
        // SAFETY: set by the call above.
        let window = unsafe { window.assume_init() };
        let bases = (0..world.size())
            .map(|peer| {
                let (mut size, mut unit, mut base) = (0 as ffi::MPI_Aint, 0, std::ptr::null_mut::<u8>());
                // SAFETY: a local query of a live shared window, with valid out-pointers.
                unsafe {
                    ffi::MPI_Win_shared_query(
                        window,
                        peer as i32,
                        &mut size,
                        &mut unit,
                        (&raw mut base).cast(),
                    );
                }
                base
            })
            .collect::<Vec<_>>();
        // SAFETY: this rank's own `bytes` bytes; nobody reads them before the barrier below.
        unsafe { std::ptr::write_bytes(bases[rank], 0, bytes) };
        world.barrier();
        Ok(SymmetricHeap { bases, rank, backing: Backing::Window(window) })
    }

    /// Base address of each rank's heap, as seen from this process.
    pub fn bases(&self) -> &[*mut u8] {
        &self.bases
    }

    /// This rank's heap.
    pub fn own(&self) -> *mut u8 {
        self.bases[self.rank]
    }

    /// Collective: gives the memory back. Not in `Drop`, since a rank that unwinds alone would wait for the rest.
    pub fn free(self) {
        if let Backing::Window(mut window) = self.backing {
            // SAFETY: the window is live and freed once; no worker runs any more.
            unsafe { ffi::MPI_Win_free(&mut window) };
        }
    }
}

/// Bytes free where MPI puts shared windows, where that is known.
pub fn shared_memory_free() -> Option<u64> {
    // SAFETY: an all-zero statvfs is valid, the path ends in a zero byte, and the out-pointer is valid.
    unsafe {
        let mut status: libc::statvfs = std::mem::zeroed();
        (libc::statvfs(c"/dev/shm".as_ptr(), &mut status) == 0)
            .then(|| (status.f_bavail as u64).saturating_mul(status.f_frsize as u64))
    }
}

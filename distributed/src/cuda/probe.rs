//! Kernels that leave out work (`crate::probe`): chooses one for a launch, and measures how fast a plain kernel reads as many bytes.

use super::library::{Kernel, Shape};
use super::memory::{DeviceBuffer, Stream};
use super::probe_kernels::ProbeKernels;
use super::rank::CudaRank;
use crate::error::Result;
use std::ffi::c_void;
use std::time::Instant;

/// Threads of a block of `mpk_read_memory`, and how many blocks there are on a multiprocessor.
const THREADS: u32 = 512;
const BLOCKS: u32 = 4;
/// How often the bytes are read in each measurement.
const READS: u32 = 8;
const MEASUREMENTS: usize = 5;

impl CudaRank {
    /// The kernel of the next launch.
    pub(super) fn next_kernel(&self) -> Kernel {
        self.probe.as_ref().and_then(ProbeKernels::next).unwrap_or(self.kernel)
    }

    /// Called before a launch. The first call measures how fast memory can be read.
    pub(super) fn before_launch(&self) -> Result<()> {
        let Some(kernels) = &self.probe else { return Ok(()) };
        let Some(library) = kernels.first().filter(|_| kernels.launches == 0) else {
            return Ok(());
        };
        let step_bytes = crate::probe::step_bytes(&self.common.graphs, kernels.probe.batch);
        let bytes = step_bytes.min(self.common.constant_bytes) / 16 * 16;
        let kernel = library.kernel(c"mpk_read_memory")?;
        let nothing = DeviceBuffer::new(&self.machine.context, "a word", 64)?;
        nothing.fill(0, &self.stream)?;
        let blocks = BLOCKS * self.machine.context.gpu().sms;
        let mut times = Vec::new();
        for measurement in 0..=MEASUREMENTS {
            let begin = Instant::now();
            for _ in 0..READS {
                read(kernel, blocks, &self.stream, self.areas[0].address(), bytes / 16, nothing.address())?;
            }
            self.stream.wait()?;
            // The first read maps the memory.
            if measurement > 0 {
                times.push(begin.elapsed().as_secs_f64() / f64::from(READS));
            }
        }
        kernels.probe.note(|found| {
            found.step_bytes = step_bytes;
            found.read_bytes = bytes;
            found.read_s = times;
        });
        Ok(())
    }

    /// Called after a launch that ended without an error.
    pub(super) fn after_launch(&mut self) -> Result<()> {
        let Some(kernels) = &self.probe else { return Ok(()) };
        let streamed = match kernels.next() {
            None => None,
            Some(_) => {
                let workers = self.shape.blocks as usize;
                Some(self.statuses()?.iter().take(workers).map(|status| status.streamed).sum())
            }
        };
        kernels.probe.note(|found| found.streamed.push(streamed));
        if let Some(kernels) = &mut self.probe {
            kernels.launches += 1;
        }
        Ok(())
    }
}

fn read(kernel: Kernel, blocks: u32, stream: &Stream, from: u64, pieces: u64, nothing: u64) -> Result<()> {
    let (mut from, mut pieces, mut nothing) = (from, pieces, nothing);
    let mut arguments =
        [(&raw mut from).cast::<c_void>(), (&raw mut pieces).cast(), (&raw mut nothing).cast()];
    let shape = Shape { blocks, threads: THREADS, shared_bytes: 0 };
    // SAFETY: the kernel's parameters are (const uint4*, uint64_t, uint32_t*), copied by the call; both buffers outlive the wait for the
    // stream, and the first has as many pieces.
    unsafe { kernel.launch(shape, stream, &mut arguments) }
}

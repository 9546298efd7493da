//! The floor of decode on the CPU: how fast threads read memory on huge pages.

use distributed::memory::HugeBuffer;
use kernels_cu::isa::read_memory;
use std::time::Instant;

/// Best read rate of `threads` threads over `bytes` bytes, bytes per second, of `repeats` passes.
pub fn read_rate(threads: usize, bytes: usize, repeats: usize) -> distributed::Result<f64> {
    let mut buffer = HugeBuffer::new(0, "the memory benchmark", bytes)?;
    buffer.as_mut_slice().fill(1);
    let piece = bytes.div_ceil(threads.max(1)).next_multiple_of(4096);
    let mut best = 0f64;
    for _ in 0..repeats {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for part in buffer.as_slice().chunks(piece) {
                std::thread::Builder::new()
                    .spawn_scoped(scope, move || std::hint::black_box(read_memory(part)))
                    .map_err(|e| distributed::Error::Readers { reason: e.to_string() })?;
            }
            distributed::Result::Ok(())
        })?;
        best = best.max(bytes as f64 / begin.elapsed().as_secs_f64());
    }
    Ok(best)
}

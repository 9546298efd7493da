//! The floor of decode on the CPU: how fast threads read memory on huge pages.

use distributed::memory::HugeBuffer;
use std::time::Instant;

/// Best read rate of `threads` threads over `bytes` bytes, bytes per second, of `repeats` passes.
pub fn read_rate(threads: usize, bytes: usize, repeats: usize) -> distributed::Result<f64> {
    let mut buffer = HugeBuffer::new(0, "the memory benchmark", bytes)?;
    buffer.as_mut_slice().fill(1);
    let words: &[u64] = bytemuck::cast_slice(&buffer.as_slice()[..bytes / 64 * 64]);
    let piece = words.len().div_ceil(threads.max(1)).next_multiple_of(8);
    let mut best = 0f64;
    for _ in 0..repeats {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for part in words.chunks(piece) {
                scope.spawn(move || std::hint::black_box(sum(part)));
            }
        });
        best = best.max(bytes as f64 / begin.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Eight sums at once, so that the compiler uses vectors and the additions do not wait for each other.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
    for block in words.chunks_exact(32) {
        for (s, w) in sums.iter_mut().zip(block) {
            *s = s.wrapping_add(*w);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

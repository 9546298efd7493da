//! How fast threads read memory. This sets the floor of decode on the CPU.

use distributed::World;
use distributed::affinity::bind;
use distributed::memory::{HugeBuffer, Pages};
use kernels_cu::isa::{ReadPattern, read_memory};
use serde::Serialize;
use std::time::Instant;

/// The result for one read pattern.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rate {
    /// The order in which each thread reads its share.
    pub pattern: &'static str,
    /// The size of the pages that hold the memory.
    pub pages: &'static str,
    /// The fastest of the passes.
    pub bytes_per_second: f64,
}

/// Read rates of `threads` threads over `bytes` bytes, on huge and on small pages. Each pattern reports the best of `repeats`
/// passes; the fastest pattern comes first. Each thread has its own core while there are enough cores.
///
/// # Errors
/// The memory cannot be allocated, or a thread cannot be started.
pub fn read_rates(threads: usize, bytes: usize, repeats: usize) -> distributed::Result<Vec<Rate>> {
    let threads = threads.max(1);
    let piece = bytes.div_ceil(threads).next_multiple_of(4096);
    let cores = World::single().cores().own;
    let core = |thread: usize| cores.get(thread % cores.len().max(1)).copied();
    let mut rates = Vec::new();
    for (pages, name) in [(Pages::Huge, "huge"), (Pages::Small, "small")] {
        let mut buffer = HugeBuffer::on(pages, 0, "the memory benchmark", bytes)?;
        // Each thread touches its share first, so that the pages lie near its core.
        scoped(buffer.as_mut_slice().chunks_mut(piece), core, |part| part.fill(1))?;
        for pattern in ReadPattern::ALL {
            let mut seconds = f64::INFINITY;
            for _ in 0..repeats.max(1) {
                let begin = Instant::now();
                scoped(buffer.as_slice().chunks(piece), core, |part| {
                    std::hint::black_box(read_memory(part, pattern));
                })?;
                seconds = seconds.min(begin.elapsed().as_secs_f64());
            }
            rates.push(Rate { pattern: pattern.name, pages: name, bytes_per_second: bytes as f64 / seconds });
        }
    }
    rates.sort_by(|a, b| b.bytes_per_second.total_cmp(&a.bytes_per_second));
    Ok(rates)
}

/// Runs `work` on each part, in one thread per part, each on its own core.
fn scoped<T: Send>(
    parts: impl Iterator<Item = T>,
    core: impl Fn(usize) -> Option<usize> + Sync,
    work: impl Fn(T) + Sync,
) -> distributed::Result<()> {
    let (core, work) = (&core, &work);
    std::thread::scope(|scope| {
        for (number, part) in parts.enumerate() {
            std::thread::Builder::new()
                .spawn_scoped(scope, move || {
                    if let Some(core) = core(number) {
                        bind(&[core]);
                    }
                    work(part);
                })
                .map_err(|e| distributed::Error::Readers { reason: e.to_string() })?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_is_measured_and_the_fastest_comes_first() {
        let rates = read_rates(2, 8 << 20, 2).unwrap();
        assert_eq!(rates.len(), 2 * ReadPattern::ALL.len());
        assert!(["huge", "small"].iter().all(|pages| rates.iter().any(|rate| rate.pages == *pages)));
        assert!(rates.iter().all(|rate| rate.bytes_per_second > 1e6), "{rates:?}");
        assert!(rates.is_sorted_by(|a, b| a.bytes_per_second >= b.bytes_per_second), "{rates:?}");
    }
}

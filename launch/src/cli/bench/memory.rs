//! How fast threads read memory. This sets the floor of decode on the CPU.

use crate::model::app_error::AppError;
use distributed::World;
use distributed::affinity::bind;
use distributed::memory::{HugeBuffer, Pages};
use kernels_cu::isa::{ReadPattern, read_memory};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Bytes of a word.
const WORD: usize = size_of::<u32>();
/// Buffers and the threads' shares are multiples of this. Patterns read those without a rest.
const UNIT: usize = 4096;
/// Word number i of a buffer is the upper half of i times this number. Such words look random, so their sum changes if a part is left
/// out, or read instead of another.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// The result for one read pattern.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rate {
    /// The order in which each thread reads its share.
    pub pattern: &'static str,
    /// The size of the pages that hold the memory.
    pub pages: &'static str,
    /// The fastest of the passes.
    pub bytes_per_second: f64,
    /// Number of passes. The sum of what each of them read equals the sum of what was written.
    pub right_passes: usize,
}

/// The JSON object of `mpk-bench memory`.
///
/// # Errors
/// Those of [`read_rates`].
pub fn figures(threads: usize, bytes: usize, passes: usize) -> Result<Value, AppError> {
    let rates = read_rates(threads, bytes, passes)?;
    Ok(json!({
        "schema": "mpk-bench/1",
        "what": "memory",
        "threads": threads,
        "bytes": bytes,
        "read_bytes_per_second": rates.first().map_or(0.0, |rate| rate.bytes_per_second),
        "patterns": rates,
        "verdict": {
            "right": true,
            "sum": "of the words read, in every pass: that of the words written",
            "passes": rates.iter().map(|rate| rate.right_passes).sum::<usize>(),
        },
    }))
}

/// Read rates of `threads` threads over `bytes` bytes, on huge and on small pages. Each pattern reports the best of `repeats`
/// passes; the fastest pattern comes first. Each thread has its own core while there are enough cores.
///
/// # Errors
/// The memory cannot be allocated, or a thread cannot be started. A pass has not read what was written.
pub fn read_rates(threads: usize, bytes: usize, repeats: usize) -> Result<Vec<Rate>, AppError> {
    let bytes = bytes.max(1).next_multiple_of(UNIT);
    let piece = bytes.div_ceil(threads.max(1)).next_multiple_of(UNIT);
    let cores = World::single().cores().own;
    let core = |thread: usize| cores.get(thread % cores.len().max(1)).copied();
    let repeats = repeats.max(1);
    let mut rates = Vec::new();
    for (pages, name) in [(Pages::Huge, "huge"), (Pages::Small, "small")] {
        let mut buffer = HugeBuffer::on(pages, 0, "the memory benchmark", bytes)?;
        // Each thread touches its share first, so that the pages lie near its core.
        let parts = buffer.as_mut_slice().chunks_mut(piece).enumerate();
        // Addition wraps around.
        let written = AtomicU32::new(0);
        scoped(parts, core, |(number, part)| {
            written.fetch_add(fill(number * (piece / WORD), part), Ordering::Relaxed);
        })?;
        let written = written.into_inner();
        for pattern in ReadPattern::ALL {
            let mut seconds = f64::INFINITY;
            for _ in 0..repeats {
                let read = AtomicU32::new(0);
                let begin = Instant::now();
                scoped(buffer.as_slice().chunks(piece), core, |part| {
                    read.fetch_add(read_memory(part, pattern), Ordering::Relaxed);
                })?;
                seconds = seconds.min(begin.elapsed().as_secs_f64());
                check(read.into_inner(), written, &format!("{} on {name} pages", pattern.name))?;
            }
            let bytes_per_second = bytes as f64 / seconds;
            rates.push(Rate { pattern: pattern.name, pages: name, bytes_per_second, right_passes: repeats });
        }
    }
    rates.sort_by(|a, b| b.bytes_per_second.total_cmp(&a.bytes_per_second));
    Ok(rates)
}

/// Writes the words of a part that begins with word number `first`. Returns their sum.
fn fill(first: usize, part: &mut [u8]) -> u32 {
    let mut sum = 0u32;
    for (i, bytes) in part.chunks_exact_mut(WORD).enumerate() {
        let word = (((first + i) as u64).wrapping_mul(FACTOR) >> 32) as u32;
        bytes.copy_from_slice(&word.to_ne_bytes());
        sum = sum.wrapping_add(word);
    }
    sum
}

/// Checks that the sums of the words that were read and written are the same.
fn check(read: u32, written: u32, what: &str) -> Result<(), AppError> {
    if read == written {
        return Ok(());
    }
    Err(AppError::failed(format!(
        "no figures: the words that `{what}` has read add up to {read:#x}, but {written:#x} was written"
    )))
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
        // Three shares of different sizes.
        let rates = read_rates(3, 8 << 20, 2).unwrap();
        assert_eq!(rates.len(), 2 * ReadPattern::ALL.len());
        assert!(["huge", "small"].iter().all(|pages| rates.iter().any(|rate| rate.pages == *pages)));
        assert!(rates.iter().all(|rate| rate.bytes_per_second > 1e6), "{rates:?}");
        assert!(rates.is_sorted_by(|a, b| a.bytes_per_second >= b.bytes_per_second), "{rates:?}");
        assert!(rates.iter().all(|rate| rate.right_passes == 2), "{rates:?}");
    }

    #[test]
    fn the_object_has_a_verdict() {
        let found = figures(1, 1 << 20, 2).unwrap();
        assert_eq!((&found["what"], &found["bytes"]), (&json!("memory"), &json!(1 << 20)));
        assert_eq!(found["read_bytes_per_second"], found["patterns"][0]["bytes_per_second"]);
        let verdict = &found["verdict"];
        let passes = 2 * 2 * ReadPattern::ALL.len();
        assert_eq!((&verdict["right"], &verdict["passes"]), (&json!(true), &json!(passes)), "{found}");
    }

    /// What a wrong pass would have read: a part too little, a part twice instead of another, or words that nobody wrote.
    #[test]
    fn a_pass_that_has_not_read_what_was_written_has_no_figures() {
        let mut buffer = HugeBuffer::on(Pages::Small, 0, "a test", 16 * UNIT).unwrap();
        let written = fill(0, buffer.as_mut_slice());
        let units = |from: usize, to: usize| &buffer.as_slice()[from * UNIT..to * UNIT];
        for pattern in ReadPattern::ALL {
            let read = |from, to| read_memory(units(from, to), pattern);
            let outcome = |sum| check(sum, written, pattern.name).map_err(|error| error.status);
            assert_eq!(outcome(read(0, 16)), Ok(()), "{pattern:?}");
            assert_eq!(outcome(read(0, 15)), Err(4), "{pattern:?}");
            assert_eq!(outcome(read(0, 15).wrapping_add(read(3, 4))), Err(4), "{pattern:?}");
            assert_eq!(outcome(0), Err(4), "{pattern:?}");
        }
    }
}

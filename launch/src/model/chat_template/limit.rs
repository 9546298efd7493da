//! The memory and the time of a rendering.
//!
//! minijinja limits the steps of a template, but not what a step may do: a loop that doubles a text fills any memory within fifty steps,
//! and a step on a long text takes long. Only an allocator sees that. So the programs' allocator (`cli::process_limits`) counts here what
//! the rendering thread allocates, and ends the process if that is too much. It cannot return an error instead: a failed allocation of a
//! text aborts. A program with another allocator has no such limit. Nor can an overflow of the stack be an error.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// What any rendering may allocate.
const BASE: i64 = 256 << 20;
/// What it may allocate in addition, as a multiple of its input's size. Templates copy their input a few times.
const TIMES: i64 = 16;
/// Maximum time. A template of 4 MiB of messages takes a tenth of a second.
const TIME: Duration = Duration::from_secs(30);
/// Number of allocations between two looks at the clock.
const BETWEEN: u32 = 1024;

#[derive(Clone, Copy)]
struct State {
    begin: Instant,
    /// Bytes that the thread may still allocate.
    left: i64,
    count: u32,
}

thread_local! {
    /// Of the rendering on this thread. It has no destructor, so an allocator may use it at any time.
    static STATE: Cell<Option<State>> = const { Cell::new(None) };
}

/// Why a rendering must not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excess {
    /// It uses too much memory.
    Memory,
    /// It takes too long.
    Time,
    /// It has built a value of so many levels that printing or dropping it overflows the stack.
    Depth,
}

/// While it lives, this thread renders a template.
pub(super) struct Limited(());

impl Limited {
    /// What is allocated from now on is the input.
    pub fn begin() -> Limited {
        STATE.set(Some(State { begin: Instant::now(), left: i64::MAX, count: 0 }));
        Limited(())
    }

    /// The input is complete.
    pub fn limit(&self) {
        if let Some(state) = STATE.get() {
            let input = i64::MAX - state.left;
            STATE.set(Some(State { left: BASE.saturating_add(input.saturating_mul(TIMES)), ..state }));
        }
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        STATE.set(None);
    }
}

/// True if this thread renders a template. A signal handler may ask.
pub fn is_rendering() -> bool {
    STATE.get().is_some()
}

/// Called by an allocator: this thread's memory grows by `bytes`, or shrinks if that is negative.
#[inline]
pub fn count(bytes: i64) -> Option<Excess> {
    let state = STATE.get()?;
    let left = state.left.saturating_sub(bytes);
    let count = state.count.wrapping_add(1);
    STATE.set(Some(State { left, count, ..state }));
    if left < 0 {
        return Some(Excess::Memory);
    }
    (count.is_multiple_of(BETWEEN) && state.begin.elapsed() > TIME).then_some(Excess::Time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_counts_while_a_template_is_rendered() {
        assert_eq!(count(1 << 40), None);
        let limited = Limited::begin();
        assert_eq!(count(1000), None);
        limited.limit();
        let most = BASE + 1000 * TIMES;
        assert_eq!(count(most), None);
        assert_eq!(count(-most), None);
        assert_eq!(count(most + 1), Some(Excess::Memory));
        drop(limited);
        assert_eq!(count(1 << 40), None);
    }
}

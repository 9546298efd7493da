//! Runs independent pieces of work on the machine's cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns `work(i)` for each `i` in `0..count`, in order of `i`.
pub fn map<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = cores.min(count);
    if threads <= 1 {
        return (0..count).map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, T)>> = Mutex::new(Vec::with_capacity(count));
    let run = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return;
            }
            let result = work(i);
            done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((i, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // If the system refuses a thread, the other threads do its share.
            if std::thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    let mut results = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.sort_by_key(|(i, _)| *i);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Like [`map`], but starts with the largest pieces, so that no core begins a large one when the others are nearly
/// done.
pub fn map_largest_first<T: Send>(
    count: usize,
    size: impl Fn(usize) -> usize,
    work: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(size(i)));
    let results = map(count, |i| work(order[i]));
    let mut results: Vec<(usize, T)> = order.into_iter().zip(results).collect();
    results.sort_by_key(|(i, _)| *i);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::map_largest_first;
    use std::sync::Mutex;

    #[test]
    fn results_of_all_sizes_are_returned_in_order() {
        let sizes = [3, 9, 1, 9, 0, 7];
        let begun = Mutex::new(Vec::new());
        let results = map_largest_first(
            sizes.len(),
            |i| sizes[i],
            |i| {
                begun.lock().unwrap().push(i);
                i * 10
            },
        );
        assert_eq!(results, [0, 10, 20, 30, 40, 50]);
        begun.lock().unwrap().sort_unstable();
        assert_eq!(begun.into_inner().unwrap(), [0, 1, 2, 3, 4, 5]);
        assert!(map_largest_first(0, |i| i, |i| i).is_empty());
    }
}

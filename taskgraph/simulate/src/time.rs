//! Simulated time.

/// Picoseconds.
pub type Ps = u64;

/// Microseconds as picoseconds.
pub(crate) fn ps(us: f64) -> Ps {
    (us * 1e6).round() as Ps
}

/// The time that `bytes` (or operations) take at a rate.
pub(crate) fn at_rate(bytes: u64, giga_per_s: f64) -> Ps {
    (bytes as f64 * 1e3 / giga_per_s).round() as Ps
}

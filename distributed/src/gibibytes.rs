//! Formats amounts of memory for messages.

/// `1.50 GiB`, or MiB for smaller amounts.
pub fn gibibytes(bytes: u64) -> String {
    let mebibytes = bytes as f64 / f64::from(1 << 20);
    if mebibytes < 1024.0 { format!("{mebibytes:.1} MiB") } else { format!("{:.2} GiB", mebibytes / 1024.0) }
}

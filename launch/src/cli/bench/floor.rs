//! The bytes that a step must read at least, and how long that takes.

use crate::cli::bench::memory::{Rate, read_rates};
use crate::model::app_error::AppError;
use crate::model::hf_config::ModelConfig;
use serde::Serialize;

/// Bytes that one rank must read in a decode step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// Weights, without an embedding table from which only single rows are read.
    pub weights: u64,
    /// Keys and values of earlier tokens.
    pub cache: u64,
}

impl Bytes {
    /// The bytes of a step of `batch` requests with `context` tokens each on `ranks` ranks.
    pub fn of_step(config: &ModelConfig, ranks: u32, batch: u32, context: u32) -> Bytes {
        let [ranks, batch, context] = [ranks, batch, context].map(u64::from);
        let [hidden, layers, heads, kv_heads, size, inner, vocabulary] = [
            config.hidden_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.vocab_size,
        ]
        .map(u64::from);
        // A rank holds every KV head that its query heads read.
        let (heads, kv_heads) = (heads.div_ceil(ranks), kv_heads.div_ceil(ranks));
        let layer = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * inner.div_ceil(ranks);
        let element = config.dtype.size() as u64;
        // The query's own position is one of the window's, and not of the cache's.
        let seen = |layer| config.window(layer).map_or(context, |window| context.min(u64::from(window) - 1));
        let positions: u64 = (0..config.num_layers).map(seen).sum();
        Bytes {
            weights: element * (layers * layer + vocabulary.div_ceil(ranks) * hidden),
            cache: element * batch * positions * 2 * kv_heads * size,
        }
    }

    /// Weights and cache together.
    pub fn total(&self) -> u64 {
        self.weights + self.cache
    }
}

/// The least time of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Floor {
    /// Milliseconds.
    pub ms: f64,
    /// The bytes that a rank reads.
    pub bytes: Bytes,
    /// The read rate.
    pub bytes_per_second: f64,
    /// The origin of the rate: `measured` in this run, or `given`.
    pub source: &'static str,
    /// All measured rates.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub patterns: Vec<Rate>,
}

/// Bytes that are read to measure the rate.
const MEASURED_BYTES: usize = 512 << 20;
const PASSES: usize = 3;

/// The floor of a step. On the CPU the rate is measured with as many threads as all ranks have workers together, because they share
/// the memory. On a GPU there is a floor only if the rate is given.
///
/// # Errors
/// There is no memory for the measurement.
pub fn floor(
    bytes: Bytes,
    backend: &str,
    ranks: u32,
    threads: usize,
    given: Option<f64>,
) -> Result<Option<Floor>, AppError> {
    let (rate, source, patterns) = match (given, backend) {
        (Some(rate), _) => (rate, "given", Vec::new()),
        (None, "cpu") => {
            let patterns = read_rates(threads, MEASURED_BYTES, PASSES)?;
            let best = patterns.first().map_or(1.0, |rate| rate.bytes_per_second);
            (best / f64::from(ranks), "measured", patterns)
        }
        (None, _) => return Ok(None),
    };
    Ok(Some(Floor { ms: 1e3 * bytes.total() as f64 / rate, bytes, bytes_per_second: rate, source, patterns }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::hf_config::WeightDtype;
    use crate::model::shapes;

    fn shape(name: &str) -> ModelConfig {
        let config = shapes::config(name).unwrap();
        crate::model::families::parse_config(name, "", config.as_object().unwrap(), || Ok(WeightDtype::Bf16))
            .unwrap()
    }

    #[test]
    fn a_step_reads_the_weights_once_and_each_requests_cache() {
        // Qwen3-8B: 8.19e9 parameters less the embedding's 0.62e9, two bytes each.
        let bytes = Bytes::of_step(&shape("qwen3-8b"), 1, 1, 512);
        assert!((15.0e9..15.3e9).contains(&(bytes.weights as f64)), "{bytes:?}");
        assert_eq!(bytes.cache, 36 * 512 * 2 * 8 * 128 * 2);
        let four = Bytes::of_step(&shape("qwen3-8b"), 4, 8, 512);
        assert!((four.weights as f64 / bytes.weights as f64 - 0.25).abs() < 0.01, "{four:?}");
        assert_eq!(four.cache, 2 * bytes.cache);
        // Each rank has at least one KV head.
        let many = Bytes::of_step(&shape("qwen3-8b"), 16, 1, 512);
        assert_eq!(many.cache, bytes.cache / 8);
    }

    #[test]
    fn a_step_reads_only_the_windows_of_sliding_layers() {
        let mut config = shape("qwen3-8b");
        let all = Bytes::of_step(&config, 1, 2, 512).cache;
        let layers = (0..36).map(|layer| layer >= 27).collect();
        config.sliding_window = Some(crate::model::hf_config::SlidingWindow { positions: 129, layers });
        assert_eq!(Bytes::of_step(&config, 1, 2, 512).cache, all / 4 * 3 + all / 4 / 4);
    }

    #[test]
    fn a_given_rate_is_taken_and_a_gpu_without_one_has_no_floor() {
        let bytes = Bytes { weights: 900, cache: 100 };
        let floor = |backend, given| super::floor(bytes, backend, 2, 1, given).unwrap();
        assert_eq!(floor("cuda", Some(1e6)).map(|f| (f.ms, f.source)), Some((1.0, "given")));
        assert!(floor("cuda", None).is_none());
    }
}

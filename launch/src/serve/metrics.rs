//! Counters and times for Prometheus, with vLLM's names and the prefix `mpk:`.

use super::backend::Stats;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const FIRST_TOKEN: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 80.0,
];
const BETWEEN_TOKENS: [f64; 18] = [
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8,
    2.0, 10.0,
];
const WHOLE: [f64; 16] =
    [0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 120.0, 480.0];
const TOKENS: [f64; 17] =
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5];
const CHOICES: [f64; 6] = [1.0, 2.0, 5.0, 10.0, 20.0, 100.0];

/// Why a request has ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    finished_reason: &'static str,
}

/// An HTTP answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    handler: &'static str,
    status: Status,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Status(u16);

impl EncodeLabelValue for Status {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        write!(encoder, "{}", self.0)
    }
}

/// All metrics of a server.
pub struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    kv_usage: Gauge<f64, AtomicU64>,
    prefix_queries: Counter,
    prefix_hits: Counter,
    preemptions: Counter,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    finished: Family<Reason, Counter>,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    request_prompt: Histogram,
    request_generation: Histogram,
    params_n: Histogram,
    params_max_tokens: Histogram,
    answered: Family<Answered, Counter>,
    /// Total time of finished requests in microseconds, and their number.
    total: (AtomicU64, AtomicU64),
}

impl Metrics {
    /// Creates metrics without events. `model` is a label of every line.
    pub fn new(model: &str) -> Self {
        let histogram = |buckets: &[f64]| Histogram::new(buckets.iter().copied());
        let mut metrics = Metrics {
            registry: Registry::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_usage: Gauge::default(),
            prefix_queries: Counter::default(),
            prefix_hits: Counter::default(),
            preemptions: Counter::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            finished: Family::default(),
            first_token: histogram(&FIRST_TOKEN),
            between_tokens: histogram(&BETWEEN_TOKENS),
            whole: histogram(&WHOLE),
            request_prompt: histogram(&TOKENS),
            request_generation: histogram(&TOKENS),
            params_n: histogram(&CHOICES),
            params_max_tokens: histogram(&TOKENS),
            answered: Family::default(),
            total: (AtomicU64::new(0), AtomicU64::new(0)),
        };
        metrics.register(model);
        metrics
    }

    fn register(&mut self, model: &str) {
        let label = (Cow::from("model_name"), Cow::from(escaped(model)));
        let mut registry = Registry::default();
        let all = registry.sub_registry_with_label(label);
        macro_rules! add {
            ($($field:ident $name:literal $help:literal),* $(,)?) => {
                $(all.register(concat!("mpk:", $name), $help, self.$field.clone());)*
            };
        }
        add!(
            running "num_requests_running" "Requests in a slot of the engine",
            waiting "num_requests_waiting" "Requests that wait for a slot",
            kv_usage "kv_cache_usage_perc" "Share of the KV cache's pages in use, from 0 to 1",
            prefix_queries "prefix_cache_queries" "Prompt tokens looked up in the prefix cache",
            prefix_hits "prefix_cache_hits" "Prompt tokens found in the prefix cache",
            preemptions "num_preemptions" "Times that a request had to give its pages back",
            prompt_tokens "prompt_tokens" "Prompt tokens of all requests",
            generation_tokens "generation_tokens" "New tokens of all requests",
            finished "request_success" "Requests by the reason of their end",
            first_token "time_to_first_token_seconds" "From a request's arrival to its first token",
            between_tokens "inter_token_latency_seconds" "Between two tokens of a request",
            whole "e2e_request_latency_seconds" "From a request's arrival to its end",
            request_prompt "request_prompt_tokens" "Prompt tokens of a request",
            request_generation "request_generation_tokens" "New tokens of a request",
            params_n "request_params_n" "Answers that a request asks for",
            params_max_tokens "request_params_max_tokens" "New tokens that a request asks for",
            answered "http_requests" "HTTP requests by path and status",
        );
        self.registry = registry;
    }

    /// All metrics as text, in the format of OpenMetrics.
    pub fn text(&self, now: &Stats) -> String {
        self.running.set(i64::try_from(now.running).unwrap_or(i64::MAX));
        self.waiting.set(i64::try_from(now.waiting).unwrap_or(i64::MAX));
        self.kv_usage.set(now.kv_usage);
        // The engine counts these, so its totals are copied.
        for (counter, sum) in [
            (&self.prefix_queries, now.prefix_queries),
            (&self.prefix_hits, now.prefix_hits),
            (&self.preemptions, now.preemptions),
        ] {
            counter.inner().fetch_max(sum, Ordering::Relaxed);
        }
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }

    /// Counts an accepted request.
    pub fn request(&self, n: usize, prompt: usize, max_tokens: u32) {
        self.params_n.observe(n as f64);
        self.params_max_tokens.observe(f64::from(max_tokens));
        self.request_prompt.observe(prompt as f64);
        self.prompt_tokens.inc_by(prompt as u64);
    }

    /// Counts an answer's first token.
    pub fn first_token(&self, after: Duration) {
        self.generation_tokens.inc();
        self.first_token.observe(after.as_secs_f64());
    }

    /// Counts a further token.
    pub fn next_token(&self, after: Duration) {
        self.generation_tokens.inc();
        self.between_tokens.observe(after.as_secs_f64());
    }

    /// Counts several further tokens that arrived in this time.
    pub fn next_tokens(&self, count: usize, after: Duration) {
        self.generation_tokens.inc_by(count as u64);
        let each = after.as_secs_f64() / count.max(1) as f64;
        (0..count).for_each(|_| self.between_tokens.observe(each));
    }

    /// Counts the end of an answer.
    pub fn end(&self, reason: &'static str, tokens: usize, after: Duration) {
        self.finished.get_or_create(&Reason { finished_reason: reason }).inc();
        self.request_generation.observe(tokens as f64);
        self.whole.observe(after.as_secs_f64());
        self.total.0.fetch_add(after.as_micros() as u64, Ordering::Relaxed);
        self.total.1.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an HTTP answer.
    pub fn answered(&self, handler: &'static str, status: u16) {
        self.answered.get_or_create(&Answered { handler, status: Status(status) }).inc();
    }

    /// Mean time of all answers so far.
    pub fn mean_seconds(&self) -> f64 {
        let (micros, count) = (self.total.0.load(Ordering::Relaxed), self.total.1.load(Ordering::Relaxed));
        micros as f64 / 1e6 / count.max(1) as f64
    }
}

/// Converts the format of OpenMetrics to Prometheus' classic one. There a counter has one name, that of its samples.
pub fn classic(open: &str) -> String {
    const HELP: &str = "# HELP ";
    const TYPE: &str = "# TYPE ";
    let counters: HashSet<&str> =
        open.lines().filter_map(|line| line.strip_prefix(TYPE)?.strip_suffix(" counter")).collect();
    let mut out = String::with_capacity(open.len() + open.len() / 16);
    for line in open.lines() {
        if line.starts_with("# UNIT ") || line == "# EOF" {
            continue;
        }
        let about = line.strip_prefix(HELP).or_else(|| line.strip_prefix(TYPE));
        let name = about.and_then(|about| about.split(' ').next());
        match name.filter(|name| counters.contains(name)) {
            Some(name) => {
                let (begin, rest) = line.split_at(HELP.len() + name.len());
                out.extend([begin, "_total", rest]);
            }
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

/// Escapes `value` for a label. The encoder writes labels unchanged, and one double quote in a label would make the whole
/// page invalid.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_classic_format_has_one_name_for_a_counter() {
        let open = "# HELP a Sum of a.\n# TYPE a counter\na_total{x=\"# EOF\"} 1\n# HELP ab_seconds Time.\n\
            # TYPE ab_seconds histogram\n# UNIT ab_seconds seconds\nab_seconds_sum 2.0\n# EOF\n";
        let expected = "# HELP a_total Sum of a.\n# TYPE a_total counter\na_total{x=\"# EOF\"} 1\n\
            # HELP ab_seconds Time.\n# TYPE ab_seconds histogram\nab_seconds_sum 2.0\n";
        assert_eq!(classic(open), expected);
        let open = Metrics::new("m").text(&Stats::default());
        let text = classic(&open);
        let samples = |text: &str| -> Vec<String> {
            text.lines().filter(|line| !line.starts_with('#')).map(str::to_string).collect()
        };
        assert_eq!(samples(&text), samples(&open));
        assert!(text.contains("# TYPE mpk:prompt_tokens_total counter\n"), "{text}");
        assert!(text.contains("# TYPE mpk:num_requests_running gauge\n"), "{text}");
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"), "{text}");
    }

    #[test]
    fn any_model_name_keeps_every_metric_on_its_line() {
        let text = Metrics::new("a \"b\"\\c\nd é").text(&Stats::default());
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(samples.len() > 10, "{text}");
        for line in samples {
            assert!(line.contains(r#"model_name="a \"b\"\\c\nd é""#), "{line}");
        }
    }
}

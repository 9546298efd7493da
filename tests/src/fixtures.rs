//! The results that Hugging Face transformers computed with the fixtures (see `tests/fixtures/README.md`), and the
//! comparison.

use crate::folders::fixtures_folder;
use crate::model_file::{ModelFile, read_json};
use crate::run_json::{RequestJson, RunJson};
use serde::Deserialize;

/// If the winner's lead (in natural log) is below this, a model with real weights may take the second token.
const CLEAR_WINNER: f64 = 0.15;

/// expected.json.
#[derive(Debug, Deserialize)]
pub struct Expected {
    /// "mpk-expected/1".
    pub schema: String,
    /// Dtype of the stored weights.
    pub dtype: String,
    /// End-of-sequence tokens in force.
    pub eos_token_ids: Vec<u32>,
    /// Texts and their encoding, where there is a tokenizer.
    #[serde(default)]
    pub tokenizer: Vec<Encoded>,
    /// Each request was run alone in its batch.
    pub requests: Vec<ExpectedRequest>,
}

/// A text and its tokens.
#[derive(Debug, Deserialize)]
pub struct Encoded {
    /// The text.
    pub text: String,
    /// With the tokenizer's default special tokens.
    pub tokens: Vec<u32>,
}

/// One request.
#[derive(Clone, Debug, Deserialize)]
pub struct ExpectedRequest {
    /// The prompt as text, if it is one.
    pub prompt: Option<String>,
    /// The prompt as tokens.
    pub prompt_tokens: Vec<u32>,
    /// Greedy continuation that does not stop at an end of sequence.
    pub tokens: Vec<u32>,
    /// Why it ends if it may end early.
    pub finish_reason: String,
    /// Number of tokens in that case, including the end of sequence.
    pub finish_length: usize,
    /// The decoded text, if there is a tokenizer.
    pub text: Option<String>,
    /// The lead over the second token, for each token.
    pub margins: Vec<f64>,
    /// The top five, for each token.
    pub logprobs: Vec<Vec<(u32, f64)>>,
}

/// Requests, and new tokens per request, under the region sanitizer, whose kernels take a hundred times as long. After the first few
/// steps the same tasks touch the same bytes.
const SANITIZED_REQUESTS: usize = 3;
const SANITIZED_TOKENS: usize = 3;

/// Whether the jobs run under the region sanitizer.
pub fn is_sanitized() -> bool {
    std::env::var_os("MPK_SANITIZE").is_some_and(|value| value == "1")
}

/// A fixture.
pub struct Fixture {
    /// Name of its folder.
    pub name: &'static str,
    /// The expected results; requests are in the order of [`Fixture::model`].
    pub expected: Expected,
    /// Weights from training: a narrow winner may change.
    trained: bool,
}

impl Fixture {
    /// Reads the fixture; requests with a text come first, as in `generate`.
    ///
    /// # Panics
    /// Its files are missing or wrong.
    pub fn open(name: &'static str) -> Self {
        let path = fixtures_folder().join(name).join("expected.json");
        let mut expected: Expected =
            serde_json::from_value(read_json(&path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!(expected.schema, "mpk-expected/1");
        assert!(!expected.requests.is_empty());
        expected.requests.sort_by_key(|r| r.prompt.is_none());
        if is_sanitized() {
            expected.requests.truncate(SANITIZED_REQUESTS);
            expected.requests.iter_mut().for_each(|request| request.tokens.truncate(SANITIZED_TOKENS));
        }
        Fixture { name, expected, trained: name == "tiny" }
    }

    /// Number of new tokens that were computed for each request.
    pub fn new_tokens(&self) -> usize {
        self.expected.requests[0].tokens.len()
    }

    /// A model.json that asks for all requests, without stopping at an end of sequence.
    pub fn model(&self) -> ModelFile {
        self.model_of(&self.expected.requests)
    }

    /// A model.json that asks for these requests, in this order (texts come first).
    pub fn model_of(&self, requests: &[ExpectedRequest]) -> ModelFile {
        let texts: Vec<&str> = requests.iter().filter_map(|r| r.prompt.as_deref()).collect();
        let tokens: Vec<&[u32]> =
            requests.iter().filter(|r| r.prompt.is_none()).map(|r| &r.prompt_tokens[..]).collect();
        ModelFile::of_fixture(self.name)
            .set("generate.prompts", serde_json::json!(texts))
            .set("generate.prompt_tokens", serde_json::json!(tokens))
            .set("generate.max_new_tokens", self.new_tokens())
            .set("generate.ignore_eos", true)
            // The expected tokens were chosen greedily, even if the checkpoint's generation_config.json asks for
            // sampling.
            .set("generate.greedy", true)
    }

    /// Largest allowed difference of a log-probability. The contract promises 0.05 for f32 and 0.12 x (1 +
    /// |logprob|) for bf16. For f32 and f16 the tests allow less, ten times the measured difference, because an
    /// error in the arithmetic may be small.
    fn tolerance(&self, logprob: f64) -> f64 {
        match self.expected.dtype.as_str() {
            "float32" => 0.0005,
            "float16" => 0.02 * (1.0 + logprob.abs()),
            _ => 0.12 * (1.0 + logprob.abs()),
        }
    }

    /// Compares all requests of a run with `--logprobs 5` that did not stop at an end of sequence. Returns the
    /// largest difference of a log-probability as a fraction of the allowed one.
    ///
    /// # Panics
    /// Something differs by more than is allowed.
    pub fn check(&self, run: &RunJson, what: &str) -> f64 {
        assert_eq!(run.requests.len(), self.expected.requests.len(), "{what}");
        let pairs = self.expected.requests.iter().zip(&run.requests).enumerate();
        pairs
            .map(|(i, (expected, found))| {
                self.check_request(expected, found, &format!("{what}, request {i}"))
            })
            .fold(0.0, f64::max)
    }

    /// Compares one request; see [`Fixture::check`].
    ///
    /// # Panics
    /// Something differs by more than is allowed.
    pub fn check_request(&self, expected: &ExpectedRequest, found: &RequestJson, what: &str) -> f64 {
        assert_eq!(found.prompt_tokens, expected.prompt_tokens, "{what}: prompt");
        assert_eq!(found.finish_reason, "length", "{what}");
        assert_eq!(found.tokens.len(), expected.tokens.len(), "{what}: number of tokens");
        let logprobs = found.logprobs.as_ref().unwrap_or_else(|| panic!("{what}: no logprobs"));
        assert_eq!(logprobs.len(), found.tokens.len(), "{what}: one list for each token");
        let mut largest = 0.0;
        for (step, (&token, found_top)) in found.tokens.iter().zip(logprobs).enumerate() {
            let what = format!("{what}, step {step}");
            largest = f64::max(largest, self.check_top(&expected.logprobs[step], found_top, &what));
            assert_eq!(found_top[0].0, token, "{what}: the token is the best one");
            if token != expected.tokens[step] {
                let margin = expected.margins[step];
                assert!(
                    self.trained && margin < CLEAR_WINNER,
                    "{what}: token {token}, expected {} (which leads by {margin})\nexpected {:?}\nfound {found_top:?}",
                    expected.tokens[step],
                    expected.logprobs[step]
                );
                // From here on the prefix is different.
                return largest;
            }
        }
        largest
    }

    /// Compares the top five of one step by token; returns the largest difference as a fraction of the allowed one.
    fn check_top(&self, expected: &[(u32, f64)], found: &[(u32, f64)], what: &str) -> f64 {
        assert_eq!(found.len(), expected.len(), "{what}: top tokens");
        assert!(
            found.is_sorted_by(|a, b| a.1 > b.1 || (a.1 == b.1 && a.0 < b.0)),
            "{what}: not sorted: {found:?}"
        );
        let find = |list: &[(u32, f64)], token: u32| list.iter().find(|e| e.0 == token).map(|e| e.1);
        let last = |list: &[(u32, f64)]| list.last().map_or(f64::NEG_INFINITY, |e| e.1);
        let mut largest = 0.0;
        for &(token, logprob) in expected {
            let allowed = self.tolerance(logprob);
            // A token that is missing in our five must be below our fifth.
            let difference = match find(found, token) {
                Some(own) => (own - logprob).abs(),
                None => (logprob - last(found)).max(0.0),
            };
            assert!(
                difference <= allowed,
                "{what}: token {token}: {difference} > {allowed}\nexpected {expected:?}\nfound {found:?}"
            );
            largest = f64::max(largest, difference / allowed);
        }
        for &(token, logprob) in found.iter().filter(|e| find(expected, e.0).is_none()) {
            let allowed = self.tolerance(logprob);
            let difference = logprob - last(expected);
            assert!(
                difference <= allowed,
                "{what}: token {token} does not belong here\nexpected {expected:?}\nfound {found:?}"
            );
            largest = f64::max(largest, difference / allowed);
        }
        largest
    }
}

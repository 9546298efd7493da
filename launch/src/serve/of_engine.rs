//! The engine as a [`Backend`].

use super::backend::{
    Backend, Capabilities, Event, Events, Finish, ModelInfo, Refusal, Stats, Submission, Token,
};
use super::state::Loaded;
use crate::engine::{
    self, End, Engine, Error, ErrorKind, FinishReason, Handle, Reader, Request, SamplingParams,
};
use crate::model::chat_template::ChatTemplate;
use crate::model::model_json::PrefixCache;
use crate::model::prompts::Prompt;
use futures_util::StreamExt;
use std::sync::Arc;

/// Makes a loaded engine ready to be served as `name`, with as many log-probabilities as it was loaded for. Returns `None` if
/// the engine runs a user graph, which has no tokens.
pub fn serve(
    engine: &Arc<Engine>,
    name: String,
    template: Option<ChatTemplate>,
    logprobs: u32,
) -> Option<Loaded> {
    let info = engine.info();
    let limits = info.limits?;
    let model = ModelInfo {
        name,
        max_seq_len: u64::from(limits.max_seq_len).min(limits.kv_tokens) as u32,
        vocab_size: limits.vocab_size,
        max_batch: info.model.max_batch(),
        defaults: info.defaults,
    };
    let can = |params: SamplingParams| params.check(info.sampling, limits.vocab_size).is_ok();
    let neutral = SamplingParams::default();
    let capabilities = Capabilities {
        sampling: can(SamplingParams { temperature: 1.0, top_p: 0.5, top_k: 5, min_p: 0.1, ..neutral }),
        penalties: can(SamplingParams {
            presence_penalty: 1.0,
            frequency_penalty: 1.0,
            repetition_penalty: 1.1,
            ..neutral
        }),
        min_tokens: true,
        ignore_eos: true,
        logprobs: Some(logprobs).filter(|&most| most > 0),
    };
    let backend = Box::new(OfEngine { engine: Arc::clone(engine) });
    Some(Loaded { backend, model, capabilities, tokenizer: info.tokenizer.clone(), template })
}

struct OfEngine {
    engine: Arc<Engine>,
}

impl Backend for OfEngine {
    fn expect(&self) {
        self.engine.expect();
    }

    fn submit(&self, requests: Vec<Submission>) -> Result<Vec<Events>, Refusal> {
        let shown: Vec<Option<u32>> = requests.iter().map(|request| request.logprobs).collect();
        let handles = self.engine.submit_all(requests.into_iter().map(request).collect()).map_err(refusal)?;
        Ok(handles.into_iter().zip(shown).map(|(handle, shown)| events(handle, shown)).collect())
    }

    fn eos(&self) -> &[u32] {
        &self.engine.info().eos
    }

    fn reader(&self) -> Option<Reader> {
        self.engine.reader()
    }

    fn stats(&self) -> Stats {
        let prefix_cache = self.engine.info().model.runtime.prefix_cache == PrefixCache::On;
        stats(&self.engine.stats(), prefix_cache)
    }
}

/// The statistics of an engine with or without a prefix cache.
fn stats(stats: &engine::Stats, prefix_cache: bool) -> Stats {
    Stats {
        running: stats.running,
        waiting: stats.waiting,
        kv_usage: f64::from(stats.kv_pages_used) / f64::from(stats.kv_pages.max(1)),
        // The kernel leaves out prompts that cannot be found, such as those shorter than a page. As in vLLM, they count here. A prompt
        // is counted before the kernel gets it, so hits are never more.
        prefix_queries: if prefix_cache { stats.prompt_tokens } else { 0 },
        prefix_hits: stats.prefix_hits,
        preemptions: stats.preemptions,
    }
}

fn request(submission: Submission) -> Request {
    let Submission {
        prompt,
        max_new_tokens,
        min_new_tokens,
        ignore_eos,
        stop,
        stop_token_ids,
        sampling,
        logprobs,
        whole,
    } = submission;
    Request {
        min_new_tokens,
        ignore_eos,
        whole,
        // With 0, the engine would not give the chosen token's own log-probability.
        logprobs: logprobs.map_or(0, |shown| shown.max(1)),
        stop,
        stop_token_ids,
        sampling,
        ..Request::new(Prompt::Tokens(prompt), max_new_tokens)
    }
}

fn refusal(error: Error) -> Refusal {
    match error.kind() {
        ErrorKind::Full => Refusal::Full,
        ErrorKind::Input | ErrorKind::Unsupported => Refusal::Invalid(error.to_string()),
        _ => Refusal::Closed(error.to_string()),
    }
}

/// The events of a request, with the `shown` best log-probabilities.
fn events(handle: Handle, shown: Option<u32>) -> Events {
    Box::pin(StreamExt::map(handle, move |event| match event {
        engine::Event::Token(token) => {
            let engine::Token { id, text, logprob, logprobs: mut top } = token;
            top.truncate(shown.unwrap_or(0) as usize);
            Event::Token(Token { id, text, logprob, top })
        }
        engine::Event::End(End { reason, text, cached_tokens, error }) => {
            let finish = match reason {
                FinishReason::Length => Finish::Length,
                FinishReason::Eos => Finish::Eos,
                FinishReason::Stop => Finish::Stop,
                FinishReason::Cancelled => Finish::Cancelled,
                FinishReason::Error => {
                    Finish::Error(error.map_or_else(|| "the engine failed".into(), |error| error.to_string()))
                }
            };
            Event::End(text, finish, cached_tokens)
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prompt_counts_as_looked_up_if_there_is_a_prefix_cache() {
        // The kernel has looked up one of two prompts.
        let of_engine =
            engine::Stats { prompt_tokens: 70, prefix_queries: 64, prefix_hits: 48, ..Default::default() };
        let on = stats(&of_engine, true);
        assert_eq!((on.prefix_queries, on.prefix_hits), (70, 48));
        let off = engine::Stats { prompt_tokens: 70, ..Default::default() };
        assert_eq!(stats(&off, false).prefix_queries, 0);
    }
}

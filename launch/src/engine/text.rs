//! The sink for a request's tokens: turns them into text, looks for stop strings, and passes both to the handle.

use crate::engine::error::{Error, ErrorKind};
use crate::engine::handle::{Channel, FinishReason, Token};
use crate::engine::stop::{Released, StopStrings};
use crate::model::error::InputError;
use crate::model::tokenizer::{TextStream, Tokenizer};
use distributed::online::{self, End, Sink};
use distributed::plan::Finish;
use std::sync::Arc;
use std::task::Waker;

/// The sink of a request. It runs on the thread that takes the tokens of all requests: the host's, or the reader's. A token takes
/// microseconds, and the kernel does not wait for that.
pub(crate) struct RequestText {
    channel: Arc<Channel>,
    stream: Option<TextStream>,
    stops: StopStrings,
    /// End-of-sequence ids; empty if they are ignored. Their text is left out.
    eos: Vec<u32>,
    stop_token_ids: Vec<u32>,
    /// Stop tokens, and stop strings that end within these tokens, are ignored.
    min_new_tokens: u32,
    /// Number of log-probabilities per token.
    logprobs: usize,
    /// Number of tokens so far.
    count: u32,
    /// The reader has not been notified of some tokens yet.
    untold: bool,
}

/// What ends a request early, and what the request wants to know about its tokens.
pub(crate) struct Wanted<'a> {
    pub stop: &'a [String],
    pub eos: Vec<u32>,
    pub stop_token_ids: Vec<u32>,
    pub min_new_tokens: u32,
    pub logprobs: u32,
}

impl RequestText {
    pub fn new(channel: Arc<Channel>, tokenizer: Option<&Tokenizer>, wanted: Wanted<'_>) -> RequestText {
        RequestText {
            channel,
            stream: tokenizer.map(Tokenizer::stream),
            stops: StopStrings::new(wanted.stop),
            eos: wanted.eos,
            stop_token_ids: wanted.stop_token_ids,
            min_new_tokens: wanted.min_new_tokens,
            logprobs: wanted.logprobs as usize,
            count: 0,
            untold: false,
        }
    }

    fn take(&mut self, token: online::Token) -> Result<(), InputError> {
        let id = token.id as u32;
        self.count += 1;
        let may_stop = self.count > self.min_new_tokens;
        let stops = may_stop && self.stop_token_ids.contains(&id);
        let released = match &mut self.stream {
            Some(stream) if !stops && !self.eos.contains(&id) => {
                let piece = stream.push(id)?;
                self.release(&piece)
            }
            _ => Released::default(),
        };
        let logprob = token.logprob.filter(|_| self.logprobs > 0);
        let best = token.logprobs.into_iter().take(self.logprobs);
        let logprobs = best.map(|(id, logprob)| (id as u32, logprob)).collect();
        self.untold |= self.channel.token(Token { id, text: released.text, logprob, logprobs });
        if released.stopped {
            self.untold |= self.channel.end_quietly(FinishReason::Stop, String::new(), None);
        } else if stops {
            self.finish(FinishReason::Stop)?;
        }
        Ok(())
    }

    /// Adds text of the last token. Returns what cannot be the beginning of a stop string.
    fn release(&mut self, piece: &str) -> Released {
        if self.count > self.min_new_tokens {
            self.stops.push(piece)
        } else {
            Released { text: self.stops.pass(piece), stopped: false }
        }
    }

    fn finish(&mut self, reason: FinishReason) -> Result<(), InputError> {
        let rest = self.stream.take().map(TextStream::finish).transpose()?.unwrap_or_default();
        let mut last = self.release(&rest);
        if !last.stopped {
            last.text.push_str(&self.stops.finish());
        }
        let reason = if last.stopped { FinishReason::Stop } else { reason };
        self.untold |= self.channel.end_quietly(reason, last.text, None);
        Ok(())
    }

    fn check(&mut self, done: Result<(), InputError>) {
        if let Err(error) = done {
            self.fail(error.into());
        }
    }

    fn fail(&mut self, error: Error) {
        self.untold |= self.channel.end_quietly(FinishReason::Error, String::new(), Some(error));
    }
}

impl Sink for RequestText {
    fn cached(&mut self, tokens: u32) {
        self.channel.cached(tokens);
    }

    fn token(&mut self, token: online::Token) -> bool {
        if !self.channel.is_over() {
            let done = self.take(token);
            self.check(done);
        }
        !self.channel.is_over()
    }

    fn tell(&mut self) -> Option<Waker> {
        if std::mem::take(&mut self.untold) { self.channel.tell() } else { None }
    }

    fn end(mut self: Box<Self>, end: End) {
        let reason = match end {
            End::Finished(Finish::Length) => Some(FinishReason::Length),
            End::Finished(Finish::Eos) => Some(FinishReason::Eos),
            End::Finished(Finish::Cancelled) => Some(FinishReason::Cancelled),
            End::Lost(reason) => {
                self.fail(Error::new(ErrorKind::Failed, reason));
                None
            }
        };
        if let Some(reason) = reason.filter(|_| !self.channel.is_over()) {
            let done = self.finish(reason);
            self.check(done);
        }
        // The caller of this holds no lock.
        if let Some(waker) = self.tell() {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::handle::Handle;
    use futures_core::Stream;
    use std::path::Path;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    fn request(wanted: Wanted<'_>) -> (Box<RequestText>, Handle) {
        request_with(None, wanted)
    }

    fn request_with(tokenizer: Option<&Tokenizer>, wanted: Wanted<'_>) -> (Box<RequestText>, Handle) {
        let channel = Arc::new(Channel::new(Arc::default(), false));
        let handle = Handle::new(1, vec![7], channel.clone(), None);
        (Box::new(RequestText::new(channel, tokenizer, wanted)), handle)
    }

    /// A tokenizer with these words, numbered from 1.
    fn tokenizer(words: &[&str]) -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        for (id, word) in ["[UNK]"].iter().chain(words).enumerate() {
            vocab.insert(word.to_string(), id.into());
        }
        let file = serde_json::json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": null,
            "pre_tokenizer": null,
            "post_processor": null,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
        });
        Tokenizer::parse(Path::new("tokenizer.json"), file.to_string().as_bytes()).unwrap()
    }

    fn token(id: i32) -> online::Token {
        online::Token { id, logprob: Some(-2.5), logprobs: vec![(8, -0.5), (9, -1.5)] }
    }

    #[test]
    fn a_stop_token_counts_after_the_fewest_tokens_and_ends_the_request() {
        let wanted =
            Wanted { stop: &[], eos: vec![2], stop_token_ids: vec![5], min_new_tokens: 2, logprobs: 1 };
        let (mut sink, handle) = request(wanted);
        assert!(sink.token(token(5)) && sink.token(token(2)) && sink.token(token(4)));
        assert!(!sink.token(token(5)), "the kernel may stop");
        assert!(!sink.token(token(6)));
        sink.end(End::Finished(Finish::Cancelled));
        let all = handle.wait();
        assert_eq!((all.tokens, all.reason), (vec![5, 2, 4, 5], FinishReason::Stop));
        assert_eq!((&all.logprobs[3][..], all.token_logprobs[3]), (&[(8, -0.5)][..], Some(-2.5)));
    }

    #[test]
    fn a_stop_string_counts_if_it_ends_after_the_fewest_tokens() {
        let tokenizer = tokenizer(&[" of", " the", " LORD", ",", " and"]);
        for (least, text, reason) in [
            (0, " of the ", FinishReason::Stop),
            (3, " of the ", FinishReason::Stop),
            (4, " of the ", FinishReason::Stop),
            (5, " of the LORD, and", FinishReason::Length),
            (6, " of the LORD, and", FinishReason::Length),
        ] {
            let stop = ["LORD, and".to_string()];
            let wanted = Wanted {
                stop: &stop,
                eos: vec![],
                stop_token_ids: vec![],
                min_new_tokens: least,
                logprobs: 0,
            };
            let (mut sink, handle) = request_with(Some(&tokenizer), wanted);
            let more: Vec<bool> = (1..=5).map(|id| sink.token(token(id))).collect();
            assert_eq!(more, [true, true, true, true, reason == FinishReason::Length]);
            sink.end(End::Finished(Finish::Length));
            let all = handle.wait();
            assert_eq!((all.text.as_str(), all.reason), (text, reason), "{least}");
        }
    }

    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The lock of the results is held while tokens are taken.
    #[test]
    fn a_token_that_ends_a_request_wakes_nobody_by_itself() {
        let wanted =
            Wanted { stop: &[], eos: vec![], stop_token_ids: vec![5], min_new_tokens: 0, logprobs: 0 };
        let (mut sink, mut handle) = request(wanted);
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        assert!(Pin::new(&mut handle).poll_next(&mut Context::from_waker(&waker)).is_pending());
        assert!(!sink.token(token(5)));
        let waker = sink.tell().expect("a task waits");
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        waker.wake();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(sink.tell().is_none());
    }

    #[test]
    fn a_lost_engine_ends_the_request_with_its_error() {
        let wanted =
            Wanted { stop: &[], eos: vec![], stop_token_ids: vec![], min_new_tokens: 0, logprobs: 0 };
        let (mut sink, handle) = request(wanted);
        assert!(sink.token(token(5)));
        sink.end(End::Lost("rank 1 is lost".into()));
        let all = handle.wait();
        assert_eq!((all.tokens, all.reason), (vec![5], FinishReason::Error));
        assert_eq!(all.token_logprobs, [], "it asked for none");
        assert_eq!(all.error.map(|error| error.exit_status()), Some(4));
    }
}

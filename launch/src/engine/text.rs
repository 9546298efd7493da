//! The sink for a request's tokens: turns them into text, looks for stop strings, and passes both to the handle.

use crate::engine::error::{Error, ErrorKind};
use crate::engine::handle::{Channel, FinishReason, Token};
use crate::engine::stop::{Released, StopStrings};
use crate::model::error::InputError;
use crate::model::tokenizer::{TextStream, Tokenizer};
use distributed::online::{self, End, Sink};
use distributed::plan::Finish;
use std::sync::Arc;

/// The sink of a request. It runs on the thread that takes the tokens of all requests: the host's, or the reader's. A token takes
/// microseconds, and the kernel does not wait for that.
pub(crate) struct RequestText {
    channel: Arc<Channel>,
    stream: Option<TextStream>,
    stops: StopStrings,
    /// End-of-sequence ids; empty if they are ignored. Their text is left out.
    eos: Vec<u32>,
    stop_token_ids: Vec<u32>,
    /// Stop strings and stop tokens count only after this many tokens.
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
                if may_stop { self.stops.push(&piece) } else { Released { text: piece, stopped: false } }
            }
            _ => Released::default(),
        };
        let logprob = token.logprob.filter(|_| self.logprobs > 0);
        let best = token.logprobs.into_iter().take(self.logprobs);
        let logprobs = best.map(|(id, logprob)| (id as u32, logprob)).collect();
        self.untold |= self.channel.token(Token { id, text: released.text, logprob, logprobs });
        if released.stopped {
            self.channel.end(FinishReason::Stop, String::new(), None);
        } else if stops {
            self.finish(FinishReason::Stop)?;
        }
        Ok(())
    }

    fn finish(&mut self, reason: FinishReason) -> Result<(), InputError> {
        let rest = self.stream.take().map(TextStream::finish).transpose()?.unwrap_or_default();
        let mut last = self.stops.push(&rest);
        if !last.stopped {
            last.text.push_str(&self.stops.finish());
        }
        let reason = if last.stopped { FinishReason::Stop } else { reason };
        self.channel.end(reason, last.text, None);
        Ok(())
    }

    fn check(&self, done: Result<(), InputError>) {
        if let Err(error) = done {
            self.channel.end(FinishReason::Error, String::new(), Some(error.into()));
        }
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

    fn tell(&mut self) {
        if std::mem::take(&mut self.untold) {
            self.channel.tell();
        }
    }

    fn end(mut self: Box<Self>, end: End) {
        let reason = match end {
            End::Finished(Finish::Length) => FinishReason::Length,
            End::Finished(Finish::Eos) => FinishReason::Eos,
            End::Finished(Finish::Cancelled) => FinishReason::Cancelled,
            End::Lost(reason) => {
                let error = Error::new(ErrorKind::Failed, reason);
                return self.channel.end(FinishReason::Error, String::new(), Some(error));
            }
        };
        if !self.channel.is_over() {
            let done = self.finish(reason);
            self.check(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::handle::Handle;

    fn request(wanted: Wanted<'_>) -> (Box<RequestText>, Handle) {
        let channel = Arc::new(Channel::new(Arc::default(), false));
        let handle = Handle::new(1, vec![7], channel.clone(), None);
        (Box::new(RequestText::new(channel, None, wanted)), handle)
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

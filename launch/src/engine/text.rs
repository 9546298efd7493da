//! Text of tokens: a thread of its own decodes them and looks for stop strings, so that the thread which watches the kernel
//! does not have to.

use crate::engine::handle::{Channel, FinishReason, Token};
use crate::engine::stop::{Released, StopStrings};
use crate::model::error::InputError;
use crate::model::tokenizer::{TextStream, Tokenizer};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// What the engine's thread hands over.
pub(crate) enum Produced {
    /// A request begins.
    Begin(u64, Box<RequestText>),
    /// Its next tokens, each with log-probabilities if they are wanted.
    Tokens(u64, Vec<(u32, Vec<(u32, f32)>)>),
    /// It has ended.
    End(u64, FinishReason),
}

/// A request whose tokens become text.
pub(crate) struct RequestText {
    channel: Arc<Channel>,
    stream: Option<TextStream>,
    stops: StopStrings,
    /// End-of-sequence ids; empty where they are ignored. Their text is left out.
    eos: Vec<u32>,
    stop_token_ids: Vec<u32>,
}

impl RequestText {
    pub fn new(
        channel: Arc<Channel>,
        tokenizer: Option<&Tokenizer>,
        stop: &[String],
        eos: Vec<u32>,
        stop_token_ids: Vec<u32>,
    ) -> RequestText {
        let stream = tokenizer.map(Tokenizer::stream);
        RequestText { channel, stream, stops: StopStrings::new(stop), eos, stop_token_ids }
    }

    fn token(&mut self, id: u32, logprobs: Vec<(u32, f32)>) -> Result<(), InputError> {
        let stops = self.stop_token_ids.contains(&id);
        let released = match &mut self.stream {
            Some(stream) if !stops && !self.eos.contains(&id) => {
                let piece = stream.push(id)?;
                self.stops.push(&piece)
            }
            _ => Released::default(),
        };
        self.channel.token(Token { id, text: released.text, logprobs });
        if released.stopped {
            self.channel.end(FinishReason::Stop, String::new(), None);
        } else if stops {
            self.end(FinishReason::Stop)?;
        }
        Ok(())
    }

    fn end(&mut self, reason: FinishReason) -> Result<(), InputError> {
        let rest = self.stream.take().map(TextStream::finish).transpose()?.unwrap_or_default();
        let mut last = self.stops.push(&rest);
        if !last.stopped {
            last.text.push_str(&self.stops.finish());
        }
        let reason = if last.stopped { FinishReason::Stop } else { reason };
        self.channel.end(reason, last.text, None);
        Ok(())
    }
}

/// Until the engine's thread is gone.
pub(crate) fn serve(produced: &Receiver<Produced>) {
    let mut requests: HashMap<u64, RequestText> = HashMap::new();
    for event in produced {
        let (id, done) = match event {
            Produced::Begin(id, request) => {
                requests.insert(id, *request);
                continue;
            }
            Produced::Tokens(id, tokens) => {
                let Some(request) = requests.get_mut(&id) else { continue };
                let mut tokens = tokens.into_iter();
                (id, tokens.try_for_each(|(token, logprobs)| request.token(token, logprobs)))
            }
            Produced::End(id, reason) => {
                let Some(request) = requests.get_mut(&id) else { continue };
                (id, request.end(reason))
            }
        };
        let Some(request) = requests.get(&id) else { continue };
        if let Err(error) = done {
            request.channel.end(FinishReason::Error, String::new(), Some(error.into()));
        }
        if request.channel.is_over() {
            requests.remove(&id);
        }
    }
}

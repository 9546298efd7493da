//! From a checked request to the pieces of its answers: one task per answer, and one bounded channel for all of them.

use super::backend::{Event, Events, Finish, Refusal, Sampling, Submission, Token};
use super::error::ApiError;
use super::generation::Generation;
use super::limits::check_choices;
use super::offsets::Offsets;
use super::state::{App, Phase, Ready};
use futures_util::StreamExt;
use serde::Serialize;
use std::pin::pin;
use std::time::Instant;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

/// A checked request, ready for the engine.
pub struct Plan {
    /// Checked prompts. Answer c belongs to prompt c / n.
    pub prompts: Vec<Vec<u32>>,
    /// Maximum number of new tokens for each prompt.
    pub max_tokens: Vec<u32>,
    /// Everything else.
    pub generation: Generation,
    /// When the request arrived.
    pub arrival: Instant,
}

/// A piece of one answer.
#[derive(Debug, Default)]
pub struct Piece {
    /// The index of the answer.
    pub choice: usize,
    /// New text; may be empty.
    pub text: String,
    /// Number of tokens since the last piece.
    pub count: usize,
    /// These tokens, if the request asks for them.
    pub tokens: Vec<Shown>,
    /// In the last piece: number of prompt tokens that the prefix cache had.
    pub cached: usize,
    /// Why the answer ends here, if it does.
    pub ending: Option<Ending>,
}

/// A token that is shown.
#[derive(Clone, Debug)]
pub struct Shown {
    /// The token.
    pub token: Token,
    /// Offset of its text in the answer, in characters. Only known if the request asks for log-probabilities.
    pub offset: usize,
}

/// Why an answer ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The answer is complete: end of sequence, a stop string or a stop token.
    Stop,
    /// The answer has `max_tokens` tokens.
    Length,
    /// The answer is incomplete.
    Failed(ApiError),
}

impl Ending {
    /// The name in OpenAI's API.
    pub fn name(&self) -> &'static str {
        match self {
            Ending::Stop => "stop",
            Ending::Length => "length",
            Ending::Failed(_) => "error",
        }
    }
}

/// Numbers of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Number of tokens of all prompts together.
    pub prompt_tokens: usize,
    /// Number of tokens of all answers together.
    pub completion_tokens: usize,
    /// The sum of both.
    pub total_tokens: usize,
    /// Details about the prompt tokens.
    pub prompt_tokens_details: PromptTokens,
}

/// Prompt tokens that were not computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokens {
    /// Tokens that the prefix cache had. For several answers to one prompt, those of the first answer count.
    pub cached_tokens: usize,
}

/// One answer after its end.
#[derive(Clone, Debug, Default)]
pub struct Whole {
    /// Its text.
    pub text: String,
    /// Its tokens, if the request asks for them.
    pub tokens: Vec<Shown>,
    /// Why it ended: [`Ending::name`].
    pub reason: &'static str,
}

/// The answers as they arrive. Dropping it cancels those that are incomplete.
pub struct Answers {
    pieces: mpsc::Receiver<Piece>,
    open: usize,
    /// Number of answers per prompt.
    n: usize,
    /// Tokens so far.
    pub usage: Usage,
}

impl Answers {
    /// Answers without tokens, which need no engine.
    fn empty(choices: usize, n: usize, usage: Usage) -> Answers {
        let (sender, pieces) = mpsc::channel(choices.max(1));
        for choice in 0..choices {
            // The channel has room for all of them.
            let _ = sender.try_send(Piece { choice, ending: Some(Ending::Length), ..Piece::default() });
        }
        Answers { pieces, open: choices, n: n.max(1), usage }
    }

    /// The next piece of any answer; `None` after all have ended.
    pub async fn next(&mut self) -> Option<Piece> {
        if self.open == 0 {
            return None;
        }
        // A task that ends without a last piece has panicked.
        let piece = self.pieces.recv().await.unwrap_or_else(|| Piece {
            ending: Some(Ending::Failed(ApiError::failed("the answer was lost", "internal_error"))),
            ..Piece::default()
        });
        self.usage.completion_tokens += piece.count;
        self.usage.total_tokens += piece.count;
        if piece.choice.is_multiple_of(self.n) {
            self.usage.prompt_tokens_details.cached_tokens += piece.cached;
        }
        match &piece.ending {
            Some(Ending::Failed(_)) => self.open = 0,
            Some(_) => self.open -= 1,
            None => {}
        }
        Some(piece)
    }

    /// Waits for the ends of all answers. Returns them in the order of their indices, and the numbers of tokens.
    ///
    /// # Errors
    /// An answer has failed.
    pub async fn whole(mut self) -> Result<(Vec<Whole>, Usage), ApiError> {
        let mut all = vec![Whole::default(); self.open];
        while let Some(mut piece) = self.next().await {
            if let Some(Ending::Failed(error)) = piece.ending {
                return Err(error);
            }
            let whole = &mut all[piece.choice];
            whole.text.push_str(&piece.text);
            whole.tokens.append(&mut piece.tokens);
            whole.reason = piece.ending.map_or(whole.reason, |ending| ending.name());
        }
        Ok((all, self.usage))
    }
}

/// Submits `plan` to the engine.
///
/// # Errors
/// The queue is full, or the engine refuses the request.
pub fn start(app: &App, ready: &Ready, plan: Plan) -> Result<Answers, ApiError> {
    let Plan { prompts, max_tokens, generation, arrival } = plan;
    let choices = prompts.len() * generation.n;
    check_choices(prompts.len(), generation.n, app.limits.choices.min(ready.all_places))?;
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let usage = Usage { prompt_tokens, total_tokens: prompt_tokens, ..Usage::default() };
    if generation.max_tokens == Some(0) {
        for prompt in &prompts {
            ready.metrics.request(generation.n, prompt.len(), 0);
        }
        (0..choices).for_each(|_| ready.metrics.end("length", 0, arrival.elapsed()));
        return Ok(Answers::empty(choices, generation.n, usage));
    }
    let places = app.places(ready, choices);
    // After the places are taken: a server that drains waits for all places. So either it waits for this request, or the request is
    // refused here.
    app.serving()?;
    let mut places = places?;
    let mut submissions = Vec::with_capacity(choices);
    for (prompt, &max_new_tokens) in prompts.iter().zip(&max_tokens) {
        for answer in 0..generation.n {
            // The answers to one prompt differ, and each of them is repeatable.
            let seed = generation.sampling.seed.map(|seed| seed.wrapping_add(answer as u64));
            submissions.push(Submission {
                prompt: prompt.clone(),
                max_new_tokens,
                min_new_tokens: generation.min_tokens,
                ignore_eos: generation.ignore_eos,
                stop: generation.stop.clone(),
                stop_token_ids: generation.stop_token_ids.clone(),
                sampling: Sampling { seed, ..generation.sampling },
                logprobs: generation.logprobs,
                whole: !generation.stream,
            });
        }
    }
    tracing::debug!("a request goes to the engine {} us after its arrival", arrival.elapsed().as_micros());
    let all = ready.loaded.backend.submit(submissions).map_err(|refusal| refused(app, ready, refusal))?;
    // A refused request is not counted.
    for (prompt, &max_new_tokens) in prompts.iter().zip(&max_tokens) {
        ready.metrics.request(generation.n, prompt.len(), max_new_tokens);
    }
    let (sender, pieces) = mpsc::channel(app.limits.pieces);
    let n = generation.n;
    for (choice, events) in all.into_iter().enumerate() {
        let answer = Answer {
            app: App::clone(app),
            choice,
            generation: generation.clone(),
            arrival,
            sender: sender.clone(),
            place: places.split(1),
        };
        tokio::spawn(answer.run(events));
    }
    Ok(Answers { pieces, open: choices, n: n.max(1), usage })
}

fn refused(app: &App, ready: &Ready, refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::Full => ApiError::busy(ready.patience()),
        // The phase knows the reason better.
        Refusal::Closed(reason) => {
            app.serving().err().unwrap_or_else(|| ApiError::unavailable(reason, "engine_closed"))
        }
        Refusal::Invalid(reason) => ApiError::invalid(reason),
    }
}

/// The task of one answer.
struct Answer {
    app: App,
    choice: usize,
    generation: Generation,
    arrival: Instant,
    sender: mpsc::Sender<Piece>,
    place: Option<OwnedSemaphorePermit>,
}

/// The state of a running answer.
struct Progress {
    piece: Piece,
    /// Tokens so far.
    tokens: usize,
    /// Where the next token's text begins.
    offsets: Offsets,
    /// Arrival time of the last token; for a whole answer, of the first.
    last: Option<Instant>,
}

impl Answer {
    async fn run(self, mut events: Events) {
        let Some(ready) = self.app.ready.get() else { return };
        let mut progress = Progress {
            piece: Piece { choice: self.choice, ..Piece::default() },
            tokens: 0,
            offsets: Offsets::default(),
            last: None,
        };
        let reason = self.pump(ready, &mut events, &mut progress).await;
        // First the engine forgets the request and its place becomes free, then the end is counted.
        drop(events);
        drop(self.place);
        if let (false, Some(first)) = (self.generation.stream, progress.last) {
            ready.metrics.next_tokens(progress.tokens.saturating_sub(1), first.elapsed());
        }
        ready.metrics.end(reason, progress.tokens, self.arrival.elapsed());
    }

    /// Forwards everything. Returns the reason of the end, for the metrics.
    async fn pump(&self, ready: &Ready, events: &mut Events, progress: &mut Progress) -> &'static str {
        let mut phase = self.app.phase.subscribe();
        // Created once for all tokens, because each of these futures takes a place in a list while it exists.
        let (mut closed, mut cut_off) = (pin!(self.sender.closed()), pin!(cut_off(&mut phase)));
        loop {
            let event = tokio::select! {
                biased;
                () = closed.as_mut() => return "abort",
                event = events.next() => event,
                error = cut_off.as_mut() => Some(Event::End(String::new(), Finish::Error(error), 0)),
            };
            let ending = match event {
                Some(Event::Token(token)) => {
                    self.token(ready, progress, token);
                    None
                }
                Some(Event::End(text, finish, cached)) => {
                    let offsets = progress.offsets.finish(ready.loaded.tokenizer.as_ref());
                    place(&mut progress.piece.tokens, offsets);
                    progress.piece.text.push_str(&text);
                    progress.piece.cached = cached as usize;
                    Some(self.ending(finish))
                }
                None => Some(Ending::Failed(self.lost())),
            };
            // Without a tokenizer, tokens have no text.
            let has_news = !progress.piece.text.is_empty()
                || (ready.loaded.tokenizer.is_none() && !progress.piece.tokens.is_empty());
            // A whole answer is a single piece.
            let wanted = ending.is_some() || (self.generation.stream && has_news);
            if !wanted {
                continue;
            }
            let name = ending.as_ref().map(Ending::name);
            progress.piece.ending = ending;
            let next = Piece { choice: self.choice, ..Piece::default() };
            let piece = std::mem::replace(&mut progress.piece, next);
            // The channel nearly always has room.
            let sent = match self.sender.try_send(piece) {
                Err(TrySendError::Full(piece)) => {
                    self.sender.send_timeout(piece, self.app.limits.reader_time).await.is_ok()
                }
                sent => sent.is_ok(),
            };
            match (sent, name) {
                (true, None) => {}
                (true, Some(name)) => return name,
                // Nobody reads the answer.
                (false, _) => return "abort",
            }
        }
    }

    fn token(&self, ready: &Ready, progress: &mut Progress, token: Token) {
        let now = Instant::now();
        match progress.last.replace(now) {
            None => {
                tracing::debug!(
                    "the first token of a request is read {} us after its arrival",
                    (now - self.arrival).as_micros()
                );
                ready.metrics.first_token(now - self.arrival);
            }
            Some(last) if self.generation.stream => ready.metrics.next_token(now - last),
            // The tokens of a whole answer arrive together, so their times are recorded at the end.
            Some(first) => progress.last = Some(first),
        }
        progress.tokens += 1;
        progress.piece.count += 1;
        progress.piece.text.push_str(&token.text);
        let with_logprobs = self.generation.logprobs.is_some();
        if with_logprobs || self.generation.return_token_ids {
            let id = token.id;
            progress.piece.tokens.push(Shown { token, offset: 0 });
            if with_logprobs {
                let has_text = self.has_text(ready, progress.tokens, id);
                let offsets = progress.offsets.next(ready.loaded.tokenizer.as_ref(), id, has_text);
                place(&mut progress.piece.tokens, offsets);
            }
        }
    }

    /// False if the engine leaves out the text of token `id`, the answer's token number `count`: it ends the sequence, or stops the
    /// answer.
    fn has_text(&self, ready: &Ready, count: usize, id: u32) -> bool {
        let Generation { ignore_eos, min_tokens, stop_token_ids, .. } = &self.generation;
        let ends = !ignore_eos && ready.loaded.backend.eos().contains(&id);
        let stops = count > *min_tokens as usize && stop_token_ids.contains(&id);
        !ends && !stops
    }

    fn ending(&self, finish: Finish) -> Ending {
        match finish {
            Finish::Length => Ending::Length,
            Finish::Eos | Finish::Stop => Ending::Stop,
            Finish::Cancelled => Ending::Failed(self.lost()),
            Finish::Error(reason) => {
                let known = self.app.serving().err();
                Ending::Failed(known.unwrap_or_else(|| ApiError::failed(reason, "engine_failed")))
            }
        }
    }

    /// The reason why the engine dropped the request.
    fn lost(&self) -> ApiError {
        let known = self.app.serving().err();
        known.unwrap_or_else(|| ApiError::failed("the engine has dropped the request", "engine_failed"))
    }
}

/// Sets the offsets of the last tokens. Tokens that have been sent already keep theirs.
fn place(tokens: &mut [Shown], offsets: &[usize]) {
    for (shown, &offset) in tokens.iter_mut().rev().zip(offsets.iter().rev()) {
        shown.offset = offset;
    }
}

/// Resolves when running requests must end.
async fn cut_off(phase: &mut watch::Receiver<Phase>) -> String {
    let ended = phase.wait_for(|phase| matches!(phase, Phase::Ending | Phase::Lost(_))).await;
    match ended.as_deref() {
        Ok(Phase::Lost(reason)) => reason.clone(),
        _ => "the server is shutting down".into(),
    }
}

#[cfg(test)]
#[path = "answers_test.rs"]
mod tests;

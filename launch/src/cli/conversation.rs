//! `--chat` without a prompt: a conversation on standard input and output. Each line is a message of the user.

use crate::cli::args::Args;
use crate::cli::console::{self, tell};
use crate::cli::output;
use crate::cli::program::Failure;
use crate::cli::typed::Lines;
use crate::engine::{Engine, Event, Handle, Opened, Request, SamplingParams};
use crate::model::app_error::AppError;
use crate::model::chat_template::{ChatTemplate, Rendering};
use crate::model::prompts::{Limits, Prompt, PromptSource, resolve};
use crate::model::tokenizer::Tokenizer;
use kernels_cu::signals::{Next, Watched};
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

/// How soon a signal is looked at.
const TICK: Duration = Duration::from_millis(50);

/// What the messages of a conversation are turned into requests with.
#[derive(Debug)]
pub struct Conversation {
    template: ChatTemplate,
    rendering: Rendering,
    sampling: SamplingParams,
    ignore_eos: bool,
    stop: Vec<String>,
    limits: Limits,
}

impl Conversation {
    /// As the options, model.json and the checkpoint say.
    ///
    /// # Errors
    /// The checkpoint has no tokenizer; an argument of the template is malformed.
    pub fn new(
        args: &Args,
        opened: &Opened<'_>,
        template: ChatTemplate,
        sampling: SamplingParams,
    ) -> Result<Conversation, AppError> {
        if opened.source.tokenizer.is_none() {
            return Err(AppError::input("--chat: the checkpoint has no tokenizer.json"));
        }
        // An answer is as long as there is room for, unless it is told.
        let max_new_tokens = opened.model.generate.max_new_tokens.unwrap_or(opened.limits.max_seq_len);
        Ok(Conversation {
            template,
            rendering: Rendering { arguments: args.template_arguments()?, ..Rendering::default() },
            sampling,
            ignore_eos: opened.model.generate.ignore_eos,
            stop: opened.model.generate.stop.clone(),
            limits: Limits { max_new_tokens, ..opened.limits },
        })
    }

    /// Answers line after line until standard input or a signal ends it. On rank 0.
    ///
    /// # Errors
    /// The template refuses the messages; the engine fails; standard output can't be written.
    pub fn hold(&self, engine: &Engine, interrupts: &Interrupts) -> Result<(), Failure> {
        let Some(tokenizer) = engine.info().tokenizer.as_ref() else { return Ok(()) };
        let terminal = std::io::stdin().is_terminal();
        if terminal {
            tell("A line is a message. Ctrl-C stops an answer, Ctrl-D ends the conversation.");
        }
        let mut lines = Lines::default();
        let mut history: Vec<Value> = Vec::new();
        loop {
            if terminal {
                let _ = std::io::stderr().write_all(b"> ");
            }
            let Some(line) = lines.next(TICK, || interrupts.pressed()) else { break };
            if line.trim().is_empty() {
                continue;
            }
            history.push(json!({"role": "user", "content": line}));
            let request = match self.request(&mut history, tokenizer)? {
                Ok(request) => request,
                Err(too_long) => {
                    tell(format_args!("mpk-run: {}", too_long.message));
                    history.pop();
                    continue;
                }
            };
            let answer = self.answer(&engine.submit(request)?, interrupts)?;
            let Some(answer) = answer else { break };
            history.push(json!({"role": "assistant", "content": answer}));
        }
        if terminal {
            tell("");
        }
        Ok(())
    }

    /// The request of a conversation. The oldest messages are left out where they don't fit, or leave an answer less than a
    /// quarter of the room. The inner error: the last message alone does not fit.
    fn request(
        &self,
        history: &mut Vec<Value>,
        tokenizer: &Tokenizer,
    ) -> Result<Result<Request, AppError>, AppError> {
        let least = self.limits.max_new_tokens.min(self.limits.max_seq_len / 4);
        let mut left_out = 0;
        let resolved = loop {
            let text = self.template.render(history, &self.rendering)?;
            let source = PromptSource { place: "the message".into(), prompt: Prompt::Rendered(text) };
            let resolved =
                resolve(&[source], Some(tokenizer), &self.limits).map(|mut all| all.swap_remove(0));
            let fits = resolved.as_ref().is_ok_and(|request| request.max_new_tokens >= least);
            if fits || history.len() < 3 {
                break resolved;
            }
            history.drain(..2);
            left_out += 2;
        };
        if left_out > 0 {
            tell(format_args!(
                "mpk-run: the conversation is longer than max_seq_len = {}: its first {left_out} messages are left out",
                self.limits.max_seq_len
            ));
        }
        Ok(resolved.map_err(AppError::from).map(|resolved| Request {
            sampling: self.sampling,
            ignore_eos: self.ignore_eos,
            stop: self.stop.clone(),
            ..Request::tokens(resolved.prompt_tokens, resolved.max_new_tokens)
        }))
    }

    /// Prints an answer as it comes; gives it, or `None` where nobody reads it any more.
    fn answer(&self, handle: &Handle, interrupts: &Interrupts) -> Result<Option<String>, Failure> {
        let mut answer = String::new();
        let mut read = true;
        loop {
            let event = match handle.recv_timeout(TICK) {
                Poll::Ready(Some(event)) => event,
                Poll::Ready(None) => break,
                Poll::Pending => {
                    if interrupts.pressed() {
                        handle.cancel();
                    }
                    continue;
                }
            };
            let text = match event {
                Event::Token(token) => token.text,
                Event::End(end) => {
                    output::check(end.error.as_ref())?;
                    end.text
                }
            };
            read = read && console::print(&text)?;
            answer.push_str(&text);
            if !read || interrupts.pressed() {
                handle.cancel();
            }
        }
        interrupts.answered();
        Ok((read && console::print("\n")?).then_some(answer))
    }
}

/// SIGINT and SIGTERM of a conversation. The first stops an answer, or ends the conversation while none is under way; one
/// more, before that has happened, ends the process.
#[derive(Debug, Default)]
pub struct Interrupts {
    /// Signals that nothing has been done about.
    count: Arc<AtomicU32>,
}

/// The engine loads.
const LOADING: u32 = u32::MAX;

impl Interrupts {
    /// From now on. Until [`Interrupts::ready`] is called they do what they do by default.
    pub fn watch(signals: Watched) -> Interrupts {
        let count = Arc::new(AtomicU32::new(LOADING));
        let seen = Arc::clone(&count);
        signals.watch_each(move || {
            // Relaxed: nothing else is read on the strength of it.
            let add = |n: u32| (n != LOADING).then_some(n + 1);
            match seen.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
                Err(_) => Next::ByDefault,
                Ok(0) => Next::Handled,
                Ok(_) => Next::Exit,
            }
        });
        Interrupts { count }
    }

    /// The model is there.
    pub fn ready(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    fn pressed(&self) -> bool {
        !matches!(self.count.load(Ordering::Relaxed), 0 | LOADING)
    }

    /// What there was has been done: the answer is over.
    fn answered(&self) {
        self.count.store(0, Ordering::Relaxed);
    }
}

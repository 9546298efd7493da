//! `--chat` without a prompt: a conversation on standard input and output. Each line is a message from the user.

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
use kernels_cu::signals::{self, Next, Watched};
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

/// How often signals are checked while input is awaited.
const TICK: Duration = Duration::from_millis(50);

/// How messages become requests.
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
    /// Takes the settings from the options, model.json and the checkpoint.
    ///
    /// # Errors
    /// The checkpoint has no tokenizer, or a template argument is malformed.
    pub fn new(
        args: &Args,
        opened: &Opened<'_>,
        template: ChatTemplate,
        sampling: SamplingParams,
    ) -> Result<Conversation, AppError> {
        if opened.source.tokenizer.is_none() {
            return Err(AppError::input(
                "--chat needs a tokenizer, but the checkpoint has no tokenizer.json",
            )
            .with_help("copy the model's tokenizer.json into the checkpoint's folder"));
        }
        // Without a maximum, an answer may use all the room that is left.
        let max_new_tokens = opened.model.generate.max_new_tokens.unwrap_or(opened.limits.longest());
        Ok(Conversation {
            template,
            rendering: Rendering { arguments: args.template_arguments()?, ..Rendering::default() },
            sampling,
            ignore_eos: opened.model.generate.ignore_eos,
            stop: opened.model.generate.stop.clone(),
            limits: Limits { max_new_tokens, ..opened.limits },
        })
    }

    /// Answers line after line until standard input ends or a signal arrives. Called on rank 0.
    ///
    /// # Errors
    /// The template refuses the messages, the engine fails, or standard output cannot be written.
    pub fn hold(&self, engine: &Engine, interrupts: &Interrupts) -> Result<(), Failure> {
        let Some(tokenizer) = engine.info().tokenizer.as_ref() else { return Ok(()) };
        let terminal = std::io::stdin().is_terminal();
        if terminal {
            tell("Type a message and press Enter. Ctrl-C stops an answer, Ctrl-D ends the conversation.");
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
            let answer = self.answer(engine, &engine.submit(request)?, interrupts)?;
            let Some(answer) = answer else { break };
            history.push(json!({"role": "assistant", "content": answer}));
        }
        if terminal {
            tell("");
        }
        Ok(())
    }

    /// The request for the next answer. The oldest messages are left out if the messages do not fit, or if less than a
    /// quarter of the room would remain for the answer. The inner error means that even the last message alone does not
    /// fit.
    fn request(
        &self,
        history: &mut Vec<Value>,
        tokenizer: &Tokenizer,
    ) -> Result<Result<Request, AppError>, AppError> {
        let least = self.limits.max_new_tokens.min(self.limits.longest() / 4);
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
                "mpk-run: the conversation is longer than {}; its first {left_out} messages are left out",
                self.limits.longest_in_words()
            ));
        }
        Ok(resolved.map_err(AppError::from).map(|resolved| Request {
            sampling: self.sampling,
            ignore_eos: self.ignore_eos,
            stop: self.stop.clone(),
            ..Request::tokens(resolved.prompt_tokens, resolved.max_new_tokens)
        }))
    }

    /// Prints an answer as it arrives and returns it. Returns `None` if standard output no longer has a reader.
    fn answer(
        &self,
        engine: &Engine,
        handle: &Handle,
        interrupts: &Interrupts,
    ) -> Result<Option<String>, Failure> {
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
        // A cancelled request ends at once for its reader, but a kernel that is stuck keeps it. Until the kernel has let it go, the next
        // signal ends the process.
        engine.wait_idle();
        interrupts.answered();
        Ok((read && console::print("\n")?).then_some(answer))
    }
}

/// SIGINT and SIGTERM during a conversation. The first signal stops the answer under way, or ends the conversation if there
/// is none. A second signal before that has happened ends the process at once.
#[derive(Debug, Default)]
pub struct Interrupts {
    /// Signals that have not been acted on yet.
    count: Arc<AtomicU32>,
}

/// The engine is loading.
const LOADING: u32 = u32::MAX;

impl Interrupts {
    /// Watches signals from now on. Until [`Interrupts::ready`] is called, a signal has its default effect.
    pub fn watch(signals: Watched) -> Interrupts {
        let count = Arc::new(AtomicU32::new(LOADING));
        let seen = Arc::clone(&count);
        signals.watch_each(move || {
            // Relaxed: no other memory is read because of this value.
            let add = |n: u32| (n != LOADING).then_some(n + 1);
            match seen.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
                Err(_) => Next::ByDefault,
                Ok(0) => Next::Handled,
                Ok(_) => Next::Exit,
            }
        });
        Interrupts { count }
    }

    /// The model is loaded.
    pub fn ready(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    fn pressed(&self) -> bool {
        !matches!(self.count.load(Ordering::Relaxed), 0 | LOADING)
    }

    /// The answer has ended, so earlier signals have had their effect.
    fn answered(&self) {
        self.count.store(0, Ordering::Relaxed);
        signals::acted();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn tokenizer() -> Tokenizer {
        let data: Value = serde_json::from_str(include_str!("../../testdata/byte_level.json")).unwrap();
        let text = data["tokenizer"].to_string();
        Tokenizer::parse(Path::new("tokenizer.json"), text.as_bytes()).unwrap()
    }

    fn conversation(max_seq_len: u32, kv_tokens: u64) -> Conversation {
        let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
        Conversation {
            template: ChatTemplate::parse(Path::new("chat_template.jinja"), template).unwrap(),
            rendering: Rendering::default(),
            sampling: SamplingParams::default(),
            ignore_eos: false,
            stop: Vec::new(),
            limits: Limits { vocab_size: u32::MAX, max_seq_len, kv_tokens, max_new_tokens: max_seq_len },
        }
    }

    fn history(content: &str) -> Vec<Value> {
        let roles = ["user", "assistant", "user"];
        roles.iter().map(|role| json!({"role": role, "content": content})).collect()
    }

    /// All pages together may hold less than a quarter of max_seq_len.
    #[test]
    fn a_conversation_that_fits_in_few_pages_is_kept() {
        let (tokenizer, mut history) = (tokenizer(), history("ab"));
        let request = conversation(4096, 512).request(&mut history, &tokenizer).unwrap().unwrap();
        assert_eq!(history.len(), 3);
        assert!(request.max_new_tokens >= 512 - 6, "{}", request.max_new_tokens);
    }

    #[test]
    fn the_first_messages_are_left_out_if_little_room_remains() {
        let (tokenizer, mut history) = (tokenizer(), history(&"ab".repeat(100)));
        let count = tokenizer.encode_rendered(&"ab".repeat(300)).unwrap().len() as u32;
        for (max_seq_len, kv_tokens) in [(count + 8, 1 << 20), (4 * count, u64::from(count + 8))] {
            let conversation = conversation(max_seq_len, kv_tokens);
            let mut history = history.clone();
            assert!(conversation.request(&mut history, &tokenizer).unwrap().is_ok());
            assert_eq!(history.len(), 1);
        }
        assert!(conversation(4 * count, 1 << 20).request(&mut history, &tokenizer).unwrap().is_ok());
        assert_eq!(history.len(), 3);
    }
}

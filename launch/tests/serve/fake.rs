//! A backend in memory with known answers, and a server in front of it.

use super::stops::Stops;
use futures_util::stream;
use launch::model::chat_template::ChatTemplate;
use launch::model::tokenizer::Tokenizer;
use launch::serve::auth::ApiKey;
use launch::serve::backend::{
    Backend, Capabilities, Event, Events, Finish, ModelInfo, Refusal, Sampling, Stats, Submission, Token,
};
use launch::serve::limits::Limits;
use launch::serve::state::{App, Loaded, Phase};
use launch::serve::{Outcome, Server};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The fake model's name.
pub const NAME: &str = "org/fake-model";
/// Its end-of-sequence id, that of examples/tiny.
pub const EOS: u32 = 0;
/// Its chat template.
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
    {% if tools %}{{ tools | tojson }}{% endif %}{% if mood %}[{{ mood }}]{% endif %}\
    {% if messages[0].content == 'refuse' %}{{ raise_exception('no such talk') }}{% endif %}\
    {% if add_generation_prompt %}<assistant>{% endif %}";

/// Behaviour of a fake.
#[derive(Clone)]
pub struct Behaviour {
    /// The text of every answer. If `endless`, it repeats until there are enough tokens.
    pub answer: String,
    /// Never ends by itself.
    pub endless: bool,
    /// Time before each token.
    pub pace: Duration,
    /// No token comes after this many.
    pub stall_after: Option<usize>,
    /// The stream ends without an end event after this many tokens.
    pub drop_after: Option<usize>,
    /// The request fails after this many tokens.
    pub fail_after: Option<usize>,
    /// Concurrent requests that it accepts.
    pub capacity: usize,
    pub can: Capabilities,
}

impl Default for Behaviour {
    fn default() -> Self {
        Behaviour {
            answer: "In the beginning God created the heaven and the earth.".into(),
            endless: false,
            pace: Duration::ZERO,
            stall_after: None,
            drop_after: None,
            fail_after: None,
            capacity: usize::MAX,
            can: Capabilities {
                sampling: true,
                penalties: true,
                min_tokens: true,
                ignore_eos: true,
                logprobs: Some(20),
            },
        }
    }
}

/// What a fake has recorded.
#[derive(Default)]
pub struct Seen {
    /// Requests that it was told to expect.
    pub expected: AtomicUsize,
    pub submissions: Mutex<Vec<Submission>>,
    pub open: AtomicUsize,
    pub cancelled: AtomicUsize,
    pub finished: AtomicUsize,
    /// Tokens that were requested from it.
    pub tokens: AtomicUsize,
}

pub struct Fake {
    behaviour: Behaviour,
    tokenizer: Tokenizer,
    seen: Arc<Seen>,
}

/// One request; it counts how it ends.
struct Request {
    /// Tokens with their text, and the text that comes with the end.
    tokens: Vec<(u32, String)>,
    last: String,
    finish: Finish,
    next: usize,
    submission: Submission,
    behaviour: Behaviour,
    seen: Arc<Seen>,
    ended: bool,
}

impl Drop for Request {
    fn drop(&mut self) {
        let count = if self.ended { &self.seen.finished } else { &self.seen.cancelled };
        count.fetch_add(1, Ordering::SeqCst);
        self.seen.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Request {
    async fn event(&mut self) -> Option<Event> {
        let done = self.next;
        if self.ended || self.behaviour.drop_after == Some(done) {
            return None;
        }
        if self.behaviour.stall_after == Some(done) {
            std::future::pending::<()>().await;
        }
        if !self.behaviour.pace.is_zero() {
            tokio::time::sleep(self.behaviour.pace).await;
        }
        if self.behaviour.fail_after == Some(done) {
            self.ended = true;
            return Some(Event::End(String::new(), Finish::Error("worker 3 waits".into()), 0));
        }
        let Some((id, text)) = self.tokens.get(done).cloned() else {
            self.ended = true;
            return Some(Event::End(std::mem::take(&mut self.last), self.finish.clone(), 2));
        };
        self.next += 1;
        self.seen.tokens.fetch_add(1, Ordering::SeqCst);
        let top = (0..self.submission.logprobs.unwrap_or(0)).map(|k| (id + k, -0.5 - k as f32)).collect();
        Some(Event::Token(Token { id, text, logprob: self.submission.logprobs.map(|_| -0.5), top }))
    }
}

impl Fake {
    /// The whole answer to `submission`: tokens with their text, the text held back, and the finish reason.
    fn answer(&self, submission: &Submission) -> (Vec<(u32, String)>, String, Finish) {
        let mut ids = self.tokenizer.encode(&self.behaviour.answer).unwrap();
        if !self.behaviour.endless {
            ids.push(EOS);
        }
        let (mut stream, mut stops) = (self.tokenizer.stream(), Stops::new(submission.stop.clone()));
        let mut tokens = Vec::new();
        let mut finish = Finish::Length;
        for &id in ids.iter().cycle().take(submission.max_new_tokens as usize) {
            if submission.stop_token_ids.contains(&id) || (id == EOS && !submission.ignore_eos) {
                tokens.push((id, String::new()));
                finish = if id == EOS { Finish::Eos } else { Finish::Stop };
                break;
            }
            let (text, stopped) = stops.push(&stream.push(id).unwrap());
            tokens.push((id, text));
            if stopped {
                return (tokens, String::new(), Finish::Stop);
            }
        }
        let (mut last, stopped) = stops.push(&stream.finish().unwrap());
        if stopped {
            return (tokens, last, Finish::Stop);
        }
        last.push_str(&stops.held);
        (tokens, last, finish)
    }
}

impl Backend for Fake {
    fn expect(&self) {
        self.seen.expected.fetch_add(1, Ordering::SeqCst);
    }

    fn submit(&self, requests: Vec<Submission>) -> Result<Vec<Events>, Refusal> {
        if self.seen.open.load(Ordering::SeqCst) + requests.len() > self.behaviour.capacity {
            return Err(Refusal::Full);
        }
        Ok(requests.into_iter().map(|request| self.begin(request)).collect())
    }

    fn stats(&self) -> Stats {
        let running = self.seen.open.load(Ordering::SeqCst) as u64;
        Stats { running, kv_usage: 0.25, prefix_queries: 10, prefix_hits: 4, ..Stats::default() }
    }
}

impl Fake {
    fn begin(&self, submission: Submission) -> Events {
        self.seen.open.fetch_add(1, Ordering::SeqCst);
        let (tokens, last, finish) = self.answer(&submission);
        self.seen.submissions.lock().unwrap().push(submission.clone());
        let (behaviour, seen) = (self.behaviour.clone(), Arc::clone(&self.seen));
        let request = Request { tokens, last, finish, next: 0, submission, behaviour, seen, ended: false };
        Box::pin(stream::unfold(request, |mut request| async move {
            let event = request.event().await?;
            Some((event, request))
        }))
    }
}

/// A server in front of a fake.
pub struct Running {
    server: Option<Server>,
    pub app: App,
    pub address: SocketAddr,
    pub seen: Arc<Seen>,
}

pub fn tokenizer() -> Tokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny");
    Tokenizer::open(&folder).unwrap().unwrap()
}

/// Limits so low that a test can reach them.
pub fn limits() -> Limits {
    Limits { queued_requests: 4, ..Limits::default() }
}

/// A server whose model is still loading.
pub fn loading(limits: Limits, key: Option<&str>) -> Running {
    let key = key.map(|key| ApiKey::new(key).unwrap());
    let server = Server::start("127.0.0.1", 0, key, limits).unwrap();
    Running { app: server.app(), address: server.address(), server: Some(server), seen: Arc::default() }
}

/// A server that accepts requests.
pub fn server(behaviour: Behaviour, limits: Limits, key: Option<&str>) -> Running {
    let running = loading(limits, key);
    running.load(behaviour);
    running
}

/// A server that accepts requests, with usual limits.
pub fn usual(behaviour: Behaviour) -> Running {
    server(behaviour, limits(), None)
}

impl Running {
    pub fn load(&self, behaviour: Behaviour) {
        let tokenizer = tokenizer();
        let can = behaviour.can;
        let seen = Arc::clone(&self.seen);
        let backend = Fake { behaviour, tokenizer: tokenizer.clone(), seen };
        let model = ModelInfo {
            name: NAME.into(),
            max_seq_len: 2000,
            vocab_size: 2048,
            max_batch: 2,
            defaults: Sampling::default(),
        };
        self.server.as_ref().unwrap().set_ready(Loaded {
            backend: Box::new(backend),
            model,
            capabilities: can,
            tokenizer: Some(tokenizer),
            template: Some(ChatTemplate::parse("chat_template.jinja".as_ref(), TEMPLATE).unwrap()),
        });
    }

    /// Makes it drain, and waits for its end.
    pub fn drain(mut self, patience: Duration) -> Outcome {
        self.app.go_on(Phase::Draining);
        self.server.take().unwrap().wait(patience)
    }

    /// Waits for an end with another cause.
    pub fn wait(mut self) -> Outcome {
        self.server.take().unwrap().wait(Duration::ZERO)
    }

    /// The last request that reached the fake.
    pub fn submission(&self) -> Submission {
        self.seen.submissions.lock().unwrap().last().unwrap().clone()
    }

    /// Waits until all requests have left the fake, for at most a few seconds.
    pub fn expect_idle(&self) {
        eventually("the engine is idle", || self.seen.open.load(Ordering::SeqCst) == 0);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            self.app.go_on(Phase::Ending);
            server.wait(Duration::ZERO);
        }
    }
}

/// Waits for `what`.
pub fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < Duration::from_secs(10), "not after 10 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

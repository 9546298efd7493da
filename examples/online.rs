//! Requests that come and go while the kernels run: `mpirun -n 2 target/release/examples/online MODEL [REQUESTS] [static|dynamic] [cpu|cuda]`.
//!
//! Rank 0 first runs a few dozen requests, each alone. Then several threads submit REQUESTS of them, with pauses, cancelled
//! requests and dropped handles, and compare all tokens. At the end no page is in use, and memory has not grown.

use launch::engine::config::BackendChoice;
use launch::engine::{Engine, Error, ErrorKind, Event, FinishReason, ModelSpec, Request, RunConfig};
use launch::model::model_json::{Kv, Overrides, Placement};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time without work after which the kernels end.
const IDLE_EXIT: Duration = Duration::from_millis(60);
/// Different requests.
const DIFFERENT: usize = 40;
/// Threads that submit.
const CALLERS: u64 = 4;
/// Maximum number of requests that a thread has open.
const OPEN: usize = 30;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Told(status)) => ExitCode::from(status as u8),
        Err(Failure::Wrong(text)) => {
            eprintln!("online: error: {text}");
            ExitCode::from(4)
        }
    }
}

enum Failure {
    /// The engine has reported it.
    Told(i32),
    Wrong(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        match error.kind() {
            ErrorKind::Full => Failure::Wrong(error.to_string()),
            _ => Failure::Told(error.exit_status()),
        }
    }
}

fn run() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let usage = || Failure::Wrong("usage: online MODEL [REQUESTS] [static|dynamic] [cpu|cuda]".into());
    let model = arguments.next().ok_or_else(usage)?;
    let count = arguments.next().map_or(Ok(200), |text| text.parse::<u64>().map_err(|_| usage()))?;
    let mut spec = ModelSpec::path(model);
    spec.overrides = Overrides {
        kv: Some(Kv::OnDemand),
        prefill_share: Some(0.05),
        placement: (arguments.next().as_deref() == Some("dynamic")).then_some(Placement::Dynamic),
        ..Overrides::default()
    };
    let cuda = arguments.next().as_deref() == Some("cuda");
    let config = RunConfig {
        backend: if cuda { BackendChoice::Cuda } else { BackendChoice::Cpu },
        logprobs: 1,
        max_waiting: 16,
        idle_exit: Some(IDLE_EXIT),
        tell: |text| eprintln!("online: error: {text}"),
        ..RunConfig::default()
    };
    let engine = Engine::load(spec, config)?;
    if engine.info().rank > 0 {
        return Ok(engine.serve()?);
    }
    let compared = compare(&engine, count);
    let status = i32::from(compared.is_err()) * 4;
    engine.shutdown_with_status(Duration::from_secs(60), status)?;
    compared
}

/// Random numbers from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 33) % end
    }
}

/// What has happened so far.
#[derive(Default)]
struct Counts {
    done: AtomicU64,
    full: AtomicU64,
    cancelled: AtomicU64,
    dropped: AtomicU64,
    /// KiB of the process when a quarter was done.
    early: AtomicU64,
}

fn compare(engine: &Engine, count: u64) -> Result<(), Failure> {
    let wrong = |text: String| Err(Failure::Wrong(text));
    let Some(limits) = engine.info().limits else {
        return wrong("a model is needed, not an op graph".into());
    };
    let mut random = Random(7);
    let longest = u64::from(limits.max_seq_len / 4).clamp(2, 40);
    // Prompts begin with one of three texts, so that a prefix cache finds something.
    let token = |random: &mut Random| random.below(limits.vocab_size.into()) as u32;
    let texts: Vec<Vec<u32>> = (0..3).map(|_| (0..longest).map(|_| token(&mut random)).collect()).collect();
    let requests: Vec<Request> = (0..DIFFERENT)
        .map(|_| {
            let mut prompt: Vec<u32> = (0..1 + random.below(longest)).map(|_| token(&mut random)).collect();
            let common = random.below(prompt.len() as u64 + 1) as usize;
            prompt[..common].copy_from_slice(&texts[random.below(3) as usize][..common]);
            let new = 1 + random.below(longest) as u32;
            Request { ignore_eos: true, logprobs: 1, ..Request::tokens(prompt, new) }
        })
        .collect();
    let alone = requests.iter().map(|request| Ok(engine.submit(request.clone())?.wait().tokens));
    let alone = alone.collect::<Result<Vec<_>, Failure>>()?;
    let mut hasher = DefaultHasher::new();
    alone.hash(&mut hasher);
    // Long enough for the kernels to end. The next request starts them again.
    std::thread::sleep(8 * IDLE_EXIT);
    if engine.stats().kernel_runs {
        return wrong("the kernel has not ended for lack of work".into());
    }
    let begin = Instant::now();
    let first = engine.submit(requests[0].clone())?;
    let Some(Event::Token(_)) = first.recv() else { return wrong("no token after a pause".into()) };
    let restarted = begin.elapsed();
    drop(first);
    let counts = Counts::default();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let (requests, alone, counts) = (&requests, &alone, &counts);
                let share = (count + CALLERS - 1 - caller) / CALLERS;
                scope.spawn(move || call(engine, requests, alone, counts, Random(caller), share, count))
            })
            .collect();
        callers
            .into_iter()
            .try_for_each(|caller| caller.join().unwrap_or_else(|_| wrong("a thread has panicked".into())))
    })?;
    let took = begin.elapsed();
    engine.wait_idle();
    let stats = engine.stats();
    let (early, late) = (counts.early.load(Ordering::Relaxed), resident());
    println!(
        "online: ok, {count} requests in {:.1} s, {} tokens, {} cancelled, {} dropped, {} times full, {} preemptions, {} launches, first token after a pause {:.2} ms, memory {} to {} MiB, {} of {} prompt tokens found in the prefix cache, {} pages given up, tokens alone {:016x}",
        took.as_secs_f64(),
        stats.new_tokens,
        counts.cancelled.load(Ordering::Relaxed),
        counts.dropped.load(Ordering::Relaxed),
        counts.full.load(Ordering::Relaxed),
        stats.preemptions,
        stats.launches,
        restarted.as_secs_f64() * 1e3,
        early / 1024,
        late / 1024,
        stats.prefix_hits,
        stats.prefix_queries,
        stats.prefix_evictions,
        hasher.finish()
    );
    let all = DIFFERENT as u64 + 1 + count;
    if stats.kv_pages_used != 0 || stats.running != 0 || stats.waiting != 0 || stats.finished.total() != all {
        return wrong(format!("something is left or lost: {all} requests, {stats:?}"));
    }
    // The growth that a leak of a hundred bytes per request would cause.
    if late > early + 4096 + count / 10 {
        return wrong(format!("memory has grown from {early} to {late} KiB"));
    }
    Ok(())
}

/// One thread's requests.
fn call(
    engine: &Engine,
    requests: &[Request],
    alone: &[Vec<u32>],
    counts: &Counts,
    mut random: Random,
    share: u64,
    all: u64,
) -> Result<(), Failure> {
    let mut open = Vec::new();
    let add = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed) + 1;
    let mut submitted = 0;
    while submitted < share || !open.is_empty() {
        if submitted < share && open.len() < OPEN {
            let index = random.below(requests.len() as u64) as usize;
            match engine.submit(requests[index].clone()) {
                Ok(handle) => {
                    submitted += 1;
                    match random.below(10) {
                        0 => handle.cancel(),
                        // A client that leaves, at once or in the middle.
                        1 => {
                            if random.below(2) == 0 {
                                handle.recv();
                            }
                            drop(handle);
                            add(&counts.dropped);
                            done(counts, all);
                            continue;
                        }
                        _ => {}
                    }
                    open.push((index, handle));
                    if random.below(4) == 0 {
                        std::thread::sleep(Duration::from_micros(random.below(2000)));
                    }
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Full => {
                    add(&counts.full);
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(error) => return Err(error.into()),
            }
        }
        if open.is_empty() {
            continue;
        }
        let (index, handle) = open.swap_remove(random.below(open.len() as u64) as usize);
        let answer = handle.wait();
        let wanted = &alone[index];
        let right = match answer.reason {
            FinishReason::Cancelled => wanted.starts_with(&answer.tokens),
            FinishReason::Length => answer.tokens == *wanted,
            _ => false,
        };
        if !right || answer.logprobs.iter().zip(&answer.tokens).any(|(best, &token)| best[0].0 != token) {
            return Err(Failure::Wrong(format!("request {index}: {answer:?}, alone {wanted:?}")));
        }
        if answer.reason == FinishReason::Cancelled {
            add(&counts.cancelled);
        }
        done(counts, all);
    }
    Ok(())
}

/// One more request is over.
fn done(counts: &Counts, all: u64) {
    if counts.done.fetch_add(1, Ordering::Relaxed) + 1 == all.div_ceil(4) {
        counts.early.store(resident(), Ordering::Relaxed);
    }
}

/// Memory that the process uses, in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

//! Requests that come and go while the kernels run: `mpirun -n 2 target/release/examples/online MODEL [REQUESTS] [static|dynamic]`.
//!
//! Rank 0 first runs each request alone, then all of them again from several threads with pauses, cancels and pushed-back
//! submissions, and compares the tokens. Between the two the kernels end for lack of work and begin again.

use distributed::online::{Client, Event, SubmitError, service};
use distributed::plan::{BatchPlan, Finish, Mode, Request, Sampling, ServePlan};
use distributed::{WatchOptions, World};
use launch::engine::Error;
use launch::engine::agreement::together;
use launch::engine::backend::Backend;
use launch::engine::config::{BackendChoice, RunConfig};
use launch::engine::graphs::{build_options, build_together};
use launch::engine::launch::{load, run_options};
use launch::model::app_error::AppError;
use launch::model::families::{self, GraphOptions};
use launch::model::fill::ModelValues;
use launch::model::model_json::Placement;
use launch::model::model_path;
use launch::model::model_source::ModelSource;
use launch::model::not_numbers::NotNumbers;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The kernels end after so long without work.
const IDLE_EXIT: Duration = Duration::from_millis(60);

fn main() -> ExitCode {
    let options =
        WatchOptions { deadline: Duration::from_secs(30), tell: |text| eprintln!("{text}"), fault: None };
    let world = match World::init(options) {
        Ok(world) => world,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(3);
        }
    };
    let status = match run(&world) {
        Ok(()) => 0,
        Err(error) => {
            if world.rank() == 0 {
                eprintln!("online: error: {error}");
            }
            error.exit_status() as u8
        }
    };
    world.finalize();
    ExitCode::from(status)
}

fn run(world: &World) -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let usage = || AppError::input("usage: online MODEL [REQUESTS] [static|dynamic]");
    let path = together(world, arguments.next().ok_or_else(usage))?;
    let requests = arguments.next().map_or(Ok(40), |text| text.parse::<usize>().map_err(|_| usage()));
    let requests = together(world, requests)?;
    let mut model = together(world, model_path::open(path.as_ref()).map_err(AppError::from))?;
    if arguments.next().as_deref() == Some("dynamic") {
        model.runtime.placement = Placement::Dynamic;
    }
    let source = match together(world, ModelSource::open(&model).map_err(AppError::from))? {
        ModelSource::Model(source) => source,
        ModelSource::Graph { .. } => {
            together(world, Err(AppError::input("a model is needed, not an op graph")))?
        }
    };
    let config = RunConfig { backend: BackendChoice::Cpu, ..RunConfig::default() };
    let backend = Backend::choose(world, &config, None)?;
    let target = backend.target(world, &model)?;
    let sizes = together(world, model.sizes_on(&source.config, &target).map_err(AppError::from))?;
    let options = GraphOptions::new(&source.config, model.runtime.embedding, 1, world.size(), &target);
    let ops = families::op_graphs(&source.config, &sizes, &options);
    let graphs = build_together(world, &ops, &build_options(&config, &model, world.size(), target))?;
    let plan = BatchPlan {
        max_batch: sizes.max_batch,
        max_seq_len: sizes.max_seq_len,
        page_size: sizes.page_size,
        num_pages: sizes.num_pages,
        top_k: 1,
        eos: Vec::new(),
        requests: Vec::new(),
        mode: Mode::Serve(ServePlan {
            idle_exit: Some(IDLE_EXIT),
            prefill_rows: 4,
            kv_on_demand: true,
            ..ServePlan::new(sizes.max_batch, sizes.max_seq_len)
        }),
    };
    let run_options = together(world, run_options(&config, &[]))?;
    let threads = backend.readers();
    let mut rank = backend.rank(world, &config, graphs, plan.clone(), &run_options)?;
    let not_numbers = NotNumbers::default();
    let values = ModelValues { config: &source.config, weights: &source.weights, not_numbers: &not_numbers };
    let filled = load(world, &mut rank, threads, &config, &values);
    together(world, filled)?;
    world.phase("serving");
    let vocabulary = source.config.vocab_size;
    let served = if world.rank() == 0 {
        let Some((client, service)) = service(&plan) else { unreachable!("the plan's mode is to serve") };
        let user = std::thread::spawn(move || use_it(&client, requests, vocabulary, plan.max_seq_len));
        let served = rank.lead(world, service).map_err(AppError::from);
        let used = user.join().unwrap_or_else(|_| Err("the user's thread has panicked".into()));
        served.and_then(|()| used.map_err(AppError::failed))
    } else {
        rank.follow(world).map_err(AppError::from)
    };
    together(world, served)?;
    together(world, rank.free(world).map_err(AppError::from))
}

/// Numbers from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 33) % end
    }
}

/// Submits until it is taken; counts how often there was no room.
fn submit(client: &Client, request: &Request, full: &mut u32) -> Result<distributed::online::Handle, String> {
    loop {
        match client.submit(request.clone()) {
            Ok(handle) => return Ok(handle),
            Err(SubmitError::Full { .. }) => {
                *full += 1;
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// All tokens of a request, and its end.
fn finish(mut handle: distributed::online::Handle) -> Result<(Vec<i32>, Finish), String> {
    let mut tokens = Vec::new();
    while let Some(event) = handle.wait_next() {
        match event {
            Event::Token(token) if token.logprobs.first().is_some_and(|&(id, _)| id == token.id) => {
                tokens.push(token.id)
            }
            Event::Token(token) => return Err(format!("token {} without its log-probability", token.id)),
            Event::Finished(why) => return Ok((tokens, why)),
            Event::Lost(reason) => return Err(reason),
        }
    }
    Err("a stream without an end".into())
}

fn use_it(client: &Client, count: usize, vocabulary: u32, max_seq_len: u32) -> Result<(), String> {
    let result = compare(client, count, vocabulary, max_seq_len);
    client.shutdown();
    result
}

fn compare(client: &Client, count: usize, vocabulary: u32, max_seq_len: u32) -> Result<(), String> {
    let mut random = Random(7);
    let longest = u64::from(max_seq_len / 4).clamp(2, 40);
    let requests: Vec<Request> = (0..count)
        .map(|_| Request {
            prompt: (0..1 + random.below(longest)).map(|_| random.below(vocabulary.into()) as i32).collect(),
            max_new_tokens: 1 + random.below(longest) as u32,
            sampling: Sampling::default(),
        })
        .collect();
    let mut full = 0;
    let alone = requests
        .iter()
        .map(|request| finish(submit(client, request, &mut full)?).map(|(tokens, _)| tokens))
        .collect::<Result<Vec<_>, String>>()?;
    // Long enough for the kernels to end. The next request starts them again.
    std::thread::sleep(5 * IDLE_EXIT);
    let before = client.stats();
    if before.kernel_runs {
        return Err("the kernel has not ended for lack of work".into());
    }
    let begin = Instant::now();
    let mut first = submit(client, &requests[0], &mut full)?;
    let Some(Event::Token(_)) = first.next_within(Duration::from_secs(10)) else {
        return Err("no token after a pause".into());
    };
    let restarted = begin.elapsed();
    drop(first); // which cancels it
    let (mut open, mut cancelled) = (Vec::new(), 0);
    for (index, request) in requests.iter().enumerate() {
        let handle = submit(client, request, &mut full)?;
        if random.below(5) == 0 {
            handle.cancel();
        }
        open.push((index, handle));
        if random.below(4) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(3000)));
        }
    }
    for (index, handle) in open {
        let (tokens, why) = finish(handle)?;
        let wanted = &alone[index];
        cancelled += u32::from(why == Finish::Cancelled);
        if (why == Finish::Cancelled && !wanted.starts_with(&tokens))
            || (why != Finish::Cancelled && tokens != *wanted)
        {
            return Err(format!("request {index}: {tokens:?}, alone {wanted:?}"));
        }
    }
    std::thread::sleep(Duration::from_millis(5));
    let stats = client.stats();
    let figures = stats.figures;
    println!(
        "online: ok, {} requests, {} tokens, {cancelled} cancelled, {full} times full, {} preemptions, {} launches, first token after a pause {:.2} ms",
        stats.submitted,
        stats.tokens,
        figures.preemptions,
        stats.launches,
        restarted.as_secs_f64() * 1e3
    );
    if figures.free_pages != stats.pages || figures.running != 0 || figures.waiting != 0 {
        return Err(format!("something is left: {stats:?}"));
    }
    Ok(())
}

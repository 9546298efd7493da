//! Requests in rounds: what waits when a round begins is the admission log of one launch, and the next round begins when
//! something waits. Weights, heap, graphs and the compiled kernel stay where they are between rounds.
//!
//! This is the only file that knows of rounds. Rank 0 decides what a round holds and sends it to the others; every rank then
//! does the same until the round is over.

use crate::engine::agreement::together;
use crate::engine::config::RunConfig;
use crate::engine::error::Error;
use crate::engine::handle::{Channel, FinishReason};
use crate::engine::launch::launch;
use crate::engine::loaded::{Info, Loaded, Work};
use crate::engine::queue::{GraphJob, Next, Pending, Queue};
use crate::engine::sampling::SamplingParams;
use crate::engine::text::{Produced, RequestText};
use crate::engine::trace;
use crate::engine::user_graph::{GraphRun, UserGraph};
use crate::model::app_error::AppError;
use distributed::plan::{BatchPlan, Finish, Request};
use distributed::{Common, Rank, World};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;
use xxhash_rust::xxh3::Xxh3Default;

/// How often an idle engine looks whether all ranks are there.
const IDLE_LOOK: Duration = Duration::from_millis(200);
/// Longest that a rank waits for the others after one is lost.
const GRACE: Duration = Duration::from_secs(2);

/// What rank 0 has the others do.
#[derive(Serialize, Deserialize)]
enum Message {
    /// A launch with these requests.
    Round { requests: Vec<Entry>, ignore_eos: bool },
    /// A launch of a graph of one's own.
    Graph { iterations: u32 },
    /// The end, with this status.
    End { status: i32 },
}

/// A request of a round.
#[derive(Serialize, Deserialize)]
struct Entry {
    prompt: Vec<i32>,
    max_new_tokens: u32,
    sampling: SamplingParams,
}

/// What rank 0 does with a message beside what all ranks do.
enum Own {
    Requests(Vec<Pending>),
    Graph(GraphJob),
    Nothing,
}

/// Collective: until rank 0 ends it.
///
/// # Errors
/// A launch that failed, or the status with which rank 0 ended.
pub(crate) fn serve(
    world: &World,
    config: &RunConfig,
    loaded: &mut Loaded,
    queue: &Queue,
    text: &Sender<Produced>,
) -> Result<(), Error> {
    let mut launched = false;
    let ended = loop {
        world.phase("the next requests");
        let (message, own) = if world.rank() == 0 { next(world, queue) } else { (Vec::new(), Own::Nothing) };
        let message = world.broadcast(0, message);
        let message = serde_json::from_slice(&message);
        let message = message.map_err(|e| AppError::failed(format!("a message of rank 0: {e}")))?;
        let Loaded { rank, work, info } = &mut *loaded;
        match (message, work) {
            (Message::End { status: 0 }, _) => break Ok(()),
            (Message::End { .. }, _) if world.rank() == 0 => break Ok(()),
            (Message::End { status }, _) => {
                break Err(Error::at_rank(0, status, "the program has ended the run".into()));
            }
            (Message::Round { requests, ignore_eos }, Work::Tokens(plan)) => {
                let prompt: usize = requests.iter().map(|entry| entry.prompt.len()).sum();
                queue.counters.change(|stats| stats.prompt_tokens += prompt as u64);
                let new = round(world, config, rank, plan, info, requests, ignore_eos, own, text)?;
                queue.counters.round(rank.timing(), new as u64);
            }
            (Message::Graph { iterations }, Work::Graph(graph)) => {
                graph_round(world, config, rank, graph, iterations, own)?;
            }
            // `submit` and `run_graph` ask for what the engine has.
            _ => return Err(AppError::failed("a message that does not fit the model").into()),
        }
        launched = true;
    };
    if launched {
        trace::write(world, config.trace.as_deref(), &loaded.rank)?;
    }
    ended
}

/// Rank 0: waits for work, with an eye on the other ranks.
fn next(world: &World, queue: &Queue) -> (Vec<u8>, Own) {
    let next = world.idle(|| {
        loop {
            match queue.next(IDLE_LOOK) {
                Next::Nothing => {
                    if let Some(lost) = world.lost() {
                        break Err(lost);
                    }
                }
                next => break Ok(next),
            }
        }
    });
    let (message, own) = match next {
        Ok(Next::Requests(requests)) => {
            let entry = |pending: &Pending| Entry {
                prompt: pending.prompt.iter().map(|&token| token as i32).collect(),
                max_new_tokens: pending.max_new_tokens,
                sampling: pending.request.sampling,
            };
            let message = Message::Round {
                requests: requests.iter().map(entry).collect(),
                ignore_eos: requests.first().is_some_and(|p| p.request.ignore_eos),
            };
            (message, Own::Requests(requests))
        }
        Ok(Next::Graph(job)) => (Message::Graph { iterations: job.iterations }, Own::Graph(job)),
        Ok(Next::End(status)) => (Message::End { status }, Own::Nothing),
        // The loop above goes on.
        Ok(Next::Nothing) => (Message::End { status: 4 }, Own::Nothing),
        Err(lost) => {
            world.tell(&lost);
            // The watch ends the process: the rank does not come.
            world.barrier_within(GRACE);
            (Message::End { status: 4 }, Own::Nothing)
        }
    };
    // Numbers and lists of numbers can always be written.
    (serde_json::to_vec(&message).unwrap_or_default(), own)
}

/// Collective: one launch with these requests; gives the number of new tokens.
#[expect(clippy::too_many_arguments, reason = "what a round is made of")]
fn round(
    world: &World,
    config: &RunConfig,
    rank: &mut Rank,
    plan: &BatchPlan,
    info: &Info,
    requests: Vec<Entry>,
    ignore_eos: bool,
    own: Own,
    text: &Sender<Produced>,
) -> Result<usize, Error> {
    let eos = if ignore_eos { Vec::new() } else { info.eos.iter().map(|&id| id as i32).collect() };
    let requests: Vec<Request> = requests
        .into_iter()
        .map(|Entry { prompt, max_new_tokens, sampling }| Request {
            prompt,
            max_new_tokens,
            sampling: sampling.into(),
        })
        .collect();
    let count = requests.len();
    world.phase("memory for requests");
    let plan = BatchPlan { eos, requests, ..plan.clone() };
    together(world, rank.restart(&plan).map_err(AppError::from))?;
    let pending = match own {
        Own::Requests(pending) => pending,
        _ => Vec::new(),
    };
    let mut readers: Vec<Reader> = pending.into_iter().map(|p| Reader::begin(p, info, text)).collect();
    launch(world, rank, config.deadline, |common| {
        readers.iter_mut().enumerate().for_each(|(index, reader)| reader.look(index, common, text));
    })?;
    world.phase("results");
    together(world, same_on_all_ranks(world, rank, count))?;
    Ok((0..count).map(|index| rank.tokens(index, 0).0.len()).sum())
}

/// Collective: one launch of a graph of one's own.
fn graph_round(
    world: &World,
    config: &RunConfig,
    rank: &mut Rank,
    graph: &UserGraph,
    iterations: u32,
    own: Own,
) -> Result<(), Error> {
    let result: Result<GraphRun, Error> = graph.run(world, rank, config.deadline, iterations);
    if let Own::Graph(job) = own {
        // Who asked may be gone.
        let _ = job.reply.send(result.clone());
    }
    result.map(drop)
}

/// Follows a request's outputs, on rank 0.
struct Reader {
    id: u64,
    channel: Arc<Channel>,
    logprobs: usize,
    /// Tokens that have been handed on.
    seen: usize,
    over: bool,
}

impl Reader {
    fn begin(pending: Pending, info: &Info, text: &Sender<Produced>) -> Reader {
        let Pending { id, request, channel, .. } = pending;
        let eos = if request.ignore_eos { Vec::new() } else { info.eos.clone() };
        let logprobs = request.logprobs as usize;
        let tokenizer = info.tokenizer.as_ref();
        let decoded =
            RequestText::new(channel.clone(), tokenizer, &request.stop, eos, request.stop_token_ids);
        // The thread of texts lives as long as this one.
        let _ = text.send(Produced::Begin(id, Box::new(decoded)));
        Reader { id, channel, logprobs, seen: 0, over: false }
    }

    /// Hands on what is new. Tokens of a request that is over, cancelled or at a stop string, are dropped.
    fn look(&mut self, index: usize, common: &Common, text: &Sender<Produced>) {
        if self.over {
            return;
        }
        if self.channel.is_over() {
            self.over = true;
            return;
        }
        let (tokens, finish) = common.tokens(index, self.seen);
        if !tokens.is_empty() {
            let tops = common.logprobs(index, self.seen..self.seen + tokens.len(), self.logprobs);
            let mut tops = tops.into_iter();
            let new = tokens.iter().map(|&id| (id as u32, tops.next().unwrap_or_default())).collect();
            self.seen += tokens.len();
            let _ = text.send(Produced::Tokens(self.id, new));
        }
        let reason = match finish {
            None => return,
            Some(Finish::Length) => FinishReason::Length,
            Some(Finish::Eos) => FinishReason::Eos,
            Some(Finish::Cancelled) => FinishReason::Cancelled,
        };
        self.over = true;
        let _ = text.send(Produced::End(self.id, reason));
    }
}

/// Collective: every rank has computed the same tokens and the same bits of their log-probabilities.
fn same_on_all_ranks(world: &World, rank: &Rank, requests: usize) -> Result<(), AppError> {
    let mut hash = Xxh3Default::new();
    for index in 0..requests {
        let output = rank.request_output(index);
        hash.update(&(output.tokens.len() as u64).to_le_bytes());
        hash.update(bytemuck::cast_slice(&output.tokens));
        for &(token, logprob) in output.logprobs.iter().flatten() {
            hash.update(&token.to_le_bytes());
            hash.update(&logprob.to_bits().to_le_bytes());
        }
    }
    let hashes = world.all_gather(hash.digest());
    match hashes.iter().position(|h| *h != hashes[0]) {
        None => Ok(()),
        Some(other) => Err(AppError::failed(format!("ranks 0 and {other} computed different results"))),
    }
}

//! What every rank does around the kernel: load the weights, launch, end.

use crate::engine::config::RunConfig;
use crate::engine::error::Error;
use crate::model::app_error::AppError;
use distributed::fill::TensorSource;
use distributed::plan::{RunOptions, Stall};
use distributed::{Rank, World};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a rank that ended early waits for the other ranks' reports.
const REPORT_GRACE: Duration = Duration::from_secs(2);

/// The options of a run, as the ranks need them. `ops` are the operator names that a stall may use.
pub fn run_options(config: &RunConfig, ops: &[String]) -> Result<RunOptions, AppError> {
    let stall = config.stall.as_deref().map(|text| parse_stall(text, ops)).transpose()?;
    Ok(RunOptions {
        deadline: config.deadline,
        trace: config.trace.is_some(),
        stall,
        probe: config.probe.clone(),
    })
}

fn parse_stall(text: &str, ops: &[String]) -> Result<Stall, AppError> {
    let error = || AppError::input(format!("RunConfig::stall {text}: expected RANK:OP:MS, such as 1:qkv:50"));
    let mut fields = text.splitn(3, ':');
    let mut field = || fields.next().ok_or_else(error);
    let rank = field()?.parse().map_err(|_| error())?;
    let op = field()?;
    let op = match op.parse() {
        Ok(index) => index,
        Err(_) => ops.iter().position(|o| o == op).ok_or_else(error)? as u32,
    };
    let time = Duration::from_millis(field()?.parse().map_err(|_| error())?);
    Ok(Stall { rank, op, time })
}

/// Fills the weights and returns the time that it took. Rank 0 reports its progress, which stands for all ranks.
pub fn load(
    world: &World,
    rank: &mut Rank,
    threads: usize,
    config: &RunConfig,
    source: &impl TensorSource<Error = AppError>,
) -> Result<Duration, AppError> {
    let begin = Instant::now();
    let total = rank.constant_bytes();
    let progress = config.progress.as_ref().filter(|_| world.rank() == 0);
    let told = AtomicU64::new(0);
    let tell = |bytes: u64| {
        if let Some(progress) = progress {
            told.fetch_add(bytes, Ordering::Relaxed);
            (progress.0)(bytes, total);
        }
    };
    let result = rank.fill(threads, source, tell);
    // The total also counts what is not loaded, such as padding.
    if result.is_ok() {
        tell(total.saturating_sub(told.load(Ordering::Relaxed)));
    }
    let took = begin.elapsed();
    let (bytes, seconds) = (total as f64 / 1e9, took.as_secs_f64());
    tracing::info!("weights: {bytes:.3} GB in {seconds:.2} s, {:.2} GB/s", bytes / seconds.max(1e-9));
    result.map(|()| took)
}

/// Collective: runs a user graph. If the run ends early, this rank reports why (see [`World::tell`]), unless another one does.
pub fn launch(world: &World, rank: &mut Rank, deadline: Duration) -> Result<(), Error> {
    world.phase("the run");
    let result = rank.run(world);
    if let Err(error) = &result
        && !matches!(error, distributed::Error::AtRank { .. })
    {
        world.tell(&error.whole());
    }
    ended(world, deadline, result)
}

/// Collective, after the kernel: whether the run succeeded on all ranks. A rank that no longer answers is given its own deadline; then
/// the job is ended.
pub fn ended(world: &World, deadline: Duration, result: distributed::Result<()>) -> Result<(), Error> {
    if result.is_err() {
        // The reason has been reported.
        kernels_cu::signals::end_on_signal();
    }
    let limit = if result.is_ok() { deadline + REPORT_GRACE } else { REPORT_GRACE };
    world.phase("the end of the run");
    world.barrier_within(limit);
    match (world.agree(result.as_ref().map_or_else(|e| e.exit_status(), |()| 0)), result) {
        (None, _) => Ok(()),
        (Some(_), Err(error)) => Err(AppError::from(error).into()),
        (Some((rank, status)), Ok(())) => Err(Error::at_rank(rank, status, "the run failed".into())),
    }
}

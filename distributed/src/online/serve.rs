//! The loop of every serving rank: launches the kernel when it is needed, and runs the host's work beside it.

use super::target::Target;
use super::wire::Wire;
use crate::bell::Bell;
use crate::control_writer::ControlWriter;
use crate::error::{Error, Result};
use crate::urgency::Urgent;
use crate::world::World;
use kernels_cu::signals;
use std::time::{Duration, Instant};

/// What a host asks of the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Nothing,
    /// No kernel runs, and all ranks must launch one.
    Launch,
    /// Serving has ended.
    Leave,
}

/// A host's work.
pub(super) trait Host<T> {
    /// Checks everything once, then waits a little. `running` means that this rank's kernel has not ended.
    fn turn(&mut self, target: &T, running: bool) -> Result<Wish>;
    /// This rank's kernel has ended as it was told to.
    fn left(&mut self) -> Result<()>;
    /// Serving ends with this error on this rank. Tells the other ranks.
    fn failed(&mut self, error: &Error);
    fn wire(&mut self) -> &mut Wire;
}

/// How long this host has waited for an answer of another host. Time in which this process was stopped does not count.
#[derive(Debug, Default)]
pub(super) struct Owed(Option<(Instant, Duration)>);

impl Owed {
    /// No answer is awaited, or something has arrived.
    pub fn reset(&mut self) {
        self.0 = None;
    }

    /// Called at every turn while an answer of rank `rank` is awaited.
    ///
    /// # Errors
    /// The answer has been awaited for longer than `deadline`.
    pub fn check(&mut self, rank: usize, deadline: Duration) -> Result<()> {
        /// Longer than a turn takes.
        const MOST: Duration = Duration::from_millis(50);
        let (last, waited) = self.0.unwrap_or((Instant::now(), Duration::ZERO));
        let waited = waited + last.elapsed().min(MOST);
        self.0 = Some((Instant::now(), waited));
        if waited <= deadline {
            return Ok(());
        }
        let seconds = deadline.as_secs_f64();
        Err(Error::Aborted(format!(
            "rank {rank} has not answered for {seconds} s (RunConfig::deadline): it is stopped, or lost"
        )))
    }
}

/// How long a rank that has failed waits for the others.
const REPORT_GRACE: Duration = Duration::from_secs(2);
/// Time for the last messages to be sent.
const FLUSH: Duration = Duration::from_millis(500);
/// The memory for the next launch is written within this time, unless the device does not answer.
const WRITTEN: Duration = Duration::from_secs(5);

/// Collective: serves until the host leaves or an error occurs.
///
/// Every rank ends with one meeting of all ranks ([`World::part`]), wherever it fails: while no kernel runs, when it is about to launch, or
/// later. If other ranks launch at that time, their meeting before the launch is the same one. So no rank is a meeting ahead of the others.
pub(super) fn serve<T: Target>(
    target: &mut T,
    world: &World,
    bell: Bell,
    host: &mut impl Host<T>,
) -> Result<()> {
    let mut parted = false;
    let result = serve_alone(target, world, bell, host, &mut parted);
    if !parted {
        if result.is_err() {
            // The reason has been reported.
            signals::end_on_signal();
        }
        world.phase("the end of the run");
        let limit = match &result {
            Ok(()) => target.deadline() + REPORT_GRACE,
            Err(_) => REPORT_GRACE,
        };
        world.part(limit, result.as_ref().err());
    }
    result
}

/// As [`serve`], up to its last meeting. `parted` is set if the meeting before a launch was the last one.
fn serve_alone<T: Target>(
    target: &mut T,
    world: &World,
    bell: Bell,
    host: &mut impl Host<T>,
    parted: &mut bool,
) -> Result<()> {
    // The bell is in memory of the target, which outlives this call.
    let _rung = world.proxy().map(|proxy| proxy.set_bell(bell));
    let _noted = signals::note();
    let _urgent = Urgent::begin();
    // The wait for requests has no limit, so the kernel's deadline applies here, not the watch's.
    let result = world.run_kernel(|| run(target, world, host, parted));
    if let Err(error) = &result {
        // A rank reports its own error. Rank 0 reports other ranks' errors too, because it has the requests.
        if world.rank() == 0 || !matches!(error, Error::AtRank { .. }) {
            world.tell(&error.whole());
        }
        host.failed(error);
    }
    let begin = Instant::now();
    while !host.wire().is_idle() && begin.elapsed() < FLUSH {
        // Drives the messages that are on their way. Incoming messages are no longer needed.
        if host.wire().receive().is_err() {
            break;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    result
}

fn run<T: Target>(target: &mut T, world: &World, host: &mut impl Host<T>, parted: &mut bool) -> Result<()> {
    for launches in 0u64.. {
        world.set_idle(true);
        loop {
            match host.turn(target, false)? {
                Wish::Nothing => {}
                Wish::Launch => break,
                Wish::Leave => return Ok(()),
            }
            if let Some(lost) = world.lost_rank() {
                return Err(Error::Aborted(lost));
            }
            if world.is_stopping() {
                return Err(Error::Aborted(
                    "the run was ended, by a signal, a shutdown or another rank, while no kernel ran".into(),
                ));
            }
        }
        world.set_idle(false);
        let begin = Instant::now();
        let prepared = if launches > 0 { reset(target) } else { Ok(()) };
        let agree = |ready: Result<()>| {
            let all = world.begin_launch(prepared.and(ready));
            *parted = all.is_err();
            all
        };
        target.launch(world, agree, |target| {
            host.turn(target, true)?;
            world.set_idle(is_idle(target));
            Ok(world.is_stopping())
        })?;
        tracing::debug!("launch {launches} has ended after {:.3} s", begin.elapsed().as_secs_f64());
        host.left()?;
    }
    Ok(())
}

/// True if this rank's kernel has no request. The hosts' deadline applies to requests that it is about to get.
pub(super) fn is_idle(target: &impl Target) -> bool {
    let figures = target.outputs().figures();
    figures.running == 0 && figures.waiting == 0
}

/// Prepares a rank's memory for another launch. All ranks' kernels have ended, and rank 0 has been told so by each.
fn reset<T: Target>(target: &T) -> Result<()> {
    let writer = target.writer();
    target.control().reset(&writer)?;
    let begin = Instant::now();
    while !writer.is_written()? {
        if begin.elapsed() > WRITTEN {
            return Err(Error::Aborted("the device does not accept the memory of the next launch".into()));
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(())
}

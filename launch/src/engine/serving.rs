//! What the engine's thread does after loading: it serves requests (`distributed::online`), or it runs a user graph, which all
//! ranks start together.

use crate::engine::config::RunConfig;
use crate::engine::error::Error;
use crate::engine::launch::ended;
use crate::engine::life::{GraphJob, Life, Next};
use crate::engine::trace;
use crate::engine::user_graph::UserGraph;
use crate::model::app_error::AppError;
use distributed::online::Service;
use distributed::{Rank, World};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How often an idle engine checks that all ranks are still there.
const IDLE_LOOK: Duration = Duration::from_millis(200);

/// Collective: serves requests until rank 0 ends the service. Returns the status that rank 0 ended it with. `service` is present
/// on rank 0.
///
/// # Errors
/// The run failed.
pub(crate) fn requests(
    world: &World,
    config: &RunConfig,
    rank: &mut Rank,
    service: Option<Service>,
    life: &Life,
) -> Result<i32, Error> {
    world.phase("requests");
    let served = match service {
        Some(service) => rank.lead(world, service),
        None => rank.follow(world),
    };
    ended(world, config.deadline, served)?;
    trace::write(world, config, rank)?;
    let status = world.broadcast(0, life.status().to_ne_bytes().to_vec());
    Ok(i32::from_ne_bytes(status.try_into().unwrap_or_default()))
}

/// Ends a successful run with the status of rank 0's program. Called after everything that ranks do together.
pub(crate) fn end(world: &World, status: i32) -> Result<(), Error> {
    if status == 0 || world.rank() == 0 {
        return Ok(());
    }
    Err(Error::at_rank(0, status, "the program has ended the run".into()))
}

/// What rank 0 tells the others to do with a graph.
#[derive(Serialize, Deserialize)]
enum Message {
    Run { iterations: u32 },
    End { status: i32 },
}

/// Collective: runs a graph as often as rank 0 is asked to, until the end. Returns the status that rank 0 ended with.
///
/// # Errors
/// A run failed.
pub(crate) fn graphs(
    world: &World,
    config: &RunConfig,
    rank: &mut Rank,
    graph: &UserGraph,
    life: &Life,
) -> Result<i32, Error> {
    let mut launched = false;
    loop {
        world.phase("the next run");
        let (message, job) = if world.rank() == 0 { next(world, life) } else { (Vec::new(), None) };
        let message = world.broadcast(0, message);
        let message = serde_json::from_slice(&message);
        match message.map_err(|e| AppError::failed(format!("a message of rank 0: {e}")))? {
            Message::Run { iterations } => {
                let result = graph.run(world, rank, config.deadline, iterations);
                if let Some(job) = job {
                    // The caller may be gone.
                    let _ = job.reply.send(result.clone());
                }
                result?;
                launched = true;
            }
            Message::End { status } => {
                if launched {
                    trace::write(world, config, rank)?;
                }
                return Ok(status);
            }
        }
    }
}

/// On rank 0: waits for work, and watches the other ranks meanwhile.
fn next(world: &World, life: &Life) -> (Vec<u8>, Option<GraphJob>) {
    let next = world.idle(|| {
        loop {
            match life.next(IDLE_LOOK) {
                Next::Nothing => {
                    if let Some(lost) = world.lost() {
                        break Err(lost);
                    }
                }
                next => break Ok(next),
            }
        }
    });
    let (message, job) = match next {
        Ok(Next::Graph(job)) => (Message::Run { iterations: job.iterations }, Some(job)),
        Ok(Next::End(status)) => (Message::End { status }, None),
        // The loop above continues.
        Ok(Next::Nothing) => (Message::End { status: 4 }, None),
        Err(lost) => {
            world.tell(&lost);
            // The watch ends the process when it waits for the lost rank, at the message below. No other meeting may come before it: the
            // ranks that are left wait for this one.
            (Message::End { status: 4 }, None)
        }
    };
    // Serialising numbers cannot fail.
    (serde_json::to_vec(&message).unwrap_or_default(), job)
}

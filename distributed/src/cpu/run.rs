//! The launch: one thread per worker and scheduler, while the host watches.

use crate::affinity::bind;
use crate::cpu::CpuRank;
use crate::error::{Error, Result};
use crate::nodes::Carried;
use crate::report::{outcome, report};
use crate::world::World;
use kernels_cu::abi;
use kernels_cu::signals;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the host checks for signals. It sleeps in between, so that it does not take a worker's core.
const LOOK: Duration = Duration::from_millis(2);
/// How often it checks while it waits for data from other nodes.
const SHORT: Duration = Duration::from_micros(50);
/// The loops of other ranks end within this time after this rank's loops, which have taken part in their last iteration.
const AFTERWARDS: Duration = Duration::from_secs(60);

/// The threads of a rank's loops. They end before the rank's memory goes away, even if the host's thread panics.
struct Loops<'a> {
    control: &'a CpuRank,
    handles: Vec<JoinHandle<()>>,
}

impl Loops<'_> {
    fn join(&mut self) {
        for handle in self.handles.drain(..) {
            if handle.join().is_err() {
                self.control.abort(abi::MPK_ABORT_KERNEL);
            }
        }
    }
}

impl Drop for Loops<'_> {
    fn drop(&mut self) {
        if !self.handles.is_empty() {
            self.control.abort(abi::MPK_ABORT_KERNEL);
            self.join();
        }
    }
}

/// An `mpk_rank` that the loops share.
#[derive(Clone, Copy)]
struct Shared(*mut abi::mpk_rank);
// SAFETY: the protocol orders all access to what the struct points to; the struct itself is constant in a run.
unsafe impl Send for Shared {}

impl CpuRank {
    /// Collective: runs the graphs until the batch step says stop. Always ends within the deadline. If the run ends early, the
    /// error is [`Error::Aborted`] with this rank's report.
    pub fn run(&mut self, world: &World) -> Result<()> {
        let _noted = signals::note();
        let look = |_: &Self| {
            std::thread::sleep(LOOK);
            Ok(world.is_stopping())
        };
        self.launch(world, |ready| world.begin_launch(ready), look)
    }

    /// Collective: like [`CpuRank::run`]. `begin` is the meeting of all ranks before the launch ([`World::begin_launch`]). It gets
    /// whether this rank can launch; if it returns an error, nothing is launched. `look` is called repeatedly, waits a little, and says
    /// whether to abort the run. An error of `look` aborts the run too.
    pub(crate) fn launch(
        &mut self,
        world: &World,
        begin: impl FnOnce(Result<()>) -> Result<()>,
        mut look: impl FnMut(&CpuRank) -> Result<bool>,
    ) -> Result<()> {
        let shared = Shared(self.rank());
        // SAFETY: the heap lives as long as this rank, which outlives this call.
        let carried = world.proxy().map(|proxy| unsafe {
            proxy.carry(
                self.heap.own(),
                self.heap.bytes() as u64,
                self.header().oversubscribed == abi::MPK_CORES_FEW,
            )
        });
        // Every rank's memory is ready before the first put.
        begin(Ok(()))?;
        let (workers, schedulers) =
            (self.header().num_workers as usize, self.header().num_schedulers as usize);
        // The host's thread avoids the loops' cores if there are others. The launcher may have bound it to the first loop's core.
        let own = &self.cores.own;
        bind(own.get(workers + schedulers..).filter(|free| !free.is_empty()).unwrap_or(own));
        let mut loops = Loops { control: self, handles: Vec::new() };
        for index in 0..workers + schedulers {
            let core = self.cores.own[index % self.cores.own.len()];
            let body = move || {
                let shared = shared;
                bind(&[core]);
                // SAFETY: the rank is complete and outlives the thread (`Loops`); each index runs once. The first batch step
                // may have to wait for requests, so the host's thread does not run it. Its status is in the abort word.
                unsafe {
                    if index == 0 {
                        abi::mpk_cpu_begin(shared.0);
                    }
                    if index < workers {
                        abi::mpk_cpu_worker(shared.0, index as u32);
                    } else {
                        abi::mpk_cpu_scheduler(shared.0, (index - workers) as u32);
                    }
                }
            };
            let name = if index < workers { format!("worker {index}") } else { "scheduler".to_string() };
            match std::thread::Builder::new().name(name.clone()).spawn(body) {
                Ok(handle) => loops.handles.push(handle),
                Err(error) => {
                    return Err(Error::Thread { rank: world.rank(), what: name, reason: error.to_string() });
                }
            }
        }
        let (mut lost, looked) = world.run_kernel(|| {
            let (mut lost, mut looked) = (None, Ok(()));
            while !loops.handles.iter().all(|h| h.is_finished()) {
                // A lost rank ends the run, because a message to it might wait forever.
                let stop = lost.is_some()
                    || look(self).unwrap_or_else(|error| {
                        looked = Err(error);
                        true
                    });
                if lost.is_some() {
                    std::thread::sleep(LOOK);
                } else {
                    lost = world.lost_rank();
                }
                match &lost {
                    Some(_) => self.abort(abi::MPK_ABORT_PEER),
                    None if stop || looked.is_err() => self.abort(abi::MPK_ABORT_INTERRUPT),
                    None => {}
                }
            }
            (lost, looked)
        });
        loops.join();
        drop(loops);
        if let Some(carried) = &carried {
            carried.end();
            lost = lost.or_else(|| world.run_kernel(|| self.await_other_nodes(world, carried)));
        }
        let looked = looked.and_then(|()| if lost.is_none() { look(self).map(|_| ()) } else { Ok(()) });
        let (code, first) = self.abort_state();
        let aborted = (code != 0).then(|| {
            let text =
                report(world.rank(), code, first, &self.common.graphs, &self.statuses(), workers as u32);
            (code, lost.map_or_else(|| text.clone(), |lost| format!("{lost}\n{text}")))
        });
        outcome(looked, aborted)
    }

    /// Waits until the puts of other nodes' ranks in this launch have arrived. Returns a message about a lost rank, if there is
    /// one.
    fn await_other_nodes(&self, world: &World, carried: &Carried<'_>) -> Option<String> {
        let begin = Instant::now();
        while !carried.is_over() && self.abort_state().0 == 0 {
            let lost = world.lost_rank();
            if lost.is_some() || begin.elapsed() > AFTERWARDS {
                self.abort(abi::MPK_ABORT_PEER);
                return lost;
            }
            std::thread::sleep(SHORT);
        }
        // A rank that ended because of its own deadline may not know the cause.
        (self.abort_state().0 != 0).then(|| world.lost_soon()).flatten()
    }

    fn abort(&self, code: u32) {
        // SAFETY: the rank is live; the call only sets abort words, atomically.
        unsafe { abi::mpk_cpu_abort(self.rank(), code) };
    }

    fn abort_state(&self) -> (u32, u32) {
        // SAFETY: the control block is in the live heap; both words are only accessed atomically.
        unsafe {
            let control = self.header().control;
            let code = AtomicU32::from_ptr(&raw mut (*control).abort).load(Ordering::Acquire);
            (code, AtomicU32::from_ptr(&raw mut (*control).abort_rank).load(Ordering::Relaxed))
        }
    }
}

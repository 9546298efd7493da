//! The launch, and the host that watches it: the host follows the outputs in pinned memory, passes on Ctrl-C, and ensures that
//! the process ends even if the kernel does not.

use super::device::{is_stuck, set_stuck};
use super::guard::{Guard, Runs};
use super::host_ring::bring;
use super::launch::Launcher;
use super::rank::CudaRank;
use crate::error::{Error, Result};
use crate::nodes::{Carried, Proxy};
use crate::report::{outcome, report};
use crate::world::World;
use kernels_cu::abi;
use kernels_cu::signals;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often the host checks the stream and signals.
const LOOK: Duration = Duration::from_micros(500);
/// How often it reads the device's control block.
const SNAPSHOT: Duration = Duration::from_millis(250);
/// How long the host waits for a kernel that was told to end.
const GRACE: Duration = Duration::from_secs(5);
/// The kernel's own deadline comes first. The host acts this much later.
const MARGIN: Duration = Duration::from_secs(3);
/// A copy from the device takes longer than this only if the device does not answer.
const COPY_LIMIT: Duration = Duration::from_secs(2);

/// How often it checks for data that other ranks' proxies are sending.
const SHORT: Duration = Duration::from_micros(50);
/// The kernels of other ranks end within this time after this rank's kernel, which has taken part in their last iteration.
const AFTERWARDS: Duration = Duration::from_secs(60);

/// What the host knows about a running kernel.
struct Watch {
    /// The last control block that was read, and the time of the last progress.
    last: abi::mpk_control,
    changed: Instant,
    /// When the current copy was started, if there is one.
    copying: Option<Instant>,
    copied: Instant,
    /// When the kernel was told to end.
    told: Option<Instant>,
    /// A message about a lost rank, if there is one.
    lost: Option<String>,
    /// The first error of `look`.
    looked: Result<()>,
}

impl CudaRank {
    /// Collective: runs the graphs until the batch step says stop.
    ///
    /// # Errors
    /// [`Error::Aborted`] with this rank's report if the run ends early, or [`Error::Device`] if the GPU failed.
    pub fn run(&mut self, world: &World) -> Result<()> {
        let _noted = signals::note();
        let look = |_: &Self| {
            std::thread::sleep(LOOK);
            Ok(world.is_stopping())
        };
        self.launch(world, |ready| world.begin_launch(ready), look)
    }

    /// Collective: like [`CudaRank::run`]. `begin` is the meeting of all ranks before the launch ([`World::begin_launch`]). It gets
    /// whether this rank can launch; if it returns an error, nothing is launched. `look` is called repeatedly, waits a little, and says
    /// whether to abort the run. An error of `look` aborts the run too.
    pub(crate) fn launch(
        &mut self,
        world: &World,
        begin: impl FnOnce(Result<()>) -> Result<()>,
        mut look: impl FnMut(&CudaRank) -> Result<bool>,
    ) -> Result<()> {
        // A rank that returned its error here would not come to the meeting.
        let mut ready = self.machine.context.make_current();
        let argument = self.control.image.address(self.control.rank);
        let host_abort = self.host_abort.as_ptr().cast::<u64>();
        // SAFETY: the word lives as long as `self`, and so does the GPU's access to the rings; only the kernel reads the inbox.
        let carried = self.carrier(world).map(|proxy| unsafe {
            proxy.carry_to_device(self.heap_bytes, host_abort, world.cores().own.len() < 2)
        });
        world.set_longest_end(GRACE + COPY_LIMIT + MARGIN);
        if self.probe.is_some() {
            ready = ready.and_then(|()| self.before_launch());
        }
        // Every rank's memory is ready before the first put.
        begin(ready)?;
        // NVSHMEM's collective launch waits for all ranks.
        let mut launched = world.call(|| self.start(argument));
        let failed = |launched: &Result<()>| {
            world.all_gather(launched.as_ref().err().map_or(0, |error| error.exit_status() as u64))
        };
        let mut statuses = failed(&launched);
        if !matches!(self.launcher, Launcher::Cooperative) && statuses.iter().all(|&status| status != 0) {
            if let Err(error) = &launched {
                tracing::warn!("{error}; launching by cuLaunchCooperativeKernel");
            }
            self.launcher = Launcher::Cooperative;
            launched = world.call(|| self.start(argument));
            statuses = failed(&launched);
        }
        launched?;
        // Between the launch and this line, only meetings of the ranks can panic, and with other ranks a panic ends the process. The guard
        // is dropped before `carried`, so an abort that the kernel writes at its end is still sent.
        let kernel = Guard::new(&*self, GRACE);
        let failed = statuses.iter().any(|&status| status != 0);
        if failed {
            self.abort(abi::MPK_ABORT_PEER);
        }
        let now = Instant::now();
        let mut watch = Watch {
            // SAFETY: all-zero is a valid control block.
            last: unsafe { std::mem::zeroed() },
            changed: now,
            copying: None,
            copied: now,
            told: failed.then_some(now),
            lost: None,
            looked: Ok(()),
        };
        world.run_kernel(|| self.wait(world, &mut watch, &mut look))?;
        kernel.has_ended();
        if let Some(carried) = &carried {
            carried.end();
            world.run_kernel(|| self.await_others(world, carried, &mut watch))?;
        }
        let looked = std::mem::replace(&mut watch.looked, Ok(())).and_then(|()| look(self).map(|_| ()));
        let aborted = self.aborted(world).map_err(|error| self.device_error(world, &error, &watch))?;
        let aborted = aborted.map(|(code, text)| match &watch.lost {
            Some(lost) => (code, format!("{lost}\n{text}")),
            None => (code, text),
        });
        outcome(looked, aborted)?;
        self.after_launch()
    }

    /// Waits for the kernel's end.
    fn wait(
        &self,
        world: &World,
        watch: &mut Watch,
        look: &mut impl FnMut(&CudaRank) -> Result<bool>,
    ) -> Result<()> {
        loop {
            match self.stream.is_done() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(self.device_error(world, &error, watch)),
            }
            let stop = look(self).unwrap_or_else(|error| {
                watch.looked = Err(error);
                true
            });
            if watch.told.is_none() {
                watch.lost = world.lost_rank();
                if watch.lost.is_some() || stop {
                    let lost = watch.lost.is_some();
                    self.abort(if lost { abi::MPK_ABORT_PEER } else { abi::MPK_ABORT_INTERRUPT });
                    watch.told = Some(Instant::now());
                }
            }
            if let Err(error) = self.follow(watch) {
                return Err(self.device_error(world, &error, watch));
            }
            if watch.told.is_some_and(|told| told.elapsed() > GRACE) {
                return Err(self.give_up(world, watch));
            }
        }
    }

    /// The proxy, if the kernel puts through it.
    fn carrier<'a>(&self, world: &'a World) -> Option<&'a Proxy> {
        world.proxy().filter(|_| self.machine.puts_through_host(world))
    }

    /// Called after this rank's kernel: waits until the puts of other ranks in this launch have arrived, and does what the kernel
    /// has not done.
    fn await_others(&self, world: &World, carried: &Carried<'_>, watch: &mut Watch) -> Result<()> {
        let Some(proxy) = self.carrier(world) else { return Ok(()) };
        let begin = Instant::now();
        loop {
            // Checked before the frames are read: then those were the last.
            let over = carried.is_over();
            while let Some(frame) = proxy.brought() {
                bring(&self.watch, self.heap.base(), &frame)?;
            }
            // A rank that has aborted waits for no other. A rank that has not aborted learns it from the other ranks' aborts.
            if over || watch.told.is_some() || self.is_aborted() || begin.elapsed() > AFTERWARDS {
                return Ok(());
            }
            watch.lost = watch.lost.take().or_else(|| world.lost_rank());
            if watch.lost.is_some() {
                return Ok(());
            }
            std::thread::sleep(SHORT);
        }
    }

    /// True if this host or another rank's asked for an abort.
    fn is_aborted(&self) -> bool {
        // SAFETY: as in `abort`.
        unsafe { AtomicU64::from_ptr(self.host_abort.as_ptr().cast()) }.load(Ordering::Relaxed) != 0
    }

    /// Starts the kernel on the `mpk_rank` at this device address.
    fn start(&self, rank: u64) -> Result<()> {
        // SAFETY: mpk_persistent takes one pointer, to the mpk_rank in device memory. `self` owns everything that it leads to,
        // and waits for the kernel or marks it stuck.
        unsafe {
            self.launcher.launch(self.heap.nvshmem(), self.next_kernel(), self.shape, &self.stream, rank)
        }
    }

    /// Asks the kernel to end. Block 0 passes the code on to all ranks. The first cause is kept.
    fn abort(&self, code: u32) {
        let word = u64::from(self.rank) << 32 | u64::from(code);
        // SAFETY: the first word of live pinned memory, which host and GPU only access atomically.
        let asked = unsafe { AtomicU64::from_ptr(self.host_abort.as_ptr().cast()) };
        let _ = asked.compare_exchange(0, word, Ordering::Release, Ordering::Relaxed);
    }

    /// Reads the control block now and then. Tells a kernel to end if it makes no progress long after its own deadline.
    fn follow(&self, watch: &mut Watch) -> Result<()> {
        if let Some(begun) = watch.copying {
            if self.watch.is_done()? {
                // SAFETY: the copy has ended; the buffer holds one control block.
                let now = unsafe { self.snapshot.as_ptr().cast::<abi::mpk_control>().read() };
                // A parked kernel waits for requests without a time limit.
                let parked = now.parks % 2 == 1;
                if parked || (now.progress, now.iteration) != (watch.last.progress, watch.last.iteration) {
                    watch.changed = Instant::now();
                }
                watch.last = now;
                watch.copying = None;
                watch.copied = Instant::now();
            } else if begun.elapsed() > self.deadline + MARGIN {
                self.tell(watch);
            }
        } else if watch.copied.elapsed() > SNAPSHOT {
            // SAFETY: the control block is the first in the heap, and the buffer has its size; both are live, and the
            // buffer is not read before the copy has ended.
            unsafe {
                self.watch.to_host(
                    self.snapshot.as_ptr(),
                    self.heap.base(),
                    size_of::<abi::mpk_control>() as u64,
                )
            }?;
            watch.copying = Some(Instant::now());
        }
        if watch.changed.elapsed() > self.deadline + MARGIN {
            self.tell(watch);
        }
        Ok(())
    }

    fn tell(&self, watch: &mut Watch) {
        if watch.told.is_none() {
            self.abort(abi::MPK_ABORT_DEADLINE);
            watch.told = Some(Instant::now());
        }
    }

    /// After the kernel: the abort code and this rank's report, if the run ended early.
    fn aborted(&self, world: &World) -> Result<Option<(u32, String)>> {
        // SAFETY: the control block is the first in the heap.
        let bytes = unsafe { self.watch.read(self.heap.base(), size_of::<abi::mpk_control>() as u64) }?;
        // SAFETY: has the size of the struct, which consists of numbers.
        let control = unsafe { bytes.as_ptr().cast::<abi::mpk_control>().read_unaligned() };
        if control.abort == 0 {
            return Ok(None);
        }
        let report = self.report(world, control.abort, control.abort_rank, &self.statuses()?);
        Ok(Some((control.abort, report)))
    }

    fn report(&self, world: &World, code: u32, first: u32, statuses: &[abi::mpk_status]) -> String {
        report(world.rank(), code, first, &self.common.graphs, statuses, self.shape.blocks)
    }

    /// A description of how far the run had got.
    fn place(&self, watch: &Watch) -> String {
        let control = &watch.last;
        if control.iteration == 0 {
            return ", before the first iteration was seen".into();
        }
        let graph = self.common.graphs.get((control.launch & !abi::MPK_LAUNCH_STOP) as usize);
        format!(
            ", in iteration {} (graph {}) or soon after",
            control.iteration,
            graph.map_or("unknown", |g| g.name.as_str())
        )
    }

    fn device_error(&self, world: &World, error: &Error, watch: &Watch) -> Error {
        Error::Device { rank: world.rank(), reason: error.to_string(), place: self.place(watch) }
    }

    /// The kernel does not end. Reports the states of its loops if the device still answers. The end of the process
    /// then ends the kernel.
    fn give_up(&self, world: &World, watch: &Watch) -> Error {
        let code = match watch.last.abort {
            0 => abi::MPK_ABORT_DEADLINE,
            code => code,
        };
        let code = match watch.lost {
            Some(_) => abi::MPK_ABORT_PEER,
            None if world.is_stopping() => abi::MPK_ABORT_INTERRUPT,
            None => code,
        };
        let statuses = self.statuses_within(COPY_LIMIT).unwrap_or_default();
        set_stuck();
        let mut text = watch.lost.as_ref().map(|lost| format!("{lost}\n")).unwrap_or_default();
        text.push_str(&self.report(world, code, world.rank(), &statuses));
        text.push_str(&format!(
            "\n  rank {}: the kernel did not end within {} s of being told to{}; the process ends without it",
            world.rank(),
            GRACE.as_secs(),
            self.place(watch)
        ));
        Error::Aborted(text)
    }

    /// The states, unless the device does not answer in time.
    fn statuses_within(&self, limit: Duration) -> Option<Vec<abi::mpk_status>> {
        let begin = Instant::now();
        while !self.watch.is_done().ok()? {
            if begin.elapsed() > limit {
                return None;
            }
            std::thread::sleep(LOOK);
        }
        self.statuses().ok()
    }
}

impl Runs for CudaRank {
    fn tell_to_end(&self) {
        self.abort(abi::MPK_ABORT_KERNEL);
    }

    fn is_over(&self) -> bool {
        // An error of the stream is one of its context, which ends the kernel. Nothing waits for a kernel that is stuck.
        is_stuck() || self.stream.is_done().unwrap_or(true)
    }

    fn leave(&self) {
        set_stuck();
    }
}

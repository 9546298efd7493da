//! The ranks of a job: with MPI if mpirun started this process, otherwise a single rank without MPI.

use crate::affinity::{self, Cores};
use crate::contact;
use crate::error::{Error, Result};
use crate::launcher::{Place, launched_by_mpi, tasks_without_mpi};
use crate::meeting::{Meeting, numbers};
use crate::messages::{Messages, pack, unpack};
use crate::mpi_errors::watch_errors;
use crate::mpi_help;
use crate::mpi_process::{cores_of_rank, is_initialised, node_name};
use crate::nodes::{Nodes, Proxy};
use crate::stop::Stop;
use crate::watch::{Watch, WatchOptions};
use kernels_cu::signals;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use std::mem::ManuallyDrop;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};
use taskgraph::words::counted;

/// Time for the last messages of a rank that has been told to end.
const HURRY: Duration = Duration::from_millis(200);
/// Maximum time to wait for the watch's verdict on other nodes.
const DOUBT: Duration = Duration::from_millis(500);

/// The job's ranks, and their communication outside the kernel.
///
/// All methods that communicate are collective: every rank calls them in the same order, on the thread that created the world. No
/// method waits forever. If a rank does not arrive, the job ends with status 4 and a message that names the rank (see
/// [`WatchOptions`]).
pub struct World {
    tell: fn(&str),
    mpi: Option<Mpi>,
    watch: Option<Watch>,
    nodes: Nodes,
    /// The proxy between this rank and those of other nodes.
    proxy: Option<Proxy>,
    /// Tells the kernels of this world to end.
    stop: Stop,
}

struct Mpi {
    universe: ManuallyDrop<Universe>,
    world: SimpleCommunicator,
    node: SimpleCommunicator,
    /// The cores of this rank.
    cores: Cores,
}

impl World {
    /// Initialises MPI if a launcher started this process. Otherwise creates a world of one rank without MPI.
    ///
    /// # Errors
    /// MPI cannot be initialised, or knows nothing of the processes that the launcher has started.
    pub fn init(options: WatchOptions) -> Result<World> {
        if let Some(tasks) = tasks_without_mpi() {
            return Err(Error::TasksAlone { tasks });
        }
        if !launched_by_mpi() {
            return Ok(World { tell: options.tell, ..World::single() });
        }
        let place = Place::from_environment();
        // The proxy between nodes also calls MPI.
        let wanted = if place.is_one_node() && !options.carries_all {
            mpi::Threading::Funneled
        } else {
            mpi::Threading::Multiple
        };
        // Before the watch begins, because there may be one already.
        if is_initialised() {
            return Err(Error::MpiInit("it is initialised already".into()));
        }
        let (several_nodes, started) = (!place.is_one_node(), place.size);
        let watch = Watch::begin(place, options);
        let world = World { tell: options.tell, watch: Some(watch), ..World::single() };
        world.phase("MPI's start-up");
        let split = |ranks: &SimpleCommunicator| ranks.split_shared(ranks.rank());
        let begun = world.call(|| {
            let (universe, provided) = mpi::initialize_with_threading(wanted)?;
            if let Some(watch) = &world.watch {
                watch_errors(&universe.world(), watch);
            }
            let node = (!several_nodes).then(|| split(&universe.world()));
            Some((universe, provided, node))
        });
        let (universe, provided, node) = begun.ok_or_else(|| {
            world.leave_to_all();
            Error::MpiInit("it is initialised already".into())
        })?;
        let ranks = universe.world();
        if ranks.size() == 1 && started > 1 {
            let library = mpi_library();
            let first = library.split([',', '\n']).next().unwrap_or_default();
            let library = first.split_whitespace().collect::<Vec<_>>().join(" ");
            world.leave_to_all();
            return Err(Error::OtherMpi { started, library });
        }
        let node = node.unwrap_or_else(|| {
            world.contact(&ranks);
            world.call_within_contact(|| split(&ranks))
        });
        let cores = world.call(|| cores_of_rank(&node));
        let mpi = Mpi { universe: ManuallyDrop::new(universe), world: ranks, node, cores };
        if let Some(watch) = &world.watch {
            end_the_job_on_panic(watch.clone());
        }
        let nodes = Nodes::one(mpi.world.size() as u32, &node_name());
        World { mpi: Some(mpi), nodes, ..world }
            .with_nodes(provided == mpi::Threading::Multiple, options.carries_all)
    }

    /// This process ends for a reason that all ranks have. The others must not take its end for a loss.
    fn leave_to_all(&self) {
        if let Some(watch) = &self.watch {
            watch.has_left();
        }
    }

    /// Connects the ranks of several nodes. The phase names who has not been reached.
    fn contact(&self, ranks: &SimpleCommunicator) {
        let phase = |with: String| {
            self.phase(&if with.is_empty() { "the nodes".into() } else { format!("contact with {with}") });
        };
        let awaits = |missing: &[i32]| phase(contact::list(missing));
        let other = self.call_within_contact(|| contact::connect(ranks, &node_name(), awaits));
        phase(other.join(", "));
    }

    /// Finds out which rank is on which node, and starts the proxy if there are several nodes.
    fn with_nodes(mut self, threads_may_call: bool, carries_all: bool) -> Result<World> {
        let Some(Mpi { world, node, .. }) = &self.mpi else { return Ok(self) };
        // All ranks come to the same result: with several nodes, each node has fewer ranks than the job.
        if node.size() == world.size() && (!carries_all || world.size() == 1) {
            return Ok(self);
        }
        let first = node.group().translate_rank(0, &world.group()).unwrap_or(0) as u32;
        let own = [&first.to_ne_bytes()[..], node_name().as_bytes()].concat();
        let all: Vec<(u32, String)> = self
            .exchange_within(own, self.watch.as_ref().map(Watch::contact))
            .iter()
            .map(|bytes| {
                let (first, name) = bytes.split_first_chunk().unwrap_or((&[0; 4], &[]));
                (u32::from_ne_bytes(*first), String::from_utf8_lossy(name).into_owned())
            })
            .collect();
        let nodes = Nodes::new(&all);
        if !threads_may_call {
            self.leave_to_all();
            return Err(Error::ThreadLevel { nodes: nodes.count() });
        }
        let rank = self.rank();
        let far = nodes.elsewhere(rank);
        let peers =
            if carries_all { (0..self.size()).filter(|&peer| peer != rank).collect() } else { far.clone() };
        let communicator = self.call_within_contact(|| {
            let own = world.duplicate();
            // SAFETY: a live communicator. From now on, errors are returned. By default, MPI would end the job without a message.
            unsafe { mpi::ffi::MPI_Comm_set_errhandler(own.as_raw(), mpi::ffi::RSMPI_ERRORS_RETURN) };
            // The proxy uses it until the process ends.
            ManuallyDrop::new(own).as_raw()
        });
        if let Some(watch) = &self.watch {
            if !far.is_empty() {
                mpi_help::take_to_log(&mpi_library());
                watch.set_elsewhere(
                    self.size(),
                    far.iter().map(|&peer| (peer, nodes.name_of(peer).to_string())),
                );
            }
            let begun = Proxy::begin(rank, communicator, peers, self.cores().own, watch);
            self.proxy = Some(agreed(&self, begun).inspect_err(|_| self.leave_to_all())?);
        }
        let (ranks, on) = (counted(self.size(), "rank"), counted(nodes.count(), "node"));
        tracing::info!("{ranks} on {on}; rank {rank} is on {}", node_name());
        self.nodes = nodes;
        Ok(self)
    }

    /// A world of one rank, without MPI.
    pub fn single() -> World {
        let nodes = Nodes::one(1, "localhost");
        World { tell: |_| {}, mpi: None, watch: None, nodes, proxy: None, stop: Stop::default() }
    }

    /// From now on, `stop` ends the kernels of this world.
    pub fn stopped_by(mut self, stop: Stop) -> World {
        self.stop = stop;
        self
    }

    /// True if a signal, or this world's [`Stop`], has told the kernel to end.
    pub(crate) fn is_stopping(&self) -> bool {
        signals::is_stopping() || self.stop.is_asked()
    }

    /// Tells the user why the job ends, through [`WatchOptions::tell`].
    pub fn tell(&self, message: &str) {
        (self.tell)(message);
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.mpi.as_ref().map_or(0, |m| m.world.rank() as u32)
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.mpi.as_ref().map_or(1, |m| m.world.size() as u32)
    }

    /// This rank's index among the ranks of its node.
    pub fn node_rank(&self) -> u32 {
        self.mpi.as_ref().map_or(0, |m| m.node.rank() as u32)
    }

    /// Number of ranks on this node.
    pub fn node_size(&self) -> u32 {
        self.mpi.as_ref().map_or(1, |m| m.node.size() as u32)
    }

    /// The cores of this rank. mpirun's binding is ignored, because it ties a rank to one core; srun's is not.
    pub fn cores(&self) -> Cores {
        self.mpi
            .as_ref()
            .map_or_else(|| affinity::share(&affinity::allowed_cores(), 0, 1), |m| m.cores.clone())
    }

    /// Which rank is on which node.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// The proxy between this rank and those of other nodes, if there are any.
    pub(crate) fn proxy(&self) -> Option<&Proxy> {
        self.proxy.as_ref()
    }

    /// Names the current phase of this rank, for the message about a rank that does not arrive.
    pub fn phase(&self, name: &str) {
        if let Some(watch) = &self.watch {
            watch.phase(name);
        }
    }

    /// A message about a rank of another node that failed to answer in time, if there is one.
    pub(crate) fn missed(&self) -> Option<String> {
        self.watch.as_ref()?.missed()
    }

    /// Like `lost`, but waits a moment: a rank may notice that nothing more arrives before the watch is sure that a node is lost.
    pub(crate) fn lost_soon(&self) -> Option<String> {
        let (begin, limit) = (Instant::now(), if signals::is_stopping() { HURRY } else { DOUBT });
        while begin.elapsed() < limit {
            let lost = self.find_lost();
            if lost.is_some() {
                return lost;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.missed()
    }

    /// Makes a library call that all ranks make together and that cannot be interrupted. The watch ends the process if a rank does not
    /// make the call.
    pub(crate) fn call<T>(&self, call: impl FnOnce() -> T) -> T {
        let _waiting = self.watch.as_ref().map(Watch::call);
        call()
    }

    /// The same for a call of the first messages between nodes ([`Watch::contact`]).
    fn call_within_contact<T>(&self, call: impl FnOnce() -> T) -> T {
        let _waiting = self.watch.as_ref().map(Watch::call_within_contact);
        call()
    }

    /// For tests: an error if a fault keeps this rank from launching its kernel.
    pub(crate) fn launch_fault(&self) -> Result<()> {
        match self.watch.as_ref().is_some_and(Watch::fails_to_launch) {
            true => Err(Error::Aborted("this rank cannot launch its kernel (RunConfig::fault)".into())),
            false => Ok(()),
        }
    }

    /// Runs the kernel. Meanwhile the kernel's own deadline applies.
    pub(crate) fn run_kernel<T>(&self, run: impl FnOnce() -> T) -> T {
        let _running = self.watch.as_ref().map(Watch::run_kernel);
        run()
    }

    /// Sets how long the kernel may take to end after another rank is lost.
    pub(crate) fn set_longest_end(&self, time: Duration) {
        if let Some(watch) = &self.watch {
            watch.set_longest_end(time);
        }
    }

    /// Waits for something that other ranks do not send, such as a request. The caller must check [`World::lost`] now and then.
    pub fn idle<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.set_idle(true);
        let waited = self.run_kernel(wait);
        self.set_idle(false);
        waited
    }

    /// Says whether this rank's kernel is idle. While it is, another rank that gives no sign of life for the deadline also counts as lost
    /// ([`World::lost`]). No wait of the kernel would notice that.
    pub(crate) fn set_idle(&self, idle: bool) {
        if let Some(watch) = &self.watch {
            watch.set_idle(idle);
        }
    }

    /// The word that wakes this rank's host, in memory that the ranks of a node share, if there is one.
    pub(crate) fn bell(&self) -> Option<&'static AtomicU32> {
        self.watch.as_ref()?.bell()
    }

    /// The words of the other ranks of this node, with their ranks.
    pub(crate) fn other_bells(&self) -> Vec<(u32, &'static AtomicU32)> {
        self.watch.as_ref().map_or_else(Vec::new, Watch::other_bells)
    }

    /// A message about a rank that was lost since the kernel, or the idle time, began, if there is one. Either its process has ended, or
    /// it gave no sign of life while it was idle.
    pub fn lost(&self) -> Option<String> {
        self.watch.as_ref()?.lost()
    }

    /// A message about a lost rank, if there is one. The launcher ends the other ranks when one has died, so a signal is first taken as
    /// that.
    pub(crate) fn lost_rank(&self) -> Option<String> {
        if signals::is_stopping() { self.find_lost().or_else(|| self.missed()) } else { self.lost() }
    }

    /// Like `lost`, but checks at once.
    pub(crate) fn find_lost(&self) -> Option<String> {
        self.watch.as_ref()?.find_lost()
    }

    /// Waits until every rank has arrived.
    pub fn barrier(&self) {
        self.exchange(Vec::new());
    }

    /// Waits until every rank has arrived, at most `limit`. After that the job ends.
    pub fn barrier_within(&self, limit: Duration) {
        self.exchange_within(Vec::new(), Some(self.hurried(limit)));
    }

    /// The limit of a wait for the other ranks. It is less if a launcher ends the job's ranks: it gives them one second.
    pub(crate) fn hurried(&self, limit: Duration) -> Duration {
        let hurry = self.nodes.count() > 1 && signals::is_stopping();
        if hurry { limit.min(HURRY) } else { limit }
    }

    /// Returns every rank's bytes on every rank, in rank order. Rank 0 collects and distributes them, with the help of each other node's
    /// first rank.
    pub fn exchange(&self, bytes: Vec<u8>) -> Vec<Vec<u8>> {
        self.exchange_within(bytes, None)
    }

    /// Like [`World::exchange`]. If the ranks have not all arrived within `limit`, the job ends.
    pub(crate) fn exchange_within(&self, bytes: Vec<u8>, limit: Option<Duration>) -> Vec<Vec<u8>> {
        let Some(meeting) = self.meet(limit) else { return vec![bytes] };
        let all = meeting.collect(bytes);
        unpack(&meeting.spread(if self.rank() == 0 { pack(&all) } else { Vec::new() }))
    }

    /// Begins a step that all ranks take; `None` if this is the only rank.
    fn meet(&self, limit: Option<Duration>) -> Option<Meeting<'_>> {
        let (mpi, watch) = (self.mpi.as_ref()?, self.watch.as_ref()?);
        let (waiting, step) = match limit {
            Some(limit) => watch.wait_within(limit),
            None => watch.wait(),
        };
        let messages = Messages { ranks: &mpi.world, watch, shared_cores: mpi.cores.sharers > 1 };
        Some(Meeting::new(messages, &self.nodes, self.rank(), step, waiting))
    }

    /// The largest of the ranks' values, element by element.
    pub fn max(&self, values: &[u64]) -> Vec<u64> {
        let own = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let all: Vec<Vec<u64>> = self.exchange(own).iter().map(|bytes| numbers(bytes)).collect();
        (0..values.len())
            .map(|i| all.iter().filter_map(|v| v.get(i)).copied().max().unwrap_or(values[i]))
            .collect()
    }

    /// Collective: nanoseconds by which `now` on rank 0 is ahead of `now` on this rank. 0 on rank 0's node, which has one clock. Exact to
    /// within half of a message's round trip.
    pub(crate) fn clock_lead(&self, now: impl Fn() -> u64) -> i64 {
        self.meet(None).map_or(0, |meeting| meeting.clock_lead(now))
    }

    /// The value of each rank, in rank order.
    pub fn all_gather(&self, value: u64) -> Vec<u64> {
        let all = self.exchange(value.to_ne_bytes().to_vec());
        all.iter().map(|bytes| numbers(bytes).first().copied().unwrap_or(value)).collect()
    }

    /// The bytes of rank `root`, on every rank.
    pub fn broadcast(&self, root: u32, bytes: Vec<u8>) -> Vec<u8> {
        let Some(meeting) = self.meet(None) else { return bytes };
        let mut all = meeting.collect(if self.rank() == root { bytes } else { Vec::new() });
        meeting.spread(if self.rank() == 0 { all.swap_remove(root as usize) } else { Vec::new() })
    }

    /// On rank 0: every rank's bytes, in rank order. Empty on other ranks.
    pub fn gather(&self, bytes: Vec<u8>) -> Vec<Vec<u8>> {
        match self.meet(None) {
            Some(meeting) => meeting.collect(bytes),
            None => vec![bytes],
        }
    }

    /// Calls `with` with a pointer to the communicator of all ranks (null without MPI), an `MPI_Comm`.
    pub(crate) fn with_communicator<T>(&self, with: impl FnOnce(*mut std::ffi::c_void) -> T) -> T {
        match &self.mpi {
            Some(m) => {
                let mut communicator = m.world.as_raw();
                with((&raw mut communicator).cast())
            }
            None => with(std::ptr::null_mut()),
        }
    }

    /// The communicator of all ranks; `None` without MPI.
    pub(crate) fn communicator(&self) -> Option<mpi::ffi::MPI_Comm> {
        self.mpi.as_ref().map(|m| m.world.as_raw())
    }

    /// The communicator of this node's ranks.
    pub(crate) fn node_communicator(&self) -> Option<&SimpleCommunicator> {
        self.mpi.as_ref().map(|m| &m.node)
    }

    /// Collective: finalises MPI and waits until the node's other ranks have done so. The process should end at once, because it is not
    /// watched any more.
    pub fn finalize(mut self) {
        self.phase("MPI's end");
        if let Some(proxy) = self.proxy.take() {
            self.call(|| proxy.stop());
        }
        if let Some(mut m) = self.mpi.take() {
            self.call(|| {
                drop(m.node);
                // SAFETY: the universe is dropped once, here; `self` is consumed.
                unsafe { ManuallyDrop::drop(&mut m.universe) };
            });
        }
        if let Some(watch) = &self.watch {
            watch.leave();
        }
    }
}

/// A panic would leave the other ranks waiting, so it is printed and then ends the job.
fn end_the_job_on_panic(watch: Watch) {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        watch.give_up(None);
    }));
}

/// Name and version of the MPI library.
pub fn mpi_library() -> String {
    mpi::environment::library_version().unwrap_or_else(|_| "unknown".into()).trim().to_string()
}

/// Collective: returns the value if every rank's step succeeded. Otherwise every rank gets the first error, so that no rank continues to a
/// collective call that another rank will not make.
pub(crate) fn agreed<T>(world: &World, result: Result<T>) -> Result<T> {
    match (world.first_failed(None, result.as_ref().err()), result) {
        (None, result) => result,
        (Some((rank, _)), Err(error)) if rank == world.rank() => Err(error),
        (Some((_, error)), _) => Err(error),
    }
}

//! The ranks of a job: MPI where mpirun started us, a single rank without MPI otherwise.

use crate::affinity::{Cores, cores_of_rank};
use crate::error::{Error, Result};
use crate::launcher::{Place, launched_by_mpi};
use crate::messages::{pack, receive, send, unpack};
use crate::nodes::{Nodes, Proxy};
use crate::watch::{Watch, WatchOptions};
use kernels_cu::signals;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use std::mem::ManuallyDrop;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// What is left to a rank that has been told to end, for its last words.
const HURRY: Duration = Duration::from_millis(200);
/// Longest wait for the watch's opinion of other nodes.
const DOUBT: Duration = Duration::from_millis(500);

/// The job's ranks and what they say to each other outside the kernel.
///
/// All methods that take part in communication are collective: every rank calls them in the same order, on the
/// thread that made the world. None of them waits without an end: where a rank does not come, the job ends with
/// status 4 and the rank's name (see [`WatchOptions`]).
pub struct World {
    tell: fn(&str),
    mpi: Option<Mpi>,
    watch: Option<Watch>,
    nodes: Nodes,
    /// Between this rank and those of other nodes.
    proxy: Option<Proxy>,
}

struct Mpi {
    universe: ManuallyDrop<Universe>,
    world: SimpleCommunicator,
    node: SimpleCommunicator,
}

impl World {
    /// Initialises MPI where a launcher started this process; otherwise a world of one rank without MPI.
    ///
    /// # Errors
    /// MPI does not come up.
    pub fn init(options: WatchOptions) -> Result<World> {
        if !launched_by_mpi() {
            return Ok(World { tell: options.tell, ..World::single() });
        }
        let place = Place::from_environment();
        // The proxy between nodes calls MPI too.
        let wanted = if place.is_one_node() && !options.carries_all {
            mpi::Threading::Funneled
        } else {
            mpi::Threading::Multiple
        };
        let watch = Watch::begin(place, options);
        let world = World { tell: options.tell, watch: Some(watch), ..World::single() };
        world.phase("MPI's start-up");
        let (mpi, provided) = world.call(|| -> Result<_> {
            let (universe, provided) = mpi::initialize_with_threading(wanted)
                .ok_or_else(|| Error::MpiInit("it is initialised already".into()))?;
            let world = universe.world();
            let node = world.split_shared(world.rank());
            Ok((Mpi { universe: ManuallyDrop::new(universe), world, node }, provided))
        })?;
        if let Some(watch) = &world.watch {
            watch.set_mpi(true);
            end_the_job_on_panic(watch.clone());
        }
        let nodes = Nodes::one(mpi.world.size() as u32, &node_name());
        World { mpi: Some(mpi), nodes, ..world }
            .with_nodes(provided == mpi::Threading::Multiple, options.carries_all)
    }

    /// Finds out which rank is on which node, and begins to carry between nodes where there are several.
    fn with_nodes(mut self, threads_may_call: bool, carries_all: bool) -> Result<World> {
        let Some(Mpi { world, node, .. }) = &self.mpi else { return Ok(self) };
        // As all ranks see it: with several nodes each has fewer ranks than the job.
        if node.size() == world.size() && (!carries_all || world.size() == 1) {
            return Ok(self);
        }
        self.phase("the nodes");
        let first = node.group().translate_rank(0, &world.group()).unwrap_or(0) as u32;
        let own = [&first.to_ne_bytes()[..], node_name().as_bytes()].concat();
        let all: Vec<(u32, String)> = self
            .exchange(own)
            .iter()
            .map(|bytes| {
                let (first, name) = bytes.split_first_chunk().unwrap_or((&[0; 4], &[]));
                (u32::from_ne_bytes(*first), String::from_utf8_lossy(name).into_owned())
            })
            .collect();
        let nodes = Nodes::new(&all);
        if !threads_may_call {
            return Err(Error::ThreadLevel { nodes: nodes.count() });
        }
        let rank = self.rank();
        let far = nodes.elsewhere(rank);
        let peers =
            if carries_all { (0..self.size()).filter(|&peer| peer != rank).collect() } else { far.clone() };
        let communicator = self.call(|| {
            let own = world.duplicate();
            // SAFETY: a live communicator. Errors come back from now on; by MPI's default they would end the job without a word.
            unsafe { mpi::ffi::MPI_Comm_set_errhandler(own.as_raw(), mpi::ffi::RSMPI_ERRORS_RETURN) };
            // The proxy has it until the process ends.
            ManuallyDrop::new(own).as_raw()
        });
        if let Some(watch) = &self.watch {
            if !far.is_empty() {
                watch.set_elsewhere(
                    self.size(),
                    far.iter().map(|&peer| (peer, nodes.name_of(peer).to_string())),
                );
            }
            let begun = Proxy::begin(rank, communicator, peers, self.cores().own, watch);
            self.proxy = Some(agreed(&self, begun)?);
        }
        tracing::info!("{} ranks on {} nodes; rank {rank} is on {}", self.size(), nodes.count(), node_name());
        self.nodes = nodes;
        Ok(self)
    }

    /// A world of one rank, without MPI.
    pub fn single() -> World {
        let nodes = Nodes::one(1, "localhost");
        World { tell: |_| {}, mpi: None, watch: None, nodes, proxy: None }
    }

    /// Tells the user why the job ends, as [`WatchOptions::tell`] does.
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

    /// This rank among those of its node.
    pub fn node_rank(&self) -> u32 {
        self.mpi.as_ref().map_or(0, |m| m.node.rank() as u32)
    }

    /// Ranks on this node.
    pub fn node_size(&self) -> u32 {
        self.mpi.as_ref().map_or(1, |m| m.node.size() as u32)
    }

    /// The cores of this rank. mpirun's binding is ignored: it ties a rank to one core.
    pub fn cores(&self) -> Cores {
        cores_of_rank(self.node_rank(), self.node_size())
    }

    /// Which rank is on which node.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// What carries between this rank and those of other nodes, if there are any.
    pub(crate) fn proxy(&self) -> Option<&Proxy> {
        self.proxy.as_ref()
    }

    /// Names what this rank does from now on, for the message about a rank that does not come.
    pub fn phase(&self, name: &str) {
        if let Some(watch) = &self.watch {
            watch.phase(name);
        }
    }

    /// What is known of a rank of another node that has missed its times, if one has.
    pub(crate) fn missed(&self) -> Option<String> {
        self.watch.as_ref()?.missed()
    }

    /// As `lost`, but waits a moment for it: a rank may find out that nothing comes any more before the watch is sure that a node is
    /// lost.
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

    /// Makes a call of a library that all ranks make together and that can't be interrupted: the watch ends the process
    /// where a rank does not come to it.
    pub(crate) fn call<T>(&self, call: impl FnOnce() -> T) -> T {
        let _waiting = self.watch.as_ref().map(Watch::call);
        call()
    }

    /// Runs the kernel, whose own deadline holds meanwhile.
    pub(crate) fn run_kernel<T>(&self, run: impl FnOnce() -> T) -> T {
        let _running = self.watch.as_ref().map(Watch::run_kernel);
        run()
    }

    /// The kernel may take so long for its end after another rank is lost.
    pub(crate) fn set_longest_end(&self, time: Duration) {
        if let Some(watch) = &self.watch {
            watch.set_longest_end(time);
        }
    }

    /// Waits for something that no other rank owes this one, such as a request. Whoever waits asks for [`World::lost`] now and
    /// then.
    pub fn idle<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.set_idle(true);
        let waited = self.run_kernel(wait);
        self.set_idle(false);
        waited
    }

    /// While this rank runs the kernel: whether that has nothing to do. Then another rank that gives no sign of life for the deadline is
    /// lost too ([`World::lost`]): no wait of the kernel would find that out.
    pub(crate) fn set_idle(&self, idle: bool) {
        if let Some(watch) = &self.watch {
            watch.set_idle(idle);
        }
    }

    /// The word that rings this rank's host, in memory that the ranks of a node share; `None` where there is none.
    pub(crate) fn bell(&self) -> Option<&'static AtomicU32> {
        self.watch.as_ref()?.bell()
    }

    /// Those of the other ranks of this node, with their ranks.
    pub(crate) fn other_bells(&self) -> Vec<(u32, &'static AtomicU32)> {
        self.watch.as_ref().map_or_else(Vec::new, Watch::other_bells)
    }

    /// What is known of a rank that was lost since the kernel, or the idle time, began, if one was: its process has ended, or has given no
    /// sign of life while nothing was to be done.
    pub fn lost(&self) -> Option<String> {
        self.watch.as_ref()?.lost()
    }

    /// What is known of a rank that is lost, if one is. The launcher ends the others when one has died, so a signal is
    /// first taken for that.
    pub(crate) fn lost_rank(&self) -> Option<String> {
        if signals::is_stopping() { self.find_lost().or_else(|| self.missed()) } else { self.lost() }
    }

    /// As `lost`, but looks at once.
    pub(crate) fn find_lost(&self) -> Option<String> {
        self.watch.as_ref()?.find_lost()
    }

    /// Waits until every rank is here.
    pub fn barrier(&self) {
        self.exchange(Vec::new());
    }

    /// Waits until every rank is here, at most `limit`; after that the job ends.
    pub fn barrier_within(&self, limit: Duration) {
        // A launcher that ends the job's ranks gives them a second.
        let hurry = self.nodes.count() > 1 && signals::is_stopping();
        let limit = if hurry { limit.min(HURRY) } else { limit };
        self.exchange_within(Vec::new(), Some(limit));
    }

    /// Every rank's bytes on every rank, in rank order. Rank 0 collects and spreads them.
    pub fn exchange(&self, bytes: Vec<u8>) -> Vec<Vec<u8>> {
        self.exchange_within(bytes, None)
    }

    fn exchange_within(&self, bytes: Vec<u8>, limit: Option<Duration>) -> Vec<Vec<u8>> {
        let Some(meeting) = self.meet(limit) else { return vec![bytes] };
        let all = meeting.collect(bytes);
        unpack(&meeting.spread(if self.rank() == 0 { pack(&all) } else { Vec::new() }))
    }

    /// Begins a step that all ranks take; `None` where this rank is the only one.
    fn meet(&self, limit: Option<Duration>) -> Option<Meeting<'_>> {
        let (mpi, watch) = (self.mpi.as_ref()?, self.watch.as_ref()?);
        let (waiting, step) = match limit {
            Some(limit) => watch.wait_within(limit),
            None => watch.wait(),
        };
        Some(Meeting { ranks: &mpi.world, watch, step, _waiting: waiting })
    }

    /// The largest of the ranks' values, place by place.
    pub fn max(&self, values: &[u64]) -> Vec<u64> {
        let own = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let all: Vec<Vec<u64>> = self.exchange(own).iter().map(|bytes| numbers(bytes)).collect();
        (0..values.len())
            .map(|i| all.iter().filter_map(|v| v.get(i)).copied().max().unwrap_or(values[i]))
            .collect()
    }

    /// Collective: nanoseconds by which `now` at rank 0 is ahead of `now` at this rank; 0 on rank 0's node, which has one clock. Right to
    /// within half of a message's way there and back.
    pub(crate) fn clock_lead(&self, now: impl Fn() -> u64) -> i64 {
        self.meet(None).map_or(0, |meeting| meeting.clock_lead(&self.nodes, now))
    }

    /// One value of each rank, in rank order.
    pub fn all_gather(&self, value: u64) -> Vec<u64> {
        let all = self.exchange(value.to_ne_bytes().to_vec());
        all.iter().map(|bytes| numbers(bytes).first().copied().unwrap_or(value)).collect()
    }

    /// Bytes of rank `root`, on every rank.
    pub fn broadcast(&self, root: u32, bytes: Vec<u8>) -> Vec<u8> {
        let Some(meeting) = self.meet(None) else { return bytes };
        let mut all = meeting.collect(if self.rank() == root { bytes } else { Vec::new() });
        meeting.spread(if self.rank() == 0 { all.swap_remove(root as usize) } else { Vec::new() })
    }

    /// Every rank's bytes at rank 0, in rank order; empty elsewhere.
    pub fn gather(&self, bytes: Vec<u8>) -> Vec<Vec<u8>> {
        match self.meet(None) {
            Some(meeting) => meeting.collect(bytes),
            None => vec![bytes],
        }
    }

    /// Agreement on how a step went: the status is 0 where it went well here. Returns, on every rank, the first
    /// rank whose status is not 0 and that status.
    pub fn agree(&self, status: i32) -> Option<(u32, i32)> {
        let statuses = self.all_gather(status as u32 as u64);
        statuses.iter().position(|&s| s != 0).map(|rank| (rank as u32, statuses[rank] as u32 as i32))
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

    /// Finalises MPI and waits for the node's other ranks to have done so. Collective. The process should end at once:
    /// nobody watches it any more.
    pub fn finalize(mut self) {
        self.phase("MPI's end");
        if let Some(proxy) = self.proxy.take() {
            self.call(|| proxy.stop());
        }
        if let Some(mut m) = self.mpi.take() {
            if let Some(watch) = &self.watch {
                watch.set_mpi(false);
            }
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

/// A step that all ranks take together.
struct Meeting<'a> {
    ranks: &'a SimpleCommunicator,
    watch: &'a Watch,
    step: u64,
    _waiting: crate::watch::Waiting<'a>,
}

impl Meeting<'_> {
    /// Every rank's bytes at rank 0, in rank order; empty elsewhere.
    fn collect(&self, bytes: Vec<u8>) -> Vec<Vec<u8>> {
        if self.ranks.rank() != 0 {
            send(self.ranks, self.watch, 0, self.step, &bytes);
            return Vec::new();
        }
        let others =
            (1..self.ranks.size() as u32).map(|rank| receive(self.ranks, self.watch, rank, self.step));
        std::iter::once(bytes).chain(others).collect()
    }

    /// As [`World::clock_lead`]. Rank 0 asks each rank of another node for the time; the quickest answer counts.
    fn clock_lead(&self, nodes: &Nodes, now: impl Fn() -> u64) -> i64 {
        const ROUNDS: u32 = 12;
        let (own, size) = (self.ranks.rank() as u32, self.ranks.size() as u32);
        let time = |bytes: &[u8]| numbers(bytes).first().copied().unwrap_or(0);
        if own != 0 {
            if nodes.share(0, own) {
                return 0;
            }
            for _ in 0..ROUNDS {
                receive(self.ranks, self.watch, 0, self.step);
                send(self.ranks, self.watch, 0, self.step, &now().to_ne_bytes());
            }
            return time(&receive(self.ranks, self.watch, 0, self.step)) as i64;
        }
        for rank in (1..size).filter(|&rank| !nodes.share(0, rank)) {
            let ask = |_| {
                let asked = now();
                // As long as the answer, so that both take the same time.
                send(self.ranks, self.watch, rank, self.step, &asked.to_ne_bytes());
                let answer = time(&receive(self.ranks, self.watch, rank, self.step));
                let took = now().saturating_sub(asked);
                (took, (asked + took / 2).wrapping_sub(answer))
            };
            let lead = (0..ROUNDS).map(ask).min().map_or(0, |(_, lead)| lead);
            send(self.ranks, self.watch, rank, self.step, &lead.to_ne_bytes());
        }
        0
    }

    /// Rank 0's bytes, on every rank.
    fn spread(&self, bytes: Vec<u8>) -> Vec<u8> {
        if self.ranks.rank() != 0 {
            return receive(self.ranks, self.watch, 0, self.step);
        }
        (1..self.ranks.size() as u32).for_each(|rank| send(self.ranks, self.watch, rank, self.step, &bytes));
        bytes
    }
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect()
}

/// Name of this node. MPI is initialised.
fn node_name() -> String {
    mpi::environment::processor_name().unwrap_or_else(|_| "localhost".to_string())
}

/// A rank that panics would leave the others waiting: print, then end the job.
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

/// Collective: goes on where every rank's step went well; otherwise every rank gets the first error, so that none
/// goes on to a collective call that another will not make.
pub(crate) fn agreed<T>(world: &World, result: Result<T>) -> Result<T> {
    if world.size() == 1 {
        return result;
    }
    let status = result.as_ref().err().map_or(0, Error::exit_status);
    let Some((rank, status)) = world.agree(status) else { return result };
    let own = result.as_ref().err().map(|e| e.whole().into_bytes()).unwrap_or_default();
    let message = world.broadcast(rank, own);
    match result {
        Err(error) if rank == world.rank() => Err(error),
        _ => Err(Error::AtRank { rank, status, message: String::from_utf8_lossy(&message).into_owned() }),
    }
}

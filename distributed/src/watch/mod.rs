//! Limits every wait of a rank for other ranks, outside the kernel.
//!
//! In each rank, a thread records in a table, which the ranks of a node share, that the rank is alive. It also checks the other ranks
//! there. While its rank waits for others, in a message or in a library call that cannot be interrupted, the thread decides whether the
//! wait can still end ([`observer`]). If not, it reports the cause and ends the process.

mod elsewhere;
mod ending;
mod observer;
mod process;
mod share;
mod table;

use crate::fault::Fault;
use crate::launcher::Place;
use elsewhere::Elsewhere;
use kernels_cu::signals::Held;
use observer::{Observer, Verdict, lost};
use process::{Fate, Launcher, fate, own_namespace};
use share::{Search, Table};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use table::{Seen, Slot, State};

/// How often the thread checks.
const TICK: Duration = Duration::from_millis(50);
/// How often it checks while the node's ranks start up.
const FIRST_TICKS: Duration = Duration::from_millis(5);
/// Number of steps that count as start-up.
const FIRST_STEPS: u64 = 4;
/// Time for a rank to end after it learned of a lost rank, unless its kernel needs longer ([`Watch::set_longest_end`]).
const LONGEST_END: Duration = Duration::from_secs(3);
/// Minimum time for the first messages between nodes. Many ranks may share few cores.
const LEAST_CONTACT: Duration = Duration::from_secs(10);
/// The phase of a rank of another node that has not said anything yet.
const FIRST_PHASE: &str = "contact with other nodes";
/// No own limit.
const NO_LIMIT: u64 = u64::MAX;

/// Options that a job's ranks need before they meet.
#[derive(Clone, Copy, Debug)]
pub struct WatchOptions {
    /// A wait for other ranks ends the job if one of them gives no sign of life for this long.
    pub deadline: Duration,
    /// Called with the reason why the job ends.
    pub tell: fn(&str),
    /// For tests: a fault that this rank causes.
    pub fault: Option<Fault>,
    /// The proxy carries data to all other ranks, even to those on this node. For GPUs with [`Transport::Host`](crate::cuda::Transport).
    pub carries_all: bool,
}

/// The watch over one rank's waits. A clone is the same watch.
#[derive(Clone, Debug)]
pub(crate) struct Watch(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    place: Place,
    options: WatchOptions,
    /// The state of this rank. Its main thread writes it, except for the beats, which the watch's thread writes.
    own: Slot,
    table: OnceLock<Table>,
    /// The ranks of other nodes, once they are known.
    elsewhere: OnceLock<Elsewhere>,
    /// The launcher's process on this node. The watch's thread finds it.
    launcher: OnceLock<Launcher>,
    /// Maximum duration of this rank's wait, in nanoseconds.
    limit: AtomicU64,
    /// A message about the lost rank.
    lost: Mutex<Option<String>>,
    is_lost: AtomicBool,
    /// Set while the rank runs an idle kernel, so that only this watch's deadline applies.
    idle: AtomicBool,
    /// The thread that runs the kernel knows about the lost rank.
    lost_seen: AtomicBool,
    /// Milliseconds that this thread has to end after that.
    longest_end: AtomicU64,
    /// How often the proxy to other nodes has checked for work.
    proxy_turns: AtomicU64,
    /// The ranks of other nodes know that this rank has given up.
    told_elsewhere: AtomicBool,
}

/// While this value lives, the rank waits for other ranks.
pub(crate) struct Waiting<'a> {
    watch: &'a Watch,
    before: State,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.watch.0.limit.store(NO_LIMIT, Ordering::Relaxed);
        self.watch.set_state(self.before);
    }
}

impl Watch {
    /// Starts to watch this process, which has this place in its job.
    pub(crate) fn begin(place: Place, options: WatchOptions) -> Watch {
        let own = Slot::default();
        own.take(place.rank, std::process::id(), own_namespace());
        let watch = Watch(Arc::new(Shared {
            place,
            options,
            own,
            table: OnceLock::new(),
            elsewhere: OnceLock::new(),
            launcher: OnceLock::new(),
            limit: AtomicU64::new(NO_LIMIT),
            lost: Mutex::new(None),
            is_lost: AtomicBool::new(false),
            idle: AtomicBool::new(false),
            lost_seen: AtomicBool::new(false),
            longest_end: AtomicU64::new(LONGEST_END.as_millis() as u64),
            proxy_turns: AtomicU64::new(0),
            told_elsewhere: AtomicBool::new(false),
        }));
        let of_thread = watch.clone();
        // Without the thread, waits have no limit. That is better than no run.
        if let Err(error) = std::thread::Builder::new().name("watch".into()).spawn(move || of_thread.run()) {
            tracing::warn!("cannot watch the other ranks: {error}");
        }
        watch
    }

    /// Names the rank's current phase.
    pub(crate) fn phase(&self, name: &str) {
        self.0.own.set_phase(name);
        self.publish();
    }

    /// The name of the rank's current phase.
    pub(crate) fn phase_name(&self) -> String {
        self.0.own.phase()
    }

    /// The rank waits for messages from other ranks. Returns the number of the step, which is the same on all ranks.
    pub(crate) fn wait(&self) -> (Waiting<'_>, u64) {
        let step = self.step();
        (self.enter(State::Waits), step)
    }

    /// Like [`Watch::wait`], for no longer than `limit`.
    pub(crate) fn wait_within(&self, limit: Duration) -> (Waiting<'_>, u64) {
        self.set_limit(limit);
        self.wait()
    }

    fn set_limit(&self, limit: Duration) {
        self.0.limit.store(limit.as_nanos().min(u128::from(NO_LIMIT - 1)) as u64, Ordering::Relaxed);
    }

    /// The rank is in a call that all ranks make together and that cannot be interrupted.
    pub(crate) fn call(&self) -> Waiting<'_> {
        self.step();
        self.enter(State::Calls)
    }

    /// Like [`Watch::call`], for no longer than [`Watch::contact`].
    pub(crate) fn call_within_contact(&self) -> Waiting<'_> {
        self.set_limit(self.contact());
        self.call()
    }

    /// Time limit for the first messages between nodes. No rank does anything else at that time, and there are no signs of life yet.
    pub(crate) fn contact(&self) -> Duration {
        self.0.options.deadline.max(LEAST_CONTACT)
    }

    /// The rank runs the kernel. The kernel's deadline applies, and the thread that runs it checks [`Watch::lost`].
    pub(crate) fn run_kernel(&self) -> Waiting<'_> {
        self.enter(State::Runs)
    }

    /// Says whether the kernel that this rank runs is idle. If so, a rank that gives no sign of life for the deadline counts as lost too,
    /// because no wait of the kernel would notice that.
    pub(crate) fn set_idle(&self, idle: bool) {
        self.0.idle.store(idle, Ordering::Relaxed);
    }

    fn enter(&self, state: State) -> Waiting<'_> {
        let before = self.0.own.state();
        self.set_state(state);
        Waiting { watch: self, before }
    }

    fn step(&self) -> u64 {
        if let Some(fault) = self.0.options.fault {
            fault.at(self.0.place.rank, self.0.own.step() + 1);
        }
        let step = self.0.own.next_step();
        self.publish();
        tracing::debug!("step {step}: {}", self.phase_name());
        step
    }

    /// For tests: true if a fault keeps this rank from launching its kernel.
    pub(crate) fn fails_to_launch(&self) -> bool {
        let fails = |fault: Fault| fault.fails_to_launch(self.0.place.rank, self.0.own.step());
        self.0.options.fault.is_some_and(fails)
    }

    /// A message, or a piece of one, has been sent or received.
    pub(crate) fn moved(&self) {
        self.0.own.moved();
        self.publish();
    }

    /// This process ends, and no other one waits for it.
    pub(crate) fn has_left(&self) {
        self.set_state(State::Left);
    }

    fn set_state(&self, state: State) {
        self.0.own.set_state(state);
        self.publish();
    }

    /// Sets the job's ranks on other nodes, with their nodes, out of `everybody` ranks. Their messages are recorded from now on.
    pub(crate) fn set_elsewhere(&self, everybody: u32, ranks: impl IntoIterator<Item = (u32, String)>) {
        let _ = self.0.elsewhere.set(Elsewhere::new(everybody, ranks, FIRST_PHASE));
    }

    /// The words that this rank sends to other nodes about itself.
    pub(crate) fn own_words(&self) -> Vec<u64> {
        self.0.own.words().to_vec()
    }

    /// Records what a rank of another node reports about itself.
    pub(crate) fn hear(&self, rank: u32, words: &[u64]) {
        if let Some(elsewhere) = self.0.elsewhere.get() {
            elsewhere.hear(rank, words);
        }
    }

    /// Records that a rank of another node has finished.
    pub(crate) fn hear_goodbye(&self, rank: u32) {
        if let Some(elsewhere) = self.0.elsewhere.get() {
            elsewhere.hear_goodbye(rank);
        }
    }

    /// True if this rank has given the job up.
    pub(crate) fn has_given_up(&self) -> bool {
        self.0.own.state() == State::Ended
    }

    /// Records that the ranks of other nodes know that.
    pub(crate) fn note_told(&self) {
        self.0.told_elsewhere.store(true, Ordering::Relaxed);
    }

    /// Sets how long the kernel may take to end after another rank is lost.
    pub(crate) fn set_longest_end(&self, time: Duration) {
        self.0.longest_end.store(time.as_millis() as u64, Ordering::Relaxed);
    }

    /// The proxy to other nodes has checked for work.
    pub(crate) fn note_turn(&self) {
        self.0.proxy_turns.fetch_add(1, Ordering::Relaxed);
    }

    /// The proxy has finished.
    pub(crate) fn note_last_turn(&self) {
        self.0.proxy_turns.store(0, Ordering::Relaxed);
    }

    /// The verdict if the proxy to other nodes has stopped. Then this rank and the ranks of other nodes get no more
    /// news of each other. `idle` holds the number of the proxy's turns and how long that number has not changed. This
    /// is found a little earlier than the silence of other ranks.
    fn stopped_proxy(&self, moment: Duration, idle: &mut (u64, Duration)) -> Option<Verdict> {
        let turns = self.0.proxy_turns.load(Ordering::Relaxed);
        let begun = self.0.elsewhere.get().is_some() && turns != 0;
        *idle = if begun && turns == idle.0 {
            (turns, idle.1 + moment.min(2 * TICK))
        } else {
            (turns, Duration::ZERO)
        };
        let deadline = self.0.options.deadline.max(Duration::from_secs(1));
        (idle.1 + 6 * TICK >= deadline).then(|| {
            let (rank, node) = (self.0.place.rank, process::node_name());
            let seconds = deadline.as_secs_f64();
            let text = format!(
                "rank {rank} on node {node} is cut off: its proxy, the thread that sends to other nodes, has not run for {seconds:.0} s (RunConfig::deadline {seconds}); the thread or an MPI call in it is blocked"
            );
            Verdict::Lost { rank, text }
        })
    }

    /// A message about a rank of this node whose process ended during the run, if there is one.
    pub(crate) fn lost(&self) -> Option<String> {
        if !self.0.is_lost.load(Ordering::Relaxed) {
            return None;
        }
        self.0.lost_seen.store(true, Ordering::Relaxed);
        self.0.lost.lock().ok()?.clone()
    }

    /// Like [`Watch::lost`], but checks at once. It also names a rank that has given the job up.
    pub(crate) fn find_lost(&self) -> Option<String> {
        let namespace = own_namespace();
        let cause = |seen: &Seen| match seen.state {
            State::Left => None,
            State::Ended => Some(given_up(seen.rank, seen.node.as_deref())),
            _ => (fate(seen, namespace) == Fate::Gone).then(|| lost(seen, self.node().as_deref())),
        };
        let cause = || self.others().unwrap_or_default().iter().find_map(cause);
        self.lost().or_else(cause)
    }

    /// This node's name, if there are others.
    fn node(&self) -> Option<String> {
        self.0.elsewhere.get().map(|_| process::node_name())
    }

    /// A message about a rank of another node without recent news, if there is one. For callers that already know that something has gone
    /// wrong.
    pub(crate) fn missed(&self) -> Option<String> {
        self.0.elsewhere.get()?.missed()
    }

    /// The rank has finished. Waits until all ranks of the node have finished, so that a rank that does not end is named. Then leaves.
    pub(crate) fn leave(&self) {
        self.phase("end");
        let (waiting, step) = self.wait();
        while self
            .others()
            .unwrap_or_default()
            .iter()
            .any(|other| other.node.is_none() && other.step < step && other.state != State::Ended)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(waiting);
        self.set_state(State::Left);
        // This rank may end because its output has no reader any more, for example because the launcher has ended. The
        // watch may not have checked the launcher since then.
        if let Some((launcher, _)) = self.lost_launcher() {
            self.clean_up_after(launcher);
        }
    }

    /// The launcher's process, with a message, if it has ended.
    fn lost_launcher(&self) -> Option<(u32, String)> {
        let launcher = self.0.launcher.get()?;
        Some((launcher.pid, launcher.gone()?))
    }

    /// Publishes this rank's state in the shared table.
    fn publish(&self) {
        if let Some(slot) = self.shared_slot() {
            slot.copy(&self.0.own);
        }
    }

    fn shared_slot(&self) -> Option<&'static Slot> {
        self.0.table.get()?.slots.get(self.0.place.local_rank? as usize)
    }

    /// The word that wakes this rank's host; `None` if there is no shared table.
    pub(crate) fn bell(&self) -> Option<&'static AtomicU32> {
        self.shared_slot().map(Slot::bell)
    }

    /// The word that wakes the host of another rank of this node, if this rank knows its place in the table.
    pub(crate) fn bell_of(&self, rank: u32) -> Option<&'static AtomicU32> {
        let slots = self.0.table.get()?.slots;
        slots.iter().find(|slot| slot.rank() == Some(rank)).map(Slot::bell)
    }

    /// The words of the other ranks of this node, with their ranks.
    pub(crate) fn other_bells(&self) -> Vec<(u32, &'static AtomicU32)> {
        let slots = self.0.table.get().map_or(&[][..], |table| table.slots);
        let come = slots.iter().filter_map(|slot| Some((slot.rank()?, slot.bell())));
        come.filter(|(rank, _)| *rank != self.0.place.rank).collect()
    }

    /// The other ranks that have started, on this node and on others; `None` if there is no table of this node.
    fn others(&self) -> Option<Vec<Seen>> {
        let slots = self.0.table.get()?.slots;
        let own = self.0.place.local_rank? as usize;
        let here = slots.iter().enumerate().filter(|(i, _)| *i != own).filter_map(|(_, slot)| slot.look());
        Some(here.chain(self.0.elsewhere.get().into_iter().flat_map(Elsewhere::look)).collect())
    }

    fn run(&self) {
        let place = &self.0.place;
        let (mut search, table) = Search::begin(place);
        self.found(table);
        let all_here = place.local_rank.is_some() && place.local_size == Some(place.size);
        let mut everybody = all_here.then_some(place.size);
        let mut observer = Observer::new(self.0.options.deadline, everybody);
        let namespace = own_namespace();
        if let Some(found) = Launcher::find() {
            let _ = self.0.launcher.set(found);
        }
        let mut last = Instant::now();
        let (mut held_up, mut proxy) = (None, (0, Duration::ZERO));
        // A rank of several nodes must say why it ends: the others may know less.
        let (mut held, mut asked) = ((!place.is_one_node()).then(Held::new), None);
        let (mut knows_elsewhere, mut cleaned) = (false, false);
        loop {
            self.0.own.beat();
            self.publish();
            let found = search.go_on(place, self.0.table.get());
            self.found(found);
            let moment = last.elapsed();
            last = Instant::now();
            let Some(own) = self.0.own.look() else { return };
            match own.state {
                // The thread that set this state ends the process. A kept signal must not disturb it.
                State::Ended => {
                    std::mem::forget(held);
                    return;
                }
                State::Left => {
                    self.let_go(held);
                    return;
                }
                _ => {}
            }
            if let Some(elsewhere) = self.0.elsewhere.get().filter(|_| !knows_elsewhere) {
                knows_elsewhere = true;
                everybody = Some(elsewhere.everybody);
                observer.set_elsewhere(elsewhere.everybody, process::node_name());
            }
            if let Some((launcher, gone)) = self.lost_launcher() {
                if !std::mem::replace(&mut cleaned, true) {
                    self.clean_up_after(launcher);
                }
                self.act(Verdict::Lost { rank: place.rank, text: gone }, own.state);
            }
            if let Some(verdict) = self.stopped_proxy(moment, &mut proxy) {
                self.act(verdict, own.state);
            }
            let others = self.others();
            let limit = match self.0.limit.load(Ordering::Relaxed) {
                NO_LIMIT => None,
                limit => Some(Duration::from_nanos(limit)),
            };
            let idle = self.0.idle.load(Ordering::Relaxed);
            let verdict =
                observer.look(moment, &own, others.as_deref(), (limit, idle), |seen| fate(seen, namespace));
            if let Some(verdict) = verdict {
                self.act(verdict, own.state);
            }
            self.end_if_held_up(&mut held_up);
            self.end_if_asked(&mut held, &mut asked);
            let all_here = everybody.is_none_or(|all| others.is_some_and(|o| o.len() as u32 + 1 >= all));
            // Ranks that have met over MPI have started, so from then on the checks are less frequent.
            std::thread::sleep(if all_here || own.step > FIRST_STEPS { TICK } else { FIRST_TICKS });
        }
    }

    fn found(&self, table: Option<Table>) {
        let Some(table) = table else { return };
        if self.0.table.set(table).is_ok()
            && let Some(slot) = self.shared_slot()
        {
            slot.copy(&self.0.own);
            slot.take(self.0.place.rank, std::process::id(), own_namespace());
        }
    }
}

fn given_up(rank: u32, node: Option<&str>) -> String {
    let place = node.map_or_else(String::new, |node| format!(" on node {node}"));
    format!("rank {rank}{place} has ended the job")
}

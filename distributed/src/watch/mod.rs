//! Bounds every wait of a rank for the others, outside the kernel.
//!
//! A thread of each rank notes that the rank is alive in a table that the ranks of a node share, and looks at the
//! others there. While its rank waits for them, in a message or inside a library's call that can't be interrupted, it
//! decides whether the wait still has an end ([`observer`]); if not, it has the cause told and ends the process.

mod elsewhere;
mod ending;
mod observer;
mod process;
mod share;
mod table;

use crate::fault::Fault;
use crate::launcher::Place;
use elsewhere::Elsewhere;
use kernels_cu::signals;
use observer::{Observer, Verdict, lost};
use process::{Fate, Launcher, fate, own_namespace};
use share::{Search, Table};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use table::{Seen, Slot, State};

/// How often the thread looks.
const TICK: Duration = Duration::from_millis(50);
/// The same while the ranks of the node come together.
const FIRST_TICKS: Duration = Duration::from_millis(5);
/// Steps that they have for it.
const FIRST_STEPS: u64 = 4;
/// On several nodes a rank that runs the kernel asks within this whether another one is lost, once one is. One that does not is held up: a
/// call of MPI that has something to tell the launcher waits for it, and it may have gone.
const HELD_UP: Duration = Duration::from_secs(2);
/// One that knows it has this long for its end, unless its kernel needs longer ([`Watch::set_longest_end`]).
const LONGEST_END: Duration = Duration::from_secs(3);
/// On several nodes a rank that runs the kernel has this long after a signal: a launcher that ends its ranks gives them a second.
const QUICK_END: Duration = Duration::from_millis(450);
/// Other nodes are told that this rank has given up within this, or not at all.
const LAST_WORD: Duration = Duration::from_millis(100);
/// No limit of its own.
const NO_LIMIT: u64 = u64::MAX;

/// What a job's ranks need to know before they meet.
#[derive(Clone, Copy, Debug)]
pub struct WatchOptions {
    /// A wait for other ranks ends the job when one of them gives no sign of life for this long.
    pub deadline: Duration,
    /// Tells the user why the job ends.
    pub tell: fn(&str),
    /// For tests: what this rank does wrong.
    pub fault: Option<Fault>,
    /// The proxy carries to all other ranks, also to those of this node: for GPUs with [`Transport::Host`](crate::cuda::Transport).
    pub carries_all: bool,
}

/// The watch over one rank's waits; a copy is the same watch.
#[derive(Clone, Debug)]
pub(crate) struct Watch(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    place: Place,
    options: WatchOptions,
    /// Where this rank stands. Written by its main thread; the beats by the watch's thread.
    own: Slot,
    table: OnceLock<Table>,
    /// The ranks of other nodes, once they are known.
    elsewhere: OnceLock<Elsewhere>,
    /// Nanoseconds that this rank's wait may last at most.
    limit: AtomicU64,
    /// The other rank that is lost, and what is known of it.
    lost: Mutex<Option<String>>,
    is_lost: AtomicBool,
    /// While the rank runs the kernel: it has nothing to do, and no deadline but this watch's holds.
    idle: AtomicBool,
    /// Whoever runs the kernel knows that.
    lost_seen: AtomicBool,
    /// Milliseconds that whoever runs the kernel has for its end after that.
    longest_end: AtomicU64,
    /// How often the proxy to other nodes has looked for work.
    proxy_turns: AtomicU64,
    /// MPI can be called: it has been initialised, and not been finalised.
    mpi: AtomicBool,
    /// The ranks of other nodes have been told that this one has given the job up.
    told_elsewhere: AtomicBool,
}

/// As long as it lives, the rank waits for others.
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
    /// Begins to watch this process, which is at this place of its job.
    pub(crate) fn begin(place: Place, options: WatchOptions) -> Watch {
        let own = Slot::default();
        own.take(place.rank, std::process::id(), own_namespace());
        let watch = Watch(Arc::new(Shared {
            place,
            options,
            own,
            table: OnceLock::new(),
            elsewhere: OnceLock::new(),
            limit: AtomicU64::new(NO_LIMIT),
            lost: Mutex::new(None),
            is_lost: AtomicBool::new(false),
            idle: AtomicBool::new(false),
            lost_seen: AtomicBool::new(false),
            longest_end: AtomicU64::new(LONGEST_END.as_millis() as u64),
            proxy_turns: AtomicU64::new(0),
            mpi: AtomicBool::new(false),
            told_elsewhere: AtomicBool::new(false),
        }));
        let of_thread = watch.clone();
        // Without it the waits have no bound, which is better than no run.
        if let Err(error) = std::thread::Builder::new().name("watch".into()).spawn(move || of_thread.run()) {
            tracing::warn!("no watch over the other ranks: {error}");
        }
        watch
    }

    /// Names what the rank does from now on.
    pub(crate) fn phase(&self, name: &str) {
        self.0.own.set_phase(name);
        self.publish();
    }

    /// The name of what the rank does.
    pub(crate) fn phase_name(&self) -> String {
        self.0.own.phase()
    }

    /// The rank waits for the others' messages; gives the step's number, which is the same on all ranks.
    pub(crate) fn wait(&self) -> (Waiting<'_>, u64) {
        let step = self.step();
        (self.enter(State::Waits), step)
    }

    /// As [`Watch::wait`], for no longer than `limit`.
    pub(crate) fn wait_within(&self, limit: Duration) -> (Waiting<'_>, u64) {
        self.0.limit.store(limit.as_nanos().min(u128::from(NO_LIMIT - 1)) as u64, Ordering::Relaxed);
        self.wait()
    }

    /// The rank is in a call that all ranks make together and that can't be interrupted.
    pub(crate) fn call(&self) -> Waiting<'_> {
        self.step();
        self.enter(State::Calls)
    }

    /// The rank runs the kernel: it is the kernel's deadline that holds, and who runs it asks for [`Watch::lost`].
    pub(crate) fn run_kernel(&self) -> Waiting<'_> {
        self.enter(State::Runs)
    }

    /// While the rank runs the kernel: whether it has nothing to do. Then a rank that gives no sign of life for the deadline is lost too,
    /// since no wait of the kernel would find that out.
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

    /// A message, or a piece of one, has come or gone.
    pub(crate) fn moved(&self) {
        self.0.own.moved();
        self.publish();
    }

    fn set_state(&self, state: State) {
        self.0.own.set_state(state);
        self.publish();
    }

    /// MPI can be called from now on, or no more.
    pub(crate) fn set_mpi(&self, up: bool) {
        self.0.mpi.store(up, Ordering::Relaxed);
    }

    /// The job's ranks on other nodes, with their nodes, of `everybody` ranks. From now on they are heard of.
    pub(crate) fn set_elsewhere(&self, everybody: u32, ranks: impl IntoIterator<Item = (u32, String)>) {
        let _ = self.0.elsewhere.set(Elsewhere::new(everybody, ranks));
    }

    /// What this rank tells other nodes of itself.
    pub(crate) fn own_words(&self) -> Vec<u64> {
        self.0.own.words().to_vec()
    }

    /// What a rank of another node tells of itself.
    pub(crate) fn hear(&self, rank: u32, words: &[u64]) {
        if let Some(elsewhere) = self.0.elsewhere.get() {
            elsewhere.hear(rank, words);
        }
    }

    /// A rank of another node has said goodbye.
    pub(crate) fn hear_goodbye(&self, rank: u32) {
        if let Some(elsewhere) = self.0.elsewhere.get() {
            elsewhere.hear_goodbye(rank);
        }
    }

    /// This rank has given the job up.
    pub(crate) fn has_given_up(&self) -> bool {
        self.0.own.state() == State::Ended
    }

    /// The ranks of other nodes know it.
    pub(crate) fn note_told(&self) {
        self.0.told_elsewhere.store(true, Ordering::Relaxed);
    }

    /// The kernel may take so long for its end after another rank is lost.
    pub(crate) fn set_longest_end(&self, time: Duration) {
        self.0.longest_end.store(time.as_millis() as u64, Ordering::Relaxed);
    }

    /// The proxy to other nodes has looked for work.
    pub(crate) fn note_turn(&self) {
        self.0.proxy_turns.fetch_add(1, Ordering::Relaxed);
    }

    /// The proxy has done everything.
    pub(crate) fn note_last_turn(&self) {
        self.0.proxy_turns.store(0, Ordering::Relaxed);
    }

    /// What is to be said where the proxy to other nodes has stopped: nobody hears of this rank any more, nor this one of others.
    /// `idle`: its turns, and for how long there has been no other one. A little earlier than others are found to be silent.
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
                "rank {rank} on node {node} is cut off: its proxy, the thread that carries to other nodes, has stopped for {seconds:.0} s (--deadline {seconds}): it, or a call of MPI in it, is held up"
            );
            Verdict::Lost { rank, text }
        })
    }

    /// A thread of this process can't do its work any more: the job ends.
    pub(crate) fn fail(&self, message: String) {
        self.act(Verdict::Overdue { text: message }, self.0.own.state());
    }

    /// What is known of a rank of this node whose process has ended in the run, if one has.
    pub(crate) fn lost(&self) -> Option<String> {
        if !self.0.is_lost.load(Ordering::Relaxed) {
            return None;
        }
        self.0.lost_seen.store(true, Ordering::Relaxed);
        self.0.lost.lock().ok()?.clone()
    }

    /// As [`Watch::lost`], but looks at once, and names a rank too that has given the job up.
    pub(crate) fn find_lost(&self) -> Option<String> {
        let namespace = own_namespace();
        let cause = |seen: &Seen| match seen.state {
            State::Left => None,
            State::Ended => Some(given_up(seen.rank, seen.node.as_deref())),
            _ => (fate(seen, namespace) == Fate::Gone).then(|| lost(seen)),
        };
        let cause = || self.others().unwrap_or_default().iter().find_map(cause);
        self.lost().or_else(cause)
    }

    /// A rank of another node that has missed its times, where that is known: for callers that know already that something has gone wrong.
    pub(crate) fn missed(&self) -> Option<String> {
        self.0.elsewhere.get()?.missed()
    }

    /// The rank has done everything: waits until all ranks of the node have, so that one which does not end is named,
    /// and leaves.
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
    }

    /// Ends this process and the job with status 4; `message` is told.
    pub(crate) fn give_up(&self, message: Option<String>) -> ! {
        self.set_state(State::Ended);
        let tell = self.0.options.tell;
        // A launcher that ends the job already needs no word, and may never answer to one.
        let mpi = self.0.mpi.load(Ordering::Relaxed) && !self.is_hurried();
        let watch = self.clone();
        let last = move || {
            message.iter().for_each(|message| tell(message));
            let begin = Instant::now();
            while watch.owes_word() && begin.elapsed() < LAST_WORD {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let word = if self.0.elsewhere.get().is_some() { ending::WORD } else { ending::PATIENCE };
        ending::end(last, mpi, self.patience(), word)
    }

    /// Ranks of other nodes have yet to be told that this one has given up.
    fn owes_word(&self) -> bool {
        self.0.elsewhere.get().is_some() && !self.0.told_elsewhere.load(Ordering::Relaxed)
    }

    /// How long this process has for its end.
    fn patience(&self) -> Duration {
        if self.is_hurried() { ending::HURRY } else { ending::PATIENCE }
    }

    /// A launcher ends the job, as far as this rank can tell, and will end this process by force soon.
    fn is_hurried(&self) -> bool {
        self.0.elsewhere.get().is_some() && signals::is_stopping()
    }

    /// Ends the process where its main thread runs the kernel, or comes from there, and does not act on what it should have seen; since
    /// when, `since` says.
    fn end_if_held_up(&self, since: &mut Option<Instant>) {
        let flag = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        // Waits and calls have bounds of their own.
        let acts = self.0.elsewhere.get().is_some() && (flag(&self.0.is_lost) || self.is_hurried());
        if !acts || self.0.own.state().awaits() {
            *since = None;
            return;
        }
        let limit = match flag(&self.0.lost_seen) {
            _ if self.is_hurried() => QUICK_END,
            true => Duration::from_millis(self.0.longest_end.load(Ordering::Relaxed)),
            false => HELD_UP,
        };
        if since.get_or_insert_with(Instant::now).elapsed() < limit {
            return;
        }
        let cause = self.find_lost().or_else(|| self.missed());
        // A call of it is what holds the other thread up.
        self.set_mpi(false);
        self.give_up(Some(cause.unwrap_or_else(|| "the launcher has ended the job".into())));
    }

    /// Notes in the common table where this rank stands.
    fn publish(&self) {
        if let Some(slot) = self.shared_slot() {
            slot.copy(&self.0.own);
        }
    }

    fn shared_slot(&self) -> Option<&'static Slot> {
        self.0.table.get()?.slots.get(self.0.place.local_rank? as usize)
    }

    /// The word that rings this rank's host; `None` where there is no common table.
    pub(crate) fn bell(&self) -> Option<&'static AtomicU32> {
        self.shared_slot().map(Slot::bell)
    }

    /// Those of the other ranks of this node, with their ranks.
    pub(crate) fn other_bells(&self) -> Vec<(u32, &'static AtomicU32)> {
        let slots = self.0.table.get().map_or(&[][..], |table| table.slots);
        let come = slots.iter().filter_map(|slot| Some((slot.look()?.rank, slot.bell())));
        come.filter(|(rank, _)| *rank != self.0.place.rank).collect()
    }

    /// The other ranks that have come, of this node and of others; `None` where there is no table of this node's.
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
        let launcher = Launcher::find();
        let mut last = Instant::now();
        let (mut held_up, mut proxy) = (None, (0, Duration::ZERO));
        loop {
            self.0.own.beat();
            self.publish();
            let found = search.go_on(place, self.0.table.get());
            self.found(found);
            let moment = last.elapsed();
            last = Instant::now();
            let Some(own) = self.0.own.look() else { return };
            // Whoever brought it there does the rest.
            if matches!(own.state, State::Left | State::Ended) {
                return;
            }
            if let Some(elsewhere) = self.0.elsewhere.get() {
                everybody = Some(elsewhere.everybody);
                observer.set_everybody(elsewhere.everybody);
            }
            if let Some(gone) = launcher.as_ref().and_then(Launcher::gone) {
                // Nobody is there to end the job for this process.
                self.set_mpi(false);
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
            let all_here = everybody.is_none_or(|all| others.is_some_and(|o| o.len() as u32 + 1 >= all));
            // Ranks that have met over MPI have come, if they can.
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

    fn act(&self, verdict: Verdict, state: State) {
        let (message, tells) = match verdict {
            Verdict::Lost { text, .. } => (text, true),
            Verdict::GivenUp { rank, node } => (given_up(rank, node.as_deref()), false),
            Verdict::Overdue { text } => (text, true),
        };
        if state == State::Runs {
            // Who runs the kernel asks.
            if let Ok(mut lost) = self.0.lost.lock() {
                lost.get_or_insert(message);
            }
            self.0.is_lost.store(true, Ordering::Relaxed);
            return;
        }
        let first = self.0.table.get().is_none_or(|table| table.header.tells(self.0.place.rank));
        // Who ran the kernel tells this in its report, before it waits for the others again.
        let told = self.0.is_lost.load(Ordering::Relaxed);
        if told && !state.awaits() {
            return;
        }
        if tells && first && !told {
            self.give_up(Some(message));
        }
        if !told {
            // The rank that tells needs a moment for it: the launcher ends the others with the first.
            std::thread::sleep(self.patience());
        }
        self.give_up(None);
    }
}

fn given_up(rank: u32, node: Option<&str>) -> String {
    let place = node.map_or_else(String::new, |node| format!(" on node {node}"));
    format!("rank {rank}{place} has ended the job")
}

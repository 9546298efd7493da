//! Ends a process that cannot wait for anything any more.

use super::observer::Verdict;
use super::table::State;
use super::{TICK, Watch, given_up, process};
use crate::mpi_files;
use kernels_cu::signals::{self, Held};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time limit for the work that remains at the end.
const PATIENCE: Duration = Duration::from_secs(2);
/// The same limit on several nodes after a signal: a launcher that ends its ranks gives them one second.
const HURRY: Duration = Duration::from_millis(150);
/// On several nodes, a rank that runs the kernel asks within this time whether another rank is lost. A rank that does not ask is blocked:
/// an MPI call that must report to the launcher waits for the launcher, which may be gone.
const HELD_UP: Duration = Duration::from_secs(2);
/// The same time on several nodes after a signal: a launcher that ends its ranks gives them one second.
const QUICK_END: Duration = Duration::from_millis(450);
/// On several nodes, how long a rank looks for a lost rank after a signal outside the kernel. A rank of another node counts as missed after
/// half a second. Together with [`HURRY`] less than the second that a launcher gives.
const LAST_LOOK: Duration = Duration::from_millis(700);
/// The same before the first contact. A rank of this node that has ended is seen at once.
const FIRST_LOOK: Duration = Duration::from_millis(100);
/// On several nodes, how long a signal is kept after its rank has left. The process has ended by then, if nothing holds it up.
const LINGER: Duration = Duration::from_secs(2);
/// Time limit for telling other nodes that this rank has given up.
const LAST_WORD: Duration = Duration::from_millis(100);
/// Time for the watch to find the cause of a failed MPI call. A rank of another node counts as missed after half a second.
const DOUBT: Duration = Duration::from_millis(600);
/// The run failed.
const STATUS: i32 = 4;

impl Watch {
    /// An MPI call of the rank's main thread has failed. Returns if the rank runs the kernel, since those callers handle errors. Otherwise
    /// the process ends. In most cases the peer has ended: the watch is about to find out, and knows more.
    pub(crate) fn call_failed(&self, problem: &str) {
        if self.0.own.state() == State::Runs {
            return;
        }
        let text = format!("an MPI call in `{}` has failed: {problem}", self.phase_name());
        self.act(self.cause_or(text), State::Calls);
    }

    /// Reports that a thread of this process cannot continue. The job ends.
    pub(crate) fn fail(&self, message: String) {
        self.act(self.cause_or(message), self.0.own.state());
    }

    /// The verdict after a failed MPI call: the lost rank if the watch finds one, otherwise `text`.
    fn cause_or(&self, text: String) -> Verdict {
        std::thread::sleep(DOUBT);
        let cause = self.find_lost().or_else(|| self.missed());
        Verdict::Overdue { text: cause.unwrap_or(text) }
    }

    /// Acts on a verdict about other ranks.
    pub(super) fn act(&self, verdict: Verdict, state: State) {
        let (message, tells) = match verdict {
            Verdict::Lost { text, .. } => (text, true),
            Verdict::GivenUp { rank, node } => (given_up(rank, node.as_deref()), false),
            Verdict::Overdue { text } => (text, true),
        };
        if state == State::Runs {
            // The thread that runs the kernel checks this.
            if let Ok(mut lost) = self.0.lost.lock() {
                lost.get_or_insert(message);
            }
            self.0.is_lost.store(true, Ordering::Relaxed);
            return;
        }
        // Only a rank that will speak takes the node's turn to do so.
        let first = tells && self.0.table.get().is_none_or(|table| table.header.tells(self.0.place.rank));
        // The thread that ran the kernel reports this before it waits for the others again.
        let told = self.0.is_lost.load(Ordering::Relaxed);
        if told && !state.awaits() {
            return;
        }
        if first && !told {
            self.give_up(Some(message));
        }
        if !told {
            // The reporting rank needs a moment, because the launcher ends the others together with the first. After a signal it is ending
            // them already.
            signals::end_on_signal();
            if !signals::is_kept() {
                std::thread::sleep(self.patience());
            }
        }
        self.give_up(None);
    }

    /// Reports `message` and ends this process with status 4, which ends the job.
    pub(crate) fn give_up(&self, message: Option<String>) -> ! {
        self.set_state(State::Ended);
        let tell = self.0.options.tell;
        let watch = self.clone();
        let last = move || {
            message.iter().for_each(|message| tell(message));
            signals::end_on_signal();
            watch.await_last_word();
        };
        end(last, self.holders(), self.patience())
    }

    /// How many values of [`Held`] the watch has: see [`Watch::run`].
    fn holders(&self) -> usize {
        usize::from(!self.0.place.is_one_node())
    }

    /// Waits until the ranks of other nodes know that this rank has given up.
    fn await_last_word(&self) {
        let begin = Instant::now();
        while self.owes_word() && begin.elapsed() < LAST_WORD {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// True if ranks of other nodes must still be told that this rank has given up.
    fn owes_word(&self) -> bool {
        self.0.elsewhere.get().is_some() && !self.0.told_elsewhere.load(Ordering::Relaxed)
    }

    /// Removes the files that the launcher's process `launcher` has left. Its temporary folder may be on a disk that does not answer.
    pub(super) fn clean_up_after(&self, launcher: u32) {
        within(HURRY, move || mpi_files::remove_after_launcher(launcher));
    }

    /// How long this process has to end.
    fn patience(&self) -> Duration {
        if self.is_hurried() { HURRY } else { PATIENCE }
    }

    /// True if a launcher seems to be ending the job. It will soon kill this process.
    fn is_hurried(&self) -> bool {
        signals::is_kept() || self.0.elsewhere.get().is_some() && signals::is_stopping()
    }

    /// Ends the process if a signal is kept for it. The launcher may have sent the signal because a rank has died, so such a rank is named
    /// first. Otherwise the rank reports the signal, which then has its default effect. `since` holds the time at which it was seen.
    pub(super) fn end_if_asked(&self, held: &mut Option<Held>, since: &mut Option<Instant>) {
        let Some(signal) = signals::kept_name().filter(|_| held.is_some()) else { return };
        if let Some(text) = self.find_lost().or_else(|| self.missed()) {
            self.act(Verdict::Overdue { text }, State::Calls);
        }
        // Before the first contact, nothing is known of the ranks of other nodes.
        let look = if self.0.elsewhere.get().is_some() { LAST_LOOK } else { FIRST_LOOK };
        if since.get_or_insert_with(Instant::now).elapsed() < look {
            return;
        }
        let (rank, node, phase) = (self.0.place.rank, process::node_name(), self.phase_name());
        self.set_state(State::Ended);
        let (tell, watch) = (self.0.options.tell, self.clone());
        // The launcher may have sent the signal to all ranks of the node.
        let tells = self.0.table.get().is_none_or(|table| table.header.tells(rank));
        let last = move || {
            if tells {
                tell(&format!("{signal} has ended rank {rank} on node {node} in `{phase}`"));
            }
            watch.await_last_word();
            mpi_files::remove_half_made_windows();
        };
        within(HURRY, last);
        *held = None;
    }

    /// After this rank has left. Its process is about to end with a status of its own, and no other rank needs it. A signal must not change
    /// that status: a launcher sends one to the ranks that are left when the first has ended. But if the process is held up, or goes on
    /// without the job, signals end it as by default.
    pub(super) fn let_go(&self, held: Option<Held>) {
        if held.is_none() {
            return;
        }
        let begin = Instant::now();
        while !signals::is_kept() && begin.elapsed() < LINGER {
            std::thread::sleep(TICK);
        }
        if signals::is_kept() {
            // Less than the second that a launcher gives.
            std::thread::sleep(LAST_LOOK);
        }
        // The last one to be dropped has the effect of a kept signal. Later signals are not kept.
        drop(held);
    }

    /// Ends the process if its main thread runs the kernel, or comes from there, and does not react to something that it should have seen.
    /// `since` holds the time at which that began.
    pub(super) fn end_if_held_up(&self, since: &mut Option<Instant>) {
        let flag = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        // Waits and calls have their own limits. A kept signal ends the process in any case.
        let acts = self.0.elsewhere.get().is_some() && (flag(&self.0.is_lost) || signals::is_stopping());
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
        self.give_up(Some(cause.unwrap_or_else(|| "the launcher has ended the job".into())));
    }
}

/// Runs `work` on a thread, and waits for it no longer than `patience`. It may be stuck, such as at a pipe that nobody reads.
fn within(patience: Duration, work: impl FnOnce() + Send + 'static) {
    if let Ok(thread) = std::thread::Builder::new().name("end".into()).spawn(work) {
        let begin = Instant::now();
        while begin.elapsed() < patience && !thread.is_finished() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Runs `last` and waits until no compilation runs, when `holders` values of [`Held`] are left. Then ends the process with status 4.
/// Nothing can delay this for longer than `patience`.
///
/// The launcher ends the job when it sees the status. MPI_Abort would tell it, but must not be called: other threads of
/// this process may be in MPI, and the code that prints MPI_Abort's message is not thread-safe (`opal_show_help` of
/// Open MPI 4 has one scanner, without a lock).
fn end(last: impl FnOnce() + Send + 'static, holders: usize, patience: Duration) -> ! {
    within(patience, move || {
        last();
        mpi_files::remove_half_made_windows();
        signals::await_holders(holders);
    });
    // SAFETY: ends the process, so no memory is used afterwards.
    unsafe { libc::_exit(STATUS) }
}

#[cfg(test)]
#[path = "ending_test.rs"]
mod tests;

//! Rank 0's host: orders the entries, sends them to all hosts, and collects the results.

use super::arena::Arena;
use super::bells::Bells;
use super::client::{Shared, Waiting};
use super::eager::Eager;
use super::results::Active;
use super::serve::{Host, Owed, Wish};
use super::sink::End;
use super::table::Table;
use super::target::Target;
use super::wire::{Entry, Message, Payload, Wire};
use crate::bell::Bell;
use crate::error::{Error, Result};
use crate::outputs::Outputs;
use crate::plan::Finish;
use crate::world::World;
use kernels_cu::abi;
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

/// Rank 0's part of a service; see [`super::service`].
#[derive(Debug)]
pub struct Service(pub(super) Arc<Shared>);

/// Sleep time while only the bell is waited for. Lost ranks are noticed within it.
const LONG: Duration = Duration::from_millis(20);

pub(super) struct Leader {
    shared: Arc<Shared>,
    bell: Bell,
    /// The value of the bell when it was last read.
    heard: u32,
    /// From the ring that announces or submits a request to an idle engine until its first token.
    eager: Eager,
    /// Rung after a message for the other hosts.
    bells: Bells,
    wire: Wire,
    table: Table,
    free_numbers: Vec<u32>,
    /// Room for the tokens of requests.
    arena: Arena,
    /// Entries that are not in this rank's ring yet, in order.
    log: VecDeque<Entry>,
    /// Number of entries so far.
    sent: u64,
    /// Ends of the groups in the log. The entries of a group become visible together.
    groups: VecDeque<u64>,
    /// End of the last group that all hosts have.
    complete: u64,
    /// For each other rank, the number of entries that it has confirmed, and whether its kernel has ended.
    others: Vec<Other>,
    /// Total number of tokens taken so far, as the host has seen it.
    tokens: u64,
    /// Total number of requests that have ended so far.
    ended: u64,
    /// The ones among them whose end has not been counted yet.
    ending: Vec<(u32, Active, Finish)>,
    stop_sent: bool,
    owed: Owed,
}

struct Other {
    confirmed: u64,
    left: bool,
}

impl Leader {
    pub fn new(service: Service, world: &World, bell: Bell, outputs: &Arc<Outputs>) -> Leader {
        let others = (1..world.size()).map(|_| Other { confirmed: 0, left: true }).collect();
        let shared = service.0;
        let bells = Bells::new(world, bell);
        let eager = Eager::new(bell, &world.cores());
        let limits = {
            let mut state = shared.lock();
            state.bell = Some(bell);
            state.ahead = eager.is_able().then(|| bells.near().to_vec());
            state.limits
        };
        shared.results().begin(outputs, limits.requests);
        Leader {
            shared,
            bell,
            heard: bell.listen(),
            eager,
            bells,
            wire: Wire::new(world),
            table: Table::default(),
            free_numbers: (0..limits.requests).rev().collect(),
            arena: Arena::new(limits.all_tokens),
            log: VecDeque::new(),
            sent: 0,
            groups: VecDeque::new(),
            complete: 0,
            others,
            tokens: 0,
            ended: 0,
            ending: Vec::new(),
            stop_sent: false,
            owed: Owed::default(),
        }
    }

    /// Ends every request, and refuses further ones.
    fn end_all(&mut self, reason: &str) {
        self.shared.close(reason);
        // These requests have ended normally.
        self.ending.drain(..).for_each(|(_, active, finish)| active.sink.end(End::Finished(finish)));
        let active: Vec<Active> = self.shared.results().drain().collect();
        active.into_iter().for_each(|active| active.sink.end(End::Lost(reason.into())));
    }

    fn enter(&mut self, entry: Entry) -> Result<()> {
        self.wire.send_all(&Message::Entry(entry.clone()))?;
        self.log.push_back(entry);
        self.sent += 1;
        Ok(())
    }

    /// Ends a group: the entries so far become visible together. The other hosts have something to do.
    fn close_group(&mut self, target: &impl Target) {
        if self.groups.back().unwrap_or(&self.complete) != &self.sent {
            self.groups.push_back(self.sent);
        }
        self.ring_others(target);
    }

    /// Signals that there are messages for the other hosts.
    fn ring_others(&self, target: &impl Target) {
        target.ring_others();
        self.bells.ring();
    }

    fn add(&mut self, number: u32, first: u32, add: Waiting, after_finished: u64) -> Result<()> {
        let room = add.room();
        let prompt = add.request.prompt.len() as u32;
        let request = abi::mpk_request {
            first_token: first,
            num_prompt_tokens: prompt,
            max_new_tokens: add.request.max_new_tokens,
            first_output: first + prompt,
            sampling: add.request.sampling.to_abi(prompt, add.request.logprobs),
            min_new_tokens: add.request.min_new_tokens,
            quiet: add.request.quiet.into(),
        };
        let active = Active::new(add.id, add.sink, first, prompt, room, add.request.logprobs);
        self.shared.results().put(number, active);
        tracing::debug!("request {} goes to all hosts", add.id);
        let payload = Some(Payload { request, prompt: add.request.prompt, keys: add.keys });
        self.enter(Entry { kind: abi::MPK_ADMIT, number, after_finished, payload })
    }

    fn cancel(&mut self, number: u32) -> Result<()> {
        if !self.shared.results().cancel(number) {
            return Ok(());
        }
        // Only a later entry may give the number to another request.
        self.enter(Entry { kind: abi::MPK_CANCEL, number, after_finished: 0, payload: None })
    }

    /// Handles requests for which there is room, and requests that must end.
    fn take_commands(&mut self, target: &impl Target) -> Result<bool> {
        let finished = target.outputs().finished();
        let (mut adds, mut gone) = (Vec::new(), Vec::new());
        let (cancels, all) = {
            let mut state = self.shared.lock();
            let cancels = std::mem::take(&mut state.cancels);
            for id in &cancels {
                if let Ok(place) = state.waiting.binary_search_by_key(id, |waiting| waiting.id) {
                    gone.extend(state.waiting.remove(place));
                }
            }
            let all = std::mem::take(&mut state.cancel_all);
            if all {
                gone.extend(state.waiting.drain(..));
            }
            while let (Some(next), Some(&number)) = (state.waiting.front(), self.free_numbers.last()) {
                let Some(first) = self.arena.take(next.room()) else { break };
                let Some(next) = state.waiting.pop_front() else { break };
                self.free_numbers.pop();
                state.in_kernel += 1;
                state.stats.prompt_tokens += next.request.prompt.len() as u64;
                adds.push((number, first, next));
            }
            (cancels, all)
        };
        let count = gone.len();
        gone.into_iter().for_each(|waiting| waiting.sink.end(End::Finished(Finish::Cancelled)));
        if count > 0 {
            self.shared.settle(count);
        }
        let before = self.sent;
        for (number, first, add) in adds {
            self.add(number, first, add, finished)?;
        }
        if all || !cancels.is_empty() {
            let numbers = self.shared.results().numbers(|active| all || cancels.contains(&active.id));
            numbers.into_iter().try_for_each(|number| self.cancel(number))?;
        }
        if self.sent != before {
            self.close_group(target);
        }
        Ok(self.sent != before)
    }

    fn take_messages(&mut self) -> Result<bool> {
        let mut any = false;
        while let Some((rank, message)) = self.wire.receive()? {
            any = true;
            let other = &mut self.others[rank as usize - 1];
            match message {
                Message::Confirmed(entries) => other.confirmed = entries,
                Message::Left => other.left = true,
                Message::Failed(status, message) => return Err(Error::AtRank { rank, status, message }),
                other => {
                    return Err(Error::Aborted(format!(
                        "rank {rank} sent {other} to rank 0; this is a bug, please report it"
                    )));
                }
            }
        }
        Ok(any)
    }

    /// Writes entries into this rank's ring while the other hosts write theirs. The kernel sees entries last, once all other hosts
    /// have them.
    fn publish(&mut self, target: &impl Target) -> Result<bool> {
        let mut any = false;
        while let Some(entry) = self.log.front() {
            if !self.table.write(entry, target.outputs(), target.control(), &target.writer())? {
                break;
            }
            if entry.kind == abi::MPK_ADMIT {
                self.shared.results().written(entry.number);
            }
            self.log.pop_front();
            any = true;
        }
        // The first entries of a group stay invisible until the last one has arrived.
        let confirmed = self.others.iter().map(|other| other.confirmed).min().unwrap_or(u64::MAX);
        let ready = confirmed.min(self.table.written());
        while let Some(&end) = self.groups.front().filter(|&&end| end <= ready) {
            self.complete = end;
            self.groups.pop_front();
        }
        let before = self.table.counted();
        self.table.count(self.complete, target.outputs(), &target.writer())?;
        if self.table.counted() != before {
            tracing::debug!("the kernel may see {} entries", self.table.counted());
            any = true;
        }
        Ok(any)
    }

    /// True if an entry is on its way to a ring.
    fn has_unseen(&self) -> bool {
        self.table.counted() != self.sent
    }

    /// Passes everything that the kernel has handed out to the sinks. The kernel never waits for them.
    fn take_results(&mut self, target: &impl Target) -> Result<bool> {
        let outputs = target.outputs();
        let mut wakers = Vec::new();
        let (tokens, ended, unwanted) = {
            let mut results = self.shared.results();
            results.take(&mut wakers);
            (results.tokens, results.take_ended(), results.unwanted())
        };
        // Without the lock.
        wakers.into_iter().for_each(Waker::wake);
        let any = tokens != self.tokens || !ended.is_empty();
        self.tokens = tokens;
        self.ended += ended.len() as u64;
        self.ending.extend(ended);
        let has_cancelled = !unwanted.is_empty();
        unwanted.into_iter().try_for_each(|number| self.cancel(number))?;
        if has_cancelled {
            self.close_group(target);
        }
        // An end may be visible a moment before it is counted. Other hosts use the count, and the statistics come before it.
        let counted = !self.ending.is_empty() && outputs.finished() >= self.ended;
        let over = if counted { std::mem::take(&mut self.ending) } else { Vec::new() };
        if any || counted {
            let mut state = self.shared.lock();
            state.stats.figures = outputs.figures();
            state.in_kernel -= over.len();
        }
        let count = over.len();
        for (number, active, finish) in over {
            self.free_numbers.push(number);
            self.arena.give_back(active.first, active.room);
            active.sink.end(End::Finished(finish));
        }
        if count > 0 {
            self.shared.settle(count);
        }
        Ok(any || counted || has_cancelled)
    }

    /// True if no request is in the kernel or on its way there.
    fn is_empty(&self) -> bool {
        self.shared.results().is_empty() && self.ending.is_empty()
    }

    /// Limits the wait for other hosts to the deadline: for the confirmation of an entry and, once this rank's kernel has ended,
    /// for the end of theirs.
    fn check_owed(&mut self, deadline: Duration, running: bool, heard: bool) -> Result<()> {
        let unseen = self.has_unseen().then_some(self.complete);
        let owes =
            |other: &Other| unseen.is_some_and(|next| other.confirmed <= next) || (!running && !other.left);
        match self.others.iter().position(owes) {
            Some(index) if !heard => self.owed.check(index + 1, deadline),
            _ => {
                self.owed.reset();
                Ok(())
            }
        }
    }

    /// True if something is awaited that does not ring the bell.
    fn must_poll(&self, running: bool) -> bool {
        let others = !self.others.is_empty();
        (others && (self.has_unseen() || !self.wire.is_idle() || self.stop_sent))
            || (others && !running && self.others.iter().any(|other| !other.left))
            || (!self.bell.of_kernel && (!self.is_empty() || self.has_unseen() || self.stop_sent))
    }
}

impl<T: Target> Host<T> for Leader {
    fn turn(&mut self, target: &T, running: bool) -> Result<Wish> {
        let heard = self.bell.listen();
        if std::mem::replace(&mut self.heard, heard) != heard && self.is_empty() {
            self.eager.begin();
        }
        let mut moved = self.take_commands(target)?;
        let heard_of = self.take_messages()?;
        moved |= heard_of;
        self.check_owed(target.deadline(), running, heard_of)?;
        moved |= self.publish(target)?;
        if moved {
            self.eager.go_on();
        }
        if self.take_results(target)? {
            self.eager.end();
            moved = true;
        }
        let ending = {
            let mut state = self.shared.lock();
            state.stats.kernel_runs = running;
            state.ending && state.waiting.is_empty()
        };
        if ending && running && !self.stop_sent && !self.has_unseen() && self.is_empty() {
            self.stop_sent = true;
            self.enter(Entry { kind: abi::MPK_STOP, number: 0, after_finished: 0, payload: None })?;
            self.close_group(target);
            return Ok(Wish::Nothing);
        }
        if !running && self.others.iter().all(|other| other.left) {
            if ending && self.is_empty() {
                self.wire.send_all(&Message::End)?;
                self.ring_others(target);
                return Ok(Wish::Leave);
            }
            if !self.stop_sent && self.table.open(target.outputs()) != 0 {
                self.others.iter_mut().for_each(|other| other.left = false);
                self.wire.send_all(&Message::Launch)?;
                self.ring_others(target);
                self.shared.lock().stats.launches += 1;
                return Ok(Wish::Launch);
            }
        }
        if self.eager.is_on() {
            std::hint::spin_loop();
        } else if !moved {
            self.bell.sleep(heard, if self.must_poll(running) { self.bell.short() } else { LONG });
        }
        Ok(Wish::Nothing)
    }

    fn left(&mut self) -> Result<()> {
        Ok(())
    }

    fn failed(&mut self, error: &Error) {
        let reason = error.whole();
        let _ = self.wire.send_all(&Message::Failed(error.exit_status(), reason.clone()));
        self.end_all(&reason);
    }

    fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }
}

impl Drop for Leader {
    /// Even if this thread panics, no client keeps waiting for a request that will never be served.
    fn drop(&mut self) {
        self.end_all("serving is over");
    }
}

//! Rank 0's host: gives entries their order, hands them to all hosts, and takes the results.

use super::client::{Add, Command, Event, Shared, Stream, Token};
use super::serve::{Host, Wish};
use super::table::Table;
use super::target::Target;
use super::wire::{Entry, Message, Payload, Wire};
use crate::error::{Error, Result};
use crate::world::World;
use kernels_cu::abi;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Rank 0's part of a service; see [`super::service`].
#[derive(Debug)]
pub struct Service(pub(super) Arc<Shared>);

/// How long the host sleeps between two looks while requests run. A token waits half of it for its reader on average.
const SHORT: Duration = Duration::from_micros(100);
/// While there are none; a command wakes it.
const LONG: Duration = Duration::from_millis(20);

pub(super) struct Leader {
    shared: Arc<Shared>,
    wire: Wire,
    table: Table,
    /// Entries that this rank's ring has not got, in order, with their numbers.
    log: VecDeque<(u64, Entry)>,
    /// Entries, ever.
    sent: u64,
    /// How many each other rank has confirmed, and whether its kernel has ended.
    others: Vec<Other>,
    /// By number.
    active: Vec<Option<Active>>,
    /// Requests that have ended, ever.
    ended: u64,
    /// Numbers and places of requests that have ended, until their end is counted.
    freeing: Vec<(u32, u32, u32)>,
    stop_sent: bool,
}

struct Other {
    confirmed: u64,
    left: bool,
}

struct Active {
    stream: Arc<Stream>,
    /// Place of its tokens, and how many: the prompt's come first.
    first: u32,
    room: u32,
    first_output: usize,
    taken: usize,
    cancelled: bool,
}

impl Leader {
    pub fn new(service: Service, world: &World, numbers: u32) -> Leader {
        let others = (1..world.size()).map(|_| Other { confirmed: 0, left: true }).collect();
        Leader {
            shared: service.0,
            wire: Wire::new(world),
            table: Table::default(),
            log: VecDeque::new(),
            sent: 0,
            others,
            active: (0..numbers).map(|_| None).collect(),
            ended: 0,
            freeing: Vec::new(),
            stop_sent: false,
        }
    }

    fn enter(&mut self, entry: Entry) -> Result<()> {
        self.wire.send_all(&Message::Entry(entry.clone()))?;
        self.log.push_back((self.sent, entry));
        self.sent += 1;
        Ok(())
    }

    fn add(&mut self, add: Add, after_finished: u64) -> Result<()> {
        let prompt = add.request.prompt.len() as u32;
        let request = abi::mpk_request {
            first_token: add.first,
            num_prompt_tokens: prompt,
            max_new_tokens: add.request.max_new_tokens,
            first_output: add.first + prompt,
            sampling: add.request.sampling.to_abi(prompt),
        };
        self.active[add.number as usize] = Some(Active {
            first: add.first,
            room: add.room(),
            stream: add.stream,
            first_output: (add.first + prompt) as usize,
            taken: 0,
            cancelled: false,
        });
        let payload = Some(Payload { request, prompt: add.request.prompt });
        self.enter(Entry { kind: abi::MPK_ADMIT, number: add.number, after_finished, payload })
    }

    fn cancel(&mut self, stream: &Arc<Stream>) -> Result<()> {
        let of = |active: &Option<Active>| active.as_ref().is_some_and(|a| Arc::ptr_eq(&a.stream, stream));
        let Some(number) = self.active.iter().position(of) else { return Ok(()) };
        let Some(active) = &mut self.active[number] else { return Ok(()) };
        if std::mem::replace(&mut active.cancelled, true) {
            return Ok(());
        }
        // The number may get another holder only by an entry after this one.
        self.enter(Entry { kind: abi::MPK_CANCEL, number: number as u32, after_finished: 0, payload: None })
    }

    /// Requests that were submitted, and those that are to end.
    fn take_commands(&mut self, finished: u64) -> Result<bool> {
        let commands = std::mem::take(&mut self.shared.lock().commands);
        let any = !commands.is_empty();
        for command in commands {
            match command {
                Command::Add(add) => self.add(add, finished)?,
                Command::Cancel(stream) => self.cancel(&stream)?,
            }
        }
        Ok(any)
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
                        "rank {rank} sent {other:?} to rank 0; please report this"
                    )));
                }
            }
        }
        Ok(any)
    }

    /// Entries that all other hosts have go into this rank's ring; the kernel sees them last of all.
    fn publish(&mut self, target: &impl Target) -> Result<bool> {
        let confirmed = self.others.iter().map(|other| other.confirmed).min().unwrap_or(u64::MAX);
        let mut any = false;
        while let Some((number, entry)) = self.log.front() {
            if *number >= confirmed
                || !self.table.write(entry, target.outputs(), target.control(), &target.writer())?
            {
                break;
            }
            self.log.pop_front();
            any = true;
        }
        self.table.count(target.outputs(), &target.writer())?;
        Ok(any)
    }

    /// Everything that the kernel has handed out goes to the streams; the kernel never waits for their readers.
    fn take_results(&mut self, target: &impl Target) -> bool {
        let outputs = target.outputs();
        let (mut tokens, mut any) = (0, false);
        for number in 0..self.active.len() {
            let Some(active) = &mut self.active[number] else { continue };
            // Its entry has not been written: the words are those of who had the number before.
            if self.log.iter().any(|(_, entry)| entry.kind == abi::MPK_ADMIT && entry.number == number as u32)
            {
                continue;
            }
            let (count, finish) = outputs.progress(number as u32);
            let mut events: Vec<Event> = Vec::new();
            for place in active.first_output + active.taken..active.first_output + count {
                let (id, logprobs) = outputs.token(place);
                events.push(Event::Token(Token { id, logprobs }));
            }
            tokens += events.len() as u64;
            active.taken = count;
            events.extend(finish.map(Event::Finished));
            any |= !events.is_empty();
            let stream = active.stream.clone();
            if finish.is_some() {
                self.freeing.push((number as u32, active.first, active.room));
                self.ended += 1;
                self.active[number] = None;
            }
            if !events.is_empty() {
                stream.push(events);
            }
        }
        // An end may be seen a moment before it is counted, and other hosts go by the count.
        let counted = outputs.finished() >= self.ended;
        let mut state = self.shared.lock();
        if counted {
            for (number, first, room) in self.freeing.drain(..) {
                state.free_numbers.push(number);
                state.arena.give_back(first, room);
            }
        }
        state.stats.tokens += tokens;
        state.stats.ended = self.ended;
        state.stats.figures = outputs.figures();
        any
    }

    fn is_quiet(&self) -> bool {
        self.log.is_empty() && self.active.iter().all(Option::is_none)
    }
}

impl<T: Target> Host<T> for Leader {
    fn turn(&mut self, target: &T, running: bool) -> Result<Wish> {
        let begin = Instant::now();
        let finished = target.outputs().finished();
        let mut moved = self.take_commands(finished)?;
        moved |= self.take_messages()?;
        moved |= self.publish(target)?;
        moved |= self.take_results(target);
        let ending = {
            let mut state = self.shared.lock();
            state.stats.kernel_runs = running;
            state.ending && state.commands.is_empty()
        };
        let over = ending && self.is_quiet();
        if over && running && !self.stop_sent {
            self.stop_sent = true;
            self.enter(Entry { kind: abi::MPK_STOP, number: 0, after_finished: 0, payload: None })?;
            return Ok(Wish::Nothing);
        }
        if !running && self.others.iter().all(|other| other.left) {
            if ending && self.active.iter().all(Option::is_none) {
                self.wire.send_all(&Message::End)?;
                return Ok(Wish::Leave);
            }
            if !self.stop_sent && self.table.open(target.outputs()) != 0 {
                self.others.iter_mut().for_each(|other| other.left = false);
                self.wire.send_all(&Message::Launch)?;
                self.shared.lock().stats.launches += 1;
                return Ok(Wish::Launch);
            }
        }
        if !moved {
            // What is under way elsewhere does not wake this thread.
            let busy = self.stop_sent
                || !self.is_quiet()
                || !self.wire.is_idle()
                || (!running && self.others.iter().any(|other| !other.left));
            self.shared.wait(if busy { SHORT.saturating_sub(begin.elapsed()) } else { LONG });
        }
        Ok(Wish::Nothing)
    }

    fn left(&mut self) -> Result<()> {
        Ok(())
    }

    fn failed(&mut self, error: &Error) {
        let reason = error.to_string();
        self.shared.close(&reason);
        for active in self.active.iter_mut().filter_map(Option::take) {
            active.stream.push([Event::Lost(reason.clone())]);
        }
        let _ = self.wire.send_all(&Message::Failed(error.exit_status(), reason));
    }

    fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.shared.close("serving is over");
    }
}

//! The host of every rank except 0: writes entries as they arrive, and confirms them.

use super::bells::Bells;
use super::eager::Eager;
use super::serve::{Host, Owed, Wish, is_idle};
use super::table::Table;
use super::target::Target;
use super::wire::{Entry, Message, Wire};
use crate::bell::Bell;
use crate::error::{Error, Result};
use crate::world::World;
use kernels_cu::abi;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time between two checks for messages if rank 0 cannot ring this host's bell, or takes long to do so.
const UNRUNG: Duration = Duration::from_micros(500);
/// The same time after a [`LULL`]: 2,000 checks a second take 4 % of a core, and a server may wait for its next request for hours.
const UNRUNG_IDLE: Duration = Duration::from_millis(4);
/// An engine without messages for this long is idle.
const LULL: Duration = Duration::from_secs(1);
/// The same time if it can, and at once. Lost ranks are noticed within it.
const UNTIL_RUNG: Duration = Duration::from_millis(20);
/// Number of short checks after a ring: MPI may take a moment to show the message.
const LOOKS: u32 = 8;

pub(super) struct Follower {
    bell: Bell,
    /// Rung after a message for rank 0.
    bells: Bells,
    /// True if rank 0 is on another node, so that its rings come through the proxies.
    far: bool,
    /// The value of the bell when it was last read.
    heard: u32,
    /// True once the bell has been rung, so rank 0 can reach it.
    reached: bool,
    /// Number of short checks that remain.
    looks: u32,
    /// When the bell or a message was last heard.
    news: Instant,
    /// For a while after that.
    eager: Eager,
    wire: Wire,
    table: Table,
    waiting: VecDeque<Entry>,
    confirmed: u64,
    launch: bool,
    end: bool,
    /// True if the stop is among the entries.
    stopping: bool,
    /// After that, with the kernel ended, rank 0 must send the end.
    owed: Owed,
}

impl Follower {
    pub fn new(world: &World, bell: Bell) -> Follower {
        Follower {
            bell,
            bells: Bells::new(world, bell),
            far: !world.nodes().share(0, world.rank()),
            heard: bell.listen(),
            reached: false,
            looks: 0,
            news: Instant::now(),
            eager: Eager::new(bell, &world.cores()),
            wire: Wire::new(world),
            table: Table::default(),
            waiting: VecDeque::new(),
            confirmed: 0,
            launch: false,
            end: false,
            stopping: false,
            owed: Owed::default(),
        }
    }

    /// Waits until there may be something to do. `prompt` means that a ring arrives at once.
    fn rest(&mut self, prompt: bool) {
        let unseen = self.table.counted() != self.table.written();
        if self.eager.is_on() {
            std::hint::spin_loop();
        } else if !self.waiting.is_empty() || unseen || self.wire.is_busy() || self.looks > 0 {
            self.looks = self.looks.saturating_sub(1);
            self.bell.sleep(self.heard, self.bell.short());
        } else {
            let unrung = if self.news.elapsed() < LULL { UNRUNG } else { UNRUNG_IDLE };
            self.bell.sleep(self.heard, if self.reached && prompt { UNTIL_RUNG } else { unrung });
        }
    }
}

impl<T: Target> Host<T> for Follower {
    fn turn(&mut self, target: &T, running: bool) -> Result<Wish> {
        let heard = self.bell.listen();
        if heard != self.heard {
            (self.heard, self.reached, self.looks) = (heard, true, LOOKS);
            self.news = Instant::now();
            self.eager.begin();
        }
        while let Some((rank, message)) = self.wire.receive()? {
            self.news = Instant::now();
            self.eager.begin();
            match message {
                Message::Entry(entry) => {
                    self.stopping = entry.kind == abi::MPK_STOP;
                    self.waiting.push_back(entry);
                }
                Message::Launch => self.launch = true,
                Message::End => self.end = true,
                Message::Failed(status, message) => return Err(Error::AtRank { rank, status, message }),
                other => {
                    return Err(Error::Aborted(format!(
                        "rank {rank} sent {other}; this is a bug, please report it"
                    )));
                }
            }
        }
        while let Some(entry) = self.waiting.front() {
            if !self.table.write(entry, target.outputs(), target.control(), &target.writer())? {
                break;
            }
            self.waiting.pop_front();
        }
        self.table.count(u64::MAX, target.outputs(), &target.writer())?;
        if self.confirmed != self.table.counted() {
            self.confirmed = self.table.counted();
            self.wire.send(0, &Message::Confirmed(self.confirmed))?;
            target.ring_first();
            self.bells.ring();
        }
        if !running && std::mem::take(&mut self.launch) {
            return Ok(Wish::Launch);
        }
        if !running && self.end {
            return Ok(Wish::Leave);
        }
        if running || !self.stopping {
            self.owed.reset();
        } else {
            self.owed.check(0, target.deadline())?;
        }
        // A ring from another node waits for the proxies, which sleep while there is nothing to run. While there is work, a host
        // that checks often would take turns from the workers and the proxy.
        self.rest(!self.far || (running && !is_idle(target)));
        Ok(Wish::Nothing)
    }

    fn left(&mut self) -> Result<()> {
        self.wire.send(0, &Message::Left)
    }

    fn failed(&mut self, error: &Error) {
        let _ = self.wire.send(0, &Message::Failed(error.exit_status(), error.whole()));
    }

    fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }
}

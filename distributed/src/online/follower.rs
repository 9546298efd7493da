//! The host of every other rank: writes entries as they come, and confirms them.

use super::serve::{Host, Wish};
use super::table::Table;
use super::target::Target;
use super::wire::{Entry, Message, Wire};
use crate::error::{Error, Result};
use crate::world::World;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Between two looks for messages: short after one has come, longer as time goes on without any.
const SHORTEST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_micros(500);
/// So long it stays short.
const BUSY: Duration = Duration::from_millis(20);

pub(super) struct Follower {
    wire: Wire,
    table: Table,
    waiting: VecDeque<Entry>,
    confirmed: u64,
    launch: bool,
    end: bool,
    moved: Instant,
}

impl Follower {
    pub fn new(world: &World) -> Follower {
        Follower {
            wire: Wire::new(world),
            table: Table::default(),
            waiting: VecDeque::new(),
            confirmed: 0,
            launch: false,
            end: false,
            moved: Instant::now(),
        }
    }
}

impl<T: Target> Host<T> for Follower {
    fn turn(&mut self, target: &T, running: bool) -> Result<Wish> {
        while let Some((rank, message)) = self.wire.receive()? {
            self.moved = Instant::now();
            match message {
                Message::Entry(entry) => self.waiting.push_back(entry),
                Message::Launch => self.launch = true,
                Message::End => self.end = true,
                Message::Failed(status, message) => return Err(Error::AtRank { rank, status, message }),
                other => {
                    return Err(Error::Aborted(format!("rank {rank} sent {other:?}; please report this")));
                }
            }
        }
        while let Some(entry) = self.waiting.front() {
            if !self.table.write(entry, target.outputs(), target.control(), &target.writer())? {
                break;
            }
            self.waiting.pop_front();
        }
        self.table.count(target.outputs(), &target.writer())?;
        if self.confirmed != self.table.counted() {
            self.confirmed = self.table.counted();
            self.wire.send(0, &Message::Confirmed(self.confirmed))?;
            self.moved = Instant::now();
        }
        if !running && std::mem::take(&mut self.launch) {
            return Ok(Wish::Launch);
        }
        if !running && self.end {
            return Ok(Wish::Leave);
        }
        std::thread::sleep(if self.moved.elapsed() < BUSY { SHORTEST } else { LONGEST });
        Ok(Wish::Nothing)
    }

    fn left(&mut self) -> Result<()> {
        self.wire.send(0, &Message::Left)
    }

    fn failed(&mut self, error: &Error) {
        let _ = self.wire.send(0, &Message::Failed(error.exit_status(), error.to_string()));
    }

    fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }
}

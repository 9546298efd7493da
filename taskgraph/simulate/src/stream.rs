//! What runs ahead of a worker's tasks, in pieces, through its ring: weights and, on some targets, pages of a cache.

use crate::cluster::Worker as Limits;
use crate::work::Work;
use std::collections::VecDeque;

/// What a piece holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Weights.
    Weights,
    /// Pages of a cache.
    Pages,
}

/// The bytes of a task that come next.
#[derive(Clone, Copy, Debug)]
struct Coming {
    task: u32,
    kind: Kind,
    left: u64,
    /// The bytes of a stage.
    of_stage: u64,
}

/// A piece that the worker has asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    /// The bytes of the ring that it takes: more than its own if it does not fill its stage.
    room: u64,
}

/// How far a worker is with a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// It runs the task.
    Runs,
    /// It has taken the task, which still waits.
    Waits,
    /// It has not taken the task.
    No,
}

/// A worker's stream.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// What has not been asked for, in order.
    coming: VecDeque<Coming>,
    /// Room in the ring of what is in flight, and of all that is in it.
    on_the_way: u64,
    in_ring: u64,
    /// Pieces asked for, in order.
    asked: VecDeque<Piece>,
    /// Number of these that have arrived.
    arrived: usize,
}

impl Stream {
    /// Appends what a task streams: cache pages, then weights.
    pub(crate) fn add(&mut self, task: u32, work: &Work, limits: &Limits) {
        let pages = (Kind::Pages, work.ahead(limits.pages_run_ahead), u64::from(limits.stage_bytes));
        for (kind, left, of_stage) in [pages, (Kind::Weights, work.streamed, work.of_stage(limits))] {
            if left > 0 {
                self.coming.push_back(Coming { task, kind, left, of_stage });
            }
        }
    }

    /// The oldest piece, if it has arrived.
    pub(crate) fn first(&self) -> Option<Piece> {
        self.asked.front().filter(|_| self.arrived > 0).copied()
    }

    /// The oldest piece has been used.
    pub(crate) fn used(&mut self) -> u64 {
        let Some(piece) = self.asked.pop_front() else { return 0 };
        self.arrived -= 1;
        self.in_ring -= piece.room;
        piece.bytes
    }

    /// The next piece on the way has arrived.
    pub(crate) fn arrive(&mut self) {
        self.on_the_way -= self.asked[self.arrived].room;
        self.arrived += 1;
    }

    /// The task whose bytes come next.
    pub(crate) fn next_task(&self) -> Option<u32> {
        self.coming.front().map(|first| first.task)
    }

    /// Asks for the next piece, if the limits allow it: its bytes.
    pub(crate) fn ask(&mut self, limits: &Limits, reached: Reached) -> Option<u64> {
        let first = self.coming.front_mut()?;
        let bytes = first.left.min(first.of_stage);
        let room = bytes * u64::from(limits.stage_bytes) / first.of_stage;
        let flight = match reached {
            Reached::Runs => limits.in_flight_bytes,
            Reached::Waits => limits.in_flight_waiting_bytes.unwrap_or(limits.in_flight_ahead_bytes),
            Reached::No => limits.in_flight_ahead_bytes,
        };
        // Without a ring, a task's weights come while it runs; a piece always fits into an empty ring.
        let ring = match reached {
            Reached::Runs => limits.ring_bytes.max(limits.in_flight_bytes),
            Reached::Waits | Reached::No => limits.ring_bytes,
        };
        if self.on_the_way + room > u64::from(flight) || self.in_ring + room > u64::from(ring) {
            return None;
        }
        self.asked.push_back(Piece { bytes, kind: first.kind, room });
        self.on_the_way += room;
        self.in_ring += room;
        first.left -= bytes;
        if first.left == 0 {
            self.coming.pop_front();
        }
        Some(bytes)
    }
}

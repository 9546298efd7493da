//! Messages of proxies over MPI, on a communicator of their own. No call waits. Messages from one rank to another come in the order
//! in which they were sent.

use super::ring::FRAME_BYTES;
use mpi::ffi;
use std::mem::MaybeUninit;

const TAG: i32 = 3;
/// Longest message.
pub(super) const MESSAGE_BYTES: usize = FRAME_BYTES + 64;
/// Messages to one rank that may be on their way before its next one waits.
const MOST_TO_ONE: u32 = 16;

/// A message on its way.
struct Sending {
    peer: usize,
    // MPI reads it until the request is done.
    bytes: Vec<u8>,
}

/// The ends of the connections to all peers.
pub(super) struct Carrier {
    communicator: ffi::MPI_Comm,
    /// Their ranks.
    peers: Vec<u32>,
    /// One receive for each peer, null where none is wanted any more, and its memory.
    receives: Vec<ffi::MPI_Request>,
    received: Vec<Vec<u8>>,
    sends: Vec<ffi::MPI_Request>,
    sending: Vec<Sending>,
    /// On their way, by peer.
    to: Vec<u32>,
    /// Buffers that are free.
    spare: Vec<Vec<u8>>,
    done: Vec<i32>,
    statuses: Vec<ffi::MPI_Status>,
}

// SAFETY: handles of MPI, which is initialised for calls from any thread; the bytes are the carrier's own.
unsafe impl Send for Carrier {}

/// What a call of MPI failed with.
pub(super) type Failed = String;

fn check(call: &str, code: i32) -> Result<(), Failed> {
    if code == 0 { Ok(()) } else { Err(format!("{call} failed with {code}")) }
}

impl Carrier {
    /// To these ranks. The communicator gives its errors back.
    pub fn new(communicator: ffi::MPI_Comm, peers: Vec<u32>) -> Result<Carrier, Failed> {
        let count = peers.len();
        // SAFETY: a predefined handle of MPI.
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        let mut carrier = Carrier {
            communicator,
            peers,
            receives: vec![null; count],
            received: vec![vec![0; MESSAGE_BYTES]; count],
            sends: Vec::new(),
            sending: Vec::new(),
            to: vec![0; count],
            spare: Vec::new(),
            done: Vec::new(),
            statuses: Vec::new(),
        };
        (0..count).try_for_each(|peer| carrier.receive(peer))?;
        Ok(carrier)
    }

    pub fn peers(&self) -> &[u32] {
        &self.peers
    }

    /// Whether so few messages to this peer are on their way that another may go.
    pub fn has_room(&self, peer: usize) -> bool {
        self.to[peer] < MOST_TO_ONE
    }

    /// So much is on its way that it pays to look for what has gone.
    pub fn is_crowded(&self) -> bool {
        self.sending.len() >= MOST_TO_ONE as usize / 2
    }

    /// Nothing is on its way to any peer.
    pub fn is_idle(&self) -> bool {
        self.sending.is_empty()
    }

    /// An empty buffer for a message.
    pub fn buffer(&mut self) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(MESSAGE_BYTES + FRAME_BYTES));
        buffer.clear();
        buffer
    }

    /// Begins to send.
    pub fn send(&mut self, peer: usize, bytes: Vec<u8>) -> Result<(), Failed> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the bytes stay where they are until the request is done (`Sending`; a carrier that goes leaves them, see `Drop`).
        let code = unsafe {
            ffi::MPI_Isend(
                bytes.as_ptr().cast(),
                bytes.len() as i32,
                ffi::RSMPI_UINT8_T,
                self.peers[peer] as i32,
                TAG,
                self.communicator,
                request.as_mut_ptr(),
            )
        };
        check("MPI_Isend", code)?;
        // SAFETY: set by the call, which went well.
        self.sends.push(unsafe { request.assume_init() });
        self.sending.push(Sending { peer, bytes });
        self.to[peer] += 1;
        Ok(())
    }

    /// Begins to receive the next message from a peer.
    fn receive(&mut self, peer: usize) -> Result<(), Failed> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the memory stays where it is until the request is done (`received`; see `Drop`).
        let code = unsafe {
            ffi::MPI_Irecv(
                self.received[peer].as_mut_ptr().cast(),
                MESSAGE_BYTES as i32,
                ffi::RSMPI_UINT8_T,
                self.peers[peer] as i32,
                TAG,
                self.communicator,
                request.as_mut_ptr(),
            )
        };
        check("MPI_Irecv", code)?;
        // SAFETY: set by the call, which went well.
        self.receives[peer] = unsafe { request.assume_init() };
        Ok(())
    }

    /// Which requests of `requests` are done; these are null then.
    fn test<'a>(
        requests: &mut [ffi::MPI_Request],
        done: &'a mut Vec<i32>,
        statuses: &mut Vec<ffi::MPI_Status>,
    ) -> Result<&'a [i32], Failed> {
        done.resize(requests.len(), 0);
        // SAFETY: a status is plain numbers.
        statuses.resize_with(requests.len(), || unsafe { std::mem::zeroed() });
        let mut count = 0;
        // SAFETY: as many indices and statuses as requests.
        let code = unsafe {
            ffi::MPI_Testsome(
                requests.len() as i32,
                requests.as_mut_ptr(),
                &mut count,
                done.as_mut_ptr(),
                statuses.as_mut_ptr(),
            )
        };
        check("MPI_Testsome", code)?;
        // Undefined, which is negative, where all are null.
        Ok(&done[..count.max(0) as usize])
    }

    /// Takes back what has gone. True where something has.
    pub fn sent(&mut self) -> Result<bool, Failed> {
        if self.sends.is_empty() {
            return Ok(false);
        }
        let mut gone = Self::test(&mut self.sends, &mut self.done, &mut self.statuses)?.to_vec();
        gone.sort_unstable_by(|a, b| b.cmp(a));
        for &index in &gone {
            self.sends.swap_remove(index as usize);
            let Sending { peer, bytes } = self.sending.swap_remove(index as usize);
            self.to[peer] -= 1;
            self.spare.push(bytes);
        }
        Ok(!gone.is_empty())
    }

    /// Calls `take` with each message that has come, and its sender's place among the peers. Where it says false, no more is wanted
    /// from that peer. True where something has come.
    pub fn take(&mut self, mut take: impl FnMut(usize, &[u8]) -> bool) -> Result<bool, Failed> {
        let mut come = Self::test(&mut self.receives, &mut self.done, &mut self.statuses)?.to_vec();
        if come.is_empty() {
            // Open MPI tells what had come before it looked at the network: what it has found there the second call tells.
            come = Self::test(&mut self.receives, &mut self.done, &mut self.statuses)?.to_vec();
        }
        for (index, &peer) in come.iter().enumerate() {
            let (peer, mut bytes) = (peer as usize, 0);
            // SAFETY: a status that the call above has set, and a valid out-pointer.
            let code = unsafe { ffi::MPI_Get_count(&self.statuses[index], ffi::RSMPI_UINT8_T, &mut bytes) };
            check("MPI_Get_count", code)?;
            if take(peer, &self.received[peer][..bytes.max(0) as usize]) {
                self.receive(peer)?;
            }
        }
        Ok(!come.is_empty())
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        // MPI may still read or write them.
        std::mem::take(&mut self.sending).into_iter().for_each(|sending| std::mem::forget(sending.bytes));
        // SAFETY: a predefined handle of MPI.
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        for (request, bytes) in self.receives.iter().zip(std::mem::take(&mut self.received)) {
            if *request != null {
                std::mem::forget(bytes);
            }
        }
    }
}

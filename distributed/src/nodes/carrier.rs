//! Messages of proxies over MPI, on a separate communicator. No call waits. Messages from one rank to another arrive in the order
//! in which they were sent.

use super::link::{Failed, Link};
use super::ring::FRAME_BYTES;
use crate::messages::start_to_send;
use mpi::ffi;
use std::mem::MaybeUninit;

const TAG: i32 = 3;
/// Longest message.
pub(super) const MESSAGE_BYTES: usize = FRAME_BYTES + 64;
/// Maximum number of messages to one rank that may be on their way.
const MOST_TO_ONE: u32 = 16;

/// A message on its way.
struct Sending {
    peer: usize,
    // MPI reads it until the request is done.
    bytes: Vec<u8>,
}

/// The connections to all peers.
pub(super) struct Carrier {
    communicator: ffi::MPI_Comm,
    /// The ranks of the peers.
    peers: Vec<u32>,
    /// One receive per peer with its memory. It is null if no more messages are expected.
    receives: Vec<ffi::MPI_Request>,
    received: Vec<Vec<u8>>,
    sends: Vec<ffi::MPI_Request>,
    sending: Vec<Sending>,
    /// Number of messages on their way, by peer.
    to: Vec<u32>,
    /// Free buffers.
    spare: Vec<Vec<u8>>,
    done: Vec<i32>,
    statuses: Vec<ffi::MPI_Status>,
}

// SAFETY: handles of MPI, which is initialised for calls from any thread; the bytes are the carrier's own.
unsafe impl Send for Carrier {}

fn check(call: &str, code: i32) -> Result<(), Failed> {
    if code == 0 { Ok(()) } else { Err(format!("{call} failed with {code}")) }
}

impl Carrier {
    /// Connects to these ranks. The communicator must return its errors.
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

    /// Starts to receive the next message from a peer.
    fn receive(&mut self, peer: usize) -> Result<(), Failed> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the memory does not move until the request is done (`received`; see `Drop`).
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
        // SAFETY: set by the call, which succeeded.
        self.receives[peer] = unsafe { request.assume_init() };
        Ok(())
    }

    /// Which receives are done, with their statuses in `statuses`.
    ///
    /// `MPI_Testsome` of Open MPI reports what had arrived before it checked the network, so a second call reports what that check found.
    /// `MPI_Test` looks again after its check. So with one peer, one call is enough.
    fn arrived(&mut self) -> Result<Vec<i32>, Failed> {
        // SAFETY: a predefined handle of MPI.
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        // For a null request MPI_Test would report an empty message.
        if let [request] = &mut self.receives[..]
            && *request != null
        {
            let (mut done, mut status) = (0, MaybeUninit::uninit());
            // SAFETY: an active request and valid out-pointers.
            let code = unsafe { ffi::MPI_Test(request, &mut done, status.as_mut_ptr()) };
            check("MPI_Test", code)?;
            self.statuses.clear();
            if done == 0 {
                return Ok(Vec::new());
            }
            // SAFETY: set by the call, since the request is done.
            self.statuses.push(unsafe { status.assume_init() });
            return Ok(vec![0]);
        }
        for _ in 0..2 {
            let come = Self::test(&mut self.receives, &mut self.done, &mut self.statuses)?;
            if !come.is_empty() {
                return Ok(come.to_vec());
            }
        }
        Ok(Vec::new())
    }

    /// Which of `requests` are done. These are null afterwards.
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
        // Undefined, which is negative, if all are null.
        Ok(&done[..count.max(0) as usize])
    }
}

impl Link for Carrier {
    fn peers(&self) -> &[u32] {
        &self.peers
    }

    fn has_room(&self, peer: usize) -> bool {
        self.to[peer] < MOST_TO_ONE
    }

    fn is_crowded(&self) -> bool {
        self.sending.len() >= MOST_TO_ONE as usize / 2
    }

    fn is_idle(&self) -> bool {
        self.sending.is_empty()
    }

    fn buffer(&mut self) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(MESSAGE_BYTES + FRAME_BYTES));
        buffer.clear();
        buffer
    }

    fn send(&mut self, peer: usize, bytes: Vec<u8>) -> Result<(), Failed> {
        // SAFETY: the bytes do not move until the request is done (`Sending`; a dropped carrier leaks them, see `Drop`).
        let request = unsafe { start_to_send(self.communicator, self.peers[peer], TAG, &bytes) };
        self.sends.push(request.map_err(|code| format!("MPI_Isend failed with {code}"))?);
        self.sending.push(Sending { peer, bytes });
        self.to[peer] += 1;
        Ok(())
    }

    fn sent(&mut self) -> Result<bool, Failed> {
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

    fn take(&mut self, mut take: impl FnMut(usize, &[u8]) -> bool) -> Result<bool, Failed> {
        let come = self.arrived()?;
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
        // MPI may still access them.
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

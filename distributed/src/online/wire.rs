//! Messages between the hosts' threads while kernels run. No call here waits.

use crate::error::{Error, Result};
use crate::messages::start_to_send;
use crate::world::World;
use kernels_cu::abi;
use mpi::ffi;
use std::fmt;
use std::mem::MaybeUninit;

/// The messages of `messages.rs` have another tag.
const TAG: i32 = 2;

/// An entry of the admission ring with its payload.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub kind: u32,
    pub number: u32,
    /// Number of requests that must have ended on a rank before it may take the entry. The previous holders of the number and of
    /// the places for tokens are among them.
    pub after_finished: u64,
    /// The payload of an added request.
    pub payload: Option<Payload>,
}

#[derive(Clone, Debug)]
pub(super) struct Payload {
    pub request: abi::mpk_request,
    pub prompt: Vec<i32>,
    /// Keys of the prompt's full pages. None without a prefix cache.
    pub keys: Vec<abi::mpk_page_key>,
}

/// A message between hosts.
#[derive(Clone, Debug)]
pub(super) enum Message {
    /// From rank 0: the next entry.
    Entry(Entry),
    /// From rank 0: all kernels have ended and must be launched again.
    Launch,
    /// From rank 0: all kernels have ended, and serving is over.
    End,
    /// To rank 0: total number of entries in this rank's ring so far.
    Confirmed(u64),
    /// To rank 0: this rank's kernel has ended.
    Left,
    /// This rank has failed, with this exit status.
    Failed(i32, String),
}

/// What it is, without its contents, which may be a user's prompt.
impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Message::Entry(_) => "an entry of the admission log",
            Message::Launch => "a request to launch again",
            Message::End => "the end of serving",
            Message::Confirmed(_) => "a count of entries",
            Message::Left => "the end of its kernel",
            Message::Failed(..) => "a failure",
        })
    }
}

const REQUEST_BYTES: usize = size_of::<abi::mpk_request>();

impl Message {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut words = |kind: u8, words: &[u64]| {
            bytes.push(kind);
            words.iter().for_each(|word| bytes.extend_from_slice(&word.to_ne_bytes()));
        };
        match self {
            Message::Entry(entry) => {
                words(0, &[entry.kind.into(), entry.number.into(), entry.after_finished]);
                if let Some(payload) = &entry.payload {
                    // SAFETY: a plain struct without padding.
                    bytes.extend_from_slice(unsafe {
                        std::slice::from_raw_parts((&raw const payload.request).cast::<u8>(), REQUEST_BYTES)
                    });
                    payload.prompt.iter().for_each(|token| bytes.extend_from_slice(&token.to_ne_bytes()));
                    let words = payload.keys.iter().flat_map(|key| key.words);
                    words.for_each(|word| bytes.extend_from_slice(&word.to_ne_bytes()));
                }
            }
            Message::Launch => words(1, &[]),
            Message::End => words(2, &[]),
            Message::Confirmed(entries) => words(3, &[*entries]),
            Message::Left => words(4, &[]),
            Message::Failed(status, reason) => {
                words(5, &[*status as u32 as u64]);
                bytes.extend_from_slice(reason.as_bytes());
            }
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Message> {
        let (kind, rest) = bytes.split_first()?;
        let word = |index: usize| {
            let bytes = rest.get(index * 8..index * 8 + 8)?;
            Some(u64::from_ne_bytes(bytes.try_into().ok()?))
        };
        Some(match kind {
            0 => {
                let payload = match rest.get(24..).filter(|rest| !rest.is_empty()) {
                    None => None,
                    Some(rest) => {
                        let (request, rest) = rest.split_at_checked(REQUEST_BYTES)?;
                        // SAFETY: has the size of the struct, which consists of numbers.
                        let request = unsafe { request.as_ptr().cast::<abi::mpk_request>().read_unaligned() };
                        let (prompt, keys) = rest.split_at_checked(4 * request.num_prompt_tokens as usize)?;
                        let word = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes);
                        let words: Vec<u64> = keys.as_chunks().0.iter().map(word).collect();
                        Some(Payload {
                            request,
                            keys: words
                                .as_chunks()
                                .0
                                .iter()
                                .map(|words| abi::mpk_page_key { words: *words })
                                .collect(),
                            prompt: prompt
                                .as_chunks()
                                .0
                                .iter()
                                .map(|bytes| i32::from_ne_bytes(*bytes))
                                .collect(),
                        })
                    }
                };
                let (kind, number) = (word(0)? as u32, word(1)? as u32);
                Message::Entry(Entry { kind, number, after_finished: word(2)?, payload })
            }
            1 => Message::Launch,
            2 => Message::End,
            3 => Message::Confirmed(word(0)?),
            4 => Message::Left,
            5 => {
                Message::Failed(word(0)? as u32 as i32, String::from_utf8_lossy(rest.get(8..)?).into_owned())
            }
            _ => return None,
        })
    }
}

/// The connections of a rank.
pub(super) struct Wire {
    communicator: Option<ffi::MPI_Comm>,
    size: u32,
    sending: Vec<Transfer>,
    /// One message at a time, so that a rank's messages stay in order.
    receiving: Option<(u32, Transfer)>,
}

/// Bytes that MPI reads or writes until the request is done.
struct Transfer {
    bytes: Vec<u8>,
    request: ffi::MPI_Request,
}

impl Transfer {
    fn is_done(&mut self) -> Result<bool> {
        let mut done = 0;
        // SAFETY: a live request; the status is not requested.
        let code = unsafe { ffi::MPI_Test(&mut self.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
        check("MPI_Test", code).map(|()| done != 0)
    }
}

impl Wire {
    pub fn new(world: &World) -> Wire {
        let communicator = world.communicator();
        Wire { communicator, size: world.size(), sending: Vec::new(), receiving: None }
    }

    /// Starts to send a message to rank `to`.
    pub fn send(&mut self, to: u32, message: &Message) -> Result<()> {
        let Some(communicator) = self.communicator else { return Ok(()) };
        let bytes = message.to_bytes();
        // SAFETY: the bytes do not move until the request is done (`Transfer`, `Drop`).
        let request = unsafe { start_to_send(communicator, to, TAG, &bytes) };
        let request = request.map_err(|code| Error::Aborted(format!("MPI_Isend failed with {code}")))?;
        self.sending.push(Transfer { bytes, request });
        Ok(())
    }

    /// Sends to all other ranks, from rank 0.
    pub fn send_all(&mut self, message: &Message) -> Result<()> {
        (1..self.size).try_for_each(|rank| self.send(rank, message))
    }

    /// The next message that has arrived, with its sender.
    pub fn receive(&mut self) -> Result<Option<(u32, Message)>> {
        let Some(communicator) = self.communicator else { return Ok(None) };
        // Transfers stay in `self` while MPI may read them, also if a test fails.
        let mut at = 0;
        while at < self.sending.len() {
            if self.sending[at].is_done()? {
                self.sending.swap_remove(at);
            } else {
                at += 1;
            }
        }
        if self.receiving.is_none() {
            self.receiving = probe(communicator)?;
        }
        if self.receiving.is_none() {
            // Open MPI reports what had arrived before it checked the network. What it finds there is reported by the second
            // call.
            self.receiving = probe(communicator)?;
        }
        let Some((from, transfer)) = &mut self.receiving else { return Ok(None) };
        if !transfer.is_done()? {
            return Ok(None);
        }
        let from = *from;
        let message = Message::from_bytes(&transfer.bytes);
        self.receiving = None;
        match message {
            Some(message) => Ok(Some((from, message))),
            None => Err(Error::Aborted(format!(
                "rank {from} sent an invalid message; this is a bug; please report it"
            ))),
        }
    }

    /// True if a message is on its way, in either direction.
    pub fn is_busy(&self) -> bool {
        !self.sending.is_empty() || self.receiving.is_some()
    }

    /// True if nothing that was sent is still on its way.
    pub fn is_idle(&self) -> bool {
        self.sending.is_empty()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // MPI may still access them.
        self.sending
            .drain(..)
            .chain(self.receiving.take().map(|(_, transfer)| transfer))
            .for_each(std::mem::forget);
    }
}

/// Starts to receive a message, if one has arrived.
fn probe(communicator: ffi::MPI_Comm) -> Result<Option<(u32, Transfer)>> {
    let mut found = 0;
    let (mut message, mut status) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: valid out-pointers.
    let code = unsafe {
        ffi::MPI_Improbe(
            ffi::RSMPI_ANY_SOURCE,
            TAG,
            communicator,
            &mut found,
            message.as_mut_ptr(),
            status.as_mut_ptr(),
        )
    };
    check("MPI_Improbe", code)?;
    if found == 0 {
        return Ok(None);
    }
    let mut count = 0;
    // SAFETY: message and status were set by the call above.
    let (mut message, status) = unsafe { (message.assume_init(), status.assume_init()) };
    // SAFETY: a valid status and out-pointer.
    check("MPI_Get_count", unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) })?;
    let mut bytes = vec![0u8; count.max(0) as usize];
    let mut request = MaybeUninit::uninit();
    // SAFETY: the message is received once; the bytes do not move until the request is done.
    let code = unsafe {
        ffi::MPI_Imrecv(
            bytes.as_mut_ptr().cast(),
            count,
            ffi::RSMPI_UINT8_T,
            &mut message,
            request.as_mut_ptr(),
        )
    };
    check("MPI_Imrecv", code)?;
    // SAFETY: set by the call, which succeeded.
    Ok(Some((status.MPI_SOURCE as u32, Transfer { bytes, request: unsafe { request.assume_init() } })))
}

fn check(call: &str, code: i32) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Error::Aborted(format!("{call} failed with {code}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_as_they_went_in() {
        let request = abi::mpk_request { first_token: 3, num_prompt_tokens: 2, ..Default::default() };
        let keys = vec![abi::mpk_page_key { words: [1, u64::MAX] }, abi::mpk_page_key { words: [3, 4] }];
        let payload = Some(Payload { request, prompt: vec![5, -6], keys });
        let messages = [
            Message::Entry(Entry { kind: abi::MPK_ADMIT, number: 4, after_finished: 1 << 40, payload }),
            Message::Entry(Entry { kind: abi::MPK_CANCEL, number: 4, after_finished: 0, payload: None }),
            Message::Launch,
            Message::End,
            Message::Confirmed(7),
            Message::Left,
            Message::Failed(-4, "é".into()),
        ];
        for message in messages {
            let bytes = message.to_bytes();
            let again = Message::from_bytes(&bytes).map(|m| format!("{m:?}"));
            assert_eq!(again, Some(format!("{message:?}")));
            assert!(bytes.len() == 1 || Message::from_bytes(&bytes[..1]).is_none());
        }
        assert!(Message::from_bytes(&[]).is_none() && Message::from_bytes(&[9]).is_none());
    }
}

//! How the ranks of a node get their shared table. The first rank creates it as unnamed memory. On an abstract socket named after
//! the job, it tells the others where to open it. No file remains from the memory or the socket, however the processes
//! end.

use super::table::{Header, Slot};
use crate::launcher::Place;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::process::geteuid;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

/// Assumed number of ranks on a node, if the launcher does not tell.
const MOST_RANKS: u32 = 1024;
/// The first rank's answer: its process, the descriptor there, and a word that both must know.
const ANSWER_BYTES: usize = 12;
const WORD: u32 = 0x6d70_6b31;
/// Maximum time of one wait of a rank that asks.
const PATIENCE: Duration = Duration::from_millis(20);

/// The shared table.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) header: &'static Header,
    /// Indexed by the rank's number in the node.
    pub(crate) slots: &'static [Slot],
    #[allow(dead_code, reason = "the others open it through this process's descriptor")]
    file: File,
}

/// A rank's search for the table, one step at a time. No step waits longer than [`PATIENCE`].
#[derive(Debug)]
pub(crate) enum Search {
    /// The first rank, which serves the table.
    Serves(UnixListener),
    /// Another rank, which asks for it.
    Asks,
    /// The rank has the table, or cannot get it.
    Done,
}

fn address(place: &Place) -> io::Result<SocketAddr> {
    let user = geteuid().as_raw();
    // Names of abstract sockets are short; the job's name may be long.
    let mut key = 0xcbf2_9ce4_8422_2325_u64;
    for byte in place.job.bytes() {
        key = (key ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    SocketAddr::from_abstract_name(format!("mpk-run/{user}/{key:016x}/{}", place.size))
}

fn slots(place: &Place) -> usize {
    place.local_size.unwrap_or(MOST_RANKS) as usize
}

impl Search {
    /// Starts the search. The node's first rank has the table at once.
    pub(crate) fn begin(place: &Place) -> (Search, Option<Table>) {
        match place.local_rank {
            Some(0) => {}
            Some(_) => return (Search::Asks, None),
            None => return (Search::Done, None),
        }
        let made = || -> io::Result<_> {
            let listener = UnixListener::bind_addr(&address(place)?)?;
            listener.set_nonblocking(true)?;
            Ok((Search::Serves(listener), Some(Table::make(slots(place))?)))
        };
        made().unwrap_or_else(|error| {
            tracing::debug!("the ranks of this node have no shared table: {error}");
            (Search::Done, None)
        })
    }

    /// Continues: answers other ranks, or asks.
    pub(crate) fn go_on(&mut self, place: &Place, table: Option<&Table>) -> Option<Table> {
        match (&*self, table) {
            (Search::Serves(listener), Some(table)) => {
                while let Ok((mut stream, _)) = listener.accept() {
                    let mut answer = [0; ANSWER_BYTES];
                    answer[..4].copy_from_slice(&WORD.to_ne_bytes());
                    answer[4..8].copy_from_slice(&std::process::id().to_ne_bytes());
                    answer[8..].copy_from_slice(&table.file.as_raw_fd().to_ne_bytes());
                    // A rank that has gone meanwhile needs no answer.
                    let _ = stream.write_all(&answer);
                }
                None
            }
            (Search::Asks, _) => {
                // The first rank may not be there yet, so this is repeated.
                let found = ask(place).ok()?;
                *self = Search::Done;
                Some(found)
            }
            _ => None,
        }
    }
}

fn ask(place: &Place) -> io::Result<Table> {
    let mut stream = UnixStream::connect_addr(&address(place)?)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = [0; ANSWER_BYTES];
    stream.read_exact(&mut answer)?;
    let word = |at: usize| u32::from_ne_bytes([answer[at], answer[at + 1], answer[at + 2], answer[at + 3]]);
    if word(0) != WORD {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Table::open(&format!("/proc/{}/fd/{}", word(4), word(8)), slots(place))
}

impl Table {
    fn bytes(slots: usize) -> usize {
        size_of::<Header>() + slots * size_of::<Slot>()
    }

    fn make(slots: usize) -> io::Result<Table> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(c"mpk-run ranks", flags)?);
        file.set_len(Table::bytes(slots) as u64)?;
        // Nobody can take away the memory that the others have mapped.
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        Table::map(file, slots)
    }

    /// Opens another process's table. Refuses one that belongs to another user or is not what [`Table::make`] creates.
    fn open(path: &str, slots: usize) -> io::Result<Table> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let about = file.metadata()?;
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if about.uid() != geteuid().as_raw() || about.len() != Table::bytes(slots) as u64 || !sealed {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Table::map(file, slots)
    }

    fn map(file: File, slots: usize) -> io::Result<Table> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping of an open file of this length, which is sealed and cannot shrink.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Table::bytes(slots),
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping is page-aligned, has room for a header and these slots, starts as zeros, and is never unmapped. It
        // contains only atomics, for which every value is valid and which any process may change.
        let (header, slots) = unsafe {
            let header = base.cast::<Header>();
            (&*header, std::slice::from_raw_parts(header.add(1).cast::<Slot>(), slots))
        };
        Ok(Table { header, slots, file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(rank: u32, job: &str) -> Place {
        Place { rank, size: 2, local_rank: Some(rank), local_size: Some(2), job: job.into() }
    }

    #[test]
    fn the_second_rank_sees_what_the_first_records() {
        let job = format!("test of a table {}", std::process::id());
        let (mut asks, none) = Search::begin(&place(1, &job));
        assert!(none.is_none());
        assert!(asks.go_on(&place(1, &job), None).is_none(), "nobody serves it yet");
        let (mut serves, first) = Search::begin(&place(0, &job));
        let first = first.expect("the first rank has it at once");
        first.slots[0].take(0, 11, 0);
        let second = std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                (0..500).find_map(|_| asks.go_on(&place(1, &job), None)).expect("the table is served")
            });
            while !asking.is_finished() {
                assert!(serves.go_on(&place(0, &job), Some(&first)).is_none());
                std::thread::sleep(Duration::from_millis(1));
            }
            asking.join().expect("no panic")
        });
        assert_eq!(second.slots[0].look().map(|seen| seen.pid), Some(11));
        second.slots[1].take(1, 12, 0);
        assert_eq!(first.slots[1].look().map(|seen| seen.pid), Some(12));
        assert!(second.header.tells(1));
        assert!(!first.header.tells(0), "rank 1 was first");
    }

    #[test]
    fn a_file_of_another_kind_or_size_is_no_table() {
        let path = std::env::temp_dir().join(format!("mpk-no-table-{}", std::process::id()));
        let file = File::create(&path).expect("a file");
        file.set_len(Table::bytes(2) as u64).expect("its length");
        let opened = Table::open(path.to_str().expect("a path of text"), 2);
        std::fs::remove_file(&path).expect("the file can be removed");
        assert!(opened.is_err(), "it could be cut short under the ranks' feet");
        let table = Table::make(2).expect("a table");
        let path = format!("/proc/self/fd/{}", table.file.as_raw_fd());
        assert!(Table::open(&path, 2).is_ok());
        assert!(Table::open(&path, 3).is_err());
    }
}

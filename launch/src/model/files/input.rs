//! Input files.

use crate::model::error::InputError;
use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Maximum size of a file that is read as a whole. Weights are mapped instead, so this applies to text.
const LONGEST: u64 = 1 << 30;

/// Opens a regular file for reading. Links are followed.
///
/// # Errors
/// It is missing, unreadable or not a regular file. Nothing else is opened, so a FIFO does not block.
pub fn open(path: &Path) -> Result<File, InputError> {
    open_regular(path).map_err(|error| InputError::unreadable(path, error))
}

/// The bytes of a regular file.
///
/// # Errors
/// Those of [`open`], or the file is larger than a gigabyte.
pub fn read(path: &Path) -> Result<Vec<u8>, InputError> {
    read_regular(path).map_err(|error| InputError::unreadable(path, error))
}

/// Like [`read`]; `None` if the file does not exist.
///
/// # Errors
/// Those of [`read`].
pub fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, InputError> {
    match read_regular(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(InputError::unreadable(path, error)),
    }
}

/// True if a file with these bytes is a pointer to a file that Git LFS has not fetched.
pub fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs")
}

/// True if `path` is there in any form, even as a link to nothing. [`open`] and [`read`] say what is wrong with it.
pub fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let length = file.metadata()?.len();
    let mut bytes = Vec::new();
    if length <= LONGEST {
        bytes.try_reserve_exact(length as usize)?;
        // One byte more, to notice a file that grows meanwhile.
        file.take(LONGEST + 1).read_to_end(&mut bytes)?;
    }
    if length.max(bytes.len() as u64) > LONGEST {
        let problem = format!("it has more than {LONGEST} bytes, too many for a text file");
        return Err(io::Error::new(ErrorKind::InvalidInput, problem));
    }
    Ok(bytes)
}

fn open_regular(path: &Path) -> io::Result<File> {
    let metadata = fs::metadata(path).map_err(|error| match fs::read_link(path) {
        // An incomplete download leaves such links. They must not be treated like files that were never there.
        Ok(target) if error.kind() == ErrorKind::NotFound => {
            let problem = format!("it is a link to {}, which does not exist", target.display());
            io::Error::new(ErrorKind::InvalidInput, problem)
        }
        _ => error,
    })?;
    refuse_others(&metadata)?;
    // Another file may be at this path by now. With these flags, opening it neither waits for a writer nor makes it
    // this process's terminal.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    refuse_others(&file.metadata()?)?;
    Ok(file)
}

fn refuse_others(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let problem = format!("it is {}, not a regular file", kind(metadata.file_type()));
    Err(io::Error::new(ErrorKind::InvalidInput, problem))
}

fn kind(found: FileType) -> &'static str {
    match () {
        () if found.is_dir() => "a folder",
        () if found.is_fifo() => "a FIFO",
        () if found.is_socket() => "a socket",
        () => "a device",
    }
}

//! Output files.
//!
//! A regular file is written under a temporary name in the same folder and renamed. So a reader finds either the old or
//! the new file, and an error leaves the old one. A rename would destroy anything else (`/dev/null`, a FIFO, a link).
//! So links are followed to their target, and anything that is not a regular file is opened and written to.

use crate::model::app_error::AppError;
use crate::model::lack::fix;
use kernels_cu::signals::{self, Held};
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a FIFO may have no reader, and how long its reader may pause.
const PATIENCE: Duration = Duration::from_secs(20);
/// Maximum length of a chain of links, as in Linux.
const MOST_LINKS: usize = 40;
/// Prefix of temporary names.
const PREFIX: &str = ".mpk-";

/// From now on, exceeding the limit of file sizes is an error (EFBIG) instead of the end of the process (SIGXFSZ). For
/// programs only, because this setting applies to the whole process.
pub fn report_size_limits() {
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Writes the output of `content` to `path`. A regular or new file appears complete or not at all, and keeps its
/// permissions. Anything else is written to directly.
///
/// # Errors
/// The system's errors. No partial file is left where a regular file was asked for.
pub fn write(path: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    match place(path)? {
        Place::File { path, old } => {
            writable(&path, old.as_ref())?;
            Temporary::with(&path, old.as_ref(), content)?.rename(&path)
        }
        Place::Stream(metadata) => write_stream(path, &metadata, content),
    }
}

/// Writes one file of `folder` for each of `items`, under `name(item)`: all of them, or none. The folder is created if it does not
/// exist. Between the files a signal is noticed, so that nothing is left behind then, either.
///
/// # Errors
/// As [`write()`], with the path. Existing files are as they were, and nothing new is left. Only if the system refuses a rename after
/// all checks, some existing files may have their new content.
pub fn write_folder<T>(
    folder: &Path,
    items: &[T],
    name: impl Fn(&T) -> String,
    content: impl Fn(&T, &mut dyn Write) -> io::Result<()>,
) -> Result<(), AppError> {
    // Dropped last, because it may end the process.
    let _held = Held::new();
    let created = NewFolder::create(folder).map_err(|error| failed(folder.display(), &error))?;
    let mut outputs = Vec::with_capacity(items.len());
    for item in items {
        let path = folder.join(name(item));
        let found = place(&path).and_then(|place| match &place {
            Place::File { path, old } => writable(path, old.as_ref()).map(|()| place),
            Place::Stream(_) => Ok(place),
        });
        outputs.push((item, found.map_err(|error| failed(path.display(), &error))?, path));
    }
    // What can fail for a full disk comes before the first rename.
    let mut written = Vec::new();
    for (item, place, path) in &outputs {
        let content = |out: &mut dyn Write| content(item, out);
        let done = match place {
            _ if signals::is_kept() => Err(ErrorKind::Interrupted.into()),
            Place::File { path, old } => Temporary::with(path, old.as_ref(), content).map(|temporary| {
                written.push((temporary, path, old.is_none()));
            }),
            Place::Stream(metadata) => write_stream(path, metadata, content),
        };
        done.map_err(|error| failed(path.display(), &error))?;
    }
    let mut renamed = Vec::with_capacity(written.len());
    for (temporary, path, is_new) in written {
        temporary.rename(path).map_err(|error| failed(path.display(), &error))?;
        renamed.extend(is_new.then(|| Temporary { path: path.clone() }));
    }
    renamed.into_iter().for_each(Temporary::keep);
    created.keep();
    Ok(())
}

/// Checks in advance whether [`write()`] could write to `path`. Nothing is changed or left behind.
///
/// # Errors
/// The errors that [`write()`] would meet.
pub fn check(path: &Path) -> io::Result<()> {
    match place(path)? {
        Place::File { path, old } => {
            writable(&path, old.as_ref())?;
            Temporary::beside(&path, old.as_ref()).map(drop)
        }
        // Opening and closing a FIFO would look like the end of the file to its reader.
        Place::Stream(metadata) if metadata.file_type().is_fifo() => Ok(()),
        Place::Stream(metadata) => open_stream(path, &metadata, Duration::ZERO).map(drop),
    }
}

/// The error of an output, with an exit status by cause: 3 if the disk is full, a limit is reached or the environment
/// lacks something else; 2 if the place cannot be written to; 4 if writing failed.
pub fn failed(output: impl Display, error: &io::Error) -> AppError {
    let message = format!("cannot write to {output}: {error}");
    if let Some(fix) = fix(error) {
        return AppError::environment(message).with_help(fix);
    }
    match error.kind() {
        ErrorKind::NotFound
        | ErrorKind::PermissionDenied
        | ErrorKind::AlreadyExists
        | ErrorKind::IsADirectory
        | ErrorKind::NotADirectory
        | ErrorKind::ReadOnlyFilesystem
        | ErrorKind::InvalidFilename
        | ErrorKind::InvalidInput => AppError::input(message),
        _ if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) => AppError::input(message),
        _ => AppError::failed(message),
    }
}

/// The destination of an output.
enum Place {
    /// A regular file at `path`, which is not a link. `old` is the existing file.
    File { path: PathBuf, old: Option<Metadata> },
    /// Something else that exists already.
    Stream(Metadata),
}

fn place(path: &Path) -> io::Result<Place> {
    let old = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Err(io::Error::from_raw_os_error(libc::EISDIR)),
        Ok(metadata) if !metadata.is_file() => return Ok(Place::Stream(metadata)),
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let mut path = path.to_path_buf();
    for _ in 0..=MOST_LINKS {
        let Ok(target) = fs::read_link(&path) else { return Ok(Place::File { path, old }) };
        let folder = folder_of(&path);
        // A link in /proc stands for an open file, such as /dev/stdout. After a rename, its other users would keep the
        // old file.
        if let Some(metadata) = old.clone().filter(|_| is_in_proc(folder)) {
            return Ok(Place::Stream(metadata));
        }
        path = folder.join(target);
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn is_in_proc(folder: &Path) -> bool {
    folder.canonicalize().is_ok_and(|folder| folder.starts_with("/proc"))
}

/// Renaming could replace a file that its owner has made read-only, so this is checked first.
fn writable(path: &Path, old: Option<&Metadata>) -> io::Result<()> {
    if old.is_some() {
        OpenOptions::new().append(true).open(path)?;
    }
    Ok(())
}

fn write_stream(
    path: &Path,
    found: &Metadata,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut out = BufWriter::new(Stream { file: open_stream(path, found, PATIENCE)? });
    content(&mut out)?;
    out.flush()
}

/// A file with a unique name. It is removed unless it is renamed or kept.
struct Temporary {
    path: PathBuf,
}

impl Temporary {
    /// Writes the output of `content` to a file in the folder of `path`.
    fn with(
        path: &Path,
        old: Option<&Metadata>,
        content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<Temporary> {
        let (temporary, file) = Temporary::beside(path, old)?;
        let mut out = BufWriter::new(&file);
        content(&mut out)?;
        out.flush()?;
        drop(out);
        // Some file systems notice only now that the disk is full.
        match file.sync_data() {
            Err(error)
                if error.kind() != ErrorKind::Unsupported && error.kind() != ErrorKind::InvalidInput =>
            {
                Err(error)
            }
            _ => Ok(temporary),
        }
    }

    /// Creates an empty file in the folder of `path`, with the owner and permissions of `old`.
    fn beside(path: &Path, old: Option<&Metadata>) -> io::Result<(Temporary, File)> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name: OsString = format!("{PREFIX}{}-{number}", std::process::id()).into();
            let place = folder_of(path).join(name);
            let mode = if old.is_some() { 0o600 } else { 0o666 };
            match OpenOptions::new().write(true).create_new(true).mode(mode).open(&place) {
                Ok(file) => {
                    let temporary = Temporary { path: place };
                    if let Some(old) = old {
                        take_after(&file, old)?;
                    }
                    return Ok((temporary, file));
                }
                // A file left by a killed process with the same number, or by another machine.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn rename(self, path: &Path) -> io::Result<()> {
        fs::rename(&self.path, path)?;
        self.keep();
        Ok(())
    }

    fn keep(mut self) {
        self.path = PathBuf::new();
    }
}

/// Gives a file the owner and permissions of `old`.
fn take_after(file: &File, old: &Metadata) -> io::Result<()> {
    let own = file.metadata()?;
    if (own.uid(), own.gid()) != (old.uid(), old.gid()) {
        // Only root can change the owner. Otherwise the file belongs to this user from now on.
        let _ = fchown(file, Some(old.uid()), Some(old.gid()));
    }
    file.set_permissions(Permissions::from_mode(old.mode() & 0o777))
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            // The first error is the one to report.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Folders that did not exist before, the innermost first. They are removed, if they are empty, unless they are kept.
struct NewFolder(Vec<PathBuf>);

impl NewFolder {
    /// Creates `folder` and those above it.
    fn create(folder: &Path) -> io::Result<NewFolder> {
        let missing = folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let created = NewFolder(missing.map(Path::to_path_buf).collect());
        fs::create_dir_all(folder)?;
        Ok(created)
    }

    fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        for folder in &self.0 {
            // The first error is the one to report.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Opens something that is not a regular file. Waits no longer than `patience` for its other end.
fn open_stream(path: &Path, found: &Metadata, patience: Duration) -> io::Result<File> {
    let begin = Instant::now();
    loop {
        let mut options = OpenOptions::new();
        options.write(true).append(found.is_file()).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        match options.open(path) {
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) && found.file_type().is_fifo() => {
                if begin.elapsed() >= patience {
                    let problem =
                        format!("no process has opened it for reading for {} s", patience.as_secs());
                    return Err(io::Error::new(ErrorKind::TimedOut, problem));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            opened => return opened,
        }
    }
}

/// A file whose writer may have to wait, but only for a limited time.
struct Stream {
    file: File,
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.file.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait()?,
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream {
    fn wait(&self) -> io::Result<()> {
        let mut poll = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one valid pollfd, whose descriptor is open.
        match unsafe { libc::poll(&raw mut poll, 1, PATIENCE.as_millis() as i32) } {
            0 => {
                let problem = format!("its reader has read nothing for {} s", PATIENCE.as_secs());
                Err(io::Error::new(ErrorKind::TimedOut, problem))
            }
            -1 => {
                let error = io::Error::last_os_error();
                if error.kind() == ErrorKind::Interrupted { Ok(()) } else { Err(error) }
            }
            _ => Ok(()),
        }
    }
}

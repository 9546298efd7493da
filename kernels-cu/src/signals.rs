//! Ctrl-C and the other signals that end a program: their effect while it compiles, runs its kernel, or serves.
//!
//! The programs call [`install`]. A program that uses the library keeps its own handlers: without [`install`], nothing here touches
//! a signal, and the other functions do nothing.
//!
//! A signal has the first of these effects that applies. It
//! - goes to the thread of [`Watched`], in a program that serves;
//! - ends the process with status 4 after [`end_on_signal`];
//! - is kept while a [`Held`] lives: until nvcc has ended, and on several nodes until the watch has looked for a lost rank. A second
//!   signal meanwhile ends the process with status 4;
//! - is noted while the kernel runs ([`Running`]), and a second signal ends the process with status 4;
//! - otherwise ends the process, as by default.
//!
//! Signals that arrive together count as one: `timeout` and some batch systems signal a process and then its group.
//!
//! The handler itself ends the process at a second signal. No thread is needed for that, since each may be stuck: the thread of
//! [`Watched`] in a log line that nobody reads, for example.

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, exit, register, signal_name};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A signal that arrives within this time of another one counts as the same, unless [`acted`] was called in between. On a busy machine,
/// the sender of two signals may have to wait for a core between them. Two presses of Ctrl-C are further apart.
const TOGETHER: Duration = Duration::from_millis(50);
/// Exit status of a failed run.
const STATUS: i32 = 4;
/// Maximum time for another thread to end a process that is about to end.
const LONGEST_END: Duration = Duration::from_secs(3);
const TICK: Duration = Duration::from_millis(2);
/// Signals that ask a program to end.
const ASKING: [i32; 2] = [SIGINT, SIGTERM];
/// These end it too, unless they are ignored, as under `nohup`.
const OTHERS: [i32; 2] = [SIGHUP, SIGQUIT];

// Sequentially consistent throughout: `Held` and `hold_or_end` each store one of these and then read another.
static INSTALLED: AtomicBool = AtomicBool::new(false);
static WATCHED: AtomicBool = AtomicBool::new(false);
static FAILED: AtomicBool = AtomicBool::new(false);
/// The number of [`Held`] values, and the signal that arrived meanwhile; 0: none.
static HOLDERS: AtomicUsize = AtomicUsize::new(0);
static KEPT: AtomicI32 = AtomicI32::new(0);
static RUNNING: AtomicUsize = AtomicUsize::new(0);
static STOP: AtomicBool = AtomicBool::new(false);
/// Signals that the thread of [`Watched`] has not acted on yet.
static UNHANDLED: AtomicUsize = AtomicUsize::new(0);
/// When the last signal that counted arrived, in nanoseconds since the machine's start. 0: there was none, or it has been acted on.
static LAST: AtomicU64 = AtomicU64::new(0);

/// From now on, signals have the effects that this module describes.
///
/// # Errors
/// The system refuses a handler.
pub fn install() -> io::Result<()> {
    if INSTALLED.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    for signal in ASKING.into_iter().chain(OTHERS) {
        let ends = ends_by_default(signal);
        if ends || ASKING.contains(&signal) {
            // SAFETY: `on_signal` only uses atomics and functions that are allowed in a signal handler.
            unsafe { register(signal, move || on_signal(signal, ends)) }?;
        }
    }
    Ok(())
}

/// True if the signal is neither ignored nor handled in another way.
fn ends_by_default(signal: i32) -> bool {
    // SAFETY: an all-zero sigaction is valid, and a call without a new action only fills it in.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut before) == 0
            && before.sa_sigaction == libc::SIG_DFL
    }
}

/// The signal handler.
fn on_signal(signal: i32, ends: bool) {
    let asks = ASKING.contains(&signal);
    let is = |flag: &AtomicBool| flag.load(Ordering::SeqCst);
    if asks && repeats() {
        return;
    }
    if asks && is(&WATCHED) {
        // The thread receives it, unless it is stuck at an earlier one.
        if UNHANDLED.fetch_add(1, Ordering::SeqCst) > 0 {
            exit_at_second();
        }
    } else if asks && is(&FAILED) {
        exit(STATUS);
    } else if asks && RUNNING.load(Ordering::SeqCst) > 0 {
        if STOP.swap(true, Ordering::SeqCst) {
            exit_at_second();
        }
    } else if ends {
        hold_or_end(signal);
    }
}

/// True if a signal that arrives now counts as the one before it. Otherwise the next ones may count as this one.
fn repeats() -> bool {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call is allowed in a signal handler, and only writes to `time`.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let now = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
    let is_new = |last: u64| last == 0 || now.saturating_sub(last) >= TOGETHER.as_nanos() as u64;
    LAST.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |last| is_new(last).then_some(now)).is_err()
}

/// What a signal asked for has happened, and a program may have seen that. So the next signal counts, however soon it arrives.
pub fn acted() {
    LAST.store(0, Ordering::SeqCst);
}

/// Ends the process with status 4, and says why if standard error takes the text at once.
fn exit_at_second() -> ! {
    const TEXT: &[u8] = b"error: a second signal has ended this process\n";
    let mut stderr = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: both calls are allowed in a signal handler, and only read or write what they are given here. A pipe that is ready has room
    // for the text.
    unsafe {
        if libc::poll(&raw mut stderr, 1, 0) == 1 && stderr.revents & libc::POLLOUT != 0 {
            libc::write(libc::STDERR_FILENO, TEXT.as_ptr().cast(), TEXT.len());
        }
    }
    exit(STATUS)
}

/// Applies a signal's default effect, or leaves that to the last [`Held`]. After a failure it ends the process with status 4.
fn hold_or_end(signal: i32) {
    if FAILED.load(Ordering::SeqCst) {
        exit(STATUS);
    }
    if HOLDERS.load(Ordering::SeqCst) > 0 {
        // The holder may be stuck at an earlier one.
        if KEPT.swap(signal, Ordering::SeqCst) != 0 {
            exit_at_second();
        }
        // The last one may have been dropped before it could see this.
        if HOLDERS.load(Ordering::SeqCst) > 0 {
            return;
        }
    }
    // Fails for signals that do not end a process by default, but these do.
    let _ = emulate_default_handler(signal);
}

/// While a value lives, the first signal does not end the process. The last value to be dropped ends it if a signal has arrived.
#[derive(Debug)]
pub struct Held(());

impl Held {
    /// Signals are kept from now on.
    #[expect(clippy::new_without_default, reason = "it has an effect")]
    pub fn new() -> Self {
        HOLDERS.fetch_add(1, Ordering::SeqCst);
        Held(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if HOLDERS.fetch_sub(1, Ordering::SeqCst) == 1 {
            let signal = KEPT.swap(0, Ordering::SeqCst);
            if signal != 0 {
                let _ = emulate_default_handler(signal);
            }
        }
    }
}

/// True if a signal has arrived that [`Held`] keeps.
pub fn is_kept() -> bool {
    KEPT.load(Ordering::SeqCst) != 0
}

/// True if this process is about to end: a signal is kept, or the run has failed ([`end_on_signal`]).
pub fn is_ending() -> bool {
    is_kept() || FAILED.load(Ordering::SeqCst)
}

/// Waits for the end of a process that is about to end. Another thread ends it.
pub fn await_end() {
    let begin = Instant::now();
    while is_ending() && begin.elapsed() < LONGEST_END {
        std::thread::sleep(TICK);
    }
}

/// Waits until no more than `few` values of [`Held`] live.
pub fn await_holders(few: usize) {
    while HOLDERS.load(Ordering::SeqCst) > few {
        std::thread::sleep(TICK);
    }
}

/// The name of the signal that is kept, such as `SIGTERM`.
pub fn kept_name() -> Option<&'static str> {
    signal_name(KEPT.load(Ordering::SeqCst))
}

/// While this value lives, the first signal is noted ([`is_stopping`]), and the second ends the process.
#[derive(Debug)]
pub struct Running(());

/// The kernel is running from now on.
pub fn note() -> Running {
    RUNNING.fetch_add(1, Ordering::SeqCst);
    Running(())
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// True if a signal has told the kernel to end.
pub fn is_stopping() -> bool {
    STOP.load(Ordering::SeqCst)
}

/// The run has failed, and the reason has been reported. From now on, a signal (such as from a launcher that ends the job) ends this
/// process with status 4.
pub fn end_on_signal() {
    FAILED.store(true, Ordering::SeqCst);
}

/// The effect of a signal that a program watches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// No further effect.
    Handled,
    /// The default effect: it ends the process.
    ByDefault,
    /// The process ends with status 4.
    Exit,
}

/// SIGINT and SIGTERM of a program that serves. They go to a thread and have no other effect.
#[derive(Debug)]
pub struct Watched(Signals);

impl Watched {
    /// From now on, the signals wait for the thread.
    ///
    /// # Errors
    /// The system refuses a handler.
    pub fn begin() -> io::Result<Watched> {
        // The handler runs before the thread is woken, and decides which signals count.
        install()?;
        let signals = Signals::new(ASKING)?;
        WATCHED.store(true, Ordering::SeqCst);
        Ok(Watched(signals))
    }

    /// Waits for signals on a separate thread, and does what `each` returns.
    pub fn watch_each(self, mut each: impl FnMut() -> Next + Send + 'static) {
        let Watched(mut signals) = self;
        let body = move || {
            for signal in signals.forever() {
                if UNHANDLED.load(Ordering::SeqCst) == 0 {
                    continue; // It counts as the one before it.
                }
                match each() {
                    Next::Handled => {}
                    Next::ByDefault => hold_or_end(signal),
                    Next::Exit => exit_at_second(),
                }
                // Signals of one kind that arrive together come as one.
                UNHANDLED.store(0, Ordering::SeqCst);
            }
        };
        // Without the thread the signals would be lost, so their default effect is restored.
        if std::thread::Builder::new().name("signals".into()).spawn(body).is_err() {
            WATCHED.store(false, Ordering::SeqCst);
        }
    }

    /// Waits for signals on a separate thread. `first` is called at the first signal and returns whether the program now ends by
    /// itself. If not, the process ends at once, as it does at the second signal.
    pub fn watch(self, first: impl FnOnce() -> bool + Send + 'static) {
        let mut first = Some(first);
        self.watch_each(move || match first.take().map(|first| first()) {
            Some(true) => Next::Handled,
            Some(false) => Next::ByDefault,
            None => Next::Exit,
        });
    }
}

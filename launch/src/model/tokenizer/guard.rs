//! Guards calls of the tokenizers library. It trusts its input files, so a bad file can make it panic, and a regular
//! expression can take practically forever.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

thread_local! {
    /// Turns this thread's panics into errors, so that they are not printed as well.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Returns the result of `call`, or the message of its panic, which is not printed.
pub(super) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static SILENCE: Once = Once::new();
    SILENCE.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CAUGHT.get() {
                others(info);
            }
        }));
    });
    let before = CAUGHT.replace(true);
    // The library's possibly inconsistent state is not used again, because the caller gives up the whole tokenizer.
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    CAUGHT.set(before);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        format!("the tokenizers library panics: {}", text.as_deref().unwrap_or("without a message"))
    })
}

/// Like [`caught`], but waits no longer than `limit`. The library cannot be interrupted: a call that takes longer
/// continues on its own thread until the process ends.
pub(super) fn bounded<T: Send + 'static>(
    limit: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let call = Arc::new(Mutex::new(Some(call)));
    let run = {
        let call = Arc::clone(&call);
        move || {
            let call = call.lock().unwrap_or_else(PoisonError::into_inner).take()?;
            Some(caught(call))
        }
    };
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::Builder::new().name("tokenizer".into()).spawn({
        let run = run.clone();
        move || sender.send(run())
    });
    let result = match thread {
        Ok(_) => receiver.recv_timeout(limit),
        // Without a thread, the call only has no time limit.
        Err(_) => Ok(run()),
    };
    match result {
        Ok(Some(result)) => result,
        Err(RecvTimeoutError::Timeout) => Err(format!(
            "it takes longer than {} s; probably one of its regular expressions takes exponential time",
            limit.as_secs_f32()
        )),
        Ok(None) | Err(RecvTimeoutError::Disconnected) => Err("its thread ended early".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn panics_are_errors_with_their_message() {
        assert_eq!(caught(|| 7), Ok(7));
        assert!(caught(|| panic!("a {}", "reason")).is_err_and(|text: String| text.ends_with(": a reason")));
        assert!(
            bounded(Duration::from_secs(9), || panic!("why"))
                .is_err_and(|text: String| text.ends_with(": why"))
        );
        assert_eq!(bounded(Duration::from_secs(9), || 7), Ok(7));
        // Panics of other threads are not affected.
        assert!(!CAUGHT.get());
    }

    #[test]
    fn calls_that_do_not_end_are_abandoned() {
        let begin = Instant::now();
        let (_never, wait) = mpsc::channel::<()>();
        let result = bounded(Duration::from_millis(50), move || wait.recv().is_ok());
        assert!(result.unwrap_err().contains("longer than 0.05 s"));
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
}

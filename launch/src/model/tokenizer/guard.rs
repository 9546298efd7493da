//! Calls of the tokenizers library, which takes a file's word for much: what a file breaks there is a panic, and its
//! regular expressions may take longer than anyone waits.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

thread_local! {
    /// This thread's panics become errors: nobody is told twice.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// The result of `call`; the message of its panic if it does, which is not printed.
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
    // What the library leaves half-done is not used again: the caller gives up on the whole tokenizer.
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    CAUGHT.set(before);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        format!("the tokenizers library panics: {}", text.as_deref().unwrap_or("without a message"))
    })
}

/// [`caught`], for no longer than `limit`. The library can't be interrupted: a call that takes longer goes on on a
/// thread of its own until the process ends.
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
        // Without a thread it is only not bounded.
        Err(_) => Ok(run()),
    };
    match result {
        Ok(Some(result)) => result,
        Err(RecvTimeoutError::Timeout) => Err(format!(
            "it takes longer than {} s; does one of its regular expressions explode?",
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
        // Panics of others are theirs.
        assert!(!CAUGHT.get());
    }

    #[test]
    fn what_does_not_end_is_given_up() {
        let begin = Instant::now();
        let (_never, wait) = mpsc::channel::<()>();
        let result = bounded(Duration::from_millis(50), move || wait.recv().is_ok());
        assert!(result.unwrap_err().contains("longer than 0.05 s"));
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
}

//! The output of a process under test.

use std::io::Read;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A pipe to this test, or one whose other end is closed.
pub(crate) fn pipe(unread: bool) -> Stdio {
    if !unread {
        return Stdio::piped();
    }
    let (_, writer) = std::io::pipe().expect("a pipe");
    writer.into()
}

/// Reads a pipe to its end, in the background.
pub(crate) struct Capture {
    bytes: Arc<Mutex<Vec<u8>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Capture {
    pub(crate) fn new(pipe: Option<impl Read + Send + 'static>) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&bytes);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let Some(mut pipe) = pipe else { return };
            let mut buffer = [0; 1 << 16];
            while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                shared.lock().expect("no reader panics").extend_from_slice(&buffer[..count]);
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        Capture { bytes, stop, thread: Some(thread) }
    }

    /// Stops reading once there is some output, and closes the pipe.
    pub(crate) fn stop_after_first_bytes(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().expect("no reader panics")).into_owned()
    }

    pub(crate) fn finish(&mut self) -> String {
        if let Some(thread) = self.thread.take() {
            thread.join().expect("a reader of a pipe does not panic");
        }
        self.text()
    }
}

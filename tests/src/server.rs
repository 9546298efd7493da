//! A running `mpk-serve`.

use crate::http::Answer;
use crate::job::Job;
use crate::running::Running;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The trained example, which has a tokenizer.
pub fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny/model.json")
}

/// A server that is ready.
pub struct Server {
    /// The job.
    pub running: Running,
    /// Host and port.
    pub address: String,
}

impl Server {
    /// Starts it on `ranks` ranks of the CPU target.
    ///
    /// # Panics
    /// It does not come up.
    pub fn start(ranks: u32, model: &Path, options: &[&str]) -> Server {
        let job = if ranks == 1 { Job::alone() } else { Job::new(ranks) };
        Server::of(job.arg(model).args(options))
    }

    /// Starts the server of a job.
    ///
    /// # Panics
    /// It does not come up.
    pub fn of(job: Job) -> Server {
        let job = job.of("mpk-serve").args(["--port", "0", "--backend", "cpu"]);
        // mpirun always waits this long, twice, for processes that it has told to end.
        let mut running = job.env("OMPI_MCA_odls_base_sigkill_timeout", "3").start();
        running.wait_for_log("listening on http://");
        let log = running.log();
        let address = log.split("listening on http://").nth(1).and_then(|rest| rest.lines().next());
        let address = address.expect("an address").to_string();
        Server { running, address }
    }

    /// Sends a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::post(&self.address, path, body)
    }

    /// A value of `/metrics`, by its name without `mpk:`; the first one with that name.
    ///
    /// # Panics
    /// There is none.
    pub fn metric(&self, name: &str) -> f64 {
        let text = Answer::get(&self.address, "/metrics").text();
        let line =
            text.lines().find(|line| line.strip_prefix("mpk:").is_some_and(|rest| rest.starts_with(name)));
        let value = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name}: {text}"))
    }

    /// Waits until `done`.
    ///
    /// # Panics
    /// After half a minute, with `what`.
    pub fn until(&self, what: &str, done: impl Fn(&Server) -> bool) {
        let begin = Instant::now();
        while !done(self) {
            assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends a server that has nothing to do: SIGTERM to rank 0.
    ///
    /// # Panics
    /// It fails to end with status 0.
    pub fn end(self) {
        let ranks = self.running.ranks();
        self.running.signal_process(&ranks[0], libc::SIGTERM);
        self.running.wait().expect(0).expect_nothing_left();
    }
}

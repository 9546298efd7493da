//! Random faults at random moments of every phase: after any fault of a rank, the job ends in time and prints nothing
//! wrong.
//!
//! MPK_FAULTS is the number of faults (100), MPK_FAULT_SEED the start of the random numbers.

use mpk_tests::{Finished, Job, ModelFile, Running, Turn, launcher};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Concurrent jobs. Those with a stopped rank mostly wait.
const AT_A_TIME: usize = 4;
const DEADLINE: Duration = Duration::from_secs(1);
/// From the fault to the end of all processes.
const LIMIT: Duration = Duration::from_secs(DEADLINE.as_secs() + 10);
/// A start takes about this long if four jobs share two cores.
const START: Duration = Duration::from_millis(1200);
/// A job that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit
    }
}

#[derive(Clone, Debug)]
enum Fault {
    /// A signal to a rank at some moment.
    Signal { rank: usize, signal: i32, after: Duration },
    /// What `--debug-fault` does.
    Step { text: String },
    /// Ctrl-C, once or twice.
    Interrupt { times: u32, after: Duration },
}

#[derive(Clone, Debug)]
struct Case {
    ranks: u32,
    /// The run takes about a second longer, so that a fault hits it.
    slow: bool,
    fault: Fault,
}

impl Case {
    fn random(random: &mut Random) -> Case {
        let ranks = [2, 2, 3, 4][random.below(4) as usize];
        let slow = random.below(3) == 0;
        let longest = START.as_millis() as u64 + if slow { 1000 } else { 0 };
        let after = Duration::from_millis(random.below(longest));
        let rank = random.below(u64::from(ranks)) as usize;
        let fault = match random.below(10) {
            0..=2 => Fault::Signal { rank, signal: libc::SIGSTOP, after },
            3..=4 => Fault::Signal { rank, signal: libc::SIGKILL, after },
            5..=7 => {
                let kind = ["stop", "exit=0", "exit=3", "panic"][random.below(4) as usize];
                Fault::Step { text: format!("{rank}:{}:{kind}", 1 + random.below(33)) }
            }
            _ => Fault::Interrupt { times: 1 + random.below(2) as u32, after },
        };
        // With 4 ranks each has 2 of the 8 heads; 3 ranks do not divide them.
        Case { ranks: if ranks == 3 { 4 } else { ranks }, slow, fault }
    }

    fn job(&self, model: &ModelFile) -> Job {
        let mut job = Job::new(self.ranks)
            .arg(model.path())
            .args(["--prompt-tokens", "5,6,7", "--max-new-tokens", "12", "--ignore-eos", "--deadline", "1"])
            .timeout(TIMEOUT);
        if self.slow {
            job = job.args(["--debug-stall", "0:4:15"]);
        }
        if let Fault::Step { text } = &self.fault {
            job = job.args(["--debug-fault", text]);
        }
        job
    }

    /// Whether mpirun gets no chance to clean up.
    fn ends_mpirun(&self) -> bool {
        matches!(self.fault, Fault::Interrupt { times: 2, .. })
    }

    /// Runs it; the error says what is wrong with its end.
    fn run(&self, turn: &Turn, model: &ModelFile, right: &str) -> Result<(), String> {
        let begin = Instant::now();
        let mut running = self.job(model).start_in(turn);
        let sleep_until = |running: &mut Running, moment: Duration| {
            while begin.elapsed() < moment && running.is_running() {
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        let mut stopped = None;
        let mut fault_at = Duration::ZERO;
        match self.fault {
            Fault::Signal { rank, signal, after } => {
                sleep_until(&mut running, after);
                fault_at = begin.elapsed();
                if let Some(process) = running.ranks().into_iter().find(|p| p.rank == Some(rank as u32)) {
                    running.signal_process(&process, signal);
                    stopped = (signal == libc::SIGSTOP).then_some(process);
                }
            }
            Fault::Interrupt { times, after } => {
                for time in 0..times {
                    sleep_until(&mut running, after + Duration::from_millis(100) * time);
                    fault_at = begin.elapsed();
                    running.signal(libc::SIGINT);
                }
            }
            Fault::Step { .. } => {}
        }
        // If a rank is stopped on its last steps, after all others have ended, only mpirun waits for it. And mpirun
        // may wait forever for a rank that died while MPI started. So when all ranks have ended, mpirun is ended
        // too.
        let (mut freed, mut alone): (bool, Option<Instant>) = (false, None);
        let finished = running.wait_and_look(|running| {
            let ranks = running.ranks();
            let late = begin.elapsed() > fault_at + LIMIT;
            if let Some(process) = &stopped
                && !freed
                && late
                && ranks.iter().all(|p| p.pid == process.pid)
            {
                running.signal_process(process, libc::SIGCONT);
                freed = true;
            }
            alone = if ranks.is_empty() && begin.elapsed() > START {
                alone.or(Some(Instant::now()))
            } else {
                None
            };
            if alone.is_some_and(|since| since.elapsed() > LIMIT) {
                running.signal(libc::SIGKILL);
                freed = true;
            }
        });
        self.judge(&finished, right, fault_at, freed)
    }

    fn judge(&self, finished: &Finished, right: &str, fault_at: Duration, freed: bool) -> Result<(), String> {
        let wrong = |what: &str| {
            let (status, took) = (finished.status, finished.elapsed);
            Err(format!(
                "{self:?}: {what}: status {status:?}, took {took:?}\nstdout: {}\nstderr: {}",
                finished.stdout, finished.stderr
            ))
        };
        // A fault at a step comes within the start.
        let latest = fault_at.max(2 * START + Duration::from_secs(1)) + LIMIT;
        if finished.elapsed > latest && !freed {
            return wrong("it ended late");
        }
        // A second Ctrl-C ends mpirun before it has removed its own folder. Ranks that run then remove it.
        let may_stay = |path: &Path| launcher::is_its_own(path) && (self.ends_mpirun() || freed);
        let own = finished.in_temporary.iter().find(|path| !may_stay(path));
        if !finished.orphans.is_empty() || own.is_some() {
            return wrong(&format!("left: {:?} {own:?}", finished.orphans));
        }
        if finished.status == Some(0) && finished.stdout != right {
            return wrong("status 0 with wrong tokens");
        }
        if !right.starts_with(finished.stdout.trim_end()) {
            return wrong("wrong tokens");
        }
        Ok(())
    }
}

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn random_faults_end_in_time_and_leave_nothing() {
    let count = number("MPK_FAULTS", 100);
    let mut random = Random(number("MPK_FAULT_SEED", 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let cases: Vec<Case> = (0..count).map(|_| Case::random(&mut random)).collect();
    let model = ModelFile::of_fixture("tiny");
    let turn = Turn::take();
    let before = mpk_tests::job::shared_memory();
    let clean = Case { ranks: 2, slow: false, fault: Fault::Step { text: "9:1:stop".into() } };
    let right = clean.job(&model).start_in(&turn).wait().expect(0).stdout;
    let (next, wrong) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    if let Err(what) = case.run(&turn, &model, &right) {
                        wrong.lock().expect("no test panics with it").push(what);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("no test panics with it");
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n\n"));
    // mpirun removes Open MPI's own segments, unless it was ended itself.
    let (of_mpi, own): (Vec<String>, Vec<String>) = mpk_tests::job::shared_memory()
        .difference(&before)
        .cloned()
        .partition(|name| name.starts_with("vader_segment.") || name.starts_with("osc_"));
    assert!(own.is_empty(), "left in /dev/shm: {own:?}");
    for name in of_mpi {
        std::fs::remove_file(Path::new("/dev/shm").join(name)).expect("a file of a job of this test");
    }
}

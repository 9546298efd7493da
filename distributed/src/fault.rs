//! Faults on demand, for tests: what a rank does wrong at a step.

use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The process stops (SIGSTOP).
    Stop,
    /// It is killed (SIGKILL).
    Kill,
    /// It exits with this status.
    Exit(i32),
    /// It panics.
    Panic,
    /// It does nothing for this many milliseconds, as if its own work took so long.
    Pause(u64),
    /// From then on, it cannot launch its kernel.
    Fail,
}

/// A fault of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank.
    pub rank: u32,
    /// The step, counted from 1: a point at which all ranks meet. The fault happens before the rank gets there.
    pub step: u64,
    /// What happens.
    pub kind: FaultKind,
}

impl Fault {
    /// Reads RANK:STEP:KIND, where KIND is `stop`, `kill`, `exit`, `exit=STATUS`, `panic`, `pause=MILLISECONDS` or
    /// `fail`.
    pub fn parse(text: &str) -> Option<Fault> {
        let mut fields = text.splitn(3, ':');
        let rank = fields.next()?.parse().ok()?;
        let step = fields.next()?.parse().ok()?;
        let kind = match fields.next()? {
            "stop" => FaultKind::Stop,
            "kill" => FaultKind::Kill,
            "exit" => FaultKind::Exit(0),
            "panic" => FaultKind::Panic,
            "fail" => FaultKind::Fail,
            other => match other.split_once('=')? {
                ("exit", status) => FaultKind::Exit(status.parse().ok()?),
                ("pause", milliseconds) => FaultKind::Pause(milliseconds.parse().ok()?),
                _ => return None,
            },
        };
        Some(Fault { rank, step, kind })
    }

    /// Triggers the fault if it is for `rank` at `step`.
    pub(crate) fn at(self, rank: u32, step: u64) {
        if (rank, step) != (self.rank, self.step) {
            return;
        }
        // SAFETY: raise has no preconditions.
        let raise = |signal| unsafe { libc::raise(signal) };
        match self.kind {
            FaultKind::Stop => drop(raise(libc::SIGSTOP)),
            FaultKind::Kill => drop(raise(libc::SIGKILL)),
            FaultKind::Exit(status) => std::process::exit(status),
            FaultKind::Panic => panic!("--debug-fault"),
            FaultKind::Pause(milliseconds) => std::thread::sleep(Duration::from_millis(milliseconds)),
            FaultKind::Fail => {}
        }
    }

    /// True if `rank`, whose last step was `step`, cannot launch its kernel.
    pub(crate) fn fails_to_launch(self, rank: u32, step: u64) -> bool {
        self.kind == FaultKind::Fail && self.rank == rank && self.step <= step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read() {
        let fault = |kind| Some(Fault { rank: 1, step: 12, kind });
        assert_eq!(Fault::parse("1:12:stop"), fault(FaultKind::Stop));
        assert_eq!(Fault::parse("1:12:exit"), fault(FaultKind::Exit(0)));
        assert_eq!(Fault::parse("1:12:exit=3"), fault(FaultKind::Exit(3)));
        assert_eq!(Fault::parse("1:12:pause=300"), fault(FaultKind::Pause(300)));
        assert_eq!(Fault::parse("1:12:fail"), fault(FaultKind::Fail));
        for text in ["", "1", "1:2", "1:2:burn", "x:2:stop", "1:2:exit=x", "1:2:pause", "1:2:stop=1"] {
            assert_eq!(Fault::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_failing_rank_cannot_launch_from_its_step_on() {
        let fault = Fault { rank: 1, step: 12, kind: FaultKind::Fail };
        let fails =
            [(1, 11), (1, 12), (1, 13), (0, 12)].map(|(rank, step)| fault.fails_to_launch(rank, step));
        assert_eq!(fails, [false, true, true, false]);
        assert!(!Fault { kind: FaultKind::Kill, ..fault }.fails_to_launch(1, 12));
    }
}

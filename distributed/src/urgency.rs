//! Threads that somebody waits for at every token: a client for its text, the kernel for an entry. They work for microseconds and sleep
//! most of the time. On the CPU target the workers keep all cores busy, and the system's fair scheduler may let a thread that wakes
//! wait for the next tick, some milliseconds. Meanwhile tokens pile up and reach the client in bursts.

/// The kernel's `struct sched_attr`, first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Threads that this one starts are ordinary ones: the workers must not inherit its urgency.
const RESET_ON_FORK: u64 = 1;
/// What an ordinary thread asks for at a time, in nanoseconds: the shortest that there is. Who asks for less comes earlier. Linux takes
/// it from 6.12 on, and ignores it before.
const SHORT_SLICE: u64 = 100_000;

/// Sets how the calling thread is scheduled; false if the system refuses.
fn set(policy: libc::c_int, priority: u32, runtime: u64, flags: u64) -> bool {
    let size = size_of::<Attributes>() as u32;
    let attributes =
        Attributes { size, policy: policy as u32, flags, priority, runtime, ..Attributes::default() };
    // SAFETY: the struct is live and says how long it is; 0 is the calling thread.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) == 0 }
}

/// The calling thread comes before all ordinary threads, if the system allows it (`CAP_SYS_NICE`, or a limit on real-time priorities
/// above 0: `ulimit -r`). Otherwise it gets short turns. For threads that never work for long; Linux keeps a twentieth of each core for
/// the others in any case.
pub fn urgent() {
    if !set(libc::SCHED_RR, 1, 0, RESET_ON_FORK) {
        // A refusal costs time only.
        set(libc::SCHED_OTHER, 0, SHORT_SLICE, RESET_ON_FORK);
    }
}

/// As long as it lives, the thread that made it is [`urgent`].
#[derive(Debug)]
pub(crate) struct Urgent(());

impl Urgent {
    pub(crate) fn begin() -> Urgent {
        urgent();
        Urgent(())
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        // Back to the default turns. What has been reset for children can't be taken back without privileges, and does no harm.
        set(libc::SCHED_OTHER, 0, 0, RESET_ON_FORK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> libc::c_int {
        // SAFETY: 0 is the calling thread.
        unsafe { libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK }
    }

    #[test]
    fn urgency_ends_and_is_not_inherited() {
        let urgent = Urgent::begin();
        // Where the system refuses, the thread stays an ordinary one.
        assert!([libc::SCHED_RR, libc::SCHED_OTHER].contains(&policy()));
        assert_eq!(std::thread::spawn(policy).join().unwrap(), libc::SCHED_OTHER);
        drop(urgent);
        assert_eq!(policy(), libc::SCHED_OTHER);
    }
}

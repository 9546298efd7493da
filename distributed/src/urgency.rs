//! Scheduling of threads that others wait for at every token: a client for its text, the kernel for an entry. These threads work for
//! microseconds and sleep most of the time. On the CPU target, workers keep all cores busy, and the system's fair scheduler may let a
//! thread that wakes up wait for the next tick, some milliseconds later. Meanwhile tokens pile up and reach the client in bursts.

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

/// Threads that this thread starts are ordinary again, because workers must not inherit its urgency.
const RESET_ON_FORK: u64 = 1;
/// The time slice that an ordinary thread requests, in nanoseconds: the shortest possible. A thread with a shorter slice is scheduled
/// earlier. Linux supports this from 6.12 on, and ignores it before.
const SHORT_SLICE: u64 = 100_000;

/// Sets how the calling thread is scheduled. Returns false if the system refuses.
fn set(policy: libc::c_int, priority: u32, runtime: u64, flags: u64) -> bool {
    let size = size_of::<Attributes>() as u32;
    let attributes =
        Attributes { size, policy: policy as u32, flags, priority, runtime, ..Attributes::default() };
    // SAFETY: the struct is live and contains its own size; 0 is the calling thread.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) == 0 }
}

/// Schedules the calling thread before all ordinary threads, if the system allows it (`CAP_SYS_NICE`, or a limit on real-time
/// priorities above 0: `ulimit -r`). Otherwise the thread gets short turns. For threads that never work for long; Linux always keeps a
/// twentieth of each core for other threads.
pub fn urgent() {
    if !set(libc::SCHED_RR, 1, 0, RESET_ON_FORK) {
        // A refusal only costs time.
        set(libc::SCHED_OTHER, 0, SHORT_SLICE, RESET_ON_FORK);
    }
}

/// While this value lives, the thread that created it is [`urgent`].
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
        // Restores the default turns. The reset for children cannot be undone without privileges, but it does no harm.
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
        // If the system refuses, the thread stays an ordinary one.
        assert!([libc::SCHED_RR, libc::SCHED_OTHER].contains(&policy()));
        assert_eq!(std::thread::spawn(policy).join().unwrap(), libc::SCHED_OTHER);
        drop(urgent);
        assert_eq!(policy(), libc::SCHED_OTHER);
    }
}

//! The architectures that cubins are compiled for, and how the kernel divides a multiprocessor's shared memory.

use std::fmt;
use taskgraph::target::{DEVICES, Device};
use taskgraph::{Knob, Tuning};

/// An architecture that nvcc compiles for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Architecture {
    /// Ampere (A100).
    Sm80,
    /// Hopper (H100, H200), with the features that only it has.
    Sm90a,
    /// Blackwell (B200), with the features that only it has.
    Sm100a,
}

impl Architecture {
    /// All architectures.
    pub const ALL: [Architecture; 3] = [Architecture::Sm80, Architecture::Sm90a, Architecture::Sm100a];

    /// nvcc's name of the real architecture, e.g. `sm_90a`.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Sm80 => "sm_80",
            Architecture::Sm90a => "sm_90a",
            Architecture::Sm100a => "sm_100a",
        }
    }

    /// nvcc's name of the virtual architecture, e.g. `compute_90a`.
    pub fn virtual_name(self) -> &'static str {
        match self {
            Architecture::Sm80 => "compute_80",
            Architecture::Sm90a => "compute_90a",
            Architecture::Sm100a => "compute_100a",
        }
    }

    /// The architecture named `name`, such as `sm_90a`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| architecture.name() == name)
    }

    /// The architecture of a row of the hardware table.
    pub fn of_device(device: &Device) -> Option<Self> {
        Self::from_name(device.architecture)
    }

    /// The architecture of a GPU with this compute capability, if there is one.
    pub fn from_compute_capability(major: u32, minor: u32) -> Option<Self> {
        match (major, minor) {
            (8, 0) => Some(Architecture::Sm80),
            (9, 0) => Some(Architecture::Sm90a),
            (10, 0) => Some(Architecture::Sm100a),
            _ => None,
        }
    }

    /// The first CUDA release that compiles for it and can compile the sources.
    pub fn oldest_cuda(self) -> (u32, u32) {
        match self {
            Architecture::Sm80 | Architecture::Sm90a => (12, 4),
            Architecture::Sm100a => (12, 8),
        }
    }

    /// Shared memory in bytes that one block may use on every device of this architecture in the hardware table.
    pub fn shared_memory(self) -> u32 {
        let devices = DEVICES.iter().filter(|device| Self::of_device(device) == Some(self));
        devices.map(|device| device.shared_memory).min().unwrap_or(0)
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Shared memory for barriers and task slots, in bytes.
const RESERVED_BYTES: u32 = 9 << 10;

/// Static shared memory of NVSHMEM's device library, rounded up.
const LIBRARY_BYTES: u32 = 2 << 10;

/// Number of ring stages that are loaded at a time.
const STAGES_IN_FLIGHT: Knob = Knob {
    name: "ring.stages_in_flight",
    default: 4,
    candidates: &[2, 3, 4, 5, 6, 8],
    about: "how many pieces of weights a multiprocessor loads at a time for the running task",
};

/// The same for tasks that have not started.
const STAGES_AHEAD: Knob = Knob {
    name: "ring.stages_ahead",
    default: 1,
    candidates: &[1, 2, 3, 4],
    about: "how many pieces of weights a multiprocessor loads at a time for tasks that have not started",
};

/// The same while the compute warps wait for events.
const STAGES_WAITING: Knob = Knob {
    name: "ring.stages_waiting",
    default: 4,
    candidates: &[1, 2, 3, 4, 6, 8],
    about: "how many pieces of weights a multiprocessor loads at a time while it waits for others",
};

/// The data that is evicted from the L2 cache first.
const FIRST_TO_LEAVE: Knob = Knob {
    name: "ring.first_to_leave",
    default: 0,
    candidates: &[0, 1],
    about: "what is evicted from the L2 cache first: 0 loaded weights, 1 nothing in particular",
};

/// When the prefetch warp prefetches.
const PREFETCH_WHEN: Knob = Knob {
    name: "prefetch.when",
    default: 0,
    candidates: &[0, 1, 2],
    about: "when weights are prefetched to the L2 cache: 0 while the ring is full, 1 also while no weights are multiplied, 2 always",
};

/// How far ahead it prefetches.
const PREFETCH_STAGES: Knob = Knob {
    name: "prefetch.stages",
    default: 14,
    candidates: &[6, 10, 14, 18, 22],
    about: "how many pieces ahead of the ring weights are prefetched to the L2 cache; 5/7 of that with several ranks",
};

/// How fast it prefetches.
const PREFETCH_CYCLES: Knob = Knob {
    name: "prefetch.cycles",
    default: 819,
    candidates: &[600, 700, 819, 930, 1050, 1200],
    about: "cycles between two prefetches of weights to the L2 cache",
};

/// Where the tasks' code lies. The compiler orders it, and one more kernel variant moves most of it. What a decode step executes then
/// shares other sets of the instruction cache, which is worth up to 0.5 % of the step. On an H100, 8B takes 5.277 (batch 1) and 5.634 ms
/// (batch 8) on one rank, and 3.014 and 3.299 on two; without a gap 5.290, 5.667, 3.024 and 3.306.
const GAP: Knob = Knob {
    name: "code.gap",
    default: 128,
    candidates: &[0, 64, 128, 256],
    about: "how many instructions that never run lie between those of the tasks",
};

/// Whether variants that need not be part of the kernel's function are functions of their own (`run_variant` in task.cuh). The kernel of 8B
/// on four ranks compiles in 65 s instead of 79 s then (side by side on two cores of an Intel Xeon, family 6 model 207). Not timed on a GPU.
const FUNCTIONS: Knob = Knob {
    name: "code.functions",
    default: 0,
    candidates: &[0, 1],
    about: "1: what is not the main part of a decode step is compiled as functions, which takes less time; 0: all tasks are one function",
};

/// The knobs of the kernel itself.
pub const KNOBS: [&Knob; 9] = [
    &STAGES_IN_FLIGHT,
    &STAGES_AHEAD,
    &STAGES_WAITING,
    &FIRST_TO_LEAVE,
    &PREFETCH_WHEN,
    &PREFETCH_STAGES,
    &PREFETCH_CYCLES,
    &GAP,
    &FUNCTIONS,
];

/// Maximum number of prefetched bytes per multiprocessor, so that all together fit in the L2 cache.
const PREFETCH_BYTES: u32 = 224 << 10;
/// Approximate bandwidth of the device memory per multiprocessor, in bytes per cycle.
const BYTES_PER_CYCLE: u32 = 20;

/// The kernel's configuration: threads per block, and the parts of its shared memory. The cubin is compiled for it, and
/// the launch must use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelConfig {
    /// `MPK_BLOCK_THREADS`: 8 warps that compute, one warp each that fetches tasks, loads weights and prefetches them,
    /// and a spare warp.
    pub block_threads: u32,
    /// `MPK_STAGES`: number of stages in the ring through which weights are streamed.
    pub stages: u32,
    /// `MPK_STAGE_BYTES`: size of a stage.
    pub stage_bytes: u32,
    /// `MPK_STAGES_IN_FLIGHT`: maximum number of stages that are loaded at a time. Loads in flight delay the flags
    /// between multiprocessors, so it is only as large as the memory's bandwidth needs.
    pub stages_in_flight: u32,
    /// `MPK_STAGES_AHEAD`: the same maximum while the compute warps are still at an earlier task, about to signal its
    /// end or waiting for an event.
    pub stages_ahead: u32,
    /// `MPK_STAGES_WAITING`: the same maximum while the compute warps wait for events, for the stages of any task.
    pub stages_waiting: u32,
    /// `MPK_FIRST_TO_LEAVE`: what is evicted from the L2 cache first (`FirstToLeave` in config.cuh).
    pub first_to_leave: u32,
    /// `MPK_PREFETCH_WHEN`: when the prefetch warp prefetches (`PrefetchWhen` in config.cuh).
    pub prefetch_when: u32,
    /// `MPK_PREFETCH_STAGES`: how far it prefetches ahead of the ring.
    pub prefetch_stages: u32,
    /// `MPK_PREFETCH_CYCLES`: its pace.
    pub prefetch_cycles: u32,
    /// `MPK_GAP`: instructions that never run, which move the code after them.
    pub gap: u32,
    /// `MPK_FUNCTIONS`: whether code that need not be inlined is compiled as functions.
    pub functions: u32,
    /// `MPK_WORK_BYTES`: shared memory that the tasks' code may use.
    pub work_bytes: u32,
    /// `MPK_SHARED_BYTES`: dynamic shared memory of the launch: stages, work, barriers and task slots.
    pub shared_bytes: u32,
}

impl KernelConfig {
    /// The tuned configuration.
    pub fn new(architecture: Architecture) -> Self {
        let stages = 8;
        let (stage_bytes, stages_in_flight, stages_ahead) = match architecture {
            Architecture::Sm80 => (8 << 10, 5, 5),
            Architecture::Sm90a | Architecture::Sm100a => (16 << 10, 4, 1),
        };
        let shared_bytes = architecture.shared_memory().saturating_sub(LIBRARY_BYTES);
        KernelConfig {
            block_threads: 12 * 32,
            stages,
            stage_bytes,
            stages_in_flight,
            stages_ahead,
            stages_waiting: stages_in_flight,
            first_to_leave: 0,
            prefetch_when: 0,
            prefetch_stages: PREFETCH_BYTES / stage_bytes,
            prefetch_cycles: stage_bytes / BYTES_PER_CYCLE,
            gap: GAP.default as u32,
            functions: FUNCTIONS.default as u32,
            work_bytes: shared_bytes.saturating_sub(stages * stage_bytes + RESERVED_BYTES),
            shared_bytes,
        }
    }

    /// The configuration with measured values.
    pub fn tuned(self, tuning: &Tuning) -> Self {
        let measured = |knob, otherwise: u32| tuning.get(knob).map_or(otherwise, |value| value as u32);
        let stages_in_flight = measured(&STAGES_IN_FLIGHT, self.stages_in_flight).clamp(1, self.stages);
        let stages_ahead = measured(&STAGES_AHEAD, self.stages_ahead).clamp(1, stages_in_flight);
        // If it is not set, it follows the number of copies in flight.
        let stages_waiting = measured(&STAGES_WAITING, stages_in_flight).clamp(1, stages_in_flight);
        KernelConfig {
            stages_in_flight,
            stages_ahead,
            stages_waiting,
            first_to_leave: measured(&FIRST_TO_LEAVE, self.first_to_leave),
            prefetch_when: measured(&PREFETCH_WHEN, self.prefetch_when),
            prefetch_stages: measured(&PREFETCH_STAGES, self.prefetch_stages),
            prefetch_cycles: measured(&PREFETCH_CYCLES, self.prefetch_cycles),
            gap: measured(&GAP, self.gap),
            functions: measured(&FUNCTIONS, self.functions),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_knobs_change_the_ring_and_nothing_else() {
        let config = KernelConfig::new(Architecture::Sm90a);
        assert_eq!(config.tuned(&Tuning::default()), config);
        let mut tuning = Tuning::default();
        tuning.set("ring.stages_in_flight", 2);
        tuning.set("ring.stages_ahead", 4);
        let tuned = config.tuned(&tuning);
        // Not more stages ahead than in total.
        assert_eq!((tuned.stages_in_flight, tuned.stages_ahead, tuned.stages_waiting), (2, 2, 2));
        assert_eq!(KernelConfig { stages_in_flight: 4, stages_ahead: 1, stages_waiting: 4, ..tuned }, config);
    }

    #[test]
    fn defaults_of_the_knobs_are_hoppers_and_each_changes_one_number() {
        let config = KernelConfig::new(Architecture::Sm90a);
        for knob in KNOBS {
            let mut tuning = Tuning::default();
            tuning.set(knob.name, knob.default);
            assert_eq!(config.tuned(&tuning), config, "{}", knob.name);
            let other =
                knob.candidates.iter().find(|&&value| value < knob.default).or(knob.candidates.last());
            tuning.set(knob.name, *other.unwrap());
            assert_ne!(config.tuned(&tuning), config, "{}", knob.name);
        }
    }

    #[test]
    fn every_device_of_the_table_has_an_architecture_with_room_for_work() {
        for device in DEVICES {
            let architecture = Architecture::of_device(device).expect(device.name);
            let config = KernelConfig::new(architecture);
            assert!(config.shared_bytes <= device.shared_memory);
            assert!(config.work_bytes >= 64 << 10, "{}: {config:?}", device.name);
            assert_eq!(
                config.stages * config.stage_bytes + config.work_bytes + RESERVED_BYTES,
                config.shared_bytes
            );
        }
        assert_eq!(Architecture::from_compute_capability(9, 0), Some(Architecture::Sm90a));
        assert_eq!(Architecture::from_compute_capability(8, 6), None);
    }
}

//! Which vector instructions the CPU kernels use.

use std::sync::Mutex;

/// A level of vector instructions. All but the last give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub enum Isa {
    /// The architecture's baseline.
    Scalar = 0,
    /// AVX2, FMA and F16C.
    Avx2 = 1,
    /// AVX-512 F, BW, VL and DQ.
    Avx512 = 2,
    /// The same with bf16 dot products (chosen on AMD, where they are the faster ones).
    Avx512Bf16 = 3,
}

impl Isa {
    /// All levels, lowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    fn from_number(number: i32) -> Isa {
        Isa::ALL[usize::try_from(number).unwrap_or(0).min(3)]
    }

    /// The level in use: the environment's `MPK_CPU_ISA` where the CPU has it, else the best one.
    pub fn current() -> Isa {
        // SAFETY: no arguments, no preconditions.
        Isa::from_number(unsafe { mpk_cpu_isa() })
    }

    /// The highest level that this CPU has.
    pub fn supported() -> Isa {
        // SAFETY: no arguments, no preconditions.
        Isa::from_number(unsafe { mpk_cpu_isa_supported() })
    }

    /// Runs `f` with this level in use, for tests; one caller at a time. `None` where the CPU lacks it.
    pub fn with<R>(self, f: impl FnOnce() -> R) -> Option<R> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        struct Restore;
        impl Drop for Restore {
            fn drop(&mut self) {
                // SAFETY: any number is allowed.
                unsafe { mpk_cpu_set_isa(-1) };
            }
        }
        if self > Isa::supported() {
            return None;
        }
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _restore = Restore;
        // SAFETY: any number is allowed.
        unsafe { mpk_cpu_set_isa(self as i32) };
        Some(f())
    }
}

/// In which order [`read_memory`] reads. Which is the fastest depends on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPattern {
    /// Name in reports.
    pub name: &'static str,
    streams: u32,
    prefetch: bool,
}

impl ReadPattern {
    /// All patterns: one piece of memory from its first byte to its last, or four pieces side by side, with and without prefetch
    /// instructions.
    pub const ALL: [ReadPattern; 4] = [
        ReadPattern { name: "one stream", streams: 1, prefetch: false },
        ReadPattern { name: "one stream, prefetch", streams: 1, prefetch: true },
        ReadPattern { name: "four streams", streams: 4, prefetch: false },
        ReadPattern { name: "four streams, prefetch", streams: 4, prefetch: true },
    ];
}

/// Reads memory as fast as one core can with this pattern (but for a rest of up to 1,023 bytes) and folds it into a number: the rate
/// that decoding is measured against.
pub fn read_memory(memory: &[u8], pattern: ReadPattern) -> u32 {
    assert!(memory.as_ptr().cast::<u32>().is_aligned(), "memory must be aligned to 4 bytes");
    // SAFETY: the slice is that many readable bytes. A prefetch past its end does nothing.
    unsafe {
        mpk_cpu_read(memory.as_ptr(), memory.len() as u64, pattern.streams, u32::from(pattern.prefetch))
    }
}

unsafe extern "C" {
    fn mpk_cpu_read(memory: *const u8, bytes: u64, streams: u32, prefetch: u32) -> u32;
    fn mpk_cpu_isa() -> i32;
    fn mpk_cpu_isa_supported() -> i32;
    fn mpk_cpu_set_isa(level: i32) -> i32;
}

//! The vector instructions that the CPU kernels use.

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
    /// The same with bf16 dot products (used on AMD, where they are faster).
    Avx512Bf16 = 3,
}

impl Isa {
    /// All levels, lowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    fn from_number(number: i32) -> Isa {
        Isa::ALL[usize::try_from(number).unwrap_or(0).min(3)]
    }

    /// The level in use: `MPK_CPU_ISA` from the environment if the CPU supports it, otherwise the best one.
    pub fn current() -> Isa {
        // SAFETY: no arguments, no preconditions.
        Isa::from_number(unsafe { mpk_cpu_isa() })
    }

    /// Its name in `MPK_CPU_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512_bf16",
        }
    }

    /// The reason why `MPK_CPU_ISA` is ignored, if it is set but cannot be used.
    pub fn problem() -> Option<String> {
        let given = std::env::var_os("MPK_CPU_ISA")?;
        problem(&given.to_string_lossy(), Isa::supported())
    }

    /// The highest level that this CPU supports.
    pub fn supported() -> Isa {
        // SAFETY: no arguments, no preconditions.
        Isa::from_number(unsafe { mpk_cpu_isa_supported() })
    }

    /// Runs `f` with this level in use, for tests; one caller at a time. `None` if the CPU does not support it.
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

fn problem(given: &str, supported: Isa) -> Option<String> {
    match Isa::ALL.into_iter().find(|level| level.name() == given) {
        Some(level) if level <= supported => None,
        Some(_) => Some(format!("MPK_CPU_ISA={given}: this CPU supports only {}", supported.name())),
        None => {
            let names = Isa::ALL.map(Isa::name).join(", ");
            Some(format!("MPK_CPU_ISA={given}: unknown level; the levels are {names}"))
        }
    }
}

/// The order in which [`read_memory`] reads. The fastest order depends on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPattern {
    /// Name in reports.
    pub name: &'static str,
    streams: u32,
    prefetch: bool,
}

impl ReadPattern {
    /// All patterns: one block of memory from its first byte to its last, or four blocks in parallel, with and without prefetch
    /// instructions.
    pub const ALL: [ReadPattern; 4] = [
        ReadPattern { name: "one stream", streams: 1, prefetch: false },
        ReadPattern { name: "one stream, prefetch", streams: 1, prefetch: true },
        ReadPattern { name: "four streams", streams: 4, prefetch: false },
        ReadPattern { name: "four streams, prefetch", streams: 4, prefetch: true },
    ];
}

/// Reads memory with this pattern as fast as one core can, except for a rest of up to 1,023 bytes, and folds it into a number.
/// Decoding is compared with this rate.
pub fn read_memory(memory: &[u8], pattern: ReadPattern) -> u32 {
    assert!(memory.as_ptr().cast::<u32>().is_aligned(), "memory must be aligned to 4 bytes");
    // SAFETY: the slice has this many readable bytes. A prefetch past its end has no effect.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unusable_level_is_reported() {
        assert_eq!(problem("scalar", Isa::Scalar), None);
        assert_eq!(problem("avx512_bf16", Isa::Avx512Bf16), None);
        let lacks = problem("avx512", Isa::Avx2);
        assert!(lacks.as_ref().is_some_and(|text| text.contains("only avx2")), "{lacks:?}");
        let unknown = problem("sse", Isa::Avx512);
        assert!(unknown.as_ref().is_some_and(|text| text.contains("scalar, avx2, avx512")), "{unknown:?}");
    }
}

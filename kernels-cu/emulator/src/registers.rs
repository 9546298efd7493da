//! A warp's registers. Each has 32 adjacent lanes of 32 or 64 bits; a predicate is one word with one bit per lane.

use crate::instruction::{CONSTANT, OFFSET, WIDE};
use half::{bf16, f16};

pub(crate) const LANES: usize = 32;
pub(crate) const ALL: u32 = u32::MAX;

/// How a register stores a lane.
pub(crate) trait Cell: Copy + Default {
    const BYTES: usize;
}
impl Cell for u32 {
    const BYTES: usize = 4;
}
impl Cell for u64 {
    const BYTES: usize = 8;
}

/// A lane's value.
pub(crate) trait Value: Copy {
    type Cell: Cell;
    fn of(cell: Self::Cell) -> Self;
    fn cell(self) -> Self::Cell;
}

macro_rules! value {
    ($type:ty, $cell:ty, $of:expr, $to:expr) => {
        impl Value for $type {
            type Cell = $cell;
            #[inline(always)]
            fn of(cell: $cell) -> Self {
                ($of)(cell)
            }
            #[inline(always)]
            fn cell(self) -> $cell {
                ($to)(self)
            }
        }
    };
}
value!(u8, u32, |c| c as u8, |v: u8| u32::from(v));
value!(i8, u32, |c| c as i8, |v: i8| v as u8 as u32);
value!(u16, u32, |c| c as u16, |v: u16| u32::from(v));
value!(i16, u32, |c| c as i16, |v: i16| v as u16 as u32);
value!(u32, u32, |c| c, |v| v);
value!(i32, u32, |c| c as i32, |v: i32| v as u32);
value!(u64, u64, |c| c, |v| v);
value!(i64, u64, |c| c as i64, |v: i64| v as u64);
value!(f32, u32, f32::from_bits, |v: f32| v.to_bits());
value!(f64, u64, f64::from_bits, |v: f64| v.to_bits());
value!(f16, u32, |c| f16::from_bits(c as u16), |v: f16| u32::from(v.to_bits()));
value!(bf16, u32, |c| bf16::from_bits(c as u16), |v: bf16| u32::from(v.to_bits()));

/// The registers of one warp, and the constants that all warps share.
#[derive(Debug)]
pub(crate) struct Registers {
    /// Whole words, so every cell is aligned.
    own: Vec<u64>,
    constants: std::sync::Arc<Vec<u64>>,
}

impl Registers {
    /// All zeros. The system allocates memory only as registers are written.
    pub(crate) fn new(bytes: usize, constants: std::sync::Arc<Vec<u64>>) -> Self {
        Registers { own: vec![0; bytes.div_ceil(8)], constants }
    }

    #[inline(always)]
    fn at<C: Cell>(&self, register: u32) -> *const C {
        let words = if register & CONSTANT != 0 { &self.constants[..] } else { &self.own[..] };
        let offset = (register & OFFSET) as usize;
        debug_assert!(offset + C::BYTES * LANES <= words.len() * 8);
        // SAFETY: `decode` gives registers offsets inside the file of `register_bytes` bytes.
        unsafe { words.as_ptr().cast::<u8>().add(offset).cast() }
    }

    #[inline(always)]
    fn at_mut<C: Cell>(&mut self, register: u32) -> *mut C {
        debug_assert!(register & CONSTANT == 0);
        let offset = (register & OFFSET) as usize;
        // SAFETY: as in `at`; constants are never destinations.
        unsafe { self.own.as_mut_ptr().cast::<u8>().add(offset).cast() }
    }

    /// All lanes.
    #[inline(always)]
    pub(crate) fn all<C: Cell>(&self, register: u32) -> [C; LANES] {
        // SAFETY: as in `at`; offsets of registers are multiples of their cells' sizes.
        unsafe { self.at::<C>(register).cast::<[C; LANES]>().read() }
    }

    /// One lane.
    #[inline(always)]
    pub(crate) fn lane<C: Cell>(&self, register: u32, lane: usize) -> C {
        debug_assert!(lane < LANES);
        // SAFETY: as in `all`.
        unsafe { self.at::<C>(register).add(lane % LANES).read() }
    }

    /// One lane of a register of either width.
    #[inline(always)]
    pub(crate) fn number(&self, register: u32, lane: usize) -> u64 {
        if register & WIDE != 0 {
            self.lane::<u64>(register, lane)
        } else {
            self.lane::<u32>(register, lane).into()
        }
    }

    /// All lanes of a register of either width.
    #[inline(always)]
    pub(crate) fn numbers(&self, register: u32) -> [u64; LANES] {
        if register & WIDE != 0 {
            self.all::<u64>(register)
        } else {
            let narrow = self.all::<u32>(register);
            std::array::from_fn(|lane| narrow[lane].into())
        }
    }

    /// Sets the lanes of `mask`.
    #[inline(always)]
    pub(crate) fn set<C: Cell>(&mut self, register: u32, mask: u32, values: &[C; LANES]) {
        let to = self.at_mut::<C>(register);
        if mask == ALL {
            // SAFETY: as in `all`; the file is borrowed mutably, and constants are never destinations.
            unsafe { to.cast::<[C; LANES]>().write(*values) };
            return;
        }
        let mut left = mask;
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            left &= left - 1;
            // SAFETY: as above.
            unsafe { to.add(lane).write(values[lane]) };
        }
    }

    #[inline(always)]
    pub(crate) fn set_lane(&mut self, register: u32, lane: usize, value: u64) {
        if register & WIDE != 0 {
            // SAFETY: as in `set`.
            unsafe { self.at_mut::<u64>(register).add(lane % LANES).write(value) };
        } else {
            // SAFETY: as in `set`.
            unsafe { self.at_mut::<u32>(register).add(lane % LANES).write(value as u32) };
        }
    }

    /// A predicate: one bit per lane.
    #[inline(always)]
    pub(crate) fn predicate(&self, register: u32) -> u32 {
        // SAFETY: as in `at`; a predicate is one word.
        unsafe { self.at::<u32>(register).read() }
    }

    #[inline(always)]
    pub(crate) fn set_predicate(&mut self, register: u32, mask: u32, bits: u32) {
        let to = self.at_mut::<u32>(register);
        // SAFETY: as in `set`.
        unsafe { to.write(to.read() & !mask | bits & mask) };
    }
}

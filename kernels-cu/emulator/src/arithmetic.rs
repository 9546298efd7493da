//! Instructions that compute. They compute all lanes at once; only the lanes of the mask keep
//! the result.

use crate::formats::{self, flush};
use crate::instruction::{Compare, Instruction, NONE, One, Op, Round, Two, Ty};
use crate::registers::{Cell, LANES, Registers, Value};
use half::{bf16, f16};

type Result = std::result::Result<(), String>;

#[inline(always)]
fn each<D: Cell>(r: &mut Registers, i: &Instruction, mask: u32, f: impl Fn(usize) -> D) {
    let mut values = [D::default(); LANES];
    for (lane, value) in values.iter_mut().enumerate() {
        *value = f(lane);
    }
    r.set(i.d, mask, &values);
}

#[inline(always)]
fn map1<A: Value, D: Value>(r: &mut Registers, i: &Instruction, mask: u32, f: impl Fn(A) -> D) {
    let a = r.all::<A::Cell>(i.a);
    each(r, i, mask, |l| f(A::of(a[l])).cell());
}

#[inline(always)]
fn map2<A: Value, D: Value>(r: &mut Registers, i: &Instruction, mask: u32, f: impl Fn(A, A) -> D) {
    let (a, b) = (r.all::<A::Cell>(i.a), r.all::<A::Cell>(i.b));
    each(r, i, mask, |l| f(A::of(a[l]), A::of(b[l])).cell());
}

#[inline(always)]
fn map3<A: Value, C: Value, D: Value>(
    r: &mut Registers,
    i: &Instruction,
    mask: u32,
    f: impl Fn(A, A, C) -> D,
) {
    let (a, b, c) = (r.all::<A::Cell>(i.a), r.all::<A::Cell>(i.b), r.all::<C::Cell>(i.c));
    each(r, i, mask, |l| f(A::of(a[l]), A::of(b[l]), C::of(c[l])).cell());
}

/// A shift's second operand has 32 bits, whatever the type of the first.
#[inline(always)]
fn shift<A: Value>(r: &mut Registers, i: &Instruction, mask: u32, f: impl Fn(A, u32) -> A) {
    let (a, b) = (r.all::<A::Cell>(i.a), r.all::<u32>(i.b));
    each(r, i, mask, |l| f(A::of(a[l]), b[l]).cell());
}

/// Computes on both halves of a register.
fn halves(r: &mut Registers, i: &Instruction, mask: u32, of: Ty, f: impl Fn(f32, f32, f32) -> f32) {
    let zero = [0u32; LANES];
    let (a, b) = (r.all::<u32>(i.a), if i.b == NONE { zero } else { r.all::<u32>(i.b) });
    let c = if i.c == NONE { zero } else { r.all::<u32>(i.c) };
    let (element, packed) = if of == Ty::F16x2 { (Ty::F16, Ty::F16x2) } else { (Ty::Bf16, Ty::Bf16x2) };
    let part = |v: u32, high: bool| formats::element((if high { v >> 16 } else { v }) as u16, element);
    each(r, i, mask, |l| {
        let one = |high| f(part(a[l], high), part(b[l], high), part(c[l], high));
        formats::pair(one(true), one(false), packed)
    });
}

fn unknown(i: &Instruction) -> Result {
    Err(format!("{:?} is not emulated", i.op))
}

macro_rules! integers {
    ($type:ty, $r:expr, $i:expr, $mask:expr, $two:expr, $double:ty) => {{
        let (r, i, mask) = ($r, $i, $mask);
        match $two {
            Two::Add => map2::<$type, $type>(r, i, mask, |a, b| a.wrapping_add(b)),
            Two::Sub => map2::<$type, $type>(r, i, mask, |a, b| a.wrapping_sub(b)),
            Two::Mul => map2::<$type, $type>(r, i, mask, |a, b| a.wrapping_mul(b)),
            Two::MulHigh => map2::<$type, $type>(r, i, mask, |a, b| {
                ((<$double>::from(a) * <$double>::from(b)) >> <$type>::BITS) as $type
            }),
            // Division by zero: the result on a GPU is undefined.
            Two::Div => map2::<$type, $type>(r, i, mask, |a, b| if b == 0 { !0 } else { a.wrapping_div(b) }),
            Two::Rem => map2::<$type, $type>(r, i, mask, |a, b| if b == 0 { a } else { a.wrapping_rem(b) }),
            Two::Min => map2::<$type, $type>(r, i, mask, |a, b| a.min(b)),
            Two::Max => map2::<$type, $type>(r, i, mask, |a, b| a.max(b)),
            Two::And => map2::<$type, $type>(r, i, mask, |a, b| a & b),
            Two::Or => map2::<$type, $type>(r, i, mask, |a, b| a | b),
            Two::Xor => map2::<$type, $type>(r, i, mask, |a, b| a ^ b),
            Two::Shl => shift::<$type>(r, i, mask, |a, b| if b < <$type>::BITS { a << b } else { 0 }),
            Two::Shr => shift::<$type>(r, i, mask, |a, b| {
                if b < <$type>::BITS { a >> b } else { (a >> (<$type>::BITS - 1)) >> 1 }
            }),
        }
        Ok(())
    }};
}

macro_rules! floats {
    ($type:ty, $r:expr, $i:expr, $mask:expr, $two:expr, $from:expr, $to:expr) => {{
        let (r, i, mask) = ($r, $i, $mask);
        match $two {
            Two::Add => map2::<$type, $type>(r, i, mask, |a, b| $to($from(a) + $from(b))),
            Two::Sub => map2::<$type, $type>(r, i, mask, |a, b| $to($from(a) - $from(b))),
            Two::Mul => map2::<$type, $type>(r, i, mask, |a, b| $to($from(a) * $from(b))),
            Two::Div => map2::<$type, $type>(r, i, mask, |a, b| $to($from(a) / $from(b))),
            Two::Min => map2::<$type, $type>(r, i, mask, |a, b| $to($from(a).min($from(b)))),
            Two::Max => map2::<$type, $type>(r, i, mask, |a, b| $to($from(a).max($from(b)))),
            _ => return unknown(i),
        }
        Ok(())
    }};
}

#[inline(always)]
pub(crate) fn two(r: &mut Registers, i: &Instruction, mask: u32, two: Two, ty: Ty) -> Result {
    match ty {
        Ty::U32 => integers!(u32, r, i, mask, two, u64),
        Ty::S32 => integers!(i32, r, i, mask, two, i64),
        Ty::U64 => integers!(u64, r, i, mask, two, u128),
        Ty::S64 => integers!(i64, r, i, mask, two, i128),
        Ty::F32 => floats!(f32, r, i, mask, two, |v| v, |v| v),
        Ty::F64 => floats!(f64, r, i, mask, two, |v| v, |v| v),
        _ => rare_two(r, i, mask, two, ty),
    }
}

#[inline(never)]
fn rare_two(r: &mut Registers, i: &Instruction, mask: u32, two: Two, ty: Ty) -> Result {
    match ty {
        Ty::U16 => integers!(u16, r, i, mask, two, u32),
        Ty::S16 => integers!(i16, r, i, mask, two, i32),
        Ty::F16 => floats!(f16, r, i, mask, two, f16::to_f32, f16::from_f32),
        Ty::Bf16 => floats!(bf16, r, i, mask, two, bf16::to_f32, bf16::from_f32),
        Ty::F16x2 | Ty::Bf16x2 => {
            match two {
                Two::Add => halves(r, i, mask, ty, |a, b, _| a + b),
                Two::Sub => halves(r, i, mask, ty, |a, b, _| a - b),
                Two::Mul => halves(r, i, mask, ty, |a, b, _| a * b),
                Two::Min => halves(r, i, mask, ty, |a, b, _| a.min(b)),
                Two::Max => halves(r, i, mask, ty, |a, b, _| a.max(b)),
                _ => return unknown(i),
            }
            Ok(())
        }
        _ => unknown(i),
    }
}

/// a * b + c for integers.
#[inline(always)]
pub(crate) fn mad(r: &mut Registers, i: &Instruction, mask: u32, ty: Ty) -> Result {
    match ty {
        Ty::U32 | Ty::S32 => map3::<u32, u32, u32>(r, i, mask, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Ty::U64 | Ty::S64 => map3::<u64, u64, u64>(r, i, mask, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Ty::U16 | Ty::S16 => map3::<u16, u16, u16>(r, i, mask, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        _ => return unknown(i),
    }
    Ok(())
}

/// The high half of a * b, plus c.
pub(crate) fn mad_high(r: &mut Registers, i: &Instruction, mask: u32, ty: Ty) -> Result {
    match ty {
        Ty::U32 => map3::<u32, u32, u32>(r, i, mask, |a, b, c| {
            (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c)
        }),
        Ty::S32 => map3::<i32, i32, i32>(r, i, mask, |a, b, c| {
            (((i64::from(a) * i64::from(b)) >> 32) as i32).wrapping_add(c)
        }),
        Ty::U64 => map3::<u64, u64, u64>(r, i, mask, |a, b, c| {
            (((u128::from(a) * u128::from(b)) >> 64) as u64).wrapping_add(c)
        }),
        _ => return unknown(i),
    }
    Ok(())
}

/// a * b in twice the width, plus c.
#[inline(always)]
pub(crate) fn wide(r: &mut Registers, i: &Instruction, mask: u32, ty: Ty) -> Result {
    if i.c == NONE {
        match ty {
            Ty::U32 => map2::<u32, u64>(r, i, mask, |a, b| u64::from(a) * u64::from(b)),
            Ty::S32 => map2::<i32, i64>(r, i, mask, |a, b| i64::from(a) * i64::from(b)),
            Ty::U16 => map2::<u16, u32>(r, i, mask, |a, b| u32::from(a) * u32::from(b)),
            Ty::S16 => map2::<i16, i32>(r, i, mask, |a, b| i32::from(a) * i32::from(b)),
            _ => return unknown(i),
        }
    } else {
        match ty {
            Ty::U32 => {
                map3::<u32, u64, u64>(r, i, mask, |a, b, c| (u64::from(a) * u64::from(b)).wrapping_add(c))
            }
            Ty::S32 => {
                map3::<i32, i64, i64>(r, i, mask, |a, b, c| (i64::from(a) * i64::from(b)).wrapping_add(c))
            }
            Ty::U16 => {
                map3::<u16, u32, u32>(r, i, mask, |a, b, c| (u32::from(a) * u32::from(b)).wrapping_add(c))
            }
            Ty::S16 => {
                map3::<i16, i32, i32>(r, i, mask, |a, b, c| (i32::from(a) * i32::from(b)).wrapping_add(c))
            }
            _ => return unknown(i),
        }
    }
    Ok(())
}

#[inline(always)]
pub(crate) fn fma(r: &mut Registers, i: &Instruction, mask: u32, ty: Ty, round: Round) -> Result {
    match (ty, round) {
        (Ty::F32, Round::Nearest) => map3::<f32, f32, f32>(r, i, mask, |a, b, c| a.mul_add(b, c)),
        (Ty::F32, _) => map3::<f32, f32, f32>(r, i, mask, |a, b, c| formats::fma_rounded(a, b, c, round)),
        (Ty::F64, Round::Nearest) => map3::<f64, f64, f64>(r, i, mask, |a, b, c| a.mul_add(b, c)),
        (Ty::F16x2 | Ty::Bf16x2, Round::Nearest) => halves(r, i, mask, ty, |a, b, c| a.mul_add(b, c)),
        (Ty::F16, Round::Nearest) => map3::<f16, f16, f16>(r, i, mask, |a, b, c| {
            f16::from_bits(formats::write(a.to_f64().mul_add(b.to_f64(), c.to_f64()), ty, round) as u16)
        }),
        (Ty::Bf16, Round::Nearest) => map3::<bf16, bf16, bf16>(r, i, mask, |a, b, c| {
            bf16::from_bits(formats::write(a.to_f64().mul_add(b.to_f64(), c.to_f64()), ty, round) as u16)
        }),
        _ => return unknown(i),
    }
    Ok(())
}

/// Functions of one f32, computed in f64, so that they are at least as exact as a GPU's.
fn function(r: &mut Registers, i: &Instruction, mask: u32, f: impl Fn(f64) -> f64) {
    let subnormal = i.immediate == 0;
    map1::<f32, f32>(r, i, mask, |a| {
        let a = if subnormal { a } else { flush(a) };
        let result = f(f64::from(a)) as f32;
        if subnormal { result } else { flush(result) }
    });
}

pub(crate) fn one(r: &mut Registers, i: &Instruction, mask: u32, one: One, ty: Ty) -> Result {
    match (one, ty) {
        (One::Neg, Ty::F32) => map1::<f32, f32>(r, i, mask, |a| -a),
        (One::Neg, Ty::F64) => map1::<f64, f64>(r, i, mask, |a| -a),
        (One::Neg, Ty::F16 | Ty::Bf16) => map1::<u16, u16>(r, i, mask, |a| a ^ 0x8000),
        (One::Neg, Ty::F16x2 | Ty::Bf16x2) => map1::<u32, u32>(r, i, mask, |a| a ^ 0x8000_8000),
        (One::Neg, Ty::U16 | Ty::S16) => map1::<i16, i16>(r, i, mask, |a| a.wrapping_neg()),
        (One::Neg, Ty::U32 | Ty::S32) => map1::<i32, i32>(r, i, mask, |a| a.wrapping_neg()),
        (One::Neg, Ty::U64 | Ty::S64) => map1::<i64, i64>(r, i, mask, |a| a.wrapping_neg()),
        (One::Abs, Ty::F32) => map1::<f32, f32>(r, i, mask, |a| a.abs()),
        (One::Abs, Ty::F64) => map1::<f64, f64>(r, i, mask, |a| a.abs()),
        (One::Abs, Ty::F16 | Ty::Bf16) => map1::<u16, u16>(r, i, mask, |a| a & 0x7FFF),
        (One::Abs, Ty::F16x2 | Ty::Bf16x2) => map1::<u32, u32>(r, i, mask, |a| a & 0x7FFF_7FFF),
        (One::Abs, Ty::S32) => map1::<i32, i32>(r, i, mask, |a| a.wrapping_abs()),
        (One::Abs, Ty::S64) => map1::<i64, i64>(r, i, mask, |a| a.wrapping_abs()),
        (One::Not, Ty::U16) => map1::<u16, u16>(r, i, mask, |a| !a),
        (One::Not, Ty::U32) => map1::<u32, u32>(r, i, mask, |a| !a),
        (One::Not, Ty::U64) => map1::<u64, u64>(r, i, mask, |a| !a),
        (One::Count, Ty::U32) => map1::<u32, u32>(r, i, mask, |a| a.count_ones()),
        (One::Count, Ty::U64) => map1::<u64, u32>(r, i, mask, |a| a.count_ones()),
        (One::LeadingZeros, Ty::U32) => map1::<u32, u32>(r, i, mask, |a| a.leading_zeros()),
        (One::LeadingZeros, Ty::U64) => map1::<u64, u32>(r, i, mask, |a| a.leading_zeros()),
        (One::Reverse, Ty::U32) => map1::<u32, u32>(r, i, mask, |a| a.reverse_bits()),
        (One::Reverse, Ty::U64) => map1::<u64, u64>(r, i, mask, |a| a.reverse_bits()),
        (One::Find, Ty::U32) => map1::<u32, u32>(r, i, mask, |a| 31u32.wrapping_sub(a.leading_zeros())),
        (One::Find, Ty::U64) => map1::<u64, u32>(r, i, mask, |a| 63u32.wrapping_sub(a.leading_zeros())),
        (One::FindShift, Ty::U32) => {
            map1::<u32, u32>(r, i, mask, |a| if a == 0 { !0 } else { a.leading_zeros() })
        }
        (One::FindShift, Ty::U64) => {
            map1::<u64, u32>(r, i, mask, |a| if a == 0 { !0 } else { a.leading_zeros() })
        }
        (One::Sqrt, Ty::F32) => map1::<f32, f32>(r, i, mask, |a| a.sqrt()),
        (One::Sqrt, Ty::F64) => map1::<f64, f64>(r, i, mask, |a| a.sqrt()),
        (One::Reciprocal, Ty::F64) => map1::<f64, f64>(r, i, mask, |a| 1.0 / a),
        (One::Reciprocal, Ty::F32) => function(r, i, mask, |a| 1.0 / a),
        (One::Rsqrt, Ty::F32) => function(r, i, mask, |a| 1.0 / a.sqrt()),
        (One::Exp2, Ty::F32) => function(r, i, mask, f64::exp2),
        (One::Log2, Ty::F32) => function(r, i, mask, f64::log2),
        (One::Sine, Ty::F32) => function(r, i, mask, f64::sin),
        (One::Cosine, Ty::F32) => function(r, i, mask, f64::cos),
        (One::Tanh, Ty::F32) => function(r, i, mask, f64::tanh),
        _ => return unknown(i),
    }
    Ok(())
}

/// One bit per lane.
#[inline(always)]
fn bits<A: Value>(r: &Registers, i: &Instruction, f: impl Fn(A, A) -> bool) -> u32 {
    let (a, b) = (r.all::<A::Cell>(i.a), r.all::<A::Cell>(i.b));
    let mut bits = 0;
    for lane in 0..LANES {
        bits |= u32::from(f(A::of(a[lane]), A::of(b[lane]))) << lane;
    }
    bits
}

macro_rules! ordered {
    ($type:ty, $r:expr, $i:expr, $compare:expr) => {
        match $compare {
            Compare::Eq => bits::<$type>($r, $i, |a, b| a == b),
            Compare::Ne => bits::<$type>($r, $i, |a, b| a != b && a == a && b == b),
            Compare::Lt => bits::<$type>($r, $i, |a, b| a < b),
            Compare::Le => bits::<$type>($r, $i, |a, b| a <= b),
            Compare::Gt => bits::<$type>($r, $i, |a, b| a > b),
            Compare::Ge => bits::<$type>($r, $i, |a, b| a >= b),
            Compare::Equ => bits::<$type>($r, $i, |a, b| a == b || a != a || b != b),
            Compare::Neu => bits::<$type>($r, $i, |a, b| a != b),
            Compare::Ltu => !bits::<$type>($r, $i, |a, b| a >= b),
            Compare::Leu => !bits::<$type>($r, $i, |a, b| a > b),
            Compare::Gtu => !bits::<$type>($r, $i, |a, b| a <= b),
            Compare::Geu => !bits::<$type>($r, $i, |a, b| a < b),
            Compare::Num => bits::<$type>($r, $i, |a, b| a == a && b == b),
            Compare::Nan => bits::<$type>($r, $i, |a, b| a != a || b != b),
        }
    };
}

/// `setp`.
#[allow(clippy::eq_op, reason = "what differs from itself is not a number")]
#[inline(always)]
pub(crate) fn compare(r: &mut Registers, i: &Instruction, mask: u32, compare: Compare, ty: Ty) -> Result {
    let found = match ty {
        Ty::U16 => ordered!(u16, r, i, compare),
        Ty::S16 => ordered!(i16, r, i, compare),
        Ty::U32 => ordered!(u32, r, i, compare),
        Ty::S32 => ordered!(i32, r, i, compare),
        Ty::U64 => ordered!(u64, r, i, compare),
        Ty::S64 => ordered!(i64, r, i, compare),
        Ty::F32 => ordered!(f32, r, i, compare),
        Ty::F64 => ordered!(f64, r, i, compare),
        Ty::F16 => ordered!(f16, r, i, compare),
        Ty::Bf16 => ordered!(bf16, r, i, compare),
        _ => return unknown(i),
    };
    if i.d != NONE {
        r.set_predicate(i.d, mask, found);
    }
    if i.extra != NONE {
        r.set_predicate(i.extra, mask, !found);
    }
    Ok(())
}

/// `selp`.
#[inline(always)]
pub(crate) fn select(r: &mut Registers, i: &Instruction, mask: u32, wide: bool) {
    let c = r.predicate(i.c);
    if wide {
        let (a, b) = (r.all::<u64>(i.a), r.all::<u64>(i.b));
        each(r, i, mask, |l| if c >> l & 1 != 0 { a[l] } else { b[l] });
    } else {
        let (a, b) = (r.all::<u32>(i.a), r.all::<u32>(i.b));
        each(r, i, mask, |l| if c >> l & 1 != 0 { a[l] } else { b[l] });
    }
}

/// `cvt`.
#[inline(always)]
pub(crate) fn convert(r: &mut Registers, i: &Instruction, mask: u32) -> Result {
    let Op::Convert { to, from, round, integral, saturate, relu } = i.op else { return unknown(i) };
    match (to, from) {
        (Ty::U64 | Ty::S64, Ty::U32) => map1::<u32, u64>(r, i, mask, u64::from),
        (Ty::U64 | Ty::S64, Ty::S32) if !saturate => map1::<i32, i64>(r, i, mask, i64::from),
        (Ty::U32 | Ty::S32, Ty::U64 | Ty::S64) if !saturate => map1::<u64, u32>(r, i, mask, |a| a as u32),
        (Ty::F32, Ty::Bf16) if !saturate => map1::<u32, u32>(r, i, mask, |a| a << 16),
        _ => {
            let all = r.numbers(i.a);
            for lane in (0..LANES).filter(|lane| mask >> lane & 1 != 0) {
                r.set_lane(
                    i.d,
                    lane,
                    formats::convert(all[lane], (to, from), round, integral, saturate, relu),
                );
            }
        }
    }
    Ok(())
}

/// `prmt` in its default mode, which has no name.
pub(crate) fn permute(r: &mut Registers, i: &Instruction, mask: u32) {
    map3::<u32, u32, u32>(r, i, mask, |a, b, c| {
        let bytes = u64::from(b) << 32 | u64::from(a);
        (0..4).fold(0, |result, at| {
            let selector = c >> (4 * at) & 15;
            let byte = (bytes >> (8 * (selector & 7))) as u8;
            let byte = if selector & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
            result | u32::from(byte) << (8 * at)
        })
    });
}

pub(crate) fn logic3(r: &mut Registers, i: &Instruction, mask: u32, table: u8) {
    map3::<u32, u32, u32>(r, i, mask, |a, b, c| {
        (0..8u32).filter(|row| table >> row & 1 != 0).fold(0, |result, row| {
            let one = |v: u32, bit: u32| if row >> bit & 1 != 0 { v } else { !v };
            result | one(a, 2) & one(b, 1) & one(c, 0)
        })
    });
}

/// `shf`: shifts the 64 bits {b, a}.
pub(crate) fn funnel(r: &mut Registers, i: &Instruction, mask: u32, left: bool, wrap: bool) {
    map3::<u32, u32, u32>(r, i, mask, |a, b, c| {
        let by = if wrap { c & 31 } else { c.min(32) };
        let both = u64::from(b) << 32 | u64::from(a);
        if left { ((both << by) >> 32) as u32 } else { (both >> by) as u32 }
    });
}

/// `bfe`.
pub(crate) fn extract(r: &mut Registers, i: &Instruction, mask: u32, ty: Ty) {
    let (a, b, c) = (r.numbers(i.a), r.all::<u32>(i.b), r.all::<u32>(i.c));
    let bits = ty.bytes() as u32 * 8;
    let signed = matches!(ty, Ty::S32 | Ty::S64);
    for lane in (0..LANES).filter(|lane| mask >> lane & 1 != 0) {
        let (at, length) = (b[lane] & 0xFF, c[lane] & 0xFF);
        let bit = |p: u32| a[lane] >> p.min(bits - 1) & 1;
        let sign = if signed && length != 0 { bit(at.saturating_add(length) - 1) } else { 0 };
        let value = (0..bits).fold(0u64, |value, p| {
            let one = if p < length && at + p < bits { bit(at + p) } else { sign };
            value | one << p
        });
        r.set_lane(i.d, lane, value);
    }
}

/// `bfi`: inserts a's low bits into b; `list` is the register of the length.
pub(crate) fn insert(r: &mut Registers, i: &Instruction, mask: u32, wide: bool) {
    let (a, b) = (r.numbers(i.a), r.numbers(i.b));
    let (c, lengths) = (r.all::<u32>(i.c), r.all::<u32>(i.list));
    let bits = if wide { 64 } else { 32 };
    for lane in (0..LANES).filter(|lane| mask >> lane & 1 != 0) {
        let (at, length) = (c[lane] & 0xFF, lengths[lane] & 0xFF);
        let ones = if length >= 64 { u64::MAX } else { (1 << length) - 1 };
        let place = if at >= bits { 0 } else { ones << at };
        let moved = if at >= 64 { 0 } else { a[lane] << at };
        r.set_lane(i.d, lane, b[lane] & !place | moved & place);
    }
}

/// `cvt` of two f32 to a pair of 16-bit floats.
pub(crate) fn convert_pair(r: &mut Registers, i: &Instruction, mask: u32, ty: Ty) {
    map2::<f32, u32>(r, i, mask, |a, b| formats::pair(a, b, ty));
}

//! Numbers: rounding, conversions, and the functions that a GPU approximates.

use crate::instruction::{Round, Ty};
use half::{bf16, f16};

/// A GPU's NaN result.
pub(crate) const NAN: u32 = 0x7FFF_FFFF;

/// Rounds `value` to f32. The exact value differs from it by an error of sign `error`, too small to show in
/// `value`.
fn round_f64(value: f64, error: f64, round: Round) -> f32 {
    let near = value as f32;
    let difference = value - f64::from(near);
    let exact = if difference != 0.0 { difference } else { error };
    match round {
        Round::Nearest => near,
        Round::Zero if near.is_sign_negative() == (exact < 0.0) || exact == 0.0 => near,
        Round::Zero => {
            if near > 0.0 {
                near.next_down()
            } else {
                near.next_up()
            }
        }
        Round::Down => {
            if exact < 0.0 {
                near.next_down()
            } else {
                near
            }
        }
        Round::Up => {
            if exact > 0.0 {
                near.next_up()
            } else {
                near
            }
        }
    }
}

/// a * b + c, rounded once.
pub(crate) fn fma_rounded(a: f32, b: f32, c: f32, round: Round) -> f32 {
    if round == Round::Nearest || !(a * b + c).is_finite() {
        return a.mul_add(b, c);
    }
    // The product is exact; the rounding error of the sum is known (Knuth).
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    let part = sum - product;
    let error = (product - (sum - part)) + (c - part);
    round_f64(sum, error, round)
}

/// A number as f64. This holds all types except the largest 64-bit integers, which are handled separately.
fn read(bits: u64, from: Ty) -> f64 {
    match from {
        Ty::F16 => f16::from_bits(bits as u16).to_f64(),
        Ty::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        Ty::F32 => f32::from_bits(bits as u32).into(),
        _ => f64::from_bits(bits),
    }
}

fn is_float(ty: Ty) -> bool {
    matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64)
}

/// The integer's value.
fn integer(bits: u64, from: Ty) -> i128 {
    match from {
        Ty::U8 => i128::from(bits as u8),
        Ty::S8 => i128::from(bits as i8),
        Ty::U16 => i128::from(bits as u16),
        Ty::S16 => i128::from(bits as i16),
        Ty::U32 => i128::from(bits as u32),
        Ty::S32 => i128::from(bits as i32),
        Ty::S64 => i128::from(bits as i64),
        _ => i128::from(bits),
    }
}

fn limits(ty: Ty) -> (i128, i128) {
    let bits = ty.bytes() * 8;
    match ty {
        Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64 => (-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        _ => (0, (1 << bits) - 1),
    }
}

/// The low bits that a register of `ty` holds.
fn cut(value: i128, ty: Ty) -> u64 {
    match ty.bytes() {
        1 => value as u8 as u64,
        2 => value as u16 as u64,
        4 => value as u32 as u64,
        _ => value as u64,
    }
}

fn integral(value: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => value.round_ties_even(),
        Round::Zero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
    }
}

/// The bits of a number of type `to`.
pub(crate) fn write(value: f64, to: Ty, round: Round) -> u64 {
    match to {
        Ty::F64 => value.to_bits(),
        Ty::F32 if value.is_nan() => NAN.into(),
        Ty::F32 => round_f64(value, 0.0, round).to_bits().into(),
        _ if value.is_nan() => 0x7FFF,
        Ty::F16 => narrow(value, round, |v| f16::from_f32(v).to_bits(), |b| f16::from_bits(b).to_f64()),
        _ => narrow(value, round, |v| bf16::from_f32(v).to_bits(), |b| bf16::from_bits(b).to_f64()),
    }
}

/// Rounds to 16 bits. Rounding towards zero takes the next number towards zero if the nearest one is too large.
fn narrow(value: f64, round: Round, to: fn(f32) -> u16, from: fn(u16) -> f64) -> u64 {
    // Goes through an f32 whose last bit is set if anything was cut off, so that the second rounding is
    // correct.
    let cut = round_f64(value, 0.0, Round::Zero);
    let left_out = u32::from(f64::from(cut) != value);
    let near = to(f32::from_bits(cut.to_bits() | left_out));
    let beyond = from(near).abs() > value.abs();
    u64::from(if round == Round::Zero && beyond { near - 1 } else { near })
}

/// `cvt`.
pub(crate) fn convert(
    bits: u64,
    op: (Ty, Ty),
    round: Round,
    to_integral: bool,
    saturate: bool,
    relu: bool,
) -> u64 {
    let (to, from) = op;
    match (is_float(to), is_float(from)) {
        (false, false) => {
            let (value, (least, most)) = (integer(bits, from), limits(to));
            cut(if saturate { value.clamp(least, most) } else { value }, to)
        }
        // Always saturates; NaN becomes 0.
        (false, true) => {
            let value = integral(read(bits, from), round);
            let (least, most) = limits(to);
            cut((value as i128).clamp(least, most), to)
        }
        (true, false) => match (integer(bits, from), to) {
            (value, Ty::F64) => (value as f64).to_bits(),
            (value, Ty::F32) if round == Round::Nearest => u64::from((value as f32).to_bits()),
            (value, _) => write(value as f64, to, round),
        },
        (true, true) => {
            let mut value = read(bits, from);
            if to_integral {
                value = integral(value, round);
            }
            if saturate {
                // NaN becomes 0.
                value = if value > 0.0 { value.min(1.0) } else { 0.0 };
            }
            if relu && value < 0.0 {
                value = 0.0;
            }
            write(value, to, round)
        }
    }
}

/// Two f32 to bf16x2 or f16x2; the second one is the low half.
pub(crate) fn pair(high: f32, low: f32, of: Ty) -> u32 {
    let to = if of == Ty::F16x2 { Ty::F16 } else { Ty::Bf16 };
    let one = |v: f32| write(f64::from(v), to, Round::Nearest) as u32;
    one(high) << 16 | one(low)
}

/// A 16-bit element of a factor.
#[inline(always)]
pub(crate) fn element(bits: u16, of: Ty) -> f32 {
    if of == Ty::Bf16 { f32::from_bits(u32::from(bits) << 16) } else { f16::from_bits(bits).to_f32() }
}

/// Flushes values below the smallest normal number to zero.
#[inline(always)]
pub(crate) fn flush(value: f32) -> f32 {
    if value.abs() < f32::MIN_POSITIVE { 0f32.copysign(value) } else { value }
}

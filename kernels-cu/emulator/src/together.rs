//! What lanes of a warp do collectively: each waits until all lanes of its mask have
//! arrived.

use crate::instruction::{Instruction, NONE, Next, Op, Shuffle, Together, Two, Ty};
use crate::registers::LANES;
use crate::state::{Context, lanes};
use crate::tensor;

/// A lane's result if the ISA defines none.
const UNDEFINED: u32 = 0xFFFF_DEAD;

/// The lanes of `mask` arrive at instruction `i` at `pc`.
#[inline(always)]
pub(crate) fn arrive(
    c: &mut Context<'_>,
    i: &Instruction,
    kind: Together,
    pc: u32,
    mask: u32,
    group: u32,
) -> Result<Next, String> {
    let masks = c.program.lists[i.list as usize];
    let first = mask.trailing_zeros() as usize;
    let wanted = c.warp.registers.lane::<u32>(masks, first);
    if wanted & !c.warp.exited == mask {
        perform(c, i, kind, mask)?;
        return Ok(Next::Step);
    }
    for lane in lanes(mask) {
        let wanted = c.warp.registers.lane::<u32>(masks, lane);
        if wanted >> lane & 1 == 0 {
            return Err(format!("lane {lane} is not in its own mask {wanted:#x}"));
        }
        c.warp.wanted[lane] = wanted;
    }
    c.warp.go(mask, pc);
    c.warp.go(group & !mask, pc + 1);
    c.warp.together |= mask;
    release(c)?;
    Ok(Next::Split)
}

/// Executes collective instructions for which all lanes have arrived.
pub(crate) fn release(c: &mut Context<'_>) -> Result<(), String> {
    let mut left = c.warp.together;
    while left != 0 {
        let first = left.trailing_zeros() as usize;
        let wanted = c.warp.wanted[first];
        let all = wanted & !c.warp.exited;
        left &= !all & !(1 << first);
        let there = lanes(c.warp.together & all).filter(|&lane| c.warp.wanted[lane] == wanted);
        if there.fold(0, |there, lane| there | 1u32 << lane) != all {
            continue;
        }
        let instruction = |lane: usize| &c.program.instructions[c.warp.pc[lane] as usize];
        let i = instruction(first);
        let Op::Together(kind) = i.op else { return Err("a lane waits for nothing".to_string()) };
        if lanes(all).any(|lane| instruction(lane).op != i.op) {
            return Err(format!("lanes {all:#x} of a warp wait for each other at different instructions"));
        }
        if kind != Together::Barrier && lanes(all).any(|lane| c.warp.pc[lane] != c.warp.pc[first]) {
            return Err(format!(
                "lanes {all:#x} of a warp come to {kind:?} by different ways, which is not emulated"
            ));
        }
        perform(c, i, kind, all)?;
        c.warp.together &= !all;
        for lane in lanes(all) {
            c.warp.pc[lane] += 1;
        }
    }
    Ok(())
}

#[inline(always)]
fn perform(c: &mut Context<'_>, i: &Instruction, kind: Together, mask: u32) -> Result<(), String> {
    let r = &mut c.warp.registers;
    match kind {
        Together::Barrier | Together::WideFence => {}
        Together::Shuffle(mode) => shuffle(c, i, mode, mask),
        Together::Any | Together::All | Together::Uniform | Together::Ballot => {
            let bits = r.predicate(i.a) ^ if i.immediate != 0 { u32::MAX } else { 0 };
            let holds = match kind {
                Together::Any => bits & mask != 0,
                Together::All => !bits & mask == 0,
                Together::Uniform => bits & mask == 0 || !bits & mask == 0,
                _ => {
                    r.set(i.d, mask, &[bits & mask; LANES]);
                    return Ok(());
                }
            };
            r.set_predicate(i.d, mask, if holds { u32::MAX } else { 0 });
        }
        Together::MatchAny => {
            let values = r.numbers(i.a);
            let same = |value: u64| lanes(mask).filter(|&l| values[l] == value).fold(0, |s, l| s | 1u32 << l);
            r.set(i.d, mask, &std::array::from_fn(|lane| same(values[lane])));
        }
        Together::Reduce(two, ty) => {
            let values = r.all::<u32>(i.a);
            let signed = ty == Ty::S32;
            let one = |a: u32, b: u32| match two {
                Two::Add => a.wrapping_add(b),
                Two::Min if signed => (a as i32).min(b as i32) as u32,
                Two::Max if signed => (a as i32).max(b as i32) as u32,
                Two::Min => a.min(b),
                Two::Max => a.max(b),
                Two::And => a & b,
                Two::Or => a | b,
                _ => a ^ b,
            };
            let result = lanes(mask).map(|lane| values[lane]).reduce(one).unwrap_or(0);
            r.set(i.d, mask, &[result; LANES]);
        }
        Together::Elect => {
            let leader = mask.trailing_zeros();
            if i.d != NONE {
                r.set(i.d, mask, &[leader; LANES]);
            }
            if i.extra != NONE {
                r.set_predicate(i.extra, mask, 1 << leader);
            }
        }
        _ if mask != u32::MAX => {
            return Err(format!("{kind:?} by lanes {mask:#x} instead of the whole warp"));
        }
        Together::Product(of) => tensor::product(c, i, of),
        Together::StoreMatrix(count, trans) => tensor::store_matrix(c, i, count.into(), trans)?,
        Together::LoadMatrix(count, trans) => tensor::load_matrix(c, i, count.into(), trans)?,
        Together::WideProduct { .. } => tensor::begin(c, i, kind)?,
        Together::WideCommit => tensor::commit(c),
        Together::WideWait => tensor::wait(c, i.immediate as u64)?,
    }
    Ok(())
}

/// `shfl.sync`.
fn shuffle(c: &mut Context<'_>, i: &Instruction, mode: Shuffle, mask: u32) {
    let r = &mut c.warp.registers;
    let (a, b, limits) = (r.all::<u32>(i.a), r.all::<u32>(i.b), r.all::<u32>(i.c));
    let (mut values, mut valid) = ([0u32; LANES], 0u32);
    for (lane, value) in values.iter_mut().enumerate() {
        let (at, by) = (lane as u32, b[lane] & 31);
        let (clamp, segment) = (limits[lane] & 31, limits[lane] >> 8 & 31);
        let most = at & segment | clamp & !segment;
        let (from, good) = match mode {
            Shuffle::Up => (at.wrapping_sub(by), at as i32 - by as i32 >= most as i32),
            Shuffle::Down => (at + by, at + by <= most),
            Shuffle::Xor => (at ^ by, at ^ by <= most),
            Shuffle::Index => {
                let from = at & segment | by & !segment;
                (from, from <= most)
            }
        };
        valid |= u32::from(good) << lane;
        let from = if good { from } else { at };
        *value = if mask >> from & 1 != 0 { a[from as usize] } else { UNDEFINED };
    }
    r.set(i.d, mask, &values);
    if i.extra != NONE {
        r.set_predicate(i.extra, mask, valid);
    }
}

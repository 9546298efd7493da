//! Executes one instruction for a group of lanes: control flow and memory. Computation is in `arithmetic`.

use crate::arithmetic;
use crate::barrier::{Arrival, Block, BulkCopy, LaneCopy};
use crate::instruction::{Atomic, Instruction, Mbarrier, NONE, Next, Op, Space, Two, Ty, WIDE};
use crate::program::{Program, SHARED_WINDOW};
use crate::registers::LANES;
use crate::state::{Context, Warp, lanes};
use crate::together;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

type Result<T> = std::result::Result<T, String>;

#[inline(always)]
pub(crate) fn execute(c: &mut Context<'_>, i: &Instruction, pc: u32, mask: u32, group: u32) -> Result<Next> {
    let r = &mut c.warp.registers;
    match i.op {
        Op::Nop => {}
        Op::Mov(false) => r.set(i.d, mask, &r.all::<u32>(i.a)),
        Op::Mov(true) => r.set(i.d, mask, &r.all::<u64>(i.a)),
        Op::MovPred => r.set_predicate(i.d, mask, r.predicate(i.a)),
        Op::PredAnd => r.set_predicate(i.d, mask, r.predicate(i.a) & r.predicate(i.b)),
        Op::PredOr => r.set_predicate(i.d, mask, r.predicate(i.a) | r.predicate(i.b)),
        Op::PredXor => r.set_predicate(i.d, mask, r.predicate(i.a) ^ r.predicate(i.b)),
        Op::PredNot => r.set_predicate(i.d, mask, !r.predicate(i.a)),
        Op::Two(two, ty) => arithmetic::two(r, i, mask, two, ty)?,
        Op::One(one, ty) => arithmetic::one(r, i, mask, one, ty)?,
        Op::MulWide(ty) | Op::MadWide(ty) => arithmetic::wide(r, i, mask, ty)?,
        Op::Mad(ty) => arithmetic::mad(r, i, mask, ty)?,
        Op::MadHigh(ty) => arithmetic::mad_high(r, i, mask, ty)?,
        Op::Fma(ty, round) => arithmetic::fma(r, i, mask, ty, round)?,
        Op::SetPred(compare, ty) => arithmetic::compare(r, i, mask, compare, ty)?,
        Op::Select(wide) => arithmetic::select(r, i, mask, wide),
        Op::Convert { .. } => arithmetic::convert(r, i, mask)?,
        Op::ConvertPair(ty) => arithmetic::convert_pair(r, i, mask, ty),
        Op::Permute => arithmetic::permute(r, i, mask),
        Op::Logic3(table) => arithmetic::logic3(r, i, mask, table),
        Op::FunnelLeft(wrap) => arithmetic::funnel(r, i, mask, true, wrap),
        Op::FunnelRight(wrap) => arithmetic::funnel(r, i, mask, false, wrap),
        Op::Extract(ty) => arithmetic::extract(r, i, mask, ty),
        Op::Insert(wide) => arithmetic::insert(r, i, mask, wide),
        Op::Pack(part) => pack(c, i, mask, part),
        Op::Unpack(part) => unpack(c, i, mask, part),
        Op::GlobalTime | Op::Clock => {
            let now = c.system.time(i.op == Op::GlobalTime);
            lanes(mask).for_each(|lane| r.set_lane(i.d, lane, now));
            return Ok(Next::Poll);
        }
        Op::ActiveMask => r.set(i.d, mask, &[mask; LANES]),
        Op::Load(space, ty, others) => {
            load(c, i, mask, space, ty, others)?;
            return Ok(if others { Next::Poll } else { Next::Step });
        }
        Op::Store(space, ty, others) => store(c, i, mask, space, ty, others)?,
        Op::Atom(atomic, space, ty) => {
            atom(c, i, mask, atomic, (space, ty))?;
            return Ok(Next::Poll);
        }
        Op::Branch if mask == group => return Ok(Next::Jump(i.extra)),
        Op::Branch => {
            c.warp.go(mask, i.extra);
            c.warp.go(group & !mask, pc + 1);
            return Ok(Next::Split);
        }
        Op::BranchIndex => {
            let index = r.all::<u32>(i.a);
            c.warp.go(group & !mask, pc + 1);
            for lane in lanes(mask) {
                if index[lane] >= i.length {
                    return Err(format!("branch to place {} of {}", index[lane], i.length));
                }
                c.warp.pc[lane] = c.program.lists[(i.list + index[lane]) as usize];
            }
            return Ok(Next::Split);
        }
        Op::Call => {
            for lane in lanes(mask) {
                if c.warp.stack[lane].len() >= 64 {
                    return Err("calls are too deep".to_string());
                }
                c.warp.stack[lane].push(pc + 1);
            }
            if mask == group {
                return Ok(Next::Jump(i.extra));
            }
            c.warp.go(mask, i.extra);
            c.warp.go(group & !mask, pc + 1);
            return Ok(Next::Split);
        }
        Op::Return | Op::Exit => {
            c.warp.go(group & !mask, pc + 1);
            for lane in lanes(mask) {
                match c.warp.stack[lane].pop() {
                    Some(to) if i.op == Op::Return => c.warp.pc[lane] = to,
                    _ => c.warp.exited |= 1 << lane,
                }
            }
            together::release(c)?;
            return Ok(Next::Split);
        }
        Op::Trap => return Err("trap".to_string()),
        Op::CopyParameter => {
            for lane in lanes(mask) {
                let from = c.pointer(Space::Local, i.a.into(), i.immediate as u64, lane)?;
                let to = c.pointer(Space::Local, i.d.into(), i.immediate as u64, lane)?;
                // SAFETY: both are checked; they are different parameters of the lane's local memory.
                unsafe { std::ptr::copy_nonoverlapping(from, to, i.immediate as usize) };
            }
        }
        Op::Together(kind) => return together::arrive(c, i, kind, pc, mask, group),
        Op::Barrier { wait, reduce } => return barrier(c, i, pc, (mask, group), wait, reduce),
        Op::Mbarrier(kind) => return mbarrier(c, i, mask, kind),
        Op::Copy => {
            let (to, from, read) = (r.numbers(i.d), r.numbers(i.a), r.all::<u32>(i.b));
            for lane in lanes(mask) {
                let group = c.warp.copy_groups[lane];
                let (bytes, read) = (i.immediate as u64, u64::from(read[lane]));
                let copy = LaneCopy { lane, group, to: to[lane], from: from[lane], bytes, read };
                c.warp.copies.push(copy);
            }
        }
        Op::CopyCommit => lanes(mask).for_each(|lane| c.warp.copy_groups[lane] += 1),
        Op::CopyWait => copy_wait(c, mask, i.immediate)?,
        Op::CopyArrive => copy_arrive(c, i, mask)?,
        Op::BulkCopy => bulk_copy(c, i, mask)?,
        Op::Sleep => {
            let times = r.all::<u32>(i.a);
            let longest = lanes(mask).map(|lane| times[lane]).max().unwrap_or(0);
            c.warp.wake = c.system.clock + u64::from(longest).max(1);
            return Ok(Next::Yield);
        }
        Op::Unsupported => {
            let text = c.program.texts.get(i.extra as usize).map_or("", String::as_str);
            return Err(format!("not emulated: {text}"));
        }
    }
    Ok(Next::Step)
}

fn pack(c: &mut Context<'_>, i: &Instruction, mask: u32, part: Ty) {
    let r = &mut c.warp.registers;
    let bits = part.bytes() * 8;
    let mut values = [0u64; LANES];
    for k in 0..i.length {
        let parts = r.numbers(c.program.lists[(i.list + k) as usize]);
        for lane in 0..LANES {
            values[lane] |= (parts[lane] & ((1 << bits) - 1)) << (u64::from(k) * bits);
        }
    }
    lanes(mask).for_each(|lane| r.set_lane(i.d, lane, values[lane]));
}

fn unpack(c: &mut Context<'_>, i: &Instruction, mask: u32, part: Ty) {
    let r = &mut c.warp.registers;
    let bits = part.bytes() * 8;
    let values = r.numbers(i.a);
    for k in 0..i.length {
        let register = c.program.lists[(i.list + k) as usize];
        if register != NONE {
            let one = |lane: usize| values[lane] >> (u64::from(k) * bits) & ((1 << bits) - 1);
            lanes(mask).for_each(|lane| r.set_lane(register, lane, one(lane)));
        }
    }
}

/// The value of `ty` at `at`, in the form that its register holds.
///
/// # Safety
/// The bytes are accessible and aligned.
#[inline(always)]
unsafe fn read(at: *mut u8, ty: Ty, others: bool) -> u64 {
    // SAFETY: guaranteed by the caller. Memory that the host may write meanwhile is read by atomic
    // instructions.
    unsafe {
        match ty.bytes() {
            1 if ty == Ty::S8 => at.cast::<i8>().read_volatile() as i64 as u64,
            1 => at.read_volatile().into(),
            2 if ty == Ty::S16 => at.cast::<i16>().read_volatile() as i64 as u64,
            2 => at.cast::<u16>().read_volatile().into(),
            4 if others => AtomicU32::from_ptr(at.cast()).load(Ordering::SeqCst).into(),
            4 if ty == Ty::S32 => at.cast::<i32>().read() as i64 as u64,
            4 => at.cast::<u32>().read().into(),
            _ if others => AtomicU64::from_ptr(at.cast()).load(Ordering::SeqCst),
            _ => at.cast::<u64>().read(),
        }
    }
}

/// # Safety
/// As `read`.
#[inline(always)]
unsafe fn write(at: *mut u8, ty: Ty, value: u64, others: bool) {
    // SAFETY: as in `read`.
    unsafe {
        match ty.bytes() {
            1 => at.write_volatile(value as u8),
            2 => at.cast::<u16>().write_volatile(value as u16),
            4 if others => AtomicU32::from_ptr(at.cast()).store(value as u32, Ordering::SeqCst),
            4 => at.cast::<u32>().write(value as u32),
            _ if others => AtomicU64::from_ptr(at.cast()).store(value, Ordering::SeqCst),
            _ => at.cast::<u64>().write(value),
        }
    }
}

#[inline(always)]
fn addresses(c: &Context<'_>, i: &Instruction) -> [u64; LANES] {
    let mut all = if i.a == NONE { [0; LANES] } else { c.warp.registers.numbers(i.a) };
    // An address in 32 bits is a sum of 32 bits: a negative base with a large offset is valid.
    let most = if i.a != NONE && i.a & WIDE == 0 { u64::from(u32::MAX) } else { u64::MAX };
    all.iter_mut().for_each(|address| *address = address.wrapping_add(i.immediate as u64) & most);
    all
}

#[inline(always)]
fn load(c: &mut Context<'_>, i: &Instruction, mask: u32, space: Space, ty: Ty, others: bool) -> Result<()> {
    let all = addresses(c, i);
    let bytes = ty.bytes();
    for lane in lanes(mask) {
        let at = c.pointer(space, all[lane], bytes * u64::from(i.length), lane)?;
        for k in 0..i.length {
            let register = c.program.lists[(i.list + k) as usize];
            // SAFETY: `pointer` checked the bytes and that they are aligned.
            let value = unsafe { read(at.add(k as usize * bytes as usize), ty, others) };
            if register != NONE {
                c.warp.registers.set_lane(register, lane, value);
            }
        }
    }
    Ok(())
}

#[inline(always)]
fn store(c: &mut Context<'_>, i: &Instruction, mask: u32, space: Space, ty: Ty, others: bool) -> Result<()> {
    let all = addresses(c, i);
    let bytes = ty.bytes();
    for lane in lanes(mask) {
        let at = c.pointer(space, all[lane], bytes * u64::from(i.length), lane)?;
        for k in 0..i.length {
            let value = c.warp.registers.number(c.program.lists[(i.list + k) as usize], lane);
            // SAFETY: as in `load`.
            unsafe { write(at.add(k as usize * bytes as usize), ty, value, others) };
        }
    }
    Ok(())
}

fn atom(
    c: &mut Context<'_>,
    i: &Instruction,
    mask: u32,
    atomic: Atomic,
    (space, ty): (Space, Ty),
) -> Result<()> {
    let all = addresses(c, i);
    for lane in lanes(mask) {
        let at = c.pointer(space, all[lane], ty.bytes(), lane)?;
        let b = c.warp.registers.number(i.b, lane);
        let swapped = if atomic == Atomic::CompareSwap { c.warp.registers.number(i.c, lane) } else { 0 };
        // In a compare-and-swap, b is the expected value.
        let new = |old: u64| {
            let signed = |v: u64| if ty == Ty::S32 { i64::from(v as i32) } else { v as i64 };
            match atomic {
                Atomic::Add if ty == Ty::F32 => {
                    (f32::from_bits(old as u32) + f32::from_bits(b as u32)).to_bits().into()
                }
                Atomic::Add => old.wrapping_add(b),
                Atomic::Min if matches!(ty, Ty::S32 | Ty::S64) => signed(old).min(signed(b)) as u64,
                Atomic::Max if matches!(ty, Ty::S32 | Ty::S64) => signed(old).max(signed(b)) as u64,
                Atomic::Min => old.min(b),
                Atomic::Max => old.max(b),
                Atomic::And => old & b,
                Atomic::Or => old | b,
                Atomic::Xor => old ^ b,
                Atomic::Exchange => b,
                Atomic::CompareSwap => {
                    if old == b {
                        swapped
                    } else {
                        old
                    }
                }
                Atomic::Inc => {
                    if old >= b {
                        0
                    } else {
                        old + 1
                    }
                }
                Atomic::Dec => {
                    if old == 0 || old > b {
                        b
                    } else {
                        old - 1
                    }
                }
            }
        };
        let order = (Ordering::SeqCst, Ordering::SeqCst);
        let old = if ty.wide() {
            // SAFETY: `pointer` checked the bytes and their alignment; all accesses by others are atomic.
            let word = unsafe { AtomicU64::from_ptr(at.cast()) };
            word.fetch_update(order.0, order.1, |old| Some(new(old))).unwrap_or_default()
        } else {
            // SAFETY: as above.
            let word = unsafe { AtomicU32::from_ptr(at.cast()) };
            word.fetch_update(order.0, order.1, |old| Some(new(old.into()) as u32)).unwrap_or_default().into()
        };
        if i.d != NONE {
            c.warp.registers.set_lane(i.d, lane, old);
        }
    }
    Ok(())
}

fn barrier(
    c: &mut Context<'_>,
    i: &Instruction,
    pc: u32,
    (mask, group): (u32, u32),
    wait: bool,
    reduce: Option<Two>,
) -> Result<Next> {
    let lane = mask.trailing_zeros() as usize;
    let r = &c.warp.registers;
    let number = r.lane::<u32>(i.a, lane);
    let expected = if i.b == NONE { c.block.threads } else { r.lane::<u32>(i.b, lane) };
    let predicate = if reduce.is_some() { r.predicate(i.c) } else { 0 };
    if lanes(mask).any(|l| r.lane::<u32>(i.a, l) != number) {
        return Err("lanes of a warp at different barriers".to_string());
    }
    let phase = c.block.named.get(number as usize).map_or(0, |named| named.phase);
    c.block.arrive(number, expected, mask.count_ones(), predicate & mask != 0, !predicate & mask == 0)?;
    if !wait {
        return Ok(Next::Step);
    }
    c.warp.at_barrier |= mask;
    c.warp.go(mask, pc);
    c.warp.go(group & !mask, pc + 1);
    lanes(mask).for_each(|lane| c.warp.barrier[lane] = (number as u8, phase));
    pass_barriers(c.warp, c.block, c.program);
    Ok(Next::Split)
}

/// Lanes whose barrier has completed continue.
pub(crate) fn pass_barriers(warp: &mut Warp, block: &Block, program: &Program) {
    let done: u32 = lanes(warp.at_barrier)
        .filter(|&lane| block.named[usize::from(warp.barrier[lane].0)].phase > warp.barrier[lane].1)
        .fold(0, |done, lane| done | 1 << lane);
    for lane in lanes(done) {
        let (barrier, phase) = warp.barrier[lane];
        after_barrier(warp, block, program, lane, (barrier, phase));
    }
    warp.at_barrier &= !done;
}

/// A lane continues after its barrier has completed.
fn after_barrier(warp: &mut Warp, block: &Block, program: &Program, lane: usize, (number, phase): (u8, u64)) {
    let i = &program.instructions[warp.pc[lane] as usize];
    if let Op::Barrier { reduce: Some(two), .. } = i.op {
        let (any, all) = block.result(usize::from(number), phase);
        let holds = if two == Two::Or { any } else { all };
        warp.registers.set_predicate(i.d, 1 << lane, if holds { u32::MAX } else { 0 });
    }
    warp.pc[lane] += 1;
}

fn mbarrier(c: &mut Context<'_>, i: &Instruction, mask: u32, kind: Mbarrier) -> Result<Next> {
    let all = addresses(c, i);
    let mut missed = false;
    for lane in lanes(mask) {
        // Generic addresses are allowed too.
        let address = if all[lane] >> 56 == 1 { all[lane] - SHARED_WINDOW } else { all[lane] };
        let b = c.warp.registers.lane::<u32>(i.b, lane);
        let state = match kind {
            Mbarrier::Init => {
                c.block.mbarrier_init(address, b)?;
                continue;
            }
            Mbarrier::Invalidate => {
                if !c.block.mbarriers.remove(&address) {
                    return Err(format!("the mbarrier at {address:#x} of shared memory is not initialised"));
                }
                continue;
            }
            Mbarrier::Arrive => c.block.mbarrier_change(address, |state| state.arrive(b))?,
            Mbarrier::Expect => c.block.mbarrier_change(address, |state| state.expect(b))?,
            Mbarrier::ArriveExpect => c.block.mbarrier_change(address, |state| {
                state.expect(b)?;
                state.arrive(1)
            })?,
            Mbarrier::Test | Mbarrier::TryWait => {
                let done = c.block.mbarrier_test(address, b)?;
                missed |= !done;
                c.warp.registers.set_predicate(i.d, 1 << lane, if done { u32::MAX } else { 0 });
                continue;
            }
        };
        if i.d != NONE {
            c.warp.registers.set_lane(i.d, lane, state);
        }
    }
    match kind {
        Mbarrier::TryWait if missed => {
            c.warp.wake = c.system.clock + 100;
            Ok(Next::Yield)
        }
        Mbarrier::Test => Ok(Next::Poll),
        _ => Ok(Next::Step),
    }
}

/// Completes the lanes' copies except those of the latest `groups`; -1: all.
fn copy_wait(c: &mut Context<'_>, mask: u32, groups: i64) -> Result<()> {
    let copies = std::mem::take(&mut c.warp.copies);
    for copy in copies {
        let newest = i64::from(c.warp.copy_groups[copy.lane]) - groups;
        if mask >> copy.lane & 1 == 0 || (groups >= 0 && i64::from(copy.group) >= newest) {
            c.warp.copies.push(copy);
            continue;
        }
        c.block.copy_of_lane(&copy, &mut c.system.global)?;
    }
    // Also those that will arrive at a barrier. They may complete before their arrival.
    let mut arrivals = std::mem::take(&mut c.block.arrivals);
    for arrival in arrivals.iter_mut().filter(|arrival| arrival.warp == c.warp.number) {
        for copy in arrival.copies.extract_if(.., |copy| mask >> copy.lane & 1 != 0) {
            c.block.copy_of_lane(&copy, &mut c.system.global)?;
        }
    }
    c.block.arrivals = arrivals;
    Ok(())
}

/// Lets the copies that the lanes have started arrive at a barrier, after their earlier arrivals at other barriers.
fn copy_arrive(c: &mut Context<'_>, i: &Instruction, mask: u32) -> Result<()> {
    let barrier = c.warp.registers.numbers(i.a);
    for lane in lanes(mask) {
        let barrier = barrier[lane] & (SHARED_WINDOW - 1);
        c.block.mbarrier_change(barrier, |state| {
            state.pending += i.immediate as u32;
            Ok(())
        })?;
        let drawn = c.system.clock + u64::from(c.system.random() % 1000);
        let (warp, earlier) = (c.warp.number, c.block.arrivals.iter());
        let due = earlier.filter(|a| a.warp == warp).map(|a| a.due).fold(drawn, u64::max);
        let copies = c.warp.copies.extract_if(.., |copy| copy.lane == lane).collect();
        c.block.arrivals.push(Arrival { due, warp, copies, barrier });
    }
    Ok(())
}

fn bulk_copy(c: &mut Context<'_>, i: &Instruction, mask: u32) -> Result<()> {
    let r = &c.warp.registers;
    let (to, from, bytes, barrier) = (r.numbers(i.d), r.numbers(i.a), r.all::<u32>(i.b), r.numbers(i.c));
    for lane in lanes(mask) {
        let bytes = u64::from(bytes[lane]);
        let (to, barrier) = (to[lane] & (SHARED_WINDOW - 1), barrier[lane] & (SHARED_WINDOW - 1));
        if bytes % 16 != 0 || to % 16 != 0 || from[lane] % 16 != 0 {
            return Err(format!(
                "bulk copy of {bytes} bytes from {:#x} to {to:#x}: not multiples of 16",
                from[lane]
            ));
        }
        // Checked now, so that the error names the instruction.
        c.system.global.at(from[lane], bytes.max(1))?;
        if c.block.shared.at(to, bytes).is_none() {
            return Err(format!("bulk copy of {bytes} bytes to {to:#x}: outside shared memory"));
        }
        let due = c.system.clock + u64::from(c.system.random() % 1000);
        c.block.copies.push(BulkCopy { due, to, from: from[lane], bytes, barrier });
    }
    Ok(())
}

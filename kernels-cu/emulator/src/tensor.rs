//! Products of matrices: mma.sync, wgmma, and the loads and stores of their fragments. The positions of elements follow
//! the figures of the PTX ISA.

use crate::formats;
use crate::instruction::{Instruction, Space, Together, Ty};
use crate::registers::{LANES, Registers};
use crate::state::{Begun, Context, Sums, lanes};

/// Contents of sums while a product that writes them is in flight: NaN.
const UNDER_WAY: u32 = 0x7FC0_DEAD;

/// 16 rows x 16 k, as four registers of pairs hold them.
fn fragment_a(a: &[[u32; LANES]; 4], of: Ty) -> [[f32; 16]; 16] {
    let mut m = [[0.0; 16]; 16];
    for lane in 0..LANES {
        for (register, words) in a.iter().enumerate() {
            let (row, k) = (lane / 4 + register % 2 * 8, lane % 4 * 2 + register / 2 * 8);
            m[row][k] = formats::element(words[lane] as u16, of);
            m[row][k + 1] = formats::element((words[lane] >> 16) as u16, of);
        }
    }
    m
}

/// `mma.sync` of m16n8k16. The list has the mask, four registers of the result, four of A, two of B, four of C.
pub(crate) fn product(c: &mut Context<'_>, i: &Instruction, of: Ty) {
    let r = &mut c.warp.registers;
    let list = &c.program.lists[i.list as usize + 1..(i.list + i.length) as usize];
    let read = |r: &Registers, at: usize| r.all::<u32>(list[at]);
    let a = fragment_a(&std::array::from_fn(|k| read(r, 4 + k)), of);
    let mut b = [[0.0f32; 8]; 16];
    for half in 0..2 {
        let words = read(r, 8 + half);
        for lane in 0..LANES {
            let (k, n) = (lane % 4 * 2 + half * 8, lane / 4);
            b[k][n] = formats::element(words[lane] as u16, of);
            b[k + 1][n] = formats::element((words[lane] >> 16) as u16, of);
        }
    }
    let sums: [[u32; LANES]; 4] = std::array::from_fn(|k| read(r, 10 + k));
    let mut rows = [[0.0f32; 8]; 16];
    for lane in 0..LANES {
        for k in 0..4 {
            rows[lane / 4 + k / 2 * 8][lane % 4 * 2 + k % 2] = f32::from_bits(sums[k][lane]);
        }
    }
    for (sum, factors) in rows.iter_mut().zip(&a) {
        for (factor, others) in factors.iter().zip(&b) {
            for n in 0..8 {
                sum[n] = factor.mul_add(others[n], sum[n]);
            }
        }
    }
    for k in 0..4 {
        let values: [u32; LANES] =
            std::array::from_fn(|lane| rows[lane / 4 + k / 2 * 8][lane % 4 * 2 + k % 2].to_bits());
        r.set(list[k], u32::MAX, &values);
    }
}

/// Row and column of the element in half `high` of a lane's register of an 8 x 8 matrix.
fn of_8x8(lane: usize, high: usize, trans: bool) -> (usize, usize) {
    let (row, column) = (lane / 4, lane % 4 * 2 + high);
    if trans { (column, row) } else { (row, column) }
}

pub(crate) fn store_matrix(
    c: &mut Context<'_>,
    i: &Instruction,
    count: usize,
    trans: bool,
) -> Result<(), String> {
    let rows = c.warp.registers.numbers(i.a);
    for matrix in 0..count {
        let words = c.warp.registers.all::<u32>(c.program.lists[i.list as usize + 1 + matrix]);
        for lane in 0..LANES {
            for high in 0..2 {
                let (row, column) = of_8x8(lane, high, trans);
                let at = c.pointer(Space::Shared, rows[matrix * 8 + row], 16, matrix * 8 + row)?;
                // SAFETY: these 16 bytes were checked, and are aligned.
                unsafe { at.cast::<u16>().add(column).write((words[lane] >> (16 * high)) as u16) };
            }
        }
    }
    Ok(())
}

pub(crate) fn load_matrix(
    c: &mut Context<'_>,
    i: &Instruction,
    count: usize,
    trans: bool,
) -> Result<(), String> {
    let rows = c.warp.registers.numbers(i.a);
    for matrix in 0..count {
        let mut words = [0u32; LANES];
        for (lane, word) in words.iter_mut().enumerate() {
            for high in 0..2 {
                let (row, column) = of_8x8(lane, high, trans);
                let at = c.pointer(Space::Shared, rows[matrix * 8 + row], 16, matrix * 8 + row)?;
                // SAFETY: as in `store_matrix`.
                *word |= u32::from(unsafe { at.cast::<u16>().add(column).read() }) << (16 * high);
            }
        }
        c.warp.registers.set(c.program.lists[i.list as usize + 1 + matrix], u32::MAX, &words);
    }
    Ok(())
}

/// Starts a product. Its factors are read either now or when the kernel waits for the product, at random. So a buffer
/// that is filled too late or freed too early gives wrong results.
pub(crate) fn begin(c: &mut Context<'_>, i: &Instruction, kind: Together) -> Result<(), String> {
    let Together::WideProduct { n, a_shared, .. } = kind else { return Err("no product".to_string()) };
    let lists = &c.program.lists[i.list as usize + 1..(i.list + i.length) as usize];
    let (registers, _) = lists.split_at(usize::from(n) / 2);
    let first = registers[0];
    let r = &mut c.warp.registers;
    let wide = &mut c.warp.wide;
    match wide.sums.iter().find(|s| s.registers.iter().any(|s| registers.contains(s))) {
        Some(sums) if sums.registers == registers => {}
        Some(_) => return Err("products under way share only some of their sums".to_string()),
        None => {
            let values = registers.iter().map(|&register| r.all::<u32>(register)).collect();
            for &register in registers {
                r.set(register, u32::MAX, &[UNDER_WAY; LANES]);
            }
            wide.sums.push(Sums { first, registers: registers.to_vec(), values });
        }
    }
    let predicate = r.predicate(i.c);
    if predicate != 0 && predicate != u32::MAX {
        return Err("lanes of a product differ in its predicate".to_string());
    }
    let uniform = |register: u32| {
        let all = r.numbers(register);
        if lanes(u32::MAX).any(|lane| all[lane] != all[0]) {
            Err("lanes differ in a descriptor".to_string())
        } else {
            Ok(all[0])
        }
    };
    let descriptor = [if a_shared { uniform(i.a)? } else { 0 }, uniform(i.b)?];
    let add = predicate != 0;
    wide.begun.push(Begun { instruction: *i, group: wide.groups, sums: first, descriptor, add, done: false });
    match c.program.sums_at_once {
        true => complete(c, u64::MAX),
        false if c.system.random().is_multiple_of(2) => multiply_all(c, u64::MAX),
        false => Ok(()),
    }
}

pub(crate) fn commit(c: &mut Context<'_>) {
    c.warp.wide.groups += 1;
}

/// Waits until at most the latest `groups` are in flight.
pub(crate) fn wait(c: &mut Context<'_>, groups: u64) -> Result<(), String> {
    c.warp.wide.groups.checked_sub(groups).map_or(Ok(()), |oldest| complete(c, oldest))
}

/// Completes the products of groups before `end`. Sums that no other product writes are in their registers then.
fn complete(c: &mut Context<'_>, end: u64) -> Result<(), String> {
    multiply_all(c, end)?;
    let wide = &mut c.warp.wide;
    wide.begun.retain(|begun| begun.group >= end);
    let (kept, done): (Vec<Sums>, Vec<Sums>) =
        wide.sums.drain(..).partition(|sums| wide.begun.iter().any(|begun| begun.sums == sums.first));
    wide.sums = kept;
    for sums in done {
        for (register, values) in sums.registers.iter().zip(&sums.values) {
            c.warp.registers.set(*register, u32::MAX, values);
        }
    }
    Ok(())
}

/// Computes the unfinished products of groups before `end`, in their order.
fn multiply_all(c: &mut Context<'_>, end: u64) -> Result<(), String> {
    for at in 0..c.warp.wide.begun.len() {
        let begun = &mut c.warp.wide.begun[at];
        if begun.done || begun.group >= end {
            continue;
        }
        begun.done = true;
        let (i, descriptor, add, first) = (begun.instruction, begun.descriptor, begun.add, begun.sums);
        multiply(c, &i, descriptor, add, first)?;
    }
    Ok(())
}

/// The layout of a matrix, from its descriptor.
struct Matrix {
    start: u64,
    leading: u64,
    stride: u64,
    swizzle: u64,
    /// Whether its rows (M or N) are adjacent in memory.
    transposed: bool,
}

impl Matrix {
    fn new(descriptor: u64, transposed: bool) -> Result<Self, String> {
        let field = |shift: u32| (descriptor >> shift & 0x3FFF) << 4;
        // Bytes per row of the swizzle pattern.
        let swizzle = match descriptor >> 62 {
            0 => 16,
            1 => 128,
            2 => 64,
            _ => 32,
        };
        if descriptor >> 49 & 7 != 0 {
            return Err("a descriptor with a base offset is not emulated".to_string());
        }
        if swizzle == 16 && transposed {
            return Err("a transposed factor without swizzle is not emulated".to_string());
        }
        Ok(Matrix { start: field(0), leading: field(16), stride: field(32), swizzle, transposed })
    }

    /// Address of element `k` of row `row` (of M or N); elements have 2 bytes.
    fn at(&self, row: u64, k: u64) -> u64 {
        let address = self.start
            + if self.transposed {
                // Patterns of 8 k by as many rows as fit their width.
                let across = self.swizzle / 2;
                row / across * self.leading + k / 8 * self.stride + k % 8 * self.swizzle + row % across * 2
            } else if self.swizzle == 16 {
                row / 8 * self.stride + k / 8 * self.leading + row % 8 * 16 + k % 8 * 2
            } else {
                row / 8 * self.stride + row % 8 * self.swizzle + k * 2
            };
        // XORs bits 4..6 with bits 7..9, as many as the width has 16-byte pieces.
        let pieces = self.swizzle / 16;
        address ^ ((address >> 7 & (pieces - 1)) << 4)
    }
}

fn multiply(
    c: &mut Context<'_>,
    i: &Instruction,
    descriptor: [u64; 2],
    add: bool,
    first: u32,
) -> Result<(), String> {
    let crate::instruction::Op::Together(Together::WideProduct { n, of, a_shared, b_trans, .. }) = i.op
    else {
        return Err("no product".to_string());
    };
    let n = usize::from(n);
    let element = |c: &mut Context<'_>, address: u64| -> Result<f32, String> {
        let at = c.block.shared.at(address & 0x3_FFFF, 2);
        let at = at.ok_or_else(|| format!("a factor at {address:#x}, outside shared memory"))?;
        // SAFETY: inside shared memory; addresses of elements are even.
        Ok(formats::element(unsafe { at.cast::<u16>().read() }, of))
    };
    let a = if a_shared {
        let matrix = Matrix::new(descriptor[0], false)?;
        let mut a = [[0.0; 16]; 16];
        for (row, values) in a.iter_mut().enumerate() {
            for (k, value) in values.iter_mut().enumerate() {
                *value = element(c, matrix.at(u64::from(c.warp.number % 4) * 16 + row as u64, k as u64))?;
            }
        }
        a
    } else {
        let list = &c.program.lists[i.list as usize + 1 + n / 2..];
        fragment_a(&std::array::from_fn(|k| c.warp.registers.all::<u32>(list[k])), of)
    };
    let matrix = Matrix::new(descriptor[1], b_trans)?;
    let mut b = vec![0.0f32; 16 * n];
    for k in 0..16 {
        for column in 0..n {
            b[k * n + column] = element(c, matrix.at(column as u64, k as u64))?;
        }
    }
    let sums = c.warp.wide.sums.iter_mut().find(|s| s.first == first).ok_or("sums that are not there")?;
    // Register 4 j + e of a lane: row lane / 4 (+ 8 for e of 2 and 3), column 8 j + lane % 4 * 2 (+ 1 for odd e).
    let place = |register: usize, lane: usize| {
        (lane / 4 + register / 2 % 2 * 8, register / 4 * 8 + lane % 4 * 2 + register % 2)
    };
    let mut rows = vec![0.0f32; 16 * n];
    if add {
        for (register, values) in sums.values.iter().enumerate() {
            for lane in 0..LANES {
                let (row, column) = place(register, lane);
                rows[row * n + column] = f32::from_bits(values[lane]);
            }
        }
    }
    for (row, factors) in rows.chunks_mut(n).zip(&a) {
        for (factor, others) in factors.iter().zip(b.chunks(n)) {
            for (sum, other) in row.iter_mut().zip(others) {
                *sum += factor * other;
            }
        }
    }
    for (register, values) in sums.values.iter_mut().enumerate() {
        for lane in 0..LANES {
            let (row, column) = place(register, lane);
            values[lane] = rows[row * n + column].to_bits();
        }
    }
    Ok(())
}

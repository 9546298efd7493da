//! Checks products of matrices against plain ones in f64. The positions of elements are derived here again from
//! the figures of the PTX ISA, in the opposite direction from the emulator's.

#![allow(clippy::needless_range_loop, reason = "rows and columns are indices of several matrices")]

mod common;

use common::{Numbers, program, run_seeded};
use emulator::SUMS_AT_ONCE;
use std::fmt::Write;

/// A random number that bf16 represents exactly.
fn draw(numbers: &mut Numbers) -> f32 {
    f32::from_bits(numbers.small().to_bits() & 0xFFFF_0000)
}

fn half(value: f32) -> u32 {
    value.to_bits() >> 16
}

/// m16n8k16 of the ISA. Registers of A by (group = lane / 4, t = lane % 4): rows group and group + 8, columns 2 t, 2 t + 1, and
/// 8 more.
fn fragment(a: &[Vec<f32>], lane: usize, register: usize) -> u32 {
    let row = lane / 4 + if register == 1 || register == 3 { 8 } else { 0 };
    let column = lane % 4 * 2 + if register >= 2 { 8 } else { 0 };
    half(a[row][column]) | half(a[row][column + 1]) << 16
}

fn matrix(numbers: &mut Numbers, rows: usize, columns: usize) -> Vec<Vec<f32>> {
    (0..rows).map(|_| (0..columns).map(|_| draw(numbers)).collect()).collect()
}

fn close(found: u32, wanted: f64, what: &str) {
    let found = f64::from(f32::from_bits(found));
    assert!((found - wanted).abs() < 1e-5, "{what}: {found} instead of {wanted}");
}

#[test]
fn a_warps_product() {
    let mut numbers = Numbers(1);
    let (a, b, c) = (matrix(&mut numbers, 16, 16), matrix(&mut numbers, 16, 8), matrix(&mut numbers, 16, 8));
    // For each lane: 4 words of A, 2 of B, 4 of C.
    let mut input = Vec::new();
    for lane in 0..32 {
        let (group, t) = (lane / 4, lane % 4);
        input.extend((0..4).map(|register| fragment(&a, lane, register)));
        for k in [2 * t, 2 * t + 8] {
            input.push(half(b[k][group]) | half(b[k + 1][group]) << 16);
        }
        for (row, column) in [(group, 2 * t), (group, 2 * t + 1), (group + 8, 2 * t), (group + 8, 2 * t + 1)]
        {
            input.push(c[row][column].to_bits());
        }
    }
    let mut body = "mul.wide.u32 %rd5, %r0, 40; add.s64 %rd6, %rd0, %rd5; mul.wide.u32 %rd7, %r0, 16; add.s64 %rd8, %rd1, %rd7;\n".to_string();
    for i in 0..6 {
        let _ = writeln!(body, "ld.global.u32 %r{}, [%rd6+{}];", i + 1, i * 4);
    }
    for i in 0..4 {
        let _ = writeln!(body, "ld.global.f32 %f{}, [%rd6+{}];", i + 1, 24 + i * 4);
    }
    body += "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4},{%r1,%r2,%r3,%r4},{%r5,%r6},{%f1,%f2,%f3,%f4};\n\
             st.global.v4.f32 [%rd8], {%f1,%f2,%f3,%f4};";
    let found = run_seeded(program("", &body), 1, 32, &input, 128, 1).expect("a run");
    for row in 0..16 {
        for column in 0..8 {
            let wanted: f64 = (0..16).map(|k| f64::from(a[row][k]) * f64::from(b[k][column])).sum::<f64>()
                + f64::from(c[row][column]);
            let (lane, register) = (row % 8 * 4 + column / 2, column % 2 + row / 8 * 2);
            close(found[lane * 4 + register], wanted, &format!("row {row}, column {column}"));
        }
    }
}

/// Position of an element of B in shared memory from `start` (a multiple of 1024), in rows of 128 bytes with the 128-byte
/// swizzle: piece p (16 bytes) of row r of eight is at place p ^ r.
fn swizzled(start: usize, row: usize, byte: usize) -> usize {
    start + row / 8 * 1024 + row % 8 * 128 + ((byte / 16) ^ (row % 8)) * 16 + byte % 16
}

/// A warpgroup's product of 64 x 64 (four steps of 16 k) and 64 x `n`. B's rows in memory are columns of the product, or its
/// k if `transposed`. `wait`: whether the sums are waited for. `note`: a line of the PTX.
fn wide(n: usize, transposed: bool, wait: bool, seed: u64, note: &str) -> (Vec<u32>, Vec<Vec<f64>>) {
    const START: usize = 2048;
    let mut numbers = Numbers(seed + 9);
    let (a, b) = (matrix(&mut numbers, 64, 64), matrix(&mut numbers, 64, n));
    // Transposed: blocks of 64 columns, each 64 k x 128 bytes.
    let mut memory = vec![0u32; (n.max(64) * 128).max(64 * 2 * n) / 4];
    for k in 0..64 {
        for column in 0..n {
            let at = if transposed {
                swizzled(START + column / 64 * 64 * 128, k, column % 64 * 2)
            } else {
                swizzled(START, column, k * 2)
            } - START;
            memory[at / 4] |= half(b[k][column]) << (at % 4 * 8);
        }
    }
    let words = memory.len();
    let mut input = memory;
    for thread in 0..128 {
        for step in 0..4 {
            let part: Vec<Vec<f32>> =
                (0..16).map(|row| a[thread / 32 * 16 + row][step * 16..step * 16 + 16].to_vec()).collect();
            input.extend((0..4).map(|register| fragment(&part, thread % 32, register)));
        }
    }
    let sums: Vec<String> = (0..n / 2).map(|i| format!("%f{i}")).collect();
    let mut body = format!(
        "mov.u64 %rd20, room; cvt.u32.u64 %r5, %rd20; add.u32 %r5, %r5, {START}; mov.u32 %r6, %r0;\n\
         $fill: setp.ge.u32 %p1, %r6, {words}; @%p1 bra $filled; mul.wide.u32 %rd5, %r6, 4; add.s64 %rd6, %rd0, %rd5;\n\
         ld.global.u32 %r7, [%rd6]; shl.b32 %r8, %r6, 2; add.u32 %r9, %r5, %r8; st.shared.u32 [%r9], %r7; add.u32 %r6, %r6, 128; bra $fill;\n\
         $filled: bar.sync 0; mul.wide.u32 %rd7, %r0, 64; add.s64 %rd8, %rd0, %rd7; fence.proxy.async;\n"
    );
    for i in 0..16 {
        let _ = writeln!(body, "ld.global.u32 %r{}, [%rd8+{}];", 20 + i, words * 4 + i * 4);
    }
    for sum in &sums {
        let _ = writeln!(body, "mov.f32 {sum}, 0f41200000;");
    }
    // Transposed: 8,192 bytes per 64 columns, 1,024 per 8 k. Otherwise 1,024 bytes per eight rows.
    let (leading, stride, step, flag) = if transposed { (8192, 1024, 2048, 1) } else { (16, 1024, 32, 0) };
    let descriptor = (START as u64) >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 62;
    body += "wgmma.fence.sync.aligned;\n";
    for k in 0..4u64 {
        let registers: Vec<String> = (0..4).map(|i| format!("%r{}", 20 + k * 4 + i)).collect();
        // The first step overwrites the sums.
        let _ = writeln!(
            body,
            "setp.ne.b32 %p2, {}, 0; mov.u64 %rd9, {};\n\
             wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{}}},{{{}}},%rd9,%p2,1,1,{flag};",
            u32::from(k != 0),
            descriptor + ((k * step) >> 4),
            sums.join(","),
            registers.join(",")
        );
    }
    body += "wgmma.commit_group.sync.aligned;\n";
    if wait {
        body += "wgmma.wait_group.sync.aligned 0;\n";
    }
    let _ = writeln!(body, "mul.wide.u32 %rd10, %r0, {}; add.s64 %rd11, %rd1, %rd10;", n * 2);
    for (i, sum) in sums.iter().enumerate() {
        let _ = writeln!(body, "st.global.f32 [%rd11+{}], {sum};", i * 4);
    }
    let found = run_seeded(program(note, &body), 1, 128, &input, 64 * n, seed).expect("a run");
    let wanted = (0..64)
        .map(|row| (0..n).map(|c| (0..64).map(|k| f64::from(a[row][k]) * f64::from(b[k][c])).sum()).collect())
        .collect();
    (found, wanted)
}

/// Compares the sums of a warpgroup's threads with those that are wanted.
fn compare(n: usize, found: &[u32], wanted: &[Vec<f64>], what: &str) {
    for (row, sums) in wanted.iter().enumerate() {
        for (column, wanted) in sums.iter().enumerate() {
            let thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
            let register = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
            close(found[thread * n / 2 + register], *wanted, &format!("{what}: row {row}, column {column}"));
        }
    }
}

#[test]
fn a_warpgroups_product() {
    for (n, transposed) in [(32, false), (64, false), (128, false), (64, true), (128, true)] {
        for seed in 1..4 {
            let (found, wanted) = wide(n, transposed, true, seed, "");
            compare(n, &found, &wanted, &format!("n {n}, transposed {transposed}"));
        }
    }
}

#[test]
fn sums_are_nan_until_they_are_waited_for_unless_the_ptx_says_otherwise() {
    let (found, _) = wide(64, false, false, 1, "");
    assert!(found.iter().all(|bits| f32::from_bits(*bits).is_nan()));
    for wait in [false, true] {
        let (found, wanted) = wide(64, false, wait, 1, &format!("\n{SUMS_AT_ONCE}\n"));
        compare(64, &found, &wanted, "at once");
    }
}

/// Four matrices stored transposed: register j of lane l holds row l / 4, columns l % 4 * 2 and the next, of matrix j,
/// whose column c goes to the address in lane 8 j + c.
#[test]
fn matrices_are_stored_and_loaded() {
    let body = |instruction: &str| {
        format!(
            "mov.u64 %rd20, room; cvt.u32.u64 %r5, %rd20; shl.b32 %r6, %r0, 4; add.u32 %r7, %r5, %r6;\n\
         mul.lo.s32 %r1, %r0, 65538; add.u32 %r1, %r1, 65536; add.u32 %r2, %r1, 16777472; add.u32 %r3, %r2, 16777472; add.u32 %r4, %r3, 16777472;\n\
         {instruction}\n bar.warp.sync -1; ld.shared.v4.u32 {{%r11,%r12,%r13,%r14}}, [%r7];\n\
         mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd1, %rd5; st.global.v4.u32 [%rd6], {{%r11,%r12,%r13,%r14}};"
        )
    };
    // The halves of lane l are 2 l and 2 l + 1 (plus 256 for each further matrix), so element (row, column) is 8 row +
    // column.
    let store = |trans: &str| {
        let body = body(&format!(
            "mul.lo.s32 %r1, %r0, 131074; add.u32 %r1, %r1, 65536; add.u32 %r2, %r1, 16777472; add.u32 %r3, %r2, 16777472; add.u32 %r4, %r3, 16777472;\n\
             stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r7],{{%r1,%r2,%r3,%r4}};"
        ));
        run_seeded(program("", &body), 1, 32, &[0], 128, 1).expect("a run")
    };
    for (trans, found) in [("", store("")), (".trans", store(".trans"))] {
        for matrix in 0..4 {
            for row in 0..8 {
                for column in 0..8 {
                    let element = if trans.is_empty() { 8 * row + column } else { 8 * column + row };
                    let half = found[(matrix * 8 + row) * 4 + column / 2] >> (column % 2 * 16) & 0xFFFF;
                    assert_eq!(half as usize, matrix * 256 + element, "{trans} {matrix} {row} {column}");
                }
            }
        }
    }
    let both = body(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r7],{%r1,%r2,%r3,%r4}; bar.warp.sync -1;\n\
         ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r31,%r32,%r33,%r34},[%r7]; sub.u32 %r31, %r31, %r1; sub.u32 %r32, %r32, %r2;\n\
         sub.u32 %r33, %r33, %r3; sub.u32 %r34, %r34, %r4; bar.warp.sync -1; st.shared.v4.u32 [%r7], {%r31,%r32,%r33,%r34};",
    );
    assert_eq!(run_seeded(program("", &both), 1, 32, &[0], 128, 1).expect("a run"), [0; 128]);
}

//! Checks each instruction against the PTX ISA, computed in another way: wider integers, f64, searches.

mod common;

use common::{Numbers, program, run};

/// `instruction` applied to pairs of words (%r1 and %r2 to %r3).
fn words(instruction: &str, pairs: &[(u32, u32)]) -> Vec<u32> {
    let body = format!(
        "shl.b32 %r10, %r0, 3; cvt.u64.u32 %rd10, %r10; add.s64 %rd11, %rd0, %rd10;\n\
         ld.global.v2.u32 {{%r1, %r2}}, [%rd11]; mov.u32 %r3, 0;\n{instruction}\n\
         mul.wide.u32 %rd12, %r0, 4; add.s64 %rd13, %rd1, %rd12; st.global.u32 [%rd13], %r3;"
    );
    let input: Vec<u32> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
    run(program("", &body), 1, pairs.len() as u32, &input, pairs.len()).expect(instruction)
}

fn check(instruction: &str, expected: impl Fn(u32, u32) -> u32) {
    let mut numbers = Numbers(7);
    let edges = [0, 1, 2, 31, 32, 33, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 0xFFFF, 0x8000, 0x1234_5678];
    let mut pairs: Vec<(u32, u32)> = edges.iter().flat_map(|&a| edges.map(|b| (a, b))).collect();
    pairs.extend((0..112).map(|_| (numbers.word(), numbers.word())));
    for ((a, b), found) in pairs.iter().zip(words(instruction, &pairs)) {
        let wanted = expected(*a, *b);
        assert_eq!(found, wanted, "{instruction} of {a:#x}, {b:#x}: {found:#x} instead of {wanted:#x}");
    }
}

#[test]
fn integers() {
    let s = |v: u32| i64::from(v as i32);
    check("add.s32 %r3, %r1, %r2;", |a, b| (u64::from(a) + u64::from(b)) as u32);
    check("sub.s32 %r3, %r1, %r2;", |a, b| (u64::from(a) + (1 << 32) - u64::from(b)) as u32);
    check("mul.lo.s32 %r3, %r1, %r2;", |a, b| (u64::from(a) * u64::from(b)) as u32);
    check("mul.hi.u32 %r3, %r1, %r2;", |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32);
    check("mul.hi.s32 %r3, %r1, %r2;", move |a, b| ((s(a) * s(b)) >> 32) as u32);
    check("mad.lo.s32 %r3, %r1, %r2, 77;", |a, b| (u128::from(a) * u128::from(b) + 77) as u32);
    check("min.s32 %r3, %r1, %r2;", move |a, b| if s(a) < s(b) { a } else { b });
    check("max.u32 %r3, %r1, %r2;", |a, b| if a > b { a } else { b });
    check("or.b32 %r4, %r2, 1; div.u32 %r3, %r1, %r4;", |a, b| a / (b | 1));
    check("or.b32 %r4, %r2, 1; rem.u32 %r3, %r1, %r4;", |a, b| a % (b | 1));
    check("shl.b32 %r3, %r1, %r2;", |a, b| if b > 31 { 0 } else { (u64::from(a) << b) as u32 });
    check("shr.u32 %r3, %r1, %r2;", |a, b| if b > 31 { 0 } else { a >> b });
    check("shr.s32 %r3, %r1, %r2;", move |a, b| (s(a) >> b.min(63)) as u32);
    check("lop3.b32 %r3, %r1, %r2, 252645135, 0xE8;", |a, b| (a & b) | (a & 0x0F0F_0F0F) | (b & 0x0F0F_0F0F));
    check("popc.b32 %r3, %r1;", |a, _| (0..32).filter(|bit| a >> bit & 1 == 1).count() as u32);
    check("clz.b32 %r3, %r1;", |a, _| (0..32).rev().take_while(|bit| a >> bit & 1 == 0).count() as u32);
    check("bfind.u32 %r3, %r1;", |a, _| (0..32).rev().find(|bit| a >> bit & 1 == 1).unwrap_or(u32::MAX));
    check("bfind.shiftamt.u32 %r3, %r1;", |a, _| (0..32).find(|by| (a << by) >> 31 == 1).unwrap_or(u32::MAX));
    check("brev.b32 %r3, %r1;", |a, _| (0..32).fold(0, |r, bit| r | (a >> bit & 1) << (31 - bit)));
    check("shf.l.wrap.b32 %r3, %r1, %r2, 5;", |a, b| b << 5 | a >> 27);
    check("shf.r.wrap.b32 %r3, %r1, %r2, 5;", |a, b| a >> 5 | b << 27);
    check("bfe.u32 %r3, %r1, 5, 9;", |a, _| a >> 5 & 0x1FF);
    check("bfe.s32 %r3, %r1, 5, 9;", |a, _| ((a << 18) as i32 >> 23) as u32);
    check("bfi.b32 %r3, %r1, %r2, 5, 9;", |a, b| b & !(0x1FF << 5) | (a & 0x1FF) << 5);
    check("prmt.b32 %r3, %r1, %r2, 0x5140;", |a, b| {
        let bytes = [a.to_le_bytes(), b.to_le_bytes()].concat();
        u32::from_le_bytes([bytes[0], bytes[4], bytes[1], bytes[5]])
    });
    check("cvt.s32.s8 %r3, %r1;", |a, _| (a & 0xFF) as i8 as i32 as u32);
    check("cvt.u32.u16 %r3, %r1;", |a, _| a & 0xFFFF);
}

#[test]
fn comparisons_and_predicates() {
    let s = |v: u32| v as i32;
    check("setp.lt.s32 %p1, %r1, %r2; selp.u32 %r3, 1, 0, %p1;", move |a, b| u32::from(s(a) < s(b)));
    check("setp.ge.u32 %p1|%p2, %r1, %r2; selp.u32 %r3, 1, 0, %p2;", |a, b| u32::from(a < b));
    check("setp.eq.s32 %p1, %r1, %r2; not.pred %p2, %p1; @%p2 add.u32 %r3, %r3, 9;", |a, b| {
        u32::from(a != b) * 9
    });
    check("setp.gt.u32 %p1, %r1, %r2; @!%p1 mov.u32 %r3, 4;", |a, b| if a > b { 0 } else { 4 });
    let f = f32::from_bits;
    check(
        "mov.b32 %f1, %r1; mov.b32 %f2, %r2; setp.lt.f32 %p1, %f1, %f2; selp.u32 %r3, 1, 0, %p1;",
        move |a, b| u32::from(f(a).partial_cmp(&f(b)) == Some(std::cmp::Ordering::Less)),
    );
    check(
        "mov.b32 %f1, %r1; mov.b32 %f2, %r2; setp.geu.f32 %p1, %f1, %f2; selp.u32 %r3, 1, 0, %p1;",
        move |a, b| u32::from(f(a).partial_cmp(&f(b)) != Some(std::cmp::Ordering::Less)),
    );
    check(
        "mov.b32 %f1, %r1; mov.b32 %f2, %r2; setp.ne.f32 %p1, %f1, %f2; selp.u32 %r3, 1, 0, %p1;",
        move |a, b| u32::from(f(a).partial_cmp(&f(b)).is_some_and(|order| order.is_ne())),
    );
}

/// Bits of the finite 16-bit number nearest to `value`; of two equally near ones, the even one.
fn nearest(value: f64, of: impl Fn(u16) -> f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    // Numbers of one sign have the order of their bits.
    let (mut low, mut high) = (0u16, 0x7FFF);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        let at = of(middle);
        if at.is_nan() || at > value.abs() { high = middle } else { low = middle }
    }
    let above = if of(high).is_infinite() { of(low) + (of(low) - of(low - 1)) } else { of(high) };
    let (below, above) = (value.abs() - of(low), above - value.abs());
    sign | if below < above || (below == above && low % 2 == 0) { low } else { high }
}

fn bf16(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

fn f16(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 => {
            if fraction == 0.0 {
                f64::INFINITY
            } else {
                f64::NAN
            }
        }
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

/// Double rounding fails for numbers at or next to the middle of two adjacent 16-bit numbers.
#[test]
fn conversions_to_halves_round_to_the_nearest_once() {
    let mut numbers = Numbers(3);
    let mut pairs = Vec::new();
    for _ in 0..500 {
        let word = numbers.word();
        let size = f32::from_bits(word & 0x807F_FFFF | (110 + numbers.word() % 34) << 23);
        for change in [0, 1, u32::MAX] {
            pairs.push(((size.to_bits() & 0xFFFF_8000 | 0x8000).wrapping_add(change), size.to_bits()));
            pairs.push(((size.to_bits() & 0xFFFF_F000 | 0x1000).wrapping_add(change), size.to_bits()));
        }
    }
    for (name, of) in [("bf16x2", bf16 as fn(u16) -> f64), ("f16x2", f16)] {
        let instruction = format!("mov.b32 %f1, %r1; mov.b32 %f2, %r2; cvt.rn.{name}.f32 %r3, %f1, %f2;");
        for chunk in pairs.chunks(1000) {
            for ((a, b), found) in chunk.iter().zip(words(&instruction, chunk)) {
                let one = |bits: u32| u32::from(nearest(f64::from(f32::from_bits(bits)), of));
                let wanted = one(*a) << 16 | one(*b);
                assert_eq!(found, wanted, "{name} of {a:#x}, {b:#x}: {found:#x} instead of {wanted:#x}");
            }
        }
    }
}

#[test]
fn conversions_back_and_to_integers() {
    let f = f32::from_bits;
    check("cvt.u16.u32 %h1, %r1; cvt.f32.bf16 %f1, %h1; mov.b32 %r3, %f1;", |a, _| a << 16);
    check(
        "mov.b32 {%h1, %h2}, %r1; cvt.f32.f16 %f1, %h2; abs.f32 %f1, %f1; mov.b32 %r3, %f1; and.b32 %r3, %r3, 0x7F800000;",
        |a, _| (f16((a >> 16) as u16).abs() as f32).to_bits() & 0x7F80_0000,
    );
    check("mov.b32 %f1, %r1; cvt.rzi.u32.f32 %r3, %f1;", move |a, _| f(a) as u32);
    check("mov.b32 %f1, %r1; cvt.rni.s32.f32 %r3, %f1;", move |a, _| {
        f64::from(f(a)).round_ties_even() as i32 as u32
    });
    check("cvt.rn.f32.s32 %f1, %r1; mov.b32 %r3, %f1;", |a, _| (a as i32 as f32).to_bits());
    check("cvt.rn.f32.u32 %f1, %r1; mov.b32 %r3, %f1;", |a, _| (a as f32).to_bits());
    check("mov.b32 %f1, %r1; cvt.sat.f32.f32 %f2, %f1; mov.b32 %r3, %f2;", move |a, _| {
        let value = f(a);
        if value > 1.0 {
            1f32.to_bits()
        } else if value > 0.0 {
            a
        } else {
            0
        }
    });
}

/// CUDA's headers compute exp by rounding a sum down to a whole number in an f32's low bits.
#[test]
fn sums_are_rounded_as_asked() {
    let mut numbers = Numbers(11);
    let pairs: Vec<(u32, u32)> =
        (0..512).map(|_| (numbers.small().to_bits(), (numbers.small() * 300.0).to_bits())).collect();
    let magic = 12_582_913.0f32;
    let body = format!(
        "mov.b32 %f1, %r1; mov.b32 %f2, %r2; fma.rm.f32 %f3, %f1, %f2, 0f{:08X}; mov.b32 %r3, %f3;",
        magic.to_bits()
    );
    for ((a, b), found) in pairs.iter().zip(words(&body, &pairs)) {
        let exact = f64::from(f32::from_bits(*a)) * f64::from(f32::from_bits(*b));
        assert_eq!(f64::from(f32::from_bits(found)), f64::from(magic) + exact.floor(), "{exact}");
    }
    let body = "mov.b32 %f1, %r1; mov.b32 %f2, %r2; fma.rn.f32 %f3, %f1, %f2, 0f3F800001; mov.b32 %r3, %f3;";
    let one = f64::from(f32::from_bits(0x3F80_0001));
    for ((a, b), found) in pairs.iter().zip(words(body, &pairs)) {
        let exact = f64::from(f32::from_bits(*a)) * f64::from(f32::from_bits(*b)) + one;
        let (found, step) = (f64::from(f32::from_bits(found)), f64::from(f32::EPSILON) * exact.abs());
        assert!((found - exact).abs() <= step / 2.0 * 1.01, "{found} instead of {exact}");
    }
}

#[test]
fn functions_are_near_those_of_f64() {
    let mut numbers = Numbers(5);
    let pairs: Vec<(u32, u32)> = (0..256).map(|_| ((numbers.small() * 20.0).to_bits(), 0)).collect();
    type Function = fn(f64) -> f64;
    let cases: [(&str, Function); 5] = [
        ("ex2.approx.ftz.f32 %f2, %f1;", |x| 2f64.powf(x)),
        ("rcp.approx.ftz.f32 %f2, %f1;", |x| 1.0 / x),
        ("abs.f32 %f1, %f1; rsqrt.approx.f32 %f2, %f1;", |x| 1.0 / x.abs().sqrt()),
        ("abs.f32 %f1, %f1; lg2.approx.f32 %f2, %f1;", |x| x.abs().log2()),
        ("sin.approx.f32 %f2, %f1;", f64::sin),
    ];
    for (instruction, function) in cases {
        let body = format!("mov.b32 %f1, %r1; {instruction} mov.b32 %r3, %f2;");
        for ((a, _), found) in pairs.iter().zip(words(&body, &pairs)) {
            let (wanted, found) = (function(f32::from_bits(*a).into()), f64::from(f32::from_bits(found)));
            assert!(
                (found - wanted).abs() <= 1e-6 * wanted.abs(),
                "{instruction}: {found} instead of {wanted}"
            );
        }
    }
}

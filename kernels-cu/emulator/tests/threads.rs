//! Threads: divergence, shuffles, votes, barriers, copies, and the errors for kernels that do something wrong.

mod common;

use common::{program, run, run_seeded};

/// Writes %r3 of each thread.
const WRITE: &str = "mov.u32 %r20, %ctaid.x; mov.u32 %r21, %ntid.x; mad.lo.s32 %r22, %r20, %r21, %r0;\n\
                     mul.wide.u32 %rd12, %r22, 4; add.s64 %rd13, %rd1, %rd12; st.global.u32 [%rd13], %r3;";

fn of_threads(body: &str, threads: u32) -> Vec<u32> {
    run(program("", &format!("{body}\n{WRITE}")), 1, threads, &[0], threads as usize).expect(body)
}

#[test]
fn lanes_loop_independently_and_calls_return_per_lane() {
    let found = of_threads(
        "mov.u32 %r3, 0; mov.u32 %r4, %r0; $loop: setp.eq.u32 %p1, %r4, 0; @%p1 bra $end;\n\
                            add.u32 %r3, %r3, %r4; sub.u32 %r4, %r4, 1; bra.uni $loop; $end:",
        70,
    );
    assert!(found.iter().enumerate().all(|(t, &sum)| sum as usize == t * (t + 1) / 2), "{found:?}");
}

/// A lane spins on a word that another lane of its warp writes later in the code: both must get turns.
#[test]
fn a_spinning_lane_does_not_starve_the_one_that_it_waits_for() {
    let body = "mov.u64 %rd20, room; cvt.u32.u64 %r5, %rd20; setp.ne.u32 %p1, %r0, 0; mov.u32 %r3, 7;\n\
                st.shared.u32 [%r5], 0; bar.warp.sync -1; @%p1 bra $write;\n\
                $spin: ld.volatile.shared.u32 %r3, [%r5]; setp.eq.u32 %p2, %r3, 0; @%p2 bra $spin; bra $end;\n\
                $write: mov.u32 %r6, 5; st.volatile.shared.u32 [%r5], %r6; $end:";
    assert_eq!(of_threads(body, 2), [5, 7]);
}

#[test]
fn shuffles() {
    let value =
        |instruction: &str| of_threads(&format!("add.u32 %r1, %r0, 100; mov.u32 %r4, -1; {instruction}"), 32);
    let at = |f: fn(u32) -> u32| (0..32).map(f).collect::<Vec<_>>();
    assert_eq!(value("shfl.sync.bfly.b32 %r3|%p1, %r1, 3, 31, %r4;"), at(|l| 100 + (l ^ 3)));
    assert_eq!(value("shfl.sync.idx.b32 %r3|%p1, %r1, 9, 31, %r4;"), at(|_| 109));
    // Segments of 8: c = (32 - 8) << 8 | 31.
    assert_eq!(value("shfl.sync.idx.b32 %r3|%p1, %r1, 2, 6175, %r4;"), at(|l| 100 + l / 8 * 8 + 2));
    assert_eq!(
        value("shfl.sync.up.b32 %r3|%p1, %r1, 2, 0, %r4;"),
        at(|l| if l < 2 { 100 + l } else { 98 + l })
    );
    assert_eq!(
        value("shfl.sync.down.b32 %r3|%p1, %r1, 2, 31, %r4; selp.u32 %r3, %r3, 0, %p1;"),
        at(|l| if l > 29 { 0 } else { 102 + l })
    );
}

#[test]
fn votes_and_matches() {
    let vote = |instruction: &str| {
        of_threads(&format!("mov.u32 %r4, -1; setp.gt.u32 %p1, %r0, 27; {instruction}"), 32)
    };
    assert_eq!(vote("vote.sync.ballot.b32 %r3, %p1, %r4;"), [0xF000_0000; 32]);
    assert_eq!(vote("vote.sync.any.pred %p2, %p1, %r4; selp.u32 %r3, 1, 0, %p2;"), [1; 32]);
    assert_eq!(vote("vote.sync.all.pred %p2, !%p1, %r4; selp.u32 %r3, 1, 0, %p2;"), [0; 32]);
    assert_eq!(vote("redux.sync.add.s32 %r3, %r0, %r4;"), [496; 32]);
    let found = vote("shr.u32 %r1, %r0, 4; match.any.sync.b32 %r3, %r1, %r4;");
    assert_eq!((found[0], found[31]), (0xFFFF, 0xFFFF_0000));
    let elected = vote("elect.sync _|%p3, %r4; selp.u32 %r3, 1, 0, %p3;");
    assert_eq!(elected.iter().sum::<u32>(), 1);
}

/// Lanes arrive at a shuffle in two groups.
#[test]
fn diverged_lanes_wait_for_each_other() {
    let body = "mov.u32 %r1, %r0; setp.lt.u32 %p1, %r0, 5; @%p1 bra $few; add.u32 %r1, %r1, 1000; $few: mov.u32 %r4, -1;\n\
                shfl.sync.idx.b32 %r3|%p2, %r1, 31, 31, %r4;";
    assert_eq!(of_threads(body, 32), [1031; 32]);
}

/// A base in 32 bits may be negative, if the offset makes up for it.
#[test]
fn addresses_of_32_bits_wrap() {
    let body =
        "mov.u32 %r5, 0; sub.u32 %r5, %r5, 64; st.shared.u32 [%r5+1088], 7; ld.shared.u32 %r3, [%r5+1088];";
    assert_eq!(of_threads(body, 1), [7]);
}

#[test]
fn named_barriers_order_warps_and_reduce() {
    // Thread 0 writes late; all threads read after the barrier.
    let body = "mov.u64 %rd20, room; cvt.u32.u64 %r5, %rd20; setp.ne.u32 %p1, %r0, 0; @%p1 bra $wait;\n\
                nanosleep.u32 100000; st.shared.u32 [%r5], 77; $wait: bar.sync 3, 128;\n\
                ld.shared.u32 %r3, [%r5]; setp.eq.u32 %p2, %r0, 90; bar.red.or.pred %p3, 1, 128, %p2;\n\
                selp.u32 %r6, 1, 0, %p3; add.u32 %r3, %r3, %r6;";
    for seed in 1..20 {
        let found =
            run_seeded(program("", &format!("{body}\n{WRITE}")), 1, 128, &[0], 128, seed).expect(body);
        assert_eq!(found, [78; 128], "seed {seed}");
    }
    let problem =
        run(program("", "setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 64;"), 1, 64, &[0], 1).unwrap_err();
    assert!(problem.contains("wait for each other"), "{problem}");
}

/// A bulk copy, and threads that wait for it by the barrier's parity, for two phases.
const COPY: &str = "mov.u64 %rd20, room; cvt.u32.u64 %r5, %rd20; add.u32 %r6, %r5, 1024; setp.ne.u32 %p1, %r0, 0;\n\
     @%p1 bra $ready; mbarrier.init.shared.b64 [%r5], 1; $ready: bar.sync 0; @%p1 bra $wait;\n\
     mbarrier.arrive.expect_tx.shared.b64 %rd21, [%r5], 256;\n\
     cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6],[%rd0],256,[%r5];\n\
     $wait: WAIT shl.b32 %r7, %r0, 2; add.u32 %r8, %r6, %r7; ld.shared.u32 %r3, [%r8];";

#[test]
fn bulk_copies_complete_on_their_barrier() {
    let input: Vec<u32> = (0..64).map(|i| i * 3 + 1).collect();
    let wait = "mbarrier.try_wait.parity.shared.b64 %p2,[%r5],0; @!%p2 bra $wait;";
    let with = |wait: &str, seed| {
        let body = format!("{}\n{WRITE}", COPY.replace("WAIT", wait));
        run_seeded(program("", &body), 1, 64, &input, 64, seed).expect("a run")
    };
    assert!((1..20).all(|seed| with(wait, seed) == input));
    // A thread that does not wait reads the old contents, in some order of the warps.
    assert!((1..20).any(|seed| with("", seed).contains(&u32::MAX)));
}

/// Copies by threads arrive only when they have been waited for.
#[test]
fn copies_of_threads_are_waited_for() {
    let body = |wait: &str| {
        format!(
            "mov.u64 %rd20, room; cvt.u32.u64 %r5, %rd20; shl.b32 %r6, %r0, 4; add.u32 %r7, %r5, %r6;\n\
                 mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd0, %rd5; cp.async.cg.shared.global [%r7],[%rd6],16;\n\
                 cp.async.commit_group; {wait} ld.shared.u32 %r3, [%r7];\n{WRITE}"
        )
    };
    let input: Vec<u32> = (0..128).collect();
    let with = |wait: &str| run(program("", &body(wait)), 1, 32, &input, 32).expect("a run");
    assert_eq!(with("cp.async.wait_group 0;"), (0..32).map(|i| i * 4).collect::<Vec<_>>());
    assert_eq!(with("cp.async.wait_group 1;"), [u32::MAX; 32]);
}

/// Copies that the lanes of a warp have started arrive at a barrier, whether its count includes their arrivals or not.
#[test]
fn copies_of_threads_arrive_at_a_barrier() {
    for (arrivals, form, own) in
        [("32", ".noinc", ""), ("1", "", "@!%p1 mbarrier.arrive.shared.b64 %rd21, [%r5];")]
    {
        let body = |wait: &str| {
            format!(
                "mov.u64 %rd20, room; cvt.u32.u64 %r5, %rd20; shl.b32 %r6, %r0, 4; add.u32 %r7, %r5, %r6; add.u32 %r7, %r7, 16;\n\
                 setp.ne.u32 %p1, %r0, 0; @%p1 bra $ready; mbarrier.init.shared.b64 [%r5], {arrivals}; $ready: bar.sync 0;\n\
                 mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd0, %rd5; cp.async.cg.shared.global [%r7],[%rd6],16;\n\
                 cp.async.mbarrier.arrive{form}.shared.b64 [%r5]; bar.warp.sync -1; {own}\n\
                 $wait: {wait} ld.shared.u32 %r3, [%r7];\n{WRITE}"
            )
        };
        let input: Vec<u32> = (0..128).collect();
        let with =
            |wait: &str, seed| run_seeded(program("", &body(wait)), 1, 32, &input, 32, seed).expect("a run");
        let wait = "mbarrier.try_wait.parity.shared.b64 %p2,[%r5],0; @!%p2 bra $wait;";
        let all: Vec<u32> = (0..32).map(|i| i * 4).collect();
        assert!((1..20).all(|seed| with(wait, seed) == all), "{form}");
        assert!((1..20).any(|seed| with("", seed).contains(&u32::MAX)), "{form}");
        assert!((1..20).all(|seed| with("cp.async.wait_all;", seed) == all), "{form}");
    }
}

#[test]
fn atomics_of_all_blocks_add_up() {
    let body = "atom.relaxed.sys.global.add.u32 %r3,[%rd1],2; atom.acq_rel.gpu.global.cas.b32 %r4,[%rd1+4],2779096485,6;";
    let found = run(program("", body), 3, 100, &[0], 2).expect("a run");
    assert_eq!(found, [0xA5A5_A5A5u32.wrapping_add(600), 6]);
}

#[test]
fn errors_of_a_kernel_name_the_place() {
    let problem = |body: &str| run(program("", body), 1, 32, &[1, 2, 3, 4], 4).unwrap_err();
    for (body, words) in [
        ("st.global.u32 [%rd1+16], %r0;", "4 bytes at"),
        ("ld.global.u32 %r3, [%rd0+2];", "not aligned"),
        ("ld.shared.u32 %r3, [65536];", "shared memory"),
        ("mbarrier.arrive.shared.b64 %rd3, [64];", "not initialised"),
        (
            "mbarrier.init.shared.b64 [64], 1; bar.warp.sync -1; mbarrier.arrive.shared.b64 %rd3, [64], 2;",
            "more arrivals",
        ),
        ("bar.sync 1, 64;", "in a block of 32"),
        ("tcgen05.wait::ld.sync.aligned;", "not emulated: tcgen05"),
        ("trap;", "trap"),
    ] {
        let problem = problem(body);
        assert!(problem.contains(words) && problem.contains("PTX line 11"), "{body}: {problem}");
    }
}

//! Measures the linear kernels: how fast decode reads weights (GB/s, compared with a plain read of the same memory in
//! the same run), multiply-adds in prefill (GFLOP/s), and packing of weights at load.
//!
//! `cargo run --release -p mpk-kernels --example gemm_bench [-- THREADS]`

use kernels_cu::abi::{mpk_linear_params, mpk_operand, params_words};
use kernels_cu::isa::{Isa, ReadPattern, read_memory};
use kernels_cu::layout;
use kernels_cu::testing::{
    AlignedBytes, Call, TestBatch, TestRank, TestTask, TestTensor, random_values, run_task,
};
use std::time::{Duration, Instant};
use taskgraph::task_type::Access;
use taskgraph::{DType, Region};

/// Weights of one decode measurement: far more than the caches hold.
const OUT_OF_CACHE: usize = 256 << 20;
const REPEATS: usize = 5;

fn main() {
    let wanted: Option<usize> = std::env::args().nth(1).and_then(|a| a.parse().ok());
    println!("level {:?}, best of {REPEATS}", Isa::current());
    for threads in wanted.map_or(vec![1, 2], |t| vec![t]) {
        println!("\n{threads} thread(s)");
        for (k, n) in [(1024u32, 3072u32), (3072, 1024), (1024, 6144), (4096, 4096)] {
            for rows in [1u32, 2, 4, 8, 16] {
                decode(threads, rows, k, n);
            }
        }
        for (k, n) in [(1024u32, 3072u32), (3072, 1024)] {
            prefill(threads, 512, k, n);
        }
    }
    pack(3072, 1024);
}

/// Runs `work` on `threads` threads at once and gives the time of the fastest round.
fn best(threads: usize, work: impl Fn(usize) + Sync) -> Duration {
    let round = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let work = &work;
                scope.spawn(move || work(thread));
            }
        });
        start.elapsed()
    };
    (0..REPEATS).map(|_| round()).min().unwrap_or_default()
}

fn huge_pages(memory: &mut AlignedBytes) {
    let bytes = memory.bytes_mut();
    let page = 2usize << 20;
    let start = (bytes.as_mut_ptr() as usize).next_multiple_of(page);
    let end = bytes.as_ptr() as usize + bytes.len();
    if end > start {
        // SAFETY: the range lies within memory that we hold; the call only advises.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// A task [rows, k] x [columns, k] over weights at `weight`.
fn task(x: &mpk_operand, weight: u64, rows: u32, k: u32, columns: u32, out: u64) -> TestTask {
    let chunk_rows = ((1u64 << 20) / (4 * u64::from(k))).clamp(96, 480).min(u64::from(rows)) as u32;
    let params = mpk_linear_params { rows_kind: 2, chunk_rows, ..Default::default() };
    let operand = |addr, dims: [u32; 2], dtype: DType, layout| mpk_operand {
        addr,
        dims: [dims[0], dims[1], 1, 1],
        strides: [dims[1], 1, 0, 0],
        dtype: dtype as u8,
        ndim: 2,
        layout,
        symmetric: 0,
        pe: -1,
    };
    TestTask {
        params: params_words(&params),
        inputs: vec![*x, operand(weight, [columns, k], DType::Bf16, 1)],
        outputs: vec![operand(out, [rows, columns], DType::F32, 0)],
        scratch_bytes: u64::from(chunk_rows + 1) * u64::from(k) * 4 + 64,
        ..TestTask::default()
    }
}

fn run(threads: usize, rows: u32, k: u32, n: u32, memory: &AlignedBytes) -> Duration {
    let columns = n / threads as u32;
    let matrix = layout::tiled_bytes(n as usize, k as usize, DType::Bf16);
    let copies = memory.bytes().len() / matrix;
    let weights = memory.bytes().as_ptr() as u64;
    let mut x = TestTensor::new(DType::Bf16, &[rows, k], &random_values(1, (rows * k) as usize));
    let x = x.view(&Access::new(0, Region::whole(&[rows, k])));
    best(threads, |thread| {
        let mut out = AlignedBytes::new(rows as usize * columns as usize * 4);
        let out = out.bytes_mut().as_mut_ptr() as u64;
        for copy in 0..copies {
            let first = layout::tiled_bytes(columns as usize, k as usize, DType::Bf16) * thread;
            let task = task(&x, weights + (copy * matrix + first) as u64, rows, k, columns, out);
            run_task("linear", &task, &mut TestBatch::rows(rows), &TestRank::default(), Call::Run);
        }
    }) / copies as u32
}

fn filled(bytes: usize) -> AlignedBytes {
    let mut memory = AlignedBytes::new(bytes);
    huge_pages(&mut memory);
    for (i, pair) in memory.bytes_mut().chunks_exact_mut(2).enumerate() {
        pair.copy_from_slice(&(0x3c00u16 + (i as u16 & 0x1ff)).to_ne_bytes());
    }
    memory
}

fn decode(threads: usize, rows: u32, k: u32, n: u32) {
    let matrix = layout::tiled_bytes(n as usize, k as usize, DType::Bf16);
    let copies = OUT_OF_CACHE.div_ceil(matrix);
    let memory = filled(matrix * copies);
    let time = run(threads, rows, k, n, &memory).as_secs_f64();
    let share = memory.bytes().len() / threads / 64 * 64;
    let read = best(threads, |thread| {
        std::hint::black_box(read_memory(
            &memory.bytes()[share * thread..share * (thread + 1)],
            ReadPattern::ALL[0],
        ));
    })
    .as_secs_f64()
        / copies as f64;
    let rate = |t: f64| matrix as f64 / t / 1e9;
    println!(
        "decode {rows:2} x {k} x {n}: {:7.3} ms {:5.1} GB/s, {:3.0} % of a plain read ({:.1} GB/s)",
        time * 1e3,
        rate(time),
        100.0 * read / time,
        rate(read)
    );
}

fn prefill(threads: usize, rows: u32, k: u32, n: u32) {
    let memory = filled(layout::tiled_bytes(n as usize, k as usize, DType::Bf16));
    let time = run(threads, rows, k, n, &memory).as_secs_f64();
    let flops = 2.0 * f64::from(rows) * f64::from(k) * f64::from(n);
    println!("prefill {rows} x {k} x {n}: {:7.3} ms {:6.1} GFLOP/s", time * 1e3, flops / time / 1e9);
}

fn pack(rows: usize, k: usize) {
    println!();
    for (from, to) in [(DType::Bf16, DType::Bf16), (DType::F32, DType::Bf16), (DType::F16, DType::F16)] {
        let source = vec![1u8; rows * k * from.size() as usize];
        let size = layout::tiled_bytes(rows, k, to);
        let mut packed = AlignedBytes::new(size);
        let time = (0..REPEATS).map(|_| {
            let start = Instant::now();
            layout::pack_rows(packed.bytes_mut(), to, k, 0, &source, from, k, 0..k, rows);
            start.elapsed()
        });
        let time = time.min().unwrap_or_default();
        println!("pack {from} to {to}: {:.1} GB/s of source", source.len() as f64 / time.as_secs_f64() / 1e9);
    }
}

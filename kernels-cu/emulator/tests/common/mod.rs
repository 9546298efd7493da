//! Runs a kernel of a few instructions.

use emulator::{Allocations, Grid, Launch, Program};
use std::sync::Arc;

/// A kernel around `body`: `%rd0` points to its input, `%rd1` to its output, `%r0` is the thread's number. It returns at the
/// end of `body`.
pub fn program(registers: &str, body: &str) -> Program {
    let text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n\
         .extern .shared .align 1024 .b8 room[];\n\
         .visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)\n.maxntid 1024, 1, 1\n{{\n\
         .reg .pred %p<32>; .reg .b16 %h<32>; .reg .f32 %f<192>; .reg .b32 %r<64>; .reg .b64 %rd<64>; .reg .f64 %fd<16>;\n\
         {registers}\n\
         ld.param.u64 %rd0, [k_param_0]; ld.param.u64 %rd1, [k_param_1]; mov.u32 %r0, %tid.x;\n\
         {body}\nret;\n}}\n"
    );
    Program::new(&text).expect("PTX")
}

#[allow(dead_code, reason = "not all tests run in one order only")]
/// The `words` words that `blocks` blocks of `threads` threads write for `input`.
pub fn run(
    program: Program,
    blocks: u32,
    threads: u32,
    input: &[u32],
    words: usize,
) -> Result<Vec<u32>, String> {
    run_seeded(program, blocks, threads, input, words, 1)
}

/// The same, in an order that `seed` decides.
pub fn run_seeded(
    program: Program,
    blocks: u32,
    threads: u32,
    input: &[u32],
    words: usize,
    seed: u64,
) -> Result<Vec<u32>, String> {
    // Aligned to 16 bytes, as copies require.
    let aligned = |words: &[u32]| -> Vec<u128> {
        words
            .chunks(4)
            .map(|c| c.iter().enumerate().fold(0, |all, (i, w)| all | u128::from(*w) << (32 * i)))
            .collect()
    };
    let mut read = aligned(input);
    let mut written = aligned(&vec![0xA5A5_A5A5; words]);
    let allocations = Arc::new(Allocations::default());
    let (from, to) = (read.as_mut_ptr() as u64, written.as_mut_ptr() as u64);
    allocations.insert(from, input.len() as u64 * 4);
    allocations.insert(to, words as u64 * 4);
    let arguments = [from, to].map(|address| address.to_le_bytes().to_vec()).to_vec();
    let grid = Grid { blocks, threads, shared_bytes: 64 << 10, cooperative: true };
    Launch::new(Arc::new(program), "k", grid, arguments, allocations, seed)?.run(&|| false)?;
    let words_of = |v: &u128| (0..4).map(|i| (v >> (32 * i)) as u32).collect::<Vec<_>>();
    Ok(written.iter().flat_map(words_of).take(words).collect())
}

/// A sequence that looks random.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 ^ (self.0 >> 12) as u32
    }

    /// Between -1 and 1.
    #[allow(dead_code, reason = "not all tests draw numbers of this kind")]
    pub fn small(&mut self) -> f32 {
        (self.word() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

//! What the batch step reads and writes: configuration, batch state, outputs.

use crate::error::Result;
use crate::memory::{HugeBuffer, Layout, Pinned};
use crate::plan::{BatchPlan, Mode};
use crate::rank::Slot;
use kernels_cu::abi;
use std::collections::HashMap;
use taskgraph::task_graph::TaskGraph;

/// Owns the batch structs and the one buffer that their pointers go to.
pub struct BatchMemory {
    /// Holds all arrays.
    pub control: HugeBuffer,
    /// Constant for a launch.
    pub config: Pinned<abi::mpk_batch_config>,
    /// What an iteration works on.
    pub batch: Pinned<abi::mpk_batch>,
    /// Results.
    pub batch_output: Pinned<abi::mpk_batch_output>,
    /// The batch step's own state.
    pub private: *mut u8,
    /// Where each request's tokens begin in the output arrays.
    pub first_output: Vec<usize>,
}

impl BatchMemory {
    /// Lays out and fills everything for `plan`. Tokens chosen by the kernel go to the tensors
    /// `batch.next_token`, `batch.top_token` and `batch.top_logprob` where a graph has them.
    pub fn new(
        rank: u32,
        graphs: &[TaskGraph],
        plan: &BatchPlan,
        shared: &HashMap<String, Slot>,
    ) -> Result<BatchMemory> {
        let max_rows = graphs.iter().map(|g| g.capacity.rows).max().unwrap_or(1).max(1);
        let max_batch =
            plan.max_batch.max(graphs.iter().map(|g| g.capacity.active).max().unwrap_or(1)).max(1);
        let pages_per_slot = plan.max_seq_len.div_ceil(plan.page_size.max(1)).max(1);
        let prompt_tokens: Vec<i32> = plan.requests.iter().flat_map(|r| r.prompt.iter().copied()).collect();
        let outputs: usize = plan.requests.iter().map(|r| r.max_new_tokens as usize).sum();
        let (generate, fixed_iterations) = match plan.mode {
            Mode::Generate => (1, 0),
            Mode::Fixed(iterations) => (0, iterations),
        };
        let mut config = abi::mpk_batch_config {
            max_batch,
            max_seq_len: plan.max_seq_len,
            page_size: plan.page_size,
            num_pages: plan.num_pages,
            pages_per_slot,
            max_rows,
            num_requests: plan.requests.len() as u32,
            num_eos: plan.eos.len() as u32,
            num_admissions_capacity: plan.requests.len() as u32,
            top_k: plan.top_k,
            generate,
            fixed_iterations,
            prompt_tokens: std::ptr::null(),
            requests: std::ptr::null(),
            eos: std::ptr::null(),
            admissions: std::ptr::null(),
            num_admissions: std::ptr::null(),
        };
        // SAFETY: reads only the sizes in `config`.
        let private_bytes = unsafe { abi::mpk_batch_private_bytes(&config) };

        let (rows, slots, top) = (u64::from(max_rows), u64::from(max_batch), u64::from(plan.top_k.max(1)));
        let mut layout = Layout::default();
        let mut words = |count: u64| layout.reserve(count.max(1) * 4, 64);
        let prompts_at = words(prompt_tokens.len() as u64);
        let eos_at = words(plan.eos.len() as u64);
        let num_admissions_at = words(1);
        let row_at = [words(rows), words(rows), words(rows)];
        let slot_at: [u64; 6] = std::array::from_fn(|_| words(slots));
        let page_table_at = words(slots * u64::from(pages_per_slot));
        let tokens_at = words(outputs as u64);
        let top_at = [words(outputs as u64 * top), words(outputs as u64 * top)];
        let next_at = [words(slots), words(slots * top), words(slots * top)];
        let struct_bytes = |count: usize, size: usize| (count.max(1) * size) as u64;
        let requests_at =
            layout.reserve(struct_bytes(plan.requests.len(), size_of::<abi::mpk_request>()), 64);
        let admissions_at =
            layout.reserve(struct_bytes(plan.requests.len(), size_of::<abi::mpk_admission>()), 64);
        let request_outputs_at =
            layout.reserve(struct_bytes(plan.requests.len(), size_of::<abi::mpk_request_output>()), 64);
        let private_at = layout.reserve(private_bytes, 64);
        let control = HugeBuffer::new(rank, "the batch state", layout.bytes() as usize)?;
        // SAFETY: every offset lies inside the buffer by the layout.
        let at = |offset: u64| unsafe { control.as_ptr().add(offset as usize) };
        let put = |offset: u64, values: &[i32]| {
            // SAFETY: room for `values` was reserved at `offset`, 64-byte aligned, and nobody else uses it yet.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), at(offset).cast(), values.len()) };
        };

        put(prompts_at, &prompt_tokens);
        put(eos_at, &plan.eos);
        put(num_admissions_at, &[plan.requests.len() as i32]);
        let (mut first_prompt, mut first_output) = (0u32, 0u32);
        let mut firsts = Vec::new();
        for (index, request) in plan.requests.iter().enumerate() {
            firsts.push(first_output as usize);
            let entry = abi::mpk_request {
                first_prompt_token: first_prompt,
                num_prompt_tokens: request.prompt.len() as u32,
                max_new_tokens: request.max_new_tokens,
                first_output,
            };
            let admission =
                abi::mpk_admission { iteration: 1, kind: abi::MPK_ADMIT, request: index as u32, reserved: 0 };
            // SAFETY: `index` is below the number of entries reserved.
            unsafe {
                at(requests_at).cast::<abi::mpk_request>().add(index).write(entry);
                at(admissions_at).cast::<abi::mpk_admission>().add(index).write(admission);
            }
            first_prompt += request.prompt.len() as u32;
            first_output += request.max_new_tokens;
        }
        config.prompt_tokens = at(prompts_at).cast();
        config.requests = at(requests_at).cast();
        config.eos = at(eos_at).cast();
        config.admissions = at(admissions_at).cast();
        config.num_admissions = at(num_admissions_at).cast();

        let chosen = |name: &str, own: u64| shared.get(name).map_or(at(own), |slot| slot.address);
        // SAFETY: all-zero is a valid mpk_batch (null pointers, no rows).
        let mut batch: abi::mpk_batch = unsafe { std::mem::zeroed() };
        batch.row_token = at(row_at[0]).cast();
        batch.row_active = at(row_at[1]).cast();
        batch.row_position = at(row_at[2]).cast();
        batch.active_slot = at(slot_at[0]).cast();
        batch.active_first_row = at(slot_at[1]).cast();
        batch.active_num_rows = at(slot_at[2]).cast();
        batch.active_context = at(slot_at[3]).cast();
        batch.sample_row = at(slot_at[4]).cast();
        batch.sample_active = at(slot_at[5]).cast();
        batch.page_table = at(page_table_at).cast();
        batch.next_token = chosen("batch.next_token", next_at[0]).cast();
        batch.top_token = chosen("batch.top_token", next_at[1]).cast();
        batch.top_logprob = chosen("batch.top_logprob", next_at[2]).cast();
        if generate == 0 {
            let capacity = graphs[0].capacity;
            let samples = capacity.samples.min(capacity.rows);
            batch.num_rows = capacity.rows;
            batch.num_samples = samples;
            batch.num_active = 1;
            batch.prompt_rows = capacity.rows;
            if let Some(request) = plan.requests.first() {
                put(row_at[0], &request.prompt[..request.prompt.len().min(capacity.rows as usize)]);
            }
            put(row_at[2], &(0..capacity.rows as i32).collect::<Vec<_>>());
            put(slot_at[2], &[capacity.rows as i32]);
            put(slot_at[4], &((capacity.rows - samples) as i32..capacity.rows as i32).collect::<Vec<_>>());
            put(page_table_at, &(0..pages_per_slot.min(plan.num_pages) as i32).collect::<Vec<_>>());
        }

        let batch_output = abi::mpk_batch_output {
            requests: at(request_outputs_at).cast(),
            tokens: at(tokens_at).cast(),
            top_tokens: at(top_at[0]).cast(),
            top_logprobs: at(top_at[1]).cast(),
            prefill_ns: 0,
            decode_ns: 0,
            prefill_iterations: 0,
            decode_steps: 0,
        };
        let private = at(private_at);
        Ok(BatchMemory {
            control,
            config: Pinned::new(config),
            batch: Pinned::new(batch),
            batch_output: Pinned::new(batch_output),
            private,
            first_output: firsts,
        })
    }
}

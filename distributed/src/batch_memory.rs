//! What the batch step reads and writes: configuration, batch state and its own state.

use crate::image::Image;
use crate::memory::Layout;
use crate::outputs::Outputs;
use crate::plan::{BatchPlan, Mode};
use crate::tensors::{Slot, find};
use kernels_cu::abi;
use taskgraph::task_graph::TaskGraph;

/// Where the batch structs and their arrays lie in an image.
pub(crate) struct BatchMemory {
    config: abi::mpk_batch_config,
    config_at: u64,
    batch_at: u64,
    prompts: u64,
    eos: u64,
    num_admissions: u64,
    rows: [u64; 3],
    slots: [u64; 6],
    page_table: u64,
    sampling: u64,
    next: [u64; 3],
    requests: u64,
    admissions: u64,
    private: u64,
}

/// Addresses of what [`BatchMemory::write`] wrote.
pub(crate) struct BatchAddresses {
    pub config: u64,
    pub batch: u64,
    pub private: u64,
}

impl BatchMemory {
    /// Reserves room for everything that `plan` needs.
    pub fn reserve(graphs: &[TaskGraph], plan: &BatchPlan, layout: &mut Layout) -> BatchMemory {
        let max_rows = graphs.iter().map(|g| g.capacity.rows).max().unwrap_or(1).max(1);
        let max_batch =
            plan.max_batch.max(graphs.iter().map(|g| g.capacity.active).max().unwrap_or(1)).max(1);
        let pages_per_slot = plan.max_seq_len.div_ceil(plan.page_size.max(1)).max(1);
        let prompt_tokens: u64 = plan.requests.iter().map(|r| r.prompt.len() as u64).sum();
        let (generate, fixed_iterations) = match plan.mode {
            Mode::Generate => (1, 0),
            Mode::Fixed(iterations) => (0, iterations),
        };
        let config = abi::mpk_batch_config {
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
        let requests = plan.requests.len().max(1) as u64;
        let mut words = |count: u64| layout.reserve(count.max(1) * 4, 64);
        BatchMemory {
            config,
            prompts: words(prompt_tokens),
            eos: words(plan.eos.len() as u64),
            num_admissions: words(1),
            rows: [words(rows), words(rows), words(rows)],
            slots: std::array::from_fn(|_| words(slots)),
            page_table: words(slots * u64::from(pages_per_slot)),
            next: [words(slots), words(slots * top), words(slots * top)],
            sampling: layout.reserve(slots * size_of::<abi::mpk_sampling>() as u64, 64),
            requests: layout.reserve(requests * size_of::<abi::mpk_request>() as u64, 64),
            admissions: layout.reserve(requests * size_of::<abi::mpk_admission>() as u64, 64),
            config_at: layout.reserve(size_of::<abi::mpk_batch_config>() as u64, 64),
            batch_at: layout.reserve(size_of::<abi::mpk_batch>() as u64, 64),
            private: layout.reserve(private_bytes, 64),
        }
    }

    /// Writes everything. Tokens chosen by the kernel go to the tensors `batch.next_token`, `batch.top_token` and
    /// `batch.top_logprob` where a graph has them.
    pub fn write(
        &self,
        graphs: &[TaskGraph],
        slots: &[Vec<Slot>],
        plan: &BatchPlan,
        outputs: &Outputs,
        image: &mut Image,
    ) -> BatchAddresses {
        let prompt_tokens: Vec<i32> = plan.requests.iter().flat_map(|r| r.prompt.iter().copied()).collect();
        image.put(self.prompts, &prompt_tokens);
        image.put(self.eos, &plan.eos);
        image.put(self.num_admissions, &[plan.requests.len() as u32]);
        let mut first_prompt = 0u32;
        let (mut requests, mut admissions) = (Vec::new(), Vec::new());
        for (index, request) in plan.requests.iter().enumerate() {
            requests.push(abi::mpk_request {
                first_prompt_token: first_prompt,
                num_prompt_tokens: request.prompt.len() as u32,
                max_new_tokens: request.max_new_tokens,
                first_output: outputs.first(index) as u32,
                sampling: request.sampling.to_abi(request.prompt.len() as u32),
            });
            admissions.push(abi::mpk_admission {
                iteration: 1,
                kind: abi::MPK_ADMIT,
                request: index as u32,
                reserved: 0,
            });
            first_prompt += request.prompt.len() as u32;
        }
        image.put(self.requests, &requests);
        image.put(self.admissions, &admissions);
        let config = abi::mpk_batch_config {
            prompt_tokens: image.address(self.prompts) as *const _,
            requests: image.address(self.requests) as *const _,
            eos: image.address(self.eos) as *const _,
            admissions: image.address(self.admissions) as *const _,
            num_admissions: image.address(self.num_admissions) as *const _,
            ..self.config
        };
        let chosen = |name: &str, own: u64| {
            find(graphs, slots, name).map_or(image.address(own), |slot| slot.address) as *mut i32
        };
        // SAFETY: all-zero is a valid mpk_batch (null pointers, no rows).
        let mut batch: abi::mpk_batch = unsafe { std::mem::zeroed() };
        let at = |offset: u64| image.address(offset) as *mut i32;
        batch.row_token = at(self.rows[0]);
        batch.row_active = at(self.rows[1]);
        batch.row_position = at(self.rows[2]);
        batch.active_slot = at(self.slots[0]);
        batch.active_first_row = at(self.slots[1]);
        batch.active_num_rows = at(self.slots[2]);
        batch.active_context = at(self.slots[3]);
        batch.sample_row = at(self.slots[4]);
        batch.sample_active = at(self.slots[5]);
        batch.page_table = at(self.page_table);
        batch.sampling = image.address(self.sampling) as *mut _;
        batch.next_token = chosen("batch.next_token", self.next[0]);
        batch.top_token = chosen("batch.top_token", self.next[1]);
        batch.top_logprob = chosen("batch.top_logprob", self.next[2]).cast();
        if let (0, Some(graph)) = (self.config.generate, graphs.first()) {
            self.fixed_batch(graph, plan, &mut batch, image);
        }
        image.put(self.config_at, &[config]);
        image.put(self.batch_at, &[batch]);
        BatchAddresses {
            config: image.address(self.config_at),
            batch: image.address(self.batch_at),
            private: image.address(self.private),
        }
    }

    /// One slot with all rows of `graph` in use, at the positions 0, 1, ...
    fn fixed_batch(
        &self,
        graph: &TaskGraph,
        plan: &BatchPlan,
        batch: &mut abi::mpk_batch,
        image: &mut Image,
    ) {
        let rows = graph.capacity.rows;
        let samples = graph.capacity.samples.min(rows);
        batch.num_rows = rows;
        batch.num_samples = samples;
        batch.num_active = 1;
        batch.prompt_rows = rows;
        if let Some(request) = plan.requests.first() {
            image.put(self.rows[0], &request.prompt[..request.prompt.len().min(rows as usize)]);
        }
        let positions = |range: std::ops::Range<u32>| range.map(|i| i as i32).collect::<Vec<_>>();
        image.put(self.rows[2], &positions(0..rows));
        image.put(self.slots[2], &[rows as i32]);
        image.put(self.slots[4], &positions(rows - samples..rows));
        image.put(self.page_table, &positions(0..self.config.pages_per_slot.min(plan.num_pages)));
    }
}

//! The memory of the batch step: configuration, batch state, and its private state.

use crate::image::Image;
use crate::memory::Layout;
use crate::outputs::Outputs;
use crate::plan::{BatchPlan, Mode};
use crate::tensors::{Slot, find};
use kernels_cu::abi;
use taskgraph::task_graph::TaskGraph;

/// The places of the batch structs and their arrays in an image.
pub(crate) struct BatchMemory {
    config: abi::mpk_batch_config,
    config_at: u64,
    batch_at: u64,
    tokens: u64,
    eos: u64,
    rows: [u64; 3],
    slots: [u64; 5],
    samples: [u64; 2],
    page_table: u64,
    sampling: u64,
    next: [u64; 3],
    requests: u64,
    admissions: u64,
    page_keys: u64,
    private: u64,
}

/// Offsets of the tables that a host fills while the kernel runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TablePlaces {
    /// One `mpk_request` per number.
    pub requests: u64,
    /// `i32`: prompts and new tokens.
    pub tokens: u64,
    /// `ring` entries of type `mpk_admission`.
    pub admissions: u64,
    /// A power of two.
    pub ring: u32,
    /// `mpk_page_key`: [`first_page_key`] of the number of tokens, plus one. None without a prefix cache.
    pub page_keys: u64,
    pub page_size: u32,
}

/// `MPK_FIRST_PAGE_KEY`: index of the first key of a prompt's pages.
pub(crate) fn first_page_key(first_token: u32, page_size: u32) -> u32 {
    first_token.div_ceil(page_size)
}

/// Addresses of the structs that [`BatchMemory::write`] wrote.
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
        let max_samples = graphs.iter().map(|g| g.capacity.samples).max().unwrap_or(1).max(max_batch);
        let (generate, fixed_iterations, serve) = match plan.mode {
            Mode::Fixed { iterations, .. } => (0, iterations, None),
            Mode::Serve(serve) => (1, 0, Some(serve)),
        };
        let num_requests = serve.map_or(1, |serve| serve.requests).max(1);
        let tokens = serve.map_or(0, |serve| u64::from(serve.tokens));
        // One cancel per request, and the stop.
        let entries = num_requests.saturating_mul(2).saturating_add(1);
        let idle_exit = serve.and_then(|serve| serve.idle_exit);
        let cached = serve.filter(|serve| serve.prefix_cache && plan.page_size > 0);
        let num_page_keys = cached.map_or(0, |serve| first_page_key(serve.tokens, plan.page_size) + 1);
        let config = abi::mpk_batch_config {
            max_batch,
            max_seq_len: plan.max_seq_len,
            page_size: plan.page_size,
            num_pages: plan.num_pages,
            pages_per_slot,
            max_rows,
            max_samples,
            num_requests,
            num_eos: plan.eos.len() as u32,
            admission_ring: entries.next_power_of_two(),
            top_k: plan.top_k,
            generate,
            fixed_iterations,
            prefill_rows: serve.map_or(0, |serve| serve.prefill_rows),
            on_demand: u32::from(serve.is_some_and(|serve| serve.kv_on_demand)),
            max_drafts: 0,
            num_page_keys,
            reserved: 0,
            idle_exit_ns: idle_exit.map_or(0, |time| (time.as_nanos() as u64).max(1)),
            tokens: std::ptr::null_mut(),
            requests: std::ptr::null(),
            eos: std::ptr::null(),
            page_keys: std::ptr::null(),
            admissions: std::ptr::null(),
            num_admissions: std::ptr::null(),
        };
        // SAFETY: only reads the sizes in `config`.
        let private_bytes = unsafe { abi::mpk_batch_private_bytes(&config) };
        let (rows, slots, top) = (u64::from(max_rows), u64::from(max_batch), u64::from(plan.top_k.max(1)));
        let samples = u64::from(max_samples);
        let (requests, ring) = (u64::from(num_requests), u64::from(config.admission_ring));
        let mut words = |count: u64| layout.reserve(count.max(1) * 4, 64);
        BatchMemory {
            config,
            tokens: words(tokens),
            eos: words(plan.eos.len() as u64),
            rows: [words(rows), words(rows), words(rows)],
            slots: std::array::from_fn(|_| words(slots)),
            samples: std::array::from_fn(|_| words(samples)),
            page_table: words(slots * u64::from(pages_per_slot)),
            next: [words(samples), words(samples * top), words(samples * top)],
            sampling: layout.reserve(slots * size_of::<abi::mpk_sampling>() as u64, 64),
            requests: layout.reserve(requests * size_of::<abi::mpk_request>() as u64, 64),
            admissions: layout.reserve(ring * size_of::<abi::mpk_admission>() as u64, 64),
            page_keys: layout.reserve(u64::from(num_page_keys) * size_of::<abi::mpk_page_key>() as u64, 64),
            config_at: layout.reserve(size_of::<abi::mpk_batch_config>() as u64, 64),
            batch_at: layout.reserve(size_of::<abi::mpk_batch>() as u64, 64),
            private: layout.reserve(private_bytes, 64),
        }
    }

    /// Writes everything. The kernel writes its tokens to the tensors `batch.next_token`, `batch.top_token`, `batch.top_logprob`
    /// and `batch.token_logprob`, if a graph has them.
    pub fn write(
        &self,
        graphs: &[TaskGraph],
        slots: &[Vec<Slot>],
        plan: &BatchPlan,
        outputs: &Outputs,
        image: &mut Image,
    ) -> BatchAddresses {
        image.put(self.eos, &plan.eos);
        let config = abi::mpk_batch_config {
            tokens: image.address(self.tokens) as *mut _,
            requests: image.address(self.requests) as *const _,
            eos: image.address(self.eos) as *const _,
            page_keys: image.address(self.page_keys) as *const _,
            admissions: image.address(self.admissions) as *const _,
            num_admissions: outputs.num_admissions() as *const _,
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
        batch.active_num_samples = at(self.slots[4]);
        batch.sample_row = at(self.samples[0]);
        batch.sample_active = at(self.samples[1]);
        batch.page_table = at(self.page_table);
        batch.sampling = image.address(self.sampling) as *mut _;
        batch.next_token = chosen("batch.next_token", self.next[0]);
        batch.top_token = chosen("batch.top_token", self.next[1]);
        batch.top_logprob = chosen("batch.top_logprob", self.next[2]).cast();
        batch.token_logprob = find(graphs, slots, "batch.token_logprob")
            .map_or(std::ptr::null_mut(), |slot| slot.address as *mut f32);
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

    /// The tables that a host fills while the kernel runs.
    pub fn table(&self) -> TablePlaces {
        TablePlaces {
            requests: self.requests,
            tokens: self.tokens,
            admissions: self.admissions,
            ring: self.config.admission_ring,
            page_keys: self.page_keys,
            page_size: self.config.page_size,
        }
    }

    /// All rows of `graph` in use, as sequences at the positions 0, 1, ... With several sequences, slots are not in the
    /// order of the sequences and pages are not consecutive, as in a batch whose requests have come and gone.
    fn fixed_batch(
        &self,
        graph: &TaskGraph,
        plan: &BatchPlan,
        batch: &mut abi::mpk_batch,
        image: &mut Image,
    ) {
        let Mode::Fixed { tokens, sequences, .. } = &plan.mode else { return };
        let rows = graph.capacity.rows;
        let samples = graph.capacity.samples.min(rows);
        let active = sequences.len() as u32;
        batch.num_rows = rows;
        batch.num_samples = samples;
        batch.num_active = active;
        batch.prompt_rows = rows;
        let sequence_of_row: Vec<i32> =
            (0..).zip(sequences).flat_map(|(sequence, &rows)| (0..rows).map(move |_| sequence)).collect();
        let numbers = |range: std::ops::Range<u32>| range.map(|i| i as i32).collect::<Vec<_>>();
        let first_rows: Vec<i32> = sequences
            .iter()
            .scan(0, |next, &rows| Some(std::mem::replace(next, *next + rows as i32)))
            .collect();
        image.put(self.rows[0], &tokens[..tokens.len().min(rows as usize)]);
        image.put(self.rows[1], &sequence_of_row);
        image.put(self.rows[2], &sequences.iter().flat_map(|&rows| numbers(0..rows)).collect::<Vec<_>>());
        image.put(self.slots[0], &(0..active).rev().map(|slot| slot as i32).collect::<Vec<_>>());
        image.put(self.slots[1], &first_rows);
        image.put(self.slots[2], &sequences.iter().map(|&rows| rows as i32).collect::<Vec<_>>());
        image.put(self.samples[0], &numbers(rows - samples..rows));
        image.put(self.samples[1], &sequence_of_row[(rows - samples) as usize..]);
        let pages = self.config.pages_per_slot.min(plan.num_pages / active.max(1));
        // There are no requests that could want fewer log-probabilities than the graph has.
        let all = abi::mpk_sampling { logprobs: u32::MAX, ..Default::default() };
        image.put(self.sampling, &vec![all; active as usize]);
        let slot_pages = |slot: u32| (0..pages).map(move |page| (page * active + slot) as i32);
        image.put(self.page_table, &(0..active).flat_map(slot_pages).collect::<Vec<_>>());
    }
}

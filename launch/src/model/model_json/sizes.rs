//! The sizes that follow from model.json and the model's configuration together.

use super::file::{
    DEFAULT_MAX_SEQ_LEN, DEFAULT_PAGE_SIZE, DEFAULT_PREFILL_CHUNK, DEFAULT_WIDE_PREFILL_CHUNK, ModelJson,
};
use crate::model::error::InputError;
use crate::model::hf_config::{ModelConfig, RopeScaling};
use taskgraph::Target;

/// Sizes of batch, sequence and KV cache of a run. All products that the runtime computes from them are known not to overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Number of slots: the maximum number of requests that run at once.
    pub max_batch: u32,
    /// Maximum number of tokens of a request, prompt and answer together.
    pub max_seq_len: u32,
    /// Positions in a page of the KV cache, a power of two.
    pub page_size: u32,
    /// Number of pages for a request of `max_seq_len` tokens.
    pub pages_per_slot: u32,
    /// Pages of the KV cache, shared by all slots.
    pub num_pages: u32,
    /// Maximum number of rows of an iteration with prompt tokens.
    pub prefill_chunk: u32,
}

impl Sizes {
    /// Prompt rows of an iteration in which other requests generate, according to `runtime.prefill_share`. 0 means no limit.
    pub fn prompt_rows(&self, share: Option<f64>) -> u32 {
        match share {
            Some(share) if share < 1.0 => (f64::from(self.prefill_chunk) * share).ceil().max(1.0) as u32,
            _ => 0,
        }
    }
}

impl ModelJson {
    /// The sizes for a run of `config`, with defaults filled in.
    ///
    /// # Errors
    /// A product overflows.
    pub fn sizes(&self, config: &ModelConfig) -> Result<Sizes, InputError> {
        let default = DEFAULT_MAX_SEQ_LEN.min(config.max_position_embeddings);
        let sizes = self.sizes_for(self.max_seq_len.unwrap_or(default))?;
        self.check_products(&sizes, config)?;
        Ok(sizes)
    }

    /// [`ModelJson::sizes`] on `target`. If products of many rows use wide tiles, the default chunk is longer, but not longer
    /// than all requests together. Warns of a length that the model may not suit.
    ///
    /// # Errors
    /// Those of [`ModelJson::sizes`].
    pub fn sizes_on(&self, config: &ModelConfig, target: &Target) -> Result<Sizes, InputError> {
        let mut sizes = self.sizes(config)?;
        self.warn(config, &sizes);
        if target.wide && self.runtime.prefill_chunk.is_none() {
            let useful = u64::from(sizes.max_batch) * u64::from(sizes.max_seq_len);
            let chunk = useful.next_power_of_two().min(u64::from(DEFAULT_WIDE_PREFILL_CHUNK)) as u32;
            sizes.prefill_chunk = chunk.max(sizes.prefill_chunk);
            self.check_products(&sizes, config)?;
        }
        Ok(sizes)
    }

    /// Warns of a sequence longer than the model was trained for.
    fn warn(&self, config: &ModelConfig, sizes: &Sizes) {
        let (length, positions) = (sizes.max_seq_len, config.max_position_embeddings);
        let (longest, scaled) = match &config.rope.scaling {
            RopeScaling::Yarn(yarn) if yarn.longest() > positions => {
                (yarn.longest(), format!(", which yarn extends to {}", yarn.longest()))
            }
            _ => (positions, String::new()),
        };
        if length > longest {
            tracing::warn!(
                "max_seq_len = {length} is more than the model's max_position_embeddings = {positions}{scaled}"
            );
        }
    }

    /// The sizes without a model configuration (for a user graph), or if its limits do not matter.
    ///
    /// # Errors
    /// A product overflows.
    pub fn sizes_for(&self, max_seq_len: u32) -> Result<Sizes, InputError> {
        let max_batch = self.max_batch();
        let page_size = self.page_size.unwrap_or(DEFAULT_PAGE_SIZE);
        let pages_per_slot = max_seq_len.div_ceil(page_size);
        // The positions of all slots must fit in u32 for any kv_pages, because regions are counted in them.
        let computation = format!("max_batch = {max_batch} x max_seq_len = {max_seq_len} tokens");
        self.fits_u32(
            "the number of tokens of a full batch",
            &computation,
            &[u64::from(max_batch), u64::from(max_seq_len)],
        )?;
        let num_pages = match self.runtime.kv_pages {
            Some(pages) => pages,
            None => {
                let computation = format!("max_batch = {max_batch} x {pages_per_slot} pages of a request");
                self.fits_u32(
                    "the number of KV pages",
                    &computation,
                    &[u64::from(max_batch), u64::from(pages_per_slot)],
                )?
            }
        };
        let prefill_chunk = self.runtime.prefill_chunk.unwrap_or_else(|| {
            // More rows than the decode graph of max_batch has. Otherwise prompts would have no graph of their own.
            max_batch.saturating_add(1).next_power_of_two().max(DEFAULT_PREFILL_CHUNK)
        });
        Ok(Sizes { max_batch, max_seq_len, page_size, pages_per_slot, num_pages, prefill_chunk })
    }

    fn check_products(&self, sizes: &Sizes, config: &ModelConfig) -> Result<(), InputError> {
        let Sizes { page_size, num_pages, max_seq_len, max_batch, .. } = *sizes;
        let (kv_heads, head_dim) = (config.num_kv_heads, config.head_dim);
        self.fits_u32(
            "the elements of a KV page",
            &format!("2 x {kv_heads} KV heads x page_size = {page_size} x head_dim = {head_dim}"),
            &[2, kv_heads.into(), page_size.into(), head_dim.into()],
        )?;
        let layers = config.num_layers;
        self.fits_bytes(
            "the KV cache's size",
            &format!(
                "{layers} layers x {num_pages} pages x 2 x {kv_heads} KV heads x page_size = {page_size} \
                 x head_dim = {head_dim} x 4 bytes"
            ),
            &[layers.into(), num_pages.into(), 2, kv_heads.into(), page_size.into(), head_dim.into(), 4],
        )?;
        self.fits_bytes(
            "the rope table's size",
            &format!("max_seq_len = {max_seq_len} x head_dim = {head_dim} x 4 bytes"),
            &[max_seq_len.into(), head_dim.into(), 4],
        )?;
        let widest = config.widest_row();
        let rows = sizes.prefill_chunk.max(max_batch);
        self.fits_bytes(
            "an activation's size",
            &format!("{rows} rows x {widest} columns x 4 bytes"),
            &[rows.into(), widest, 4],
        )?;
        Ok(())
    }

    fn fits_u32(&self, what: &str, computation: &str, factors: &[u64]) -> Result<u32, InputError> {
        product(factors).and_then(|v| u32::try_from(v).ok()).ok_or_else(|| self.overflow(what, computation))
    }

    fn fits_bytes(&self, what: &str, computation: &str, factors: &[u64]) -> Result<u64, InputError> {
        product(factors)
            .filter(|&v| isize::try_from(v).is_ok())
            .ok_or_else(|| self.overflow(what, computation))
    }

    fn overflow(&self, what: &str, computation: &str) -> InputError {
        InputError::Overflow { file: self.file(), what: what.into(), computation: computation.into() }
    }
}

fn product(factors: &[u64]) -> Option<u64> {
    factors.iter().try_fold(1u64, |product, &factor| product.checked_mul(factor))
}

//! Model families: from a checkpoint's configuration to op graphs. The set is open: a family is one file that implements
//! [`Family`], and one line in `registry.rs`, or a call of [`add`] from another crate.
//!
//! All families so far are pre-norm decoders. They differ only in what [`ModelConfig`] describes (biases, q/k norm, rope,
//! tied embeddings), so one builder serves them all.

pub mod decoder;
mod family;
mod llama;
mod mistral;
mod options;
mod qwen2;
mod qwen3;
mod registry;

use crate::model::error::InputError;
use crate::model::hf_config::{Architecture, ModelConfig, WeightDtype};
use crate::model::json::Fields;
use crate::model::model_json::{AllreduceDtype, Embedding, Sizes};
pub use family::Family;
pub use options::{GraphOptions, dtype, names};
pub use registry::{add, all};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::path::Path;
use taskgraph::op_graph::Role;
use taskgraph::{Backend, Capacity, OpGraph};

/// Reads config.json from a checkpoint's folder, and generation_config.json if it exists. `fallback_dtype` is called if
/// config.json names no dtype.
///
/// # Errors
/// A file cannot be read or is not JSON, or a field is missing, wrong, contradictory or not supported.
pub fn read_config(
    folder: &Path,
    fallback_dtype: impl FnOnce() -> Result<WeightDtype, InputError>,
) -> Result<ModelConfig, InputError> {
    ModelConfig::read_folder(folder, architecture, fallback_dtype)
}

/// Reads a configuration from the object at `place` of `file` (`""` is the whole file).
///
/// # Errors
/// Those of [`read_config`].
pub fn parse_config(
    file: &str,
    place: &str,
    config: &Map<String, Value>,
    fallback_dtype: impl FnOnce() -> Result<WeightDtype, InputError>,
) -> Result<ModelConfig, InputError> {
    ModelConfig::parse(file, place, config, architecture, fallback_dtype)
}

fn architecture(fields: &Fields<'_>) -> Result<&'static dyn Architecture, InputError> {
    registry::of(fields).map(|family| family as &dyn Architecture)
}

/// The op graph of one iteration for `capacity`.
pub fn op_graph(
    config: &ModelConfig,
    sizes: &Sizes,
    options: &GraphOptions,
    name: &str,
    capacity: Capacity,
) -> OpGraph {
    registry::of_config(config).op_graph(config, sizes, options, name, capacity)
}

/// Names and shapes of all tensors that a model with this configuration reads from its checkpoint, in the order of their
/// use. The weights of its graph consist of these tensors.
pub fn tensors(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let sizes = Sizes {
        max_batch: 1,
        max_seq_len: 1,
        page_size: 1,
        pages_per_slot: 1,
        num_pages: 1,
        prefill_chunk: 1,
    };
    let options = GraphOptions {
        embedding: Embedding::default(),
        allreduce_dtype: AllreduceDtype::default(),
        backend: Backend::Cpu,
        top_k: 0,
        ranks: 1,
        argmax_tiles: 1,
        sampling: false,
        workers: 1,
    };
    let capacity = Capacity { rows: 1, samples: 1, active: 1 };
    let graph = op_graph(config, &sizes, &options, "tensors", capacity);
    let mut seen = HashSet::new();
    let parts = graph.tensors.iter().flat_map(|tensor| match &tensor.role {
        Role::Weight { parts } => parts.as_slice(),
        _ => &[],
    });
    parts
        .filter(|part| seen.insert(part.source.as_str()))
        .map(|part| (part.source.clone(), part.dims.iter().map(|&d| d as usize).collect()))
        .collect()
}

/// Rows of the smaller prefill graphs, for prompts or ends of prompts that are shorter than the largest chunk. The time of
/// an iteration grows with the rows of its graph.
const SMALLER_CHUNKS: [u32; 3] = [256, 512, 1024];

/// Rows of additional prefill graphs on GPUs. On one rank, a graph of 64 rows reads the weights nearly as fast as
/// memory delivers them; one of 256 rows does not. On several ranks this was not measured, and ranks would not be
/// alike. Graphs of 1,280 and 1,536 rows exist because the last tiles of a product are cut according to the graph's
/// rows, so that all workers have a share (`wide_tile.rs` of the kernels). They are used only if each of `ranks` ranks
/// owns the same number of blocks of 256 rows.
fn more_chunks(options: &GraphOptions) -> impl Iterator<Item = u32> {
    let (on_gpus, ranks) = (options.backend == Backend::Cuda, options.ranks);
    let short = (ranks == 1).then_some(64);
    let long = [1280, 1536].into_iter().filter(move |rows: &u32| rows.is_multiple_of(256 * ranks));
    short.into_iter().chain(long).filter(move |_| on_gpus)
}

/// The graphs that a run needs, smallest first: decode graphs by batch class (powers of two up to `max_batch`, and
/// `max_batch`), then prefill graphs by chunk (`SMALLER_CHUNKS`, `more_chunks` and the largest).
pub fn op_graphs(config: &ModelConfig, sizes: &Sizes, options: &GraphOptions) -> Vec<OpGraph> {
    let max = sizes.max_batch;
    let mut classes: Vec<u32> =
        std::iter::successors(Some(1u32), |c| c.checked_mul(2)).take_while(|&c| c < max).collect();
    classes.push(max);
    let mut graphs: Vec<OpGraph> = classes
        .into_iter()
        .map(|n| {
            let capacity = Capacity { rows: n, samples: n, active: n };
            op_graph(config, sizes, options, &format!("decode-{n}"), capacity)
        })
        .collect();
    let largest = sizes.prefill_chunk;
    let smaller = SMALLER_CHUNKS.into_iter().chain(more_chunks(options)).filter(|&rows| rows < largest);
    let mut chunks: Vec<u32> = smaller.chain([largest]).filter(|&rows| rows > max).collect();
    chunks.sort_unstable();
    for rows in chunks {
        let capacity = Capacity { rows, samples: max, active: max };
        graphs.push(op_graph(config, sizes, options, &format!("prefill-{rows}"), capacity));
    }
    graphs
}

/// Name of the decode graph of `max_batch`. `--emit-graph` writes it as `rank-R.task_graph.json`.
pub fn main_graph_name(sizes: &Sizes) -> String {
    format!("decode-{}", sizes.max_batch)
}

/// The numbers of ranks that divide the query heads.
pub fn possible_ranks(config: &ModelConfig) -> Vec<u32> {
    (1..=config.num_heads).filter(|&n| config.num_heads.is_multiple_of(n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::model_json::Runtime;
    use taskgraph::{DType, Target};

    #[test]
    fn every_batch_up_to_the_largest_has_a_graph() {
        for max_batch in [1u32, 2, 3, 8, 12] {
            let sizes = Sizes {
                max_batch,
                max_seq_len: 64,
                page_size: 16,
                pages_per_slot: 4,
                num_pages: 4 * max_batch,
                prefill_chunk: 32,
            };
            let config = serde_json::json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 100,
                "num_hidden_layers": 2, "vocab_size": 99, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
                "torch_dtype": "bfloat16"});
            let config =
                parse_config("test", "", config.as_object().unwrap(), || Ok(WeightDtype::F32)).unwrap();
            let options = GraphOptions::new(&config, &Runtime::default(), 0, 1, &Target::cpu(2));
            let graphs = op_graphs(&config, &sizes, &options);
            let rows: Vec<u32> = graphs.iter().map(|g| g.capacity.rows).collect();
            assert!(rows.is_sorted() && rows.contains(&max_batch) && rows.last() == Some(&32), "{rows:?}");
            assert!(graphs.iter().any(|g| g.name == main_graph_name(&sizes)));
            let sizes = Sizes { prefill_chunk: 700, ..sizes };
            let rows: Vec<u32> =
                op_graphs(&config, &sizes, &options).iter().map(|g| g.capacity.rows).collect();
            assert!(rows.ends_with(&[max_batch, 256, 512, 700]), "{rows:?}");
        }
    }

    /// On GPUs there are more sizes, if each rank owns as many blocks of 256 rows as the others.
    #[test]
    fn prompts_on_gpus_have_graphs_of_more_sizes() {
        let sizes = Sizes {
            max_batch: 8,
            max_seq_len: 4096,
            page_size: 16,
            pages_per_slot: 256,
            num_pages: 2048,
            prefill_chunk: 2048,
        };
        let config = serde_json::json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 128,
            "num_hidden_layers": 1, "vocab_size": 99, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
            "torch_dtype": "bfloat16"});
        let config = parse_config("test", "", config.as_object().unwrap(), || Ok(WeightDtype::F32)).unwrap();
        let gpu = Target::cuda(taskgraph::target::device("h100").unwrap());
        let prompts = |ranks, target: &Target| -> Vec<u32> {
            let options = GraphOptions::new(&config, &Runtime::default(), 0, ranks, target);
            let rows = op_graphs(&config, &sizes, &options).into_iter().map(|graph| graph.capacity.rows);
            rows.filter(|&rows| rows > sizes.max_batch).collect()
        };
        assert_eq!(prompts(1, &gpu), [64, 256, 512, 1024, 1280, 1536, 2048]);
        assert_eq!(prompts(2, &gpu), [256, 512, 1024, 1536, 2048]);
        assert_eq!(prompts(4, &gpu), [256, 512, 1024, 2048]);
        assert_eq!(prompts(1, &Target::cpu(2)), [256, 512, 1024, 2048]);
    }

    /// By default, only prompts of many rows on several GPUs have rounded partial sums.
    #[test]
    fn the_sums_that_ranks_send_have_the_type_that_is_asked_for() {
        use taskgraph::target::device;
        let sizes = Sizes {
            max_batch: 300,
            max_seq_len: 64,
            page_size: 16,
            pages_per_slot: 4,
            num_pages: 1200,
            prefill_chunk: 700,
        };
        let config = serde_json::json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
            "num_hidden_layers": 2, "vocab_size": 99, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "torch_dtype": "bfloat16"});
        let config = parse_config("test", "", config.as_object().unwrap(), || Ok(WeightDtype::F32)).unwrap();
        let gpu = Target::cuda(device("h100").unwrap());
        // The graphs whose partial sums are bf16.
        let rounded = |allreduce_dtype, ranks, target: &Target| -> Vec<String> {
            let runtime = Runtime { allreduce_dtype, ..Runtime::default() };
            let graphs = op_graphs(&config, &sizes, &GraphOptions::new(&config, &runtime, 0, ranks, target));
            let is_rounded = |graph: &&OpGraph| {
                let products = graph.ops.iter().filter(|op| op.attrs.contains_key("output_dtype"));
                let sums = products.filter(|op| op.name.ends_with(".o") || op.name.ends_with(".down"));
                let rounded: Vec<bool> =
                    sums.map(|op| op.attrs["output_dtype"] == DType::Bf16.name()).collect();
                assert_eq!(rounded.len(), 4);
                assert!(rounded.iter().all(|r| *r == rounded[0]));
                rounded[0]
            };
            let all = graphs.len();
            let found: Vec<String> = graphs.iter().filter(is_rounded).map(|g| g.name.clone()).collect();
            if found.len() == all { vec!["all".to_string()] } else { found }
        };
        use AllreduceDtype::{Activation, Auto, F32};
        assert_eq!(rounded(Auto, 2, &gpu), ["prefill-512", "prefill-700"]);
        for (allreduce_dtype, ranks, target) in
            [(Auto, 2, &Target::cpu(2)), (Auto, 1, &gpu), (Activation, 1, &gpu), (F32, 2, &gpu)]
        {
            assert_eq!(
                rounded(allreduce_dtype, ranks, target),
                [""; 0],
                "{allreduce_dtype:?}, {ranks} ranks"
            );
        }
        assert_eq!(rounded(Activation, 2, &Target::cpu(2)), ["all"]);
    }
}

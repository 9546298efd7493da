//! Pre-norm decoders with rotary attention and a gated MLP: Llama, Mistral, Qwen2, Qwen3.

use super::options::{GraphOptions, dtype, names};
use crate::model::hf_config::ModelConfig;
use crate::model::model_json::{Embedding, Sizes};
use kernels_cu::abi::MPK_LOG_SUM_WORDS;
use kernels_cu::tasks::attention::{kv_dims, kv_region_dims, kv_sharding};
use kernels_cu::tasks::sample_partial;
use serde_json::json;
use taskgraph::op_graph::{Attrs, Role, Tensor, WeightPart};
use taskgraph::split::Part;
use taskgraph::{Capacity, DType, OpGraph, Rows, Sharding, Split, TensorId};

/// Indices of the intermediate dimension that stay together on a rank, if there are enough.
const INTERMEDIATE_UNIT: u64 = 16;

/// The op graph of one iteration for `capacity`.
pub fn op_graph(
    config: &ModelConfig,
    sizes: &Sizes,
    options: &GraphOptions,
    name: &str,
    capacity: Capacity,
) -> OpGraph {
    let mut builder = Builder { graph: OpGraph::new(name, capacity), config, dtype: dtype(config) };
    builder.decoder(sizes, options);
    builder.graph
}

struct Builder<'a> {
    graph: OpGraph,
    config: &'a ModelConfig,
    dtype: DType,
}

/// One piece of a concatenated weight: its name in the checkpoint, its rows, and how they are split over the ranks.
type Piece = (String, u64, Split);

/// Tensors that the later steps of sampling need.
struct Drawn {
    logits: TensorId,
    counts: TensorId,
    records: TensorId,
    lists: TensorId,
}

impl Builder<'_> {
    fn decoder(&mut self, sizes: &Sizes, options: &GraphOptions) {
        let c = self.config;
        let (hidden, vocabulary) = (u64::from(c.hidden_size), u64::from(c.vocab_size));
        let (heads, kv_heads) = (u64::from(c.num_heads), u64::from(c.num_kv_heads));
        let (head_dim, intermediate) = (u64::from(c.head_dim), u64::from(c.intermediate_size));
        let queries = Split::Queries { heads, head_dim };
        let key_values = Split::KeyValues { heads, kv_heads, head_dim };
        let of_vocabulary = Split::Even { unit: 16 };
        let of_intermediate = Split::Even { unit: INTERMEDIATE_UNIT };
        let partial_sums = options.partial_sums(c, self.graph.capacity);
        let partial_sums = attrs(json!({"output_dtype": partial_sums.name()}));
        let rope = self.graph.add_tensor(Tensor {
            name: names::ROPE.into(),
            dtype: DType::F32,
            dims: vec![u64::from(sizes.max_seq_len), head_dim],
            rows: Rows::Fixed,
            role: Role::Constant,
            sharding: Sharding::Replicated,
            output: false,
        });

        let parallel = options.embedding == Embedding::VocabularyParallel;
        let table = self.graph.weight(
            "model.embed_tokens.weight",
            self.dtype,
            &[vocabulary, hidden],
            parallel.then_some((0, of_vocabulary)),
        );
        let mut x = self.graph.op("embedding", "embedding", &[table], Attrs::new());
        // A worker runs its tasks in this order. Here, every worker waits for all rows of the embedding anyway.
        let counts = options.sampling.then(|| self.token_counts(sizes, options));
        for layer in 0..c.num_layers {
            let at = |name: &str| format!("model.layers.{layer}.{name}");
            let op = |name: &str| format!("layer{layer}.{name}");

            let normed = self.rmsnorm(&op("attention_norm"), x, &at("input_layernorm.weight"));
            let pieces = |kind: &str| -> Vec<Piece> {
                let piece = |p: &str, rows, split| (at(&format!("self_attn.{p}.{kind}")), rows, split);
                vec![
                    piece("q_proj", heads * head_dim, queries),
                    piece("k_proj", kv_heads * head_dim, key_values),
                    piece("v_proj", kv_heads * head_dim, key_values),
                ]
            };
            let mut inputs = vec![
                normed,
                self.concatenated(&at("self_attn.qkv_proj.weight"), pieces("weight"), Some(hidden)),
            ];
            if c.attention_bias {
                inputs.push(self.concatenated(&at("self_attn.qkv_proj.bias"), pieces("bias"), None));
            }
            let qkv = self.graph.op(&op("qkv"), "linear", &inputs, attrs(json!({"align": head_dim})));

            let mut inputs = vec![qkv, self.kv_cache(layer, sizes), rope];
            if c.qk_norm {
                for norm in ["q_norm", "k_norm"] {
                    let name = at(&format!("self_attn.{norm}.weight"));
                    inputs.push(self.graph.weight(&name, self.dtype, &[head_dim], None));
                }
            }
            let mut attention = attrs(json!({"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
                "qk_norm": c.qk_norm, "eps": c.rms_norm_eps}));
            // A window as long as the longest sequence hides nothing.
            if let Some(window) = c.window(layer).filter(|&window| window < sizes.max_seq_len) {
                attention.insert("window".into(), json!(window));
            }
            let mixed = self.graph.add_tensor(Tensor {
                name: op("attention"),
                dtype: self.dtype,
                dims: Vec::new(),
                rows: Rows::Tokens,
                role: Role::Activation,
                sharding: Sharding::Replicated,
                output: false,
            });
            self.graph.op_into(&op("attention"), "attention", &inputs, &[mixed, inputs[1]], attention);
            let o_weight = self.graph.weight(
                &at("self_attn.o_proj.weight"),
                self.dtype,
                &[hidden, heads * head_dim],
                Some((1, queries)),
            );
            let mut inputs = vec![mixed, o_weight];
            if c.output_bias {
                inputs.push(self.graph.weight(&at("self_attn.o_proj.bias"), self.dtype, &[hidden], None));
            }
            let branch = self.graph.op(&op("o"), "linear", &inputs, partial_sums.clone());
            x = self.graph.op(&op("attention_residual"), "add", &[branch, x], Attrs::new());

            let normed = self.rmsnorm(&op("mlp_norm"), x, &at("post_attention_layernorm.weight"));
            let pieces = ["gate_proj", "up_proj"]
                .map(|p| (at(&format!("mlp.{p}.weight")), intermediate, of_intermediate))
                .to_vec();
            let gate_up = self.concatenated(&at("mlp.gate_up_proj.weight"), pieces, Some(hidden));
            let gate_up = self.graph.op(&op("gate_up"), "linear", &[normed, gate_up], Attrs::new());
            let gated = self.graph.op(&op("silu_mul"), "silu_mul", &[gate_up], Attrs::new());
            let down = self.graph.weight(
                &at("mlp.down_proj.weight"),
                self.dtype,
                &[hidden, intermediate],
                Some((1, of_intermediate)),
            );
            let branch = self.graph.op(&op("down"), "linear", &[gated, down], partial_sums.clone());
            x = self.graph.op(&op("mlp_residual"), "add", &[branch, x], Attrs::new());
        }

        let normed = self.rmsnorm("final_norm", x, "model.norm.weight");
        let head = match (c.tie_word_embeddings, parallel) {
            (true, true) => table,
            // The table is replicated, but the head is split by vocabulary. So it is a second tensor with the same
            // values.
            (true, false) => self.concatenated(
                "lm_head.tied",
                vec![("model.embed_tokens.weight".into(), vocabulary, of_vocabulary)],
                Some(hidden),
            ),
            (false, _) => {
                let split = Some((0, of_vocabulary));
                self.graph.weight("lm_head.weight", self.dtype, &[vocabulary, hidden], split)
            }
        };
        let lm_head = json!({"gather_samples": true, "output_dtype": "f32"});
        let logits = self.graph.op("lm_head", "linear", &[normed, head], attrs(lm_head));
        let next_token = self.persistent("batch.next_token", DType::I32, vec![u64::from(sizes.max_batch)]);
        let drawn = counts.map(|counts| self.sample_partial(options, logits, counts));
        // Beside sampling, only log-probabilities need the highest logits.
        let highest = (drawn.is_none() || options.top_k > 0).then(|| self.argmax_partial(options, logits));
        if let Some(drawn) = drawn {
            self.sample_reduce(options, drawn, next_token);
        }
        if let Some(partials) = highest {
            self.argmax_reduce(sizes, options, partials, logits, next_token);
        }
    }

    /// The highest logits of each tile of columns.
    fn argmax_partial(&mut self, options: &GraphOptions, logits: TensorId) -> TensorId {
        let records = json!({"top_k": options.top_k, "slices": options.ranks, "tiles": options.argmax_tiles,
            "sampled": options.sampling});
        self.graph.op("argmax_partial", "argmax_partial", &[logits], attrs(records))
    }

    /// The highest logits of all tiles: greedy tokens, unless sampling writes `next_token`, and log-probabilities.
    fn argmax_reduce(
        &mut self,
        sizes: &Sizes,
        options: &GraphOptions,
        partials: TensorId,
        logits: TensorId,
        next_token: TensorId,
    ) {
        let (batch, top) = (u64::from(sizes.max_batch), u64::from(options.top_k.max(1)));
        let best_token = match options.sampling {
            true => self.persistent("argmax.token", DType::I32, vec![batch]),
            false => next_token,
        };
        let mut outputs = vec![best_token];
        if options.top_k > 0 {
            outputs.push(self.persistent("batch.top_token", DType::I32, vec![batch, top]));
            outputs.push(self.persistent("batch.top_logprob", DType::F32, vec![batch, top]));
        }
        // A sampled token need not be among the highest, so its log-probability is computed on its own.
        let log_sum = (options.sampling && options.top_k > 0)
            .then(|| self.persistent("argmax.log_sum", DType::U32, vec![batch, MPK_LOG_SUM_WORDS.into()]));
        outputs.extend(log_sum);
        let best = json!({"top_k": options.top_k, "log_sum": log_sum.is_some(), "sampled": options.sampling});
        self.graph.op_into("argmax_reduce", "argmax_reduce", &[partials], &outputs, attrs(best));
        if let Some(log_sum) = log_sum {
            let slices = attrs(json!({"slices": options.ranks}));
            let logit = self.graph.op("token_logit", "token_logit", &[next_token, logits], slices);
            let logprob = self.persistent("batch.token_logprob", DType::F32, vec![batch]);
            self.graph.op_into("token_logprob", "token_logprob", &[logit, log_sum], &[logprob], Attrs::new());
        }
    }

    /// How often each token occurs in each sequence, for the penalties of sampled requests.
    fn token_counts(&mut self, sizes: &Sizes, options: &GraphOptions) -> TensorId {
        let vocabulary = u64::from(self.config.vocab_size);
        let counts = self.graph.add_tensor(Tensor {
            name: "sampling.counts".into(),
            dtype: DType::U32,
            dims: vec![u64::from(sizes.max_batch), vocabulary],
            rows: Rows::Fixed,
            role: Role::Persistent { region_dims: None },
            // Split like the head's weight, and so like the logits.
            sharding: Sharding::split(1, vocabulary, Split::Even { unit: 16 }),
            output: false,
        });
        let tiles = json!({"tiles": options.argmax_tiles});
        self.graph.op_into("token_counts", "token_counts", &[counts], &[counts], attrs(tiles));
        counts
    }

    fn sampling_attrs(&self, options: &GraphOptions) -> Attrs {
        let vocabulary = u64::from(self.config.vocab_size);
        let parts = sample_partial::parts(
            vocabulary,
            options.ranks,
            self.graph.capacity.samples,
            options.workers,
            options.argmax_tiles,
        );
        attrs(json!({"slices": options.ranks, "parts": parts, "kept": sample_partial::kept(vocabulary)}))
    }

    /// The first sampling step (`kernels_cu::tasks::sample_partial`).
    fn sample_partial(&mut self, options: &GraphOptions, logits: TensorId, counts: TensorId) -> Drawn {
        let [records, lists] = ["sample_partial", "sample_partial.lists"].map(|name| self.activation(name));
        let attrs = self.sampling_attrs(options);
        self.graph.op_into("sample_partial", "sample_partial", &[logits, counts], &[records, lists], attrs);
        Drawn { logits, counts, records, lists }
    }

    /// The other sampling steps. Several ranks merge their lists and send them while all workers wait for the other ranks' records anyway.
    fn sample_reduce(&mut self, options: &GraphOptions, drawn: Drawn, next_token: TensorId) {
        let attrs = self.sampling_attrs(options);
        let records = self.gathered("sample_partial.allgather", drawn.records);
        let lists = match options.ranks {
            1 => drawn.lists,
            _ => {
                let merged = self.graph.op("sample_merge", "sample_merge", &[drawn.lists], attrs.clone());
                self.gathered("sample_merge.allgather", merged)
            }
        };
        let second_pass = [records, drawn.logits, drawn.counts];
        let weighed = self.graph.op("sample_weigh", "sample_weigh", &second_pass, attrs.clone());
        let inputs = [records, weighed, lists];
        self.graph.op_into("sample_reduce", "sample_reduce", &inputs, &[next_token], attrs);
    }

    /// What all ranks have of a tensor. The builder would insert this before the first reader; here, it is sent earlier.
    fn gathered(&mut self, name: &str, tensor: TensorId) -> TensorId {
        self.graph.op(name, "allgather", &[tensor], Attrs::new())
    }

    fn rmsnorm(&mut self, name: &str, x: TensorId, weight: &str) -> TensorId {
        let weight = self.graph.weight(weight, self.dtype, &[u64::from(self.config.hidden_size)], None);
        self.graph.op(name, "rmsnorm", &[x, weight], attrs(json!({"eps": self.config.rms_norm_eps})))
    }

    /// A weight (without `columns`: a bias) that concatenates several tensors of the checkpoint.
    fn concatenated(&mut self, name: &str, pieces: Vec<Piece>, columns: Option<u64>) -> TensorId {
        let dims = |rows: u64| std::iter::once(rows).chain(columns).collect::<Vec<_>>();
        let split = pieces.iter().map(|&(_, len, split)| Part { len, split }).collect();
        self.graph.add_tensor(Tensor {
            name: name.into(),
            dtype: self.dtype,
            dims: dims(pieces.iter().map(|p| p.1).sum()),
            rows: Rows::Fixed,
            role: Role::Weight {
                parts: pieces
                    .into_iter()
                    .map(|(source, rows, _)| WeightPart { source, dims: dims(rows) })
                    .collect(),
            },
            sharding: Sharding::Split { dim: 0, parts: split },
            output: false,
        })
    }

    /// The operator that writes it determines its type and dimensions.
    fn activation(&mut self, name: &str) -> TensorId {
        self.graph.add_tensor(Tensor {
            name: name.into(),
            dtype: DType::U32,
            dims: Vec::new(),
            rows: Rows::Fixed,
            role: Role::Activation,
            sharding: Sharding::Replicated,
            output: false,
        })
    }

    fn persistent(&mut self, name: &str, dtype: DType, dims: Vec<u64>) -> TensorId {
        self.graph.add_tensor(Tensor {
            name: name.into(),
            dtype,
            dims,
            rows: Rows::Samples,
            role: Role::Persistent { region_dims: None },
            sharding: Sharding::Replicated,
            output: false,
        })
    }

    fn kv_cache(&mut self, layer: u32, sizes: &Sizes) -> TensorId {
        let c = self.config;
        let (heads, kv_heads) = (u64::from(c.num_heads), u64::from(c.num_kv_heads));
        let (pages, page_size) = (u64::from(sizes.num_pages), u64::from(sizes.page_size));
        self.graph.add_tensor(Tensor {
            name: format!("kv.{layer}"),
            dtype: self.dtype,
            dims: kv_dims(pages, kv_heads, page_size, u64::from(c.head_dim)),
            rows: Rows::Fixed,
            // The same in all graphs, although their numbers of slots differ.
            role: Role::Persistent { region_dims: Some(kv_region_dims(sizes.max_batch, kv_heads)) },
            sharding: kv_sharding(heads, kv_heads),
            output: false,
        })
    }
}

/// The fields of a JSON object as attributes.
fn attrs(value: serde_json::Value) -> Attrs {
    match value {
        serde_json::Value::Object(fields) => fields,
        _ => Attrs::new(),
    }
}

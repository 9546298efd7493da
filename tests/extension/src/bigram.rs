//! A model family: the next token depends only on the last one, through this crate's `block`.

use launch::model::error::InputError;
use launch::model::families::{self, Family, GraphOptions};
use launch::model::hf_config::{Architecture, Defaults, ModelConfig, Traits};
use launch::model::json::Fields;
use launch::model::model_json::Sizes;
use serde_json::{Value, json};
use taskgraph::op_graph::{Role, Tensor};
use taskgraph::{Attrs, Capacity, DType, OpGraph, Rows, Sharding, Split};

#[derive(Debug)]
pub struct Bigram;

impl Architecture for Bigram {
    fn name(&self) -> &'static str {
        "BigramLM"
    }
    fn model_type(&self) -> &'static str {
        "bigram"
    }
    fn defaults(&self) -> Defaults {
        Defaults {
            vocab_size: 100,
            hidden_size: 32,
            intermediate_size: 64,
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: None,
            head_dim: None,
            max_position_embeddings: 512,
            eos: None,
        }
    }
    fn traits(&self, fields: &Fields<'_>, _: u32) -> Result<Traits, InputError> {
        match fields.u32("order")? {
            None | Some(2) => Ok(Traits::default()),
            Some(_) => Err(fields.unsupported("order", "a longer memory", "only 2 is")),
        }
    }
}

impl Family for Bigram {
    fn op_graph(
        &self,
        config: &ModelConfig,
        sizes: &Sizes,
        options: &GraphOptions,
        name: &str,
        capacity: Capacity,
    ) -> OpGraph {
        let (vocabulary, hidden) = (u64::from(config.vocab_size), u64::from(config.hidden_size));
        let dtype = families::dtype(config);
        let mut g = OpGraph::new(name, capacity);
        let table = g.weight("table.weight", dtype, &[vocabulary, hidden], None);
        let x = g.op("embedding", "embedding", &[table], Attrs::new());
        let across = Some((1, Split::Even { unit: 1 }));
        let block = g.weight("block.weight", dtype, &[hidden, hidden], across);
        let x = g.op("block", "block", &[x, block], Attrs::new());
        let norm = g.weight("norm.weight", dtype, &[hidden], None);
        let x = g.op("norm", "rmsnorm", &[x, norm], attrs(json!({"eps": config.rms_norm_eps})));
        let head = g.weight("head.weight", dtype, &[vocabulary, hidden], Some((0, Split::Even { unit: 16 })));
        let head_attrs = attrs(json!({"gather_samples": true, "output_dtype": "f32"}));
        let logits = g.op("head", "linear", &[x, head], head_attrs);
        let records = json!({"top_k": options.top_k, "slices": options.ranks, "tiles": options.argmax_tiles});
        let partials = g.op("argmax_partial", "argmax_partial", &[logits], attrs(records));
        let (batch, top) = (u64::from(sizes.max_batch), u64::from(options.top_k));
        let mut results = vec![result(&mut g, "batch.next_token", DType::I32, &[batch])];
        if top > 0 {
            results.push(result(&mut g, "batch.top_token", DType::I32, &[batch, top]));
            results.push(result(&mut g, "batch.top_logprob", DType::F32, &[batch, top]));
        }
        g.op_into("argmax_reduce", "argmax_reduce", &[partials], &results, attrs(json!({"top_k": top})));
        g
    }
}

/// A tensor that the host reads after each iteration.
fn result(g: &mut OpGraph, name: &str, dtype: DType, dims: &[u64]) -> taskgraph::TensorId {
    g.add_tensor(Tensor {
        name: name.into(),
        dtype,
        dims: dims.to_vec(),
        rows: Rows::Samples,
        role: Role::Persistent { region_dims: None },
        sharding: Sharding::Replicated,
        output: false,
    })
}

fn attrs(value: Value) -> Attrs {
    value.as_object().cloned().unwrap_or_default()
}

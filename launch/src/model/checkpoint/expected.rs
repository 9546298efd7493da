//! The tensors of a model, as Hugging Face names them.

use crate::model::hf_config::ModelConfig;

/// Names and shapes of all tensors that a model of this configuration reads, in the order of their use.
///
/// A linear's weight is [outputs, inputs]. With tied embeddings there is no `lm_head.weight`.
pub fn expected_tensors(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let hidden = config.hidden_size as usize;
    let vocab = config.vocab_size as usize;
    let intermediate = config.intermediate_size as usize;
    let head_dim = config.head_dim as usize;
    let q = config.num_heads as usize * head_dim;
    let kv = config.num_kv_heads as usize * head_dim;

    let mut tensors = vec![("model.embed_tokens.weight".to_string(), vec![vocab, hidden])];
    for layer in 0..config.num_layers {
        let mut add = |name: &str, shape: &[usize]| {
            tensors.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        };
        add("input_layernorm.weight", &[hidden]);
        for (projection, outputs) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
            add(&format!("self_attn.{projection}.weight"), &[outputs, hidden]);
            if config.attention_bias {
                add(&format!("self_attn.{projection}.bias"), &[outputs]);
            }
        }
        if config.qk_norm {
            add("self_attn.q_norm.weight", &[head_dim]);
            add("self_attn.k_norm.weight", &[head_dim]);
        }
        add("self_attn.o_proj.weight", &[hidden, q]);
        if config.output_bias {
            add("self_attn.o_proj.bias", &[hidden]);
        }
        add("post_attention_layernorm.weight", &[hidden]);
        add("mlp.gate_proj.weight", &[intermediate, hidden]);
        add("mlp.up_proj.weight", &[intermediate, hidden]);
        add("mlp.down_proj.weight", &[hidden, intermediate]);
    }
    tensors.push(("model.norm.weight".into(), vec![hidden]));
    if !config.tie_word_embeddings {
        tensors.push(("lm_head.weight".into(), vec![vocab, hidden]));
    }
    tensors
}

//! Published shapes of real models, for benchmarks with random weights.

use serde_json::{Value, json};

/// Names of the shapes that [`config`] knows.
pub const NAMES: [&str; 5] = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b", "llama3-70b"];

/// The Hugging Face configuration of a shape, bf16.
pub fn config(name: &str) -> Option<Value> {
    // hidden, layers, heads, kv heads, intermediate, vocabulary, tied
    let (hidden, layers, heads, kv_heads, intermediate, vocabulary, tied) = match name {
        "qwen3-0.6b" => (1024, 28, 16, 8, 3072, 151_936, true),
        "qwen3-1.7b" => (2048, 28, 16, 8, 6144, 151_936, true),
        "qwen3-8b" => (4096, 36, 32, 8, 12_288, 151_936, false),
        "qwen3-32b" => (5120, 64, 64, 8, 25_600, 151_936, false),
        "llama3-70b" => (8192, 80, 64, 8, 28_672, 128_256, false),
        _ => return None,
    };
    let (architecture, theta) =
        if name.starts_with("qwen3") { ("Qwen3ForCausalLM", 1e6) } else { ("LlamaForCausalLM", 5e5) };
    Some(json!({
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "max_position_embeddings": 40_960,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu"
    }))
}

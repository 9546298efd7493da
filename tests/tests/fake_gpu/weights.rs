//! Proves that the weights lie in the GPU's memory where the kernel reads them.

use super::{FAKE, job};
use mpk_tests::ModelFile;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The rows of all packed matrices, as the kernel would find them.
fn dumped(model: &ModelFile, name: &str, arguments: &[&str]) -> Vec<Vec<f32>> {
    let dump = FAKE.path(name);
    let found = job(model).args(arguments).env("FAKE_GPU_DUMP", &dump.display().to_string()).run_json();
    assert_eq!((&found.backend[..], found.requests[0].tokens.len()), ("cuda", 4));
    let text = fs::read_to_string(&dump).expect("the dump");
    let row = |line: &str| line.split_whitespace().map(|v| v.parse().expect("a number")).collect();
    text.lines().map(row).collect()
}

/// Whether `all` contains `rows`, one after the other.
fn holds(all: &[Vec<f32>], rows: &[Vec<f32>]) -> bool {
    all.windows(rows.len()).any(|window| window == rows)
}

/// An IEEE half-precision number.
fn half(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f32.powi(-24),
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

/// All matrices of a safetensors file, by name, as rows of f32.
fn matrices(path: &Path) -> Vec<(String, Vec<Vec<f32>>)> {
    let bytes = fs::read(path).expect("the checkpoint");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("the header");
    let mut all = Vec::new();
    for (name, entry) in header.as_object().expect("an object") {
        let Some(shape) = entry["shape"].as_array().filter(|shape| shape.len() == 2) else { continue };
        let columns = shape[1].as_u64().expect("a number") as usize;
        let offset = |i: usize| 8 + length + entry["data_offsets"][i].as_u64().expect("a number") as usize;
        let data = &bytes[offset(0)..offset(1)];
        let values: Vec<f32> = match entry["dtype"].as_str() {
            Some("F32") => data.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Some("BF16") => data
                .chunks(2)
                .map(|b| f32::from_bits(u32::from(b[1]) << 24 | u32::from(b[0]) << 16))
                .collect(),
            Some("F16") => data.chunks(2).map(|b| half(u16::from_le_bytes([b[0], b[1]]))).collect(),
            other => panic!("{name} has type {other:?}"),
        };
        all.push((name.clone(), values.chunks(columns).map(<[f32]>::to_vec).collect()));
    }
    all
}

/// Every matrix of the checkpoint is where the tasks' operands say, in the layout of the tensor cores.
#[test]
fn weights_lie_where_the_kernel_reads_them() {
    for fixture in ["qwen3", "qwen2", "mistral"] {
        let model = ModelFile::of_fixture(fixture);
        let all = dumped(&model, fixture, &[]);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(fixture);
        let mut checked = 0;
        for entry in fs::read_dir(folder).expect("the fixture").flatten() {
            if entry.path().extension().is_some_and(|e| e == "safetensors") {
                for (name, rows) in matrices(&entry.path()) {
                    assert!(holds(&all, &rows), "{fixture}: {name}");
                    checked += 1;
                }
            }
        }
        assert!(checked > 5, "{fixture}: {checked} matrices");
    }
}

/// The formula of launch/src/model/random_weights.rs, written independently.
fn random(seed: u64, name: &str, i: u64) -> f32 {
    let mix64 = |mut x: u64| {
        x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ x >> 31
    };
    let mut key = 0xCBF2_9CE4_8422_2325u64;
    for byte in name.bytes() {
        key = (key ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
    }
    key = mix64(key ^ mix64(seed.wrapping_add(0x9E37_79B9_7F4A_7C15)));
    let mut h = i as u32 ^ key as u32;
    h = (h ^ h >> 16).wrapping_mul(0x7FEB_352D);
    h = (h ^ h >> 15).wrapping_mul(0x846C_A68B);
    h = h ^ h >> 16 ^ (key >> 32) as u32 ^ (i >> 32) as u32;
    h = h.wrapping_mul(0x9E37_79B1);
    h ^= h >> 15;
    (0..4).map(|byte| (h >> (8 * byte) & 127) as i32).sum::<i32>().wrapping_sub(254) as f32 / 4096.0
}

#[test]
fn random_weights_are_filled_on_the_device() {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 52,
        "vocab_size": 61, "tie_word_embeddings": false, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 512, "torch_dtype": "bfloat16", "hidden_act": "silu"
    });
    let model = ModelFile::random(config, 5);
    let all = dumped(&model, "random", &["--ignore-eos"]);
    for (name, rows, columns) in [
        ("lm_head.weight", 61, 40),
        ("model.layers.0.mlp.down_proj.weight", 40, 52),
        ("model.layers.0.self_attn.k_proj.weight", 32, 40),
    ] {
        let row = |r: u64| (0..columns).map(|c| random(5, name, r * columns + c)).collect();
        assert!(holds(&all, &(0..rows).map(row).collect::<Vec<Vec<f32>>>()), "{name}");
    }
}

/// Gates and ups alternate in memory, 8 by 8; the dump has them in the order of the source. A gated product is one task type only with
/// many workers, unless a tuning value says otherwise.
#[test]
fn gates_and_ups_lie_in_pairs() {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 72,
        "vocab_size": 61, "tie_word_embeddings": false, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 512, "torch_dtype": "bfloat16", "hidden_act": "silu"
    });
    let model = ModelFile::random(config, 5);
    let all = dumped(&model, "pairs", &["--ignore-eos", "--tune", "linear.gating_workers=1"]);
    let stored = dumped(&model, "no pairs", &["--ignore-eos"]);
    for layer in 0..2 {
        let of = |part: &str| {
            let name = format!("model.layers.{layer}.mlp.{part}_proj.weight");
            (0..72).map(move |r| (0..40).map(|c| random(5, &name, r * 40 + c)).collect::<Vec<f32>>())
        };
        let rows: Vec<Vec<f32>> = of("gate").chain(of("up")).collect();
        assert!(holds(&all, &rows) && holds(&stored, &rows), "layer {layer}");
    }
}

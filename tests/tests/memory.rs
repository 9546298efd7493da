//! Proves that the peak memory of a rank is its shard of the weights, its KV cache and at most 200 MB: with random
//! weights, and with a checkpoint of which each rank may touch only its shard.

use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// What a rank may use beyond its shard and its KV cache.
const ALLOWANCE: u64 = 200_000_000;

const HIDDEN: u64 = 2048;
const LAYERS: u64 = 1;
const HEADS: u64 = 16;
const KV_HEADS: u64 = 4;
const HEAD_DIM: u64 = 128;
const INTERMEDIATE: u64 = 12288;
const VOCABULARY: u64 = 80000;
const SLOTS: u64 = 4;
const SEQUENCE: u64 = 1024;

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": HIDDEN, "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false, "eos_token_id": null,
    })
}

/// Tensors of the checkpoint with their dimensions.
fn tensors() -> Vec<(String, Vec<u64>)> {
    let mut all = vec![
        ("model.embed_tokens.weight".to_string(), vec![VOCABULARY, HIDDEN]),
        ("lm_head.weight".to_string(), vec![VOCABULARY, HIDDEN]),
        ("model.norm.weight".to_string(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        for (name, dims) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.k_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.v_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HEADS * HEAD_DIM]),
            ("mlp.gate_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.up_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INTERMEDIATE]),
        ] {
            all.push((format!("model.layers.{layer}.{name}.weight"), dims));
        }
    }
    all
}

fn weight_bytes() -> u64 {
    tensors().iter().map(|(_, dims)| 2 * dims.iter().product::<u64>()).sum()
}

/// Runs it on `ranks` ranks, and compares each rank's peak with the allowed one.
fn check(model: &ModelFile, ranks: u32) {
    let prompt = (1..=300).map(|t| t.to_string()).collect::<Vec<_>>().join(",");
    let job = Job::under_mpirun(ranks)
        .arg(model.path())
        .args(["--json", "--max-new-tokens", "8", "--prompt-tokens", &prompt])
        .timeout(Duration::from_secs(120));
    let mut peaks: BTreeMap<u32, u64> = BTreeMap::new();
    let finished = job.start().wait_and_look(|running| {
        for (rank, peak) in running.peak_memory() {
            let largest = peaks.entry(rank).or_default();
            *largest = peak.max(*largest);
        }
    });
    let run = finished.expect_nothing_left().json();
    assert_eq!(run.requests[0].tokens.len(), 8);
    let shard = weight_bytes() / u64::from(ranks);
    let kv = 2 * LAYERS * SLOTS * SEQUENCE * KV_HEADS * HEAD_DIM * 2 / u64::from(ranks);
    let limit = shard + kv + ALLOWANCE;
    println!("{ranks} ranks: shard {shard}, KV {kv}, peaks {peaks:?}");
    assert_eq!(peaks.len(), ranks as usize, "all ranks were seen");
    for (rank, peak) in peaks {
        assert!(peak > shard, "rank {rank}: {peak} bytes can't hold its shard of {shard}: was it measured?");
        assert!(peak <= limit, "rank {rank} used {peak} bytes; shard {shard} + KV {kv} + 200 MB is {limit}");
    }
}

fn sized(model: ModelFile) -> ModelFile {
    model.set("max_batch", SLOTS).set("max_seq_len", SEQUENCE)
}

#[test]
fn random_weights() {
    assert!((800_000_000..900_000_000).contains(&weight_bytes()));
    let model = sized(ModelFile::random(config(), 1));
    check(&model, 1);
    check(&model, 2);
}

#[test]
fn a_checkpoint_of_which_each_rank_reads_its_shard() {
    let model = sized(ModelFile::new(json!({"schema": "mpk-model/1", "checkpoint": "checkpoint"})));
    let folder = model.checkpoint();
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(folder.join("config.json"), config().to_string()).expect("config.json");
    write_checkpoint(&folder.join("model.safetensors"));
    check(&model, 2);
    check(&model, 4);
}

/// bf16 values around zero that are a function of their position in the file.
fn write_checkpoint(path: &Path) {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, dims) in tensors() {
        let begin = end;
        end += 2 * dims.iter().product::<u64>();
        header.insert(name, json!({"dtype": "BF16", "shape": dims, "data_offsets": [begin, end]}));
    }
    let header = Value::Object(header).to_string();
    let file = std::fs::File::create(path).expect("the checkpoint");
    let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
    out.write_all(&(header.len() as u64).to_le_bytes())
        .and_then(|()| out.write_all(header.as_bytes()))
        .expect("header");
    // 0.008 .. 0.03 with either sign: bf16 bits 0x3C00 .. 0x3D00.
    let mut block = Vec::with_capacity(1 << 20);
    let mut state = 1u32;
    while block.len() < 1 << 20 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let bits = 0x3C00 + (state >> 24) as u16 + ((state >> 8) as u16 & 0x8000);
        block.extend(bits.to_le_bytes());
    }
    let mut left = end;
    while left > 0 {
        let piece = left.min(block.len() as u64);
        out.write_all(&block[..piece as usize]).expect("weights");
        left -= piece;
    }
    out.flush().expect("weights");
}

//! Checkpoints that are damaged or incomplete, or contradict their configuration.

use crate::{model_refused, model_refused_on_all_ranks, refused, refused_on_all_ranks, text};
use mpk_tests::ModelFile;
use serde_json::{Value, json};
use std::fs;

#[test]
fn checkpoints_that_contradict_their_configuration() {
    let model = ModelFile::copy_of_fixture("qwen3").edit("config.json", |c| c["hidden_size"] = json!(80));
    model_refused_on_all_ranks("hidden_size", &model, &["shape", "80"]);
    for (name, value, words) in [
        ("hidden_size", json!(80), &["shape", "80"][..]),
        ("intermediate_size", json!(108), &["mlp", "shape", "107", "108"]),
        ("num_key_value_heads", json!(2), &["k_proj", "shape"]),
        ("vocab_size", json!(468), &["embed_tokens", "467", "468"]),
        ("num_hidden_layers", json!(4), &["model.layers.3.", "missing"]),
        ("tie_word_embeddings", json!(false), &["lm_head.weight", "missing"]),
    ] {
        let model = ModelFile::copy_of_fixture("qwen3").edit("config.json", |c| {
            c[name] = value;
            // It would contradict the number of layers before the checkpoint does.
            c.as_object_mut().expect("an object").remove("layer_types");
        });
        model_refused(name, &model, words);
    }
}

#[test]
fn damaged_safetensors() {
    let mistral = || ModelFile::copy_of_fixture("mistral");
    let file = "model.safetensors";
    model_refused_on_all_ranks("cut short", &mistral().edit_bytes(file, |b| b.truncate(9999)), &[file]);
    for keep in [0, 5, 100, 5000, 450_911] {
        let model = mistral().edit_bytes(file, |b| b.truncate(keep));
        model_refused(&format!("cut to {keep} bytes"), &model, &[file]);
    }
    model_refused("longer", &mistral().edit_bytes(file, |b| b.extend([0; 64])), &[file]);
    model_refused("no header", &mistral().edit_bytes(file, |b| b[..8].fill(0xFF)), &[file]);
    let lfs = b"version https://git-lfs.github.com/spec/v1\n";
    model_refused_on_all_ranks(
        "LFS pointer",
        &mistral().edit_bytes(file, |b| *b = lfs.to_vec()),
        &[file, "LFS"],
    );
    let replace = |from: &'static str, to: &'static str| {
        assert_eq!(from.len(), to.len());
        mistral().edit_bytes(file, move |bytes| {
            let at =
                bytes.windows(from.len()).position(|w| w == from.as_bytes()).expect("the header holds it");
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        })
    };
    model_refused("shape against offsets", &replace("\"shape\":[64]", "\"shape\":[63]"), &[file]);
    model_refused("unknown dtype", &replace("\"F32\"", "\"F99\""), &[file]);
    model_refused("dtype against offsets", &replace("\"F32\"", "\"F64\""), &[file]);
    model_refused(
        "a tensor renamed",
        &replace("q_proj.weight", "Q_proj.weight"),
        &["q_proj.weight", "missing"],
    );
    let model = mistral();
    fs::remove_file(model.checkpoint().join(file)).expect("the file was copied");
    model_refused("no weights", &model, &["model.safetensors"]);
}

#[test]
fn shards_missing_or_outside_the_folder() {
    let index = "model.safetensors.index.json";
    let qwen3 = || ModelFile::copy_of_fixture("qwen3");
    let model = qwen3();
    fs::remove_file(model.checkpoint().join("model-00002-of-00003.safetensors"))
        .expect("the file was copied");
    model_refused_on_all_ranks("missing shard", &model, &["model-00002-of-00003.safetensors"]);
    let model = qwen3().edit(index, |i| i["weight_map"]["model.norm.weight"] = json!("../x.safetensors"));
    model_refused_on_all_ranks("outside", &model, &["../x.safetensors", "folder"]);
    for name in ["../model-00002-of-00003.safetensors", "/etc/passwd", "", ".", "a\\..\\b"] {
        let model = qwen3();
        fs::copy(
            model.checkpoint().join("model-00002-of-00003.safetensors"),
            model.folder().join("model-00002-of-00003.safetensors"),
        )
        .expect("a copy outside");
        let model = model.edit(index, |i| i["weight_map"]["model.norm.weight"] = json!(name));
        model_refused(&format!("shard {name:?}"), &model, &["model.norm.weight", "folder"]);
    }
    let model = qwen3()
        .edit(index, |i| i["weight_map"]["model.norm.weight"] = json!("model-00001-of-00003.safetensors"));
    model_refused_on_all_ranks(
        "tensor in another shard",
        &model,
        &["model.norm.weight", "model-00001-of-00003.safetensors"],
    );
    let model = qwen3().edit(index, |i| {
        i["weight_map"].as_object_mut().expect("an object").remove("model.norm.weight");
    });
    model_refused("tensor in no shard", &model, &["model.norm.weight", "missing"]);
    model_refused("no map", &qwen3().edit(index, |i| *i = json!({})), &["weight_map"]);
    model_refused("wrong map", &qwen3().edit(index, |i| i["weight_map"] = json!([1])), &["weight_map"]);
}

/// Files that make the tokenizers library panic, or search without end, give an error that names the file.
#[test]
fn tokenizers_that_panic() {
    let tokenizer = |field: &str, value: Value| {
        ModelFile::copy_of_fixture("llama").edit("tokenizer.json", |file| file[field] = value)
    };
    let template = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[NONE]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {}
    });
    let split = json!({"type": "Split", "pattern": {"Regex": "(a|aa|a?a)*$"}, "behavior": "Isolated", "invert": false});
    for (index, (field, value)) in [
        ("post_processor", template),
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "CAAAAP////8AAAAA"})),
        ("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        ("pre_tokenizer", split),
    ]
    .into_iter()
    .enumerate()
    {
        let what = format!("{field} {value}");
        let model = tokenizer(field, value);
        let prompt = "a".repeat(60) + "! \u{e9} b";
        let path = model.path();
        let arguments = [text(&path), "--prompt", &prompt];
        let words = ["tokenizer.json", "the tokenizers library panics"];
        if index == 0 {
            refused_on_all_ranks(&what, &arguments, &words);
        } else {
            refused(&what, &arguments, &words);
        }
    }
}

use half::{bf16, f16};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::model::families::{parse_config, tensors};
use crate::model::hf_config::WeightDtype::{Bf16, F16, F32};

/// A safetensors file with these entries (dtype, shape, offsets) and data bytes.
fn file(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

fn small_file() -> Vec<u8> {
    let header = json!({"__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]}});
    let mut data: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    data.extend([0.5f32, -1.0, 2.5].iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()));
    file(&header, &data)
}

fn open_bytes(bytes: &[u8]) -> Result<Checkpoint, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(SINGLE_FILE), bytes).unwrap();
    open(folder.path())
}

fn open(folder: &Path) -> Result<Checkpoint, String> {
    Checkpoint::open(folder).map_err(|e| {
        assert_eq!(e.exit_status(), 2);
        e.to_string()
    })
}

fn read(view: &TensorView<'_>, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> Vec<f32> {
    let mut out = vec![0; rows.len() * columns.len() * 4];
    view.copy(rows, columns, F32, &mut out);
    out.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn expected_tensors_are_read_and_converted() {
    let checkpoint = open_bytes(&small_file()).unwrap();
    let a = checkpoint.tensor("a").unwrap();
    assert_eq!((a.dtype, &a.shape[..], a.matrix()), (F32, &[2, 2][..], (2, 2)));
    assert_eq!(read(&a, 0..2, 1..2), [2.0, 4.0]);
    assert_eq!(read(&a, 1..2, 0..2), [3.0, 4.0]);
    let b = checkpoint.tensor("b").unwrap();
    assert_eq!((b.dtype, b.matrix()), (Bf16, (1, 3)));
    assert_eq!(read(&b, 0..1, 1..3), [-1.0, 2.5]);
    let mut out = [0; 6];
    b.copy(0..1, 0..3, F16, &mut out);
    let halves: Vec<f32> = out.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
    assert_eq!(halves, [0.5, -1.0, 2.5]);
    assert_eq!(checkpoint.main_dtype().unwrap(), F32);
    let message = checkpoint.tensor("c").unwrap_err().to_string();
    assert!(message.contains("`c`") && message.contains("missing"), "{message}");
}

#[test]
fn conversions_round_to_nearest_even() {
    let source: Vec<f32> = vec![1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1e-40, f32::NAN, 65519.0, 65520.0];
    let bytes: Vec<u8> = source.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut out = vec![0; source.len() * 2];
    crate::model::convert::convert(F32, &bytes, Bf16, &mut out);
    let got: Vec<f32> = out.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
    assert_eq!(got[..3], [1.0, 1.0, 1.0 + 4.0 / 256.0]);
    assert!(got[4].is_nan());
    crate::model::convert::convert(F32, &bytes, F16, &mut out);
    let got: Vec<f32> = out.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
    assert_eq!((got[3], got[5], got[6]), (0.0, 65504.0, f32::INFINITY));
}

#[test]
fn inconsistent_files_are_refused() {
    let whole = small_file();
    assert!(open_bytes(&[]).unwrap_err().contains("empty"));
    let message = open_bytes(&whole[..5]).unwrap_err();
    assert!(message.contains("truncated") && message.contains("5 bytes"), "{message}");
    let message = open_bytes(&whole[..20]).unwrap_err();
    assert!(message.contains("truncated") && message.contains("header"), "{message}");
    let message = open_bytes(&whole[..whole.len() - 3]).unwrap_err();
    let lengths = [format!("describes {} bytes", whole.len()), format!("has {}", whole.len() - 3)];
    assert!(message.contains("truncated") && lengths.iter().all(|l| message.contains(l)), "{message}");
    let message = open_bytes(&[whole.clone(), vec![0]].concat()).unwrap_err();
    assert!(message.contains("inconsistent"), "{message}");
    let message = open_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n").unwrap_err();
    assert!(message.contains("Git LFS"), "{message}");

    let entry = |dtype: &str, shape: Value, begin: u64, end: u64| json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
    for (case, header, data) in [
        ("overlap", json!({"a": entry("F32", json!([2]), 0, 8), "b": entry("F32", json!([2]), 4, 12)}), 12),
        ("hole", json!({"a": entry("F32", json!([1]), 0, 4), "b": entry("F32", json!([1]), 8, 12)}), 12),
        ("size", json!({"a": entry("F16", json!([2]), 0, 8)}), 8),
        ("reversed", json!({"a": entry("F32", json!([1]), 4, 0)}), 4),
        ("product", json!({"a": entry("F32", json!([1u64 << 40, 1u64 << 40]), 0, 8)}), 8),
        ("huge", json!({"a": entry("U8", json!([u64::MAX]), 0, u64::MAX)}), 8),
        ("dtype", json!({"a": entry("F99", json!([1]), 0, 4)}), 4),
        ("not an object", json!([1, 2]), 0),
        ("negative", json!({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), 4),
    ] {
        let message = open_bytes(&file(&header, &vec![0; data])).expect_err(case);
        assert!(
            message.contains("model.safetensors") && message.contains("inconsistent"),
            "{case}: {message}"
        );
    }
    let unsupported = json!({"a": entry("I8", json!([4]), 0, 4)});
    let checkpoint = open_bytes(&file(&unsupported, &[0; 4])).unwrap();
    let message = checkpoint.tensor("a").unwrap_err().to_string();
    assert!(message.contains("I8") && message.contains("BF16"), "{message}");
    assert!(checkpoint.main_dtype().is_err());
}

#[test]
fn shards_are_found_by_the_index() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let index =
        |map: Value| write(INDEX_FILE, json!({"metadata": {}, "weight_map": map}).to_string().as_bytes());
    let one =
        |name: &str| file(&json!({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), &[0; 4]);
    write("s1.safetensors", &one("a"));
    write("s2.safetensors", &one("b"));
    index(json!({"a": "s1.safetensors", "b": "s2.safetensors"}));
    let checkpoint = open(folder.path()).unwrap();
    assert_eq!(checkpoint.tensor("b").unwrap().path(), folder.path().join("s2.safetensors"));

    // As in Python's json, the last value of a key counts.
    write(
        INDEX_FILE,
        br#"{"weight_map": {"a": "s2.safetensors", "b": "s2.safetensors", "a": "s1.safetensors"}}"#,
    );
    let checkpoint = open(folder.path()).unwrap();
    assert_eq!(checkpoint.tensor("a").unwrap().path(), folder.path().join("s1.safetensors"));

    index(json!({"a": "s1.safetensors", "c": "s2.safetensors"}));
    let message = open(folder.path()).unwrap_err();
    assert!(message.contains("s2.safetensors: tensor `c`: is not in this file, although"), "{message}");
    index(json!({"a": "s3.safetensors"}));
    let message = open(folder.path()).unwrap_err();
    assert!(
        message.ends_with("s3.safetensors: is missing, although model.safetensors.index.json lists it"),
        "{message}"
    );
    std::os::unix::fs::symlink("../blobs/3", folder.path().join("s3.safetensors")).unwrap();
    let message = open(folder.path()).unwrap_err();
    assert!(message.ends_with("it is a link to ../blobs/3, which does not exist"), "{message}");
    let outside = folder.path().join("s1.safetensors").display().to_string();
    for name in ["../s1.safetensors", "x/../../s1.safetensors", &outside, "", ".", "..", "a\0b", "..\\s1"] {
        index(json!({"a": name}));
        let message = open(folder.path()).unwrap_err();
        assert!(message.contains("`weight_map.a`") && message.contains("inside"), "{name}: {message}");
    }
    index(json!({"a": 3}));
    assert!(open(folder.path()).unwrap_err().contains("`weight_map.a`"));
    write(INDEX_FILE, b"{}");
    assert!(open(folder.path()).unwrap_err().contains("`weight_map`: missing"));
    write(INDEX_FILE, b"{\n!");
    assert!(open(folder.path()).unwrap_err().contains("index.json:2:1"));
    std::fs::remove_file(folder.path().join(INDEX_FILE)).unwrap();
    assert!(open(folder.path()).unwrap_err().contains("holds neither"));
    let snapshot = folder.path().join("models--Qwen--Qwen3-8B/snapshots/0123");
    std::fs::create_dir_all(&snapshot).unwrap();
    let help = Checkpoint::open(&snapshot).unwrap_err().help();
    assert_eq!(help.as_deref(), Some("download the weights with `hf download Qwen/Qwen3-8B`"));
    assert!(open(&folder.path().join("none")).unwrap_err().contains("cannot read"));
}

fn config(more: Value) -> ModelConfig {
    let mut map = json!({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 6, "vocab_size": 5});
    map.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    parse_config("config.json", "", map.as_object().unwrap(), || Ok(F32)).unwrap()
}

/// A file with these tensors of f32 zeros.
fn zeros(tensors: &[(String, Vec<usize>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut offset = 0;
    for (name, shape) in tensors {
        let end = offset + 4 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}));
        offset = end;
    }
    file(&Value::Object(header), &vec![0; offset])
}

/// The names and shapes that transformers 5.23 gives the state dict of such a model.
#[test]
fn expected_tensors_are_those_of_transformers() {
    let named = |more: Value| -> Vec<String> {
        tensors(&config(more)).iter().map(|(n, s)| format!("{n} {s:?}")).collect()
    };
    let l = "model.layers.0";
    let common = [
        "model.embed_tokens.weight [5, 8]".to_string(),
        format!("{l}.self_attn.q_proj.weight [16, 8]"),
        format!("{l}.self_attn.k_proj.weight [8, 8]"),
        format!("{l}.self_attn.v_proj.weight [8, 8]"),
        format!("{l}.self_attn.o_proj.weight [8, 16]"),
        format!("{l}.mlp.gate_proj.weight [6, 8]"),
        format!("{l}.mlp.up_proj.weight [6, 8]"),
        format!("{l}.mlp.down_proj.weight [8, 6]"),
        format!("{l}.input_layernorm.weight [8]"),
        format!("{l}.post_attention_layernorm.weight [8]"),
        "model.norm.weight [8]".to_string(),
    ];
    let check = |more: Value, extra: &[&str]| {
        let mut expected = common.to_vec();
        expected.extend(extra.iter().map(|t| t.replace("L.", &format!("{l}.self_attn."))));
        expected.sort();
        let mut got = named(more);
        got.sort();
        assert_eq!(got, expected);
    };
    check(json!({}), &["lm_head.weight [5, 8]", "L.q_norm.weight [4]", "L.k_norm.weight [4]"]);
    check(json!({"tie_word_embeddings": true}), &["L.q_norm.weight [4]", "L.k_norm.weight [4]"]);
    let bias = ["lm_head.weight [5, 8]", "L.q_proj.bias [16]", "L.k_proj.bias [8]", "L.v_proj.bias [8]"];
    check(json!({"architectures": ["Qwen2ForCausalLM"]}), &bias);
    check(json!({"architectures": ["MistralForCausalLM"]}), &bias[..1]);
    let llama = json!({"architectures": ["LlamaForCausalLM"], "attention_bias": true});
    check(llama, &[&bias[..], &["L.o_proj.bias [8]"]].concat());
}

#[test]
fn checkpoints_that_contradict_the_configuration_are_refused() {
    let untied = config(json!({}));
    let tied = config(json!({"tie_word_embeddings": true}));
    let all = tensors(&untied);
    open_bytes(&zeros(&all)).unwrap().validate(&untied, &tensors(&untied)).unwrap();
    open_bytes(&zeros(&all)).unwrap().validate(&tied, &tensors(&tied)).expect("a spare lm_head is ignored");
    // But not one with other values.
    let mut other = zeros(&all);
    let size = |(_, shape): &(String, Vec<usize>)| 4 * shape.iter().product::<usize>();
    let head = all.iter().position(|(name, _)| name == "lm_head.weight").unwrap();
    let after_head: usize = all[head..].iter().map(size).sum();
    let first = other.len() - after_head;
    other[first] = 1;
    let message = open_bytes(&other).unwrap().validate(&tied, &tensors(&tied)).unwrap_err().to_string();
    assert!(message.contains("lm_head.weight") && message.contains("tie_word_embeddings"), "{message}");

    let without_head = tensors(&tied);
    let message = open_bytes(&zeros(&without_head))
        .unwrap()
        .validate(&untied, &tensors(&untied))
        .unwrap_err()
        .to_string();
    assert!(message.contains("lm_head.weight") && message.contains("tie_word_embeddings"), "{message}");
    let mut wrong = all.clone();
    wrong[2].1 = vec![8, 16];
    let message =
        open_bytes(&zeros(&wrong)).unwrap().validate(&untied, &tensors(&untied)).unwrap_err().to_string();
    let name = all[2].0.as_str();
    assert!([name, "[8, 16]", "[16, 8]", "config.json"].iter().all(|n| message.contains(n)), "{message}");
    let message =
        open_bytes(&zeros(&all[1..])).unwrap().validate(&untied, &tensors(&untied)).unwrap_err().to_string();
    assert!(message.contains("`model.embed_tokens.weight`") && message.contains("missing"), "{message}");
}

/// transformers loads such a checkpoint: its embedding and its head are the stored head.
#[test]
fn a_tied_checkpoint_may_store_the_embedding_as_the_head() {
    let (tied, untied) = (config(json!({"tie_word_embeddings": true})), config(json!({})));
    let mut stored = tensors(&tied);
    let embedding = stored.iter().position(|(name, _)| name == EMBEDDING).unwrap();
    stored[embedding].0 = HEAD.into();
    let mut bytes = zeros(&stored);
    // The tensors are in the order of the list.
    let size = |(_, shape): &(String, Vec<usize>)| 4 * shape.iter().product::<usize>();
    let from_head: usize = stored[embedding..].iter().map(size).sum();
    let first = bytes.len() - from_head;
    bytes[first..first + 4].copy_from_slice(&7.5f32.to_le_bytes());

    let mut checkpoint = open_bytes(&bytes).unwrap();
    checkpoint.tie_embeddings(&tied);
    checkpoint.validate(&tied, &tensors(&tied)).unwrap();
    for name in [EMBEDDING, HEAD] {
        let tensor = checkpoint.tensor(name).unwrap();
        assert_eq!((read(&tensor, 0..1, 0..2), &tensor.shape[..]), (vec![7.5, 0.0], &[5, 8][..]), "{name}");
    }
    // Without tied embeddings, the embedding is missing.
    checkpoint.tie_embeddings(&untied);
    let message = checkpoint.validate(&untied, &tensors(&untied)).unwrap_err().to_string();
    assert!(message.contains("`model.embed_tokens.weight`: missing"), "{message}");
}

/// Resident pages of this process, in bytes, that map `path`.
fn resident(path: &Path) -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|l| !l.ends_with(&*path.to_string_lossy()));
    let rss = lines.find(|l| l.starts_with("Rss:")).unwrap();
    rss.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn copying_leaves_no_pages_behind() {
    let (rows, columns) = (4096, 1024);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(SINGLE_FILE);
    let header =
        json!({"a": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, rows * columns * 2]}});
    let data: Vec<u8> = (0..rows * columns).flat_map(|i| ((i % 251) as u16).to_le_bytes()).collect();
    std::fs::write(&path, file(&header, &data)).unwrap();
    let checkpoint = open(folder.path()).unwrap();
    let view = checkpoint.tensor("a").unwrap();

    let mut out = vec![0; rows * 100 * 2];
    view.copy(0..rows, 300..400, Bf16, &mut out);
    for (i, b) in out.chunks_exact(2).enumerate() {
        let expected = ((i / 100 * columns + 300 + i % 100) % 251) as u16;
        assert_eq!(u16::from_le_bytes([b[0], b[1]]), expected, "element {i}");
    }
    let after_copy = resident(&path);
    assert!(after_copy < 1 << 20, "{after_copy} bytes still mapped");
    // In pieces that do not match page boundaries, as a loader reads them.
    let mut piece = vec![0; 33 * columns * 2];
    for row in (0..rows - 33).step_by(33) {
        view.copy(row..row + 33, 0..columns, Bf16, &mut piece);
    }
    let after_pieces = resident(&path);
    assert!(after_pieces < 256 << 10, "{after_pieces} bytes still mapped");
    let sum: u64 = view.bytes().iter().map(|&b| u64::from(b)).sum();
    assert!(sum > 0 && resident(&path) >= rows * columns * 2);
    view.release(0..rows);
    assert!(resident(&path) < 1 << 20);
    assert_eq!(view.row_bytes(0..rows), data, "released pages are read again");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..Default::default() })]
    /// No input makes the reader panic, and every accepted file can be read completely.
    #[test]
    fn mutated_files_never_panic(
        cut in 0usize..260, edits in prop::collection::vec((0usize..260, any::<u8>()), 0..4),
    ) {
        let mut bytes = small_file();
        for (at, byte) in edits {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        bytes.truncate(if cut % 2 == 0 { bytes.len() } else { cut });
        if let Ok(checkpoint) = open_bytes(&bytes) {
            for name in checkpoint.names() {
                if let Ok(view) = checkpoint.tensor(name) {
                    let (rows, columns) = view.matrix();
                    prop_assert_eq!(read(&view, 0..rows, 0..columns).len(), rows * columns);
                }
            }
            let config = config(json!({}));
            let _ = checkpoint.validate(&config, &tensors(&config));
        }
    }

    /// The same for the index.
    #[test]
    fn mutated_indices_never_panic(at in 0usize..80, byte: u8, cut in 0usize..80) {
        let folder = tempfile::tempdir().unwrap();
        let mut index = json!({"weight_map": {"a": "model-1.safetensors"}}).to_string().into_bytes();
        let at = at % index.len();
        index[at] = byte;
        index.truncate(if cut % 2 == 0 { index.len() } else { cut });
        std::fs::write(folder.path().join(INDEX_FILE), &index).unwrap();
        std::fs::write(folder.path().join("model-1.safetensors"), small_file()).unwrap();
        let _ = open(folder.path());
    }
}

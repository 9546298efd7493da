use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::model::error::InputError;
use crate::model::hf_config::WeightDtype;

fn parse(text: &str) -> Result<ModelJson, String> {
    ModelJson::parse(Path::new("dir/model.json"), text.as_bytes()).map_err(|e| {
        assert_eq!(e.exit_status(), 2);
        e.to_string()
    })
}

fn config(more: Value) -> ModelConfig {
    let mut map = json!({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100});
    map.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    parse_config("config.json", "", map.as_object().unwrap(), || Ok(WeightDtype::F32)).unwrap()
}

use crate::model::families::parse_config;
use crate::model::hf_config::ModelConfig;

#[test]
fn the_examples_are_read() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let files = std::fs::read_dir(examples).unwrap().map(|entry| entry.unwrap().path().join("model.json"));
    let read: Vec<_> =
        files.filter(|file| file.exists()).map(|file| ModelJson::read(&file).unwrap()).collect();
    assert!(read.len() >= 4, "{read:?}");
}

#[test]
fn stop_strings_have_limits_and_an_option() {
    let with = |stop: Value| {
        let model = json!({"schema": SCHEMA, "checkpoint": "c", "generate": {"stop": stop}});
        parse(&model.to_string())
    };
    let model = with(json!(["\n\n", "END"])).unwrap();
    assert_eq!(model.generate.stop, ["\n\n", "END"]);
    assert!(
        with(json!([""])).unwrap_err().contains("`generate.stop`: a text must have 1 to 1024 bytes, found 0")
    );
    assert!(with(json!(["x".repeat(1025)])).is_err() && with(json!("END")).is_err());
    assert!(with(json!(vec!["x"; 33])).unwrap_err().contains("at most 32"));
    let given = |stop: &str| Overrides { stop: Some(vec![stop.into()]), ..Overrides::default() };
    assert_eq!(model.clone().with(&given("x")).unwrap().generate.stop, ["x"]);
    assert!(model.with(&given("")).unwrap_err().to_string().contains("Overrides::stop"));
}

#[test]
fn the_designs_example() {
    let model = parse(
        r#"{
          "schema": "mpk-model/1",
          "name": "tiny-qwen3",
          "checkpoint": "path/to/huggingface/folder",
          "max_batch": 8, "max_seq_len": 1024, "page_size": 64,
          "runtime": { "placement": "static", "allreduce": "auto" },
          "generate": { "prompts": ["..."], "max_new_tokens": 64 }
        }"#,
    )
    .unwrap();
    assert_eq!(model.checkpoint_folder().unwrap(), Path::new("dir/path/to/huggingface/folder"));
    assert_eq!(model.runtime, Runtime { placement: Some(Placement::Static.into()), ..Runtime::default() });
    assert_eq!(model.max_new_tokens(), 64);
    let sizes = model.sizes(&config(json!({}))).unwrap();
    assert_eq!(
        sizes,
        Sizes {
            max_batch: 8,
            max_seq_len: 1024,
            page_size: 64,
            pages_per_slot: 16,
            num_pages: 128,
            prefill_chunk: 256
        }
    );
}

#[test]
fn only_schema_and_a_source_are_required() {
    let model = parse(r#"{"schema": "mpk-model/1", "checkpoint": "/abs"}"#).unwrap();
    assert_eq!(model.checkpoint_folder().unwrap(), Path::new("/abs"));
    let model = parse(r#"{"schema": "mpk-model/1", "checkpoint": "."}"#).unwrap();
    assert_eq!(model.checkpoint_folder().unwrap().as_os_str(), "dir");
    assert_eq!(model.sizes(&config(json!({}))).unwrap().max_seq_len, 2048);
    let long = config(json!({"max_position_embeddings": 131072}));
    assert_eq!(model.sizes(&long).unwrap().max_seq_len, 4096);
    parse(
        r#"{"schema": "mpk-model/1", "config": {}, "weights": {"random": {"seed": 18446744073709551615}}}"#,
    )
    .unwrap();
    parse(r#"{"schema": "mpk-model/1", "graph": {}}"#).unwrap();
}

/// `config` is a Hugging Face configuration. As in Python's json, the last of several values of a field counts there.
#[test]
fn of_fields_of_config_that_are_given_twice_the_last_counts() {
    let model = parse(
        r#"{"schema": "mpk-model/1", "weights": {"random": {"seed": 1}},
            "config": {"hidden_size": 1, "vocab_size": 7, "hidden_size": 64}}"#,
    )
    .unwrap();
    assert_eq!(Value::Object(model.config.unwrap()), json!({"hidden_size": 64, "vocab_size": 7}));
}

/// A graph is no Hugging Face configuration: a field that is given twice is a mistake there, as in the rest of model.json.
#[test]
fn fields_of_a_graph_are_given_once() {
    for (graph, problem) in [
        (r#"{"rows": 1, "rows": 2}"#, "`graph`: duplicate field `rows` (line 1, column "),
        (
            r#"{"tensors": [{"data": {"random": {"seed": 1, "seed": 2}}}]}"#,
            "`graph.tensors[0].data.random`: duplicate field `seed`",
        ),
        (r#"{"ops": [{"attrs": {"eps": 1, "eps": 2}}]}"#, "`graph.ops[0].attrs`: duplicate field `eps`"),
    ] {
        let error = parse(&format!(r#"{{"schema": "mpk-model/1", "graph": {graph}}}"#)).unwrap_err();
        assert!(error.contains(problem), "{error}");
    }
    let model = parse(
        r#"{"schema": "mpk-model/1", "graph": [null, -1, 0.5, 18446744073709551615, "x", {"a": true}]}"#,
    );
    let same = json!([null, -1, 0.5, 18_446_744_073_709_551_615_u64, "x", {"a": true}]);
    assert_eq!(model.unwrap().graph, Some(same));
    assert!(parse(r#"{"schema": "mpk-model/1", "graph": null}"#).unwrap_err().contains("no model"));
}

#[test]
fn a_chunk_below_max_batch_has_a_fix() {
    let error = parse(r#"{"schema": "mpk-model/1", "checkpoint": "x", "runtime": {"prefill_chunk": 4}}"#)
        .unwrap_err();
    assert!(error.contains("4 is less than max_batch = 8; set it to at least 8, or leave it out"), "{error}");
}

#[test]
fn fields_without_effect_on_a_graph_are_refused_by_name() {
    let with = |field: &str| parse(&format!(r#"{{"schema": "mpk-model/1", "graph": {{}}, {field}}}"#));
    for (field, name) in [
        (r#""max_batch": 2"#, "max_batch"),
        (r#""max_seq_len": 0"#, "max_seq_len"),
        (r#""page_size": 64"#, "page_size"),
        (r#""runtime": {"kv": "on-demand"}"#, "runtime.kv"),
        (r#""runtime": {"prefix_cache": "off"}"#, "runtime.prefix_cache"),
        (r#""runtime": {"embedding": "replicated"}"#, "runtime.embedding"),
        (r#""runtime": {"allreduce_dtype": "f32"}"#, "runtime.allreduce_dtype"),
        (r#""runtime": {"prefill_chunk": 4}"#, "runtime.prefill_chunk"),
        (r#""runtime": {"kv_pages": 4}"#, "runtime.kv_pages"),
        (r#""generate": {"prompts": ["x"]}"#, "generate.prompts"),
        (r#""generate": {"max_new_tokens": 4}"#, "generate.max_new_tokens"),
        (r#""generate": {"ignore_eos": true}"#, "generate.ignore_eos"),
        (r#""generate": {"temperature": 0}"#, "generate.temperature"),
    ] {
        let error = with(field).unwrap_err();
        let words = format!("dir/model.json: `{name}`: has no effect on a graph of your own");
        assert!(error.starts_with(&words) && error.ends_with("leave it out"), "{error}");
    }
    let all = r#""name": "x", "weights": {"random": {"seed": 1}}, "generate": {"prompt_tokens": [[1]]},
        "runtime": {"placement": "static", "allreduce": "one-shot", "workers": 2, "nodes": [0]}"#;
    let model = with(all).unwrap();
    // Written with the defaults of other fields.
    parse(&serde_json::to_string(&model).unwrap()).unwrap();
    // The contradiction is the first thing to repair.
    assert!(with(r#""checkpoint": "x", "max_batch": 2"#).unwrap_err().contains("exclude each other"));
    // An option of the command line is not the file's mistake.
    let model =
        ModelJson::parse_unchecked(Path::new("m"), br#"{"schema": "mpk-model/1", "graph": {}}"#).unwrap();
    model.with(&Overrides { max_batch: Some(2), ..Overrides::default() }).unwrap();
}

#[test]
fn enums_are_read_and_written_alike() {
    let model = parse(
        r#"{"schema": "mpk-model/1", "checkpoint": "x", "runtime": {"placement": "dynamic", "allreduce": "one-shot",
            "allreduce_dtype": "activation", "embedding": "replicated", "prefill_chunk": 32, "kv_pages": 7, "workers": 2}}"#,
    )
    .unwrap();
    assert_eq!(model.runtime.placements(), Placement::Dynamic.into());
    assert_eq!(model.runtime.allreduce, Allreduce::OneShot);
    assert_eq!(model.runtime.allreduce_dtype, AllreduceDtype::Activation);
    assert_eq!(model.runtime.embedding, Embedding::Replicated);
    let again = serde_json::to_string(&model).unwrap();
    let mut read = parse(&again).unwrap();
    read.path = model.path.clone();
    assert_eq!(read, model);
}

#[test]
fn each_class_of_graphs_may_have_its_placement() {
    let placement = |value: &str| {
        let text =
            format!(r#"{{"schema": "mpk-model/1", "checkpoint": "x", "runtime": {{"placement": {value}}}}}"#);
        let model = parse(&text).unwrap();
        (model.runtime.placements(), serde_json::to_string(&model.runtime.placement).unwrap())
    };
    let (both, text) = placement(r#"{"decode": "static", "prefill": "dynamic"}"#);
    assert_eq!(both, Placements { decode: Placement::Static, prefill: Placement::Dynamic });
    assert_eq!(text, r#"{"decode":"static","prefill":"dynamic"}"#);
    assert_eq!(placement(r#"{"prefill": "dynamic"}"#).0, both);
    assert_eq!(placement(r#""dynamic""#), (Placement::Dynamic.into(), r#""dynamic""#.into()));
    assert_eq!(placement(r#"{"decode": "static"}"#).1, r#""static""#);
}

/// Each mistake and what its message must name.
#[test]
fn mistakes_are_named() {
    for (text, names) in [
        ("{\n  \"schema\": \"mpk-model/1\",\n  oops\n}", &["dir/model.json:3:3", "not valid JSON"][..]),
        ("", &["dir/model.json: is empty"]),
        ("[]", &["expected an object", "a list"]),
        (
            "{\"schema\": \"mpk-model/1\", \"max_batch\": 8,\n \"checkpoint\": \"x\",\n \"max_batch\": 9}",
            &["duplicate field `max_batch` (line 3, column "],
        ),
        (
            "{\"schema\": \"mpk-model/1\", \"checkpoint\": \"x\",\n \"generate\": {\"seed\": 1, \"seed\": 1}}",
            &["duplicate field `seed` (line 2, column "],
        ),
        (r#"{"architectures": ["LlamaForCausalLM"]}"#, &["config.json", "give its folder"]),
        (
            r#"{"schema": "mpk-model/1", "max_batch": "8"}"#,
            &["`max_batch`", "expected a whole number from 0"],
        ),
        (r#"{"schema": "mpk-model/1", "runtime": 5}"#, &["`runtime`: ", "expected an object ("]),
        (r#"{"schema": "mpk-model/1", "generate": 5}"#, &["`generate`", "expected an object ("]),
        (r#"{"schema": "mpk-model/1", "generate": []}"#, &["`generate`: ", "list, expected an object"]),
        (r#"{"schema": "mpk-model/1", "checkpoint": 5}"#, &["`checkpoint`", "expected a string ("]),
        (
            r#"{"schema": "mpk-model/1", "generate": {"prompts": {}}}"#,
            &["invalid type: object, expected a list ("],
        ),
        (r#"{"schema": "mpk-model/1", "checkpoint": ""}"#, &["`checkpoint`: is empty"]),
        (r#"{"checkpoint": "x"}"#, &["`schema`", "missing"]),
        (r#"{"schema": "mpk-model/2", "checkpoint": "x"}"#, &["`schema`", "mpk-model/1", "mpk-model/2"]),
        (r#"{"schema": 1, "checkpoint": "x"}"#, &["`schema`", "the number 1"]),
        (r#"{"schema": "mpk-model/1"}"#, &["no model", "checkpoint"]),
        (r#"{"schema": "mpk-model/1", "checkpoint": "x", "graph": {}}"#, &["checkpoint and graph"]),
        (r#"{"schema": "mpk-model/1", "config": {}}"#, &["`weights`", "missing"]),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "weights": {"random": {"seed": 1}}}"#,
            &["`weights`", "own weights"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "max_bach": 8}"#,
            &["max_bach", "unknown field", "line 1"],
        ),
        (
            "{\"schema\": \"mpk-model/1\", \"checkpoint\": \"x\",\n \"runtime\": {\"placment\": \"static\"}}",
            &["runtime", "placment", "line 2"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "runtime": {"placement": "magic"}}"#,
            &["`runtime.placement`", "magic", "static"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "runtime": {"placement": {"decode": "magic"}}}"#,
            &["`runtime.placement.decode`", "magic", "static"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "runtime": {"placement": {"verify": "static"}}}"#,
            &["`runtime.placement", "verify", "prefill"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "runtime": {"placement": 1}}"#,
            &["`runtime.placement`", "decode", "dynamic"],
        ),
        (
            r#"{"schema": "mpk-model/1", "graph": 1, "runtime": {"placement": {"prefill": "dynamic"}}}"#,
            &["`runtime.placement`", "one graph"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "max_batch": "8"}"#,
            &["`max_batch`", "string \"8\""],
        ),
        (r#"{"schema": "mpk-model/1", "checkpoint": "x", "max_batch": -1}"#, &["`max_batch`", "-1"]),
        (r#"{"schema": "mpk-model/1", "checkpoint": "x", "max_batch": 1.5}"#, &["`max_batch`", "1.5"]),
        (r#"{"schema": "mpk-model/1", "checkpoint": "x", "max_batch": 0}"#, &["`max_batch`", "at least 1"]),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "max_batch": 99999999999}"#,
            &["`max_batch`", "99999999999"],
        ),
        (r#"{"schema": "mpk-model/1", "checkpoint": "x", "max_batch": 5000}"#, &["`max_batch`", "4096"]),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "page_size": 48}"#,
            &["`page_size`", "power of two", "48"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "generate": {"prompts": ["a", 3]}}"#,
            &["`generate.prompts[1]`", "3"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "generate": {"prompt_tokens": [[1], [2, -3]]}}"#,
            &["`generate.prompt_tokens[1][1]`", "-3"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "generate": {"max_new_tokens": 0}}"#,
            &["`generate.max_new_tokens`", "at least 1"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "runtime": {"prefill_chunk": 4}}"#,
            &["`runtime.prefill_chunk`", "max_batch = 8"],
        ),
        (
            r#"{"schema": "mpk-model/1", "checkpoint": "x", "runtime": {"prefix_cache": true}}"#,
            &["`runtime.prefix_cache`", "expected a string"],
        ),
        (r#"{"schema": "mpk-model/1", "checkpoint": "x", "checkpoint": "y"}"#, &["duplicate", "checkpoint"]),
    ] {
        let message = parse(text).expect_err(text);
        for name in names {
            assert!(message.contains(name), "{text}\n gives {message}\n without {name}");
        }
    }
}

#[test]
fn unreadable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("none.json"), folder.path().to_path_buf()] {
        let error = ModelJson::read(&path).unwrap_err();
        assert!(matches!(error, InputError::Unreadable { .. }), "{error}");
        assert!(error.to_string().contains(&path.display().to_string()));
    }
}

#[test]
fn sizes_that_overflow_are_refused() {
    let with =
        |more: &str| parse(&format!(r#"{{"schema": "mpk-model/1", "checkpoint": "x", {more}}}"#)).unwrap();
    let refuse = |more: &str, config: &ModelConfig, what: &str| {
        let error = with(more).sizes(config).expect_err(more);
        assert!(matches!(error, InputError::Overflow { .. }), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    };
    let small = config(json!({}));
    refuse(r#""max_batch": 4096, "max_seq_len": 4294967295"#, &small, "full batch");
    refuse(r#""max_batch": 1, "max_seq_len": 8, "page_size": 2147483648"#, &small, "KV page");
    let deep = config(json!({"num_hidden_layers": 16384, "hidden_size": 16, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 1048576, "intermediate_size": 1, "vocab_size": 8}));
    refuse(
        r#""max_batch": 1, "max_seq_len": 4294967295, "page_size": 1, "runtime": {"kv_pages": 2147483647}"#,
        &deep,
        "KV cache",
    );
    assert!(with(r#""max_batch": 2, "max_seq_len": 8"#).sizes(&small).is_ok());
}

#[test]
fn a_sliding_window_does_not_bound_the_sequence() {
    let mistral = config(json!({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}));
    let model =
        |length: &str| parse(&format!(r#"{{"schema": "mpk-model/1", "checkpoint": "x"{length}}}"#)).unwrap();
    assert!(model("").sizes(&mistral).unwrap().max_seq_len > 1024);
    assert_eq!(model(r#", "max_seq_len": 2048"#).sizes(&mistral).unwrap().max_seq_len, 2048);
}

#[test]
fn the_published_schema_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/model.schema.json");
    let current = serde_json::to_string_pretty(&ModelJson::json_schema()).unwrap() + "\n";
    if std::env::var_os("MPK_UPDATE_SCHEMAS").is_some() {
        std::fs::write(&path, &current).unwrap();
    }
    let published = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        published == current,
        "launch/schema/model.schema.json is stale: run MPK_UPDATE_SCHEMAS=1 cargo test -p mpk-launch schema"
    );
}

proptest! {
    /// No text makes the reader panic. Accepted text gives sizes or an error.
    #[test]
    fn mutated_text_never_panics(cut in 0usize..400, at in 0usize..400, byte: u8, digits in "[0-9]{1,12}") {
        let text = format!(r#"{{"schema": "mpk-model/1", "config": {{"architectures": ["Qwen3ForCausalLM"],
            "hidden_size": {digits}, "num_attention_heads": 8, "rope_scaling": {{"type": "linear", "factor": 2}}}},
            "weights": {{"random": {{"seed": 1}}}}, "max_batch": 8, "max_seq_len": {digits}, "page_size": 64,
            "runtime": {{"kv_pages": {digits}}}, "generate": {{"prompt_tokens": [[{digits}]]}}}}"#);
        let mut bytes = text.into_bytes();
        let at = at % bytes.len();
        for bytes in [bytes[..cut.min(bytes.len())].to_vec(), { bytes[at] = byte; bytes }] {
            let Ok(model) = ModelJson::parse(Path::new("m"), &bytes) else { continue };
            if let Ok(crate::model::model_source::ModelSource::Model(source)) =
                crate::model::model_source::ModelSource::open(&model)
            {
                let _ = model.sizes(&source.config);
            }
        }
    }
}

#[test]
fn chunks_are_longer_where_products_are_wide_but_not_longer_than_all_requests() {
    let chunk = |more: &str, wide| {
        let model = parse(&format!(r#"{{"schema": "mpk-model/1", "checkpoint": "/abs"{more}}}"#)).unwrap();
        let target = taskgraph::Target { wide, ..taskgraph::Target::cpu(2) };
        model.sizes_on(&config(json!({})), &target).unwrap().prefill_chunk
    };
    assert_eq!(chunk("", true), 2048);
    assert_eq!(chunk("", false), 256);
    assert_eq!(chunk(r#", "max_batch": 2, "max_seq_len": 300"#, true), 1024);
    assert_eq!(chunk(r#", "max_batch": 1, "max_seq_len": 64"#, true), 256);
    assert_eq!(chunk(r#", "runtime": {"prefill_chunk": 100}"#, true), 100);
}

/// Options and model.json are merged first and checked once, so the limits are the same wherever a value comes from.
#[test]
fn values_that_are_replaced_are_checked_in_their_place() {
    let file = |more: &str| {
        let text = format!(r#"{{"schema": "mpk-model/1", "checkpoint": "x"{more}}}"#);
        ModelJson::parse_unchecked(Path::new("m.json"), text.as_bytes()).unwrap()
    };
    let batch = |slots| Overrides { max_batch: Some(slots), ..Overrides::default() };
    let refused = |model: ModelJson, overrides: &Overrides| model.with(overrides).unwrap_err().to_string();
    // A wrong value in the file does not matter if it is replaced.
    assert_eq!(file(r#", "max_batch": 5000"#).with(&batch(4)).unwrap().max_batch(), 4);
    let chunk = r#", "max_batch": 32, "runtime": {"prefill_chunk": 16}"#;
    assert_eq!(file(chunk).with(&batch(8)).unwrap().max_batch(), 8);
    // The other way round: the same limits apply, and the message names the option.
    let message = refused(file(chunk), &batch(17));
    assert!(message.contains("runtime.prefill_chunk") && message.contains("max_batch = 17"), "{message}");
    for (overrides, option) in [
        (batch(5000), "Overrides::max_batch"),
        (batch(0), "Overrides::max_batch"),
        (Overrides { workers: Some(9999), ..Overrides::default() }, "Overrides::workers"),
        (Overrides { max_new_tokens: Some(0), ..Overrides::default() }, "Overrides::max_new_tokens"),
        (Overrides { max_seq_len: Some(0), ..Overrides::default() }, "Overrides::max_seq_len"),
    ] {
        let message = refused(file(""), &overrides);
        assert!(message.contains(option) && !message.contains("m.json"), "{message}");
    }
    assert!(refused(file(r#", "max_batch": 5000"#), &Overrides::default()).contains("m.json: `max_batch`"));
}

/// However many slots there are, the default chunk has more rows than the decode graphs.
#[test]
fn prompts_have_a_graph_of_their_own_by_default() {
    for slots in [1, 8, 255, 256, 300, 4096] {
        let text = format!(r#"{{"schema": "mpk-model/1", "checkpoint": "x", "max_batch": {slots}}}"#);
        let sizes = parse(&text).unwrap().sizes_for(64).unwrap();
        assert!(sizes.prefill_chunk > slots, "{sizes:?}");
    }
}

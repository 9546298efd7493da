use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::model::families::{parse_config, read_config};

fn parse(config: Value) -> Result<ModelConfig, String> {
    let fallback = || Ok(WeightDtype::F16);
    parse_config("config.json", "", config.as_object().unwrap(), fallback).map_err(|e| {
        assert_eq!(e.exit_status(), 2);
        e.whole()
    })
}

fn with(mut base: Value, more: Value) -> Value {
    base.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    base
}

fn llama() -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 1000})
}

/// transformers takes null for false, but a missing field for true.
#[test]
fn null_for_truncate_of_yarn_is_false() {
    let rope = |more: Value| {
        let scaling = with(json!({"type": "yarn", "factor": 4}), more);
        parse(with(llama(), json!({"rope_scaling": scaling}))).unwrap().rope
    };
    let (missing, null) = (rope(json!({})), rope(json!({"truncate": null})));
    assert_eq!((&missing, &null), (&rope(json!({"truncate": true})), &rope(json!({"truncate": false}))));
    assert_ne!(missing, null);
}

#[test]
fn attention_to_later_positions_is_refused() {
    assert!(parse(with(llama(), json!({"is_causal": true}))).is_ok());
    let message = parse(with(llama(), json!({"is_causal": false}))).unwrap_err();
    assert!(message.contains("is_causal") && message.contains("only true is supported"), "{message}");
}

/// The config.json of Llama-3.2-1B, as transformers 4 wrote it.
#[test]
fn llama_3_2_as_transformers_4_writes_it() {
    let model = parse(json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256
    }))
    .unwrap();
    let expected = ModelConfig {
        architecture: "LlamaForCausalLM",
        fields: model.fields.clone(),
        dtype: WeightDtype::Bf16,
        vocab_size: 128256,
        hidden_size: 2048,
        num_layers: 16,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 64,
        intermediate_size: 8192,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: true,
        attention_bias: false,
        output_bias: false,
        qk_norm: false,
        rope: RopeConfig {
            theta: 500000.0,
            scaling: RopeScaling::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            },
        },
        max_position_embeddings: 131072,
        sliding_window: None,
        eos: vec![128001, 128008, 128009],
        generation: crate::model::sampling::GenerationConfig::default(),
    };
    assert_eq!(model, expected);
}

/// `Qwen3Config().to_json_string()` of transformers 5.23, with tied embeddings.
#[test]
fn qwen3_as_transformers_5_writes_it() {
    let model = parse(json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": null, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "layer_types": vec!["full_attention"; 28],
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": null,
        "tie_word_embeddings": true, "transformers_version": "5.23.0", "use_sliding_window": false,
        "vocab_size": 151936
    }))
    .unwrap();
    assert_eq!(model.architecture(), "Qwen3ForCausalLM");
    assert_eq!((model.num_heads, model.num_kv_heads, model.head_dim), (16, 8, 128));
    assert!(model.qk_norm && model.tie_word_embeddings && !model.attention_bias);
    assert_eq!(model.rope, RopeConfig { theta: 1e6, scaling: RopeScaling::None });
    assert_eq!((model.sliding_window, &model.eos[..]), (None, &[151645][..]));
}

/// An architecture alone: the values that `Config()` of transformers 5.23 has.
#[test]
fn absent_fields_take_transformers_defaults() {
    let bare = |name: &str| parse(json!({"architectures": [name]})).unwrap();
    let sizes = |m: &ModelConfig| {
        (
            m.vocab_size,
            m.hidden_size,
            m.intermediate_size,
            m.num_layers,
            m.num_heads,
            m.num_kv_heads,
            m.head_dim,
        )
    };
    let m = bare("LlamaForCausalLM");
    assert_eq!(sizes(&m), (32000, 4096, 11008, 32, 32, 32, 128));
    assert_eq!((m.max_position_embeddings, m.rms_norm_eps, &m.eos[..]), (2048, 1e-6, &[2][..]));
    assert_eq!((m.dtype, m.rope.theta), (WeightDtype::F16, 1e4));
    assert!(!m.tie_word_embeddings && !m.attention_bias && !m.output_bias && m.sliding_window.is_none());
    let m = bare("Qwen2ForCausalLM");
    assert_eq!(sizes(&m), (151936, 4096, 22016, 32, 32, 32, 128));
    assert_eq!(m.max_position_embeddings, 32768);
    assert!(m.attention_bias && !m.output_bias && !m.qk_norm && m.eos.is_empty());
    let m = bare("Qwen3ForCausalLM");
    assert_eq!(sizes(&m), (151936, 4096, 22016, 32, 32, 32, 128));
    assert!(!m.attention_bias && m.qk_norm);
    let m = bare("MistralForCausalLM");
    assert_eq!(sizes(&m), (32000, 4096, 14336, 32, 32, 8, 128));
    assert_eq!((m.max_position_embeddings, m.window(0), m.window(1)), (131072, Some(4096), Some(4096)));

    let m = parse(json!({"model_type": "qwen3", "hidden_size": 1024})).unwrap();
    assert_eq!(m.head_dim, 128, "Qwen3's default does not follow hidden_size");
    let m =
        parse(json!({"model_type": "mistral", "num_key_value_heads": null, "sliding_window": null})).unwrap();
    assert_eq!((m.num_kv_heads, m.sliding_window), (32, None));
    let m = parse(json!({"model_type": "llama", "num_attention_heads": 16, "eos_token_id": null})).unwrap();
    assert_eq!((m.num_kv_heads, m.head_dim, m.eos.len()), (16, 256, 0));
    let m = parse(with(llama(), json!({"attention_bias": true}))).unwrap();
    assert!(m.attention_bias && m.output_bias);
}

#[test]
fn names_of_transformers_4_and_5_are_read() {
    let scaled = json!({"rope_type": "linear", "factor": 2});
    for more in [
        json!({"rope_theta": 5000, "rope_scaling": scaled}),
        json!({"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        json!({"rope_parameters": with(scaled.clone(), json!({"rope_theta": 5000.0}))}),
        json!({"rope_parameters": {"full_attention": with(scaled.clone(), json!({"rope_theta": 5000.0}))}}),
        json!({"rope_theta": 5000.0, "rope_scaling": null, "rope_parameters": scaled}),
    ] {
        let model = parse(with(llama(), more.clone())).unwrap();
        let expected = RopeConfig { theta: 5000.0, scaling: RopeScaling::Linear { factor: 2.0 } };
        assert_eq!(model.rope, expected, "{more}");
    }
    for (more, dtype) in [
        (json!({"dtype": "bfloat16", "torch_dtype": "float16"}), WeightDtype::Bf16),
        (json!({"torch_dtype": "float32"}), WeightDtype::F32),
        (json!({"torch_dtype": "torch.float16"}), WeightDtype::F16),
        (json!({"dtype": null, "torch_dtype": "bfloat16"}), WeightDtype::Bf16),
    ] {
        assert_eq!(parse(with(llama(), more)).unwrap().dtype, dtype);
    }
}

#[test]
fn sliding_windows_count_only_where_they_act() {
    let qwen = |more: Value| {
        let base = with(llama(), json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}));
        let config = parse(with(base, more)).unwrap();
        [config.window(0), config.window(1)]
    };
    assert_eq!(qwen(json!({})), [None; 2]);
    assert_eq!(qwen(json!({"use_sliding_window": true})), [None; 2], "max_window_layers = 28 > 2 layers");
    assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 1})), [None, Some(32)]);
    assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 0})), [Some(32); 2]);
    assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 2})), [None; 2]);
    let types = json!(["sliding_attention", "full_attention"]);
    assert_eq!(qwen(json!({"use_sliding_window": true, "layer_types": types})), [Some(32), None]);
    assert_eq!(qwen(json!({"layer_types": types})), [None; 2]);
}

#[test]
fn sliding_layers_with_a_rotary_embedding_of_their_own_are_refused() {
    let types = json!(["full_attention", "sliding_attention"]);
    let qwen = |slides: bool, theta: f64| {
        let rope = json!({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": theta}});
        parse(with(
            llama(),
            json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": slides,
                "layer_types": types, "rope_scaling": null, "rope_parameters": rope}),
        ))
    };
    let message = qwen(true, 1e4).unwrap_err();
    for word in ["`rope_parameters.sliding_attention`", "`full_attention`"] {
        assert!(message.contains(word), "{message}");
    }
    assert_eq!(qwen(true, 1e6).unwrap().rope.theta, 1e6);
    assert_eq!(qwen(false, 1e4).unwrap().rope.theta, 1e6, "no layer slides");
}

#[test]
fn unsupported_configurations_are_refused() {
    let all = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MistralForCausalLM";
    for (more, names) in [
        (json!({"architectures": ["GPT2LMHeadModel"]}), &["`architectures`", "GPT2LMHeadModel", all][..]),
        (
            json!({"architectures": null, "model_type": "gemma"}),
            &["`model_type`", "\"gemma\"", "no Gemma model", all],
        ),
        (
            json!({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}),
            &[
                "`architectures`: the architecture Gemma2ForCausalLM (model type \"gemma2\") is not",
                "no Gemma model",
                all,
            ],
        ),
        (
            json!({"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}),
            &["Gemma3ForConditionalGeneration", "no Gemma model", "model types llama, qwen2, qwen3, mistral"],
        ),
        (
            json!({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}),
            &["Qwen3MoeForCausalLM", "mixture-of-experts models cannot run", all],
        ),
        (
            json!({"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}}),
            &["Mistral3ForConditionalGeneration", "models of images and text cannot run", all],
        ),
        (json!({"architectures": [], "model_type": null}), &["`architectures`", "missing", all]),
        (json!({"hidden_act": "gelu"}), &["`hidden_act`", "gelu", "silu"]),
        (json!({"quantization_config": {"bits": 4}}), &["`quantization_config`"]),
        (json!({"mlp_bias": true}), &["`mlp_bias`"]),
        (json!({"final_logit_softcapping": 30.0}), &["`final_logit_softcapping`"]),
        (json!({"dtype": "float8_e4m3fn"}), &["`dtype`", "float8_e4m3fn", "bfloat16"]),
        (json!({"partial_rotary_factor": 0.5}), &["`partial_rotary_factor`", "0.5"]),
        (
            json!({"rope_parameters": {"partial_rotary_factor": 0.25}}),
            &["`rope_parameters.partial_rotary_factor`", "0.25"],
        ),
        (
            json!({"rope_scaling": {"type": "longrope", "factor": 4}}),
            &["`rope_scaling.type`: the rope type \"longrope\" is", "llama3"],
        ),
        (json!({"rope_scaling": {"type": "yarn"}}), &["`rope_scaling.factor`", "missing"]),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": -1}}),
            &["`rope_scaling.beta_fast`", "positive, found -1"],
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 0}}),
            &["`rope_scaling.attention_factor`", "positive, found 0"],
        ),
        (
            json!({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}}),
            &["`rope_theta`: yarn needs more than 1, found 1"],
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 0}}),
            &["`rope_scaling.original_max_position_embeddings`", "at least 1"],
        ),
        (json!({"rope_parameters": {"rope_type": "longrope"}}), &["`rope_parameters.rope_type`", "longrope"]),
        (json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}), &["dynamic"]),
        (json!({"rope_scaling": {"rope_type": "linear"}}), &["`rope_scaling.factor`", "missing"]),
        (
            json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}),
            &["`rope_scaling.factor`", "positive"],
        ),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8}}), &["low_freq_factor", "missing"]),
        (
            json!({"layer_types": ["full_attention", "linear_attention"]}),
            &["`layer_types[1]`", "linear_att", "sliding_attention"],
        ),
        (json!({"layer_types": ["full_attention"]}), &["`layer_types`", "1 entry,", "2"]),
        (json!({"layer_types": ["sliding_attention", "full_attention"]}), &["`layer_types`", "sliding"]),
        (json!({"num_key_value_heads": 3}), &["`num_key_value_heads`", "3", "8"]),
        (json!({"num_key_value_heads": 0}), &["`num_key_value_heads`", "at least 1"]),
        (json!({"num_attention_heads": 7, "num_key_value_heads": 7}), &["`hidden_size`", "multiple", "7"]),
        (json!({"head_dim": 7}), &["`head_dim`", "odd"]),
        (json!({"hidden_size": "64"}), &["`hidden_size`", "the string \"64\""]),
        (json!({"vocab_size": -1}), &["`vocab_size`", "-1"]),
        (json!({"vocab_size": 4294967296u64}), &["`vocab_size`", "4294967296"]),
        (json!({"vocab_size": 2147483648u32}), &["`vocab_size`", "at most"]),
        (json!({"num_hidden_layers": 16385}), &["`num_hidden_layers`", "16384"]),
        (json!({"rms_norm_eps": 0.0}), &["`rms_norm_eps`"]),
        (json!({"rope_theta": -1.0}), &["`rope_theta`", "-1"]),
        (json!({"eos_token_id": "x"}), &["`eos_token_id`", "\"x\""]),
        (json!({"eos_token_id": [1, 2.5]}), &["`eos_token_id`", "2.5"]),
        (json!({"head_dim": 1073741824}), &["too large"]),
        (
            json!({"hidden_size": 4294967288u32, "head_dim": 64, "vocab_size": 2147483647, "intermediate_size": 2147483647, "num_hidden_layers": 16384}),
            &["too large"],
        ),
    ] {
        let message = parse(with(llama(), more.clone())).expect_err(&more.to_string());
        for name in names {
            assert!(message.contains(name), "{more}\n gives {message}\n without {name}");
        }
    }
}

/// transformers goes by `model_type` and would read the weights as those of another family.
#[test]
fn architectures_and_model_type_must_agree() {
    let names = |architectures: &[&str], model_type: Value| {
        let more = json!({"architectures": architectures, "model_type": model_type});
        parse(with(llama(), more)).map(|model| model.architecture())
    };
    for (architecture, model_type) in [
        ("LlamaForCausalLM", "llama"),
        ("Qwen2ForCausalLM", "qwen2"),
        ("Qwen3ForCausalLM", "qwen3"),
        ("MistralForCausalLM", "mistral"),
    ] {
        for other in ["llama", "qwen2", "qwen3", "mistral", "gemma2", "another", ""] {
            let found = names(&[architecture], json!(other));
            if other == model_type {
                assert_eq!(found.unwrap(), architecture);
                continue;
            }
            let message = found.unwrap_err();
            let types = [format!("`model_type`: \"{other}\""), format!("\"{model_type}\"")];
            assert!(message.contains(&format!("config.json: `architectures`: {architecture} ")), "{message}");
            assert!(types.iter().all(|word| message.contains(word)), "{message}");
        }
        assert_eq!(names(&[architecture], Value::Null).unwrap(), architecture);
        assert_eq!(names(&[], json!(model_type)).unwrap(), architecture);
    }
    // One of several suffices.
    let several = ["LlamaForCausalLM", "MistralForCausalLM", "MistralModel"];
    assert_eq!(names(&several, json!("mistral")).unwrap(), "MistralForCausalLM");
    assert!(names(&several, json!("qwen2")).is_err());
}

/// As in Python's json, the last of several values of a field counts, at every depth.
#[test]
fn of_fields_that_are_given_twice_the_last_counts() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"architectures": ["Qwen3ForCausalLM"], "vocab_size": "x", "hidden_size": 8, "hidden_size": 64,
        "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "vocab_size": 1000, "eos_token_id": 1,
        "rope_parameters": {"rope_theta": 1, "rope_theta": 500000.0, "rope_type": "yarn", "rope_type": "default"}}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let generation = r#"{"eos_token_id": 5, "do_sample": true, "top_k": "x", "top_k": 3, "do_sample": false, "eos_token_id": [6, 7]}"#;
    std::fs::write(folder.path().join("generation_config.json"), generation).unwrap();
    let model = read_config(folder.path(), || Ok(WeightDtype::F32)).unwrap();
    assert_eq!((model.architecture(), model.hidden_size, model.vocab_size), ("LlamaForCausalLM", 64, 1000));
    assert_eq!((model.rope.theta, model.eos), (5e5, vec![6, 7]));
    assert_eq!((model.generation.do_sample, model.generation.options.top_k), (false, Some(3)));
}

#[test]
fn unused_fields_are_ignored() {
    let more = json!({"pretraining_tp": 4, "attention_dropout": 0.1, "use_cache": "whatever", "sliding_window": 7,
        "auto_map": {}, "rope_interleaved": false});
    let without = parse(llama()).unwrap();
    let with = parse(with(llama(), more)).unwrap();
    assert_eq!(ModelConfig { fields: without.fields.clone(), ..with }, without);
}

#[test]
fn generation_config_decides_the_end_of_sequence() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| {
        std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    };
    let read = || read_config(folder.path(), || Ok(WeightDtype::F32)).unwrap().eos;
    write("config.json", with(llama(), json!({"eos_token_id": 7})));
    assert_eq!(read(), [7]);
    write("generation_config.json", json!({"eos_token_id": [9, 8, 9, 5000, -1]}));
    assert_eq!(read(), [8, 9]);
    write("generation_config.json", json!({"eos_token_id": 4}));
    assert_eq!(read(), [4]);
    write("generation_config.json", json!({"eos_token_id": null, "top_k": 1}));
    assert_eq!(read(), [7]);
    std::fs::write(folder.path().join("generation_config.json"), "{\n 1").unwrap();
    let error = read_config(folder.path(), || Ok(WeightDtype::F32)).unwrap_err();
    assert!(error.to_string().contains("generation_config.json:2:"), "{error}");
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    let error = read_config(folder.path(), || Ok(WeightDtype::F32)).unwrap_err();
    assert!(matches!(error, InputError::Unreadable { .. }), "{error}");
}

/// Frequencies and tables that transformers computes (testdata/make.py).
#[test]
fn rope_tables_equal_transformers() {
    let cases: Value = serde_json::from_str(include_str!("../../../testdata/rope.json")).unwrap();
    let floats =
        |v: &Value| -> Vec<f64> { v.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect() };
    for case in cases.as_array().unwrap() {
        let name = &case["name"];
        let model = parse(case["config"].clone()).unwrap();
        let half = model.head_dim as usize / 2;
        let frequencies = inverse_frequencies(&model.rope, model.head_dim);
        for (i, (got, expected)) in frequencies.iter().zip(floats(&case["inverse_frequencies"])).enumerate() {
            let relative = (f64::from(*got) / expected - 1.0).abs();
            assert!(relative < 5e-7, "{name} {i}: {got} {expected}");
        }
        let positions = floats(&case["positions"]);
        let table = rope_table(&model.rope, model.head_dim, positions[positions.len() - 1] as u32 + 1);
        for (p, position) in positions.iter().enumerate() {
            let row = &table[*position as usize * 2 * half..][..2 * half];
            let expected = [floats(&case["cos"][p]), floats(&case["sin"][p])].concat();
            assert_eq!(expected.len(), row.len());
            for (i, (got, expected)) in row.iter().zip(expected).enumerate() {
                let error = (f64::from(*got) - expected).abs();
                assert!(
                    error < 1e-6 + 1.5e-7 * position,
                    "{name} position {position}, {i}: {got} {expected}"
                );
            }
        }
    }
}

proptest! {
    /// No JSON makes the reader panic.
    #[test]
    fn arbitrary_fields_never_panic(
        name in prop::sample::select(vec!["hidden_size", "head_dim", "rope_scaling", "rope_parameters", "layer_types",
            "eos_token_id", "architectures", "num_key_value_heads", "vocab_size", "num_hidden_layers", "rope_theta",
            "rms_norm_eps", "dtype", "sliding_window", "intermediate_size", "max_position_embeddings"]),
        value in prop_oneof![
            any::<f64>().prop_map(|v| json!(v)), any::<u64>().prop_map(|v| json!(v)),
            (0u64..1 << 33).prop_map(|v| json!(v)), any::<i64>().prop_map(|v| json!([v])),
            ".{0,8}".prop_map(|v| json!(v)), ".{0,8}".prop_map(|v| json!([v])),
            any::<f64>().prop_map(|v| json!({"type": "llama3", "factor": v, "low_freq_factor": 1,
                "high_freq_factor": v, "original_max_position_embeddings": 8})),
            any::<f64>().prop_map(|v| json!({"type": "yarn", "factor": v, "beta_fast": v})),
        ],
    ) {
        if let Ok(model) = parse(with(llama(), json!({name: value}))) {
            prop_assert!(model.head_dim > 0 && model.num_heads % model.num_kv_heads == 0);
            if model.head_dim < 1 << 12 {
                rope_table(&model.rope, model.head_dim, 3);
            }
        }
    }
}

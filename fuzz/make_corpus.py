#!/usr/bin/env python3
"""Writes the first inputs of each fuzz target to fuzz/corpus/TARGET. Inputs that a fuzzer has found are in the same
folder.

usage: fuzz/make_corpus.py [MPK_RUN]      (with MPK_RUN, also task graphs that it emits)
"""
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def put(target, name, content):
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = json.dumps(content, separators=(",", ":")).encode()
    (folder / name).write_bytes(content)


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 9, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": [1, 2],
    "rope_theta": 1e4,
}
LLAMA = dict(CONFIG, architectures=["LlamaForCausalLM"], attention_bias=True, rope_parameters={
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32})
MISTRAL = dict(CONFIG, architectures=["MistralForCausalLM"], sliding_window=32, dtype="bfloat16",
               rope_scaling={"type": "linear", "factor": 2.0})
QWEN2 = dict(CONFIG, architectures=["Qwen2ForCausalLM"], use_sliding_window=False, max_window_layers=1,
             tie_word_embeddings=False, layer_types=["full_attention"])


def model_json():
    base = {"schema": "mpk-model/1", "weights": {"random": {"seed": 1}}}
    for name, config in [("qwen3", CONFIG), ("llama", LLAMA), ("mistral", MISTRAL), ("qwen2", QWEN2)]:
        put("model_json", name, dict(base, config=config, max_batch=2, max_seq_len=32, page_size=16,
            runtime={"placement": "dynamic", "allreduce": "one-shot", "prefill_chunk": 8, "kv_pages": 4, "workers": 2},
            generate={"prompts": ["x"], "prompt_tokens": [[1, 2], [3]], "max_new_tokens": 4, "ignore_eos": True}))
    put("model_json", "tiny", (ROOT / "examples/tiny/model.json").read_bytes())
    for path in sorted((ROOT / "examples/graph").glob("*.json")):
        put("model_json", "graph-" + path.stem, path.read_bytes())


def tensors(config):
    h, q, kv = config["hidden_size"], config["num_attention_heads"] * 4, config["num_key_value_heads"] * 4
    yield "model.embed_tokens.weight", [config["vocab_size"], h]
    layer = {"input_layernorm": [h], "post_attention_layernorm": [h], "self_attn.q_proj": [q, h],
             "self_attn.k_proj": [kv, h], "self_attn.v_proj": [kv, h], "self_attn.o_proj": [h, q],
             "self_attn.q_norm": [4], "self_attn.k_norm": [4], "mlp.gate_proj": [8, h], "mlp.up_proj": [8, h],
             "mlp.down_proj": [h, 8]}
    for name, shape in layer.items():
        yield f"model.layers.0.{name}.weight", shape
    yield "model.norm.weight", [h]


def safetensors(config, dtype, size):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors(config):
        count = size
        for extent in shape:
            count *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + count]}
        offset += count
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


def checkpoint():
    for dtype, size in [("F32", 4), ("BF16", 2), ("F16", 2)]:
        put("checkpoint", dtype.lower(), json.dumps(CONFIG).encode() + b"\0" + safetensors(CONFIG, dtype, size))
    put("checkpoint", "no-dtype", json.dumps({k: v for k, v in CONFIG.items() if k != "torch_dtype"}).encode()
        + b"\0" + safetensors(CONFIG, "BF16", 2))
    put("checkpoint", "lfs", json.dumps(CONFIG).encode() + b"\0version https://git-lfs.github.com/spec/v1\n")
    for name, config in [("llama", LLAMA), ("mistral", MISTRAL), ("qwen2", QWEN2)]:
        put("checkpoint", name, json.dumps(config).encode() + b"\0" + safetensors(config, "F32", 4))


def tokenizer_json():
    def word_level(**fields):
        return dict({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [
                {"id": 3, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": True}],
            "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
        }, **fields)

    regex = {"Regex": "\\s+(?!\\S)|\\w+"}
    fields = {
        "plain": {},
        "truncation": {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
                       "padding": {"strategy": {"Fixed": 4}, "direction": "Left", "pad_to_multiple_of": None,
                                   "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}},
        "template": {"post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}}}},
        "template-unknown": {"post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}},
        "bert": {"normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                                "strip_accents": None, "lowercase": True},
                 "pre_tokenizer": {"type": "BertPreTokenizer"},
                 "post_processor": {"type": "BertProcessing", "sep": ["a", 0], "cls": ["b", 1]},
                 "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
        "roberta": {"post_processor": {"type": "RobertaProcessing", "sep": ["a", 0], "cls": ["b", 1],
                                       "trim_offsets": True, "add_prefix_space": True},
                    "decoder": {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True}},
        "normalizers": {"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFD"}, {"type": "NFKC"}, {"type": "StripAccents"}, {"type": "Lowercase"}, {"type": "Nmt"},
            {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Prepend", "prepend": "_"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
            {"type": "Replace", "pattern": regex, "content": "x"}, {"type": "ByteLevel"}]}},
        "precompiled": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAP////8AAAAA"}},
        "pre-tokenizers": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": regex, "behavior": "MergedWithPrevious", "invert": False},
            {"type": "Split", "pattern": {"String": ","}, "behavior": "Removed", "invert": True},
            {"type": "Punctuation", "behavior": "Isolated"}, {"type": "Digits", "individual_digits": True},
            {"type": "CharDelimiterSplit", "delimiter": "!"}, {"type": "UnicodeScripts"},
            {"type": "WhitespaceSplit"},
            {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}]}},
        "fixed": {"pre_tokenizer": {"type": "FixedLength", "length": 3}},
        "decoders": {"decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}, {"type": "ByteLevel",
             "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": False},
            {"type": "BPEDecoder", "suffix": "</w>"}]}},
        "bpe": {"model": {"type": "BPE", "dropout": 0.5, "unk_token": "<unk>", "continuing_subword_prefix": None,
                          "end_of_word_suffix": "</w>", "fuse_unk": True, "byte_fallback": True,
                          "ignore_merges": False, "vocab": {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "<0x0A>": 4},
                          "merges": [["a", "b"]]}},
        "word-piece": {"model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                                 "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1, "##a": 2}}},
        "unigram": {"model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
                              "vocab": [["<unk>", 0.0], ["a", -1.0], ["_a", -2.0], ["b", -3.5]]}},
    }
    for name, changed in fields.items():
        put("tokenizer_json", name, word_level(**changed))


def task_graph_json(mpk_run):
    for name, arguments in [
        ("linear", ["examples/graph/linear.json"]),
        ("mlp", ["examples/graph/mlp.json"]),
        ("mlp-dynamic", ["examples/graph/mlp.json", "--placement", "dynamic"]),
        ("mlp-2", ["examples/graph/mlp.json", "--ranks", "2"]),
        ("mlp-2-one-shot", ["examples/graph/mlp.json", "--ranks", "2", "--allreduce", "one-shot"]),
        ("mlp-2-dynamic", ["examples/graph/mlp.json", "--ranks", "2", "--placement", "dynamic",
                           "--allreduce", "copy-reduce"]),
    ]:
        with tempfile.TemporaryDirectory() as folder:
            command = [mpk_run, *arguments, "--workers", "2", "--emit-graph", folder]
            subprocess.run(command, cwd=ROOT, check=True)
            path = sorted(Path(folder).glob("rank-*.json"))[-1]
            put("task_graph_json", name, path.read_bytes())


model_json()
checkpoint()
tokenizer_json()
if len(sys.argv) > 1:
    task_graph_json(Path(sys.argv[1]).resolve())

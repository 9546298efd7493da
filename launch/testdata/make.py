"""Writes the reference data of launch's unit tests with Hugging Face's own code (transformers 5.23, tokenizers).

Usage: python make.py   (in this folder; needs torch, transformers, tokenizers)
"""

import json
import os
import tempfile

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

TEXT = """The quick brown fox jumps over the lazy dog. Zażółć gęślą jaźń, 12345! Übergrößenträger,
naïve café; the dog sleeps. def f(x): return x + 1 the fox the dog over and over again.""".splitlines()
PROMPTS = [
    "The quick fox",
    " leading space, two  spaces",
    "emoji 😀👍🏽 and 中文字",
    "<s>special</s> inside<|end|>",
    "line\nbreak\ttab",
]


def rope():
    cases = [
        ("default", {"rope_type": "default"}, 64, 10000.0),
        ("wide", {"rope_type": "default"}, 128, 1000000.0),
        ("linear", {"rope_type": "linear", "factor": 4.0}, 64, 10000.0),
        (
            "llama3",
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            64,
            500000.0,
        ),
        # As Qwen3's model card recommends.
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 128, 1000000.0),
        (
            "yarn with all fields",
            {
                "rope_type": "yarn",
                "factor": 16.0,
                "attention_factor": 0.75,
                "beta_fast": 24.0,
                "beta_slow": 2.0,
                "truncate": False,
                "original_max_position_embeddings": 2048,
            },
            64,
            10000.0,
        ),
        (
            "yarn with mscale",
            {
                "rope_type": "yarn",
                "factor": 40.0,
                "mscale": 0.707,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
            64,
            10000.0,
        ),
        # The first and the last pair of the blend are the same one.
        (
            "yarn with equal betas",
            {"rope_type": "yarn", "factor": 8.0, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
            64,
            10000.0,
        ),
    ]
    positions = [0, 1, 2, 7, 100, 1000, 4095]
    out = []
    for name, parameters, head_dim, theta in cases:
        parameters = parameters | {"rope_theta": theta}
        config = LlamaConfig(
            hidden_size=head_dim * 4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=head_dim,
            rope_parameters=dict(parameters),
            max_position_embeddings=131072,
        )
        rotary = LlamaRotaryEmbedding(config)
        cos, sin = rotary(torch.zeros(1), torch.tensor([positions]))
        config = json.loads(config.to_json_string(use_diff=True)) | {"architectures": ["LlamaForCausalLM"]}
        out.append(
            {
                "name": name,
                "config": config,
                "inverse_frequencies": rotary.inv_freq.tolist(),
                "positions": positions,
                "cos": [row[: head_dim // 2].tolist() for row in cos[0]],
                "sin": [row[: head_dim // 2].tolist() for row in sin[0]],
            }
        )
    return out


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)],
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    tokenizer.post_processor = processors.Sequence(
        [tokenizer.post_processor, processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])]
    )
    # A training run may leave this setting in the file; encoding a prompt must not use it.
    tokenizer.enable_truncation(max_length=4)
    return tokenizer


def byte_fallback():
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for token in ["▁", "T", "h", "e", "q", "u", "i", "c", "k", "f", "o", "x", "Th", "The", "▁The", "▁q", "▁f", "▁fo"]:
        vocab[token] = len(vocab)
    merges = [("T", "h"), ("Th", "e"), ("▁", "The"), ("▁", "q"), ("▁", "f"), ("▁f", "o")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ["<unk>", "<s>", "</s>"]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def tokenizer_case(tokenizer):
    text = tokenizer.to_str()
    plain = Tokenizer.from_str(text)
    plain.no_truncation()
    cases = []
    for prompt in PROMPTS:
        ids = plain.encode(prompt).ids
        cases.append({"text": prompt, "ids": ids, "decoded": plain.decode(ids)})
    return {"tokenizer": json.loads(text), "cases": cases}


def added_tokens():
    """Folders whose tokens are not all in tokenizer.json, and what AutoTokenizer (5.24) makes of them."""

    def token(content, **flags):
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
        return {"content": content} | plain | flags

    def tokenizer(normalizer=None, added=()):
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(added),
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {"[UNK]": 0, "a": 1, "b": 2, "<s>": 3, "x": 4},
                "unk_token": "[UNK]",
            },
        }

    lower = {"type": "Lowercase"}
    spaces = {"pre_tokenizer": None}
    exact = {"normalized": False}
    special = exact | {"special": True}
    listed = lambda *tokens: {"added_tokens_decoder": {str(i): t for i, t in tokens}}  # noqa: E731
    cases = [
        ("nothing is added", tokenizer(), {}, {}),
        ("an ordinary token", tokenizer(), listed((5, token("<X>"))), {}),
        ("a special token", tokenizer(), listed((5, token("<X>", **special))), {}),
        ("normalized", tokenizer(lower), listed((5, token("<X>"))), {}),
        ("not normalized", tokenizer(lower), listed((5, token("<X>", **exact))), {}),
        ("no strip", tokenizer() | spaces, listed((5, token("<X>"))), {}),
        ("lstrip", tokenizer() | spaces, listed((5, token("<X>", lstrip=True))), {}),
        ("rstrip", tokenizer() | spaces, listed((5, token("<X>", rstrip=True))), {}),
        ("single_word", tokenizer(), listed((5, token("<X>", single_word=True))), {}),
        ("only content", tokenizer(lower), listed((5, {"content": "<X>"})), {}),
        ("only content and special", tokenizer(lower), listed((5, {"content": "<X>", "special": True})), {}),
        ("by id, not by place", tokenizer(), listed((6, token("<X>")), (5, token("<Y>"))), {}),
        ("of the vocabulary", tokenizer(), listed((3, token("<s>", **special))), {}),
        (
            "other flags than in tokenizer.json",
            tokenizer(None, [token("<X>") | {"id": 5}]),
            listed((5, token("<X>", lstrip=True, **special))),
            {},
        ),
        (
            "after those of tokenizer.json",
            tokenizer(None, [token("<Y>") | {"id": 5}]),
            listed((5, token("<Y>")), (6, token("<X>"))),
            {},
        ),
        ("special by name", tokenizer(), {"pad_token": "<X>"} | listed((5, token("<X>"))), {}),
        ("a new special token by name", tokenizer(), {"pad_token": "<X>"}, {}),
        ("a word of the vocabulary that is special by name", tokenizer(), {"bos_token": "<s>"}, {}),
        (
            "an object by name",
            tokenizer(),
            {"bos_token": {"__type": "AddedToken"} | token("<s>", lstrip=True)},
            {},
        ),
        (
            "all kinds of names",
            tokenizer(),
            {
                "pad_token": "<Y>",
                "image_token": "<Z>",
                "bos_token": "<X>",
                "extra_special_tokens": ["<s>"],
                "add_bos_token": False,
            },
            {},
        ),
        ("additional_special_tokens", tokenizer(), {"additional_special_tokens": ["<X>", "<s>"]}, {}),
        ("named extra tokens", tokenizer(), {"extra_special_tokens": {"image_token": "<X>"}}, {}),
        ("added_tokens.json", tokenizer(), {}, {"added_tokens.json": {"<Y>": 6, "<X>": 5}}),
        (
            "special in added_tokens.json",
            tokenizer(lower),
            {"pad_token": "<X>"},
            {"added_tokens.json": {"<X>": 5}},
        ),
        ("added_tokens.json does not count", tokenizer(), listed(), {"added_tokens.json": {"<X>": 5}}),
        (
            "tokenizer.json counts before added_tokens.json",
            tokenizer(None, [token("<X>", lstrip=True) | {"id": 5}]),
            {},
            {"added_tokens.json": {"<X>": 5}},
        ),
        (
            "special_tokens_map.json",
            tokenizer() | spaces,
            {"bos_token": "<Y>"},
            {"special_tokens_map.json": {"bos_token": "<s>", "pad_token": token("<X>", lstrip=True)}},
        ),
        (
            "special_tokens_map.json does not count",
            tokenizer(),
            listed(),
            {"special_tokens_map.json": {"pad_token": "<X>"}},
        ),
    ]
    texts = ["a <X> b", "a<X>b", "A <x> xa", "a <s> b", "<X><Y> <Z>", " <X>  <Y>b"]
    out = []
    for name, tokenizer_json, config, others in cases:
        files = {"tokenizer.json": tokenizer_json, "tokenizer_config.json": config} | others
        with tempfile.TemporaryDirectory() as folder:
            # The class that adds nothing of its own.
            own = {
                "tokenizer_config.json": {"tokenizer_class": "TokenizersBackend"} | config,
                "config.json": {"model_type": "qwen3"},
            }
            for file, value in (files | own).items():
                with open(os.path.join(folder, file), "w") as f:
                    json.dump(value, f)
            loaded = AutoTokenizer.from_pretrained(folder)
        results = []
        for text in texts:
            ids = loaded(text)["input_ids"]
            # The tokenizers library decodes an added token as its normalized text (0.23) or as it is (0.22).
            decoded = None if tokenizer_json["normalizer"] else loaded.decode(ids, skip_special_tokens=True)
            results.append({"text": text, "ids": ids, "decoded": decoded})
        out.append({"name": name, "files": files, "results": results})
    return out


if __name__ == "__main__":
    with open("added_tokens.json", "w") as f:
        json.dump(added_tokens(), f)
    with open("rope.json", "w") as f:
        json.dump(rope(), f)
    for name, tokenizer in [("byte_level", byte_level()), ("byte_fallback", byte_fallback())]:
        with open(f"{name}.json", "w") as f:
            json.dump(tokenizer_case(tokenizer), f, ensure_ascii=False)

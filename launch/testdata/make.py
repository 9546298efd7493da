"""Writes the reference data of launch's unit tests with Hugging Face's own code (transformers 5.23, tokenizers).

Usage: python make.py   (in this folder; needs torch, transformers, tokenizers)
"""

import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig
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


if __name__ == "__main__":
    with open("rope.json", "w") as f:
        json.dump(rope(), f)
    for name, tokenizer in [("byte_level", byte_level()), ("byte_fallback", byte_fallback())]:
        with open(f"{name}.json", "w") as f:
            json.dump(tokenizer_case(tokenizer), f, ensure_ascii=False)

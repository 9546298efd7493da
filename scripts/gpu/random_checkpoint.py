"""Writes a Qwen3 checkpoint of random bf16 weights without torch, for what only reads it: its tokens mean nothing."""

import json
import math

import numpy as np

BLOCK = 1 << 24  # values that repeat


def shapes(config):
    """Dimensions of every tensor by its name."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
            "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }
        found |= {f"model.layers.{layer}.{name}.weight": dims for name, dims in of_layer.items()}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def write(folder, config, sizes, seed):
    """Writes config.json, model.json with `sizes`, and one safetensors file into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.json").write_text(json.dumps({"schema": "mpk-model/1", "checkpoint": ".", **sizes}))
    header, end, tensors = {}, 0, shapes(config)
    for name, dims in tensors.items():
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [end, end + 2 * math.prod(dims)]}
        end += 2 * math.prod(dims)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = np.random.default_rng(seed).normal(scale=0.02, size=BLOCK).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for left in range(end // 2, 0, -BLOCK):
            file.write(memoryview(bits[:left]))

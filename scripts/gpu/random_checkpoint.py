"""Writes a Qwen3 checkpoint in bf16 to measure loading. All rows of a tensor are equal, so its tokens mean nothing."""

import json

import numpy as np

from op_graph import write_safetensors


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
    found = shapes(config)
    row = np.random.default_rng(seed).normal(scale=0.02, size=max(dims[-1] for dims in found.values())).astype(np.float32)
    bits = (row.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {name: np.broadcast_to(bits[:dims[-1]], dims) for name, dims in found.items()}
    write_safetensors(folder / "model.safetensors", tensors)

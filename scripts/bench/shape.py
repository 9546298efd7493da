"""The costs of a Qwen3 shape: bytes of weights read per token, bytes of a rank's shard and of its KV cache."""

import json
from pathlib import Path

BYTES = 2  # of a bfloat16


def read_config(model):
    """The "config" object of a model.json as `mpk-bench model NAME` prints it."""
    return json.loads(Path(model).read_text())["config"]


def parameters(config, ranks=1):
    """Parameters that one of `ranks` ranks holds: heads, intermediate size and vocabulary are sharded, norms are not,
    and if there are fewer KV heads than ranks, several ranks hold the same KV head."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads = config["num_attention_heads"] // ranks
    kv_heads = max(1, config["num_key_value_heads"] // ranks)
    intermediate = -(-config["intermediate_size"] // ranks)
    vocabulary = -(-config["vocab_size"] // ranks)
    attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden + 2 * head_dim
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    return config["num_hidden_layers"] * layer + hidden + tables * vocabulary * hidden


def bytes_per_token(config):
    """Weights that decoding one token at batch 1 on one rank must read: all but an untied embedding."""
    untied = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"]
    return BYTES * (parameters(config) - untied)


def shard_bytes(config, ranks):
    """Weights of one rank, in bytes."""
    return BYTES * parameters(config, ranks)


def kv_bytes(config, ranks, batch, sequence, page=64):
    """KV cache of one rank, in bytes, for `batch` requests of `sequence` tokens each."""
    kv_heads = max(1, config["num_key_value_heads"] // ranks)
    positions = -(-sequence // page) * page
    return BYTES * batch * positions * 2 * kv_heads * config["head_dim"] * config["num_hidden_layers"]

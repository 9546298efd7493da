"""The shape of one rank's share of a model, from a Hugging Face config."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Shape:
    """Sizes of the model, and of one rank's share."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int
    epsilon: float
    theta: float
    qk_norm: bool
    tied: bool

    @classmethod
    def read(cls, path):
        """Reads a config.json, or a model.json with a `config`."""
        config = json.loads(Path(path).read_text())
        config = config.get("config", config)
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        return cls(
            hidden=config["hidden_size"], layers=config["num_hidden_layers"], heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head=config.get("head_dim") or config["hidden_size"] // heads,
            inner=config["intermediate_size"], vocabulary=config["vocab_size"],
            epsilon=config.get("rms_norm_eps", 1e-6), theta=rope.get("rope_theta", config.get("rope_theta", 1e4)),
            qk_norm="Qwen3" in (config.get("architectures") or [""])[0],
            tied=bool(config.get("tie_word_embeddings")),
        )

    def share(self, ranks):
        """One rank's heads, KV heads, inner columns and vocabulary."""
        return self.heads // ranks, max(1, self.kv_heads // ranks), self.inner // ranks, -(-self.vocabulary // ranks)

"""The model.json files that the parts run: fixtures, repeats, real shapes with random weights."""

import json
from functools import cache
from pathlib import Path

from common import REPOSITORY

FIXTURES = ["llama", "qwen2", "qwen3", "mistral", "mistral-window", "qwen2-window", "tiny"]
LOGPROBS = 5  # everywhere, so that parts share compiled code
SHAPES = {  # hidden, layers, heads, kv heads, intermediate, vocabulary, tied; head size 128
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, 151936, True),
    "qwen3-8b": (4096, 36, 32, 8, 12288, 151936, False),
    "llama3-70b": (8192, 80, 64, 8, 28672, 128256, False),
}
# Models that huggingface.py and random_checkpoint.py make.
LARGE_SIZES = {"max_batch": 4, "max_seq_len": 512, "page_size": 64}
LARGE_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 0,
}


def fixture_folder(name):
    """Folder of a fixture's checkpoint and model.json."""
    return REPOSITORY / ("examples/tiny" if name == "tiny" else f"tests/fixtures/{name}")


@cache
def expected(name):
    """What Hugging Face computed with a fixture (tests/fixtures/README.md)."""
    return json.loads((REPOSITORY / "tests/fixtures" / name / "expected.json").read_text())


def write(check, name, document):
    """Writes a model.json under a unique file name."""
    path = check.work / f"{name}.json"
    text = json.dumps(document)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def checkpoint_model(check, name, folder, prompts, new_tokens, **changes):
    """A model.json of a checkpoint and given prompts; `changes` replaces top-level fields."""
    document = json.loads((Path(folder) / "model.json").read_text())
    document |= {"name": name, "checkpoint": str(Path(folder).resolve())}
    document["generate"] = {"prompt_tokens": prompts, "max_new_tokens": new_tokens, "ignore_eos": True,
                            "greedy": True}  # compared tokens are greedy, whatever generation_config.json says
    document |= changes
    return write(check, name, document)


def fixture_model(check, name, requests=None, new_tokens=None, suffix="", **changes):
    """A fixture with (some of) the requests of its expected.json."""
    requests = expected(name)["requests"] if requests is None else requests
    new_tokens = new_tokens or len(requests[0]["tokens"])
    prompts = [request["prompt_tokens"] for request in requests]
    return checkpoint_model(check, f"{name}{suffix}", fixture_folder(name), prompts, new_tokens, **changes)


def tiny_sequential(check, prompts, new_tokens, name):
    """The trained example with one slot: requests run one after the other, in the same graphs, so that equal prompts
    must give equal bits."""
    return checkpoint_model(check, name, fixture_folder("tiny"), prompts, new_tokens, max_batch=1)


def shape_model(check, name, max_batch, max_seq_len, chunk=256):
    """A real shape with random weights."""
    hidden, layers, heads, kv_heads, intermediate, vocabulary, tied = SHAPES[name]
    config = {
        "architectures": ["Qwen3ForCausalLM" if name.startswith("qwen3") else "LlamaForCausalLM"],
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "intermediate_size": intermediate,
        "vocab_size": vocabulary, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "hidden_act": "silu",
    }
    document = {
        "schema": "mpk-model/1", "name": name, "config": config, "weights": {"random": {"seed": 1}},
        "max_batch": max_batch, "max_seq_len": max_seq_len, "runtime": {"prefill_chunk": chunk},
    }
    return write(check, f"{name}-{max_batch}-{chunk}", document)


def bytes_read(name, ranks, batch, context):
    """Bytes that one of `ranks` GPUs must read for a decode step: weights without an untied embedding, and the KV cache."""
    hidden, layers, heads, kv_heads, intermediate, vocabulary, _ = SHAPES[name]
    heads, kv_heads = heads // ranks, max(1, kv_heads // ranks)
    layer = hidden * 128 * (heads + 2 * kv_heads) + heads * 128 * hidden + 3 * hidden * intermediate // ranks
    weights = layers * layer + vocabulary // ranks * hidden
    cache = layers * batch * context * 2 * kv_heads * 128
    return 2 * (weights + cache)


def prompt(length, vocabulary, first=1):
    """Token ids spread over the vocabulary."""
    return [7919 * (first + index) % vocabulary for index in range(length)]


def large_shape(check):
    """A model of the large shape without a checkpoint: its compiled code is the same."""
    document = {"schema": "mpk-model/1", "name": "large", "config": LARGE_CONFIG, "weights": {"random": {"seed": 1}}}
    return write(check, "large-shape", document | LARGE_SIZES)

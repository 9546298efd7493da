"""Runs `mpk-graph simulate` on real shapes."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CLUSTERS = REPOSITORY / "examples/clusters"
PROGRAM = REPOSITORY / "target/release/mpk-graph"
SHAPES = {  # hidden, layers, heads, kv heads, intermediate, vocabulary, tied; head size 128
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, 151936, True),
    "qwen3-8b": (4096, 36, 32, 8, 12288, 151936, False),
    "qwen3-32b": (5120, 64, 64, 8, 25600, 151936, False),
    "llama3-70b": (8192, 80, 64, 8, 28672, 128256, False),
}


def model_file(folder, shape, max_batch, layers=None, max_seq_len=1024):
    """A model.json of this shape, with all of its layers or fewer."""
    hidden, all_layers, heads, kv_heads, intermediate, vocabulary, tied = SHAPES[shape]
    qwen = shape.startswith("qwen3")
    config = {
        "architectures": ["Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": layers or all_layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": 128, "intermediate_size": intermediate, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }
    document = {"schema": "mpk-model/1", "name": shape, "config": config, "weights": {"random": {"seed": 1}},
                "max_batch": max_batch, "max_seq_len": max_seq_len}
    path = Path(folder) / f"{shape}-{max_batch}-{layers or all_layers}-{max_seq_len}.json"
    path.write_text(json.dumps(document))
    return path


def simulate(model, cluster, ranks, *options):
    """The program's output with --json; None and its message if it ends with an error."""
    command = [PROGRAM, "simulate", model, "--cluster", cluster, "--ranks", ranks, "--json", *options]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        return None, done.stderr.strip()
    return json.loads(done.stdout), ""


def need_program():
    """Ends with an error if the program has not been built."""
    if not PROGRAM.exists():
        sys.exit(f"{PROGRAM} is missing; build it: cargo build --release -p mpk-launch --bin mpk-graph")

#!/usr/bin/env python3
"""Measures one peer on the CPU, at the shape of a model.json with random bf16 weights: prints one JSON object.

The peers are Python packages that nothing else needs:
    python3 -m venv .setup/peers
    .setup/peers/bin/pip install torch transformers            # --peer torch
    .setup/peers/bin/pip install llama-cpp-python gguf numpy   # --peer llama.cpp; compiled for this CPU, minutes
    .setup/peers/bin/python scripts/bench_peers.py --peer llama.cpp

Decode is the mean over --decode steps of one token after a prompt of --prompt tokens, greedy, with a KV cache; prefill
is one pass over --prefill tokens that computes the last token's logits. Each runs once before that, to warm up.
Exit status 3, and {"absent": why}: the peer is not installed.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "bench"))
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # malloc asks for transparent huge pages


def token(index, vocabulary):
    """Token `index` of the prompt: spread over the vocabulary."""
    return 7919 * index % vocabulary


def huge_page_bytes():
    """Memory of this process that lies on huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages"):
            return int(line.split()[1]) * 1024
    return 0


class LlamaCpp:
    """llama.cpp through the C API that llama-cpp-python binds."""

    def __init__(self, config, arguments):
        import ctypes

        import gguf_model
        import llama_cpp
        import numpy

        self.api, self.numpy = llama_cpp, numpy
        if arguments.verbose:
            self.log = None
        else:
            self.log = llama_cpp.llama_log_callback(lambda level, text, data: None)
            llama_cpp.llama_log_set(self.log, ctypes.c_void_p(0))
        self.vocabulary = config["vocab_size"]
        path, written = arguments.gguf, None
        if path is None or not path.exists():
            if path is None:
                written = tempfile.NamedTemporaryFile(prefix="mpk-bench-", suffix=".gguf")
                path = Path(written.name)
            gguf_model.write(path, config)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        if arguments.huge_pages and hasattr(llama_cpp, "LLAMA_LOAD_MODE_NONE"):
            options.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        elif arguments.huge_pages:  # before llama-cpp-python 0.3.30 or so
            options.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            sys.exit(f"bench_peers: llama.cpp cannot load {path}; --verbose shows why")
        if written is not None:
            written.close()  # the pages stay mapped
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = 1024
        options.n_batch = options.n_ubatch = max(512, arguments.prefill)
        options.n_threads = options.n_threads_batch = arguments.threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)

    def versions(self):
        from importlib.metadata import version

        system = self.api.llama_print_system_info().decode()
        return {"llama-cpp-python": version("llama_cpp_python"), "system_info": system}

    def clear(self):
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def forward(self, tokens):
        """Appends tokens to the sequence and returns the winner after the last."""
        array = (self.api.llama_token * len(tokens))(*tokens)
        status = self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(tokens)))
        if status != 0:
            sys.exit(f"bench_peers: llama_decode returned {status}")
        logits = self.numpy.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, -1), (self.vocabulary,))
        return int(logits.argmax())


class Torch:
    """PyTorch with Hugging Face transformers, eager, the default cache and attention; the weights lie in one mapping."""

    def __init__(self, config, arguments):
        import torch
        import transformers

        self.torch, self.transformers = torch, transformers
        torch.set_num_threads(arguments.threads)
        fields = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
        shape = transformers.Qwen3Config(**fields)
        with torch.device("meta"):
            model = transformers.Qwen3ForCausalLM(shape).to(torch.bfloat16).eval()
        model.model.rotary_emb = type(model.model.rotary_emb)(shape)
        model.tie_weights()
        parameters = dict(model.named_parameters())  # a tied table once
        # Beyond the weights, room for 64-byte alignment.
        size = sum(2 * parameter.numel() + 64 for parameter in parameters.values())
        self.arena = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if arguments.huge_pages:
            self.arena.madvise(mmap.MADV_HUGEPAGE)
        torch.manual_seed(1)
        pool = torch.randn(1 << 22).mul(0.02).to(torch.bfloat16)
        offset = 0
        for name, parameter in parameters.items():
            count = parameter.numel()
            flat = torch.frombuffer(self.arena, dtype=torch.bfloat16, count=count, offset=offset)
            offset += -(-2 * count // 64) * 64
            if parameter.dim() == 1:
                flat.fill_(1)
            else:
                for start in range(0, count, pool.numel()):
                    part = flat[start : start + pool.numel()]
                    part.copy_(pool[: part.numel()])
            owner = model.get_submodule(name.rpartition(".")[0])
            value = torch.nn.Parameter(flat.view(parameter.shape), requires_grad=False)
            setattr(owner, name.rpartition(".")[2], value)
        model.tie_weights()
        self.model = model
        self.cache = None

    def versions(self):
        flags = self.torch.backends.cpu.get_cpu_capability()
        return {"torch": self.torch.__version__, "transformers": self.transformers.__version__, "cpu_capability": flags}

    def clear(self):
        self.cache = None

    def forward(self, tokens):
        with self.torch.inference_mode():
            result = self.model(
                self.torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=1
            )
        self.cache = result.past_key_values
        return int(result.logits[0, -1].argmax())


PEERS = {"llama.cpp": LlamaCpp, "torch": Torch}


def decode(peer, prompt, steps):
    """Seconds of each decode step, and the tokens."""
    peer.clear()
    tokens, seconds = [peer.forward(prompt)], []
    for _ in range(steps):
        start = time.perf_counter()
        tokens.append(peer.forward(tokens[-1:]))
        seconds.append(time.perf_counter() - start)
    return seconds, tokens


def prefill(peer, prompt):
    """Seconds of one pass over the prompt."""
    peer.clear()
    start = time.perf_counter()
    peer.forward(prompt)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, choices=PEERS)
    parser.add_argument("--model", type=Path, help="model.json; by default what `mpk-bench model qwen3-0.6b` prints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--huge-pages", action="store_true", help="keep the weights on huge pages instead of in a mapped file")
    parser.add_argument("--gguf", type=Path, help="llama.cpp: the file to load; it is written first if it is missing and"
                        " kept (by default a temporary one)")
    parser.add_argument("--write-only", action="store_true", help="llama.cpp: only write the file of --gguf")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()

    if arguments.huge_pages and arguments.peer == "llama.cpp" and os.environ.get("GLIBC_TUNABLES") != HUGE_PAGES:
        os.environ["GLIBC_TUNABLES"] = HUGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if arguments.model is None:
        target = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent / "target"))
        command = [target / "release" / "mpk-bench", "model", "qwen3-0.6b"]
        config = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["config"]
    else:
        config = json.loads(arguments.model.read_text())["config"]

    result = {"peer": arguments.peer, "huge_pages": arguments.huge_pages, "threads": arguments.threads}
    try:
        if arguments.write_only:
            import gguf_model

            gguf_model.write(arguments.gguf, config)
            return
        peer = PEERS[arguments.peer](config, arguments)
    except ImportError as error:
        print(json.dumps({**result, "absent": str(error)}))
        sys.exit(3)
    prompt = [token(index, config["vocab_size"]) for index in range(arguments.prompt)]
    long_prompt = [token(index, config["vocab_size"]) for index in range(arguments.prefill)]
    decode(peer, prompt, 2)
    seconds, tokens = decode(peer, prompt, arguments.decode)
    prefill(peer, long_prompt)
    prefill_s = prefill(peer, long_prompt)
    result |= {
        "versions": peer.versions(),
        "decode_s": sum(seconds),
        "decode_steps": len(seconds),
        "ms_per_token": 1e3 * sum(seconds) / len(seconds),
        "fastest_ms": 1e3 * min(seconds),
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": arguments.prefill / prefill_s,
        "huge_page_bytes": huge_page_bytes(),
        "first_tokens": tokens[:8],
    }
    print(json.dumps(result))


main()

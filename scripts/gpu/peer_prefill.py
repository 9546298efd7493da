"""The peer of prefill.py: Qwen3-8B's shape in PyTorch on one GPU. Every block is compiled, and attention uses the flash kernel.

    peer_prefill.py 1x480,8x480

Prints one JSON line per case: the best of five times from the tokens to the winner at the last position.
"""

import json
import sys
import time

import torch
from torch.nn import functional

HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE, INTERMEDIATE, VOCABULARY = 4096, 36, 32, 8, 128, 12288, 151936


def random(*shape):
    """A weight."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def norm(x):
    """RMS norm with weights of one."""
    return functional.rms_norm(x.float(), (HIDDEN,), eps=1e-6).to(x.dtype)


def layer(x, qkv, out, gate_up, down):
    """One decoder layer over whole prompts."""
    requests, tokens, _ = x.shape
    mixed = functional.linear(norm(x), qkv).unflatten(-1, (HEADS + 2 * KV_HEADS, SIZE)).transpose(1, 2)
    queries, keys, values = mixed.split([HEADS, KV_HEADS, KV_HEADS], 1)
    mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    x = x + functional.linear(mixed.transpose(1, 2).reshape(requests, tokens, HEADS * SIZE), out)
    gate, up = functional.linear(norm(x), gate_up).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, down)


@torch.no_grad()
def main():
    """All cases."""
    layers = [(random((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), random(HIDDEN, HEADS * SIZE),
               random(2 * INTERMEDIATE, HIDDEN), random(HIDDEN, INTERMEDIATE)) for _ in range(LAYERS)]
    table, head = random(VOCABULARY, HIDDEN), random(VOCABULARY, HIDDEN)
    compiled = torch.compile(layer, dynamic=False)
    for case in sys.argv[1].split(","):
        requests, tokens = map(int, case.split("x"))
        ids = torch.randint(VOCABULARY, (requests, tokens), device="cuda")

        def step():
            x = table[ids]
            for weights in layers:
                x = compiled(x, *weights)
            return functional.linear(norm(x[:, -1]), head).argmax(-1)

        step(), step()
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        best = min(seconds)
        print(json.dumps({"case": case, "ms": best * 1e3, "tokens_per_second": round(requests * tokens / best)}), flush=True)


if __name__ == "__main__":
    main()

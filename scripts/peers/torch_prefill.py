"""Peer of prefill: whole prompts through PyTorch with compiled blocks, the flash kernel for attention, and sums over ranks by NCCL (gloo on CPUs).

    torchrun --nproc-per-node N torch_prefill.py --config config.json --cases 1x512,8x512,1x2048

A case is prompts x tokens. Prints one JSON line per case: the time from the tokens to the winner at the last position of each prompt.
"""

import torch
import torch.distributed as dist
from common import Ranks, Shape, angles, functional, normed, parser, rotated


@torch.no_grad()
def main():
    """All cases."""
    options = parser(__doc__)
    options.add_argument("--cases", default="1x512")
    options = options.parse_args()
    shape, ranks = Shape.read(options.config), Ranks(options.device)
    heads, kv_heads, inner, vocabulary = shape.share(ranks.world)
    layers = [
        (ranks.weight((heads + 2 * kv_heads) * shape.head, shape.hidden), ranks.weight(shape.hidden, heads * shape.head),
         ranks.weight(2 * inner, shape.hidden), ranks.weight(shape.hidden, inner))
        for _ in range(shape.layers)
    ]
    table, head = ranks.weight(shape.vocabulary, shape.hidden), ranks.weight(vocabulary, shape.hidden)
    norm, head_norm = ranks.ones(shape.hidden), ranks.ones(shape.head)

    def mix(x, qkv, out, cos, sin):
        prompts, tokens, _ = x.shape
        rows = functional.linear(normed(x, norm, shape.epsilon), qkv).view(prompts, tokens, -1, shape.head)
        query, key, value = rows.transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
        if shape.qk_norm:
            query, key = normed(query, head_norm, shape.epsilon), normed(key, head_norm, shape.epsilon)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return functional.linear(mixed.transpose(1, 2).reshape(prompts, tokens, -1), out)

    def feed(x, gate_up, down):
        gate, up = functional.linear(normed(x, norm, shape.epsilon), gate_up).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, down)

    def summed(part):
        if ranks.world > 1:
            dist.all_reduce(part)
        return part

    compiled = (lambda f: f) if options.eager else (lambda f: torch.compile(f, dynamic=False))
    mix_c, feed_c = compiled(mix), compiled(feed)
    for case in options.cases.split(","):
        if not ranks.in_time(options.seconds):
            break
        prompts, tokens = map(int, case.split("x"))
        ids = torch.arange(prompts * tokens, device=ranks.device).view(prompts, tokens) % shape.vocabulary
        turned = angles(shape, torch.arange(tokens, device=ranks.device))

        def step():
            x = table[ids]
            for qkv, out, gate_up, down in layers:
                x = x + summed(mix_c(x, qkv, out, *turned))
                x = x + summed(feed_c(x, gate_up, down))
            return functional.linear(normed(x[:, -1], norm, shape.epsilon), head).max(-1)

        step(), step()
        found = ranks.time(step, max(3, min(options.repeats, 7)))
        ranks.say({"what": "prefill", "tp": ranks.world, "batch": prompts, "prompt": tokens, **found,
                   "tokens_per_s": prompts * tokens / found["ms"] * 1e3})
    ranks.end()


if __name__ == "__main__":
    main()

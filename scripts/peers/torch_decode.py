"""Peer of decode: one tensor-parallel step in PyTorch with compiled blocks. On a GPU, the whole step is in a CUDA graph.

    torchrun --nproc-per-node N torch_decode.py --config config.json --batch 1,8 --context 512,8192

Weights are random, and the caches are full up to the context. Attention is two batched products or scaled_dot_product_attention. NCCL (gloo on
CPUs) or symmetric memory sums over ranks. Each combination gives a JSON line; the caller takes the best.
"""

import torch
import torch.distributed as dist
from common import Ranks, Shape, angles, functional, normed, parser, rotated


class Model:
    """One rank's weights, and the computation of a step."""

    def __init__(self, shape, ranks, eager):
        self.shape, self.ranks = shape, ranks
        self.heads, self.kv_heads, inner, self.vocabulary = shape.share(ranks.world)
        rows = (self.heads + 2 * self.kv_heads) * shape.head
        self.layers = [
            (ranks.weight(rows, shape.hidden), ranks.weight(shape.hidden, self.heads * shape.head),
             ranks.weight(2 * inner, shape.hidden), ranks.weight(shape.hidden, inner))
            for _ in range(shape.layers)
        ]
        self.table = ranks.weight(shape.vocabulary, shape.hidden)
        self.head = ranks.weight(self.vocabulary, shape.hidden)
        self.norm, self.head_norm = ranks.ones(shape.hidden), ranks.ones(shape.head)
        compiled = (lambda f: f) if eager else (lambda f: torch.compile(f, dynamic=False))
        self.mix, self.feed, self.best = compiled(self.mix_eagerly), compiled(self.feed_eagerly), compiled(self.best_eagerly)

    def mix_eagerly(self, x, delta, qkv, out, keys, values, cos, sin, fused: bool):
        """Attention with everything around it, before the sum over ranks."""
        x, shape = x + delta, self.shape
        batch, context = x.shape[0], keys.shape[2]
        rows = functional.linear(normed(x, self.norm, shape.epsilon), qkv).view(batch, -1, shape.head)
        query, key, value = rows.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if shape.qk_norm:
            query, key = normed(query, self.head_norm, shape.epsilon), normed(key, self.head_norm, shape.epsilon)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        keys[:, :, context - 1] = key
        values[:, :, context - 1] = value
        if fused:
            mixed = functional.scaled_dot_product_attention(query.unsqueeze(2), keys, values, enable_gqa=True)
        else:
            grouped = query.reshape(batch * self.kv_heads, -1, shape.head)
            scores = torch.bmm(grouped, keys.flatten(0, 1).mT).float() * shape.head**-0.5
            mixed = torch.bmm(scores.softmax(-1).to(x.dtype), values.flatten(0, 1))
        return x, functional.linear(mixed.reshape(batch, -1), out)

    def feed_eagerly(self, x, delta, gate_up, down):
        """The gated part."""
        x = x + delta
        gate, up = functional.linear(normed(x, self.norm, self.shape.epsilon), gate_up).chunk(2, -1)
        return x, functional.linear(functional.silu(gate) * up, down)

    def best_eagerly(self, x, delta):
        """This rank's best logits and their places."""
        logits = functional.linear(normed(x + delta, self.norm, self.shape.epsilon), self.head)
        return logits.max(-1)

    def winner(self, x, delta):
        """The tokens, the same on all ranks."""
        value, index = self.best(x, delta)
        world = self.ranks.world
        if world == 1:
            return index
        packed = torch.stack((value.float(), (index + self.ranks.rank * self.vocabulary).float()))
        all_ranks = torch.empty(world, *packed.shape, device=packed.device)
        dist.all_gather_into_tensor(all_ranks, packed)
        first = all_ranks[:, 0].argmax(0)
        chosen = all_ranks[:, 1].gather(0, first[None])[0].long()
        return chosen.clamp_(max=self.shape.vocabulary - 1)

    def step(self, token, caches, turned, fused, sum_up):
        """One token of each request."""
        x = self.table[token]
        delta = torch.zeros_like(x)
        for (qkv, out, gate_up, down), (keys, values) in zip(self.layers, caches):
            x, delta = self.mix(x, delta, qkv, out, keys, values, *turned, fused)
            delta = sum_up(delta)
            x, delta = self.feed(x, delta, gate_up, down)
            delta = sum_up(delta)
        token.copy_(self.winner(x, delta))


def ways_to_sum(ranks, batch, hidden):
    """Name -> function that sums over ranks; with symmetric memory if it is available."""
    if ranks.world == 1:
        return {"none": lambda part: part}

    def group(part):
        dist.all_reduce(part)
        return part

    ways = {"nccl" if ranks.cuda else "gloo": group}
    if ranks.cuda:
        try:
            import torch.distributed._symmetric_memory as symmetric

            name = dist.group.WORLD.group_name
            shared = symmetric.empty(batch * hidden, dtype=torch.bfloat16, device=ranks.device)
            symmetric.rendezvous(shared, name)

            def one_shot(part):
                shared.copy_(part.reshape(-1))
                return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name).view_as(part)

            ways["symmetric memory"] = one_shot
        except Exception as error:  # noqa: BLE001: the peer goes on without it
            ranks.say({"note": f"no symmetric memory: {error}"})
    return ways


def repeated(ranks, step):
    """The step to time: replayed from a CUDA graph, or called."""
    for _ in range(3):
        step()
    if not ranks.cuda:
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    return graph.replay


@torch.no_grad()
def main():
    """All cases."""
    options = parser(__doc__)
    options.add_argument("--batch", default="1")
    options.add_argument("--context", default="512")
    options = options.parse_args()
    shape, ranks = Shape.read(options.config), Ranks(options.device)
    if ranks.cuda:
        torch._inductor.config.coordinate_descent_tuning = True
    model = Model(shape, ranks, options.eager)
    for context in map(int, options.context.split(",")):
        for batch in map(int, options.batch.split(",")):
            if not ranks.in_time(options.seconds):
                break
            dims = (batch, model.kv_heads, context, shape.head)
            caches = [(ranks.weight(*dims), ranks.weight(*dims)) for _ in range(shape.layers)]
            token = torch.zeros(batch, dtype=torch.long, device=ranks.device)
            turned = angles(shape, torch.tensor([context - 1], device=ranks.device))
            for way, sum_up in ways_to_sum(ranks, batch, shape.hidden).items():
                for fused in (False, True):
                    if not ranks.in_time(options.seconds):
                        break
                    run = repeated(ranks, lambda: model.step(token, caches, turned, fused, sum_up))
                    ranks.say({"what": "decode", "tp": ranks.world, "batch": batch, "context": context, "allreduce": way,
                               "attention": "fused" if fused else "products", **ranks.time(run, options.repeats)})
            caches.clear()
    ranks.end()


if __name__ == "__main__":
    main()

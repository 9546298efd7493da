"""Peer of the allreduce: f32 sums by NCCL and by symmetric memory, or by gloo on CPUs. On a GPU they run inside a CUDA graph, as in a model.

    torchrun --nproc-per-node N torch_allreduce.py --bytes 8192,131072

Prints one JSON line for each size and implementation: microseconds of one allreduce. The sums are checked.
"""

import argparse

import torch
import torch.distributed as dist
from common import Ranks

IN_GRAPH = 20


def main():
    """All sizes."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--bytes", default="8192,32768,131072,524288")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=21)
    options = options.parse_args()
    ranks = Ranks(options.device)
    for size in map(int, options.bytes.split(",")):
        plain = torch.zeros(size // 4, device=ranks.device)

        def group():
            dist.all_reduce(plain)

        ways = {"nccl" if ranks.cuda else "gloo": (plain, group)}
        if ranks.cuda:
            try:
                import torch.distributed._symmetric_memory as symmetric

                name = dist.group.WORLD.group_name
                shared = symmetric.empty(size // 4, dtype=torch.float32, device=ranks.device)
                symmetric.rendezvous(shared, name)
                ways["symmetric memory, one shot"] = (
                    shared, lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name))
                ways["symmetric memory, two shot"] = (
                    shared, lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name))
            except Exception as error:  # noqa: BLE001: the peer goes on without it
                ranks.say({"note": f"no symmetric memory: {error}"})
        for way, (buffer, once) in ways.items():
            buffer.fill_(ranks.rank + 1.0)
            ranks.wait()
            result = once()
            found = (buffer if result is None else result)[0].item()
            right = found == ranks.world * (ranks.world + 1) / 2
            buffer.zero_()
            if ranks.cuda:
                for _ in range(3):
                    once()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(IN_GRAPH):
                        once()
                run = graph.replay
            else:
                run = lambda once=once: [once() for _ in range(IN_GRAPH)]  # noqa: E731
            run()
            times = ranks.time(run, options.repeats)
            ranks.say({"what": "allreduce", "tp": ranks.world, "bytes": size, "way": way, "right": right,
                       **{key: 1e3 * value / IN_GRAPH for key, value in times.items()}, "unit": "us"})
    ranks.end()


if __name__ == "__main__":
    main()

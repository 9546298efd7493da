"""Shared by the PyTorch peers: ranks, devices, random weights, timing."""

import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from shape import Shape
from torch.nn import functional


def parser(text):
    """The command line with the options of all peers."""
    options = argparse.ArgumentParser(description=text)
    options.add_argument("--config", required=True, help="config.json of the model, or a model.json with its `config`")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=21)
    options.add_argument("--eager", action="store_true", help="do not compile")
    options.add_argument("--seconds", type=float, default=60, help="start no further case after this many seconds")
    return options


class Ranks:
    """The processes that torchrun started, or just this one."""

    def __init__(self, device):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.cuda = device == "cuda"
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        elif self.world > 1:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.world))
        if self.world > 1:
            where = {"device_id": self.device} if self.cuda else {}
            dist.init_process_group("nccl" if self.cuda else "gloo", **where)
        self.random = torch.Generator(device=self.device).manual_seed(1 + self.rank)
        self.started = time.monotonic()

    def weight(self, *dims):
        """Small random numbers, different on each rank."""
        values = torch.empty(*dims, device=self.device, dtype=torch.bfloat16)
        return values.normal_(std=0.02, generator=self.random)

    def ones(self, size):
        """Weights of a norm."""
        return torch.ones(size, device=self.device, dtype=torch.bfloat16)

    def wait(self):
        """Waits for this rank's device, then for all ranks."""
        if self.cuda:
            torch.cuda.synchronize()
        if self.world > 1:
            dist.barrier()

    def time(self, step, repeats):
        """Milliseconds of one call of `step`: median, minimum and maximum."""
        samples = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            step()
            if self.cuda:
                torch.cuda.synchronize()
            samples.append((time.perf_counter() - begin) * 1e3)
        return {"ms": statistics.median(samples), "least": min(samples), "most": max(samples)}

    def say(self, row):
        """One JSON line, from rank 0."""
        if self.rank == 0:
            print(json.dumps(row), flush=True)

    def in_time(self, seconds):
        """Whether another case may start: rank 0 decides for all."""
        late = torch.tensor([int(time.monotonic() - self.started > seconds)], device=self.device)
        if self.world > 1:
            dist.broadcast(late, 0)
        return not late.item()

    def end(self):
        """Ends the process, when all ranks are here. On GPUs it does not leave the group: NCCL waits there without end for captured
        graphs that still exist."""
        if self.world == 1:
            return
        self.wait()
        if self.cuda:
            sys.stdout.flush()
            os._exit(0)
        dist.destroy_process_group()


def normed(x, weight, epsilon):
    """RMS norm, in f32 inside."""
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), epsilon).to(x.dtype)


def rotated(x, cos, sin):
    """Rotary positions: rotates the two halves of each head."""
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def angles(shape, positions):
    """Cosines and sines of positions, f32."""
    exponents = torch.arange(0, shape.head, 2, device=positions.device, dtype=torch.float32) / shape.head
    turns = positions.float()[:, None] * shape.theta ** -exponents
    return turns.cos(), turns.sin()


__all__ = ["Ranks", "Shape", "angles", "functional", "normed", "parser", "rotated"]

"""Measures the cost of the kernel's skeleton: an allreduce inside the kernel for every lowering, and an empty task that depends
on another.

Op graphs that are chains of tiny operators run many times in one launch. Assumes `--iterations K` of mpk-run: a user's
op graph runs K times in one launch, whose time is `timing.prefill_s`. The time of an iteration is the slope between two
values of K, so that the launch itself does not count.

A link of the allreduce chain is a column-parallel linear [2048 -> 16 per rank], a row-parallel one [16 per rank -> 2048]
and the allreduce of its f32 sums: R rows are R x 8 KB. The same chain on one rank has no allreduce. The difference is
the cost of the allreduce, which is compared with the peers.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import decode
import models
from common import LOWERINGS, PLACEMENTS, Job, OutOfTime, parsed, summary

COLUMNS, INNER, LINKS, ADDS = 2048, 16, 48, 256
ROWS = {1: "8 KB", 16: "128 KB"}
FEW, MANY, REPEATS = 100, 1600, 2
MANY_SLOW = 400  # of dynamic placement, whose tasks take ten times as long


def chain_model(check, ranks, rows):
    """The chain of allreduces for `ranks` ranks."""
    even = {"kind": "even", "unit": INNER}
    random = {"random": {"seed": 1}}
    tensors = [
        {"name": "x", "kind": "input", "dtype": "f32", "dims": [rows, COLUMNS], "data": random},
        {"name": "a", "kind": "weight", "dtype": "bf16", "dims": [INNER * ranks, COLUMNS], "data": random,
         "shard": {"dim": 0, **even}},
        {"name": "b", "kind": "weight", "dtype": "bf16", "dims": [COLUMNS, INNER * ranks], "data": random,
         "shard": {"dim": 1, **even}},
    ]
    ops, x = [], "x"
    for link in range(LINKS):
        ops.append({"op": "linear", "inputs": [x, "a"], "outputs": [f"h{link}"]})
        ops.append({"op": "linear", "inputs": [f"h{link}", "b"], "outputs": [f"y{link}"],
                    "attrs": {"output_dtype": "f32"}})
        x = f"y{link}"
    graph = {"name": "chain", "rows": rows, "tensors": tensors, "ops": ops, "outputs": [x]}
    return models.write(check, f"chain-{ranks}-{rows}", {"schema": "mpk-model/1", "graph": graph})


def hop_model(check):
    """A chain of additions of 16 elements."""
    random = {"random": {"seed": 1}}
    tensors = [{"name": name, "kind": "input", "dtype": "f32", "dims": [1, 16], "data": random} for name in "xr"]
    ops, x = [], "x"
    for number in range(ADDS):
        ops.append({"op": "add", "inputs": [x, "r"], "outputs": [f"y{number}"]})
        x = f"y{number}"
    graph = {"name": "hops", "rows": 1, "tensors": tensors, "ops": ops, "outputs": [x]}
    return models.write(check, "hops", {"schema": "mpk-model/1", "graph": graph})


def chain_job(check, ranks, rows, lowering=None, placement="static", transport=None):
    """A launch of the chain."""
    return Job(chain_model(check, ranks, rows), ranks, placement, lowering, transport, prefix_cache=None)


def jobs(check):
    """All launches' code."""
    found = [Job(hop_model(check), 1, placement, prefix_cache=None) for placement in PLACEMENTS]
    for ranks in check.ranks():
        for rows in ROWS if check.gpus > 1 else []:
            if ranks == 1:
                found.append(chain_job(check, 1, rows))
            else:
                found += [chain_job(check, ranks, rows, *choice) for choice in choices(rows)]
    return found


def choices(rows):
    """(lowering, placement, transport): all for the smallest, the two that suit larger ones."""
    if rows > 1:
        return [(lowering, "static", "p2p") for lowering in ("one-shot", "two-shot")]
    return [(lowering, "static", "p2p") for lowering in LOWERINGS] + [("one-shot", "dynamic", "p2p"),
                                                                     ("one-shot", "static", "nvshmem")]


def nanoseconds(check, job):
    """Samples of the time of one iteration, or what is wrong."""
    times, many = [], MANY if job.placement == "static" else MANY_SLOW
    for count in [FEW] + [many] * REPEATS:
        try:
            done = check.run_job(job.with_options("--iterations", count), 40)
        except OutOfTime:
            return None, "the part has run out of time"
        result = parsed(done)
        if result is None:
            unknown = "unexpected argument" in done.stderr
            return None, "mpk-run has no --iterations" if unknown else done.problem()
        times.append(result["timing"]["prefill_s"])
    return [(time - times[0]) / (many - FEW) * 1e9 for time in times[1:]], None


def told(check, name, figure, samples, problem):
    """Verdict and figure of a measurement without a limit."""
    if samples is None:
        (check.skipped if "no --iterations" in problem else check.failed)(name, problem)
        return None
    found = summary([round(sample / 1e3, 3) for sample in samples])
    check.figures.setdefault("skeleton", {})[figure] = found
    check.ok(name, f"{found['median']:.2f} us ({found['min']:.2f}-{found['max']:.2f})")
    return found["median"]


def peer_allreduce(check, ranks):
    """Microseconds of the peers by bytes."""
    script = decode.peers_folder() / "torch_allreduce.py"
    sizes = [8192 * rows for rows in ROWS]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, script, *sizes]
    done = check.on_gpus(ranks, lambda environment: check.command(command, 60, environment))
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(rows) != len(sizes):
        check.failed(f"allreduce peers N={ranks}", done.problem())
    check.figures.setdefault("peers", {})[f"allreduce N={ranks}"] = rows
    return {row["bytes"]: row for row in rows}


def compare_allreduce(check, ranks, rows, found, alone):
    """The time that the allreduces of one size add to a link, compared with the peers."""
    peer = check.background[f"allreduce peers {ranks}"].get(8192 * rows)
    for choice in choices(rows):
        name = f"allreduce {ROWS[rows]} {' '.join(choice)} N={ranks}"
        samples, problem = found[chain_job(check, ranks, rows, *choice)]
        whole = told(check, f"link with {name}", f"link with {name}", per(samples, LINKS), problem)
        if whole is None or alone is None:
            continue
        added = whole - alone
        check.figures["skeleton"][name] = {"added_us": round(added, 3), "peer": peer}
        text = f"{added:.2f} us added"
        if peer:
            text += f"; NCCL {peer['nccl_us']}, symmetric memory one-shot {peer['torch_one_shot_us']}"
        judged = peer and rows == 1 and choice == ("one-shot", "static", "p2p")
        check.judge(not judged or added <= peer["nccl_us"], name, text)


def per(samples, count):
    """Samples of one of `count` equal steps."""
    return [sample / count for sample in samples] if samples else None


def run(check):
    """All measurements. Those that fit side by side run at the same time on separate GPUs."""
    if not check.cuda:
        check.skipped("skeleton", "needs a GPU")
        return
    hops = {placement: nanoseconds(check, Job(hop_model(check), 1, placement, prefix_cache=None)) for placement in PLACEMENTS}
    for placement, (samples, problem) in hops.items():
        told(check, f"hop {placement}", f"hop {placement}", per(samples, ADDS), problem)
    if check.gpus < 2:
        check.skipped("allreduce", "needs 2 GPUs")
        return
    if "no --iterations" in (hops["static"][1] or ""):
        check.skipped("allreduce", "mpk-run has no --iterations")
        return
    several = [n for n in check.ranks() if n > 1]
    for ranks in several:
        check.background[f"allreduce peers {ranks}"] = peer_allreduce(check, ranks) if decode.peers_folder() else {}
    work = [chain_job(check, 1, rows) for rows in ROWS]
    work += [chain_job(check, ranks, rows, *choice) for ranks in several for rows in ROWS for choice in choices(rows)]
    with ThreadPoolExecutor(check.gpus) as pool:
        found = dict(zip(work, pool.map(lambda job: nanoseconds(check, job), work)))
    for rows, size in ROWS.items():
        samples, problem = found[chain_job(check, 1, rows)]
        alone = told(check, f"link without allreduce {size}", f"link {size} N=1", per(samples, LINKS), problem)
        for ranks in several:
            compare_allreduce(check, ranks, rows, found, alone)

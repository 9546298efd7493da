"""Measures decode and compares it with the peer and the floor, in one run: shapes of Qwen3-8B and Qwen3-0.6B, random
weights.

A step's mean context is 512: 480 tokens of prompt and 64 new ones, counted while all requests of a batch decode. The
floor is the number of bytes that a GPU must read, divided by the rate of a streaming kernel measured here
(stream_read.cu), or by 4.65 TB/s if there is no nvcc.
"""

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
from common import REPOSITORY, Job, OutOfTime, parsed, say, summary

CONTEXT, NOMINAL_RATE, REPEATS = 512, 4.65e12, 3
PROMPT, NEW = 480, 64
MAX_SEQ_LEN = 1024
CASES = {"qwen3-8b": (8, [1, 8]), "qwen3-0.6b": (16, [1, 16])}  # slots, batches
ALLREDUCE = "one-shot"


def peers_folder():
    """Folder of the peers' programs, or None."""
    named = os.environ.get("MPK_PEERS")
    places = [named] if named else [REPOSITORY / "shared/peers", REPOSITORY.parent / "shared/peers"]
    return next((Path(place) for place in places if (Path(place) / "torch_decode.py").exists()), None)


def shape_job(check, shape, ranks, placement="static", allreduce=ALLREDUCE):
    """A launch of a shape without prompts."""
    model = models.shape_model(check, shape, CASES[shape][0], MAX_SEQ_LEN)
    return Job(model, ranks, placement, allreduce if ranks > 1 else None, deadline=30.0)


def with_prompts(job, shape, batch):
    """The same with `batch` prompts."""
    options = ["--ignore-eos", "--max-new-tokens", NEW]
    for slot in range(batch):
        tokens = models.prompt(PROMPT, models.SHAPES[shape][5], 1 + 100 * slot)
        options += ["--prompt-tokens", ",".join(map(str, tokens))]
    return job.with_options(*options)


def cases(check):
    """[(shape, ranks)]."""
    return [("qwen3-8b", ranks) for ranks in check.ranks()] + [("qwen3-0.6b", 1)]


def jobs(check):
    """All launches' code."""
    found = [shape_job(check, shape, ranks) for shape, ranks in cases(check)]
    return found + [shape_job(check, "qwen3-8b", ranks, "dynamic") for ranks in check.ranks()]


def read_rate(check):
    """Bytes per second that a streaming kernel reads, with all samples; the nominal rate if the kernel cannot be built."""
    ran = check.cuda_program("stream_read", {"CUDA_VISIBLE_DEVICES": "0"}, 30)
    if ran is None:
        return NOMINAL_RATE, "nominal"
    rows, done = ran
    if done.status != 0 or not rows:
        check.failed("decode floor", done.problem())
        return NOMINAL_RATE, "nominal"
    best = max(row["bytes_per_second"] for row in rows)
    check.figures["read_rate"] = rows
    check.ok("decode floor", f"a streaming kernel reads {best / 1e12:.2f} TB/s")
    return best, "measured"


def run_peer(check, shape, ranks, environment):
    """The peer's best milliseconds per step, by batch, with its output lines."""
    folder, batches = peers_folder(), ",".join(map(str, CASES[shape][1]))
    if folder is None:
        return {}, [], "no folder with torch_decode.py; name it in MPK_PEERS"
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(Path(os.environ.get("MPK_CACHE_DIR") or tempfile.gettempdir()) / "inductor")}
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    done = check.command([sys.executable, *launcher, folder / "torch_decode.py", "--model", shape, "--batch", batches,
                          "--context", CONTEXT], 200, environment | cache)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    best = {}
    for row in rows:
        best[row["batch"]] = min(row["ms_per_step"], best.get(row["batch"], float("inf")))
    say(f"peer {shape} TP{ranks}: {done.seconds:.0f} s")
    return best, rows, None if done.status == 0 else done.problem()


def run_ours(check, shape, ranks, environment):
    """Samples of milliseconds per token by (batch, placement), and what went wrong."""
    samples, problems = {}, []
    for placement, repeats in (("static", REPEATS), ("dynamic", 1)):
        if placement == "dynamic" and shape != "qwen3-8b":
            continue
        job = shape_job(check, shape, ranks, placement)
        for batch in CASES[shape][1] if placement == "static" else CASES[shape][1][:1]:
            for _ in range(repeats):
                done = check.command(check.mpk_run(with_prompts(job, shape, batch)), 60, environment)
                result = parsed(done)
                if result is None:
                    problems.append(f"batch {batch} {placement}: {done.problem()}")
                    break
                samples.setdefault((batch, placement), []).append(result["timing"])
    return samples, problems


def run_case(check, shape, ranks, rate):
    """Runs mpk and then the peer on the same GPUs."""
    def both(environment):
        ours = run_ours(check, shape, ranks, environment)
        return ours, run_peer(check, shape, ranks, environment)

    (samples, problems), (peer, peer_rows, peer_problem) = check.on_gpus(ranks, both)
    name = f"decode {shape} TP{ranks}"
    for problem in problems:
        check.failed(name, problem)
    if peer_problem:
        (check.failed if peers_folder() else check.skipped)(f"{name} peer", peer_problem)
    figures = check.figures.setdefault("decode", {})
    figures[f"{shape} TP{ranks} peer"] = peer_rows
    for (batch, placement), timings in samples.items():
        found = summary([timing["ms_per_token"] for timing in timings])
        floor = models.bytes_read(shape, ranks, batch, CONTEXT) / rate * 1e3
        theirs = peer.get(batch)
        ratio = theirs / found["median"] if theirs else None
        what = f"{name} batch {batch} {placement}"
        figures[what] = {"ms_per_token": found, "peer_ms": theirs, "floor_ms": floor, "timings": timings}
        text = (f"{found['median']:.3f} ms ({found['min']:.3f}-{found['max']:.3f}), floor {floor:.3f} ms "
                f"({100 * floor / found['median']:.0f} % of the floor's speed)")
        if theirs:
            text += f", peer {theirs:.3f} ms (ours is {ratio:.2f} times as fast)"
        judged = theirs and placement == "static" and shape == "qwen3-8b"
        check.judge(not judged or found["median"] <= theirs, what, text)


def run(check):
    """Runs all cases, at the same time if there are enough GPUs for each."""
    if not check.cuda:
        check.skipped("decode", "needs a GPU")
        return
    rate, source = read_rate(check)
    check.figures["floor_rate"] = {"bytes_per_second": rate, "source": source}

    def one(case):
        try:
            run_case(check, *case, rate)
        except OutOfTime:
            check.failed(f"decode {case[0]} TP{case[1]}", "the part has run out of time")

    with ThreadPoolExecutor(len(cases(check))) as pool:
        # The widest first: it needs all GPUs, and the others then share them.
        list(pool.map(one, sorted(cases(check), key=lambda case: -case[1])))

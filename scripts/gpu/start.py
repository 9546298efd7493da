"""Measures how long a start takes: the cold compile of Qwen3-8B at TP4 on two cores, a warm start, and the weights.

Reads rank 0's log: "ready for weights after S s", "N kernel variants in S s; cubin from the cache in S s" and
"weights: B GB in S s". If a line is missing, the report has only `load_s` of --json (until the weights are in place).
"""

import json
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
import random_checkpoint
from common import Job, parsed, summary

REPEATS = 5
COLD_LIMIT, WARM_LIMIT, COMPILE_LIMIT, SPEED_SHARE = 90.0, 1.5, 0.3, 0.7

PLAIN_LOOP = """
import json, sys, time, torch
files, chunk = sys.argv[1:], 64 << 20
torch.cuda.init(); torch.zeros(1, device="cuda")
staging = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
views = [memoryview(buffer.numpy()) for buffer in staging]
done = [torch.cuda.Event() for _ in staging]
total, turn = 0, 0
place = torch.empty(chunk, dtype=torch.uint8, device="cuda")
times = []
for _ in range(3):
    total, begin = 0, time.perf_counter()
    for name in files:
        with open(name, "rb", buffering=0) as file:
            while True:
                done[turn].synchronize()
                count = file.readinto(views[turn])
                if not count:
                    break
                place[:count].copy_(staging[turn][:count], non_blocking=True)
                done[turn].record()
                total += count
                turn = 1 - turn
    torch.cuda.synchronize()
    times.append(time.perf_counter() - begin)
print(json.dumps({"bytes": total, "seconds": times}))
"""


def tiny_jobs(check):
    """The trained example at each number of ranks, a few tokens."""
    model = models.fixture_model(check, "tiny")
    found = []
    for ranks in check.ranks():
        choice = {"allreduce": "one-shot"} if ranks > 1 else {}
        found.append(Job(model, ranks, "static", logprobs=models.LOGPROBS, alone=True, **choice).with_options(
            "--max-new-tokens", 4))
    return found


def weights_job(model):
    """A start of the large model."""
    return Job(model, 1, "static", logprobs=models.LOGPROBS, alone=True).with_options("--max-new-tokens", 1)


def jobs(check):
    """All launches' code."""
    return [*tiny_jobs(check), weights_job(models.large_shape(check))]


def begin_cold(check):
    """Starts the cold compile in an empty cache, on the last two cores; other parts run at the same time."""
    model = models.shape_model(check, "qwen3-8b", 8, 1280)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[-2:]))
    command = ["taskset", "-c", cores, check.binary, model, "--ranks", 4, "--device", "h200", "--compile-only",
               "--placement", "static", "--allreduce", "one-shot"]
    folder = tempfile.TemporaryDirectory(prefix="mpk-cold-")
    pool = ThreadPoolExecutor(1)
    started = check.start(command, {"MPK_CACHE_DIR": folder.name})
    check.background["cold compile"] = folder, pool.submit(check.finish, started, 2 * COLD_LIMIT)
    pool.shutdown(wait=False)


def run_cold(check):
    """The result of the cold compile."""
    folder, future = check.background["cold compile"]
    done = future.result()
    folder.cleanup()
    check.judge(done.status == 0 and done.seconds < COLD_LIMIT, "start cold compile",
                f"Qwen3-8B at TP4 on 2 cores: {done.seconds:.1f} s (target: {COLD_LIMIT:.0f} s)" if done.status == 0
                else done.problem())
    check.figures["cold_compile_s"] = done.seconds if done.status == 0 else None


def logged(done, pattern):
    """Sum of the numbers that the first line of the log with `pattern` holds, or None."""
    found = re.search(pattern, done.stderr)
    return sum(map(float, found.groups())) if found else None


def run_warm(check):
    """Starts with a filled cache."""
    for job in tiny_jobs(check):
        ready, loads, compiles, walls = [], [], [], []
        for _ in range(REPEATS):
            done = check.run_job(job, 30)
            result = parsed(done)
            if result is None:
                check.failed(f"start warm N={job.ranks}", done.problem())
                break
            loads.append(result["timing"]["load_s"])
            walls.append(done.seconds)
            ready.append(logged(done, r"ready for weights after ([\d.]+) s"))
            compiles.append(logged(done, r"kernel variants? in ([\d.]+) s; cubin from the cache in ([\d.]+) s"))
        else:
            source = "load_s" if None in ready else "log"
            found, wall = summary(loads if None in ready else ready), summary(walls)
            check.judge(found["median"] < WARM_LIMIT, f"start warm N={job.ranks}",
                        f"ready for weights after {found['median']:.2f} s ({found['min']:.2f}-{found['max']:.2f}, {source}), "
                        f"target {WARM_LIMIT} s; {wall['median']:.2f} s from start to end of the process")
            if None in compiles:
                check.failed(f"start second compile N={job.ranks}", "the log has no line about the cubin from the cache")
            else:
                check.judge(summary(compiles)["median"] < COMPILE_LIMIT, f"start second compile N={job.ranks}",
                            f"{summary(compiles)['median']:.3f} s (target: {COMPILE_LIMIT} s)")
            check.figures.setdefault("start", {})[f"N={job.ranks}"] = {
                "ready_s": ready, "load_s": loads, "compile_s": compiles, "process_s": walls,
                "log_of_the_last": [line for line in done.stderr.splitlines() if " INFO " in line][:20]}


def run_weights(check):
    """Measures how long it takes to load a large model (the golden part's if there is one), compared with a plain loop
    over the same files."""
    model = check.background.get("large model")
    if not model:
        folder = check.work / "random-checkpoint"
        random_checkpoint.write(folder, models.LARGE_CONFIG, models.LARGE_SIZES, check.seed)
        model = models.checkpoint_model(check, "random-checkpoint", folder, [[1, 2, 3]], 1)
    files = sorted(Path(json.loads(model.read_text())["checkpoint"]).glob("*.safetensors"))
    plain = check.command([sys.executable, "-c", PLAIN_LOOP, *files], 60, {"CUDA_VISIBLE_DEVICES": "0"})
    if plain.status != 0:
        check.failed("start weights", f"plain loop: {plain.problem()}")
        return
    loop = json.loads(plain.stdout.strip().splitlines()[-1])
    plain_rate = loop["bytes"] / min(loop["seconds"])
    job = weights_job(model)
    rates, source = [], "log"
    for _ in range(3):
        done = check.run_job(job, 60)
        if parsed(done) is None:
            check.failed("start weights", done.problem())
            return
        seconds = logged(done, r"weights: [\d.]+ GB in ([\d.]+) s")
        if seconds is None:
            seconds, source = parsed(done)["timing"]["load_s"], "load_s, which includes the whole start"
        rates.append(loop["bytes"] / max(seconds, 1e-3))
    share = summary(rates)["median"] / plain_rate
    check.judge(share >= SPEED_SHARE, "start weights",
                f"{summary(rates)['median'] / 1e9:.2f} GB/s ({source}), plain loop {plain_rate / 1e9:.2f} GB/s: "
                f"{100 * share:.0f} % (target: {100 * SPEED_SHARE:.0f} %)")
    check.figures["weights"] = {"bytes": loop["bytes"], "bytes_per_second": rates, "plain_loop_s": loop["seconds"],
                                "source": source}


def run(check):
    """All starts."""
    if not check.cuda:
        check.skipped("start", "needs a GPU")
        return
    if "cold compile" not in check.background:
        begin_cold(check)
    run_warm(check)
    run_weights(check)
    run_cold(check)

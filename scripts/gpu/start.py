"""How long a start takes: the cold compile of Qwen3-8B at TP4 on two cores, a warm start, and the weights.

Reads from the `timing` of --json, where it is there: `compile_s` (from the task graphs to the loaded cubin),
`weights_s` (reading, copying and placing the weights) and `weights_bytes` (of all ranks). Without them only what
`load_s` (until the weights are in place) shows is told.
"""

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
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


def jobs(check):
    """All launches' code."""
    return tiny_jobs(check)


def begin_cold(check):
    """Starts the cold compile in an empty cache, on the last two cores; it runs beside other parts."""
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
    """What came of the cold compile."""
    folder, future = check.background["cold compile"]
    done = future.result()
    folder.cleanup()
    check.judge(done.status == 0 and done.seconds < COLD_LIMIT, "start cold compile",
                f"Qwen3-8B at TP4 on 2 cores: {done.seconds:.1f} s, reach {COLD_LIMIT:.0f} s" if done.status == 0
                else done.problem())
    check.figures["cold_compile_s"] = done.seconds if done.status == 0 else None


def run_warm(check):
    """Starts with a filled cache."""
    for job in tiny_jobs(check):
        loads, compiles, walls = [], [], []
        for _ in range(REPEATS):
            done = check.run_job(job, 30)
            result = parsed(done)
            if result is None:
                check.failed(f"start warm N={job.ranks}", done.problem())
                break
            timing = result["timing"]
            loads.append(timing["load_s"])
            walls.append(done.seconds)
            if "compile_s" in timing:
                compiles.append(timing["compile_s"])
        else:
            load, wall = summary(loads), summary(walls)
            check.judge(load["median"] < WARM_LIMIT, f"start warm N={job.ranks}",
                        f"{load['median']:.2f} s ({load['min']:.2f}-{load['max']:.2f}) until the tiny model's weights are in "
                        f"place, reach {WARM_LIMIT} s; {wall['median']:.2f} s from start to end of the process")
            if compiles:
                check.judge(summary(compiles)["median"] < COMPILE_LIMIT, f"start second compile N={job.ranks}",
                            f"{summary(compiles)['median']:.3f} s, reach {COMPILE_LIMIT} s")
            else:
                check.skipped(f"start second compile N={job.ranks}", "--json has no timing.compile_s")
            check.figures.setdefault("start", {})[f"N={job.ranks}"] = {
                "load_s": load, "compile_s": compiles, "process_s": wall}


def run_weights(check):
    """Loading the large model of the golden part beside a plain loop over the same files."""
    model = check.background.get("large model")
    files = sorted(Path(json.loads(model.read_text())["checkpoint"]).glob("*.safetensors")) if model else []
    if not files:
        check.skipped("start weights", "the golden part made no large model")
        return
    plain = check.command([sys.executable, "-c", PLAIN_LOOP, *files], 60, {"CUDA_VISIBLE_DEVICES": "0"})
    if plain.status != 0:
        check.failed("start weights", f"plain loop: {plain.problem()}")
        return
    loop = json.loads(plain.stdout.strip().splitlines()[-1])
    plain_rate = loop["bytes"] / min(loop["seconds"])
    job = Job(model, 1, "static", logprobs=models.LOGPROBS, alone=True).with_options("--max-new-tokens", 1)
    rates, source = [], "timing.weights_s"
    tiny = check.figures.get("start", {}).get("N=1", {}).get("load_s", {}).get("median", 0.0)
    for _ in range(3):
        done = check.run_job(job, 60)
        result = parsed(done)
        if result is None:
            check.failed("start weights", done.problem())
            return
        timing = result["timing"]
        seconds = timing.get("weights_s")
        if seconds is None:
            seconds, source = timing["load_s"] - tiny, "load_s less that of the tiny model"
        rates.append(loop["bytes"] / max(seconds, 1e-3))
    share = summary(rates)["median"] / plain_rate
    check.judge(share >= SPEED_SHARE, "start weights",
                f"{summary(rates)['median'] / 1e9:.2f} GB/s ({source}), plain loop {plain_rate / 1e9:.2f} GB/s: "
                f"{100 * share:.0f} %, reach {100 * SPEED_SHARE:.0f} %")
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

"""A stall in one rank must never change a token. Without the protection of the symmetric buffers' reuse, it must change one.

Assumes that MPK_DEBUG_UNPROTECTED=1 switches that protection off (both when compiling and when running).
"""

import json

import environment
import models
from common import Job, bits, parsed

UNPROTECTED = (("MPK_DEBUG_UNPROTECTED", "1"),)
MILLISECONDS = 3  # many steps
# Flagged words are never shared, so only copies that events wait for can be overtaken.
CONTROLS = [("static", "copy-reduce"), ("dynamic", "copy-reduce")]
CHOICES = [("static", "one-shot"), ("dynamic", "copy-reduce"), ("static", "two-shot"), ("dynamic", "one-shot")]


def model(check):
    """A few short requests."""
    return models.fixture_model(check, "qwen3", models.expected("qwen3")["requests"][:5], new_tokens=5, suffix="-stall")


def control_model(check):
    """More steps, so that many reuses of a buffer are tried."""
    return models.fixture_model(check, "qwen3", models.expected("qwen3")["requests"][:4], new_tokens=24, suffix="-control")


def ranks_of(check):
    """Numbers of ranks."""
    return [n for n in check.ranks() if n > 1] if check.cuda else [2]


def stalled_jobs(check, ranks):
    """The launches that are stalled."""
    return [Job(model(check), ranks, p, a, logprobs=models.LOGPROBS) for p, a in CHOICES]


def jobs(check):
    """All launches' code."""
    found = []
    for ranks in ranks_of(check):
        found += stalled_jobs(check, ranks)
        found += [Job(control_model(check), ranks, p, a, logprobs=models.LOGPROBS, environment=UNPROTECTED)
                  for p, a in CONTROLS]
        found += [Job(control_model(check), ranks, p, a, logprobs=models.LOGPROBS) for p, a in CONTROLS]
    return found


def operators(check, ranks, lowering="one-shot"):
    """Names of the operators of the main graph, or None."""
    folder = check.work / f"graphs-{ranks}-{lowering}"
    device = ["--device", environment.device_row()] if check.cuda else []
    done = check.command([check.binary, model(check), "--ranks", ranks, *device, "--logprobs", models.LOGPROBS,
                          "--placement", "static", "--allreduce", lowering, "--emit-graph", folder], 60)
    path = folder / "rank-0.task_graph.json"
    return (json.loads(path.read_text()).get("ops") if path.exists() else None), done


def run_stalls(check, ranks):
    """Stalls before several operators of several ranks."""
    names, done = operators(check, ranks)
    if not names:
        check.failed(f"stall N={ranks}", f"no graphs: {done.problem()}")
        return
    count = len(names)
    work, undisturbed = [], {}
    for number, job in enumerate(stalled_jobs(check, ranks)):
        work.append((None, job))
        for rank, operator in [(0, count // 4), (ranks - 1, count // 2), (1, 3 * count // 4), (number % ranks, number)]:
            stall = f"{rank}:{operator}:{MILLISECONDS}"
            work.append((stall, job.with_options("--debug-stall", stall)))
    problems, runs = [], 0
    for (stall, job), done in zip(work, check.run_jobs([job for _, job in work], 60)):
        result = parsed(done)
        if result is None:
            problems.append(f"{job.what()} stall {stall}: {done.problem()}")
        elif stall is None:
            undisturbed[job.placement, job.allreduce] = bits(result)
        else:
            runs += 1
            if bits(result) != undisturbed.get((job.placement, job.allreduce)):
                problems.append(f"{job.what()} stall {stall}: different bits")
    check.judge(not problems, f"stall N={ranks}", "; ".join(problems[:3]) or f"{runs} stalled runs, no bit changed")


def run_control(check, ranks):
    """The negative control: the protection is off, and one rank adds up slowly what it has received, while the others send the
    next data. Tokens must change, or the run must end."""
    noticed, runs = [], 0
    for placement, lowering in CONTROLS:
        names, done = operators(check, ranks, lowering)
        sums = [name for name in names or [] if name.endswith(".allreduce")][1:]
        if not sums:
            check.failed(f"stall control N={ranks}", f"no graphs: {done.problem()}")
            return
        job = Job(control_model(check), ranks, placement, lowering, "p2p", models.LOGPROBS, environment=UNPROTECTED,
                  deadline=4.0)
        usual = parsed(check.run_job(Job(control_model(check), ranks, placement, lowering, "p2p", models.LOGPROBS), 40))
        if usual is None:
            continue
        stalls = [f"{rank}:{operator}:{MILLISECONDS}" for rank in (0, 1) for operator in (sums[0], sums[-2])]
        stalled = [job.with_options("--debug-stall", stall) for stall in stalls]
        for stall, done in zip(stalls, check.run_jobs(stalled, 30, patience=len(stalled))):
            runs += 1
            result = parsed(done)
            if done.status in (2, 3):
                check.failed(f"stall control N={ranks}", done.problem())
                return
            if result is None:
                noticed.append(f"{placement} {lowering} stall {stall}: exit status {done.status}")
            elif bits(result) != bits(usual):
                noticed.append(f"{placement} {lowering} stall {stall}: different bits")
    check.judge(bool(noticed), f"stall control N={ranks}",
                f"missing protection detected in {len(noticed)} of {runs} runs: {noticed[:2]}" if noticed else
                f"{runs} runs without protection gave the same bits as with it, so this test cannot detect missing protection")


def run(check):
    """Stalls, and the control."""
    if not ranks_of(check):
        check.skipped("stall", "needs 2 GPUs")
    for ranks in ranks_of(check):
        run_stalls(check, ranks)
        run_control(check, ranks)

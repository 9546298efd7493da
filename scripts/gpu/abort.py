"""Faults end all ranks within seconds with a report, and the next run works at once."""

import os
import select
import signal
import time
from dataclasses import replace
from pathlib import Path

import environment
import models
import stuck_report
from common import Job, parsed, session_processes

SOON = 15.0  # seconds from the fault, with a deadline of DEADLINE
DEADLINE = 2.0
OPERATOR = 6  # the one that a worker never ends


def model(check):
    """The trained example, as other parts run it."""
    return models.fixture_model(check, "tiny")


def ranks_of(check):
    """Numbers of ranks."""
    return sorted({1, max(check.ranks())}) if check.cuda else [1, 2]


def choice_of(ranks):
    """Placement and lowering."""
    return {"placement": "static", **({"allreduce": "one-shot"} if ranks > 1 else {})}


def stuck_jobs(check, ranks):
    """Launches that get stuck: both placements, and the kernel that informs its peers through NVSHMEM."""
    choices = [("static", None), ("dynamic", None)] + ([("static", "nvshmem")] if ranks > 1 and check.cuda else [])
    return [Job(model(check), ranks, placement, choice_of(ranks).get("allreduce"), transport, models.LOGPROBS)
            for placement, transport in choices]


def jobs(check):
    """All launches' code."""
    return [job for ranks in ranks_of(check) for job in stuck_jobs(check, ranks)]


def usable(check, ranks, after):
    """A normal run right after a fault."""
    job = Job(model(check), ranks, logprobs=models.LOGPROBS, **choice_of(ranks))
    done = check.run_job(job, 40)
    result = parsed(done)
    expected = models.expected("tiny")["requests"][0]["tokens"][:4]
    right = result is not None and result["requests"][0]["tokens"][:4] == expected
    check.judge(right, f"abort next run N={ranks} after {after}",
                f"{done.seconds:.1f} s" if right else done.problem() if result is None else "wrong tokens")


def graphs_of(check, job):
    """All ranks' graphs of a job, by name."""
    folder = check.work / f"stuck-{job.what().replace(' ', '-')}"
    device = ["--device", environment.device_row()] if check.cuda else []
    options = replace(job, transport=None).shape_options()
    done = check.command([check.binary, job.model, "--ranks", job.ranks, *device, *options, "--emit-graph", folder], 60)
    return stuck_report.load(folder, job.ranks) if done.status == 0 else {}


def run_deadline(check, ranks):
    """A worker that makes no progress: every rank ends in time and says what it was waiting for."""
    for job in stuck_jobs(check, ranks):
        if not check.cuda:
            job = replace(job, workers=2)
        job = replace(job, deadline=DEADLINE)
        stalled = job.with_options("--debug-stall", f"{ranks - 1}:{OPERATOR}:120000")
        done = check.run_job(stalled, 60)
        # On GPUs every worker is stopped, on CPUs only the first.
        wrong = stuck_report.problems(done.stderr, graphs_of(check, job), ranks - 1, OPERATOR, None if check.cuda else [0])
        right = done.status == 4 and not wrong and not done.timed_out
        check.judge(right, f"abort deadline {job.what()}",
                    f"exit status 4 after {done.seconds:.1f} s, and every rank says what it waited for" if right else
                    f"{done.problem()}; {'; '.join(wrong[:3])}")
        if not right:
            check.keep(f"abort-{job.what().replace(' ', '-')}.log", done.stderr)
    usable(check, ranks, "deadline")


def rank_processes(process, binary):
    """Ids of the mpk-run processes of a started command."""
    name, found = Path(binary).name[:15], []
    for number in [process.pid, *session_processes(process.pid)]:
        try:
            if Path(f"/proc/{number}/comm").read_text().strip() == name and number not in found:
                found.append(number)
        except OSError:
            pass
    return sorted(found)


def run_signal(check, ranks, number, name):
    """Sends a signal to the last rank while the kernel runs."""
    job = Job(model(check), ranks, logprobs=models.LOGPROBS, deadline=DEADLINE * 5, **choice_of(ranks))
    job = job.with_options("--max-new-tokens", 400, "--debug-stall", "0:4:20", "--log-all-ranks")
    # Without --json the text streams, which shows that the kernel is running.
    command = [part for part in check.mpk_run(job) if part != "--json"]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(min(ranks, check.gpus))))} if check.cuda else {}
    started = check.start(command, environment)
    process = started[0]
    try:
        seen, until = b"", time.monotonic() + check.time_left(30)
        while len(seen) < 4 and process.poll() is None and time.monotonic() < until:
            if select.select([process.stdout], [], [], 0.2)[0]:
                seen += os.read(process.stdout.fileno(), 4096)
        victims = rank_processes(process, check.binary)
        running = len(seen) >= 4 and len(victims) == ranks and process.poll() is None
        begin = time.monotonic()
        if running:
            os.kill(victims[-1], number)
    finally:
        done = check.finish(started, min(40, max(5, check.part_end - time.monotonic())))
    took = time.monotonic() - begin
    # The launcher does not wait for a rank after telling it to end.
    gone_by = time.monotonic() + 1.0
    while (left := rank_processes(process, check.binary)) and time.monotonic() < gone_by:
        time.sleep(0.02)
    right = running and not done.timed_out and done.status != 0 and took < SOON and not left and "panicked" not in done.stderr
    # A killed rank can't choose the launcher's exit status; an interrupted one does.
    if number == signal.SIGINT and ranks == 1:
        right = right and done.status == 4
    check.judge(right, f"abort {name} N={ranks}",
                f"exit status {done.status} after {took:.1f} s" if right else
                f"kernel seen running: {running}, exit status {done.status} after {took:.1f} s, {len(left)} processes left: {done.problem()}")
    usable(check, ranks, name)


def run_faults(check, ranks):
    """All faults of one number of ranks."""
    run_deadline(check, ranks)
    run_signal(check, ranks, signal.SIGINT, "SIGINT")
    run_signal(check, ranks, signal.SIGKILL, "SIGKILL")


def run(check):
    """All faults."""
    for ranks in ranks_of(check):
        run_faults(check, ranks)

"""Compiles what the other parts launch into the cubin cache, with one compiler for each core.

The cubins are for this machine's GPU, or for an H200 if it has none."""

import os
from concurrent.futures import ThreadPoolExecutor

from common import OutOfTime


def run(check, jobs):
    """Compiles the code of all jobs; equal models and options are compiled once."""
    needed = {}
    for job in jobs:
        needed.setdefault((str(job.model), job.ranks, *job.shape_options(), *job.environment), job)

    def one(job):
        command = [check.binary, job.model, "--ranks", job.ranks, "--compile-only", *job.shape_options()]
        try:
            return job, check.command(command, 300, dict(job.environment))
        except OutOfTime:
            return job, None

    # The largest first, so that none of them is left to the end.
    ordered = sorted(needed.values(), key=lambda job: -job.ranks)
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        results = list(pool.map(one, ordered))
    failed = [(job, done) for job, done in results if done is None or done.status != 0]
    seconds = [round(done.seconds, 2) for _, done in results if done is not None]
    problems = "; ".join(f"{job.model.name} {job.what()}: {done.problem() if done else 'out of time'}"
                         for job, done in failed[:3])
    check.judge(not failed, "compile", f"{len(failed)} of {len(results)} failed: {problems}" if failed else
                f"{len(results)} configurations; the slowest took {max(seconds, default=0):.1f} s")
    check.figures["compile"] = {"seconds": seconds}

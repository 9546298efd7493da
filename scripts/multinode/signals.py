"""SIGINT and SIGTERM while ranks load, on two nodes: every rank ends soon, the right rank says why, and no process or
file is left. A second SIGINT ends every rank at once, also while the kernel runs."""
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from cluster import REPOSITORY, Cluster
from faults import DEADLINE, LIMIT, endless, nothing_left, says

# How long the slow rank's own work takes, in milliseconds. All other ranks wait for it. It is longer than any test
# waits.
PAUSE = 30_000
# The step before the first messages between nodes.
CONTACT = "2"
# From the second SIGINT to the end of all ranks, in seconds.
AT_ONCE = 4
FAKES = REPOSITORY / "tests" / "fake_gpu"


def weights_step(cluster, program):
    """The step at which the ranks meet after they have read their weights."""
    command = [program, endless(cluster.folder), "--backend", "cpu", "--prompt-tokens", "1", "--max-new-tokens", 1]
    job = cluster.run((1, 1), command, options=["-x", "MPK_LOG=debug"])
    step = re.search(r"step (\d+): weights", job.stderr())
    assert step, job.stderr()[-3000:]
    return step[1]


def slow_job(cluster, program, hosts, step, slow):
    """A job whose ranks wait at this step for rank `slow`, whose own work takes long."""
    command = [program, endless(cluster.folder), "--backend", "cpu", "--deadline", DEADLINE, "--debug-fault", f"{slow}:{step}:pause={PAUSE}"]
    job = cluster.start(hosts, command + server_options(program))
    await_ranks(job, sum(hosts))
    if step != CONTACT:
        job.await_text("ready for weights")
    # The ranks say nothing when they get to the step.
    time.sleep(1 if step == CONTACT else 0.3)
    assert job.process.poll() is None, job.stderr()[-3000:]
    return job


def stalled_job(cluster, program, hosts, slow):
    """A job that runs its kernel, in which a task of rank `slow` does not end, not even if the run is aborted."""
    library = cluster.folder / "stuck_task.so"
    subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", "-o", library, REPOSITORY / "tests" / "preload" / "stuck_task.cpp"], check=True)
    command = [program, endless(cluster.folder), "--backend", "cpu", "--deadline", "50", "--debug-stall", f"{slow}:4:{PAUSE}"]
    job = cluster.start(hosts, command, ["-x", f"LD_PRELOAD={library}"])
    await_ranks(job, sum(hosts))
    job.await_text("weights:")
    time.sleep(1)
    assert job.process.poll() is None, job.stderr()[-3000:]
    return job


def compiling_job(cluster, program, hosts):
    """A job for GPUs on a machine with stand-ins for the driver and for nvcc, which does not end."""
    folder = cluster.folder / "fakes"
    (folder / "cuda" / "bin").mkdir(parents=True)
    subprocess.run(["c++", "-std=c++17", "-w", "-shared", "-fPIC", "-I", FAKES, "-I", REPOSITORY / "kernels-cu" / "include",
                    "-o", folder / "libcuda.so", FAKES / "libcuda.cpp"], check=True)
    nvcc = folder / "cuda" / "bin" / "nvcc"
    nvcc.write_text(f'#!/bin/sh\n[ "$1" != --version ] || exec {FAKES}/nvcc --version\ntouch {folder}/compiles\nsleep {PAUSE // 1000}\n')
    nvcc.chmod(0o755)
    libraries = ":".join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    command = [program, endless(cluster.folder), "--backend", "cuda", "--transport", "host", "--workers", "4", "--deadline", DEADLINE]
    job = cluster.start(hosts, command + server_options(program), [
        "-x", f"LD_LIBRARY_PATH={libraries}", "-x", f"CUDA_HOME={folder}/cuda", "-x", f"MPK_CACHE_DIR={folder}/cache"])
    await_ranks(job, sum(hosts))
    end = time.monotonic() + 20
    while not (folder / "compiles").exists():
        assert time.monotonic() < end and job.process.poll() is None, f"nvcc is not called:\n{job.stderr()[-3000:]}"
        time.sleep(0.02)
    time.sleep(0.3)
    return job


def server_options(program):
    return ["--port", "0"] if program.endswith("mpk-serve") else []


def await_ranks(job, count):
    end = time.monotonic() + 20
    while len(job.ranks()) < count:
        assert time.monotonic() < end and job.process.poll() is None, f"not all ranks start:\n{job.stderr()[-3000:]}"
        time.sleep(0.02)


def ends_soon(cluster, job, count, since):
    """Waits until all ranks have ended and nothing is left. Returns their statuses and how long they took."""
    while len(job.statuses()) < count and time.time() < since + LIMIT:
        time.sleep(0.02)
    statuses = job.statuses()
    assert len(statuses) == count, f"only these ranks have ended after {LIMIT} s: {statuses}\n{job.stderr()[-4000:]}"
    nothing_left(cluster, job, (1, 2))
    return {rank: status for rank, (status, _) in statuses.items()}, max(ended for _, ended in statuses.values()) - since


def mpirun_of(cluster):
    return next(pid for pid, name in cluster.processes(1) if name in ("mpirun", "orterun", "prterun"))


def signal_to(cluster, job, hosts, number, target, before_contact, is_awaited):
    """A signal to a rank ends it, and the others end with status 4. One to mpirun reaches every rank as SIGTERM, which ends it."""
    since = time.time()
    if target == "mpirun":
        os.kill(mpirun_of(cluster), number)
        number = signal.SIGTERM
    else:
        os.kill(job.ranks()[target], number)
    statuses, took = ends_soon(cluster, job, sum(hosts), since)
    what = f"{statuses}\n{job.stderr()[-4000:]}"
    node_of = [node for node, ranks in enumerate(hosts, 1) for _ in range(ranks)]
    named = [rank for rank in statuses if target in (rank, "mpirun")]
    said = [rank for rank in named if f"{number.name} has ended rank {rank} on node node{node_of[rank]} in `" in job.stderr()]
    assert said, f"no rank says so: {what}"
    if before_contact and is_awaited:
        # mpirun ends the ranks of the other node, which know who has not answered.
        assert f"in `contact with rank {target}`" in job.stderr(), what
    for rank, status in statuses.items():
        expected = {4}
        if rank in named or before_contact:
            expected.add(-number if rank in named else -signal.SIGTERM)
        if rank == target:
            expected = {-number}
        elif hosts[node_of[rank] - 1] > 1:
            # As soon as one rank of a node has ended, mpirun may kill the rest of it.
            expected.add(-signal.SIGKILL)
        assert status in expected, f"rank {rank} ended with {status} instead of {expected}: {what}"
    assert job.process.returncode != 0, f"mpirun ended with 0: {what}"
    return f"all ranks ended after {took:.1f} s"


def two_signals_to(cluster, job, hosts, target):
    """Two SIGINT end every rank at once. mpirun passes none on: it ends the ranks at the first one, and itself at the second."""
    pids = job.ranks().values() if target == "ranks" else [mpirun_of(cluster)]
    for _ in range(2):
        since = time.time()
        for pid in pids:
            # The first one may have ended it already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        time.sleep(0.2)
    statuses, took = ends_soon(cluster, job, sum(hosts), since)
    what = f"{statuses}\n{job.stderr()[-4000:]}"
    assert took < AT_ONCE, f"all ranks ended only after {took:.1f} s: {what}"
    assert 0 not in statuses.values(), what
    if target == "ranks":
        assert 4 in statuses.values(), what
        says(job, "a second signal has ended this process")
    return f"all ranks ended after {took:.1f} s"


# Program, ranks of each node, where ranks are, the rank that the others wait for, signal, to whom.
SHORT = [("mpk-run", (1, 1), "contact", 1, signal.SIGINT, 1), ("mpk-run", (2, 2), "weights", 1, signal.SIGTERM, 0),
         ("mpk-run", (1, 1), "weights", 1, signal.SIGINT, "mpirun"), ("mpk-run", (1, 1), "nvcc", 0, signal.SIGTERM, 0),
         ("mpk-serve", (1, 1), "weights", 1, signal.SIGTERM, "mpirun"), ("mpk-serve", (1, 1), "weights", 1, signal.SIGINT, 0),
         ("mpk-serve", (2, 2), "weights", 3, signal.SIGTERM, 3)]
# The same without the signal: SIGINT twice.
TWICE = [("mpk-run", (1, 1), "contact", 1, "mpirun"), ("mpk-run", (2, 2), "weights", 1, "mpirun"), ("mpk-run", (1, 1), "weights", 0, "ranks"),
         ("mpk-run", (1, 1), "kernel", 1, "mpirun"), ("mpk-run", (2, 2), "kernel", 1, "ranks"), ("mpk-serve", (1, 1), "weights", 1, "mpirun"),
         ("mpk-serve", (1, 1), "weights", 0, "ranks")]
LONG = [(program, hosts, where, slow, number, target)
        for program in ("mpk-run", "mpk-serve") for hosts in ((1, 1), (2, 2)) for where in ("contact", "weights", "nvcc")
        for number in (signal.SIGINT, signal.SIGTERM) for target in (0, sum(hosts) - 1, "mpirun")
        for slow in (0, sum(hosts) - 1) if where != "nvcc" or slow == 0]


def run(program, report, long, share):
    index, count = share
    with Cluster(2) as cluster:
        weights = weights_step(cluster, program)

        def start(name, hosts, where, slow):
            shutil.rmtree(cluster.folder / "fakes", ignore_errors=True)
            started = str(Path(program).with_name(name))
            if where == "nvcc":
                return compiling_job(cluster, started, hosts)
            if where == "kernel":
                return stalled_job(cluster, started, hosts, slow)
            return slow_job(cluster, started, hosts, CONTACT if where == "contact" else weights, slow)

        def case(name, hosts, where, slow, number, target):
            job = start(name, hosts, where, slow)
            return signal_to(cluster, job, hosts, number, target, where == "contact" and target != "mpirun", slow == target)

        def twice(name, hosts, where, slow, target):
            return two_signals_to(cluster, start(name, hosts, where, slow), hosts, target)

        tests = []
        for one in LONG if long else SHORT:
            name, hosts, where, _, number, target = one
            to = target if target == "mpirun" else f"rank {target}"
            text = f"{number.name} to {to}, {name} at `{where}`, {' + '.join(map(str, hosts))} ranks"
            tests.append((text, lambda one=one: case(*one)))
        for one in TWICE:
            name, hosts, where, _, target = one
            text = f"SIGINT twice to {target}, {name} at `{where}`, {' + '.join(map(str, hosts))} ranks"
            tests.append((text, lambda one=one: twice(*one)))
        for text, test in tests[index - 1::count]:
            report(text, test)

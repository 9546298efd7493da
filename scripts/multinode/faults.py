"""Faults that end a job on several nodes. Within seconds each remaining rank reports which node is gone, and ends with status 4."""
import argparse
import ctypes
import json
import os
import re
import signal
import time
from pathlib import Path

from cluster import REPOSITORY, Cluster

DEADLINE = 5
# From the fault to the end of every rank.
LIMIT = DEADLINE + 10
PTRACE_ATTACH, WALL = 16, 0x40000000


def endless(folder):
    """A model whose run takes longer than any test."""
    path = folder / "endless.json"
    path.write_text(json.dumps({
        "schema": "mpk-model/1", "checkpoint": str(REPOSITORY / "tests/fixtures/qwen3"), "max_batch": 4, "max_seq_len": 192, "page_size": 16,
        "runtime": {"workers": 1},
        "generate": {"prompt_tokens": [[5, 6, 7]] * 1000, "max_new_tokens": 180, "ignore_eos": True}}))
    return path


# If mpirun itself notices a failure, it ends the ranks. With this setting it kills them after two seconds, not after
# one. mpirun and each daemon sleep for that time twice, one after the other.
GENTLE = ["--mca", "odls_base_sigkill_timeout", "2"]


def start(cluster, program, hosts, options=()):
    job = cluster.start(hosts, [program, endless(cluster.folder), "--backend", "cpu", "--json", "--deadline", DEADLINE], ["-x", "MPK_LOG=debug", *options])
    job.await_text("weights: ")
    end = time.monotonic() + 20
    while len(job.ranks()) < sum(hosts) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(1)
    assert job.process.poll() is None, job.stderr()[-3000:]
    return job


def await_stop(job, rank):
    """Waits until `--debug-fault` has stopped the rank."""
    end = time.monotonic() + 20
    while rank not in job.ranks() or " T " not in Path(f"/proc/{job.ranks()[rank]}/stat").read_text():
        assert time.monotonic() < end and job.process.poll() is None, f"rank {rank} does not stop:\n{job.stderr()[-3000:]}"
        time.sleep(0.02)


def await_ends(job, ranks, since, meanwhile=lambda: None, killed=()):
    """Waits until these ranks have ended, each within the limit and with status 4. `killed`: those that a daemon may kill first."""
    while time.time() < since + LIMIT + 5:
        if all(rank in job.statuses() for rank in ranks):
            break
        meanwhile()
        time.sleep(0.05)
    statuses = job.statuses()
    for rank in ranks:
        assert rank in statuses, f"rank {rank} has not ended {LIMIT} s after the fault:\n{job.stderr()[-4000:]}"
        status, ended = statuses[rank]
        assert ended - since < LIMIT, f"rank {rank} ended after {ended - since:.1f} s"
        assert status == 4 or rank in killed and status == -signal.SIGKILL, f"rank {rank} ended with status {status} (all: {statuses}, fault at {since}):\n{job.stderr()[-4000:]}"
    return max(statuses[rank][1] for rank in ranks) - since


def nothing_left(cluster, job, nodes, seconds=20):
    """No process of the job is left on these nodes, and no file."""
    end = time.monotonic() + seconds
    while any(cluster.processes(node) for node in nodes) or job.process.poll() is None:
        if time.monotonic() > end:
            left = {node: cluster.processes(node) for node in nodes}
            job.kill()
            raise AssertionError(f"still running after {seconds} s: {left}")
        time.sleep(0.05)
    assert not cluster.left_behind(), f"left behind: {cluster.left_behind()}\n{job.stderr()[-4000:]}"


def says(job, pattern, seconds=10):
    """A rank says something that matches `pattern`. While mpirun ends ranks it sleeps, so their last words may come after their end."""
    end = time.monotonic() + seconds
    while not re.search(pattern, job.stderr()):
        assert time.monotonic() < end, f"no rank says `{pattern}`:\n{job.stderr()[-4000:]}"
        time.sleep(0.02)


def link_cut(cluster, program, hosts):
    job = start(cluster, program, hosts)
    since = time.time()
    cluster.cut(2)
    took = await_ends(job, range(sum(hosts)), since)
    says(job, "node node2 is lost")
    # Only mpirun and its daemons are left. They would wait for their dead connections for ten seconds more.
    for node in range(1, len(hosts) + 1):
        cluster.set_retries(node, 1)
    nothing_left(cluster, job, range(1, len(hosts) + 1))
    return f"all ranks ended after {took:.1f} s"


def link_cut_at_contact(cluster, program, hosts):
    """A cut after MPI's start-up, before the ranks know which node each of them is on. The last rank stops just before that."""
    last = sum(hosts) - 1
    job = cluster.start(hosts, [program, endless(cluster.folder), "--backend", "cpu", "--deadline", DEADLINE, "--debug-fault", f"{last}:2:stop"])
    await_stop(job, last)
    since = time.time()
    cluster.cut(len(hosts))
    os.kill(job.ranks()[last], signal.SIGCONT)
    took = await_ends(job, range(sum(hosts)), since)
    says(job, f"`contact with rank {last}` did not end within")
    # mpirun waits for its daemon. The other cases wait for mpirun.
    job.kill()
    return f"all ranks ended after {took:.1f} s"


def node_frozen(cluster, program, hosts):
    job = start(cluster, program, hosts)
    frozen = cluster.processes(2)
    since = time.time()
    for pid, _ in frozen:
        os.kill(pid, signal.SIGSTOP)
    others = [rank for rank in range(sum(hosts)) if not hosts[0] <= rank < hosts[0] + hosts[1]]
    took = await_ends(job, others, since)
    says(job, "node node2 is lost")
    for pid, _ in frozen:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
    nothing_left(cluster, job, range(1, len(hosts) + 1), 40)
    return f"the ranks of the other nodes ended after {took:.1f} s"


def rank_killed(cluster, program, hosts):
    job = start(cluster, program, hosts, GENTLE)
    since = time.time()
    victim = sum(hosts) - 1
    os.kill(job.ranks()[victim], signal.SIGKILL)
    took = await_ends(job, range(victim), since)
    nothing_left(cluster, job, range(1, len(hosts) + 1))
    return f"the other ranks ended after {took:.1f} s"


def rank_killed_while_loading(cluster, program, hosts):
    """A rank dies while all others wait for one more, which is stopped: in a phase in which no kernel runs."""
    command = [program, endless(cluster.folder), "--backend", "cpu", "--deadline", DEADLINE]
    first = cluster.run(hosts, [*command, "--prompt-tokens", "1", "--max-new-tokens", 1], options=["-x", "MPK_LOG=debug"])
    step = re.search(r"step (\d+): weights", first.stderr())
    assert step, first.stderr()[-3000:]
    victim, last = 1, sum(hosts) - 1
    slow = last if last != victim else 0
    job = cluster.start(hosts, [*command, "--debug-fault", f"{slow}:{step[1]}:stop"])
    await_stop(job, slow)
    time.sleep(0.25)  # the others hear where the victim is
    since = time.time()
    os.kill(job.ranks()[victim], signal.SIGKILL)
    os.kill(job.ranks()[slow], signal.SIGCONT)
    took = await_ends(job, [rank for rank in range(sum(hosts)) if rank != victim], since)
    node = 1 if victim < hosts[0] else 2
    # If the stopped rank is the only other one, it may lose the connection before it has read the victim's last
    # message.
    phase = "weights" if sum(hosts) > 2 else ".*"
    says(job, rf"rank {victim} on node node{node} (is|may be) lost: .*last in `{phase}`")
    nothing_left(cluster, job, range(1, len(hosts) + 1))
    return f"the other ranks ended after {took:.1f} s"


def proxy_stopped(cluster, program, hosts):
    """The last rank's proxy thread is stopped, as a debugger would stop it, but the rank lives."""
    job = start(cluster, program, hosts, GENTLE)
    victim = sum(hosts) - 1
    threads = Path(f"/proc/{job.ranks()[victim]}/task")
    (proxy,) = [int(thread.name) for thread in threads.iterdir() if (thread / "comm").read_text().strip() == "proxy"]
    libc = ctypes.CDLL(None, use_errno=True)
    since = time.time()
    assert libc.ptrace(PTRACE_ATTACH, proxy, None, None) == 0, "the proxy's thread cannot be stopped"

    def reap():
        try:
            os.waitpid(proxy, os.WNOHANG | WALL)
        except ChildProcessError:
            pass

    took = await_ends(job, range(sum(hosts)), since, reap)
    says(job, f"node node{len(hosts)}")
    nothing_left(cluster, job, range(1, len(hosts) + 1), 40)
    return f"all ranks ended after {took:.1f} s"


def daemon_killed(cluster, program, hosts):
    job = start(cluster, program, hosts, GENTLE)
    daemons = [pid for pid, name in cluster.processes(2) if name in ("orted", "prted")]
    assert daemons, cluster.processes(2)
    since = time.time()
    for pid in daemons:
        os.kill(pid, signal.SIGKILL)
    took = await_ends(job, range(sum(hosts)), since)
    says(job, "node2")
    nothing_left(cluster, job, range(1, len(hosts) + 1))
    return f"all ranks ended after {took:.1f} s"


def mpirun_killed(cluster, program, hosts):
    job = start(cluster, program, hosts, GENTLE)
    since = time.time()
    for pid, name in cluster.processes(1):
        if name in ("mpirun", "orterun", "prterun"):
            os.kill(pid, signal.SIGKILL)
    # A daemon without mpirun ends its ranks. MPI may block these ranks, because it has something to tell mpirun, until
    # the daemon kills them.
    took = await_ends(job, range(sum(hosts)), since, killed=range(hosts[0], sum(hosts)))
    nothing_left(cluster, job, range(1, len(hosts) + 1))
    return f"all ranks ended after {took:.1f} s"


# Every fault that CI must meet, on two nodes or on three. Adjacent faults take about the same time, so that shares do
# too.
SHORT = [("link cut", link_cut, (1, 1)), ("link cut", link_cut, (1, 1, 2)), ("link cut at the first contact", link_cut_at_contact, (2, 1)),
         ("proxy stopped", proxy_stopped, (1, 1)), ("proxy stopped", proxy_stopped, (1, 1, 2)), ("mpirun's daemon killed", daemon_killed, (1, 1, 2)),
         ("rank killed while loading", rank_killed_while_loading, (1, 1, 2)), ("node frozen", node_frozen, (1, 1, 2)),
         ("mpirun's daemon killed", daemon_killed, (2, 2))]
LONG = [(name, fault, hosts)
        for name, fault in (("link cut", link_cut), ("node frozen", node_frozen), ("rank killed", rank_killed),
                            ("rank killed while loading", rank_killed_while_loading), ("proxy stopped", proxy_stopped),
                            ("mpirun's daemon killed", daemon_killed), ("mpirun killed", mpirun_killed))
        for hosts in ((1, 1), (2, 2), (1, 1, 2))] + [("link cut at the first contact", link_cut_at_contact, (2, 1))]


def share(text):
    """`I/N`: the Ith of N shares."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"`{text}` is no share; expected I/N with I from 1 to N, such as 1/3")
    return int(index), int(count)


def run(program, report, long, part=(1, 1)):
    """`part`: one of several shares of the cases. Cases mostly wait, so a caller may run the shares side by side."""
    index, count = part
    for name, fault, hosts in (LONG if long else SHORT)[index - 1::count]:
        with Cluster(len(hosts)) as cluster:
            report(f"{name}, {' + '.join(map(str, hosts))} ranks", lambda: fault(cluster, program, hosts))

"""What jobs on several nodes compute: the tokens of Hugging Face transformers, and the same bits as on one node."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster import REPOSITORY, Cluster

FIXTURES = REPOSITORY / "tests" / "fixtures"
# Family, ranks of each node, placement, lowering; and rows of an iteration, 0: as many as there are.
SHORT = [
    ("qwen3", (1, 1), "static", "one-shot", 0),
    ("llama", (1, 1), "dynamic", "copy-reduce", 5),
    ("mistral", (2, 2), "static", "two-shot", 7),
    ("qwen2", (1, 1), "static", "auto", 6),
    ("qwen3", (2, 2), "dynamic", "hierarchical", 0),
    ("qwen3", (2, 1, 1), "static", "auto", 6),
]
PLACEMENTS = ("static", "dynamic")
LOWERINGS = ("copy-reduce", "one-shot", "two-shot", "hierarchical")
LONG = [(family, hosts, placement, lowering, chunk)
        for family in ("qwen3", "mistral", "llama", "qwen2")
        for hosts in ((1, 1), (2, 2), (2, 1, 1))
        for placement in PLACEMENTS
        for lowering in LOWERINGS
        for chunk in (0, 6)]


def model(folder, family, hosts, chunk):
    """The fixture's model.json with the requests of expected.json, all in one batch."""
    source = json.loads((FIXTURES / family / "model.json").read_text())
    expected = json.loads((FIXTURES / family / "expected.json").read_text())
    source["checkpoint"] = str(FIXTURES / family)
    source.setdefault("generate", {}).update(prompt_tokens=[r["prompt_tokens"] for r in expected["requests"]], ignore_eos=True)
    # If the reference run has the same nodes, it sums in the same order.
    source["runtime"] = {"nodes": [node for node, ranks in enumerate(hosts) for _ in range(ranks)], "workers": 1}
    if chunk:
        source["max_batch"] = min(chunk, source["max_batch"])
        source["runtime"]["prefill_chunk"] = chunk
    path = folder / f"{family}-{'-'.join(map(str, hosts))}-{chunk}.json"
    path.write_text(json.dumps(source))
    return path, [r["tokens"] for r in expected["requests"]]


def arguments(path, placement, lowering):
    return [path, "--backend", "cpu", "--json", "--logprobs", "5", "--placement", placement, "--allreduce", lowering, "--deadline", "20"]


def result(text):
    return json.loads(text)["requests"]


def check(cluster, program, family, hosts, placement, lowering, chunk, reference=True):
    path, tokens = model(cluster.folder, family, hosts, chunk)
    command = [program, *arguments(path, placement, lowering)]
    job = cluster.run(hosts, command)
    assert job.process.returncode == 0, f"status {job.process.returncode}:\n{job.stderr()[-4000:]}"
    found = result(job.stdout())
    assert [r["tokens"] for r in found] == tokens, f"tokens differ from those of Hugging Face transformers: {found}"
    if reference:
        alone = subprocess.run(["mpirun", "-n", str(sum(hosts)), *map(str, command)], capture_output=True, text=True, timeout=60, env=os.environ)
        assert alone.returncode == 0, alone.stderr[-4000:]
        assert found == result(alone.stdout), "bits differ from those on one node"


def check_sanitized(cluster, program):
    """Every access of every task's kernel is one that the task declared, also where its data and queues come from another node."""
    hosts = (2, 2)
    path, tokens = model(cluster.folder, "qwen3", hosts, 6)
    command = [program, *arguments(path, "dynamic", "hierarchical"), "--log-all-ranks"]
    # If no run has compiled the checked kernels, the first rank does.
    job = cluster.run(hosts, command, 240, ["-x", "MPK_SANITIZE=1", "-x", "MPK_LOG=debug"])
    assert job.process.returncode == 0, f"status {job.process.returncode}:\n{job.stderr()[-4000:]}"
    assert job.stderr().count("every access is checked by ") == sum(hosts), "not all ranks were checked"
    assert [r["tokens"] for r in result(job.stdout())] == tokens, "tokens differ from those of Hugging Face transformers"


CLIENT = """import json, sys, urllib.request
body = {"prompt": sys.argv[2], "max_tokens": 24, "temperature": 0}
request = urllib.request.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
print(json.dumps(json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["text"]))"""


def check_server(cluster, program):
    """mpk-serve on two nodes: its text is mpk-run's on one, and SIGTERM ends every rank with status 0."""
    path, prompt = REPOSITORY / "examples/tiny/model.json", "Thus saith the Lord GOD;"
    alone = subprocess.run(["mpirun", "-n", "2", program, path, "--backend", "cpu", "--json", "--greedy", "--prompt", prompt, "--max-new-tokens", "24"],
                           capture_output=True, text=True, timeout=60, env=os.environ)
    assert alone.returncode == 0, alone.stderr[-4000:]
    job = cluster.start((1, 1), [os.path.join(os.path.dirname(program), "mpk-serve"), path, "--backend", "cpu", "--port", "0", "--deadline", "20"])
    job.await_text("listening on http://")
    address = re.search(r"listening on (http://\S+)", job.stderr()).group(1)
    asked = subprocess.run([*cluster.enter(1), sys.executable, "-c", CLIENT, address, prompt], capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, f"{asked.stderr}\n{job.stderr()[-4000:]}"
    text, expected = json.loads(asked.stdout), result(alone.stdout)[0]["text"]
    assert text == expected, f"{text!r} instead of {expected!r}"
    for pid in job.ranks().values():
        os.kill(pid, signal.SIGTERM)
    job.wait(30)
    statuses = {rank: status for rank, (status, _) in job.statuses().items()}
    assert statuses == {0: 0, 1: 0}, f"ended with {statuses}:\n{job.stderr()[-4000:]}"
    return f"{len(text)} characters as on one node, both ranks ended with status 0 after SIGTERM"


def sleeps(pid):
    """How often a process's main thread and its other threads, except workers and proxy, have gone to sleep."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if not re.match("worker|proxy", (thread / "comm").read_text()):
            total += int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (thread / "status").read_text(), re.M)[1])
    return total


def check_host_sleeps(program):
    """While its kernel runs, the other node's host sleeps until the proxy wakes it. It does not poll for messages."""
    with Cluster(2, own_cores=True) as cluster:
        return count_sleeps(cluster, program)


def count_sleeps(cluster, program):
    job = cluster.start((1, 1), [program, REPOSITORY / "examples/tiny/model.json", "--backend", "cpu", "--workers", "1",
                                 *["--prompt-tokens", "1,2"] * 8, "--max-new-tokens", "500", "--ignore-eos"], ["-x", "MPK_LOG=debug"])
    job.await_text("the kernel may see ")
    time.sleep(0.05)
    pid, seconds = job.ranks()[1], 0.1
    before = sleeps(pid)
    time.sleep(seconds)
    often = (sleeps(pid) - before) / seconds
    assert job.process.poll() is None, "the job ended before its sleeps could be counted"
    job.wait(30)
    assert job.process.returncode == 0, job.stderr()[-4000:]
    # The watch 20 times a second, the host 50 times; 2,000 times without a ring.
    assert often < 600, f"{often:.0f} sleeps a second"
    return f"{often:.0f} sleeps a second"


def run(program, report, long):
    for count in (2, 3):
        with Cluster(count) as cluster:
            for case in LONG if long else SHORT:
                if len(case[1]) == count:
                    family, hosts, placement, lowering, chunk = case
                    name = f"{family}, {' + '.join(map(str, hosts))} ranks, {placement}, {lowering}" + (f", {chunk} rows" if chunk else "")
                    report(name, lambda case=case: check(cluster, program, *case))
            if count == 2:
                report("qwen3, 2 + 2 ranks, dynamic, hierarchical, 6 rows, every access checked", lambda: check_sanitized(cluster, program))
                report("mpk-serve, 1 + 1 ranks", lambda: check_server(cluster, program))
    report("the other node's host sleeps, 1 + 1 ranks", lambda: check_host_sleeps(program))


def run_slow(program, report, long):
    """The same over a network with delay and jitter, and with loss."""
    for name, delay in (("20 ms of delay, 5 ms of jitter", (0.020, 0.005, 0.0)), ("1 % loss", (0.0002, 0.0001, 0.01))):
        with Cluster(2, delay) as cluster:
            for case in (LONG[::7] if long else [("qwen3", (1, 1), "static", "one-shot", 0)]):
                if len(case[1]) == 2:
                    report(f"{name}: {case[0]}, {case[2]}, {case[3]}", lambda case=case: check(cluster, program, *case, reference=long))
            if delay[2]:
                assert cluster.relay.lost > 0, "the relay has dropped no packet"

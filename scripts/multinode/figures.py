"""Figures of jobs over nodes; printed, not judged: machines and their load differ."""
import json
import os
import subprocess

from cluster import REPOSITORY, Cluster


def decode(program, report, rounds):
    """The tiny model's time a token on two nodes of one rank each, beside one node of two ranks."""
    command = [program, REPOSITORY / "examples/tiny/model.json", "--backend", "cpu", "--json", "--workers", "1", "--max-new-tokens", "48"]

    def time_of(text):
        return json.loads(text)["timing"]["ms_per_token"]

    def measure():
        with Cluster(2) as cluster:
            nodes, one = [], []
            for _ in range(rounds):
                nodes.append(time_of(cluster.run((1, 1), command).stdout()))
                alone = subprocess.run(["mpirun", "-n", "2", *map(str, command)], capture_output=True, text=True, timeout=60, env=os.environ)
                one.append(time_of(alone.stdout))
        return f"{min(nodes):.3f} ms a token on 2 nodes, {min(one):.3f} ms on one (best of {rounds})"

    report("tiny model, 1 + 1 ranks beside 2", measure)


def puts(program, report, rounds):
    """A put of 8 KB with its signal, one way, beside MPI's own messages of 8 KB."""
    bench = os.path.join(os.path.dirname(program), "examples", "proxy_latency")
    if not os.access(bench, os.X_OK):
        print("left out: put with signal (cargo build --release -p distributed --example proxy_latency)")
        return

    def measure():
        with Cluster(2) as cluster:
            job = cluster.run((1, 1), [bench, str(rounds)])
            assert job.process.returncode == 0, job.stderr()[-3000:]
            return job.stdout().strip()

    report("8 KB between two nodes", measure)


def run(program, report, long):
    puts(program, report, 20000 if long else 2000)
    decode(program, report, 5 if long else 2)

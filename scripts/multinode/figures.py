"""Figures of jobs over nodes. They are printed, not judged, since machines and their load differ."""
import json
import os
import re
import subprocess
import time

from cluster import REPOSITORY, Cluster

TINY = REPOSITORY / "examples/tiny"


def bench_of(program):
    """The program that measures puts, if it is built."""
    path = os.path.join(os.path.dirname(program), "examples", "proxy_latency")
    return path if os.access(path, os.X_OK) else None


def median(values):
    return sorted(values)[len(values) // 2]


def one_way(cluster, bench, rounds, size):
    """Of a put of `size` bytes with its signal, and of MPI's own message, in microseconds."""
    job = cluster.run((1, 1), [bench, str(rounds), str(size)])
    assert job.process.returncode == 0, job.stderr()[-3000:]
    put, message = re.search(r"([0-9.]+) us.*?([0-9.]+) us", job.stdout()).groups()
    return float(put), float(message)


def puts(bench, report, rounds, repeats):
    """A put of 8 KB with its signal, one way, beside MPI's own messages of 8 KB."""
    def measure():
        with Cluster(2, own_cores=True) as cluster:
            found = [one_way(cluster, bench, rounds, 8192) for _ in range(repeats)]
        put, message = (median(column) for column in zip(*found))
        ratios = ", ".join(f"{put / message:.2f}" for put, message in found)
        return f"{put:.1f} us one way, MPI's own message {message:.1f} us, {put / message:.2f} times (medians; each run: {ratios})"

    report("8 KB with its signal between two nodes", measure)


def decode(program, bench, report, repeats):
    """The tiny model's time a token on two nodes of one rank each, beside one node of two ranks, and what the puts of a token explain of it."""
    command = [program, TINY / "model.json", "--backend", "cpu", "--json", "--workers", "1", "--allreduce", "one-shot", "--max-new-tokens", "192", "--ignore-eos"]
    config = json.loads((TINY / "config.json").read_text())
    # Two allreduces a layer and the exchange of tokens follow each other; a word of 8 bytes brings a sum of 4.
    follow, size = 2 * config["num_hidden_layers"] + 1, 8 * config["hidden_size"]

    # The proxy of rank 0 counts its messages.
    logged = ["env", "MPK_LOG=info,distributed::nodes=debug", *command]

    def time_of(text):
        return json.loads(text)["timing"]["ms_per_token"] * 1000

    def measure():
        nodes, one, ways, messages = [], [], [], []
        with Cluster(2, own_cores=True) as cluster:
            for _ in range(repeats):
                job = cluster.run((1, 1), logged)
                nodes.append(time_of(job.stdout()))
                messages.append(int(re.search(r"the proxy has sent (\d+) messages", job.stderr())[1]) / 192)
                alone = subprocess.run(["mpirun", "-n", "2", *map(str, command)], capture_output=True, text=True, timeout=60, env=os.environ)
                one.append(time_of(alone.stdout))
                if bench:
                    ways.append(one_way(cluster, bench, 2000, size)[0])
        text = f"{median(nodes):.0f} us a token on 2 nodes, {median(one):.0f} us on one, {median(messages):.1f} messages a token from each"
        if bench:
            explained = median(one) + follow * median(ways)
            text += (f"; {follow} puts of {size} bytes after each other, {median(ways):.1f} us each, and the time on one node: {explained:.0f} us, "
                     f"{100 * (median(nodes) / explained - 1):+.0f} % off (medians of {repeats})")
        return text

    report("tiny model, 1 + 1 ranks beside 2", measure)


def start(program, report, repeats):
    """From mpirun's start to its end with one token: 8 ranks on 2 nodes, beside 4 on one."""
    command = [program, TINY / "model.json", "--backend", "cpu", "--json", "--workers", "1", "--prompt-tokens", "1,2", "--max-new-tokens", "1"]

    def measure():
        with Cluster(2) as cluster:
            found = []
            for _ in range(repeats):
                times = []
                for hosts in ((4,), (4, 4)):
                    begin = time.monotonic()
                    job = cluster.run(hosts, command)
                    assert job.process.returncode == 0, job.stderr()[-3000:]
                    loaded = json.loads(job.stdout())["timing"]["load_s"]
                    times.append((time.monotonic() - begin, loaded))
                found.append(times)
        (one, one_load), (two, two_load) = ((median([run[k][0] for run in found]), median([run[k][1] for run in found])) for k in range(2))
        return (f"8 ranks on 2 nodes {two:.2f} s, of that load {two_load:.2f} s; 4 ranks on one {one:.2f} s, load {one_load:.2f} s: "
                f"{two / one:.2f} times (all of them share {os.cpu_count()} cores; medians of {repeats})")

    report("start and end of a job", measure)


def run(program, report, long):
    bench = bench_of(program)
    if bench:
        puts(bench, report, 20000 if long else 4000, 5 if long else 3)
    else:
        print("left out: put with signal (cargo build --release -p mpk-distributed --example proxy_latency)")
    decode(program, bench, report, 5 if long else 3)
    start(program, report, 5 if long else 2)

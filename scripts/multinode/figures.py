"""Figures of jobs over nodes. They are printed, not judged, since machines and their load differ."""
import json
import os
import re
import shutil
import subprocess
import time

from cluster import REPOSITORY, Cluster

TINY = REPOSITORY / "examples/tiny"


# New tokens of a job whose decode is timed.
TOKENS = 400


def bench_of(program):
    """The program that measures puts, if it is built."""
    path = os.path.join(os.path.dirname(program), "examples", "proxy_latency")
    return path if os.access(path, os.X_OK) else None


def median(values):
    return sorted(values)[len(values) // 2]


def one_way(cluster, bench, rounds, size):
    """Times in microseconds of a put of `size` bytes with its signal, of MPI's own message, and of an exchange in which
    both ranks put."""
    job = cluster.run((1, 1), [bench, str(rounds), str(size)])
    assert job.process.returncode == 0, job.stderr()[-3000:]
    return [float(time) for time in re.findall(r"([0-9.]+) us", job.stdout())]


def puts(bench, report, rounds, repeats):
    """The one-way time of a put of 8 KB with its signal, compared with MPI's own messages of 8 KB."""
    def measure():
        with Cluster(2, own_cores=True) as cluster:
            found = [one_way(cluster, bench, rounds, 8192) for _ in range(repeats)]
        put, message, exchange = (median(column) for column in zip(*found))
        ratios = ", ".join(f"{put / message:.2f}" for put, message, _ in found)
        return (f"{put:.1f} us one way, MPI's own message {message:.1f} us, {put / message:.2f} times (medians; each run: {ratios}); "
                f"an exchange, both at once, {exchange:.1f} us")

    report("8 KB with its signal between two nodes", measure)


def decode(program, bench, report, repeats):
    """The tiny model's time per token on two nodes of one rank each and on one node of two ranks, and how much of it the exchanges of a token explain."""
    command = [program, TINY / "model.json", "--backend", "cpu", "--json", "--workers", "1", "--allreduce", "one-shot", "--max-new-tokens", str(TOKENS), "--ignore-eos"]
    config = json.loads((TINY / "config.json").read_text())
    # The sum of the embedding, two allreduces per layer and the exchange of tokens follow each other; a word of 8 bytes brings a sum of 4.
    follow, size = 2 * config["num_hidden_layers"] + 2, 8 * config["hidden_size"]

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
                messages.append(int(re.search(r"the proxy has sent (\d+) messages", job.stderr())[1]) / TOKENS)
                alone = subprocess.run(["mpirun", "-n", "2", *map(str, command)], capture_output=True, text=True, timeout=60, env=os.environ)
                one.append(time_of(alone.stdout))
                if bench:
                    ways.append(one_way(cluster, bench, 2000, size)[2])
        text = f"{median(nodes):.0f} us per token on 2 nodes (each run: {', '.join(f'{time:.0f}' for time in nodes)}), {median(one):.0f} us on one, {median(messages):.1f} messages per token from each"
        if bench:
            explained = median(one) + follow * median(ways)
            text += (f"; {follow} consecutive exchanges of {size} bytes, {median(ways):.1f} us each, and the time on one node make {explained:.0f} us, "
                     f"{100 * (median(nodes) / explained - 1):+.0f} % difference (medians of {repeats})")
        return text

    report("tiny model, 1 + 1 ranks beside 2", measure)


BARE = """#include <mpi.h>
int main(void) {
  int provided;
  MPI_Init_thread(0, 0, MPI_THREAD_MULTIPLE, &provided);
  MPI_Barrier(MPI_COMM_WORLD);
  return MPI_Finalize();
}
"""


def bare(folder):
    """A program that only starts and ends MPI, if there is a compiler for it."""
    if not shutil.which("mpicc"):
        return None
    source, program = folder / "bare.c", folder / "bare"
    source.write_text(BARE)
    subprocess.run(["mpicc", "-o", program, source], check=True)
    return program


def start(program, report, repeats):
    """The time from mpirun's start to its end, for one token: 8 ranks on 2 nodes, compared with 8 and 4 ranks on one
    node, and with a program that only starts MPI."""
    command = [program, TINY / "model.json", "--backend", "cpu", "--json", "--workers", "1", "--prompt-tokens", "1,2", "--max-new-tokens", "1"]
    jobs = {"8 ranks on 2 nodes": (4, 4), "8 on one": (8,), "4 on one": (4,)}

    def time_of(cluster, hosts, command):
        begin = time.monotonic()
        job = cluster.run(hosts, command, recorded=False)
        assert job.process.returncode == 0, job.stderr()[-3000:]
        return time.monotonic() - begin, job

    def measure():
        whole, loads, alone = ({name: [] for name in jobs} for _ in range(3))
        with Cluster(2) as cluster:
            only_mpi = bare(cluster.folder)
            for _ in range(repeats):
                for name, hosts in jobs.items():
                    took, job = time_of(cluster, hosts, command)
                    whole[name].append(took)
                    loads[name].append(json.loads(job.stdout())["timing"]["load_s"])
                    alone[name].append(time_of(cluster, hosts, [only_mpi])[0] if only_mpi else 0)
        texts = [f"{name} {median(whole[name]):.2f} s (load {median(loads[name]):.2f}, MPI alone {median(alone[name]):.2f})" for name in jobs]
        nodes, one, four = (median(whole[name]) for name in jobs)
        nodes_mpi, _, four_mpi = (median(alone[name]) for name in jobs)
        without = f", MPI alone {nodes_mpi / four_mpi:.2f}" if only_mpi else ""
        return (f"{', '.join(texts)}; 8 on 2 nodes {nodes / four:.2f} times 4 on one{without}, {nodes / one:.2f} times 8 on one; beyond MPI alone {nodes - nodes_mpi:.2f} s "
                f"and {four - four_mpi:.2f} s (all of them share {os.cpu_count()} cores; medians of {repeats})")

    report("start and end of a job", measure)


def run(program, report, long):
    bench = bench_of(program)
    if bench:
        puts(bench, report, 20000 if long else 4000, 5 if long else 3)
    else:
        print("left out: put with signal (cargo build --release -p mpk-distributed --example proxy_latency)")
    decode(program, bench, report, 9 if long else 5)
    start(program, report, 5 if long else 3)

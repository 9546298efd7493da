#!/usr/bin/env python3
"""Benchmark of the CPU target: ours, the peers and the floor, interleaved in one run on the same cores.

Start it as scripts/bench_cpu.sh, which builds and sets the environment for mpirun. First it checks that the results
are right (the tiny model's tokens against Hugging Face's, the large shape's tokens on one rank against two); nothing is
timed if they are not. Then each round measures everything once, in an order that rotates; the report has the
medians. It writes OUTPUT/cpu-DATE.json (all rounds, hardware, commands, versions) and OUTPUT/cpu-DATE.svg.

Peers are optional: see scripts/bench_peers.py --help for their installation into .setup/peers.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path.insert(0, str(HERE / "bench"))

import machine  # noqa: E402
import ours as our_side  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
import shape  # noqa: E402

LARGE, CHECKED = "qwen3-0.6b", "qwen3-32b"
GRAPHS = ["qwen3-0.6b", "qwen3-8b", "qwen3-32b", "llama3-70b"]
PEERS = {  # name in the report: peer, huge pages
    "llama.cpp": ("llama.cpp", False),
    "llama.cpp, huge pages": ("llama.cpp", True),
    "PyTorch": ("torch", False),
    "PyTorch, huge pages": ("torch", True),
}
SHORT_PROMPT = 8


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    local = REPOSITORY / ".setup" / "peers" / "bin" / "python"
    python = os.environ.get("MPK_PEERS_PYTHON") or (local if local.exists() else sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2, help="number of cores to use, and of threads per engine (default 2)")
    parser.add_argument("--decode", type=int, default=64, help="number of decoded tokens (default 64)")
    parser.add_argument("--prefill", type=int, default=512, help="number of tokens of the long prompt (default 512)")
    parser.add_argument("--peers", default=";".join(PEERS), help="peers to measure, separated by semicolons: " + "; ".join(PEERS))
    parser.add_argument("--peer-python", type=Path, default=Path(python), help="Python that has the peers"
                        " (default: $MPK_PEERS_PYTHON, .setup/peers, or this one)")
    parser.add_argument("--release", type=Path, default=target / "release", help="folder of mpk-run and mpk-bench")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "results")
    parsed = parser.parse_args()
    parsed.peers = [name for name in parsed.peers.split(";") if name]
    if unknown := set(parsed.peers) - set(PEERS):
        parser.error(f"no peer {', '.join(unknown)}; there are: {'; '.join(PEERS)}")
    if min(parsed.rounds, parsed.cores, parsed.decode, parsed.prefill) < 1:
        parser.error("numbers start at 1")
    for name in ("mpk-run", "mpk-bench"):
        if not (parsed.release / name).exists():
            parser.error(f"no {name} in {parsed.release}: run scripts/bench_cpu.sh, which builds it")
    return parsed


def say(text):
    """A line of progress, on standard error."""
    print(f"bench_cpu: {text}", file=sys.stderr, flush=True)


def correctness(ours, model, config, options):
    """The verdict, and the peak memory of the same runs."""
    verdict, peaks = {"checks": []}, {}

    def add(what, compared, problems):
        verdict["checks"].append({"what": what, "tokens": compared, "problems": problems})

    for ranks in (1, 2):
        say(f"correctness: tiny model, {ranks} ranks")
        add(f"tiny model, N={ranks}, tokens of Hugging Face in float32", *ours.golden(ranks))
    requests = {}
    for ranks in (1, 2):
        say(f"correctness and peak memory: {LARGE} shape, {ranks} ranks")
        requests[ranks], peaks[ranks] = ours.large(
            model, config["vocab_size"], ranks, [SHORT_PROMPT, options.prefill], 24
        )
    add(f"{LARGE} shape, N=1 against N=2", *our_side.agree(requests[1], requests[2]))
    verdict["right"] = all(not check["problems"] and check["tokens"] > 0 for check in verdict["checks"])
    return verdict, peaks


def measurements(ours, model, checked_model, config, options, gguf):
    """Maps names to functions that measure once; the results are numbers or JSON objects."""
    vocabulary = config["vocab_size"]
    steps = {
        "floor": lambda: {"bytes_per_second": ours.memory_rate(options.cores)},
        "ours": lambda: ours.timed("decode", model, vocabulary, SHORT_PROMPT, options.decode + 1),
        "ours, prefill": lambda: ours.timed("prefill", model, vocabulary, options.prefill, 1),
    }
    for name in options.peers:
        peer, huge_pages = PEERS[name]
        parts = ["--threads", options.cores, "--prompt", SHORT_PROMPT, "--decode", options.decode]
        parts += ["--prefill", options.prefill]
        if peer == "llama.cpp":
            parts += ["--gguf", gguf]

        def measure(peer=peer, huge_pages=huge_pages, parts=parts):
            return our_side.peer(options.peer_python, HERE / "bench_peers.py", peer, huge_pages, model, parts)

        steps[name] = measure
    steps["graphs"] = lambda: ours.graphs(GRAPHS)
    steps["check"] = lambda: {"seconds": ours.check(checked_model)}
    steps["tiny"] = lambda: {"seconds": ours.tiny_process(8)}
    return steps


def run_rounds(steps, options, cores):
    """All rounds. A peer that is missing once is not run again."""
    rounds, absent = [], {}
    names = list(steps)
    for index in range(options.rounds):
        shift = index * 3 % len(names)
        order, results = names[shift:] + names[:shift], {}
        clock = machine.Clock(cores)
        for name in order:
            if name in absent:
                continue
            say(f"round {index + 1} of {options.rounds}: {name}")
            results[name] = steps[name]()
            if "absent" in results[name]:
                absent[name] = results.pop(name)["absent"]
                say(f"{name} is absent: {absent[name]}")
        rounds.append({"order": order, "results": results, "cores": clock.shares()})
    return rounds, absent


def main():
    options = arguments()
    cores = machine.choose_cores(options.cores)
    if len(cores) < options.cores:
        sys.exit(f"bench_cpu: only {len(cores)} cores are available, but --cores asks for {options.cores}")
    os.sched_setaffinity(0, cores)
    started = datetime.datetime.now(datetime.timezone.utc)
    result = {
        "schema": "mpk-bench-cpu/1",
        "date": started.isoformat(timespec="seconds"),
        "hardware": machine.describe(cores),
        "versions": machine.versions(REPOSITORY),
        "settings": {name: getattr(options, name) for name in ("rounds", "cores", "decode", "prefill", "peers")},
    }
    load = result["hardware"]["load_average_at_start"][0]
    if load > 0.3:
        say(f"warning: the load average is {load:.2f}; times are meaningful only on an idle machine")
    with tempfile.TemporaryDirectory(prefix="mpk-bench-") as name:
        folder = Path(name)
        ours = our_side.Ours(REPOSITORY, options.release.resolve(), folder, options.cores)
        model, checked_model = ours.shape(LARGE), ours.shape(CHECKED)
        document = json.loads(model.read_text())
        config = document["config"]
        document["max_seq_len"] = max(document["max_seq_len"], options.prefill + options.decode + 1)
        document["runtime"]["prefill_chunk"] = options.prefill
        model.write_text(json.dumps(document))

        verdict, peaks = correctness(ours, model, config, options)
        result |= {"correct": verdict}
        print(report.verdict_text(verdict), flush=True)
        if not verdict["right"]:
            sys.exit(1)
        gguf = folder / "model.gguf"
        if any(PEERS[name][0] == "llama.cpp" for name in options.peers):
            say("writing llama.cpp's file")
            our_side.peer(options.peer_python, HERE / "bench_peers.py", "llama.cpp", False, model,
                          ["--gguf", gguf, "--write-only"])
        os.sync()
        time.sleep(2)
        steps = measurements(ours, model, checked_model, config, options, gguf)
        rounds, absent = run_rounds(steps, options, cores)
    shapes = {
        "bytes_per_token": shape.bytes_per_token(config),
        "memory": {
            ranks: {
                "shard_bytes": shape.shard_bytes(config, ranks),
                "kv_bytes": shape.kv_bytes(config, ranks, document["max_batch"], document["max_seq_len"]),
                "peak_bytes": peaks[ranks],
            }
            for ranks in peaks
        },
    }
    medians = report.medians(rounds, options.prefill)
    result |= {
        "commands": ours.commands,
        "shape": {"name": LARGE, **shapes},
        "peers_absent": absent,
        "medians": medians,
        "table": report.table(medians, shapes),
        "rounds": rounds,
    }
    print(report.table_text(result))
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"cpu-{started.date().isoformat()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".svg").write_text(plot.bars(result))
    print(f"\n{path}\n{path.with_suffix('.svg')}")


try:
    main()
except our_side.Failed as error:
    sys.exit(f"bench_cpu: {error}")
except KeyboardInterrupt:
    sys.exit(130)

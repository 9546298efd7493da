#!/usr/bin/env python3
"""The tensor-parallel benchmark: decode, prefill and the allreduce inside the kernel, compared with PyTorch, vLLM, NCCL
and the memory floor.

    scripts/bench_tp.py --model qwen3-8b --tp 1,2,4 --batch 1,8,32 --context 512,8192 --peers torch,vllm

One run on one machine: GPUs if there are any, otherwise the CPU target (then PyTorch's CPU kernels are the peer). Writes OUTPUT/tp-NAME-DATE.json
with everything measured, .md with the tables, and charts as .svg (and .png if cairosvg, rsvg-convert, ImageMagick or Inkscape is installed).

Figures of ours have passed mpk-bench's checks; a peer whose sum is wrong gets no figure. A row that loses to a peer says so. Exit status: 0 if every case of
ours has a figure, 2 bad usage, 3 something is missing, 4 otherwise.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path.insert(0, str(HERE / "tp"))

import charts  # noqa: E402
import hardware  # noqa: E402
import table as tables  # noqa: E402
from measure import Setting, has, measure  # noqa: E402

KNOWN_PEERS = ["torch", "vllm"]


def numbers(text):
    """`1,2,4`."""
    found = [int(part) for part in text.split(",") if part]
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 1, separated by commas")
    return found


def prompts(text):
    """`1x512,8x512`, or nothing."""
    found = []
    for part in filter(None, text.split(",")):
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", part):
            raise argparse.ArgumentTypeError(f"{part}: expected PROMPTSxTOKENS, such as 1x512")
        found.append(tuple(map(int, part.split("x"))))
    return found


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    parser.add_argument("--model", required=True, help="a Hugging Face folder, a model.json, or a shape of `mpk-bench model`")
    parser.add_argument("--tp", type=numbers, default=[1], help="numbers of ranks, separated by commas (default 1)")
    parser.add_argument("--batch", type=numbers, default=[1, 8], help="batch sizes, separated by commas (default 1,8)")
    parser.add_argument("--context", type=numbers, default=[512], help="context lengths before the first step (default 512)")
    parser.add_argument("--prompts", type=prompts, default=None, help="prefill cases PROMPTSxTOKENS; empty for none (default 1xC for each context C)")
    parser.add_argument("--bytes", type=numbers, default=[8192, 32768, 131072, 524288], help="sizes of the allreduce in bytes (default %(default)s)")
    parser.add_argument("--no-allreduce", action="store_true", help="do not measure the allreduce")
    parser.add_argument("--peers", default="torch,vllm", help=f"of {', '.join(KNOWN_PEERS)}; peers that are not installed are left out (default: all)")
    parser.add_argument("--peer-results", type=Path, help="also use the peers' rows of this report of an earlier run")
    parser.add_argument("--steps", type=int, default=64, help="decode steps per repetition (default 64)")
    parser.add_argument("--repeats", type=int, default=3, help="number of repetitions (default 3)")
    parser.add_argument("--limit", type=float, default=300, help="time limit of one command in seconds (default 300)")
    parser.add_argument("--backend", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--bench", type=Path, default=target / "release" / "mpk-bench", help="mpk-bench (default: %(default)s)")
    parser.add_argument("--python", default=os.environ.get("MPK_PYTHON") or sys.executable, help="Python that has the peers (default: $MPK_PYTHON, or this one)")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or "bench-results"))
    options = parser.parse_args()
    options.peers = [name for name in options.peers.split(",") if name and name != "none"]
    if unknown := set(options.peers) - set(KNOWN_PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(KNOWN_PEERS)}, or none")
    if min(options.steps, options.repeats) < 1 or options.limit <= 0:
        parser.error("--steps, --repeats and --limit start at 1")
    return options


def missing(options):
    """Ends with status 3 if something is missing."""
    if not os.access(options.bench, os.X_OK):
        print(f"bench_tp: {options.bench} does not exist; build it with `cargo build --release -p mpk-launch`, or name it with --bench", file=sys.stderr)
        sys.exit(3)
    if max(options.tp) > 1 and shutil.which("mpirun") is None:
        print("bench_tp: several ranks need mpirun; install Open MPI (`scripts/setup.sh`)", file=sys.stderr)
        sys.exit(3)


def main():
    options = arguments()
    missing(options)
    # NVLink multicast can put a shared machine's GPUs out of service.
    for name, value in (("NVSHMEM_DISABLE_NVLS", "1"), ("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
        os.environ.setdefault(name, value)
    gpus = len(hardware.smi(["name"]))
    backend = options.backend if options.backend != "auto" else "cuda" if gpus else "cpu"
    if backend == "cuda" and max(options.tp) > gpus:
        print(f"bench_tp: {max(options.tp)} ranks, but {gpus} GPUs: leave the larger numbers out of --tp, or run with --backend cpu", file=sys.stderr)
        sys.exit(3)
    earlier = []
    if options.peer_results:
        try:
            earlier = json.loads(options.peer_results.read_text())["measured"]["peers"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"bench_tp: --peer-results {options.peer_results}: {error!r}; expected a report of this program", file=sys.stderr)
            sys.exit(2)
    modules = {"torch": "torch", "vllm": "vllm"}
    present = [name for name in options.peers if has(modules[name], options.python) and (name != "vllm" or backend == "cuda")]
    absent = [name for name in options.peers if name not in present]
    if absent:
        print(f"bench_tp: not measured, because {options.python} lacks them or they do not run on this backend: {', '.join(absent)}", file=sys.stderr)
    options.output.mkdir(parents=True, exist_ok=True)
    cases = [(1, context) for context in options.context] if options.prompts is None else options.prompts
    with tempfile.TemporaryDirectory(prefix="mpk-tp-") as work, hardware.Watch() as watch:
        described = hardware.describe(REPOSITORY)
        setting = Setting(
            model=options.model, ranks=options.tp, batches=options.batch, contexts=options.context, prompts=cases,
            sizes=[] if options.no_allreduce else options.bytes, peers=present, steps=options.steps, repeats=options.repeats,
            bench=options.bench.resolve(), python=options.python, backend=backend, limit=options.limit, work=Path(work))
        found = measure(setting)
    found["peers"] += [{**row, "from": str(options.peer_results)} for row in earlier]
    table = tables.rows(found)
    date = datetime.datetime.now(datetime.timezone.utc)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(options.model).stem if Path(options.model).is_file() else Path(options.model).name)
    base = options.output / f"tp-{name}-{date:%Y-%m-%d}"
    report = {
        "schema": "mpk-bench-tp/1", "date": date.isoformat(timespec="seconds"), "arguments": sys.argv[1:], "backend": backend,
        "hardware": {**described, "during_the_run": watch.summary()}, "read_rate_bytes_per_second": setting.read_rate,
        "absent_peers": absent, "problems": setting.problems, "rows": table, "measured": found, "commands": setting.commands,
    }
    Path(f"{base}.json").write_text(json.dumps(report, indent=1) + "\n")
    text = f"## {options.model}, {backend}, {date:%Y-%m-%d}\n\n{tables.markdown(table)}"
    lost = [problem for problem in setting.problems]
    if lost:
        text += "\nNot measured:\n\n" + "".join(f"- {p['what']}: {p['problem']}\n" for p in lost)
    Path(f"{base}.md").write_text(text)
    converted = True
    for kind, svg in charts.charts(table).items():
        path = Path(f"{base}-{kind}.svg")
        path.write_text(svg)
        converted &= charts.png(path)
    if not converted:
        print("bench_tp: no PNG: install cairosvg, rsvg-convert, ImageMagick or Inkscape", file=sys.stderr)
    print(text)
    print(f"bench_tp: {base}.json", file=sys.stderr)
    wanted = len(options.tp) * (len(options.batch) * len(options.context) + len(cases)) + len(setting.sizes) * sum(n > 1 for n in options.tp)
    sys.exit(0 if len(table) == wanted else 4)


if __name__ == "__main__":
    main()

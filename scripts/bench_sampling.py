#!/usr/bin/env python3
"""Measures what sampling adds to a decode step: the same requests greedy and with each setting, in turns.

    scripts/bench_sampling.py                                              # the head of Qwen3-8B on one GPU, batches of 1 and 8
    scripts/bench_sampling.py --build before=DIR --build after=target/release --batch 8

The model has random weights and few layers, so that a step is short and its head is that of the real model. Random weights give flat
logits: with T 0.8, top-p keeps most of the vocabulary. T 0.02 makes them as steep as those of a trained model.

The verdict: each setting has the same tokens in all rounds and builds, and T 0.000001 with top-p has the greedy ones, although other
tasks find them. Exit status: 0, 1 if a run failed or was judged wrong, 2 for wrong arguments.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "tp"))
from running import run  # noqa: E402

GREEDY, COLDEST = "greedy", "T 0.000001, top-p 0.95"
SETTINGS = {
    GREEDY: ["--greedy"],
    "T 0.8, top-p 0.95": ["--temperature", "0.8", "--top-p", "0.95"],
    "T 0.02, top-p 0.95": ["--temperature", "0.02", "--top-p", "0.95"],
    "T 0.8": ["--temperature", "0.8"],
    "T 0.8, top-k 20": ["--temperature", "0.8", "--top-k", "20"],
    "T 0.6, top-k 20, top-p 0.95": ["--temperature", "0.6", "--top-k", "20", "--top-p", "0.95"],
    COLDEST: ["--temperature", "0.000001", "--top-p", "0.95"],
}
PROMPT = 8


def refuse(problem):
    """Ends the program because of wrong arguments."""
    print(f"bench_sampling: {problem}", file=sys.stderr)
    sys.exit(2)


def read_builds(texts):
    """{name: folder} from NAME=DIR."""
    builds = {}
    for text in texts or [f"mpk={HERE.parent / 'target/release'}"]:
        name, equals, folder = text.partition("=")
        path = Path(folder).resolve()
        if not equals or not name or name in builds or not (path / "mpk-run").is_file():
            refuse(f"--build {text}: expected NAME=DIR, with a new name and a folder that contains mpk-run")
        builds[name] = path
    return builds


def write_model(arguments, builds, batch, work):
    """A model.json with `batch` requests, of a shape with few layers or of the given file; its path."""
    given = Path(arguments.model)
    if given.is_file():
        model = json.loads(given.read_text())
        checkpoint = given.parent / str(model.get("checkpoint"))
        if checkpoint.exists():  # otherwise it is a hub's name
            model["checkpoint"] = str(checkpoint.resolve())
    else:
        done = run([next(iter(builds.values())) / "mpk-bench", "model", arguments.model], 60)
        if done.status != 0:
            refuse(f"--model {arguments.model}: {done.problem()}")
        model = json.loads(done.stdout)
        model["config"]["num_hidden_layers"] = arguments.layers
    prompts = [[(11 * request + i) % 256 for i in range(PROMPT)] for request in range(1, batch + 1)]
    model |= {"max_batch": batch, "max_seq_len": PROMPT + arguments.steps,
              "generate": {"prompt_tokens": prompts, "max_new_tokens": arguments.steps, "ignore_eos": True}}
    path = work / f"batch-{batch}.json"
    path.write_text(json.dumps(model))
    return path


def compile_ahead(arguments, builds, models):
    """Compiles all kernels side by side. Says what failed; the runs will fail, too."""
    def compiled(build, model, setting):
        command = [builds[build] / "mpk-run", model, *SETTINGS[setting], "--compile-only", "--ranks", arguments.ranks, *arguments.options]
        return build, run(command, arguments.limit)

    work = [(build, model, setting) for model in models for build in builds for setting in (GREEDY, COLDEST)]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for build, done in pool.map(lambda job: compiled(*job), work):
            if done.status != 0:
                print(f"bench_sampling: {build}: {done.problem()}", file=sys.stderr)


def measure(arguments, folder, model, setting):
    """One run: microseconds a step and tokens, or the problem."""
    launcher = ["mpirun", "-n", arguments.ranks] if arguments.ranks > 1 else []
    done = run([*launcher, folder / "mpk-run", model, *SETTINGS[setting], *([] if setting == GREEDY else ["--seed", 1]), "--json",
                "--backend", arguments.backend, *arguments.options], arguments.limit)
    found = done.objects()
    if done.status != 0 or len(found) != 1:
        return None, None, done.problem()
    return 1000 * found[0]["timing"]["ms_per_token"], [answer["tokens"] for answer in found[0]["requests"]], None


def measure_batch(arguments, builds, batch, model):
    """All settings and builds in turns: ({setting: {build: [us]}}, problems)."""
    times, tokens, problems = {setting: {} for setting in SETTINGS}, {}, []
    for _ in range(arguments.rounds):
        for setting in SETTINGS:
            for build, folder in builds.items():
                us, found, problem = measure(arguments, folder, model, setting)
                if problem is not None:
                    problems.append(f"batch {batch}, {setting}, {build}: {problem}")
                    continue
                times[setting].setdefault(build, []).append(us)
                if tokens.setdefault(setting, found) != found:
                    problems.append(f"batch {batch}, {setting}, {build}: other tokens than the first run")
    if tokens.get(COLDEST) != tokens.get(GREEDY):
        problems.append(f"batch {batch}: {COLDEST} does not have the greedy tokens")
    return times, problems


def print_table(builds, batch, times):
    """Medians, and what each setting adds to the greedy step of the same build."""
    print(f"batch {batch}, us a step")
    for setting, of_builds in times.items():
        parts = []
        for build in builds:
            if not of_builds.get(build):
                parts.append(f"{build} -")
                continue
            us, greedy = statistics.median(of_builds[build]), times[GREEDY].get(build)
            added = f" ({us - statistics.median(greedy):+.1f})" if greedy and setting != GREEDY else ""
            parts.append(f"{build} {us:.1f}{added}")
        print(f"  {setting:28s} {'; '.join(parts)}", flush=True)


def main():
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", default=[], metavar="NAME=DIR", help="default: target/release")
    parser.add_argument("--model", default="qwen3-8b", metavar="SHAPE", help="a shape of mpk-bench model, or a model.json")
    parser.add_argument("--layers", type=int, default=2, help="of a shape")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="time limit of one run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("options", nargs="*", help="further options of mpk-run, after --")
    arguments = parser.parse_args()
    if min(arguments.layers, arguments.steps, arguments.rounds, arguments.ranks, *arguments.batch) < 1:
        refuse("--layers, --batch, --steps, --rounds and --ranks must be at least 1")
    builds, work, rows, problems = read_builds(arguments.build), Path(tempfile.mkdtemp(prefix="mpk-sampling.")), [], []
    try:
        models = {batch: write_model(arguments, builds, batch, work) for batch in arguments.batch}
        if arguments.backend == "cuda":
            compile_ahead(arguments, builds, models.values())
        for batch, model in models.items():
            times, found = measure_batch(arguments, builds, batch, model)
            print_table(builds, batch, times)
            problems += found
            rows += [{"batch": batch, "setting": setting, "us": of_builds} for setting, of_builds in times.items()]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for problem in problems:
        print(f"  {problem}", flush=True)
    if arguments.json:
        report = {"schema": "mpk-sampling-cost/1", "backend": arguments.backend, "model": arguments.model, "layers": arguments.layers,
                  "ranks": arguments.ranks, "steps": arguments.steps, "rows": rows, "problems": problems}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print("wrong" if problems else "right: the same tokens in all rounds and builds, and the greedy ones at T 0.000001")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

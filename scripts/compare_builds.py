#!/usr/bin/env python3
"""Compares builds of mpk on one machine: the same decode steps and prompts, in turns, with the verdict of each run.

    scripts/compare_builds.py --build before=DIR --build after=target/release --decode qwen3-8b:2:1 --prefill qwen3-8b:1:480

    scripts/compare_builds.py --build main=target/release --build functions=target/release,code.functions=1 --decode qwen3-8b:1:8

A build is a folder with mpk-bench and mpk-run, and tuning values that it runs with. A case is MODEL:RANKS:BATCH for --decode, and MODEL:RANKS:TOKENS for --prefill;
MODEL is the name of a shape (mpk-bench model) or a path. On GPUs, the kernels of all builds and cases are compiled first, side by side.
Prints one line per case, with the ratio of each build to the first one, and says if a build gives other tokens (a change that sums in
another order may). Exit status: 0, 1 if a run failed or was judged wrong, 2 for wrong arguments, 3 if there are fewer GPUs than ranks.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tp"))
import hardware  # noqa: E402
from running import run  # noqa: E402

CONTEXT = 512


@dataclass
class Build:
    """A folder with programs, and the tuning values with which they run."""

    folder: Path
    tuned: list

    def options(self):
        """Options of mpk-bench and mpk-run."""
        return [part for value in self.tuned for part in ("--tune", value)]


@dataclass
class Case:
    """A model on a number of ranks, with a batch (decode) or a prompt (prefill) of this size."""

    what: str
    model: str
    ranks: int
    size: int
    file: Path | None = None
    samples: dict = field(default_factory=dict)
    tokens: dict = field(default_factory=dict)
    floor: float | None = None
    problems: list = field(default_factory=list)

    def __str__(self):
        unit = "batch" if self.what == "decode" else "prompt"
        return f"{self.what} {self.model}, {self.ranks} rank{'s' * (self.ranks > 1)}, {unit} {self.size}"

    def sizes(self, arguments):
        """The sizes with which mpk-bench builds the graphs of this case."""
        if self.what == "decode":
            return ["--max-batch", self.size, "--max-seq-len", arguments.context + arguments.steps + 1]
        return ["--max-batch", 1, "--max-seq-len", self.size + 2]

    def options(self, arguments):
        """mpk-bench's arguments."""
        if self.what == "decode":
            return ["decode", "--batch", self.size, "--context", arguments.context, "--steps", arguments.steps]
        return ["prefill", "--prompt", self.size]


def refuse(problem, status=2):
    """Ends the program because of wrong arguments, or because something is missing."""
    print(f"compare_builds: {problem}", file=sys.stderr)
    sys.exit(status)


def read_case(what, text):
    """A case from MODEL:RANKS:SIZE."""
    parts = text.rsplit(":", 2)
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts[1:]):
        refuse(f"--{what} {text}: expected MODEL:RANKS:{'BATCH' if what == 'decode' else 'TOKENS'}")
    return Case(what, parts[0], int(parts[1]), int(parts[2]))


def read_builds(texts):
    """{name: Build} from NAME=DIR or NAME=DIR,KNOB=VALUE,..."""
    builds = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        folder, *tuned = rest.split(",")
        path = Path(folder).resolve()
        if not equals or not name or name in builds or not (path / "mpk-bench").is_file():
            refuse(f"--build {text}: expected NAME=DIR, with a new name and a folder that contains mpk-bench")
        if wrong := [value for value in tuned if "=" not in value]:
            refuse(f"--build {text}: expected KNOB=VALUE after the folder, not '{wrong[0]}'")
        builds[name] = Build(path, tuned)
    if len(builds) < 2:
        refuse("give --build at least twice")
    return builds


def model_file(case, builds, work):
    """The path of the case's model; a shape is written to a file by the first build."""
    if Path(case.model).exists():
        return Path(case.model).resolve()
    path = work / f"{case.model}.json"
    if not path.exists():
        done = run([next(iter(builds.values())).folder / "mpk-bench", "model", case.model], 60)
        if done.status != 0:
            refuse(f"{case.model}: {done.problem()}")
        path.write_text(done.stdout)
    return path


def compile_ahead(arguments, builds, cases):
    """Compiles the kernels of all builds and cases. Says what failed; the case itself will fail, too."""
    def compiled(build, case):
        command = [builds[build].folder / "mpk-run", case.file, "--compile-only", "--ranks", case.ranks, "--greedy", "--tuning", "off",
                   *case.sizes(arguments), *builds[build].options(), *arguments.options]
        return build, case, run(command, arguments.compile_limit)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for build, case, done in pool.map(lambda pair: compiled(*pair), [(b, c) for c in cases for b in builds]):
            if done.status != 0:
                print(f"compare_builds: {build}: kernels of {case}: {done.problem()}", file=sys.stderr)


def measure(arguments, name, build, case):
    """One run of one build. Keeps its samples, and its tokens if they are the first."""
    launcher = ["mpirun", "-n", case.ranks] if case.ranks > 1 else []
    command = [*launcher, build.folder / "mpk-bench", *case.options(arguments), "--model", case.file, "--backend", arguments.backend,
               "--tuning", "off", "--repeats", arguments.repeats, *build.options(), *arguments.options]
    done = run(command, arguments.limit)
    found = done.objects()
    if done.status != 0 or len(found) != 1:
        case.problems.append(f"{name}: {done.problem()}")
        return
    result = found[0]
    verdict = result["verdict"]
    if verdict["right"] is not True:
        case.problems.append(f"{name}: wrong: {json.dumps(verdict)}")
    case.samples.setdefault(name, []).append(result["ms"]["median"])
    case.floor = (result.get("floor") or {}).get("ms", case.floor)
    if case.tokens.setdefault(name, verdict["tokens_hash"]) != verdict["tokens_hash"]:
        case.problems.append(f"{name}: its runs differ in their tokens")


def line(case, builds):
    """The case in one line: medians of the rounds, and ratios to the first build."""
    first = next(iter(builds))
    parts = []
    for build in builds:
        rounds = case.samples.get(build)
        if not rounds:
            parts.append(f"{build} -")
            continue
        text = f"{build} {', '.join(f'{ms:.3f}' for ms in rounds)} ms"
        if build != first and case.samples.get(first):
            ratio = statistics.median(rounds) / statistics.median(case.samples[first])
            text += f" ({100 * (ratio - 1):+.1f} %)"
            if case.tokens.get(build) != case.tokens.get(first):
                text += ", other tokens"
        parts.append(text)
    return f"{case}: " + "; ".join(parts)


def main():
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", default=[], metavar="NAME=DIR[,KNOB=VALUE...]")
    parser.add_argument("--decode", action="append", default=[], metavar="MODEL:RANKS:BATCH")
    parser.add_argument("--prefill", action="append", default=[], metavar="MODEL:RANKS:TOKENS")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before the first step that counts")
    parser.add_argument("--steps", type=int, default=128, help="decode steps per repetition")
    parser.add_argument("--rounds", type=int, default=2, help="how often the builds take turns")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions in each run")
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="time limit of one run")
    parser.add_argument("--compile-limit", type=float, default=900, metavar="SECONDS", help="time limit of one compilation")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("options", nargs="*", help="further options of mpk-bench and mpk-run, after --")
    arguments = parser.parse_args()
    builds = read_builds(arguments.build)
    cases = [read_case("decode", text) for text in arguments.decode] + [read_case("prefill", text) for text in arguments.prefill]
    if not cases:
        refuse("give --decode or --prefill")
    gpus, most = len(hardware.smi(["name"])), max(case.ranks for case in cases)
    if arguments.backend == "cuda" and most > gpus:
        refuse(f"{most} ranks, but {gpus} GPUs: leave these cases out, or run with --backend cpu", 3)
    began, work = time.monotonic(), Path(tempfile.mkdtemp(prefix="mpk-builds."))
    try:
        for case in cases:
            case.file = model_file(case, builds, work)
        if arguments.backend == "cuda":
            compile_ahead(arguments, builds, cases)
        for case in cases:
            # ABBA: what drifts does not favour a build.
            for turn in range(arguments.rounds):
                for name, build in list(builds.items())[:: 1 if turn % 2 == 0 else -1]:
                    if time.monotonic() - began > arguments.seconds:
                        case.problems.append(f"{name}: no time left")
                        continue
                    measure(arguments, name, build, case)
            print(line(case, builds), flush=True)
            for problem in case.problems:
                print(f"  {problem}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if arguments.json:
            rows = [{"case": str(case), "ms": case.samples, "floor_ms": case.floor, "problems": case.problems} for case in cases]
            report = {"schema": "mpk-builds/1", "backend": arguments.backend, "builds": list(builds),
                      "tuned": {name: build.tuned for name, build in builds.items()}, "cases": rows}
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if any(case.problems for case in cases) else 0)


if __name__ == "__main__":
    main()

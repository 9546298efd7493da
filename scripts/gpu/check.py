#!/usr/bin/env python3
"""Checks everything that must be right on GPUs, and measures. Started by scripts/gpu_check.sh."""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

try:
    import numpy  # noqa: F401 (the parts need it)
except ImportError as error:
    sys.exit(f"gpu_check: {error}; name a python3 with numpy, torch, transformers and safetensors in MPK_PYTHON")

import abort
import bits
import compile as compiling
import decode
import doctor
import environment
import golden
import litmus
import operators
import prefill
import sampled
import sanitizer
import serve
import shared_gpus
import skeleton
import stall
import start
from common import PATIENCE, REPOSITORY, Check, OutOfTime, find_nvcc, say

# In the order in which they run unless --only names another; seconds that a part may take on 1 GPU, and on more. What a part
# launches is compiled before its time begins.
PARTS = {
    "doctor": (doctor, 90, 120),
    "litmus": (litmus, 60, 60),
    "operators": (operators, 60, 100),
    "golden": (golden, 150, 240),
    "bits": (bits, 90, 240),
    "sampled": (sampled, 60, 120),
    "serve": (serve, 90, 240),
    "stall": (stall, 5, 300),
    "abort": (abort, 60, 90),
    "shared": (shared_gpus, 360, 240),
    "sanitizer": (sanitizer, 240, 240),
    "start": (start, 100, 120),
    "skeleton": (skeleton, 40, 150),
    "decode": (decode, 300, 300),
    "prefill": (prefill, 300, 300),
}
COMPILE_LIMIT = 560  # seconds for all compilers together


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {number}")
    return number


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--gpus", type=positive, help="number of GPUs to use (default: all)")
    parser.add_argument("--only", default="", help="parts, separated by commas, in the order in which they are to run, "
                        "of: compile, " + ", ".join(PARTS) + " (default: all but compile; compile with others compiles for those alone)")
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    parser.add_argument("--binary", type=Path, default=target / "release" / "mpk-run", help="mpk-run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-results"),
                        help="folder of the report (default: $OUT or gpu-results)")
    parser.add_argument("--cache", type=Path, help="folder of the cubin cache (default: $MPK_CACHE_DIR, or mpk-run's default)")
    parser.add_argument("--seed", type=int, help="seed of the inputs (default: random)")
    parser.add_argument("--thorough", action="store_true", help="test every combination of placement, lowering and transport")
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_part(check, name, work, seconds):
    """Runs a part within its time limit; an exception in it becomes a verdict like any other."""
    seconds *= PATIENCE
    check.part, check.part_end = name, time.monotonic() + seconds
    started = time.monotonic()
    try:
        work()
    except OutOfTime:
        check.failed(name, f"not finished after {seconds} s")
    except Exception as error:  # noqa: BLE001: a failing part must not end the others
        traceback.print_exc()
        check.failed(name, f"{type(error).__name__}: {error}")
    taken = time.monotonic() - started
    check.figures.setdefault("part_seconds", {})[name] = round(taken, 1)
    say(f"{name}: {taken:.1f} s")


def main():
    options = arguments()
    chosen = [name for name in options.only.split(",") if name] or list(PARTS)
    unknown = [name for name in chosen if name != "compile" and name not in PARTS]
    if unknown:
        sys.exit(f"gpu_check: unknown part {unknown[0]}; the parts are compile, {', '.join(PARTS)}")
    cuda = options.backend == "cuda"
    gpus = options.gpus or max(1, environment.gpu_count() if cuda else 1)
    if options.cache:
        os.environ["MPK_CACHE_DIR"] = str(options.cache.resolve())
    binary = options.binary.resolve()
    if not os.access(binary, os.X_OK):
        sys.exit(f"gpu_check: {binary} does not exist; build it with `cargo build --release`, or give its path with --binary")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        sys.exit(f"gpu_check: cannot write the report: {error}; choose another folder with --out")
    started = time.monotonic()
    described = environment.describe(binary)
    work = options.work or Path(tempfile.mkdtemp(prefix="mpk-gpu-check-"))
    work.mkdir(parents=True, exist_ok=True)
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    check = Check(options.backend, gpus, binary, options.out.resolve(), work.resolve(), seed, options.thorough, cuda)
    say(f"{gpus} GPUs, seed {seed}, parts: {', '.join(chosen)}")
    report = check.out

    def ended(*_):
        """Ends at once with the results so far: no thread may continue or wait for a running command."""
        check.part_end = 0.0
        check.end_all()
        sys.exit("gpu_check: stopped by a signal")

    signal.signal(signal.SIGTERM, ended)
    try:
        others = [name for name in PARTS if name in chosen] or list(PARTS)
        if "compile" in chosen or (cuda and find_nvcc()):
            # What the cache already holds takes a fraction of a second.
            run_part(check, "compile", lambda: compiling.run(
                check, [job for name in others for job in PARTS[name][0].jobs(check)]), COMPILE_LIMIT)
        if chosen != ["compile"] and (options.only == "" or "compile" not in chosen):
            if cuda and "start" in chosen and len(chosen) > 1:
                start.begin_cold(check)
            for name in chosen:
                part, one, several = PARTS[name]
                limit = one if cuda and gpus == 1 else several if cuda else 4 * several
                run_part(check, name, lambda part=part: part.run(check), limit)
                report = check.write(described, sys.argv[1:], time.monotonic() - started)
    finally:
        check.end_all()
        if not options.work:
            shutil.rmtree(work, ignore_errors=True)
        report = check.write(described, sys.argv[1:], time.monotonic() - started)
    failed = [v["name"] for v in check.verdicts if v["verdict"] == "FAILED"]
    passed = sum(v["verdict"] == "ok" for v in check.verdicts)
    skipped = sum(v["verdict"] == "skipped" for v in check.verdicts)
    say(f"{passed} ok, {len(failed)} failed, {skipped} skipped, {time.monotonic() - started:.0f} s; {report}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Memory orders as the protocol uses them, between blocks and between GPUs (litmus.cu)."""

import json
import os
import shutil
from pathlib import Path

from common import REPOSITORY


def jobs(_check):
    """No launches of mpk-run."""
    return []


def run(check):
    """Builds and runs the program; the control, without acquire and release, tells whether it would notice."""
    if not check.cuda:
        check.skipped("litmus", "needs a GPU")
        return
    nvcc = shutil.which("nvcc") or (Path(os.environ["CUDA_HOME"]) / "bin/nvcc" if "CUDA_HOME" in os.environ else None)
    if nvcc is None:
        check.skipped("litmus", "needs nvcc")
        return
    program, kernels = check.work / "litmus", REPOSITORY / "kernels-cu"
    built = check.command([nvcc, "-O3", "-std=c++17", "-arch=native", f"-I{kernels / 'include'}", f"-I{kernels / 'protocol'}",
                           REPOSITORY / "scripts/gpu/litmus.cu", "-o", program], 60)
    done = check.command([program], 60) if built.status == 0 else built
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    check.figures["litmus"] = rows
    if done.status != 0 or not rows:
        check.failed("litmus", done.problem())
    for row in rows:
        text = f"{row['rounds']} rounds of {row['pairs']} pairs of blocks, {row['wrong']} words wrong"
        if row["test"].startswith("control"):
            check.ok(f"litmus {row['test']}", f"{text} ({'noticed' if row['wrong'] else 'not noticed: told only'})")
        else:
            check.judge(not row["wrong"] and not row["late"], f"litmus {row['test']}", text + (", late" if row["late"] else ""))
    if check.gpus < 2:
        check.skipped("litmus to a peer", "needs 2 GPUs")

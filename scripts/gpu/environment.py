"""The environment of the check: hardware, driver, versions."""

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from common import REPOSITORY

PACKAGES = ["torch", "transformers", "numpy", "safetensors", "triton", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"]


def output_of(command, lines=1, timeout=20):
    """First lines that a command prints, or None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = [line.strip() for line in done.stdout.strip().splitlines() if line.strip()]
    return "\n".join(text[:lines]) if done.returncode == 0 and text else None


def gpu_count():
    """GPUs that the driver lists."""
    listed = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], 64)
    return len(listed.splitlines()) if listed else 0


def device_row():
    """Name of the first GPU's row in the hardware table, for `mpk-run --device`."""
    name = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or ""
    return next((row for row in ("a100", "h100", "h200", "b200") if row in name.lower()), "h200")


def version(package):
    """Version of an installed Python package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe(binary):
    """Hardware, driver, versions, as fields of the report."""
    cpu = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    gpus = output_of(["nvidia-smi", "--query-gpu=name,memory.total,clocks.max.sm,power.limit,driver_version",
                      "--format=csv,noheader"], 64)
    digest = hashlib.sha256(Path(binary).read_bytes()).hexdigest() if Path(binary).exists() else None
    nvcc = output_of(["nvcc", "--version"], 8)
    return {
        "hardware": {
            "gpus": gpus.splitlines() if gpus else [],
            "links": output_of(["nvidia-smi", "topo", "-m"], 12) if gpus else None,
            "cpu": cpu,
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
        },
        "driver": gpus.splitlines()[0].split(", ")[-1] if gpus else None,
        "versions": {
            "mpk_run_sha256": digest,
            "commit": os.environ.get("MPK_COMMIT") or output_of(["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]),
            "nvcc": next((line for line in (nvcc or "").splitlines() if "release" in line), None),
            "mpirun": output_of(["mpirun", "--version"]),
            "python": sys.version.split()[0],
            **{package: version(package) for package in PACKAGES},
        },
    }

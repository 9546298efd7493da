"""The machine of the benchmark, and the state of its GPUs meanwhile: clocks, power, temperature."""

import os
import platform
import subprocess
import threading
from pathlib import Path

STATE = ["clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"]
FACTS = ["name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit", "persistence_mode"]


def smi(fields):
    """One row of values per GPU; none without a driver."""
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return [[value.strip() for value in row.split(",")] for row in rows if row.strip()]


def first_line(command):
    """The first line that a command prints, or None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def describe(repository):
    """Machine and versions, for the report."""
    info = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        info.setdefault(key.strip(), value.strip())
    return {
        "gpus": [dict(zip(FACTS, row)) for row in smi(FACTS)],
        "cpu": info.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_at_start": os.getloadavg(),
        "kernel": platform.release(),
        "commit": os.environ.get("MPK_COMMIT") or first_line(["git", "-C", str(repository), "rev-parse", "HEAD"]),
        "mpirun": first_line(["mpirun", "--version"]),
        "python": platform.python_version(),
    }


class Watch:
    """Samples the GPUs now and then until the block ends. Does nothing on a machine without GPUs."""

    def __init__(self, every=2.0):
        self.samples, self.over, self.every = [], threading.Event(), every
        self.thread = threading.Thread(target=self.look, daemon=True)

    def look(self):
        while not self.over.is_set():
            rows = smi(STATE)
            if not rows:
                return
            self.samples.append(rows)
            self.over.wait(self.every)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(timeout=25)

    def summary(self):
        """Minimum and maximum of each value over all GPUs and the whole run."""
        found = {}
        for index, name in enumerate(STATE):
            values = []
            for rows in self.samples:
                for row in rows:
                    try:
                        values.append(float(row[index]))
                    except (ValueError, IndexError):
                        pass
            if values:
                found[name] = {"least": min(values), "most": max(values)}
        return found

"""The machine of the benchmark, and the share of its cores that others used meanwhile."""

import os
import platform
import subprocess
from pathlib import Path

FLAGS = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_tile"]


def output_of(command):
    """The first line that a command prints, or None if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None


def choose_cores(count):
    """`count` of the allowed cores, on different physical cores if there are enough."""
    allowed = sorted(os.sched_getaffinity(0))
    first, siblings, seen = [], [], set()
    for core in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        key = path.read_text() if path.exists() else str(core)
        (siblings if key in seen else first).append(core)
        seen.add(key)
    return sorted((first + siblings)[:count])


def describe(cores):
    """Hardware, kernel and load, as a JSON object."""
    info = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        info.setdefault(key.strip(), value.strip())
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    flags = set(info.get("flags", "").split())
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind}"] = size
    return {
        "cpu": info.get("model name", platform.machine()),
        "vendor": info.get("vendor_id"),
        "family_model": [info.get("cpu family"), info.get("model")],
        "flags": [flag for flag in FLAGS if flag in flags],
        "caches": caches,
        "cores_of_the_machine": os.cpu_count(),
        "cores_used": cores,
        "memory_bytes": int(memory["MemTotal"].split()[0]) * 1024,
        "transparent_huge_pages": pages.read_text().strip() if pages.exists() else None,
        "hypervisor": "hypervisor" in flags,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "load_average_at_start": os.getloadavg(),
    }


def versions(repository):
    """Versions of our side."""
    git = ["git", "-C", str(repository)]
    return {
        "commit": output_of([*git, "rev-parse", "HEAD"]),
        "uncommitted_changes": output_of([*git, "status", "--porcelain"]) is not None,
        "rustc": output_of(["rustc", "--version"]),
        "mpi": output_of(["mpirun", "--version"]),
        "python": platform.python_version(),
    }


def own_seconds():
    """Processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Clock:
    """Measures who has used the cores since this object was created: this benchmark, other processes, or the
    hypervisor."""

    def __init__(self, cores):
        self.cores = cores
        self.start = self.read()

    def read(self):
        """Seconds that the cores were busy, stolen, and available; and our own seconds."""
        ticks = os.sysconf("SC_CLK_TCK")
        busy = stolen = total = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in self.cores:
                fields = [int(field) / ticks for field in fields[:8]]
                total += sum(fields)
                stolen += fields[7]
                busy += sum(fields) - fields[3] - fields[4] - fields[7]
        return busy, stolen, total, own_seconds()

    def shares(self):
        """Shares of the cores' time: this benchmark's, other processes', and the hypervisor's."""
        busy, stolen, total, own = (now - then for now, then in zip(self.read(), self.start))
        total = max(total, 1e-3)
        return {
            "own": round(own / total, 3),
            "others": round(max(busy - own, 0) / total, 3),
            "stolen": round(stolen / total, 3),
        }

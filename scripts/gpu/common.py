"""Shared by all parts: commands with time limits, mpk-run jobs, verdicts and figures."""

import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# All time limits are for a GPU. Under the emulator (scripts/emulate.sh) they are multiplied by this.
PATIENCE = float(os.environ.get("MPK_CHECK_PATIENCE", "1"))
PLACEMENTS = ["static", "dynamic"]
LOWERINGS = ["copy-reduce", "one-shot", "two-shot"]
TRANSPORTS = ["p2p", "nvshmem"]
KEPT_COMMANDS = 400  # in the report


class OutOfTime(Exception):
    """The part has used up its time."""


@dataclass
class Done:
    """A command that has ended."""

    command: str
    status: int  # negative: the signal that ended it
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False

    def problem(self):
        """What went wrong, in one line with the end of the command's messages."""
        how = f"not finished after {self.seconds:.0f} s" if self.timed_out else f"exit status {self.status}"
        lines = [line for line in self.stderr.strip().splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        return f"{how}: {' / '.join(errors[:3])[:600]}   [{self.command[:400]}]"


def find_nvcc():
    """The CUDA compiler, or None."""
    nvcc = shutil.which("nvcc")
    if nvcc is None and "CUDA_HOME" in os.environ:
        nvcc = Path(os.environ["CUDA_HOME"]) / "bin/nvcc"
    return nvcc


def session_processes(session):
    """Ids of the processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def end_session(process):
    """Ends a command that was started in its own session, and all its children."""
    for number, wait in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 2.0)):
        members = session_processes(process.pid)
        for member in [process.pid] if number == signal.SIGTERM else members:
            try:
                os.kill(member, number)
            except OSError:
                pass
        until = time.monotonic() + wait
        while time.monotonic() < until and (process.poll() is None or session_processes(process.pid)):
            time.sleep(0.05)


def communicate(process, shown, timeout, started):
    """Waits for a started command; ends it after `timeout` seconds."""
    timed_out = False
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        end_session(process)
        try:
            stdout, stderr = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            stdout = stderr = ""
    return Done(shown, process.returncode if process.returncode is not None else -9, stdout, stderr,
                time.monotonic() - started, timed_out)


@dataclass(frozen=True)
class Job:
    """One launch of mpk-run."""

    model: Path
    ranks: int = 1
    placement: str | None = None
    allreduce: str | None = None
    transport: str | None = None
    logprobs: int = 0
    workers: int | None = None
    options: tuple = ()
    environment: tuple = ()  # of (name, value)
    prefix_cache: str | None = "off"  # so that repeated prompts are computed again; an op graph has none: None
    deadline: float = 10.0
    alone: bool = False  # no other job runs meanwhile

    def what(self):
        """Short name for messages."""
        parts = [f"N={self.ranks}", self.placement, self.allreduce, self.transport]
        return " ".join(str(part) for part in parts if part)

    def shape_options(self):
        """The options that determine which code is compiled."""
        options = []
        for name in ("placement", "allreduce", "workers"):
            if getattr(self, name) is not None:
                options += [f"--{name}", str(getattr(self, name))]
        if self.transport is not None and self.ranks > 1:
            options += ["--transport", self.transport]
        return options + (["--logprobs", str(self.logprobs)] if self.logprobs else [])

    def with_options(self, *options):
        """The same job with more options."""
        return replace(self, options=self.options + tuple(str(option) for option in options))


def covering(ranks, start=0):
    """Jobs' placements, lowerings and transports for `ranks` ranks so that each value occurs, as keyword arguments."""
    if ranks == 1:
        return [{"placement": placement} for placement in PLACEMENTS]
    # Each transport meets both placements and each lowering over the calls with different `start`.
    table = [("static", "one-shot", "p2p"), ("dynamic", "copy-reduce", "nvshmem"), ("static", "two-shot", "nvshmem"),
             ("dynamic", "one-shot", "nvshmem"), ("static", "copy-reduce", "p2p"), ("dynamic", "two-shot", "p2p")]
    rows = table[:3] if start % 2 == 0 else table[3:]
    return [dict(zip(("placement", "allreduce", "transport"), row)) for row in rows]


def every_choice(ranks):
    """All combinations."""
    if ranks == 1:
        return covering(1)
    return [{"placement": p, "allreduce": a, "transport": t} for p in PLACEMENTS for a in LOWERINGS for t in TRANSPORTS]


@dataclass
class Check:
    """One run of the whole check."""

    backend: str
    gpus: int
    binary: Path
    out: Path
    work: Path
    seed: int
    thorough: bool = False
    cuda: bool = True
    verdicts: list = field(default_factory=list)
    figures: dict = field(default_factory=dict)
    commands: list = field(default_factory=list)
    part: str = ""
    part_end: float = 0.0
    background: dict = field(default_factory=dict)  # results that later parts use
    running: set = field(default_factory=set)

    def __post_init__(self):
        self.lock = threading.Lock()
        self.free = threading.Condition()
        self.free_gpus = list(range(self.gpus))

    # Verdicts

    def verdict(self, kind, name, detail):
        """Prints and keeps a verdict line: kind, name (one word) and detail."""
        name, detail = name.replace(" ", "."), " ".join(str(detail).split())
        with self.lock:
            print(f"{kind} {name} {detail}".rstrip(), flush=True)
            self.verdicts.append({"verdict": kind, "name": name, "detail": detail, "part": self.part})

    def ok(self, name, detail=""):
        """The check passed."""
        self.verdict("ok", name, detail)

    def failed(self, name, detail=""):
        """The check failed."""
        self.verdict("FAILED", name, detail)

    def skipped(self, name, why):
        """The check cannot run here."""
        self.verdict("skipped", name, why)

    def judge(self, right, name, detail=""):
        """`ok` or `FAILED`."""
        (self.ok if right else self.failed)(name, detail)
        return right

    # Commands

    def time_left(self, wanted):
        """`wanted` seconds, or what is left of the part's time if that is less."""
        left = self.part_end - time.monotonic()
        if left < 1:
            raise OutOfTime
        return min(wanted * PATIENCE, left)

    def note(self, parts):
        """Keeps a command for the report and returns it as text."""
        shown = [text if len(text) < 300 else f"{text[:40]}...<{len(text)} characters>" for text in map(str, parts)]
        text = " ".join(map(shlex.quote, shown)).replace(str(self.work), "$WORK").replace(f"{REPOSITORY}/", "")
        with self.lock:
            if len(self.commands) < KEPT_COMMANDS:
                self.commands.append(text)
        return text

    def start(self, parts, environment=None, cwd=None):
        """Starts a command in its own session; returns the process, the command as text and the start time."""
        parts = [str(part) for part in parts]
        shown = self.note(parts)
        process = subprocess.Popen(parts, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, errors="replace", cwd=cwd, start_new_session=True,
                                   env={**os.environ, **(environment or {})})
        self.running.add(process)
        return process, shown, time.monotonic()

    def finish(self, started, timeout):
        """Waits for a command that `start` returned; ends it after `timeout` seconds."""
        process, shown, begin = started
        try:
            return communicate(process, shown, timeout, begin)
        finally:
            self.running.discard(process)

    def end_all(self):
        """Ends every command that is still running."""
        for process in list(self.running):
            end_session(process)

    def command(self, parts, timeout=60, environment=None, cwd=None):
        """Runs a command to its end."""
        limit = self.time_left(timeout)
        try:
            started = self.start(parts, environment, cwd)
        except OSError as error:
            return Done(str(parts[0]), 127, "", f"error: {error}", 0.0)
        return self.finish(started, limit)

    def cuda_program(self, name, environment=None, timeout=60):
        """Builds scripts/gpu/NAME.cu for this machine's GPU and runs it. Returns its output (a JSON object per line)
        and the result of the last command: nvcc's if the build failed, otherwise the program's. None if there is no nvcc."""
        nvcc = find_nvcc()
        if nvcc is None:
            return None
        program, kernels = self.work / name, REPOSITORY / "kernels-cu"
        done = self.command([nvcc, "-O3", "-std=c++17", "-arch=native", f"-I{kernels / 'include'}",
                             f"-I{kernels / 'protocol'}", REPOSITORY / f"scripts/gpu/{name}.cu", "-o", program], 60)
        if done.status == 0:
            done = self.command([program], timeout, environment)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done

    # mpk-run

    def mpk_run(self, job, wrapper=()):
        """Command line of a job, `wrapper` (such as a sanitizer) put before the binary."""
        parts = ["mpirun", "-n", job.ranks, "--bind-to", "none"] if job.ranks > 1 else []
        parts += [*wrapper, self.binary, job.model, "--backend", self.backend, *job.shape_options()]
        # Ranks that share a GPU also start one after the other.
        deadline = job.deadline * (5 if self.cuda and job.ranks > self.gpus else 1) * PATIENCE
        cache = ["--prefix-cache", job.prefix_cache] if job.prefix_cache else []
        return [*parts, "--json", *cache, "--deadline", deadline, *job.options]

    def on_gpus(self, count, work):
        """Runs `work(environment)` on `count` GPUs that nothing else uses at the time."""
        with self.free:
            self.free.wait_for(lambda: len(self.free_gpus) >= count)
            gpus = [self.free_gpus.pop(0) for _ in range(count)]
        try:
            return work({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if self.cuda else {})
        finally:
            with self.free:
                self.free_gpus = sorted(self.free_gpus + gpus)
                self.free.notify_all()

    def run_job(self, job, timeout=60, wrapper=()):
        """Runs a job on GPUs that no other job uses."""
        count = self.gpus if job.alone else min(job.ranks, self.gpus)
        return self.on_gpus(count, lambda environment: self.command(
            self.mpk_run(job, wrapper), timeout, environment | dict(job.environment)))

    def run_jobs(self, jobs, timeout=60, patience=3):
        """Runs jobs, as many at once as there are GPUs for; gives their results in order. After `patience` jobs that did
        not end by themselves the others are not run: a kernel that hangs costs seconds, not minutes."""
        hung = []

        def one(job):
            if len(hung) >= patience:
                return Done(job.what(), -1, "", "error: not run, because earlier jobs hung", 0.0)
            try:
                done = self.run_job(job, timeout)
            except OutOfTime:
                return Done(job.what(), -1, "", "error: not run, because the part has run out of time", 0.0, True)
            if done.timed_out or done.status == 4:
                hung.append(job)
            return done

        with ThreadPoolExecutor(max(1, self.gpus)) as pool:
            return list(pool.map(one, jobs))

    def ranks(self):
        """The numbers of ranks that give each rank its own GPU."""
        return [n for n in (1, 2, 4) if n <= self.gpus]

    def keep(self, name, text):
        """Writes a tool's output next to the report, to help find the cause of a failure."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / name).write_text(text)

    def write(self, environment, arguments, seconds):
        """Writes the report; called after every part."""
        self.out.mkdir(parents=True, exist_ok=True)
        counts = {kind: sum(v["verdict"] == kind for v in self.verdicts) for kind in ("ok", "FAILED", "skipped")}
        report = {
            "schema": "mpk-gpu-check/1",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "arguments": arguments,
            "seed": self.seed,
            "seconds": round(seconds, 1),
            **environment,
            "counts": counts,
            "verdicts": self.verdicts,
            "figures": self.figures,
            "commands": list(dict.fromkeys(self.commands)),
        }
        path = self.out / f"gpu-{self.gpus}x.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(path)
        return path


def parsed(done):
    """The JSON object of a run that succeeded, or None."""
    if done.status != 0 or done.timed_out:
        return None
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        return None


def bits(result):
    """Everything that must be equal in every run: JSON prints a float so that it can be read back exactly."""
    return json.dumps([[r["prompt_tokens"], r["tokens"], r["finish_reason"], r.get("logprobs")] for r in result["requests"]])


def summary(samples):
    """Median, least and most of samples, with the samples."""
    ordered = sorted(samples)
    return {"median": ordered[len(ordered) // 2], "min": ordered[0], "max": ordered[-1], "samples": list(samples)}


def say(text):
    """Prints progress to stderr: stdout has only verdicts."""
    print(f"gpu_check: {text}", file=sys.stderr, flush=True)

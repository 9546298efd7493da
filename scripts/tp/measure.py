"""Runs ours and the peers, case by case, and keeps their output."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from running import run

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
PEERS = REPOSITORY / "scripts" / "peers"


@dataclass
class Setting:
    """The settings of a measurement."""

    model: str
    ranks: list
    batches: list
    contexts: list
    prompts: list
    sizes: list
    peers: list
    steps: int
    repeats: int
    bench: Path
    python: str
    backend: str
    limit: float
    work: Path
    read_rate: float | None = None
    problems: list = field(default_factory=list)
    commands: list = field(default_factory=list)

    @property
    def cuda(self):
        """True on GPUs."""
        return self.backend == "cuda"

    def run(self, command, seconds, environment=None):
        """Runs a command and records it."""
        text = " ".join(map(str, command)).replace(f"{REPOSITORY}/", "").replace(str(self.work), "$WORK")
        self.commands.append(text if len(text) < 400 else text[:400] + "...")
        return run(command, seconds, environment)

    def failed(self, what, problem):
        """Records and prints a problem."""
        print(f"bench_tp: {what}: {problem}", file=sys.stderr, flush=True)
        self.problems.append({"what": what, "problem": problem})


def has(module, python):
    """True if this Python has the module."""
    if Path(python).resolve() == Path(sys.executable).resolve():
        return importlib.util.find_spec(module) is not None
    code = f"import importlib.util,sys; sys.exit(importlib.util.find_spec('{module}') is None)"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def config_file(setting):
    """The model's configuration as a file for the peers, and a folder with nothing else, for vLLM."""
    folder = setting.work / "shape"
    folder.mkdir(exist_ok=True)
    path, named = folder / "config.json", Path(setting.model)
    if named.is_dir():
        shutil.copy(named / "config.json", path)
        return path
    if named.is_file():
        document = json.loads(named.read_text())
        if "checkpoint" in document:
            shutil.copy(named.parent / document["checkpoint"] / "config.json", path)
            return path
    else:
        done = setting.run([setting.bench, "model", setting.model], 60)
        if done.status != 0:
            sys.exit(f"bench_tp: --model {setting.model}: {done.problem()}")
        document = json.loads(done.stdout)
    path.write_text(json.dumps(document.get("config", document)))
    return path


def launcher(ranks):
    """`mpirun -n N`, for more than one rank."""
    return ["mpirun", "-n", ranks] if ranks > 1 else []


def ours(setting, what, ranks, options, name):
    """mpk-bench's object, or None."""
    command = [*launcher(ranks), setting.bench, what, *options, "--backend", setting.backend,
               "--repeats", setting.repeats]
    done = setting.run(command, setting.limit)
    found = done.objects()
    if done.status != 0 or len(found) != 1:
        setting.failed(name, done.problem())
        return None
    return found[0]


def torch_rows(setting, program, ranks, options, name):
    """The output of a PyTorch peer."""
    start = [setting.python] if ranks == 1 else [
        setting.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    device = "cuda" if setting.cuda else "cpu"
    cache = Path(os.environ.get("MPK_CACHE_DIR") or tempfile.gettempdir()) / "inductor"
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    command = [*start, PEERS / program, *options, "--device", device]
    if program != "torch_allreduce.py":
        command += ["--seconds", setting.limit / 2] + ([] if setting.cuda else ["--repeats", 5])
    done = setting.run(command, setting.limit, environment)
    rows = [row for row in done.objects() if "what" in row]
    if done.status != 0 or not rows:
        setting.failed(name, done.problem())
    return rows


def stream_rate(setting):
    """Bytes per second that a streaming kernel reads on this GPU, or None."""
    nvcc = shutil.which("nvcc") or os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    program = setting.work / "stream_read"
    kernels = REPOSITORY / "kernels-cu"
    built = setting.run([nvcc, "-O3", "-std=c++17", "-arch=native", f"-I{kernels / 'include'}", f"-I{kernels / 'protocol'}",
                         REPOSITORY / "scripts/gpu/stream_read.cu", "-o", program], 90)
    if built.status != 0:
        setting.failed("floor", built.problem())
        return None
    rows = setting.run([program], 30).objects()
    return max((row["bytes_per_second"] for row in rows), default=None)


def compile_ahead(setting):
    """Compiles the kernels of all decode and prefill cases side by side. If one cannot be compiled, its case fails later and says why."""
    program = setting.bench.parent / "mpk-run"
    if not os.access(program, os.X_OK):
        return
    model = setting.model
    if not Path(model).exists() and "/" not in model:
        model = setting.work / "model.json"
        model.write_text(run([setting.bench, "model", setting.model], 60).stdout)
    tokens = [(batch, context + setting.steps + 1) for batch in setting.batches for context in setting.contexts]
    tokens += [(batch, prompt + 2) for batch, prompt in setting.prompts]
    cases = [(ranks, *sizes) for ranks in setting.ranks for sizes in tokens]

    def compiled(case):
        ranks, batch, length = case
        run([program, model, "--compile-only", "--greedy", "--ranks", ranks, "--max-batch", batch, "--max-seq-len", length], setting.limit)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        list(pool.map(compiled, cases))


def measure(setting):
    """All rows: {"decode": [...], "prefill": [...], "allreduce": [...]} of ours and of the peers, as they printed them."""
    config = config_file(setting)
    found = {"ours": [], "peers": []}
    if setting.cuda:
        setting.read_rate = stream_rate(setting)
        compile_ahead(setting)
    rate = ["--read-rate", setting.read_rate] if setting.read_rate else []
    lists = {name: ",".join(map(str, values)) for name, values in
             (("batch", setting.batches), ("context", setting.contexts), ("bytes", setting.sizes))}
    for ranks in setting.ranks:
        for context in setting.contexts:
            for batch in setting.batches:
                row = ours(setting, "decode", ranks, ["--model", setting.model, "--context", context, "--batch", batch,
                                                      "--steps", setting.steps, *rate],
                           f"decode TP{ranks} batch {batch} context {context}")
                found["ours"] += [row] if row else []
        for batch, prompt in setting.prompts:
            row = ours(setting, "prefill", ranks, ["--model", setting.model, "--prompt", prompt, "--batch", batch],
                       f"prefill TP{ranks} {batch}x{prompt}")
            found["ours"] += [row] if row else []
        for size in setting.sizes if ranks > 1 else []:
            row = ours(setting, "allreduce", ranks, ["--bytes", size], f"allreduce TP{ranks} {size} bytes")
            found["ours"] += [row] if row else []
        if "torch" in setting.peers:
            options = ["--config", config]
            cases = ",".join(f"{batch}x{prompt}" for batch, prompt in setting.prompts)
            rows = torch_rows(setting, "torch_decode.py", ranks,
                              [*options, "--batch", lists["batch"], "--context", lists["context"]], f"torch decode TP{ranks}")
            if cases:
                rows += torch_rows(setting, "torch_prefill.py", ranks, [*options, "--cases", cases], f"torch prefill TP{ranks}")
            if ranks > 1 and setting.sizes:
                rows += torch_rows(setting, "torch_allreduce.py", ranks, ["--bytes", lists["bytes"]],
                                   f"torch allreduce TP{ranks}")
            found["peers"] += [{"peer": "torch", **row} for row in rows]
        if "vllm" in setting.peers:
            done = setting.run([setting.python, PEERS / "vllm_decode.py", "--folder", config.parent, "--tp", ranks,
                                "--batch", lists["batch"], "--context", lists["context"]], 2 * setting.limit)
            if done.status != 0:
                setting.failed(f"vllm TP{ranks}", done.problem())
            found["peers"] += [{"peer": "vllm", **row} for row in done.objects() if "what" in row]
    return found

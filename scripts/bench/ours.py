"""Runs our binaries: correctness, peak memory, and the timed measurements."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLEAR_WINNER = 0.15  # natural-log lead above which rounding cannot change a token (tests/fixtures/README.md)


class Failed(Exception):
    """A command that did not succeed; the message shows it and the end of its output."""


def checked(command, **options):
    """Standard output of a command that must succeed."""
    command = [str(part) for part in command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{' '.join(command)[:300]}: {error}") from error
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)[:300]}: exit status {done.returncode}\n{done.stderr[-1500:]}")
    return done.stdout


def prompt(length, vocabulary):
    """The token ids of a prompt in mpk-run's format, spread over the vocabulary."""
    return ",".join(str(7919 * index % vocabulary) for index in range(length))


class Ours:
    """Our side: runs the binaries in `release`."""

    def __init__(self, repository, release, folder, workers):
        self.repository, self.folder, self.workers = repository, folder, workers
        self.run, self.bench = release / "mpk-run", release / "mpk-bench"
        self.tiny = repository / "examples" / "tiny" / "model.json"
        self.commands = {}

    def command(self, name, parts):
        """Records a command for the report. Long lists of token ids and temporary folders are shortened."""
        parts = [str(part) for part in parts]
        shown = [part if part.count(",") < 20 else f"<{part.count(',') + 1} ids>" for part in parts]
        # The report is committed, so it must not contain names of this machine.
        local = {str(self.folder): "$TMP", str(self.run.parent): "target/release", sys.executable: "python3",
                 f"{self.repository}/": ""}
        text = " ".join(shown)
        for path, name_for_all in local.items():
            text = text.replace(path, name_for_all)
        self.commands.setdefault(name, text)
        return parts

    def shape(self, name):
        """Writes the model.json of a shape with random weights and returns its path."""
        path = self.folder / f"{name}.json"
        path.write_text(checked(self.command(f"model {name}", [self.bench, "model", name])))
        return path

    def golden(self, ranks):
        """Compares the tiny model's greedy tokens with the committed ones from Hugging Face; returns the differences."""
        expected = json.loads((self.repository / "tests/fixtures/tiny/expected.json").read_text())["requests"]
        command = ["mpirun", "-n", ranks, self.run, self.tiny, "--json", "--greedy", "--ignore-eos", "--max-new-tokens"]
        command.append(len(expected[0]["tokens"]))
        for request in expected:
            command += ["--prompt-tokens", ",".join(map(str, request["prompt_tokens"]))]
        found = json.loads(checked(self.command(f"golden tokens, N={ranks}", command)))["requests"]
        problems, compared = [], 0
        for index, (want, have) in enumerate(zip(expected, found)):
            if len(have["tokens"]) != len(want["tokens"]):
                problems.append(f"request {index}: {len(have['tokens'])} tokens, expected {len(want['tokens'])}")
            for step, (token, other) in enumerate(zip(want["tokens"], have["tokens"])):
                compared += 1
                if token == other:
                    continue
                if want["margins"][step] >= CLEAR_WINNER:
                    problems.append(f"request {index}, step {step}: token {other}, expected {token}")
                break  # a near tie: from here on the prefixes differ
        if len(found) != len(expected):
            problems.append(f"{len(found)} requests, expected {len(expected)}")
        return compared, problems

    def large(self, model, vocabulary, ranks, prompts, new_tokens):
        """Tokens and log-probabilities of the large shape, and each rank's peak memory in bytes."""
        folder = self.folder / f"memory-{ranks}"
        folder.mkdir()
        command = ["mpirun", "-n", ranks, sys.executable, HERE / "peak_memory.py", folder, self.run, model, "--json"]
        command += ["--logprobs", 2, "--max-new-tokens", new_tokens]
        for length in prompts:
            command += ["--prompt-tokens", prompt(length, vocabulary)]
        result = json.loads(checked(self.command(f"memory, N={ranks}", command)))
        peaks = [json.loads(path.read_text())["peak_bytes"] for path in sorted(folder.glob("rank-*.json"))]
        return result["requests"], peaks

    def memory_rate(self, threads):
        """Bytes per second that `threads` threads read from huge pages."""
        command = self.command("floor", [self.bench, "memory", "--threads", threads])
        return json.loads(checked(command))["read_bytes_per_second"]

    def timed(self, name, model, vocabulary, length, new_tokens):
        """Timing object of one request of `length` tokens on one rank."""
        command = [self.run, model, "--json", "--workers", self.workers, "--max-new-tokens", new_tokens]
        command += ["--prompt-tokens", prompt(length, vocabulary)]
        return json.loads(checked(self.command(name, command)))["timing"]

    def graphs(self, shapes):
        """Build and verify times of the 8 ranks' decode graphs, by shape."""
        command = [self.bench, "graphs", "--ranks", 8, "--device", "h200", "--repeats", 1]
        for shape in shapes:
            command += ["--model", shape]
        lines = checked(self.command("graphs", command)).splitlines()
        return {line["model"]: line for line in map(json.loads, filter(None, lines))}

    def check(self, model):
        """Seconds of a whole process of `mpk-run --check`: the graphs of all classes, 8 ranks."""
        command = self.command("check", [self.run, model, "--ranks", 8, "--device", "h200", "--check"])
        start = time.perf_counter()
        checked(command)
        return time.perf_counter() - start

    def tiny_process(self, ranks):
        """Seconds of a whole process of `mpirun -n ranks` with the tiny model, 64 tokens."""
        parts = ["mpirun", "-n", ranks, self.run, self.tiny, "--ignore-eos", "--max-new-tokens", 64]
        command = self.command("tiny", parts)
        start = time.perf_counter()
        checked(command)
        return time.perf_counter() - start


def agree(first, second):
    """Compares the requests of two numbers of ranks; tokens may differ only if the lead is within rounding."""
    problems, compared = [], 0
    for index, (one, two) in enumerate(zip(first, second, strict=True)):
        for step, (token, other) in enumerate(zip(one["tokens"], two["tokens"], strict=True)):
            compared += 1
            if token == other:
                continue
            top = one["logprobs"][step]
            if top[0][1] - top[1][1] >= CLEAR_WINNER:
                problems.append(f"request {index}, step {step}: {token} and {other}")
            break
    return compared, problems


def peer(python, script, name, huge_pages, model, arguments, environment=None):
    """Result object of one run of a peer."""
    command = [str(python), str(script), "--peer", name, "--model", str(model), *map(str, arguments)]
    if huge_pages:
        command.append("--huge-pages")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=900, env={**os.environ, **(environment or {})}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"peer": name, "absent": str(error)[:300]}
    lines = done.stdout.strip().splitlines()
    if done.returncode in (0, 3) and lines:
        return json.loads(lines[-1])
    return {"peer": name, "absent": f"exit status {done.returncode}: {done.stderr.strip()[-300:]}"}

"""Runs the commands of the benchmark: each in a separate session, with a time limit, keeping all of its output."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass


@dataclass
class Done:
    """A command that has ended."""

    command: list
    status: int
    stdout: str
    stderr: str
    seconds: float
    late: bool = False

    def objects(self):
        """The JSON objects that it printed, one per line."""
        found = []
        for line in self.stdout.splitlines():
            if line.startswith("{"):
                try:
                    found.append(json.loads(line))
                except json.JSONDecodeError:
                    pass
        return found

    def problem(self):
        """The problem in one line."""
        how = f"no end after {self.seconds:.0f} s" if self.late else f"exit status {self.status}"
        lines = [line.strip() for line in self.stderr.splitlines() if "rror" in line] or self.stderr.strip().splitlines()
        return f"{how}: {' / '.join(lines[-3:])[:400]}"


def run(command, seconds, environment=None):
    """Runs a command to its end, or ends it and its children after the time limit."""
    command, began = [str(part) for part in command], time.monotonic()
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, errors="replace", start_new_session=True,
                                   env={**os.environ, **(environment or {})})
    except OSError as error:
        return Done(command, 127, "", f"error: {error}", 0.0)
    try:
        stdout, stderr = process.communicate(timeout=max(1.0, seconds))
        return Done(command, process.returncode, stdout, stderr, time.monotonic() - began)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(timeout=3)
                break
            except (ProcessLookupError, PermissionError):
                break
            except subprocess.TimeoutExpired:
                continue
        try:
            stdout, stderr = process.communicate(timeout=3)
        except subprocess.TimeoutExpired:
            stdout = stderr = ""
        return Done(command, process.returncode or -9, stdout, stderr, time.monotonic() - began, late=True)

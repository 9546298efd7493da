"""A running mpk-serve, its answers, and the comparison of two answers."""

import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path

from common import PATIENCE, session_processes
from golden import CLEAR_WINNER

LOGPROBS = 3
IDLE_EXIT = 1.0
START_SECONDS, ANSWER_SECONDS, END_SECONDS = 40, 30, 15


class Wrong(Exception):
    """An answer that is not as expected."""


class Server:
    """A running mpk-serve."""

    def __init__(self, check, binary, path, ranks, prefix_cache="off"):
        self.check = check
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        launch = ["mpirun", "-n", ranks, "--bind-to", "none"] if ranks > 1 else []
        self.started = check.start([*launch, binary, path, "--backend", check.backend, "--port", self.port,
                                    "--prefix-cache", prefix_cache, "--logprobs", LOGPROBS, "--idle-exit", IDLE_EXIT, "--deadline", 10 * PATIENCE])
        until = time.monotonic() + check.time_left(START_SECONDS)
        while self.status("/health") != 200:
            if self.process.poll() is not None or time.monotonic() > until:
                raise Wrong(f"not ready: {self.end(0).problem()}")
            time.sleep(0.05)

    @property
    def process(self):
        return self.started[0]

    def connection(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS * PATIENCE)

    def status(self, path):
        """Status of a GET, or None if no server listens."""
        try:
            connection = self.connection()
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()

    def post(self, body):
        """The connection and the answer of a completion."""
        connection = self.connection()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Wrong(f"status {answer.status}: {answer.read()[:200]}")
        return connection, answer

    def answer(self, body):
        """An answer in one piece."""
        connection, answer = self.post(body | {"return_token_ids": True})
        try:
            return json.loads(answer.read())
        finally:
            connection.close()

    def tokens(self, body):
        """Tokens of an answer in one piece."""
        return self.answer(body)["choices"][0]["token_ids"]

    def steps(self, body, logprobs=LOGPROBS):
        """See `steps_of`."""
        return steps_of(self.answer(body | {"logprobs": logprobs}))

    def cancelled(self, body, events=1):
        """Closes a stream after its first token, or with `events` 0 before."""
        connection, answer = self.post(body | {"stream": True})
        for _ in range(events):
            answer.readline()
        connection.close()

    def until_free(self):
        """Waits until no request runs and no page is in use."""
        until = time.monotonic() + 5 * PATIENCE
        while self.gauge("num_requests_running") or self.gauge("kv_cache_usage_perc"):
            if time.monotonic() > until:
                raise Wrong(f"{self.gauge('num_requests_running')} requests still run, {self.gauge('kv_cache_usage_perc')} of the pages in use")
            time.sleep(0.05)

    def pieces(self, body):
        """Times at which the pieces of a stream came, in ms after the request."""
        begin = time.perf_counter()
        connection, answer = self.post(body | {"stream": True})
        times = []
        for line in answer:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("text"):
                times.append((time.perf_counter() - begin) * 1e3)
        connection.close()
        return times

    def gauge(self, name):
        """A number of /metrics."""
        connection = self.connection()
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return float(next(line for line in lines if line.startswith(f"mpk:{name}{{")).rsplit(" ", 1)[1])

    def rank_0(self):
        """Process id of rank 0: under mpirun a child."""
        for process in session_processes(self.process.pid):
            try:
                name = Path(f"/proc/{process}/comm").read_text().strip()
                environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = next((line for line in environment if line.startswith(b"OMPI_COMM_WORLD_RANK=")), b"=0")
            if name == "mpk-serve" and rank.endswith(b"=0"):
                return process
        return self.process.pid

    def end(self, number=signal.SIGTERM):
        """Ends it; returns the finished command."""
        if number and self.process.poll() is None:
            os.kill(self.rank_0(), number)
        return self.check.finish(self.started, END_SECONDS * PATIENCE)


def steps_of(answer):
    """For each token of an answer with log-probabilities: its id, its text, and log-probabilities of the best texts."""
    choice = answer["choices"][0]
    shown = choice["logprobs"]
    return list(zip(choice["token_ids"], shown["tokens"], shown["top_logprobs"], strict=True))


def compare_with_alone(server, index, body, alone, found):
    """Number of near ties that have another winner when other requests run at the same time: products of many rows and
    of few rows add in different orders.

    After a near tie, the rest is compared with the idle server's answer to the prompt and the tokens so far.
    """
    if len(found) != len(alone):
        raise Wrong(f"request {index} has {len(found)} tokens, alone {len(alone)}")
    for step, ((token, text, _), (expected, best, top)) in enumerate(zip(found, alone, strict=True)):
        if token == expected:
            continue
        if text not in top or top[text] < top[best] - CLEAR_WINNER:
            raise Wrong(f"request {index}, {len(found) - step} tokens before its end: token {token}, alone {expected}; "
                        f"log-probabilities alone {top}")
        rest = found[step + 1:]
        if not rest:
            return 1
        prompt = body["prompt"] + [token for token, _, _ in found[:step + 1]]
        body = body | {"prompt": prompt, "max_tokens": len(rest)}
        return 1 + compare_with_alone(server, index, body, server.steps(body), rest)
    return 0

"""Checks mpk-serve: answers under load against each request alone and against Hugging Face, cancels, the first token after an idle
time, and the end.

The reference of a request is the server's own answer while nothing else runs. For the trained example, these are also
compared with the tokens of transformers. The prefix cache is off, so no page is in use after the last request.
"""

import http.client
import json
import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
from common import PATIENCE, Job, session_processes, summary
from golden import CLEAR_WINNER

REQUESTS, CLIENTS, SLOTS, CANCELLED_OF, LOGPROBS = 48, 12, 8, 6, 3
IDLE_EXIT, WAKE_LIMIT_MS, FIRST_TOKEN_LIMIT_MS = 1.0, 50.0, 1.0
START_SECONDS, ANSWER_SECONDS, END_SECONDS = 40, 30, 15
MIXED = {"decode": "static", "prefill": "dynamic"}


class Wrong(Exception):
    """An answer that is not as expected."""


def model(check, placement, suffix):
    """The trained example with several slots. A server's graphs can sample, so these jobs' graphs must, too. The requests are greedy."""
    generate = {"prompt_tokens": [[1, 2, 3]], "max_new_tokens": 4, "temperature": 0.8}
    return models.checkpoint_model(check, f"serve-{suffix}", models.fixture_folder("tiny"), [], 4, max_batch=SLOTS,
                                   runtime={"placement": placement}, generate=generate)


def choices(check):
    """Ranks, name and placement of each server."""
    found = [(1, "static", "static"), (1, "mixed", MIXED)]
    for ranks in check.ranks()[1:]:
        found += [(ranks, "static", "static"), (ranks, "dynamic", "dynamic"), (ranks, "mixed", MIXED)]
    return found


def jobs(check):
    """What the servers launch."""
    return [Job(model(check, placement, name), ranks, logprobs=LOGPROBS) for ranks, name, placement in choices(check)]


class Server:
    """A running mpk-serve."""

    def __init__(self, check, binary, path, ranks):
        self.check = check
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        launch = ["mpirun", "-n", ranks, "--bind-to", "none"] if ranks > 1 else []
        self.started = check.start([*launch, binary, path, "--backend", check.backend, "--port", self.port, "--prefix-cache", "off",
                                    "--logprobs", LOGPROBS, "--idle-exit", IDLE_EXIT, "--deadline", 10 * PATIENCE])
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

    def choice(self, body):
        """An answer in one piece."""
        connection, answer = self.post(body | {"return_token_ids": True})
        try:
            return json.loads(answer.read())["choices"][0]
        finally:
            connection.close()

    def tokens(self, body):
        """Tokens of an answer in one piece."""
        return self.choice(body)["token_ids"]

    def steps(self, body, logprobs=LOGPROBS):
        """For each token of an answer: its id, its text, and log-probabilities of the best texts."""
        choice = self.choice(body | {"logprobs": logprobs})
        shown = choice["logprobs"]
        return list(zip(choice["token_ids"], shown["tokens"], shown["top_logprobs"], strict=True))

    def cancelled(self, body):
        """Closes a stream after its first token."""
        connection, answer = self.post(body | {"stream": True})
        answer.readline()
        connection.close()

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


def bodies(check):
    """Requests of many lengths."""
    draw = random.Random(check.seed)
    return [{"prompt": [draw.randrange(1, 200) for _ in range(draw.choice([1, 3, 17, 40]))], "max_tokens": draw.randrange(2, 40),
             "temperature": 0, "ignore_eos": True} for _ in range(REQUESTS)]


def compare_with_transformers(server):
    """Tokens of expected.json, up to a near tie."""
    for index, request in enumerate(models.expected("tiny")["requests"]):
        found = server.tokens({"prompt": request["prompt_tokens"], "max_tokens": len(request["tokens"]), "temperature": 0,
                               "ignore_eos": True})
        for step, token in enumerate(found):
            if token != request["tokens"][step]:
                if request["margins"][step] >= CLEAR_WINNER:
                    raise Wrong(f"request {index} step {step}: token {token}, transformers has {request['tokens'][step]}")
                break


def load(check, server):
    """Requests that come and go while others run; every sixth is cancelled after its first token."""
    requests = bodies(check)
    alone = [server.steps(body) for body in requests]
    draw = random.Random(check.seed + 1)
    delays = [draw.random() * 0.1 for _ in requests]

    def one(index):
        time.sleep(delays[index])
        if index % CANCELLED_OF == CANCELLED_OF - 1:
            return server.cancelled(requests[index])
        # Requests of one batch want different numbers of log-probabilities; those that are cancelled want none.
        return server.steps(requests[index], 1 + index % LOGPROBS)

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(one, range(len(requests))))
    ties = 0
    for index, steps in enumerate(found):
        if steps is not None:
            ties += compare_with_alone(server, index, requests[index], alone[index], steps)
    until = time.monotonic() + 5 * PATIENCE
    while server.gauge("num_requests_running") or server.gauge("kv_cache_usage_perc"):
        if time.monotonic() > until:
            raise Wrong(f"{server.gauge('num_requests_running')} requests still run, {server.gauge('kv_cache_usage_perc')} of the pages in use")
        time.sleep(0.05)
    return f"{len(found)} requests give the same tokens as alone ({ties} near ties); {found.count(None)} of them were cancelled"


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


def first_token(server, wait, repeats):
    """Milliseconds to the first token after `wait` seconds without requests, beyond the two iterations that it takes."""
    found = []
    for _ in range(repeats):
        time.sleep(wait)
        times = server.pieces({"prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True})
        step = (times[-1] - times[0]) / max(1, len(times) - 1)
        found.append(times[0] - 2 * step)
    return summary(found)


def judge_server(check, binary, ranks, name, placement):
    """All of one server."""
    what = f"serve N={ranks} {name}"
    server = None
    try:
        server = Server(check, binary, model(check, placement, name), ranks)
        compare_with_transformers(server)
        check.ok(what, f"{load(check, server)}, all pages free again")
        warm = first_token(server, 0.02, 15)
        woken = first_token(server, IDLE_EXIT * PATIENCE + 0.7, 3)
        extra = woken["median"] - warm["median"]
        detail = (f"first token {warm['median']:.2f} ms beyond two iterations ({warm['min']:.2f}-{warm['max']:.2f}); "
                  f"{extra:.1f} ms more after the kernel has ended")
        check.figures.setdefault("serve", {})[what] = {"warm_ms": warm, "woken_ms": woken}
        if PATIENCE == 1 and check.cuda:
            check.judge(extra < WAKE_LIMIT_MS, f"{what} wake", f"{detail} (target: {WAKE_LIMIT_MS:.0f} ms)")
            check.judge(warm["median"] < FIRST_TOKEN_LIMIT_MS, f"{what} first", f"{warm['median']:.2f} ms (target: {FIRST_TOKEN_LIMIT_MS} ms)")
        done = server.end()
        check.judge(done.status == 0 and not done.timed_out, f"{what} end", f"SIGTERM: exit status {done.status} after {done.seconds:.1f} s in all"
                    if done.status == 0 else done.problem())
    except (Wrong, OSError, http.client.HTTPException, KeyError, ValueError) as problem:
        said = server.end(signal.SIGKILL).stderr[-600:] if server else ""
        check.failed(what, f"{type(problem).__name__}: {problem} {said}")


def run(check):
    """All servers, one after the other."""
    binary = check.binary.parent / "mpk-serve"
    if not os.access(binary, os.X_OK):
        check.skipped("serve", f"no {binary.name} beside {check.binary.name}")
        return
    for ranks, name, placement in choices(check):
        judge_server(check, binary, ranks, name, placement)

"""Checks mpk-serve: answers under load against each request alone and against Hugging Face, cancels, the first token after an idle
time, the prefix cache, pages that requests take from each other, and the end.

The reference of a request is the server's own answer while nothing else runs. For the trained example, these are also
compared with the tokens of transformers. The prefix cache is off; a second server has it (`prefix_cache.py`). A third one has pages for
one large request and gives them out as they are needed.
"""

import http.client
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import models
import prefix_cache
from common import PATIENCE, Job, summary
from golden import CLEAR_WINNER
from server import IDLE_EXIT, LOGPROBS, Server, Wrong, compare_with_alone

REQUESTS, CLIENTS, SLOTS, CANCELLED_OF = 48, 12, 8, 6
PROMPTS, MOST_TOKENS, PAGE = [1, 3, 17, 40], 40, 8
WAKE_LIMIT_MS, FIRST_TOKEN_LIMIT_MS = 50.0, 1.0
MIXED = {"decode": "static", "prefill": "dynamic"}


def model(check, placement, suffix, changes=None, **runtime):
    """The trained example with several slots. A server's graphs can sample, so these jobs' graphs must, too. The requests are greedy."""
    generate = {"prompt_tokens": [[1, 2, 3]], "max_new_tokens": 4, "temperature": 0.8}
    return models.checkpoint_model(check, f"serve-{suffix}", models.fixture_folder("tiny"), [], 4, max_batch=SLOTS,
                                   runtime={"placement": placement, **runtime}, generate=generate, **(changes or {}))


def scarce(check, placement, suffix):
    """The same with pages for one of the largest requests of `bodies`, given out as they are needed."""
    pages = -(-(max(PROMPTS) + MOST_TOKENS) // PAGE)
    return model(check, placement, f"{suffix}-scarce", {"page_size": PAGE}, kv="on-demand", kv_pages=pages)


def choices(check):
    """Ranks, name and placement of each server."""
    found = [(1, "static", "static"), (1, "mixed", MIXED)]
    for ranks in check.ranks()[1:]:
        found += [(ranks, "static", "static"), (ranks, "dynamic", "dynamic"), (ranks, "mixed", MIXED)]
    return found


def jobs(check):
    """What the servers launch."""
    return [Job(make(check, placement, name), ranks, logprobs=LOGPROBS) for ranks, name, placement in choices(check)
            for make in (model, scarce)]


def bodies(check):
    """Requests of many lengths."""
    draw = random.Random(check.seed)
    return [{"prompt": [draw.randrange(1, 200) for _ in range(draw.choice(PROMPTS))], "max_tokens": draw.randrange(2, MOST_TOKENS),
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


def load(check, server, spread=0.1):
    """Requests that come within `spread` seconds, and go while others run; every sixth is cancelled after its first token."""
    requests = bodies(check)
    alone = [server.steps(body) for body in requests]
    draw = random.Random(check.seed + 1)
    delays = [draw.random() * spread for _ in requests]

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
    server.until_free()
    return f"{len(found)} requests give the same tokens as alone ({ties} near ties); {found.count(None)} of them were cancelled"


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
    """All of one server, and of a second one with the prefix cache."""
    what = f"serve N={ranks} {name}"
    path = model(check, placement, name)
    server = None
    try:
        server = Server(check, binary, path, ranks)
        compare_with_transformers(server)
        check.ok(what, f"{load(check, server)}, all pages free again")
        shared = prefix_cache.Requests(check, path)
        alone = shared.alone(server)
        warm = first_token(server, 0.02, 15)
        woken = first_token(server, IDLE_EXIT * PATIENCE + 0.7, 3)
        extra = woken["median"] - warm["median"]
        detail = (f"first token {warm['median']:.2f} ms beyond two iterations ({warm['min']:.2f}-{warm['max']:.2f}); "
                  f"{extra:.1f} ms more after the kernel has ended")
        check.figures.setdefault("serve", {})[what] = {"warm_ms": warm, "woken_ms": woken}
        if PATIENCE == 1 and check.cuda:
            check.judge(extra < WAKE_LIMIT_MS, f"{what} wake", f"{detail} (target: {WAKE_LIMIT_MS:.0f} ms)")
            check.judge(warm["median"] < FIRST_TOKEN_LIMIT_MS, f"{what} first", f"{warm['median']:.2f} ms (target: {FIRST_TOKEN_LIMIT_MS} ms)")
        judge_end(check, server, what)
        server, what = None, f"{what} prefix cache"
        server = Server(check, binary, path, ranks, prefix_cache="on")
        check.ok(what, shared.judge(server, alone))
        judge_end(check, server, what)
        server, what = None, f"serve N={ranks} {name} few pages"
        server = Server(check, binary, scarce(check, placement, name), ranks)
        done, given_up = load(check, server, 0), int(server.gauge("num_preemptions_total"))
        check.judge(given_up > 0, what, f"{done}; {given_up} times a request gave its pages back")
        judge_end(check, server, what)
    except (Wrong, OSError, http.client.HTTPException, KeyError, ValueError) as problem:
        said = server.end(signal.SIGKILL).stderr[-600:] if server else ""
        check.failed(what, f"{type(problem).__name__}: {problem} {said}")


def judge_end(check, server, what):
    """Ends a server as a user would."""
    done = server.end()
    check.judge(done.status == 0 and not done.timed_out, f"{what} end", f"SIGTERM: exit status {done.status} after {done.seconds:.1f} s in all"
                if done.status == 0 else done.problem())


def run(check):
    """All servers, one after the other."""
    binary = check.binary.parent / "mpk-serve"
    if not os.access(binary, os.X_OK):
        check.skipped("serve", f"no {binary.name} beside {check.binary.name}")
        return
    for ranks, name, placement in choices(check):
        judge_server(check, binary, ranks, name, placement)

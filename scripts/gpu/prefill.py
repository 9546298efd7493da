"""Measures prefill and compares it with the peer, in one run: Qwen3-8B's shape on one GPU, random weights.

First it compares wide products with the others: the same prompt, in chunks that are too short for wide products, must give
the same best tokens, with log-probabilities within rounding.
"""

import json
import sys

import models
from common import REPOSITORY, Job, parsed, summary

SHAPE, SLOTS, MAX_SEQ_LEN, CHUNK, SHORT_CHUNK = "qwen3-8b", 8, 2304, 2048, 8
CASES = [(1, 480), (8, 480), (1, 2048)]  # requests, tokens of each
REPEATS, LOGPROBS, TOLERANCE = 2, 5, 0.12


def job(check, chunk):
    """A launch without prompts."""
    model = models.shape_model(check, SHAPE, SLOTS, MAX_SEQ_LEN, chunk)
    return Job(model, 1, "static", deadline=60.0, logprobs=LOGPROBS)


def jobs(check):
    """All launches' code."""
    return [job(check, CHUNK), job(check, SHORT_CHUNK)]


def with_prompts(launch, requests, tokens):
    """The same with prompts, and two new tokens each."""
    options = ["--ignore-eos", "--max-new-tokens", 2]
    for slot in range(requests):
        prompt = models.prompt(tokens, models.SHAPES[SHAPE][5], 1 + 100 * slot)
        options += ["--prompt-tokens", ",".join(map(str, prompt))]
    return launch.with_options(*options)


def first_logprobs(result):
    """For each request {token: log-probability} of the first new token."""
    return [dict(map(tuple, request["logprobs"][0])) for request in result["requests"]]


def differs(found, expected):
    """The largest difference of log-probabilities, as a share of the allowed difference."""
    worst = 0.0
    for ours, theirs in zip(found, expected):
        if None in (*ours.values(), *theirs.values()):
            return float("inf")  # not a number
        for token, logprob in theirs.items():
            # A token that is not among ours is below our last one.
            off = abs(ours[token] - logprob) if token in ours else max(0.0, logprob - min(ours.values()))
            worst = max(worst, off / (TOLERANCE * (1 + abs(logprob))))
    return worst


def run(check):
    """All cases."""
    if not check.cuda:
        check.skipped("prefill", "needs a GPU")
        return
    environment = {"CUDA_VISIBLE_DEVICES": "0"}

    def launch(chunk, requests, tokens):
        done = check.command(check.mpk_run(with_prompts(job(check, chunk), requests, tokens)), 120, environment)
        return parsed(done), done

    short, done = launch(SHORT_CHUNK, 1, 480)
    if short is None:
        check.failed("prefill chunks", done.problem())
    figures = check.figures.setdefault("prefill", {})
    peer = check.command([sys.executable, REPOSITORY / "scripts/gpu/peer_prefill.py",
                          ",".join(f"{n}x{t}" for n, t in CASES)], 150, environment)
    theirs = {row["case"]: row for row in map(json.loads, (x for x in peer.stdout.splitlines() if x.startswith("{")))}
    if peer.status != 0:
        check.failed("prefill peer", peer.problem())
    for requests, tokens in CASES:
        name, samples = f"{requests}x{tokens}", []
        for repeat in range(REPEATS):
            result, done = launch(CHUNK, requests, tokens)
            if result is None:
                check.failed(f"prefill {name}", done.problem())
                break
            samples.append(result["timing"]["prefill_s"] * 1e3)
            if (requests, tokens) == (1, 480) and repeat == 0 and short is not None:
                share = differs(first_logprobs(result), first_logprobs(short))
                check.judge(share <= 1, "prefill chunks", f"480 tokens in chunks of {CHUNK} and of {SHORT_CHUNK}: "
                            f"log-probabilities differ by {100 * share:.0f} % of the tolerance")
        if not samples:
            continue
        found, other = summary(samples), theirs.get(name)
        figures[name] = {"ms": found, "peer": other}
        text = f"{found['min']:.1f} ms, {requests * tokens / found['min'] * 1e3:.0f} tokens/s"
        if other:
            text += f"; peer {other['ms']:.1f} ms, {other['tokens_per_second']} tokens/s (ours is {other['ms'] / found['min']:.2f} times as fast)"
        check.ok(f"prefill {SHAPE} {name}", text)

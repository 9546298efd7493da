"""Compares sampled tokens, and the log-probability of each, with the CPU target.

The noise is a function of seed, position and token, so both targets draw the same tokens, up to near ties: they add in
different orders. The temperature is so high that most tokens are not among the best, whose log-probabilities come from
another task. After the first token that differs, a request is not compared further.
"""

import models
from common import Job, covering, parsed
from golden import tolerance

FIXTURES = ["qwen3", "tiny"]
TEMPERATURE, SEED, STEPS, LOGPROBS = 6.0, 3, 12, 2
SHARE = 0.5  # of all tokens that must be compared; two near ties in a row are rare


def sampled_model(check, name):
    """A fixture with sampled requests."""
    prompts = [request["prompt_tokens"] for request in models.expected(name)["requests"]]
    generate = {"prompt_tokens": prompts, "max_new_tokens": STEPS, "ignore_eos": True, "temperature": TEMPERATURE, "seed": SEED}
    return models.checkpoint_model(check, f"{name}-sampled", models.fixture_folder(name), prompts, STEPS, generate=generate)


def choices(check):
    """(fixture, job) of each comparison."""
    return [(name, Job(sampled_model(check, name), ranks, logprobs=LOGPROBS, **choice))
            for name in FIXTURES for ranks in check.ranks() for choice in covering(ranks, index_of(name))]


def index_of(name):
    """Fixtures take different lowerings and transports."""
    return FIXTURES.index(name)


def jobs(check):
    """What is launched on GPUs."""
    return [job for _, job in choices(check)]


def of_cpu(check, job):
    """The same requests on the CPU target, on one rank."""
    command = check.mpk_run(Job(job.model, 1, logprobs=LOGPROBS))
    command[command.index("--backend") + 1] = "cpu"
    return parsed(check.command(command, 60))


def compare(expected, found, dtype):
    """What is wrong or None, the compared tokens, those outside the best, and the largest share of the allowed difference."""
    compared, outside, share = 0, 0, 0.0
    for index, (ours, theirs) in enumerate(zip(found["requests"], expected["requests"], strict=True)):
        steps = zip(ours["tokens"], ours["token_logprobs"], ours["logprobs"], theirs["tokens"], theirs["token_logprobs"], strict=True)
        for step, (token, logprob, best, wanted, wanted_logprob) in enumerate(steps):
            if token != wanted:
                break
            where = f"request {index} step {step}, token {token}"
            if logprob is None:
                return f"{where} has no log-probability", compared, outside, share
            listed = dict(map(tuple, best))
            outside += token not in listed
            if listed.get(token, logprob) != logprob:
                return f"{where}: {logprob}, but {listed[token]} in the list of the best", compared, outside, share
            share = max(share, abs(logprob - wanted_logprob) / tolerance(dtype, wanted_logprob))
            if not share <= 1:
                return f"{where}: log-probability {logprob}, on the CPU {wanted_logprob}", compared, outside, share
            compared += 1
    return None, compared, outside, share


def run(check):
    """All comparisons."""
    cpu = {}
    found = choices(check)
    for (name, job), done in zip(found, check.run_jobs([job for _, job in found], 60), strict=True):
        if name not in cpu:
            cpu[name] = of_cpu(check, job)
        what, result = f"sampled {name} {job.what()}", parsed(done)
        if result is None or cpu[name] is None:
            check.failed(what, done.problem() if result is None else "the CPU target failed")
            continue
        problem, compared, outside, share = compare(cpu[name], result, models.expected(name)["dtype"])
        count = STEPS * len(result["requests"])
        if problem is None and compared < SHARE * count:
            problem = f"only {compared} of {count} tokens are those of the CPU"
        if problem is None and outside * 2 < compared:
            problem = f"only {outside} of {compared} tokens are outside the best {LOGPROBS}"
        check.judge(problem is None, what, problem or f"{compared} of {count} tokens are those of the CPU, {outside} of them outside the best "
                    f"{LOGPROBS}; log-probabilities differ by at most {100 * share:.0f} % of what may differ")

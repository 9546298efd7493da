"""Checks that results have the same bits: between repeats, over 10000 decode steps in one launch, and over placements, transports
and lowerings.

Repeats are requests with the same prompt and one slot, so that they run one after the other through the same graphs:
many repeats per launch.
"""

import models
from common import LOWERINGS, PLACEMENTS, TRANSPORTS, Job, bits, parsed

REPEATS, IN_LAUNCH, REPEAT_TOKENS = 500, 100, 8
STEPS, STEP_TOKENS = 10_000, 64


def prompts(count):
    """The first prompts of the trained example."""
    return [request["prompt_tokens"] for request in models.expected("tiny")["requests"][:count]]


def repeat_model(check):
    """IN_LAUNCH times the same prompt."""
    return models.tiny_sequential(check, prompts(1) * IN_LAUNCH, REPEAT_TOKENS, "repeats")


def long_model(check):
    """Enough requests for STEPS decode steps, from four prompts in rotation."""
    count = -(-STEPS // (STEP_TOKENS - 1))
    return models.tiny_sequential(check, (prompts(4) * count)[:count], STEP_TOKENS, "long")


def choice_jobs(check, ranks, new_tokens=None):
    """Every placement, lowering and transport."""
    model = models.fixture_model(check, "tiny", new_tokens=new_tokens, suffix=f"-{new_tokens}" if new_tokens else "")
    lowerings, transports = (LOWERINGS, TRANSPORTS if check.cuda else [None]) if ranks > 1 else ([None], [None])
    return [Job(model, ranks, placement, lowering, transport, models.LOGPROBS)
            for lowering in lowerings for placement in PLACEMENTS for transport in transports]


def wanted_ranks(check):
    """Numbers of ranks for which choices are compared."""
    return check.ranks() if check.cuda else [1, 2]


def repeat_jobs(check):
    """[(name, launches, job)]: the case of 4 ranks, or of as many as there are GPUs."""
    ranks = max(check.ranks()) if check.cuda else 2
    launches = REPEATS // IN_LAUNCH
    first = {"allreduce": "one-shot"} if ranks > 1 else {}
    found = [("static", launches, Job(repeat_model(check), ranks, "static", logprobs=models.LOGPROBS, **first))]
    if ranks > 1:
        others = [("dynamic", "copy-reduce", "nvshmem"), ("static", "two-shot", "p2p"), ("dynamic", "one-shot", "p2p")]
        found += [(f"{p} {a}", 1, Job(repeat_model(check), ranks, p, a, t, models.LOGPROBS)) for p, a, t in others]
    else:
        found.append(("dynamic", 1, Job(repeat_model(check), 1, "dynamic", logprobs=models.LOGPROBS)))
    return found


def long_jobs(check):
    """One launch of many steps for each number of ranks."""
    found = []
    for ranks in sorted({1, max(check.ranks())}) if check.cuda else [2]:
        choice = {"allreduce": "one-shot"} if ranks > 1 else {}
        found.append(Job(long_model(check), ranks, "static", logprobs=models.LOGPROBS, **choice))
        found.append(Job(long_model(check), ranks, "dynamic", logprobs=models.LOGPROBS, **choice))
    return found


def jobs(check):
    """All launches."""
    return ([job for ranks in wanted_ranks(check) for job in choice_jobs(check, ranks)]
            + [job for _, _, job in repeat_jobs(check)] + long_jobs(check))


def request_bits(request):
    """Tokens and log-probabilities of a request."""
    return repr((request["tokens"], request["logprobs"]))


def compare_choices(check, ranks, new_tokens=None):
    """Placements and transports must agree at each lowering; whether lowerings agree is only reported."""
    choices = choice_jobs(check, ranks, new_tokens)
    found, problems = {}, []
    for job, done in zip(choices, check.run_jobs(choices, 40)):
        result = parsed(done)
        if result is None:
            problems.append(f"{job.what()}: {done.problem()}")
            continue
        found.setdefault(job.allreduce, []).append((job.what(), bits(result)))
    for runs in found.values():
        problems += [f"{what} is not {runs[0][0]}" for what, value in runs if value != runs[0][1]]
    distinct = len({runs[0][1] for runs in found.values()})
    same = "all lowerings agree too" if distinct == 1 else f"{distinct} results over {len(found)} lowerings"
    check.judge(not problems, f"bits choices N={ranks}",
                "; ".join(problems[:4]) or f"{len(choices)} runs agree over placements and transports; {same}")


def run_repeats(check):
    """Runs one case REPEATS times."""
    results = {}
    for name, launches, job in repeat_jobs(check):
        ranks, first, count, problem = job.ranks, None, 0, None
        for done in check.run_jobs([job] * launches, 60):
            result = parsed(done)
            if result is None:
                problem = done.problem()
                break
            for index, request in enumerate(result["requests"]):
                value = request_bits(request)
                first = first or value
                count += 1
                if value != first:
                    problem = f"repetition {index} in a launch gave different bits"
        results[name] = first
        check.judge(problem is None, f"bits repeats N={ranks} {name}", problem or f"{count} repeats, one result")
    if len(results) > 1 and all(results.values()):
        same = len(set(results.values())) == 1
        check.ok("bits repeats over choices", "all agree" if same else f"{len(set(results.values()))} results (for information only)")
    if check.cuda and check.gpus < 4:
        check.skipped("bits repeats N=4", "needs 4 GPUs")


def run_long(check):
    """STEPS decode steps in one launch."""
    for job in long_jobs(check):
        done = check.run_job(job, 90)
        name = f"bits {STEPS} steps N={job.ranks} {job.placement}"
        result = parsed(done)
        if result is None:
            check.failed(name, done.problem())
            continue
        first, other = {}, None
        for index, request in enumerate(result["requests"]):
            value = first.setdefault(tuple(request["prompt_tokens"]), request_bits(request))
            if request_bits(request) != value and other is None:
                other = index
        timing = result["timing"]
        enough = timing["decode_steps"] >= STEPS
        check.judge(other is None and enough, name,
                    f"request {other} differs from the first of its prompt" if other is not None else
                    f"{timing['decode_steps']} steps, {timing['ms_per_token']:.4f} ms each, {len(result['requests'])} "
                    f"requests of {len(first)} prompts")
        check.figures.setdefault("tiny decode", {})[job.what()] = timing


def run(check):
    """Runs all comparisons."""
    for ranks in wanted_ranks(check):
        compare_choices(check, ranks)
    run_repeats(check)
    run_long(check)

"""Compares sampled tokens, and the log-probability of each, with the CPU target.

The noise is a function of seed, position and token, so both targets draw the same tokens, up to near ties: they add in
different orders. The temperature is so high that most tokens are not among the best, whose log-probabilities come from
another task. After the first token that differs, a request is not compared further.

Long lists (top-k over 64) take another way than short ones. So they have runs of their own, with so few workers that a task has
several samples, and so many tokens in the vocabulary that a sample has several parts. An error there may change few draws. So every
token must be the CPU's, unless it is a near tie: then the CPU itself draws another one with slightly different settings.
"""

import json
from dataclasses import dataclass

import models
from common import Job, covering, parsed
from golden import tolerance

FIXTURES = ["qwen3", "tiny"]
TEMPERATURE, SEED, STEPS, LOGPROBS = 6.0, 3, 12, 2
# The longest list that is found without digits (kGroups in gpu_few.cuh).
SHORT = 64
LISTS = [{"top-k": 100}, {"top-k": 300}, {"top-k": 100, "top-p": 0.9}, {"top-k": 300, "top-p": 0.9}]
LIST_REQUESTS, LIST_WORKERS, LIST_VOCABULARY, LIST_TEMPERATURE = 8, 4, 9040, 3.0
NEARBY = (0.98, 1.02)  # factors of a list's settings, for near ties
SHARE = 0.5  # of all tokens that must be compared; two near ties in a row are rare


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    dtype: str
    job: Job
    # Tokens are counted that are not among so many of the highest.
    best: int = LOGPROBS
    # Share of the compared tokens that must not be among the best.
    outside: float = 0.5
    # Options of the CPU target. With more than one tuple, a token that they do not agree on is a near tie; otherwise each may be one.
    settings: tuple = ((),)


def sampled_model(check, name):
    """A fixture with sampled requests."""
    prompts = [request["prompt_tokens"] for request in models.expected(name)["requests"]]
    generate = {"prompt_tokens": prompts, "max_new_tokens": STEPS, "ignore_eos": True, "temperature": TEMPERATURE, "seed": SEED}
    return models.checkpoint_model(check, f"{name}-sampled", models.fixture_folder(name), prompts, STEPS, generate=generate)


def list_model(check):
    """A small model with random weights and a large vocabulary. All of its requests are sampled together."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": LIST_VOCABULARY,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "hidden_act": "silu",
    }
    prompts = [models.prompt(2, LIST_VOCABULARY, first) for first in range(LIST_REQUESTS)]
    generate = {"prompt_tokens": prompts, "max_new_tokens": STEPS, "ignore_eos": True, "seed": SEED, "temperature": LIST_TEMPERATURE}
    return models.write(check, "sampled-lists", {
        "schema": "mpk-model/1", "name": "lists", "config": config, "weights": {"random": {"seed": 1}}, "generate": generate,
        "max_batch": LIST_REQUESTS, "max_seq_len": 64})


def choices(check):
    """All comparisons."""
    found = [Case(name, models.expected(name)["dtype"], Job(sampled_model(check, name), ranks, logprobs=LOGPROBS, **choice))
             for name in FIXTURES for ranks in check.ranks() for choice in covering(ranks, index_of(name))]
    for index, values in enumerate(LISTS):
        settings = tuple(list_options(values, factor) for factor in (1, *NEARBY))
        for ranks in check.ranks():
            rows = covering(ranks, index)
            job = Job(list_model(check), ranks, logprobs=LOGPROBS, workers=LIST_WORKERS, options=settings[0], **rows[index % len(rows)])
            name = " ".join(f"{option} {value}" for option, value in values.items())
            found.append(Case(name, "bfloat16", job, SHORT, 0.1, settings))
    return found


def list_options(values, factor):
    """Options for a list's values times a factor."""
    scaled = {"temperature": LIST_TEMPERATURE} | values
    return tuple(f"--{name}={round(value * factor) if name == 'top-k' else value * factor}" for name, value in scaled.items())


def index_of(name):
    """Fixtures take different lowerings and transports."""
    return FIXTURES.index(name)


def jobs(check):
    """What is launched on GPUs."""
    return [case.job for case in choices(check)]


def judge_tasks(check):
    """Fails if the tasks of the long lists have one sample each: nothing would be checked between two samples of a task."""
    for ranks in check.ranks():
        folder = check.work / f"sampled-lists-{ranks}"
        done = check.command([check.binary, list_model(check), "--ranks", ranks, "--workers", LIST_WORKERS, "--emit-graph", folder])
        if done.status != 0:
            check.failed(f"sampled lists N={ranks}", done.problem())
            continue
        graph = json.loads((folder / "rank-0.task_graph.json").read_text())
        # The last of `[part, first token, columns, first sample, samples]`.
        samples = min(task["args"][4] for task in graph["all_tasks"] if task["task_type"] == "sample_partial")
        check.judge(samples > 1, f"sampled lists N={ranks}", f"a task has {samples} samples or more")


def of_cpu(check, case):
    """The same requests on the CPU target, on one rank, and the number of tokens of each before its first near tie."""
    results = []
    for options in case.settings:
        command = check.mpk_run(Job(case.job.model, 1, logprobs=case.best, options=options))
        command[command.index("--backend") + 1] = "cpu"
        results.append(parsed(check.command(command, 60)))
    if None in results:
        return None
    if len(results) == 1:
        return results[0], [0] * len(results[0]["requests"])
    tokens = zip(*([request["tokens"] for request in result["requests"]] for result in results))
    return results[0], [next((step for step, drawn in enumerate(zip(*runs)) if len(set(drawn)) > 1), len(runs[0])) for runs in tokens]


def compare(expected, clear, found, dtype):
    """What is wrong or None, the compared tokens, those outside the best, and the largest share of the allowed difference. Of each
    request, the first `clear` tokens must be equal."""
    compared, outside, share = 0, 0, 0.0
    for index, (ours, theirs) in enumerate(zip(found["requests"], expected["requests"], strict=True)):
        steps = zip(ours["tokens"], ours["token_logprobs"], ours["logprobs"], theirs["tokens"], theirs["token_logprobs"],
                    theirs["logprobs"], strict=True)
        for step, (token, logprob, listed, wanted, wanted_logprob, best) in enumerate(steps):
            if token != wanted and step < clear[index]:
                return f"request {index} step {step}: token {token}, on the CPU {wanted}, and no near tie", compared, outside, share
            if token != wanted:
                break
            where = f"request {index} step {step}, token {token}"
            if logprob is None:
                return f"{where} has no log-probability", compared, outside, share
            outside += token not in dict(map(tuple, best))
            listed = dict(map(tuple, listed))
            if listed.get(token, logprob) != logprob:
                return f"{where}: {logprob}, but {listed[token]} in the list of the best", compared, outside, share
            share = max(share, abs(logprob - wanted_logprob) / tolerance(dtype, wanted_logprob))
            if not share <= 1:
                return f"{where}: log-probability {logprob}, on the CPU {wanted_logprob}", compared, outside, share
            compared += 1
    return None, compared, outside, share


def run(check):
    """All comparisons."""
    judge_tasks(check)
    cpu = {}
    found = choices(check)
    for case, done in zip(found, check.run_jobs([case.job for case in found], 60), strict=True):
        if case.name not in cpu:
            cpu[case.name] = of_cpu(check, case)
        what, result = f"sampled {case.name} {case.job.what()}", parsed(done)
        if result is None or cpu[case.name] is None:
            check.failed(what, done.problem() if result is None else "the CPU target failed")
            continue
        problem, compared, outside, share = compare(*cpu[case.name], result, case.dtype)
        count = STEPS * len(result["requests"])
        if problem is None and compared < SHARE * count:
            problem = f"only {compared} of {count} tokens are those of the CPU"
        clear = sum(cpu[case.name][1])
        if problem is None and len(case.settings) > 1 and clear < SHARE * count:
            problem = f"near ties on the CPU leave only {clear} of {count} tokens"
        if problem is None and outside < case.outside * compared:
            problem = f"only {outside} of {compared} tokens are outside the best {case.best}"
        check.judge(problem is None, what, problem or f"{compared} of {count} tokens are those of the CPU, {outside} of them outside the best "
                    f"{case.best}; log-probabilities differ by at most {100 * share:.0f} % of what may differ" + (f"; no near tie in {clear}" if clear else ""))

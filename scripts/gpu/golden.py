"""Compares tokens and log-probabilities with Hugging Face transformers on the same device.

The fixtures and the trained example are compared with their expected.json (float32). Transformers on this device must
give the same, in float32 and in the stored type. A model of 2 B parameters that huggingface.py makes here is compared in
the same way. A token must be equal if expected.json says that the winner is clear, as it is everywhere in random models.
In the trained model a token may differ if the margin is below 0.15. Then the comparison of that request ends, and the
report names the step.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import models
from common import REPOSITORY, Job, covering, every_choice, parsed, say

CLEAR_WINNER = 0.15
SHORT = 6  # new tokens where ranks share a GPU
HUGGINGFACE_LIMIT = 130


class Wrong(Exception):
    """A request that is not as expected."""


def tolerance(dtype, logprob):
    """The allowed differences. For f32 and f16 they are smaller than promised, to catch small errors."""
    if dtype == "float32":
        return 0.0005
    return (0.02 if dtype == "float16" else 0.12) * (1 + abs(logprob))


def compare_top(expected, found, dtype, what):
    """Compares the best tokens of a step; returns the largest share of the allowed difference."""
    if len(found) != len(expected):
        raise Wrong(f"{what}: {len(found)} top tokens")
    ours, theirs, share = dict(map(tuple, found)), dict(map(tuple, expected)), 0.0
    for token, logprob in expected:
        # A token that is not among ours is below our last one.
        off = abs(ours[token] - logprob) if token in ours else max(0.0, logprob - found[-1][1])
        share = max(share, off / tolerance(dtype, logprob))
    for token, logprob in found:
        if token not in theirs:
            share = max(share, (logprob - expected[-1][1]) / tolerance(dtype, logprob))
    if not share <= 1:
        raise Wrong(f"{what}: log-probabilities {found}, expected {[[t, round(v, 4)] for t, v in expected]}")
    return share


def compare_request(expected, found, document, trained, what):
    """Compares a request; returns the largest share, and where tokens differ within the allowed difference."""
    if found["prompt_tokens"] != expected["prompt_tokens"]:
        raise Wrong(f"{what}: another prompt")
    share, steps = 0.0, len(found["tokens"])
    if not 0 < steps <= len(expected["tokens"]) or len(found["logprobs"]) != steps:
        raise Wrong(f"{what}: {steps} tokens, {len(found['logprobs'])} lists of log-probabilities")
    for step, (token, top) in enumerate(zip(found["tokens"], found["logprobs"])):
        where = f"{what} step {step}"
        share = max(share, compare_top(expected["logprobs"][step], top, document["dtype"], where))
        if token != top[0][0]:
            raise Wrong(f"{where}: token {token} is not the best")
        if token != expected["tokens"][step]:
            margin = expected["margins"][step]
            if not trained or margin >= CLEAR_WINNER:
                raise Wrong(f"{where}: token {token}, expected {expected['tokens'][step]}, which leads by {margin:.3f}")
            return share, [f"{where}: near tie (margin {margin:.3f})"]
    return share, []


def compare(document, result, steps, trained):
    """Compares a run; returns what is wrong or None, the largest share of the allowed difference, and near ties."""
    share, ties = 0.0, []
    if len(result["requests"]) != len(document["requests"]):
        return f"{len(result['requests'])} requests", share, ties
    for index, (expected, found) in enumerate(zip(document["requests"], result["requests"])):
        if len(found["tokens"]) != steps:
            return f"request {index}: {len(found['tokens'])} tokens instead of {steps}", share, ties
        try:
            own, more = compare_request(expected, found, document, trained, f"request {index}")
        except Wrong as wrong:
            return str(wrong), share, ties
        share, ties = max(share, own), ties + more
    return None, share, ties


def fixture_jobs(check):
    """[(fixture, new tokens, job)]."""
    found = []
    choices = every_choice if check.thorough else covering
    for index, name in enumerate(models.FIXTURES):
        model = models.fixture_model(check, name)
        steps = len(models.expected(name)["requests"][0]["tokens"])
        for ranks in check.ranks() if check.cuda else [1, 2]:
            for choice in choices(ranks) if ranks == 1 or check.thorough else covering(ranks, index + ranks // 2):
                found.append((name, steps, Job(model, ranks, logprobs=models.LOGPROBS, prefix_cache="on", **choice)))
    if check.cuda:
        found += pushed_jobs(check)
        if check.gpus == 1:
            found += shared_gpu_jobs(check, "qwen3", 2, covering(2))
        steps = None if check.gpus >= 4 else SHORT
        found += shared_gpu_jobs(check, "qwen3", 8, covering(8) if check.gpus >= 4 else covering(8)[:1], steps)
        if check.gpus >= 4:
            for index, name in enumerate(["mistral", "llama", "qwen2", "tiny"]):
                found += shared_gpu_jobs(check, name, 8, [covering(8, index)[index % 3]], SHORT)
    return found


def pushed_jobs(check):
    """Batches of 9 requests on several ranks whose wide products push their sums. Such products are wide only if there are more tiles of 16
    columns than workers. The fixtures are small, so there are few workers."""
    name, slots = "llama", 12
    steps = min(SHORT, len(models.expected(name)["requests"][0]["tokens"]))
    model = models.fixture_model(check, name, new_tokens=steps, suffix=f"-{slots}", max_batch=slots)
    return [(name, steps, Job(model, ranks, "static", "one-shot", "p2p", models.LOGPROBS, workers=4, prefix_cache="on"))
            for ranks in check.ranks() if ranks > 1]


def shared_gpu_work(check, ranks):
    """[(fixture, new tokens, job)] of all fixtures with more ranks than GPUs."""
    return [work for index, name in enumerate(models.FIXTURES) for work in shared_gpu_jobs(check, name, ranks, covering(ranks, index))]


def shared_gpu_jobs(check, name, ranks, choices, steps=SHORT):
    """More ranks than GPUs: correct, but slow."""
    full = len(models.expected(name)["requests"][0]["tokens"])
    steps = min(steps or full, full)
    model = models.fixture_model(check, name, new_tokens=steps, suffix=f"-{steps}")
    return [(name, steps, Job(model, ranks, logprobs=models.LOGPROBS, prefix_cache="on", alone=True, **choice)) for choice in choices]


def large_jobs(check, model):
    """Jobs of the large model. Until it exists, `model` is a model of the same shape."""
    found = []
    for ranks in check.ranks():
        found += [Job(model, ranks, logprobs=models.LOGPROBS, prefix_cache="on", **choice) for choice in covering(ranks, ranks // 4)]
    if check.gpus >= 4:
        found.append(Job(model, 8, logprobs=models.LOGPROBS, prefix_cache="on", alone=True, **covering(8)[0]))
    return found


def jobs(check):
    """All launches whose code must be compiled."""
    found = [job for _, _, job in fixture_jobs(check)]
    if check.cuda:
        found += large_jobs(check, models.large_shape(check))
    return found


def start_huggingface(check):
    """Starts transformers, on its own GPU if there are several; returns its folder and a function that waits for it."""
    folder = check.work / "huggingface"
    device = "cuda" if check.cuda else "cpu"
    command = [sys.executable, REPOSITORY / "scripts/gpu/huggingface.py", "--device", device, "--out", folder,
               "--large", "full" if check.cuda else "small", "--seed", check.seed]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    own = 1 if check.gpus > 1 else 0
    limit = check.time_left(HUGGINGFACE_LIMIT)

    def run(environment):
        return check.finish(check.start(command, {"CUDA_VISIBLE_DEVICES": "0"} | environment | quiet), limit)

    pool = ThreadPoolExecutor(1)
    future = pool.submit(check.on_gpus, own, run) if own else pool.submit(run, {})
    pool.shutdown(wait=False)
    return folder, future.result


def run_compared(check, work, document_of, trained_of, timeout):
    """Runs jobs [(name, steps, job)] and gives a verdict for each model and number of ranks."""
    results = check.run_jobs([job for _, _, job in work], timeout)
    groups = {}
    for (name, steps, job), done in zip(work, results):
        group = groups.setdefault((name, job.ranks), {"problems": [], "share": 0.0, "ties": [], "runs": 0, "ms": []})
        group["runs"] += 1
        result = parsed(done)
        if result is None:
            group["problems"].append(f"{job.what()}: {done.problem()}")
            continue
        problem, share, ties = compare(document_of(name), result, steps, trained_of(name))
        group["share"] = max(group["share"], share)
        group["ties"] += ties
        group["ms"].append(result["timing"]["ms_per_token"])
        if problem:
            group["problems"].append(f"{job.what()}: {problem}")
    for (name, ranks), group in groups.items():
        detail = f"{group['runs']} runs, log-probabilities differ by at most {100 * group['share']:.0f} % of the tolerance"
        if group["ties"]:
            detail += f"; {len(group['ties'])} near ties: {sorted(set(group['ties']))[:4]}"
        if group["problems"]:
            detail = f"{len(group['problems'])} of {group['runs']} runs wrong: " + "; ".join(group["problems"][:3])
        check.judge(not group["problems"], f"golden {name} N={ranks}", detail)
        check.figures.setdefault("golden", {})[f"{name} N={ranks}"] = {
            "runs": group["runs"], "worst_share": group["share"], "near_ties": group["ties"], "ms_per_token": group["ms"]}


def report_huggingface(check, folder, done):
    """Verdicts on what transformers gives here."""
    results = json.loads((folder / "fixtures.json").read_text()) if (folder / "fixtures.json").exists() else []
    if not results:
        check.failed("golden huggingface", done.problem())
    for result in results:
        trained = result["name"] == "tiny"
        exact, stored = result["float32"], result["stored"]
        clear = [step for kind in (exact, stored) for step in kind["differing"] if not trained or step[2] >= CLEAR_WINNER]
        allowed = tolerance(result["dtype"], 0.0)
        right = not clear and exact["worst_error"] < 0.002 and stored["worst_error"] <= allowed
        check.judge(right, f"golden huggingface {result['name']}",
                    f"on this device {len(clear)} of {result['steps']} clear tokens differ; error / (1 + |logprob|) in "
                    f"float32 {exact['worst_error']:.1e}, in {result['dtype']} {stored['worst_error']:.3f}"
                    + (f"; near ties {stored['differing']}" if stored["differing"] and not clear else ""))
    check.figures["huggingface"] = results


def run(check):
    """All comparisons."""
    folder, wait = start_huggingface(check)
    # First the jobs that need few GPUs, while transformers uses one.
    run_compared(check, sorted(fixture_jobs(check), key=lambda work: work[2].ranks), models.expected,
                 lambda name: name == "tiny", 45)
    say("waiting for transformers")
    done = wait()
    report_huggingface(check, folder, done)
    large = folder / "large"
    if not (large / "expected.json").exists():
        check.failed("golden large", f"transformers made no large model: {done.problem()}")
        return
    document = json.loads((large / "expected.json").read_text())
    lacking = document["lengths_without_clear_prompt"]
    worst = max((request["bf16_error"] for request in document["requests"]), default=0.0)
    detail = (f"{document['parameters'] / 1e9:.2f} B parameters, prompts of "
              f"{[len(request['prompt_tokens']) for request in document['requests']]} tokens, bf16 error {worst:.3f}, made in "
              f"{done.seconds:.0f} s")
    check.judge(len(lacking) <= 2 and len(document["requests"]) >= 3, "golden large model",
                detail + (f"; no clear prompt of lengths {lacking}" if lacking else ""))
    prompts = [request["prompt_tokens"] for request in document["requests"]]
    if not prompts:
        return
    steps = len(document["requests"][0]["tokens"])
    model = models.checkpoint_model(check, "large", large, prompts, steps)
    check.background["large model"] = model
    jobs_of_large = large_jobs(check, model) if check.cuda else [
        Job(model, n, logprobs=models.LOGPROBS, prefix_cache="on", **choice) for n in (1, 2) for choice in covering(n)]
    run_compared(check, [("large", steps, job) for job in jobs_of_large], lambda _: document, lambda _: False, 60)

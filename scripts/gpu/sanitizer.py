"""compute-sanitizer on the trained example: memcheck, racecheck and synccheck at one rank, memcheck at two.

Few workers and few tokens, since the tools slow a kernel down a hundredfold.
"""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import models
from common import Job, OutOfTime

WORKERS, NEW_TOKENS, LIMIT = 8, 2, 80
# racecheck does not see the barriers before the one lane that frees a stage or hands on a slot: there every lane does it.
RACECHECK = (("MPK_DEBUG_EVERY_LANE_ARRIVES", "1"),)


def model(check):
    """One short prompt, one slot."""
    prompt = models.expected("tiny")["requests"][0]["prompt_tokens"][:5]
    return models.checkpoint_model(check, "sanitizer", models.fixture_folder("tiny"), [prompt], NEW_TOKENS, max_batch=1,
                                   runtime={"prefill_chunk": 8})


def cases(check):
    """[(tool, job)]."""
    base = {"placement": "static", "logprobs": models.LOGPROBS, "workers": WORKERS, "deadline": 70.0}
    found = [(tool, Job(model(check), 1, **base, environment=RACECHECK if tool == "racecheck" else ()))
             for tool in ("memcheck", "racecheck", "synccheck")]
    found.append(("memcheck", Job(model(check), 1, **{**base, "placement": "dynamic"})))
    two = 2 if check.gpus >= 2 else None
    if two:
        found += [("memcheck", Job(model(check), 2, allreduce=lowering, **base)) for lowering in ("copy-reduce", "one-shot")]
    return found


def jobs(check):
    """All launches' code."""
    return [job for _, job in cases(check)]


def run(check):
    """Runs the tools."""
    if not check.cuda or shutil.which("compute-sanitizer") is None:
        check.skipped("sanitizer", "needs a GPU and compute-sanitizer")
        return

    def one(case):
        tool, job = case
        wrapper = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", "--print-limit", "100"]
        try:
            return check.run_job(job, LIMIT, wrapper)
        except OutOfTime:
            return None

    work = cases(check)
    with ThreadPoolExecutor(max(1, check.gpus)) as pool:
        results = list(pool.map(one, work))
    for (tool, job), done in zip(work, results):
        name = f"sanitizer {tool} {job.what()}"
        if done is None:
            check.failed(name, "not run, because the part has run out of time")
            continue
        text = done.stdout + done.stderr
        summaries = re.findall(r"=+ (?:ERROR|RACECHECK) SUMMARY: (.*)", text)
        clean = len(summaries) >= job.ranks and all(re.match(r"0 (errors|hazards)", s) for s in summaries)
        lines = text.splitlines()
        at = next((i for i, line in enumerate(lines) if re.search(r"=+ (Error|Warning|Invalid|Barrier)", line)), len(lines))
        first = " / ".join(line.lstrip("= ")[:160] for line in lines[at:at + 8])
        right = check.judge(clean and done.status == 0, name, f"{summaries[0]} after {done.seconds:.0f} s" if clean and
                            done.status == 0 else f"{summaries} {first} {done.problem()}")
        if not right:
            check.keep(f"sanitizer-{tool}-{job.ranks}-{job.placement}.log", text)
    if check.gpus < 2:
        check.skipped("sanitizer memcheck N=2", "needs 2 GPUs")

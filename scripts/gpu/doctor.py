"""`mpk-run doctor`, and the errors of a bad environment: exit status 3 and the fix."""

import models
from common import Job, parsed


def jobs(check):
    """All launches, so that their kernels are compiled before the part's time begins."""
    return [*environment_jobs(check), *(job for _, job in route_jobs(check))]


def environment_jobs(check):
    """One rank, two ranks, and a model that no GPU has room for."""
    tiny = models.fixture_model(check, "tiny")
    large = models.shape_model(check, "llama3-70b", 16, 40960)
    return Job(tiny, 1, logprobs=models.LOGPROBS), Job(tiny, 2, logprobs=models.LOGPROBS), Job(large, 1)


def route_jobs(check):
    """[(name, job)]: the ways in which ranks find each other and launch, if there are several."""
    if check.gpus < 2:
        return []
    job = Job(models.fixture_model(check, "tiny"), 2, "static", "one-shot", logprobs=models.LOGPROBS)
    return [("bootstrap by MPI", job.with_options("--bootstrap", "mpi")),
            ("cooperative launch", job.with_options("--launch", "cooperative"))]


def run_routes(check):
    """Each gives the expected tokens."""
    for name, job in route_jobs(check):
        result = parsed(done := check.run_job(job, 40))
        wanted = models.expected("tiny")["requests"][0]["tokens"][:4]
        right = result is not None and result["requests"][0]["tokens"][:4] == wanted
        said = next((line for line in done.stderr.splitlines() if "launch by" in line), "")
        check.judge(right, f"doctor {name}", said[-120:] if right else done.problem() if result is None else "wrong tokens")


def run(check):
    """Checks the report, and three environments that each lack something."""
    done = check.command([check.binary, "doctor"], 30)
    words = ["driver", "NVSHMEM", "MPI"]
    missing = [word for word in words if word.lower() not in done.stdout.lower() + done.stderr.lower()]
    check.judge(done.status in ((0,) if check.cuda else (0, 3)) and not missing, "doctor",
                f"exit status {done.status}, {len(done.stdout.splitlines())} lines" if not missing else
                f"does not mention {missing}: {done.problem()}")
    check.figures["doctor"] = done.stdout.splitlines()[:80]
    if not check.cuda:
        check.skipped("doctor bad environments", "needs a GPU")
        return
    command, two, large = map(check.mpk_run, environment_jobs(check))
    large += ["--prompt-tokens", "1,2,3"]
    cases = [("no GPU visible", command, {"CUDA_VISIBLE_DEVICES": ""}, []),
             ("NVSHMEM missing", two, {"NVSHMEM_HOME": "/nonexistent"}, ["nvshmem"]),
             ("not enough GPU memory", large, {"CUDA_VISIBLE_DEVICES": "0"}, ["memory"])]
    for name, parts, environment, words in cases:
        done = check.command(parts, 45, environment)
        text = done.stderr.lower()
        if words == ["nvshmem"] and done.status == 0:
            check.skipped(f"doctor {name}", "it was found in a place other than NVSHMEM_HOME")
            continue
        right = done.status == 3 and all(word in text for word in words) and "panicked" not in text
        said = next((line for line in done.stderr.splitlines() if "error" in line.lower()), "")
        check.judge(right, f"doctor {name}", f"exit status 3: {said[:300]}" if right else done.problem())
    run_routes(check)

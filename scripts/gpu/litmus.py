"""Tests the memory orders that the protocol uses, between blocks and between GPUs (litmus.cu)."""


def jobs(_check):
    """No launches of mpk-run."""
    return []


def run(check):
    """Builds and runs the program. The control run, without acquire and release, shows whether it would find an error."""
    if not check.cuda:
        check.skipped("litmus", "needs a GPU")
        return
    ran = check.cuda_program("litmus")
    if ran is None:
        check.skipped("litmus", "needs nvcc")
        return
    rows, done = ran
    check.figures["litmus"] = rows
    if done.status != 0 or not rows:
        check.failed("litmus", done.problem())
    for row in rows:
        text = f"{row['rounds']} rounds of {row['pairs']} pairs of blocks, {row['wrong']} words wrong"
        if row["test"].startswith("control"):
            check.ok(f"litmus {row['test']}", f"{text} ({'errors found, as expected' if row['wrong'] else 'no errors found; for information only'})")
        else:
            check.judge(not row["wrong"] and not row["late"], f"litmus {row['test']}", text + (", late" if row["late"] else ""))
    if check.gpus < 2:
        check.skipped("litmus to a peer", "needs 2 GPUs")

"""Checks four ranks on fewer GPUs. They are slow, because a GPU runs one rank at a time, but results must be right.

With four GPUs, the other parts check all this with one GPU per rank.
"""

import abort
import bits
import golden
import models
import operators
import stall

RANKS = 4
TOKENS = 12


def jobs(check):
    """All launches' code."""
    if not check.cuda or check.gpus >= RANKS:
        return []
    return ([job for _, _, job in golden.shared_gpu_work(check, RANKS)] + bits.choice_jobs(check, RANKS, TOKENS)
            + [job for _, job in operators.work(check, [RANKS])] + stall.stalled_jobs(check, RANKS)
            + abort.stuck_jobs(check, RANKS))


def run(check):
    """Tokens, bits, operators, stalls and faults."""
    if not check.cuda or check.gpus >= RANKS:
        check.skipped("shared", "only for 1 to 3 GPUs; with more, each rank has its own GPU")
        return
    golden.run_compared(check, golden.shared_gpu_work(check, RANKS), models.expected, lambda name: name == "tiny", 60)
    bits.compare_choices(check, RANKS, TOKENS)
    operators.run_worlds(check, [RANKS])
    stall.run_stalls(check, RANKS)
    abort.run_faults(check, RANKS)

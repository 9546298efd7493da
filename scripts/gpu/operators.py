"""Compares every task type with a float64 reference, over shapes, types, tails and row counts. Inputs are new each time.

Assumes that mpk-run fills what tasks write with a pattern of NaNs before the launch of an op graph
(MPK_DEBUG_POISON=1 in the environment, or always).
"""

import os
import re

import numpy as np

import operator_cases as alone
import shared_cases as shared
from common import Job, covering, every_choice, parsed
from op_graph import Graph

ROWS = {1: 16, 2: 1, 5: 4, 8: 2, 16: 8, 33: 16}  # rows: page size
# Rows of wide products, and how many shapes of each kind of operator; the outputs of many rows are long
WIDE_ROWS = {12: 6, 20: 6, 40: 4, 64: 6, 65: 4, 128: 4, 130: 4, 300: 3, 1025: 2, 2048: 1}
SHARED_ROWS = [1, 5, 16]
LONG_ROWS = {129: 8, 131: 4, 170: 256, 300: 64}  # graphs of attention only, with as many rows as a chunk of a prompt: page size
# Rows of several sequences in one iteration: the rows of each, page size, rotation of the shapes, attributes. `many` has more tasks
# than workers, so that a task has several heads and several slots; `long` has the steps for many rows on GPUs that have them
SEQUENCES = {
    "few": ([5, 1, 17, 2, 1, 9], 4, 0, {}),
    "many": ([1 + i % 4 for i in range(60)], 16, 2, {"splits": 1, "prefill": False}),
    "long": ([120, 1, 1, 130, 3, 1, 44], 64, 0, {}),
}
WORKERS = {"sequences-many": 4}  # of graphs that need few
POISON = (("MPK_DEBUG_POISON", "1"),)


def worlds_of(check):
    """Numbers of ranks."""
    return check.ranks() if check.cuda else [1, 2, 4]


def graphs(check, worlds):
    """[(graph, its model.json, ranks)] of all cases; MPK_CHECK_CASES (a regular expression) restricts them."""
    kept = check.background.setdefault("operator graphs", {})
    if tuple(worlds) in kept:
        return kept[tuple(worlds)]
    pattern = re.compile(os.environ.get("MPK_CHECK_CASES", ""))
    found = []
    for index, (rows, page) in enumerate(ROWS.items() if 1 in worlds else []):
        # Shapes rotate with the rows; values come from the seed.
        g = Graph(f"operators-{rows}", rows, max(1, rows // 2), np.random.default_rng([check.seed, rows]),
                  lambda case: bool(pattern.search(case)))
        alone.linears(g, index)
        alone.norms(g, index)
        alone.gated_products(g, index)
        alone.gated(g, index)
        alone.streams(g, index)
        alone.embeddings(g, index)
        alone.attentions(g, index, page)
        alone.sampling(g, index)
        found.append((g, 1))
    for index, (rows, count) in enumerate(WIDE_ROWS.items() if check.cuda and 1 in worlds else []):
        # If there are few rows, nearly all are sampled, so that products of gathered rows are wide too.
        samples = rows - 1 if rows <= 64 else 2
        g = Graph(f"operators-{rows}", rows, samples, np.random.default_rng([check.seed, rows]), lambda case: bool(pattern.search(case)))
        alone.linears(g, index, alone.WIDE_SHAPES, 2 * count)
        alone.norms(g, index)
        alone.gated_products(g, index, alone.WIDE_GATED, count)
        alone.gated(g, index, alone.WIDE_SHAPES, count)
        for shape in range(len(shared.WIDE_MLPS) if rows <= 300 else 1):
            shared.mlp(g, shape, shared.WIDE_MLPS)
        found.append((g, 1))
    if check.cuda and 1 in worlds:
        g = Graph("operators-cut", 1100, 1, np.random.default_rng([check.seed, 1100]), lambda case: bool(pattern.search(case)))
        alone.linears(g, 0, alone.CUT_SHAPES, 1)
        alone.gated(g, 0, alone.CUT_SHAPES, 1)
        found.append((g, 1))
    for world in worlds:
        for index, (rows, page) in enumerate(LONG_ROWS.items()):
            g = Graph(f"attention-{world}-{rows}", rows, 1, np.random.default_rng([check.seed, world, rows]),
                      lambda case: bool(pattern.search(case)))
            alone.attentions(g, 2 * index, page, world)
            found.append((g, world))
    for number, (name, (sequences, page, index, choice)) in enumerate(SEQUENCES.items() if 1 in worlds else []):
        g = Graph(f"sequences-{name}", sum(sequences), 1, np.random.default_rng([check.seed, 1, number, 7]),
                  lambda case: bool(pattern.search(case)), sequences)
        alone.attentions(g, index, page, **choice)
        alone.attentions(g, 5, page, product=72, **choice)
        found.append((g, 1))
    for world in [n for n in worlds if n > 1]:
        for index, rows in enumerate(SHARED_ROWS):
            index += world // 2 - 1
            g = Graph(f"collectives-{world}-{rows}", rows, max(1, rows // 2),
                      np.random.default_rng([check.seed, world, rows]), lambda case: bool(pattern.search(case)))
            shared.sums(g, index, world, check.seed % 2**31)
            shared.row_parallel(g, index)
            shared.column_parallel(g, index)
            shared.mlp(g, index)
            alone.embeddings(g, index, world)
            alone.attentions(g, index, ROWS[rows], world)
            alone.sampling(g, index, world)
            found.append((g, world))
    found = [(g, g.write(check.work), world) for g, world in found if g.cases]
    kept[tuple(worlds)] = found
    return found


def choices(check, g, world):
    """Placements, lowerings and transports for a graph: all over the graphs, some for each."""
    if check.thorough:
        return every_choice(world)
    if world == 1:
        return [{"placement": "static"}] + ([{"placement": "dynamic"}] if g.rows in (2, 33, 130) else [])
    table = covering(world, 0) + covering(world, 1)
    first = 2 * (SHARED_ROWS.index(g.rows) if g.rows in SHARED_ROWS else 0) + world // 4
    return [table[(first + step) % len(table)] for step in (0, 1, 2)]


def work(check, worlds):
    """[(graph, job)]."""
    return [(g, Job(path, world, workers=WORKERS.get(g.name), environment=POISON, prefix_cache=None, **choice)) for g, path, world in graphs(check, worlds)
            for choice in choices(check, g, world)]


def jobs(check):
    """All launches."""
    return [job for _, job in work(check, worlds_of(check))]


def run(check):
    """All cases."""
    run_worlds(check, worlds_of(check))


def run_worlds(check, worlds):
    """Runs every graph with every choice; gives a verdict for each kind of operator and number of ranks."""
    launches = work(check, worlds)
    results = check.run_jobs([job for _, job in launches], timeout=40)
    verdicts, worst = {}, {}
    for (g, job), done in zip(launches, results):
        result = parsed(done)
        if result is None:
            check.failed(f"operators {g.name} {job.what()}", done.problem())
            continue
        for what, problem, share in g.compare(result.get("outputs", {})):
            key = (what.split()[0], job.ranks)
            verdicts.setdefault(key, []).append(
                f"{what}, {g.rows} rows, {job.what()}: {problem}" if problem else None)
            worst[key] = max(worst.get(key, 0.0), share)
    for key, found in sorted(verdicts.items()):
        problems = [problem for problem in found if problem]
        name = f"operator {key[0]} N={key[1]}"
        detail = f"{len(found)} comparisons, errors at most {100 * worst[key]:.0f} % of the tolerance"
        if problems:
            detail = f"{len(problems)} of {len(found)} wrong (seed {check.seed}): " + "; ".join(problems[:3])
        check.judge(not problems, name, detail)
    check.figures.setdefault("operators", {}).update({
        f"{kind} N={ranks}": {"comparisons": len(verdicts[kind, ranks]), "worst_share": worst[kind, ranks]}
        for kind, ranks in verdicts
    })

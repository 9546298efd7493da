"""The cases of the operator check that need several ranks: sums over ranks in every place where they arise."""

import numpy as np

import reference as ref
from operator_cases import even, rotated

COLUMNS = [50, 2048, 37, 4096, 224, 1001]


def sums(g, index, world, seed):
    """`allreduce` of inputs that differ by rank, with a residual and with results of other types."""
    for i, n in enumerate(rotated(COLUMNS, index, 3)):
        dtype, residual = ["f32", "bf16", "f16"][(i + index) % 3], i == 0
        if not g.begin(f"allreduce n={n} result={'f32' if residual else dtype} residual={residual}"):
            continue
        x = g.named("x")
        g.tensors.append({"name": x, "kind": "input", "dtype": "f32", "dims": [g.rows, n], "shard": "partial",
                          "data": {"random": {"seed": seed + i}}})
        parts = [ref.random_weight(seed + i, f"{x}.{rank}", g.rows * n).reshape(g.rows, n) for rank in range(world)]
        values, magnitude = sum(parts), sum(np.abs(part) for part in parts)
        if residual:
            dtype = "f32"
            r, rv = g.tensor("r", "input", "f32", g.normal(g.rows, n))
            g.op("allreduce", [x], g.named("sum"))
            g.op("add", [g.named("sum"), r], g.named("y"))
            values, magnitude = values + rv, magnitude + np.abs(rv)
        else:
            g.op("allreduce", [x], g.named("y"), **({"dtype": dtype} if dtype != "f32" else {}))
        g.expect_values(g.named("y"), values, ref.SUM * magnitude, dtype)


def row_parallel(g, index):
    """Row-parallel `linear` and `silu_mul_linear`, summed, plain and with residual; bias of one rank only."""
    for i, (k, n) in enumerate(rotated([(42, 33), (1024, 256), (100, 61), (4096, 128), (12, 50)], index, 3)):
        dtype, gated, residual, bias = ["bf16", "f32", "f16"][(i + index) % 3], i == 1, i != 2, i == 2
        if not g.begin(f"row-parallel {dtype} k={k} n={n} silu_mul={gated} residual={residual} bias={bias}"):
            continue
        half = {"len": k, "split": {"kind": "even", "unit": 2}}
        x_shard = {"dim": 1, "parts": [half, half] if gated else [half]}
        x, xv = g.tensor("x", "input", dtype, g.normal(g.rows, 2 * k if gated else k), shard=x_shard)
        w, wv = g.tensor("w", "weight", dtype, g.normal(n, k, scale=k**-0.5), shard={"dim": 1, "parts": [half]})
        inputs, bv = [x, w], None
        if gated:
            g.op("silu_mul", [x], g.named("s"))
            inputs[0] = g.named("s")
        if bias:
            b, bv = g.tensor("b", "weight", dtype, g.normal(n))
            inputs.append(b)
        values, spread = ref.linear(*(ref.silu_mul(xv) if gated else (xv, None)), wv, bv, act=dtype if gated else None)
        g.op("linear", inputs, g.named("d"), output_dtype="f32")
        if residual:
            r, rv = g.tensor("r", "input", "f32", g.normal(g.rows, n))
            values, spread = values + rv, spread + ref.SUM * np.abs(rv)
        else:
            r, rv = g.tensor("r", "input", "f32", np.zeros((g.rows, n)))
        g.op("add", [g.named("d"), r], g.named("y"))
        g.expect_values(g.named("y"), values, spread * 2, "f32")


def column_parallel(g, index):
    """Column-parallel `linear`, gathered because its whole output is needed."""
    for i, (k, n) in enumerate(rotated([(37, 45), (256, 1000), (64, 7), (1000, 96)], index, 2)):
        dtype = ["bf16", "f32", "f16"][(i + index) % 3]
        if not g.begin(f"column-parallel {dtype} k={k} n={n}"):
            continue
        x, xv = g.tensor("x", "input", "f32", g.normal(g.rows, k))
        w, wv = g.tensor("w", "weight", dtype, g.normal(n, k, scale=k**-0.5), shard=even(0))
        b, bv = g.tensor("b", "weight", dtype, g.normal(n), shard=even(0))
        g.op("linear", [x, w, b], g.named("y"))
        g.expect_values(g.named("y"), *ref.linear(ref.rounded(xv, dtype), None, wv, bv), dtype)


MLPS = [(40, 27, "bf16"), (256, 688, "f16"), (224, 496, "f32")]  # hidden, intermediate, dtype
# With products of many rows, the gates are made in the layout that the next product reads. The last tiles are not full
WIDE_MLPS = [(264, 704, "bf16"), (72, 12352, "f16"), (1000, 576, "bf16")]


def mlp(g, index, shapes=MLPS):
    """A gated MLP as models have it: norm, column-parallel, gate, row-parallel, sum with residual, and a norm after."""
    hidden, inner, dtype = shapes[index % len(shapes)]
    if not g.begin(f"MLP {dtype} hidden={hidden} intermediate={inner}"):
        return
    part = {"len": inner, "split": {"kind": "even"}}
    x, xv = g.tensor("x", "input", "f32", g.normal(g.rows, hidden))
    norm, normv = g.tensor("norm", "weight", dtype, 1 + g.normal(hidden, scale=0.2))
    up, upv = g.tensor("up", "weight", dtype, g.normal(2 * inner, hidden, scale=hidden**-0.5),
                       shard={"dim": 0, "parts": [part, part]})
    down, downv = g.tensor("down", "weight", dtype, g.normal(hidden, inner, scale=inner**-0.5),
                           shard={"dim": 1, "parts": [part]})
    g.op("rmsnorm", [x, norm], g.named("n"), eps=1e-6)
    g.op("linear", [g.named("n"), up], g.named("g"))
    g.op("silu_mul", [g.named("g")], g.named("s"))
    g.op("linear", [g.named("s"), down], g.named("d"), output_dtype="f32")
    g.op("add", [g.named("d"), x], g.named("z"))
    g.op("rmsnorm", [g.named("z"), norm], g.named("y"), eps=1e-6)
    unit = ref.UNIT[dtype]
    branch, spread = ref.linear(*ref.rmsnorm(xv, normv, 1e-6), upv, act=dtype, wide=g.rows > 16)
    branch = ref.rounded(branch, dtype)
    gated, _ = ref.silu_mul(branch)
    # The error of an element: its own rounding, that of the gate, and the error of its inputs.
    gated_spread = 4 * unit * np.abs(gated) + 2 * spread[:, :inner]
    total, spread = ref.linear(gated, gated_spread, downv, act=dtype, wide=g.rows > 16)
    total = total + xv
    values, own = ref.rmsnorm(total, normv, 1e-6)
    scale = np.abs(values) / np.maximum(np.abs(total), 1e-9)
    g.expect_values(g.named("y"), values, own + spread * np.minimum(scale, 3.0) + unit * np.abs(values), dtype)

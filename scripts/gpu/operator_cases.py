"""The cases of the operator check: every task type over shapes, types and tails. `index` rotates through the shapes, so
that graphs of different row counts hold different ones and each compiles in reasonable time."""

import numpy as np

import reference as ref
from op_graph import array

DTYPES = ["bf16", "f16", "f32"]
# k, n of a weight: odd, tiny, wide and long ones
SHAPES = [(37, 45), (1024, 130), (171, 64), (4096, 96), (64, 1000), (1, 17), (2048, 24), (16, 3), (256, 513), (93, 211),
          (12288, 40), (15, 1), (128, 384), (72, 107), (1000, 33), (8, 16)]
# The same for products of many rows, which GPUs with wide tiles compute in such tiles: tails of k, rows and columns. Products of more than
# 16 rows also use wide tiles if the shape allows it
WIDE_SHAPES = [(4096, 96), (200, 1000), (72, 331), (1000, 130), (256, 513), (136, 4112), (12288, 72), (64, 64)]
# With 1,100 rows on about 132 workers, the last tiles of these are cut (wide_tile.rs)
CUT_SHAPES = [(4104, 3600)]
WIDE_GATED = [(61, 48), (1000, 272), (128, 520), (2048, 2128), (4096, 64), (1032, 88)]
NORM_SIZES = [61, 128, 4096, 5, 224, 1000]
HEADS = [(8, 2, 128), (4, 4, 64), (8, 4, 16), (6, 1, 32), (8, 2, 8), (16, 8, 128)]  # query heads, KV heads, head size
VOCABULARIES = [1000, 4001, 151936, 17]


def rotated(items, index, count):
    """`count` of the items, from `index` on."""
    return [items[(index + i) % len(items)] for i in range(min(count, len(items)))]


def even(dim):
    """Sharding of one dimension."""
    return {"dim": dim, "kind": "even"}


def linears(g, index, shapes=SHAPES, count=8):
    """`linear` alone, with and without bias, types of input and output, and rows gathered for samples."""
    for i, (k, n) in enumerate(rotated(shapes, 5 * index, count)):
        dtype, x_dtype = DTYPES[(i + index) % 3], DTYPES[(i + index) % 3] if i % 2 else "f32"
        out = "f32" if i % 4 == 3 else dtype
        bias, gather = i % 3 == 0, i % 4 == 1
        if not g.begin(f"linear {dtype} k={k} n={n} x={x_dtype} out={out} bias={bias} gather={gather}"):
            continue
        x, xv = g.tensor("x", "input", x_dtype, g.normal(g.rows, k))
        w, wv = g.tensor("w", "weight", dtype, g.normal(n, k, scale=k**-0.5))
        inputs, bv = [x, w], None
        if bias:
            b, bv = g.tensor("b", "weight", dtype, g.normal(n))
            inputs.append(b)
        g.op("linear", inputs, g.named("y"), output_dtype=out, **({"gather_samples": True} if gather else {}))
        if gather:
            xv = xv[g.rows - g.samples :]
        # The input is rounded to the weight's type first.
        values, spread = ref.linear(ref.rounded(xv, dtype), None, wv, bv, wide=g.rows > 16)
        g.expect_values(g.named("y"), values, spread, out)


def norms(g, index):
    """`rmsnorm` alone and before a `linear`."""
    for i, k in enumerate(rotated(NORM_SIZES, index, 3)):
        dtype, eps = DTYPES[(i + index) % 3], [1e-6, 1e-5, 0.01][i % 3]
        if g.begin(f"rmsnorm {dtype} k={k}"):
            x, xv = g.tensor("x", "input", "f32", g.normal(g.rows, k, scale=3.0))
            w, wv = g.tensor("w", "weight", dtype, 1 + g.normal(k, scale=0.3))
            g.op("rmsnorm", [x, w], g.named("y"), eps=eps)
            g.expect_values(g.named("y"), *ref.rmsnorm(xv, wv, eps), dtype)
        n, bias, gather = [45, 130, 1, 513, 24][(i + index) % 5], i % 2 == 1, i == 2
        if g.begin(f"rmsnorm_linear {dtype} k={k} n={n} bias={bias} gather={gather}"):
            x, xv = g.tensor("x", "input", "f32", g.normal(g.rows, k, scale=2.0))
            norm, normv = g.tensor("norm", "weight", dtype, 1 + g.normal(k, scale=0.3))
            w, wv = g.tensor("w", "weight", dtype, g.normal(n, k, scale=k**-0.5))
            inputs, bv = [g.named("n"), w], None
            if bias:
                b, bv = g.tensor("b", "weight", dtype, g.normal(n))
                inputs.append(b)
            g.op("rmsnorm", [x, norm], g.named("n"), eps=eps)
            g.op("linear", inputs, g.named("y"), **({"gather_samples": True, "output_dtype": "f32"} if gather else {}))
            first = g.rows - g.samples if gather else 0
            normed, off = ref.rmsnorm(xv[first:], normv, eps)
            values, spread = ref.linear(normed, off, wv, bv, act=dtype, wide=g.rows > 16)
            g.expect_values(g.named("y"), values, spread, "f32" if gather else dtype)


GATED = [(61, 40), (1000, 272), (4096, 16), (128, 528), (224, 97), (2048, 2128), (5, 32), (1032, 72)]


def gated_products(g, index, shapes=GATED, count=4):
    """`rmsnorm`, `linear` and `silu_mul`, which GPUs compute in one task type if the number of gates is a multiple of 8."""
    for i, (k, n) in enumerate(rotated(shapes, 3 * index, count)):
        dtype, bias, gather = DTYPES[(i + index) % 3], (i + index) % 2 == 1, i == 2
        if not g.begin(f"rmsnorm_linear_silu_mul {dtype} k={k} n={n} bias={bias} gather={gather}"):
            continue
        x, xv = g.tensor("x", "input", "f32", g.normal(g.rows, k, scale=2.0))
        norm, normv = g.tensor("norm", "weight", dtype, 1 + g.normal(k, scale=0.3))
        w, wv = g.tensor("w", "weight", dtype, g.normal(2 * n, k, scale=k**-0.5))
        inputs, bv = [g.named("n"), w], None
        if bias:
            b, bv = g.tensor("b", "weight", dtype, g.normal(2 * n))
            inputs.append(b)
        g.op("rmsnorm", [x, norm], g.named("n"), eps=1e-6)
        g.op("linear", inputs, g.named("g"), **({"gather_samples": True} if gather else {}))
        g.op("silu_mul", [g.named("g")], g.named("y"))
        normed, off = ref.rmsnorm(xv[g.rows - g.samples if gather else 0 :], normv, 1e-6)
        products, spread = ref.linear(normed, off, wv, bv, act=dtype, wide=g.rows > 16)
        # Gate and up are rounded, so each may be off by a step and by what came before; silu's slope is below 1.1.
        spread = ref.stored(products, spread, dtype) + 2 * ref.UNIT[dtype] * np.abs(products)
        gate, up = products[:, :n], products[:, n:]
        values, own = ref.silu_mul(products)
        silu = np.abs(gate / (1 + np.exp(-gate)))
        g.expect_values(g.named("y"), values, own + 1.1 * spread[:, :n] * (np.abs(up) + spread[:, n:]) + silu * spread[:, n:], dtype)


def gated(g, index, shapes=SHAPES, count=3):
    """`silu_mul` alone, before a `linear`, and before a `linear` with residual; `linear` with residual; `add`."""
    for i, (k, n) in enumerate(rotated([(29, 19), (496, 224), (101, 128), (3072, 40), (1, 7), (93, 64)], index, count)):
        dtype = DTYPES[(i + index) % 3]
        if g.begin(f"silu_mul {dtype} n={k}"):
            x, xv = g.tensor("x", "input", dtype, g.normal(g.rows, 2 * k, scale=2.0))
            g.op("silu_mul", [x], g.named("y"))
            g.expect_values(g.named("y"), *ref.silu_mul(xv), dtype)
        for residual in (False, True):
            if not g.begin(f"silu_mul_linear {dtype} k={k} n={n} residual={residual}"):
                continue
            x, xv = g.tensor("x", "input", dtype, g.normal(g.rows, 2 * k, scale=2.0))
            w, wv = g.tensor("w", "weight", dtype, g.normal(n, k, scale=k**-0.5))
            g.op("silu_mul", [x], g.named("s"))
            values, spread = ref.linear(*ref.silu_mul(xv), wv, act=dtype, wide=g.rows > 16)
            if residual:
                g.op("linear", [g.named("s"), w], g.named("d"), output_dtype="f32")
                r, rv = g.tensor("r", "input", "f32", g.normal(g.rows, n))
                g.op("add", [g.named("d"), r], g.named("y"))
                values, spread = values + rv, spread + ref.SUM * np.abs(rv)
            else:
                g.op("linear", [g.named("s"), w], g.named("y"))
            g.expect_values(g.named("y"), values, spread, "f32" if residual else dtype)
    for i, (k, n) in enumerate(rotated(shapes, 3 * index, count)):
        dtype = DTYPES[(i + index) % 3]
        if g.begin(f"linear_with_residual {dtype} k={k} n={n}"):
            x, xv = g.tensor("x", "input", dtype, g.normal(g.rows, k))
            w, wv = g.tensor("w", "weight", dtype, g.normal(n, k, scale=k**-0.5))
            r, rv = g.tensor("r", "input", "f32", g.normal(g.rows, n))
            g.op("linear", [x, w], g.named("d"), output_dtype="f32")
            g.op("add", [g.named("d"), r], g.named("y"))
            values, spread = ref.linear(xv, None, wv, wide=g.rows > 16)
            g.expect_values(g.named("y"), values + rv, spread + ref.SUM * np.abs(rv), "f32")
        if g.begin(f"add {dtype} n={n}"):
            a, av = g.tensor("a", "input", dtype, g.normal(g.rows, n))
            r, rv = g.tensor("r", "input", "f32", g.normal(g.rows, n))
            g.op("add", [a, r], g.named("y"))
            g.expect_values(g.named("y"), av + rv, 0.0, "f32")


# Columns of a stream, and the columns k of the products that write it, each at least 512 for each task that shares a tile
STREAMS = [(1008, 1024), (61, 2060), (128, 2048), (704, 1600), (16, 4096), (29, 2064)]


def streams(g, index, count=2):
    """Products that add to a stream of f32, and norms that read it. If its columns are few for the workers, tasks share the k of the long
    products, and the readers add their sums: a norm, a norm of the sampled rows, and residuals of a long and of a short product."""
    for i, (d, k) in enumerate(rotated(STREAMS, 2 * index, count)):
        dtype = DTYPES[(i + index) % 3]
        if not g.begin(f"stream {dtype} d={d} k={k}"):
            continue
        r, values = g.tensor("r", "input", "f32", g.normal(g.rows, d))
        spread, stream = np.zeros_like(values), r
        outputs = []
        for step, columns in enumerate([k, k, 40]):
            x, xv = g.tensor(f"x{step}", "input", dtype, g.normal(g.rows, columns))
            w, wv = g.tensor(f"w{step}", "weight", dtype, g.normal(d, columns, scale=columns**-0.5))
            inputs = [x, w]
            product, off = ref.linear(xv, None, wv, wide=g.rows > 8)
            if step == 1:
                b, bv = g.tensor("b", "weight", dtype, g.normal(d))
                inputs, product, off = [*inputs, b], product + bv, off + ref.SUM * np.abs(bv)
            g.op("linear", inputs, g.named(f"d{step}"), output_dtype="f32")
            g.op("add", [g.named(f"d{step}"), stream], g.named(f"y{step}"))
            stream, spread = g.named(f"y{step}"), spread + off + ref.SUM * (np.abs(values) + np.abs(product))
            values = values + product
            if step == 2:
                outputs.append((stream, values, spread, "f32"))
                break
            gather = step == 1
            norm, normv = g.tensor(f"norm{step}", "weight", dtype, 1 + g.normal(d, scale=0.3))
            v, vv = g.tensor(f"v{step}", "weight", dtype, g.normal(45, d, scale=d**-0.5))
            g.op("rmsnorm", [stream, norm], g.named(f"n{step}"), eps=1e-6)
            g.op("linear", [g.named(f"n{step}"), v], g.named(f"z{step}"), output_dtype="f32", **({"gather_samples": True} if gather else {}))
            first = g.rows - g.samples if gather else 0
            normed, own = ref.rmsnorm(values[first:], normv, 1e-6)
            scale = np.sqrt(np.mean(values[first:] ** 2, axis=1, keepdims=True))
            own = own + 2 * spread[first:] / scale * np.abs(normv)
            outputs.append((g.named(f"z{step}"), *ref.linear(normed, own, vv, act=dtype, wide=g.rows > 8), "f32"))
        g.expect_all(outputs)


def embeddings(g, index, world=1):
    """`embedding` of the rows' tokens; all tables have the same length, since there is one list of tokens."""
    vocabulary = 1003
    g.tokens = [int(t) for t in g.random.integers(0, vocabulary, g.rows)]
    g.tokens[-1] = vocabulary - 1
    for i, k in enumerate(rotated([19, 224, 1, 4096, 72], index, 2)):
        dtype, split = DTYPES[(i + index) % 3], world > 1 and i == 0
        if g.begin(f"embedding {dtype} k={k} split={split}"):
            shard = {"shard": even(0)} if split else {}
            table, values = g.tensor("table", "weight", dtype, g.normal(vocabulary, k), **shard)
            g.op("embedding", [table], g.named("y"))
            g.expect_values(g.named("y"), values[g.tokens], 0.0, "f32")


def attentions(g, index, page, world=1, product=None, **choice):
    """`attention` of the rows of the graph's sequences, with and without norms, one task per head or several and their merge. `choice`:
    attributes that replace the case's. One case of a graph has a window. `product`: columns of a product that reads the result; if it is
    wide, attention writes the layout of its rows."""
    sequences = g.sequences or [g.rows]
    longest = max(sequences)
    for i, (heads, kv_heads, size) in enumerate(rotated(HEADS, 2 * index, 3)):
        if heads % world:
            continue
        dtype, norm, splits = DTYPES[(i + index) % 3], (i + index) % 2 == 0, [1, 3, 2, 5][(i + index) % 4]
        window = (longest + 1) // 2 if i == 1 else None
        choices = {"splits": splits, **({"window": window} if window else {}), **choice}
        shown = " ".join(f"{name}={value}" for name, value in choices.items())
        if not g.begin(f"attention {dtype} heads={heads}/{kv_heads}x{size} norm={norm} {shown} page={page} sequences={len(sequences)}"
                       + (f" product={product}" if product else "")):
            continue
        width = (heads + 2 * kv_heads) * size
        key_values = {"kind": "key_values", "heads": heads, "kv_heads": kv_heads}
        queries = {"len": heads * size, "split": {"kind": "queries", "heads": heads, "head_dim": size}}
        columns = {"len": kv_heads * size, "split": {**key_values, "head_dim": size}}
        planes = {"len": kv_heads, "split": {**key_values, "head_dim": 1}}
        qkv_shard = {"shard": {"dim": 1, "parts": [queries, columns, columns]}} if world > 1 else {}
        cache_shard = {"shard": {"dim": 1, "parts": [planes, planes]}} if world > 1 else {}
        qkv, qkvv = g.tensor("qkv", "input", dtype, g.normal(g.rows, width), **qkv_shard)
        pages = -(-longest // page) * len(sequences)
        cache, _ = g.tensor("cache", "persistent", dtype, dims=[pages, 2 * kv_heads, page, size],
                            region_dims=[len(sequences), kv_heads, 16], **cache_shard)
        rope, ropev = g.tensor("rope", "constant", "f32", ref.rope_table(longest, size, 1e4))
        inputs, norms_given, attrs = [qkv, cache, rope], None, {}
        if norm:
            given = [g.tensor(name, "weight", dtype, 1 + g.normal(size, scale=0.3)) for name in ("q_norm", "k_norm")]
            inputs += [name for name, _ in given]
            norms_given = [values for _, values in given]
            attrs = {"qk_norm": True, "eps": 1e-5}
        # Half of the time the next operator is row-parallel, as in models; otherwise all heads are gathered.
        projected = product or world > 1 and i % 2 == 0
        output = g.named("mixed" if projected else "y")
        g.op("attention", inputs, [output, cache], heads=heads, kv_heads=kv_heads, head_dim=size, **choices, **attrs)
        # Each row sees the keys of its own sequence only.
        alone = [ref.attention(part, heads, kv_heads, size, ropev[:len(part)], dtype, norms_given, 1e-5, window)
                 for part in np.split(qkvv, np.cumsum(sequences)[:-1])]
        values, spread = (np.concatenate(parts) for parts in zip(*alone))
        if projected:
            shard = {"shard": {"dim": 1, "parts": [queries]}} if world > 1 else {}
            w, wv = g.tensor("w", "weight", dtype, g.normal(product or 61, heads * size, scale=(heads * size) ** -0.5), **shard)
            g.op("linear", [output, w], g.named("y"), output_dtype="f32")
            values, spread = ref.linear(values, spread, wv, act=dtype, wide=bool(product))
        g.expect_values(g.named("y"), values, spread, "f32" if projected else dtype)


def sampling(g, index, world=1):
    """`argmax_partial` and `argmax_reduce`: winners, ties, and log-probabilities of the highest. `token_logit` and
    `token_logprob`: those of any tokens."""
    for i, vocabulary in enumerate(rotated(VOCABULARIES, index, 2)):
        top_k, tiles = [5, 0, 8][(i + index) % 3], [3, 1, 7][(i + index) % 3]
        if not g.begin(f"argmax vocabulary={vocabulary} top_k={top_k} tiles={tiles}"):
            continue
        values = ref.rounded(g.normal(g.samples, vocabulary, scale=4.0), "bf16")
        values[0, vocabulary // 2] = values[0].max()  # ties take the lowest token
        shard = {"shard": even(1)} if world > 1 else {}
        logits, values = g.tensor("logits", "input", "f32", values, rows="samples", **shard)
        g.op("argmax_partial", [logits], g.named("p"), top_k=top_k, tiles=tiles, slices=world)
        if not top_k:
            outputs, chosen = [g.named("token")], None
            g.op("argmax_reduce", [g.named("p")], outputs)
        else:
            outputs = [g.named(name) for name in ("token", "top", "logprob", "own")]
            g.op("argmax_reduce", [g.named("p")], [*outputs[:3], g.named("log_sum")], top_k=top_k, log_sum=True)
            # Most of these tokens are not among the highest. The first and the last one are of different ranks.
            chosen = np.array([[0, vocabulary - 1, vocabulary // 3][s % 3] + s // 3 for s in range(g.samples)]) % vocabulary
            g.tensors.append({"name": g.named("chosen"), "kind": "constant", "dtype": "i32", "dims": [g.samples],
                              "data": {"values": chosen.tolist()}})
            g.op("token_logit", [g.named("chosen"), logits], g.named("logit"), slices=world)
            g.op("token_logprob", [g.named("logit"), g.named("log_sum")], outputs[3])
        g.expect(outputs, lambda found, v=values, k=top_k, o=outputs, c=chosen: check_sampling(found, v, k, o, c))


def check_sampling(found, logits, top_k, names, chosen):
    """Compares winners and log-probabilities, also those of the tokens `chosen`."""
    order = np.argsort(-logits, axis=1, kind="stable")
    tokens = np.array(found[names[0]]["values"], dtype=np.int64)
    if list(tokens) != list(order[:, 0]):
        return f"tokens {tokens[:8]}, expected {order[:8, 0]}", 0.0
    if not top_k:
        return None, 0.0
    top = np.array(found[names[1]]["values"], dtype=np.int64).reshape(len(logits), -1)
    if not np.array_equal(top, order[:, :top_k]):
        return f"top tokens {top[0]}, expected {order[0, :top_k]}", 0.0
    highest = logits.max(axis=1, keepdims=True)
    total = highest + np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
    wanted = np.take_along_axis(logits, order[:, :top_k], axis=1) - total
    wanted = np.append(wanted, np.take_along_axis(logits, chosen[:, None], axis=1) - total)
    logprobs = np.append(array(found[names[2]]), array(found[names[3]]))
    share = float(np.nan_to_num(np.abs(logprobs - wanted) / (2e-5 * (1 + np.abs(wanted))), nan=np.inf).max())
    return (None if share <= 1 else f"log-probabilities are {share:.1f} times as far off as they may be"), share

"""Operators in float64, from their definitions, with bounds on the effect of rounding."""

import numpy as np

UNIT = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}  # half a step at 1: largest relative rounding error
SUM = 12 * 2.0**-24  # of the sum of magnitudes: accumulating in f32 in any order
TINY = 1e-30


def rounded(values, dtype):
    """`values` as `dtype` holds them (nearest, ties to even), in float64."""
    values = np.asarray(values, dtype=np.float64)
    if dtype == "f32":
        return values.astype(np.float32).astype(np.float64)
    if dtype == "f16":
        return values.astype(np.float16).astype(np.float64)
    words = values.astype(np.float32).view(np.uint32)
    words = (words + 0x7FFF + ((words >> 16) & 1)) & np.uint32(0xFFFF0000)
    return words.view(np.float32).astype(np.float64)


def stored(values, spread, dtype):
    """The error bound of a value rounded to `dtype`, if its error was at most `spread` before."""
    smallest = {"f32": 1e-38, "f16": 6e-8, "bf16": 1e-38}[dtype]
    return spread * (1 + 2 * UNIT[dtype]) + UNIT[dtype] * np.abs(values) * 1.001 + smallest + TINY


def linear(x, x_spread, weight, bias=None, act=None, wide=False):
    """x [rows, k], off by up to `x_spread` (None: exact), times weight [n, k] transposed, plus bias; `act`: type to
    which x is rounded before, where it is computed and not given; `wide`: a wide product. Returns the values and how far
    off they may be."""
    if act:
        x = rounded(x, act)
    values = x @ weight.T
    magnitude = np.abs(x) @ np.abs(weight).T
    spread = SUM * magnitude
    if wide:
        # One chain of sums over all of k, 16 at a time. The tensor core cuts each sum off at 24 bits, always towards 0.
        partial = 2 * np.sqrt((x**2) @ (weight**2).T)
        spread = spread + x.shape[1] / 16 * 2.0**-24 * np.maximum(partial, np.abs(values))
    if act:
        # Any element of x may have been rounded the other way; in the worst case all of them.
        spread = spread + UNIT[act] * 2 * np.sqrt((x**2) @ (weight**2).T)
    if x_spread is not None:
        spread = spread + np.sqrt((x_spread**2) @ (weight**2).T) * 2
    if bias is not None:
        values = values + bias
        spread = spread + SUM * np.abs(bias)
    return values, spread


def rmsnorm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight, with its spread."""
    values = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * weight
    return values, 2e-6 * np.abs(values)


def silu_mul(gate_up):
    """silu(gate) * up of [gate | up], with its spread."""
    n = gate_up.shape[1] // 2
    gate, up = gate_up[:, :n], gate_up[:, n:]
    values = gate / (1 + np.exp(-gate)) * up
    return values, 4e-6 * np.abs(values) + 1e-7 * np.abs(gate * up)


def rope_table(positions, size, theta):
    """cos | sin of each position [positions, size], as f32 holds them."""
    angles = np.arange(positions)[:, None] / theta ** (2 * np.arange(size // 2) / size)
    return rounded(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), "f32")


def turned(heads, rope):
    """Rope on halves: heads [rows, heads, size], rope [rows, size]."""
    half = heads.shape[2] // 2
    cos, sin = rope[:, None, :half], rope[:, None, half:]
    low, high = heads[:, :, :half], heads[:, :, half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)


def attention(qkv, heads, kv_heads, size, rope, dtype, norms=None, eps=0.0, window=None):
    """Causal attention of rows q | k | v at positions 0, 1, ..; queries and keys are rounded to `dtype` after norm and
    rope, as probabilities may be before they meet the values. `window`: the positions that a row sees, its own included."""
    rows = qkv.shape[0]
    q = qkv[:, : heads * size].reshape(rows, heads, size)
    k = qkv[:, heads * size : (heads + kv_heads) * size].reshape(rows, kv_heads, size)
    v = qkv[:, (heads + kv_heads) * size :].reshape(rows, kv_heads, size)
    if norms:
        q, k = (t / np.sqrt(np.mean(t * t, axis=2, keepdims=True) + eps) * w for t, w in zip((q, k), norms))
    q, k = rounded(turned(q, rope), dtype), rounded(turned(k, rope), dtype)
    group = heads // kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("rhd,phd->hrp", q, k) / np.sqrt(size)
    magnitude = np.sqrt(np.einsum("rhd,phd->hrp", q**2, k**2) / size)
    seen = np.tril(np.ones((rows, rows), bool))
    if window:
        seen &= ~np.tril(seen, -window)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights = weights / weights.sum(axis=2, keepdims=True)
    values = np.einsum("hrp,phd->rhd", weights, v)
    # Rounding queries and keys the other way moves a score by a share of its terms; a probability may be rounded.
    relative = UNIT[dtype] * (2 * magnitude + 2) + 1e-5
    spread = 2 * np.sqrt(np.einsum("hrp,phd->rhd", (weights * relative) ** 2, v**2)) + 1e-6 * np.abs(values)
    return values.reshape(rows, heads * size), spread.reshape(rows, heads * size)


def random_weight(seed, name, count):
    """Random values as launch/src/model/random_weights.rs documents them."""
    mask = (1 << 64) - 1

    def mix64(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = 0xCBF29CE484222325
    for byte in name.encode():
        key = ((key ^ byte) * 0x100000001B3) & mask
    key = mix64(key ^ mix64((seed + 0x9E3779B97F4A7C15) & mask))
    with np.errstate(over="ignore"):
        h = np.arange(count, dtype=np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
        h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D)
        h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
        h = (h ^ (h >> 16)) ^ np.uint32(key >> 32)
        h = h * np.uint32(0x9E3779B1)
        h ^= h >> 15
    total = sum(((h >> shift) & 127).astype(np.int64) for shift in (0, 8, 16, 24)) - 254
    return total / 4096.0

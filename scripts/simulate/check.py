#!/usr/bin/env python3
"""Compares the simulator with measurements: scripts/simulate/check.py [--fast] [--json FILE].

Prints every row: what was measured, the source of the measurement, whether the row was used to fit the cluster file, and
the error. Ends with status 1 if the error of a row is above its limit. The limit is 15 %. Rows that are known to have a
larger error have that error as their limit, so that no change makes them worse unnoticed.
"""

import argparse
import json
import sys
import tempfile

from run import CLUSTERS, model_file, need_program, simulate

GPU = "h200-infiniband.json"
RUN = "gpu-4x-2026-11-22.json"
NOTE = "the same GPU run, not in its report"
# cluster, shape, max_batch, batch, ranks, placement, measured ms per token, source, fitted
ROWS = [
    (GPU, "qwen3-8b", 8, 1, 1, "static", 4.021, RUN, True),
    (GPU, "qwen3-8b", 8, 8, 1, "static", 4.439, RUN, True),
    (GPU, "qwen3-8b", 8, 1, 4, "static", 1.777, RUN, True),
    (GPU, "qwen3-8b", 8, 8, 4, "static", 2.047, RUN, False),
    (GPU, "qwen3-8b", 8, 1, 2, "static", 2.481, RUN, False),
    (GPU, "qwen3-8b", 8, 8, 2, "static", 2.838, RUN, False),
    (GPU, "qwen3-0.6b", 16, 1, 1, "static", 0.938, RUN, False),
    (GPU, "qwen3-0.6b", 16, 16, 1, "static", 1.516, RUN, False),
    (GPU, "qwen3-32b", 8, 1, 4, "static", 5.55, NOTE, False),
    (GPU, "qwen3-32b", 8, 8, 4, "static", 7.03, NOTE, False),
    (GPU, "llama3-70b", 8, 1, 4, "static", 10.15, NOTE, False),
    (GPU, "qwen3-8b", 32, 16, 1, "static", 5.46, NOTE, False),
    (GPU, "qwen3-8b", 32, 16, 4, "static", 2.89, NOTE, False),
    (GPU, "qwen3-8b", 8, 1, 1, "dynamic", 6.379, RUN, False),
    (GPU, "qwen3-8b", 8, 1, 2, "dynamic", 5.346, RUN, False),
    (GPU, "qwen3-8b", 8, 1, 4, "dynamic", 4.039, RUN, False),
    ("cpu-2-cores.json", "qwen3-0.6b", 1, 1, 1, "static", 41.42, "cpu-2026-11-20.json", False),
]
BOUND = 0.15
# Rows with a larger error: (shape, batch, ranks, placement), and the limit of their error.
KNOWN_TO_MISS = {
    ("qwen3-0.6b", 16, 1, "static"): 0.22,
    ("qwen3-8b", 16, 1, "static"): 0.20,
    ("qwen3-8b", 1, 2, "dynamic"): 0.22,
    ("qwen3-8b", 1, 4, "dynamic"): 0.18,
}
FAST = [0, 2, 6]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fast", action="store_true", help="a few rows")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    arguments = parser.parse_args()
    need_program()
    rows = [ROWS[k] for k in FAST] if arguments.fast else ROWS
    print(f"{'shape':<12}{'TP':>3}{'batch':>6} {'placement':<10}{'measured':>9}{'simulated':>10}{'error':>8}  fitted  source")
    found, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        for cluster, shape, slots, batch, ranks, placement, measured, source, fitted in rows:
            model = model_file(folder, shape, slots)
            options = ["--graph", f"decode-{batch}", "--placement", placement]
            options += ["--allreduce", "one-shot"] if ranks > 1 else []
            report, problem = simulate(model, CLUSTERS / cluster, ranks, *options)
            if report is None:
                print(f"{shape:<12}{ranks:>3}{batch:>6} {placement:<10}{problem}")
                failed = True
                continue
            ms = report["ms_per_token"]
            error = ms / measured - 1
            bound = KNOWN_TO_MISS.get((shape, batch, ranks, placement), BOUND)
            far = abs(error) > bound
            failed |= far
            mark = " FAILED" if far else " (known miss)" if abs(error) > BOUND else ""
            print(f"{shape:<12}{ranks:>3}{batch:>6} {placement:<10}{measured:>9.3f}{ms:>10.3f}{100 * error:>+7.1f}%  "
                  f"{'yes' if fitted else 'no':<6}  {source}{mark}", flush=True)
            found.append({"cluster": cluster, "shape": shape, "tp": ranks, "batch": batch, "placement": placement,
                          "measured_ms": measured, "simulated_ms": round(ms, 4), "error": round(error, 4), "fitted": fitted,
                          "source": source})
    if arguments.json:
        with open(arguments.json, "w") as out:
            out.write(json.dumps({"schema": "mpk-simulate-check/1", "rows": found}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

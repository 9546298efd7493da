#!/usr/bin/env python3
"""The scaling study of docs/scaling.md: scripts/simulate/scaling.py --json FILE --svg FILE.

Simulates models on 1 to 64 GPUs of 1 to 16 nodes, over InfiniBand and Ethernet, with each lowering of an allreduce. All
layers are equal. So the time of a model is the time of LAYERS[0] layers, plus the time per layer for each further one.
The time per layer follows from the difference between LAYERS[1] and LAYERS[0] layers.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from run import CLUSTERS, SHAPES, model_file, need_program, simulate

LAYERS = (2, 4)
LOWERINGS = ["one-shot", "two-shot", "copy-reduce", "hierarchical"]
# Name of a line: cluster file, GPUs per node.
FABRICS = {
    "NVLink + InfiniBand, 8 per node": ("h200-infiniband.json", 8),
    "NVLink + InfiniBand, 4 per node": ("h200-infiniband.json", 4),
    "NVLink + Ethernet, 8 per node": ("h200-ethernet.json", 8),
}
MODELS = ["qwen3-8b", "qwen3-32b", "llama3-70b"]
RANKS = [1, 2, 4, 8, 16, 32, 64]


def on_nodes(folder, name, per_node):
    """The cluster file with this many ranks per node."""
    cluster = json.loads((CLUSTERS / name).read_text())
    cluster["ranks_per_node"] = per_node
    path = Path(folder) / f"{per_node}-{name}"
    path.write_text(json.dumps(cluster))
    return path


def token(folder, cluster, shape, ranks, lowering, batch):
    """Milliseconds per token of the whole model, and the floor; None if the case is impossible."""
    options = ["--graph", f"decode-{batch}"] + (["--allreduce", lowering] if ranks > 1 else [])
    found = []
    for layers in LAYERS:
        report, problem = simulate(model_file(folder, shape, batch, layers), cluster, ranks, *options)
        if report is None:
            print(f"  {shape} x {ranks}, {lowering}: {problem}", file=sys.stderr)
            return None
        found.append((report["ms_per_token"], report["floor_ms"]))
    further = (SHAPES[shape][1] - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
    return [round(few + further * (more - few), 4) for few, more in zip(*found)]


def plot(rows, path):
    """One panel per model: milliseconds per token over the number of GPUs, with one line per fabric (the best lowering)."""
    width, height, left, top, gap = 300, 230, 48, 40, 30
    colours = ["#1f5fa8", "#4aa3a2", "#c8553d"]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * (width + gap) + left}" height="{height + 110}" '
           'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>']
    for panel, shape in enumerate(MODELS):
        best = {}
        for row in rows:
            if row["shape"] == shape and row["batch"] == 1:
                line = best.setdefault(row["fabric"], {})
                line[row["gpus"]] = min(line.get(row["gpus"], 1e9), row["ms"])
        floors = {row["gpus"]: row["floor_ms"] for row in rows if row["shape"] == shape and row["batch"] == 1}
        if not best:
            continue
        most = max(max(line.values()) for line in best.values())
        x0 = left + panel * (width + gap)

        def x(gpus, x0=x0):
            return x0 + 20 + RANKS.index(gpus) * (width - 50) / (len(RANKS) - 1)

        def y(ms, most=most):
            return top + height - height * min(ms / most, 1)

        out.append(f'<text x="{x0}" y="{top - 14}" font-weight="bold">{shape}, batch 1: ms per token (simulated)</text>')
        for share in (0, 0.25, 0.5, 0.75, 1):
            out.append(f'<line x1="{x0}" x2="{x0 + width - 20}" y1="{y(share * most):.1f}" y2="{y(share * most):.1f}" '
                       f'stroke="#ddd"/><text x="{x0 - 4}" y="{y(share * most) + 4:.1f}" text-anchor="end">{share * most:.3g}</text>')
        for gpus in RANKS:
            out.append(f'<text x="{x(gpus):.1f}" y="{top + height + 16}" text-anchor="middle">{gpus}</text>')
        lines = [(name, best[name], colours[k], "") for k, name in enumerate(FABRICS) if name in best]
        lines.append(("memory alone", floors, "#888", ' stroke-dasharray="4 3"'))
        for number, (name, line, colour, dash) in enumerate(lines):
            points = " ".join(f"{x(g):.1f},{y(line[g]):.1f}" for g in sorted(line))
            out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            if panel == 0:
                at = left + number * 230
                out.append(f'<line x1="{at}" x2="{at + 24}" y1="{height + 90}" y2="{height + 90}" stroke="{colour}" '
                           f'stroke-width="2"{dash}/><text x="{at + 30}" y="{height + 94}">{name}</text>')
        out.append(f'<text x="{x0 + width / 2 - 20}" y="{top + height + 32}" text-anchor="middle">GPUs</text>')
    out.append("</svg>\n")
    Path(path).write_text("\n".join(out))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", required=True, help="file of the rows; with --plot-only it is read instead of written")
    parser.add_argument("--svg", metavar="FILE", required=True, help="file of the plot")
    parser.add_argument("--plot-only", action="store_true", help="only draw existing rows")
    parser.add_argument("--batches", default="1", help="batch sizes, such as 1,8 (default %(default)s)")
    parser.add_argument("--most", type=int, default=64, help="maximum number of GPUs (default %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="models to simulate, separated by commas (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.plot_only:
        rows = json.loads(Path(arguments.json).read_text())["rows"]
        plot(rows, arguments.svg)
        return 0
    need_program()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in arguments.models.split(","):
            for fabric, (name, per_node) in FABRICS.items():
                cluster = on_nodes(folder, name, per_node)
                for batch in map(int, arguments.batches.split(",")):
                    for ranks in [r for r in RANKS if r <= arguments.most and SHAPES[shape][2] % r == 0]:
                        nodes = -(-ranks // per_node)
                        for lowering in LOWERINGS if ranks > 1 else ["none"]:
                            if lowering == "hierarchical" and nodes == 1:
                                continue
                            if nodes == 1 and fabric != next(iter(FABRICS)):
                                # The same as on the first one, because no network is used.
                                same = [r for r in rows if (r["shape"], r["gpus"], r["lowering"], r["batch"], r["nodes"])
                                        == (shape, ranks, lowering, batch, 1)]
                                rows += [{**same[0], "fabric": fabric}] if same else []
                                continue
                            got = token(folder, cluster, shape, ranks, lowering, batch)
                            if got:
                                rows.append({"shape": shape, "fabric": fabric, "gpus": ranks, "nodes": nodes, "batch": batch,
                                             "lowering": lowering, "ms": got[0], "floor_ms": got[1]})
                                print(rows[-1], flush=True)
                            Path(arguments.json).write_text(json.dumps(
                                {"schema": "mpk-scaling/1", "layers": LAYERS, "rows": rows}, indent=1) + "\n")
    plot(rows, arguments.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Plots a report of gpu_check.sh: plot_report.py REPORT.json PLOT.svg [SHAPE, to plot only its decode figures]."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import plot as bars  # noqa: E402: of ../bench


def decode_panels(figures):
    """A panel for each shape, number of ranks and batch: ours, the peer, the floor."""
    found = []
    for name, figure in figures.items():
        words = name.split()  # decode SHAPE TPn batch b PLACEMENT
        if words[-1] != "static" or not figure["peer_ms"]:
            continue
        lines = [("mpk", figure["ms_per_token"]["median"], True), ("PyTorch, compiled", figure["peer_ms"], False)]
        floor = figure["floor_ms"]
        found.append((f"{words[1]}, {words[2]}, batch {words[4]}: ms per token", lines, (f"memory floor: {floor:.3g}", floor)))
    return sorted(found)


def allreduce_panels(skeleton):
    """The time an allreduce adds inside the kernel, next to NCCL's and PyTorch's."""
    found = []
    for name, figure in skeleton.items():
        if not name.startswith("allreduce 8 KB") or "added_us" not in figure or not figure.get("peer"):
            continue
        _, _, _, lowering, placement, transport, ranks = name.split()
        if (placement, transport) == ("static", "p2p"):
            found.append((ranks, lowering, figure["added_us"], figure["peer"]))
    panels = []
    for ranks in sorted({ranks for ranks, *_ in found}):
        ours = [(f"mpk {lowering}", added, True) for n, lowering, added, _ in found if n == ranks]
        peer = next(peer for n, _, _, peer in found if n == ranks)
        lines = [*ours, ("NCCL", peer["nccl_us"], False), ("symmetric memory one-shot", peer["torch_one_shot_us"], False)]
        panels.append((f"Allreduce of 8 KB, {ranks}: us", lines, None))
    return panels


def main():
    source, target = map(Path, sys.argv[1:3])
    shape = sys.argv[3] if len(sys.argv) > 3 else None
    report = json.loads(source.read_text())
    figures = report["figures"]
    panels = decode_panels(figures.get("decode", {}))
    if shape:
        panels = [panel for panel in panels if panel[0].startswith(f"{shape}, ")]
    else:
        panels += allreduce_panels(figures.get("skeleton", {}))
    gpu = report["hardware"]["gpus"][0].split(",")[0]
    target.write_text(bars.page("Decode at context 512, random bf16 weights (less is better)",
                                f"{len(report['hardware']['gpus'])} x {gpu}, {report['date'][:10]}, medians", panels))


if __name__ == "__main__":
    main()

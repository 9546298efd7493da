"""Line charts of the table as SVG, without a plotting library; PNG with any available converter."""

import shutil
import subprocess
from html import escape
from math import log2

COLORS = ["#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a", "#bf3989", "#0a7d91"]
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 430, 270, 64, 70, 18


def nice_top(value):
    """The next round number."""
    step = 1.0
    while step * 10 <= value:
        step *= 10
    while step > value:
        step /= 10
    return next(step * factor for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * factor >= value)


def chart(title, horizontal, vertical, series):
    """An SVG of {name: [(x, y)..]}; the x axis is logarithmic to base 2."""
    points = [point for line in series.values() for point in line]
    xs = sorted({x for x, _ in points})
    top = nice_top(max(y for _, y in points))
    first, last = log2(xs[0]), log2(xs[-1])

    def place(x, y):
        share = (log2(x) - first) / (last - first) if last > first else 0.5
        return LEFT + share * WIDTH, TOP + HEIGHT - y / top * HEIGHT

    height = TOP + HEIGHT + 60 + LEGEND * len(series)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{height}" font-family="sans-serif"'
        ' font-size="12" fill="#24292f">',
        f'<rect width="{LEFT + WIDTH + 40}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT - 40}" y="26" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT - 40}" y="48" fill="#57606a">{escape(vertical)}</text>',
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle" fill="#57606a">{escape(horizontal)}</text>',
    ]
    for part in range(6):
        y = TOP + HEIGHT - part / 5 * HEIGHT
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{top * part / 5:.3g}</text>')
    for x in xs:
        label = f"{x // 1024}K" if x >= 1024 and x % 1024 == 0 else f"{x}"
        parts.append(f'<text x="{place(x, 0)[0]:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>')
    for number, (name, line) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        dashes = ' stroke-dasharray="5 4"' if name.startswith("floor") else ""
        dots = [place(x, y) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in dots]
        at = TOP + HEIGHT + 56 + LEGEND * number
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{at}" y2="{at}" stroke="{color}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{LEFT + 32}" y="{at + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def charts(table):
    """{file name: SVG} for the table's contents: latency against TP and share of the floor (decode), allreduce against size."""
    latency, share, allreduce = {}, {}, {}
    for row in table:
        if row["what"] == "decode":
            case = f"batch {row['batch']}, context {row['size']}"
            latency.setdefault(f"ours, {case}", []).append((row["tp"], row["ours"]["median"]))
            for name, time in row["peers"].items():
                latency.setdefault(f"{name}, {case}", []).append((row["tp"], time))
            if row["floor"]:
                latency.setdefault(f"floor, {case}", []).append((row["tp"], row["floor"]))
                share.setdefault(case, []).append((row["tp"], row["share_of_floor"]))
        elif row["what"] == "allreduce":
            allreduce.setdefault(f"ours, {row['tp']} ranks", []).append((row["size"], row["ours"]["median"]))
            for name, time in row["peers"].items():
                allreduce.setdefault(f"{name}, {row['tp']} ranks", []).append((row["size"], time))
    found = {}
    if latency:
        found["latency"] = chart("Decode against tensor-parallel ranks", "ranks", "ms per step, less is better", latency)
    if share:
        found["floor"] = chart("Decode: share of the memory floor", "ranks", "floor / time, 1 is the limit", share)
    if allreduce:
        found["allreduce"] = chart("Allreduce inside the kernel", "bytes", "us, less is better", allreduce)
    return found


def png(svg):
    """Writes a PNG beside an SVG with the first converter that works; returns whether one did."""
    target = svg.with_suffix(".png")
    try:
        import cairosvg

        cairosvg.svg2png(url=str(svg), write_to=str(target), scale=2)
        return True
    except Exception:  # noqa: BLE001: the next one may work
        pass
    for command in (["rsvg-convert", "-z", "2", "-o", target, svg], ["magick", "-density", "192", svg, target],
                    ["convert", "-density", "192", svg, target], ["inkscape", svg, "-d", "192", "-o", target]):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([str(part) for part in command], capture_output=True)
        if done.returncode == 0 and target.exists():
            return True
    return False

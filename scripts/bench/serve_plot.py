"""Latencies against rates as one SVG, without a plotting library: one row per mix, one panel per figure."""

import math
from html import escape

COLOURS = ("#1f6feb", "#d1242f", "#8b949e", "#1a7f37")
DASHES = {"p50": "", "p90": "6 3", "p99": "2 3"}
FIGURES = (("first_token_ms", "time to first token"), ("between_tokens_ms", "time between tokens"), ("whole_ms", "whole time"))
WIDTH, HEIGHT, LEFT, TOP, MARGIN = 260, 150, 56, 30, 24


def axis(values):
    """A logarithmic scale, from the power of ten below all values to the one above; returns the position of a value (0 to 1), and ticks."""
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    return (lambda value: (math.log10(value) - low) / (high - low)), [10.0**power for power in range(low, high + 1)]


def panel(title, curves, x, y):
    """Curves [(colour, dashes, [(rate, value)..])..] with axes."""
    points = [point for _, _, curve in curves for point in curve]
    parts = [f'<text x="{x}" y="{y - 10}" font-weight="bold">{escape(title)}</text>']
    if not points:
        return parts
    across, rates = axis([rate for rate, _ in points])
    up, values = axis([max(value, 1e-3) for _, value in points])
    left, bottom = x + LEFT, y + HEIGHT
    for value in values:
        at = bottom - up(value) * HEIGHT
        parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g} ms</text>')
    for rate in rates:
        at = left + across(rate) * WIDTH
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{rate:g}/s</text>')
    for colour, dashes, curve in curves:
        places = [(left + across(rate) * WIDTH, bottom - up(max(value, 1e-3)) * HEIGHT) for rate, value in curve]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in places]
    return parts


def svg(results):
    """The picture of all results: lines are p50, dashed ones p90, dotted ones p99."""
    servers = list(dict.fromkeys(result["server"] for result in results))
    mixes = list(dict.fromkeys(result["mix"] for result in results))
    step_x, step_y = LEFT + WIDTH + 2 * MARGIN, HEIGHT + 70
    width, height = MARGIN + 3 * step_x, TOP + MARGIN + len(mixes) * step_y + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, server in enumerate(servers):
        at, colour = MARGIN + 320 * number, COLOURS[number % len(COLOURS)]
        parts.append(f'<circle cx="{at}" cy="16" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{at + 10}" y="20">{escape(server)} (line p50, dashed p90, dotted p99)</text>')
    for row, mix in enumerate(mixes):
        for column, (figure, name) in enumerate(FIGURES):
            curves = []
            for number, server in enumerate(servers):
                mine = [r for r in results if (r["server"], r["mix"]) == (server, mix) and r[figure]["p50"] is not None]
                for share, dashes in DASHES.items():
                    curve = sorted((r["rate"], r[figure][share]) for r in mine)
                    curves.append((COLOURS[number % len(COLOURS)], dashes, curve))
            parts += panel(f"{mix}: {name}", curves, MARGIN + column * step_x, TOP + MARGIN + row * step_y)
    return "\n".join([*parts, "</svg>", ""])

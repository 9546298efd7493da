"""Bar charts of a run as one SVG, without a plotting library."""

from html import escape

OURS, PEER, FLOOR = "#1f6feb", "#8b949e", "#d1242f"
BAR, GAP, LABEL, WIDTH = 22, 10, 190, 330
MARGIN = 24


def panel(title, bars, line, x, y):
    """Horizontal bars [(name, value, ours)..] with an optional marker (name, value); SVG text and height."""
    top = max([value for _, value, _ in bars] + ([line[1]] if line else []))
    scale = WIDTH / top
    parts = [f'<text x="{x}" y="{y + 14}" font-weight="bold">{escape(title)}</text>']
    start = at = y + 30
    for name, value, ours in bars:
        middle = at + BAR / 2 + 4
        parts.append(f'<text x="{x + LABEL - 8}" y="{middle}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect x="{x + LABEL}" y="{at}" width="{value * scale:.1f}" height="{BAR}"'
            f' fill="{OURS if ours else PEER}"/>'
        )
        parts.append(f'<text x="{x + LABEL + value * scale + 6:.1f}" y="{middle}">{value:.3g}</text>')
        at += BAR + GAP
    if line:
        name, value = line
        place = x + LABEL + value * scale
        parts.append(
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{start - 4}" y2="{at - GAP + 4}" stroke="{FLOOR}"'
            ' stroke-width="2" stroke-dasharray="4 3"/>'
        )
        parts.append(f'<text x="{place:.1f}" y="{at + 8}" text-anchor="middle" fill="{FLOOR}">{escape(name)}</text>')
        at += 16
    return "\n".join(parts), at - y + MARGIN


def page(heading, subtitle, panels):
    """The SVG of panels [(title, bars, marker)..], one below the other."""
    body, y = [], MARGIN + 44
    for title, lines, marker in panels:
        text, height = panel(title, lines, marker, MARGIN, y)
        body.append(text)
        y += height
    width = 2 * MARGIN + LABEL + WIDTH + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}"'
        ' font-family="sans-serif" font-size="13" fill="#24292f">\n'
        f'<rect width="{width}" height="{y}" fill="#ffffff"/>\n'
        f'<text x="{MARGIN}" y="{MARGIN + 8}" font-size="16" font-weight="bold">{escape(heading)}</text>\n'
        f'<text x="{MARGIN}" y="{MARGIN + 28}" fill="#57606a">{escape(subtitle)}</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def bars(result):
    """The SVG: decode, prefill and graph building."""
    values = result["medians"]
    floor = 1e3 * result["shape"]["bytes_per_token"] / values["floor_bytes_per_second"]["median"]
    decode = [("mpk", values["ours"]["ms_per_token"]["median"], True)]
    prefill = [("mpk", values["ours"]["prefill_tokens_per_s"]["median"], True)]
    for name, peer in values["peers"].items():
        decode.append((name, peer["ms_per_token"]["median"], False))
        prefill.append((name, peer["prefill_tokens_per_s"]["median"], False))
    graphs = [
        (f"{model}, {graph['tasks'] // 1000} k tasks", graph["seconds"]["median"], True)
        for model, graph in values["graphs"].items()
    ]
    cores = len(result["hardware"]["cores_used"])
    panels = [
        ("Decode, ms per token (less is better)", decode, (f"weights read once: {floor:.3g}", floor)),
        (f"Prefill of {result['settings']['prefill']}, tokens/s (more is better)", prefill, ("to reach: 200", 200)),
        ("Build and verify 8 ranks' graphs, s", graphs, ("to reach at 32B: 1.5", 1.5)),
    ]
    heading = f"{result['shape']['name']} shape, bf16 random weights, batch 1, {cores} cores"
    machine = f"{result['hardware']['cpu']}, {result['date'][:10]}, medians of {len(result['rounds'])} rounds" + (
        "" if values["quiet"] else "; NOT QUIET"
    )
    return page(heading, machine, panels)

"""Medians of the rounds, the table of figures against their targets, and its text."""

import statistics

FLOOR_SHARE = 0.70  # of the memory read rate
PREFILL = 200  # tokens per second
GRAPH_SECONDS = 1.5
GRAPH_SHAPE = "qwen3-32b"
LINEAR = 1.5  # largest over smallest time a task, over the shapes
TINY_SECONDS = 10
QUIET = 0.03  # of the cores' time: what others may have while we measure
ALLOWANCE = 200e6  # bytes a rank may hold beyond shard and KV


def spread(values):
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def medians(rounds, prefill):
    """Everything measured, as spread() of the rounds."""
    results = [entry["results"] for entry in rounds]

    def over(name, value):
        return spread([value(result[name]) for result in results if name in result])

    graphs = {}
    for model in results[0]["graphs"]:
        lines = [result["graphs"][model] for result in results]
        seconds = [line["build_s"] + line["verify_s"] for line in lines]
        graphs[model] = {
            "tasks": lines[0]["tasks"],
            "events": lines[0]["events"],
            "seconds": spread(seconds),
            "microseconds_per_task": 1e6 * statistics.median(seconds) / lines[0]["tasks"],
        }
    peers = {}
    for name in {name: None for result in results for name in result if "peer" in result[name]}:
        peers[name] = {
            "ms_per_token": over(name, lambda value: value["ms_per_token"]),
            "prefill_tokens_per_s": over(name, lambda value: value["prefill_tokens_per_s"]),
            "huge_page_bytes": over(name, lambda value: value["huge_page_bytes"])["median"],
            "huge_pages": next(result[name]["huge_pages"] for result in results if name in result),
            "versions": next(result[name]["versions"] for result in results if name in result),
        }
    quiet = all(entry["cores"][key] <= QUIET for entry in rounds for key in ("others", "stolen"))
    return {
        "quiet": quiet,
        "floor_bytes_per_second": over("floor", lambda value: value["bytes_per_second"]),
        "ours": {
            "ms_per_token": over("ours", lambda value: value["ms_per_token"]),
            "prefill_tokens_per_s": over("ours, prefill", lambda value: prefill / value["prefill_s"]),
            "load_s": over("ours", lambda value: value["load_s"]),
        },
        "peers": peers,
        "graphs": graphs,
        "check_s": over("check", lambda value: value["seconds"]),
        "tiny_s": over("tiny", lambda value: value["seconds"]),
    }


def row(what, ours, unit, **more):
    """A line of the table; `ours` is a number or a spread()."""
    line = {"what": what, "ours": ours, "unit": unit}
    line |= {"peer": None, "peer_name": None, "floor": None, "ratio": None, "reach": None, "reached": None}
    return line | more


def table(values, shapes):
    """The lines of the table. Ratios above 1 mean that ours is better; compared with the floor, they are a share of it."""
    ours, lines = values["ours"], []
    decode = ours["ms_per_token"]
    floor = 1e3 * shapes["bytes_per_token"] / values["floor_bytes_per_second"]["median"]
    share = floor / decode["median"]
    lines.append(
        row("decode, against reading the weights", decode, "ms per token", floor=floor, ratio=share,
            reach=f"{FLOOR_SHARE:.0%} of the floor's rate", reached=share >= FLOOR_SHARE)
    )
    for name, peer in values["peers"].items():
        ratio = peer["ms_per_token"]["median"] / decode["median"]
        must = name.startswith("llama.cpp")
        lines.append(
            row("decode", decode, "ms per token", peer=peer["ms_per_token"], peer_name=name, floor=floor, ratio=ratio,
                reach="not slower" if must else None, reached=ratio >= 1 if must else None)
        )
    prefill = ours["prefill_tokens_per_s"]
    lines.append(
        row("prefill", prefill, "tokens/s", reach=f"{PREFILL} tokens/s", reached=prefill["median"] >= PREFILL)
    )
    for name, peer in values["peers"].items():
        other = peer["prefill_tokens_per_s"]
        lines.append(
            row("prefill", prefill, "tokens/s", peer=other, peer_name=name, ratio=prefill["median"] / other["median"])
        )
    for model, graph in values["graphs"].items():
        bound = model == GRAPH_SHAPE
        lines.append(
            row(f"graphs of 8 ranks, {model}: {graph['tasks']} tasks", graph["seconds"], "s",
                reach=f"{GRAPH_SECONDS} s" if bound else None,
                reached=graph["seconds"]["median"] < GRAPH_SECONDS if bound else None)
        )
    costs = [graph["seconds"]["min"] / graph["tasks"] for graph in values["graphs"].values()]
    growth = max(costs) / min(costs)
    lines.append(
        row("graphs, best time a task: most over least", growth, "x", reach=f"linear: {LINEAR} x", reached=growth <= LINEAR)
    )
    lines.append(row(f"mpk-run --check, {GRAPH_SHAPE}, decode and prefill graphs, process", values["check_s"], "s"))
    lines.append(
        row("mpirun -n 8, tiny model, 64 tokens, process", values["tiny_s"], "s",
            reach=f"{TINY_SECONDS} s", reached=values["tiny_s"]["median"] < TINY_SECONDS)
    )
    for ranks, memory in shapes["memory"].items():
        allowed = memory["shard_bytes"] + memory["kv_bytes"] + ALLOWANCE
        peak = max(memory["peak_bytes"])
        lines.append(
            row(f"peak memory of a rank, N={ranks}", peak / 1e6, "MB",
                floor=(memory["shard_bytes"] + memory["kv_bytes"]) / 1e6,
                reach=f"{allowed / 1e6:.0f} MB", reached=peak <= allowed)
        )
    return lines


def number(value):
    """A number or a spread() as text: the median, and the range if there is one."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        text = number(value["median"])
        return text if value["min"] == value["max"] else f"{text} ({number(value['min'])}..{number(value['max'])})"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def verdict_text(verdict):
    """What was checked, and the verdict."""
    lines = []
    for check in verdict["checks"]:
        state = "right" if not check["problems"] else "WRONG"
        lines.append(f"{state}: {check['what']}, {check['tokens']} tokens compared")
        lines += [f"  {problem}" for problem in check["problems"][:10]]
    lines.append("results are right" if verdict["right"] else "results are WRONG: nothing was timed")
    return "\n".join(lines)


def table_text(result):
    """The report of a run: machine, table, missing parts."""
    hardware, values = result["hardware"], result["medians"]
    rate = {key: value / 1e9 for key, value in values["floor_bytes_per_second"].items()}
    headings = ["what", "ours", "unit", "peer", "floor", "ratio", "reach", "reached"]
    cells = [headings]
    for line in result["table"]:
        peer = "-" if line["peer"] is None else f"{line['peer_name']}: {number(line['peer'])}"
        reached = {None: "-", True: "yes", False: "NO"}[line["reached"]]
        cells.append([line["what"], number(line["ours"]), line["unit"], peer, number(line["floor"]),
                      number(line["ratio"]), line["reach"] or "-", reached])
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(headings))]
    text = [
        "",
        f"{hardware['cpu']}, cores {hardware['cores_used']}, {hardware['memory_bytes'] / 2**30:.0f} GiB,"
        f" {' '.join(hardware['flags'])}",
        f"memory read rate {number(rate)} GB/s;"
        f" {result['shape']['bytes_per_token'] / 1e9:.3f} GB of weights per token;"
        f" medians (least..most) of {len(result['rounds'])} rounds",
        "",
    ]
    for index, cell in enumerate(cells):
        text.append("  ".join(part.ljust(width) for part, width in zip(cell, widths)).rstrip())
        if index == 0:
            text.append("  ".join("-" * width for width in widths))
    text.append("")
    text += [f"peer absent: {name}: {why}" for name, why in result["peers_absent"].items()]
    for name, peer in values["peers"].items():
        if peer["huge_pages"] and peer["huge_page_bytes"] < 0.9 * result["shape"]["bytes_per_token"]:
            text.append(f"note: {name}: only {peer['huge_page_bytes'] / 1e6:.0f} MB were on huge pages")
    for who, key in (("other processes", "others"), ("the hypervisor", "stolen")):
        share = max(entry["cores"][key] for entry in result["rounds"])
        if share > QUIET:
            text.append(f"NOT QUIET: {who} had up to {share:.0%} of the cores' time in a round; do not use these times")
    missed = sum(line["reached"] is False for line in result["table"])
    text.append(f"{missed} figures not reached" if missed else "all figures reached")
    return "\n".join(text)

"""Compares our rows with the peers and the floor, gives each a verdict, and makes the Markdown table."""

UNIT = {"decode": "ms per step", "prefill": "ms", "allreduce": "us"}
TITLE = {"decode": "Decode", "prefill": "Prefill", "allreduce": "Allreduce inside the kernel"}


def key(row):
    """The values that two rows must share to be compared."""
    kind = row["what"]
    if kind == "decode":
        return kind, row["tp"], row["batch"], row["context"]
    if kind == "prefill":
        return kind, row["tp"], row["batch"], row["prompt"]
    return kind, row["tp"], 0, row["bytes"]


def time_of(row):
    """Median, minimum and maximum of one of our rows."""
    samples = row["us"] if row["what"] == "allreduce" else row["ms"]
    return {name: samples[name] for name in ("median", "least", "most")}


def peer_times(rows):
    """The best result of each peer for each case."""
    best = {}
    for row in rows:
        if row.get("right") is False:
            continue  # a wrong result has no figure, not even a peer's
        name = row["peer"]
        if row["what"] == "allreduce":
            name = f"{name} ({row['way']})"
        found = best.setdefault(key(row), {})
        if name not in found or row["ms"] < found[name]:
            found[name] = row["ms"]
    return best


def verdict(ours, peers):
    """The verdict in a word or two. A row that loses to a peer is not called ok."""
    faster = sorted((time, name) for name, time in peers.items() if time < ours["median"])
    if faster:
        time, name = faster[0]
        return f"slower than {name}: {ours['median'] / time:.2f} times its time"
    return "ok" if peers else "no peer"


def rows(found):
    """All our cases, in order, with peers, floor and verdict."""
    peers = peer_times(found["peers"])
    table = []
    for row in found["ours"]:
        if not row.get("verdict", {}).get("right"):
            continue  # mpk-bench prints no such row
        ours, others = time_of(row), peers.get(key(row), {})
        kind, ranks, batch, size = key(row)
        floor = (row.get("floor") or {}).get("ms")
        table.append({
            "what": kind, "tp": ranks, "batch": batch, "size": size, "ours": ours, "peers": others, "floor": floor,
            "share_of_floor": floor / ours["median"] if floor else None, "verdict": verdict(ours, others),
        })
    order = list(TITLE)
    return sorted(table, key=lambda r: (order.index(r["what"]), r["size"], r["batch"], r["tp"]))


def case(row):
    """The case in words."""
    if row["what"] == "decode":
        return f"batch {row['batch']}, context {row['size']}"
    if row["what"] == "prefill":
        return f"{row['batch']} x {row['size']} tokens"
    return f"{row['size'] // 1024} KB" if row["size"] % 1024 == 0 else f"{row['size']} bytes"


def markdown(table):
    """One table per kind of figure."""
    parts = []
    for kind, title in TITLE.items():
        chosen = [row for row in table if row["what"] == kind]
        if not chosen:
            continue
        peers = sorted({name for row in chosen for name in row["peers"]})
        floor = any(row["floor"] for row in chosen)
        head = ["case", "TP", f"ours, {UNIT[kind]}", "least - most", *peers, *(["floor", "share of it"] if floor else []), "verdict"]
        lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in chosen:
            ours = row["ours"]
            cells = [case(row), f"{row['tp']}", f"{ours['median']:.3f}", f"{ours['least']:.3f} - {ours['most']:.3f}"]
            cells += [f"{row['peers'][name]:.3f}" if name in row["peers"] else "-" for name in peers]
            if floor:
                cells += [f"{row['floor']:.3f}", f"{row['share_of_floor']:.2f}"] if row["floor"] else ["-", "-"]
            lines.append("| " + " | ".join([*cells, row["verdict"]]) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"

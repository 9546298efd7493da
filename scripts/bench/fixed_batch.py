"""Decode through online admission against a fixed batch: the same requests, once as one list to mpk-run, which begins them together, and once one
after the other to mpk-serve, while the others run. Compared are the iterations that decode all of them, from the ranks' timelines.

The rounds take turns, and the shortest of the medians counts: what else the machine does only makes iterations longer."""

import json
import statistics
import threading
import time
import urllib.request


def ids(number):
    """A prompt of 16 token ids."""
    return [1 + (37 * number + 11 * place) % 500 for place in range(16)]


def iterations(trace):
    """Milliseconds of each iteration of the graph that came most often, from one batch step to the next."""
    events = json.loads(trace.read_text())["traceEvents"]
    steps = sorted((e["ts"], e["args"]["graph"]) for e in events if e["ph"] == "X" and e["name"] == "batch step" and e["pid"] == 0)
    graphs = [graph for _, graph in steps]
    graph = max(set(graphs), key=graphs.count)
    return graph, [(b - a) / 1e3 for (a, first), (b, second) in zip(steps, steps[1:]) if first == second == graph]


def ask(url, number, tokens):
    body = json.dumps({"prompt": ids(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens


def online(url, batch, tokens):
    """So many requests, each a moment after the one before; all run at the same time for most of it."""
    threads = [threading.Thread(target=ask, args=(url, number, tokens)) for number in range(batch)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()


def verdict(rounds):
    """Figures of rounds of (fixed, online) medians in milliseconds."""
    fixed, served = (min(times) for times in zip(*rounds))
    ratios = [b / a for a, b in rounds]
    return {"fixed_ms": fixed, "online_ms": served, "ratio": served / fixed, "median_of_ratios": statistics.median(ratios), "rounds": rounds}

"""Decode through online admission against a fixed batch: the same requests, once as one list to mpk-run, which begins them together, and once one
after the other to mpk-serve, while the others run. Compared are the iterations that decode all of them, from the ranks' timelines. mpk-serve is asked
for whole answers, as mpk-run --json gives them, and for streams: there each token wakes three threads, the client among them, and on a machine
whose workers have all cores each of them interrupts a worker.

The rounds take turns, and the shortest of the medians counts: what else the machine does only makes iterations longer."""

import http.client
import json
import statistics
import threading
import time
from urllib.parse import urlsplit


def ids(number):
    """A prompt of 16 token ids."""
    return [1 + (37 * number + 11 * place) % 500 for place in range(16)]


def iterations(trace):
    """Milliseconds of each iteration of the most frequent graph, from one batch step to the next."""
    events = json.loads(trace.read_text())["traceEvents"]
    steps = sorted((e["ts"], e["args"]["graph"]) for e in events if e["ph"] == "X" and e["name"] == "batch step" and e["pid"] == 0)
    graphs = [graph for _, graph in steps]
    graph = max(set(graphs), key=graphs.count)
    return graph, [(b - a) / 1e3 for (a, first), (b, second) in zip(steps, steps[1:]) if first == second == graph]


def ask(url, number, tokens, stream):
    body = json.dumps({"prompt": ids(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream,
                       **({"stream_options": {"include_usage": True}} if stream else {})})
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    # Read only at the end, because this machine has other work.
    answer = connection.getresponse().read()
    last = answer.split(b"data: ")[-2] if stream else answer
    assert json.loads(last)["usage"]["completion_tokens"] == tokens, answer[-300:]
    connection.close()


def online(url, batch, tokens, stream):
    """Sends this many requests, each a moment after the one before. All of them run at the same time for most of the time."""
    threads = [threading.Thread(target=ask, args=(url, number, tokens, stream)) for number in range(batch)]
    for thread in threads:
        thread.start()
        time.sleep(0.003)
    for thread in threads:
        thread.join()


def verdict(rounds):
    """Figures of rounds of (fixed, whole answers, streams) medians in milliseconds."""
    fixed, *served = (min(times) for times in zip(*rounds))
    result = {"fixed_ms": fixed, "rounds": rounds}
    for place, (name, online_ms) in enumerate(zip(("online", "streams"), served), 1):
        ratios = [times[place] / times[0] for times in rounds]
        result |= {f"{name}_ms": online_ms, f"{name}_ratio": online_ms / fixed, f"{name}_median_of_ratios": statistics.median(ratios)}
    return result

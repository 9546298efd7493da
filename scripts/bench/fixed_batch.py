"""Compares decode through online admission with decode of a fixed batch. The same requests run once as one list in mpk-run, which begins them
together, and once in mpk-serve, where they arrive one after the other while the others run. The comparison uses the iterations that decode one token
of each request, from the ranks' timelines. mpk-serve is asked for

- whole answers, as mpk-run --json gives them;
- streams that the clients read as they arrive. Each token wakes the server's thread and a client. If the workers have all cores of the machine, each
  of these interrupts a worker;
- streams that the clients read only at the end, as if they were on another machine. This shows the server's own work alone.

mpk-run and mpk-serve are both started with --greedy and without log-probabilities, so that they run the same graphs. By default mpk-serve has the
sampling operators and log-probabilities in its graphs. What these cost greedy requests that want neither is a separate figure, measured with whole
answers.

Iterations take longer if the KV caches hold more tokens. So only iterations with about the same number of tokens are compared: they are sorted into
groups of 32 tokens per request, and only groups that occur in all kinds of runs count.

The kinds of runs alternate in rounds. For each group, the smallest of the rounds' medians counts, because other work on the machine can only make
iterations longer."""

import http.client
import json
import socket
import statistics
import threading
import time
from urllib.parse import urlsplit


def ids(number):
    """A prompt of 16 token ids."""
    return [1 + (37 * number + 11 * place) % 500 for place in range(16)]


KINDS = {"online": "online", "sampling": "online with sampling graphs", "streams": "streamed", "unread": "streamed, read at the end"}
GROUP_TOKENS = 32
# More iterations than a run has.
ITERATIONS = 100_000


def iterations(trace, batch):
    """The graph of the iterations that decode `batch` requests, and the medians of their times in milliseconds, from one batch step to the next, by
    tokens in the KV cache of a request."""
    events = json.loads(trace.read_text())["traceEvents"]
    steps = sorted((e["ts"], e["args"]) for e in events if e["ph"] == "X" and e["name"] == "batch step" and e["pid"] == 0)
    graphs, groups = set(), {}
    for (begin, args), (end, following) in zip(steps, steps[1:]):
        if args["active"] == args["rows"] == following["active"] == following["rows"] == batch:
            graphs.add(args["graph"])
            groups.setdefault(args["context"] // batch // GROUP_TOKENS, []).append((end - begin) / 1e3)
    return graphs, {group: statistics.median(times) for group, times in groups.items()}


def ask(url, number, tokens, kind):
    stream = kind in ("streams", "unread")
    body = json.dumps({"prompt": ids(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream,
                       **({"stream_options": {"include_usage": True}} if stream else {})})
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    connection.connect()
    if kind == "unread":
        # The system wakes this thread only when this many bytes have arrived, or at the end.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 20)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", "Connection": "close"})
    answer = connection.getresponse().read()
    last = answer.split(b"data: ")[-2] if stream else answer
    assert json.loads(last)["usage"]["completion_tokens"] == tokens, answer[-300:]
    connection.close()


def online(url, batch, tokens, kind):
    """Sends this many requests, each a moment after the one before. All of them run at the same time for most of the time."""
    threads = [threading.Thread(target=ask, args=(url, number, tokens, kind)) for number in range(batch)]
    for thread in threads:
        thread.start()
        time.sleep(0.003)
    for thread in threads:
        thread.join()


def verdict(rounds):
    """Figures of rounds of (fixed, then KINDS) times in milliseconds by group."""
    common = sorted(set.intersection(*(set(groups) for times in rounds for groups in times)))
    if not common:
        raise SystemExit("fixed_batch: the runs have no iterations with as many tokens in their KV caches; use more --tokens")
    mean = [[statistics.mean(groups[group] for group in common) for groups in times] for times in rounds]
    fixed, *served = (statistics.mean(min(times[kind][group] for times in rounds) for group in common) for kind in range(1 + len(KINDS)))
    result = {"fixed_ms": fixed, "groups_of_tokens": [GROUP_TOKENS * group for group in common],
              "rounds": [[{GROUP_TOKENS * group: ms for group, ms in sorted(groups.items())} for groups in times] for times in rounds]}
    for place, (name, online_ms) in enumerate(zip(KINDS, served), 1):
        ratios = [times[place] / times[0] for times in mean]
        result |= {f"{name}_ms": online_ms, f"{name}_ratio": online_ms / fixed, f"{name}_median_of_ratios": statistics.median(ratios)}
    return result

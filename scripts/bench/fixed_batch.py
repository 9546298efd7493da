"""Decode through online admission against a fixed batch: the same requests, once as one list to mpk-run, which begins them together, and once one
after the other to mpk-serve, while the others run. Compared are iterations that decode one token of each request, from the ranks' timelines. mpk-serve
is asked for

- whole answers, as mpk-run --json gives them;
- streams that the clients read as they arrive: there each token wakes the server's thread and a client, and on a machine whose workers have all
  cores each of them interrupts a worker;
- streams that the clients read at the end, as if they were on another machine: what is left is the server's own work.

mpk-run and mpk-serve are both started with --greedy, so that they run the same graphs. By default mpk-serve has the sampling operators in its
graphs, for requests that sample. What they cost requests that do not is a figure of its own, of whole answers.

An iteration takes longer the more tokens the KV caches hold. So iterations are compared with iterations of as many tokens: they are sorted into
groups of 32 tokens a request, and only groups that all kinds of runs have count.

The rounds take turns, and for each group the shortest of the rounds' medians counts: what else the machine does only makes iterations longer."""

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
# More than a run has.
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
        # The system wakes this thread when so much has arrived, or at the end.
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

"""Measures how much a flood of requests slows a running stream. One long stream of our server runs in four phases:
alone; together with as many requests as fill its slots; during many connections whose requests wait in its queue; and
during many connections whose requests are refused.

In each phase, the stream's tokens are counted from its first to its last, so its own wait for a slot is not included. The clients of the flood
are one process, which sends a new request as soon as the last one has been answered."""

import json
import multiprocessing
import os
import selectors
import socket
import threading
import time
from urllib.parse import urlsplit

BODY = {"prompt": "In the beginning", "max_tokens": 30, "ignore_eos": True, "temperature": 0}
# Always refused, even if the queue has room, so the stream finds a slot when it starts again.
WRONG = {**BODY, "max_tokens": 0}


def request(place, body):
    data = json.dumps(body).encode()
    return (f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n").encode() + data


def stream(url, seen, end):
    """Streams until `end`; for each one a list of times and tokens."""
    place = urlsplit(url)
    body = {**BODY, "max_tokens": 480, "stream": True}
    while not end.is_set():
        mine = []
        seen.append(mine)
        with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
            connection.sendall(request(place, body))
            while data := connection.recv(1 << 16):
                if tokens := data.count(b'"text"'):
                    mine.append((time.monotonic(), tokens))
        if not mine:  # refused: the flood took its place
            time.sleep(0.001)


def rate(seen, begin, end):
    """Tokens per second while a stream was running; None if there was none."""
    tokens = seconds = 0
    for pieces in seen:
        inside = [piece for piece in pieces if begin <= piece[0] < end]
        if len(inside) > 1:
            tokens += sum(count for _, count in inside[1:])
            seconds += inside[-1][0] - inside[0][0]
    return tokens / seconds if seconds else None


def flood(url, connections, body, end, results):
    """Keeps this many connections busy until `end`; records how often each status was returned, and the processor time in seconds."""
    place = urlsplit(url)
    text = request(place, body)
    selector = selectors.DefaultSelector()
    statuses = {}

    def begin():
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((place.hostname, place.port))
        selector.register(connection, selectors.EVENT_WRITE, bytearray())

    for _ in range(connections):
        begin()
    while not end.is_set():
        for key, mask in selector.select(0.1):
            try:
                if mask & selectors.EVENT_WRITE:
                    key.fileobj.send(text)
                    selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                    continue
                data = key.fileobj.recv(1 << 16)
            except OSError:
                data = b""
            key.data.extend(data)
            if not data:
                status = bytes(key.data[9:12]).decode() or "no answer"
                statuses[status] = statuses.get(status, 0) + 1
                selector.unregister(key.fileobj)
                key.fileobj.close()
                begin()
    results.put((statuses, time.process_time()))


def turns(process):
    """For each thread of the server, the seconds it has run on a core so far, and those it has waited for one."""
    found = {}
    for folder in process.glob("task/*"):
        try:
            ran, waited = (folder / "schedstat").read_text().split()[:2]
            found[folder.name] = ((folder / "comm").read_text().strip(), int(ran) / 1e9, int(waited) / 1e9)
        except OSError:
            continue
    return found


def phase(url, connections, body, seconds, process):
    """Runs one phase; returns a dictionary with the stream's tokens per second and the answers to the flood."""
    seen, end = [], threading.Event()
    reader = threading.Thread(target=stream, args=(url, seen, end))
    reader.start()
    time.sleep(0.3)
    # Those of the running server, not of those that came first.
    stop, results, clients = multiprocessing.Event(), multiprocessing.Queue(), None
    if connections:
        clients = multiprocessing.Process(target=flood, args=(url, connections, body, stop, results))
        clients.start()
        time.sleep(0.7)
    before, begin = turns(process), time.monotonic()
    time.sleep(seconds)
    after, finish = turns(process), time.monotonic()
    stop.set()
    statuses, processor = results.get() if clients else ({}, 0.0)
    if clients:
        clients.join()
    end.set()
    reader.join()
    threads = {}
    for number, (name, ran, waited) in after.items():
        _, ran_before, waited_before = before.get(number, (name, 0.0, 0.0))
        share = threads.setdefault(name, [0.0, 0.0])
        share[0] += (ran - ran_before) / (finish - begin)
        share[1] += (waited - waited_before) / (finish - begin)
    return {"connections": connections, "tokens_per_s": rate(seen, begin, finish), "answers": statuses,
            "clients_seconds": round(processor, 3), "cpus": sorted(os.sched_getaffinity(0)),
            "threads": {name: {"runs": round(ran, 3), "waits_for_a_core": round(waited, 3)}
                        for name, (ran, waited) in sorted(threads.items()) if ran + waited > 0.005}}


def line(name, result, alone):
    tokens = result["tokens_per_s"]
    share = f"{100 * tokens / alone:5.1f} %" if tokens and alone else "      -"
    threads = ", ".join(f"{thread} {100 * t['runs']:.0f}+{100 * t['waits_for_a_core']:.0f}" for thread, t in result["threads"].items())
    return f"  {name:34} {tokens or 0:7.0f} tokens/s {share}  answers {result['answers']}  % of a core, running+waiting: {threads}"

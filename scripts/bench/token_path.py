"""Measures the time of a token from the kernel to the client, and of a first token from the client's request to the client, for one stream of our
server.

The kernel's times come from the timeline that the server writes at its end (`--trace`). On the CPU target the timeline has the same clock as this
process. A batch step begins when the tokens of an iteration are complete. The client's time is when its socket has returned the bytes. Recording
the timeline costs a few microseconds per iteration."""

import ctypes
import json
import os
import re
import socket
import struct
import time
from urllib.parse import urlsplit

SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def be_prompt():
    """Asks for a real-time priority, otherwise for short time slices (Linux 6.12), as the server's threads do. The workers may use all
    cores, and delays of the client must not count."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        number = SCHED_SETATTR.get(os.uname().machine)
        if number is not None:
            attributes = ctypes.create_string_buffer(struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, 100_000, 0, 0))
            ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def stream(url, prompt, tokens):
    """Sends one request; returns when it was sent, and for each piece of the answer when it arrived and its number of tokens."""
    place = urlsplit(url)
    body = json.dumps({
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True,
    }).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n").encode()
    with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent, reads = time.monotonic_ns(), []
        connection.sendall(head + body)
        while data := connection.recv(1 << 16):
            reads.append((time.monotonic_ns(), data))
    pieces, text = [], b""
    for moment, data in reads:
        text += data
        while (found := re.search(rb'"token_ids":\[([^\]]*)\]', text)) is not None:
            pieces.append((moment, len(found[1].split(b",")) if found[1] else 0))
            text = text[found.end():]
    return sent, pieces


def figures(trace, runs):
    """Figures from the timeline and the client's times, in milliseconds. They are the path of every token; the times to
    first token; the part of these times outside the one or two iterations that made the first piece; and how much of
    that part passes before the first iteration is published. The timeline keeps only the latest events, so runs that
    began before it are left out."""
    begin = next(e["args"]["ns"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "begin" and e["pid"] == 0)
    steps = sorted((begin + 1e3 * e["ts"], begin + 1e3 * (e["ts"] + e["dur"])) for e in trace["traceEvents"]
                   if e["ph"] == "X" and e["name"] == "batch step" and e["pid"] == 0)
    ways, firsts, beyond, admissions = [], [], [], []
    for sent, pieces in runs:
        # The first step after the request was sent takes the first token. Before it, the kernel was parked in the step that begins the
        # request's first iteration.
        after = [place for place, (begun, _) in enumerate(steps) if begun > sent]
        if not after or after[0] == 0:
            continue
        token = 0
        for moment, count in pieces:
            token += count
            # A piece may hold several tokens, because text may become final only with the last of them.
            if count and token <= len(after):
                ways.append((moment - steps[after[token - 1]][0]) / 1e6)
        moment, count = pieces[0]
        firsts.append((moment - sent) / 1e6)
        # The intervals that the client waited for, each from the end of one step to the beginning of the next. A later one may have any
        # length.
        waited = after[:min(max(count, 1), 2)]
        iterations = sum(steps[place][0] - steps[place - 1][1] for place in waited) / 1e6
        beyond.append(firsts[-1] - iterations)
        admissions.append((steps[after[0] - 1][1] - sent) / 1e6)
    if not firsts:
        raise ValueError("the timeline contains none of the runs")
    return ways, firsts, beyond, admissions


def measure(server, url, trace, runs=5, tokens=200):
    """Runs streams one after the other, then ends the server and reads its timeline."""
    be_prompt()
    seen = []
    for run in range(runs + 1):
        one = stream(url, "In the beginning God created the heaven", tokens)
        if run > 0:  # the first one warms up
            seen.append(one)
        time.sleep(0.3)
    server.end()
    return figures(json.loads(trace.read_text()), seen)

#!/usr/bin/env python3
"""Measures servers with OpenAI's API under open-loop load: each request is sent at its scheduled time, however slow the server is.

Reports time to first token, time between tokens and whole time (p50, p90, p99, in ms) and throughput, for each server, mix
and rate, as a table on stdout and with --json as one object. Needs only Python.

    scripts/bench_serve.py --model examples/tiny/model.json --ranks 2 --rates 2,8,32 --plot serve.svg
    scripts/bench_serve.py --model MODEL --llama-server PATH --gguf FILE     # llama.cpp's server in the same run
    scripts/bench_serve.py --url http://127.0.0.1:8000                       # a server that is already running
    scripts/bench_serve.py --streams 64 ...                                  # closed loop: always 64 requests at a time
    scripts/bench_serve.py --token-path --ranks 1                            # one stream: from the kernel's token to the client's byte
    scripts/bench_serve.py --fixed-batch --ranks 1                           # decode through online admission against a fixed batch
    scripts/bench_serve.py --flood --ranks 1                                 # how much 200 connections slow a running stream

Mixes: short (prompts of 16 words), shared-prefix (192 common words, then 16), long-prompt (every tenth has 256 words).
llama.cpp's server is built with `cmake -B build && cmake --build build --target llama-server`, and takes the same weights as
a GGUF file (`scripts/bench/gguf_model.py CHECKPOINT FILE`, or convert_hf_to_gguf.py of llama.cpp).
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "bench"))
import fixed_batch  # noqa: E402
import flood  # noqa: E402
import serve_plot  # noqa: E402
import token_path  # noqa: E402

MIXES = ("short", "shared-prefix", "long-prompt")
WORDS = (
    "and the of that he shall unto for I his a LORD they be is not him them it with all thou thy was God which my me said "
    "but ye their have will thee from as are when this out were upon man you by Israel king son up there hath then people"
).split()
START_SECONDS = 180
END_SECONDS = 30
# Environment of the processes that mpirun starts.
VARIABLES = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
             "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_odls_base_sigkill_timeout": "60"}


def words(generator, count):
    return " ".join(generator.choice(WORDS) for _ in range(count))


def prompt(mix, generator, number):
    """The text of request `number`."""
    if mix == "shared-prefix":
        return words(random.Random(1), 192) + " " + words(generator, 16)
    return words(generator, 256 if mix == "long-prompt" and number % 10 == 9 else 16)


def percentile(values, share):
    """The value below which `share` of them lie; None if there are none."""
    if not values:
        return None
    values = sorted(values)
    return values[min(len(values) - 1, round(share * (len(values) - 1)))]


def spread_ms(values):
    return {f"p{p}": percentile(values, p / 100) for p in (50, 90, 99)}


def spread(values):
    return {f"p{p}": None if (v := percentile(values, p / 100)) is None else 1e3 * v for p in (50, 90, 99)}


class Failed(Exception):
    """The server did not answer."""


async def events(reader):
    """The data of server-sent events in a chunked body."""
    text = b""
    while True:
        size = int((await reader.readline()).split(b";")[0] or b"0", 16)
        chunk = await reader.readexactly(size + 2)
        if size == 0:
            return
        text += chunk[:-2]
        while b"\n\n" in text:
            event, text = text.split(b"\n\n", 1)
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                yield json.loads(event[6:])


async def ask(url, body):
    """Sends one request; returns the times of its start, its pieces of text and its end, and its new tokens."""
    place = urlsplit(url)
    data = json.dumps(body).encode()
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if status != 200:
            raise Failed(status)
        pieces, tokens, complete = [], None, False
        async for event in events(reader):
            if "error" in event:
                raise Failed(event["error"])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if choice.get("text"):
                    pieces.append(time.perf_counter())
                complete |= choice.get("finish_reason") is not None
        if not complete:
            raise Failed("the stream ended early")
        return begin, pieces, time.perf_counter(), tokens if tokens is not None else len(pieces)
    finally:
        writer.close()


async def load(url, mix, rate, options):
    """Runs Poisson arrivals at `rate` per second; returns the figures."""
    generator = random.Random(f"{mix} {rate} {options.seed}")
    tasks, late = [], []
    begin = time.perf_counter()
    moment = 0.0
    while (moment := moment + generator.expovariate(rate)) < options.seconds:
        body = {
            "prompt": prompt(mix, generator, len(tasks)), "max_tokens": options.max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        }
        await asyncio.sleep(max(0, begin + moment - time.perf_counter()))
        late.append(time.perf_counter() - begin - moment)
        tasks.append(asyncio.create_task(asyncio.wait_for(ask(url, body), options.timeout)))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return figures(mix, rate, results, time.perf_counter() - begin, late)


def figures(mix, rate, results, elapsed, late):
    """The figures of all requests of a mix and a rate (None: closed loop)."""
    good = [result for result in results if not isinstance(result, BaseException)]
    reasons = {}
    for result in results:
        if isinstance(result, BaseException):
            reason = f"{type(result).__name__}: {result}"[:80]
            reasons[reason] = reasons.get(reason, 0) + 1
    gaps = [b - a for _, pieces, _, _ in good for a, b in zip(pieces, pieces[1:])]
    return {
        "mix": mix, "rate": rate, "requests": len(results), "failed": reasons,
        "first_token_ms": spread([pieces[0] - start for start, pieces, _, _ in good if pieces]),
        "between_tokens_ms": spread(gaps),
        "whole_ms": spread([end - start for start, _, end, _ in good]),
        "requests_per_s": len(good) / elapsed, "tokens_per_s": sum(r[3] for r in good) / elapsed,
        "mean_tokens": sum(r[3] for r in good) / max(1, len(good)),
        # The load of the client itself. If it is high, the machine is too busy to measure.
        "late_ms": spread(late),
    }


async def closed_loop(url, mix, options):
    """Runs this many streams at a time, each sending one request after the other; returns the figures."""
    generator = random.Random(f"{mix} {options.seed}")
    results, sent = [], 0
    begin = time.perf_counter()

    async def one_after_the_other():
        nonlocal sent
        while time.perf_counter() - begin < options.seconds:
            sent += 1
            body = {"prompt": prompt(mix, generator, sent - 1), "max_tokens": options.max_tokens, "temperature": 0, "stream": True,
                    "stream_options": {"include_usage": True}, "ignore_eos": True}
            try:
                results.append(await asyncio.wait_for(ask(url, body), options.timeout))
            except Exception as error:
                results.append(error)
                await asyncio.sleep(0.1)

    await asyncio.gather(*(one_after_the_other() for _ in range(options.streams)))
    return figures(mix, None, results, time.perf_counter() - begin, [])


class Server:
    """A server that this script starts and ends."""

    def __init__(self, name, command, url, ready):
        self.name, self.url = name, url
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env=VARIABLES, start_new_session=True
        )
        end = time.monotonic() + START_SECONDS
        while True:
            # The writing process shares the file position, so the text is read without moving it.
            text = os.pread(self.log.fileno(), 1 << 20, 0).decode(errors="replace")
            if found := ready(text):
                self.url = found
                return
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                sys.exit(f"bench_serve: {name} did not start: {' '.join(map(str, command))}\n{text[-2000:]}")
            time.sleep(0.1)

    def rank_0(self):
        """The folder of rank 0 in /proc."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                rank = re.search(rb"(?:^|\0)OMPI_COMM_WORLD_RANK=(\d+)\0", (entry / "environ").read_bytes())
                name = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if self.process.pid in (parent, int(entry.name)) and name == "mpk-serve" and (rank is None or rank[1] == b"0"):
                return entry
        sys.exit(f"bench_serve: {self.name} has no rank 0")

    def end(self):
        """Tells our server to end by itself, with one signal to rank 0; other servers are ended through their launcher."""
        os.kill(int(self.rank_0().name), signal.SIGTERM)
        self.process.wait(END_SECONDS)

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def ours(options, *more):
    binary = options.binary or HERE.parent / "target/release/mpk-serve"
    if not Path(binary).exists():
        sys.exit(f"bench_serve: {binary} is missing; build it with `cargo build --release -p mpk-launch --bins`")
    command = [binary, options.model, "--port", "0", "--max-queued-requests", "10000", "--prefix-cache", options.prefix_cache,
               "--backend", options.backend, *more]
    if options.max_batch:
        command += ["--max-batch", str(options.max_batch)]
    if options.workers:
        command += ["--workers", str(options.workers)]
    if options.ranks > 1:
        command = ["mpirun", "-n", str(options.ranks), *command]

    def ready(text):
        found = re.search(r"^listening on (http://\S+)$", text, re.MULTILINE)
        return found and found[1]

    return Server(f"mpk, {options.ranks} ranks", command, None, ready)


def measure_token_path(options):
    """Measures one stream at a time; returns the figures, and whether they are as expected."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        server = ours(options, "--idle-exit", "0", "--trace", str(trace))
        try:
            ways, firsts, beyond, admissions = token_path.measure(server, server.url, trace)
        finally:
            server.stop()
    result = {"server": server.name, "token_to_client_ms": spread_ms(ways), "first_token_ms": spread_ms(firsts),
              "first_token_beyond_two_iterations_ms": spread_ms(beyond), "until_admitted_ms": spread_ms(admissions), "tokens": len(ways)}
    print(f"{server.name}, one stream, {len(ways)} pieces")
    for name, text in (("token_to_client_ms", "from the kernel's token to the client's byte"), ("first_token_ms", "first token"),
                       ("first_token_beyond_two_iterations_ms", "first token, beyond two iterations"),
                       ("until_admitted_ms", "of that until the first iteration is published")):
        print(f"  {text}: " + ", ".join(f"{p} {v:.3f} ms" for p, v in result[name].items()))
    good = options.token_limit is None or result["token_to_client_ms"]["p50"] <= options.token_limit
    if not good:
        print(f"bench_serve: more than {options.token_limit:g} ms", file=sys.stderr)
    return result, good


def measure_fixed_batch(options):
    """Rounds of mpk-run and mpk-serve in turn, for one request and for as many as model.json has slots."""
    results = []
    run = Path(options.binary or HERE.parent / "target/release/mpk-serve").with_name("mpk-run")
    most = options.max_batch or json.loads(Path(options.model).read_text()).get("max_batch", 8)
    for batch in sorted({1, most}):
        rounds = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                traces = [Path(folder) / f"{name}.json" for name in ("fixed", *fixed_batch.KINDS)]
                more = ["--trace-iterations", str(fixed_batch.ITERATIONS), "--trace"]
                command = [run, options.model, "--backend", options.backend, "--json", "--max-new-tokens", str(options.tokens),
                           "--ignore-eos", "--greedy", *more, traces[0]]
                if options.max_batch:
                    command += ["--max-batch", str(options.max_batch)]
                for number in range(batch):
                    command += ["--prompt-tokens", ",".join(map(str, fixed_batch.ids(number)))]
                if options.workers:
                    command += ["--workers", str(options.workers)]
                if options.ranks > 1:
                    command = ["mpirun", "-n", str(options.ranks), *command]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=VARIABLES)
                for trace, kind in zip(traces[1:], fixed_batch.KINDS):
                    greedy = () if kind == "sampling" else ("--greedy", "--logprobs", "0")
                    server = ours(options, *greedy, *more, trace)
                    try:
                        fixed_batch.online(server.url, batch, options.tokens, kind)
                        server.end()
                    finally:
                        server.stop()
                graphs, times = zip(*(fixed_batch.iterations(trace, batch) for trace in traces))
                if len(set.union(*graphs)) != 1:
                    sys.exit(f"bench_serve: the batches differ: {graphs}")
                rounds.append(times)
        result = {"ranks": options.ranks, "batch": batch, **fixed_batch.verdict(rounds)}
        results.append(result)
        print(f"{options.ranks} ranks, batch {batch}: fixed {result['fixed_ms']:.3f} ms per iteration" + "".join(
            f"; {text} {result[name + '_ms']:.3f} ms, {100 * (result[name + '_ratio'] - 1):+.1f} % "
            f"(median of the rounds' ratios {100 * (result[name + '_median_of_ratios'] - 1):+.1f} %)"
            for name, text in fixed_batch.KINDS.items()), flush=True)
    return results


def measure_flood(options):
    """Measures a stream alone and during three kinds of other load."""
    phases, alone = [], None
    many = options.connections
    for name, connections, body in (("alone", 0, None), ("with 7 other requests", 7, flood.BODY),
                                    (f"with {many} connections, all accepted", many, flood.BODY), (f"with {many} connections, all refused", many, flood.WRONG)):
        server = ours(options)
        try:
            result = flood.phase(server.url, connections, body, options.seconds, server.rank_0())
        finally:
            server.stop()
        alone = alone or result["tokens_per_s"]
        phases.append({"phase": name, **result})
        print(flood.line(name, result, alone), flush=True)
    return {"server": f"mpk, {options.ranks} ranks", "phases": phases}


def llama(options):
    url = f"http://127.0.0.1:{options.llama_port}"
    command = [options.llama_server, "-m", options.gguf, "--host", "127.0.0.1", "--port", str(options.llama_port),
               "-np", str(options.slots), "-c", str(512 * options.slots), "-ngl", "0", "-t", str(options.llama_threads)]

    def ready(_):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                return url if answer.status == 200 else None
        except OSError:
            return None

    return Server("llama.cpp", command, url, ready)


def measure(name, url, options):
    """All mixes and rates of one server."""
    # The first request warms it up.
    try:
        asyncio.run(ask(url, {"prompt": "In the beginning", "max_tokens": 4, "stream": True, "temperature": 0}))
    except OSError as error:
        sys.exit(f"bench_serve: {url}: {error}")
    results = []
    for mix in options.mixes:
        for rate in [None] if options.streams else options.rates:
            run = closed_loop(url, mix, options) if rate is None else load(url, mix, rate, options)
            result = {"server": name, **asyncio.run(run)}
            results.append(result)
            print(line(result), flush=True)
    return results


def line(result):
    def three(values):
        return " ".join("      -" if v is None else f"{v:7.1f}" for v in values.values())

    failed = sum(result["failed"].values())
    return (
        f"{result['server']:16} {result['mix']:14} {result['rate'] or 0:6g} {result['requests']:5} {failed:6}  "
        f"{three(result['first_token_ms'])}  {three(result['between_tokens_ms'])}  {three(result['whole_ms'])}  "
        f"{result['requests_per_s']:7.1f} {result['tokens_per_s']:8.1f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="measure this running server instead of starting mpk-serve")
    parser.add_argument("--model", default=str(HERE.parent / "examples/tiny/model.json"), help="model that mpk-serve serves (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--binary", help="path of mpk-serve (default: in target/release)")
    parser.add_argument("--llama-server", help="path of llama.cpp's server, to measure it in the same run")
    parser.add_argument("--gguf", help="model of llama.cpp's server")
    parser.add_argument("--llama-port", type=int, default=8089)
    parser.add_argument("--max-batch", type=int, help="number of slots of mpk-serve (default: as in model.json)")
    parser.add_argument("--slots", type=int, default=8, help="number of slots of llama.cpp's server (default %(default)s)")
    parser.add_argument("--llama-threads", type=int, default=os.cpu_count(), help="threads of llama.cpp's server; they spin, so fewer may be faster on a busy machine")
    parser.add_argument("--streams", type=int, help="measure a closed loop with this many requests at a time, instead of rates")
    parser.add_argument("--rates", default="2,8", help="requests per second, separated by commas (default %(default)s)")
    parser.add_argument("--mix", action="append", choices=MIXES, dest="mixes", help="a mix of requests; may be given several times (default: all mixes)")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of arrivals for each mix and rate (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=120, help="time limit of a request in seconds (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, help="workers of each rank (default: one per core)")
    parser.add_argument("--prefix-cache", choices=("on", "off"), default="on", help="prefix cache of mpk-serve; only the mix shared-prefix repeats pages (default %(default)s)")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu", help="backend of mpk-serve, and of mpk-run with --fixed-batch "
                        "(default %(default)s)")
    parser.add_argument("--fixed-batch", action="store_true", help="measure iterations of mpk-serve against those of mpk-run, and nothing else")
    parser.add_argument("--rounds", type=int, default=5, help="with --fixed-batch: number of rounds of both in turn (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="with --fixed-batch: new tokens of each request (default %(default)s)")
    parser.add_argument("--flood", action="store_true", help="measure only how a flood of requests affects a running stream")
    parser.add_argument("--connections", type=int, default=200, help="with --flood: number of connections (default %(default)s)")
    parser.add_argument("--token-path", action="store_true", help="measure one stream from the kernel's token to the client's byte, and "
                        "nothing else")
    parser.add_argument("--token-limit", type=float, metavar="MS", help="with --token-path: exit with status 1 if the median is above MS milliseconds")
    parser.add_argument("--json", help="write all results to this file as JSON")
    parser.add_argument("--plot", help="write a plot (SVG) to this file")
    options = parser.parse_args()
    options.rates = [float(rate) for rate in options.rates.split(",")]
    options.mixes = options.mixes or list(MIXES)
    if options.plot and options.streams:
        parser.error("--plot is for rates, not for --streams")
    if bool(options.llama_server) != bool(options.gguf):
        parser.error("--llama-server and --gguf come together")

    for name, wanted, run in (("flood", options.flood, measure_flood), ("fixed_batch", options.fixed_batch, measure_fixed_batch)):
        if wanted:
            result = run(options)
            if options.json:
                Path(options.json).write_text(json.dumps({"schema": "mpk-bench-serve/1", name: result}, indent=1) + "\n")
            return
    if options.token_path:
        result, good = measure_token_path(options)
        if options.json:
            Path(options.json).write_text(json.dumps({"schema": "mpk-bench-serve/1", "token_path": result}, indent=1) + "\n")
        sys.exit(0 if good else 1)
    three = f"{'p50':>7} {'p90':>7} {'p99':>7}"
    print(f"{'':52}{'first token, ms':>23}  {'between tokens, ms':>23}  {'whole, ms':>23} {'answers per s':>17}")
    print(f"{'server':16} {'mix':14} {'rate/s':>6} {'sent':>5} {'failed':>6}  {three}  {three}  {three}  requests   tokens")
    results = []
    starters = [lambda: ours(options)] if not options.url else []
    if options.llama_server:
        starters.append(lambda: llama(options))
    if options.url:
        results += measure("given", options.url, options)
    for start in starters:
        server = start()
        try:
            results += measure(server.name, server.url, options)
        finally:
            server.stop()
    if options.json:
        Path(options.json).write_text(json.dumps({"schema": "mpk-bench-serve/1", "results": results}, indent=1) + "\n")
    if options.plot:
        Path(options.plot).write_text(serve_plot.svg(results))
    for result in results:
        for reason, count in result["failed"].items():
            print(f"{result['server']}, {result['mix']}, {result['rate'] or 0:g}/s: {count} x {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()

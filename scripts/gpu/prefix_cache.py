"""Checks the prefix cache of a server: prompts that begin alike, under load and with cancels, have the tokens that they have on a
server without the cache, and all of the pages that they share come from it."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common import PATIENCE
from server import IDLE_EXIT, LOGPROBS, Wrong, compare_with_alone, steps_of

FAMILIES, PAGES, TIMES, CLIENTS, CANCELLED_OF = 3, 4, 3, 12, 5


@dataclass
class Request:
    """A request, and how many tokens of its prompt the cache has after the first request of its family."""

    body: dict
    cached: int


class Requests:
    """Families of requests. All prompts of a family begin like its first one."""

    def __init__(self, check, path):
        document = json.loads(path.read_text())
        self.page = document["page_size"]
        self.pages = document["max_batch"] * document["max_seq_len"] // self.page  # of the server
        self.draw = random.Random(check.seed + 2)
        self.families = [self.family() for _ in range(FAMILIES)]

    def tokens(self, count):
        """A random text."""
        return [self.draw.randrange(1, 200) for _ in range(count)]

    def family(self):
        """Prompts that part from the first within a page and at a page's border, and beginnings of it, of which one ends at a border."""
        page = self.page
        first = self.tokens(PAGES * page + page // 3)
        parted = [first[:at] + self.tokens(page + page // 2) for at in (2 * page + page // 2, 3 * page)]
        return [Request({"prompt": prompt, "max_tokens": self.draw.randrange(2, 24), "temperature": 0, "ignore_eos": True},
                        self.shared(prompt, first)) for prompt in [first, *parted, first[:PAGES * page], first[:2 * page + 5]]]

    def shared(self, prompt, first):
        """Tokens in the pages that two prompts share. The last token of a prompt is always computed."""
        same = next((at for at, (a, b) in enumerate(zip(prompt, first)) if a != b), min(len(prompt), len(first)))
        return min(same, len(prompt) - 1) // self.page * self.page

    def alone(self, server):
        """The answers of a server without the cache, one after the other."""
        return [[server.steps(request.body) for request in family] for family in self.families]

    def ask(self, server, request, least, most=None):
        """The answer's steps, and the number of tokens from the cache, which must be in these bounds."""
        answer = server.answer(request.body | {"logprobs": LOGPROBS})
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if cached < least or (most is not None and cached > most):
            raise Wrong(f"{cached} of {len(request.body['prompt'])} prompt tokens came from the cache; expected: {least}")
        return steps_of(answer), cached

    def judge(self, server, alone):
        """All of a server with the cache, whose first requests these are."""
        ties = 0
        for family, answers in zip(self.families, alone, strict=True):
            steps, _ = self.ask(server, family[0], 0, 0)
            ties += compare_with_alone(server, "cold", family[0].body, answers[0], steps)
        found, cancelled, more = self.load(server, alone)
        ties += more
        server.until_free()
        first, answer, wanted = self.families[0][0], alone[0][0], self.families[0][0].cached
        # The kernel has ended meanwhile. The next one has the same pages.
        time.sleep(IDLE_EXIT * PATIENCE + 0.7)
        steps, _ = self.ask(server, first, wanted, wanted)
        ties += compare_with_alone(server, "after an idle time", first.body, answer, steps)
        # Other prompts need all pages, so those of the families are given up.
        for _ in range(self.pages // PAGES + 1):
            server.tokens({"prompt": self.tokens(PAGES * self.page + 1), "max_tokens": 1, "temperature": 0})
        for least in (0, wanted):
            steps, _ = self.ask(server, first, least, least)
            ties += compare_with_alone(server, "after others", first.body, answer, steps)
        server.until_free()
        return (f"{found} prompt tokens come from the cache, and the answers are those without it ({ties} near ties); "
                f"{cancelled} requests were cancelled; all pages free or kept at the end")

    def load(self, server, alone):
        """Requests of all families at a time; some are cancelled before or after their first token.

        Each must find the pages of its family's first request: the server has room for all pages of these prompts, and for those of
        running requests, so no page is given up."""
        orders = [(family, member) for family in range(FAMILIES) for member in range(len(self.families[family]))] * TIMES
        self.draw.shuffle(orders)
        delays = [self.draw.random() * 0.1 for _ in orders]
        before = server.gauge("prefix_cache_hits_total")

        def one(index):
            time.sleep(delays[index])
            family, member = orders[index]
            request = self.families[family][member]
            if index % CANCELLED_OF == CANCELLED_OF - 1:
                return server.cancelled(request.body, events=index // CANCELLED_OF % 2)
            return self.ask(server, request, request.cached)

        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(one, range(len(orders))))
        least = sum(answer[1] for answer in answers if answer is not None)
        hits = server.gauge("prefix_cache_hits_total") - before
        if hits < least:
            raise Wrong(f"prefix_cache_hits_total has risen by {hits:.0f}, answers say {least}")
        ties = 0
        for (family, member), answer in zip(orders, answers, strict=True):
            if answer is not None:
                ties += compare_with_alone(server, (family, member), self.families[family][member].body, alone[family][member], answer[0])
        total = sum(len(self.families[family][member].body["prompt"]) for (family, member), answer in zip(orders, answers) if answer)
        return f"{least} of {total}", answers.count(None), ties

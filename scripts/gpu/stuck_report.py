"""Works out from the task graphs alone what the report of a stuck run must say, and checks the report.

If the tasks of one operator never end on one rank, all other tasks run as far as their dependencies and the workers'
lists allow. Then every worker that is blocked waits for a known event or for known flagged words, with known counts.
With static placement these are exact. With dynamic placement they also depend on which tasks share a worker, so the
counts have only a bound.
"""

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field

PLACE = r", iteration (?P<iteration>\d+)(?:, graph (?P<graph>[^,]+), (?:(?P<tasks>\d+) tasks, the first is )?task (?P<task>\d+) \((?P<type>\S+) of (?P<op>[^)]*)\))?"
LINE = re.compile(r"^ *rank (?P<rank>\d+) (?P<who>.+?) (?:(?P<runs>was|were) running|waited for (?:event (?P<event>\d+) of rank (?P<owner>\d+)"
                  r"(?P<peers> \(triggered by peers\))?: count wanted (?P<wanted>\d+), count seen (?P<seen>\d+)|flagged words: "
                  r"tag wanted (?P<tag>\d+), tag seen (?P<tag_seen>\d+)|(?P<work>work)))" + PLACE + r"(?P<timed_out>  <- this wait ran out of time)?$")


def indices(who):
    """Numbers of the workers in `workers 0-5, 9`, or None where some are left out."""
    found = re.match(r"workers? ([\d, -]+?)(?P<more>\d+ more)?(?: and .*)?$", who)
    if not found or found["more"]:
        return None
    numbers = set()
    for piece in found[1].replace(" ", "").strip(",").split(","):
        first, _, last = piece.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


@dataclass
class RankState:
    """How far a rank gets in the first iteration."""

    graph: dict
    counters: dict
    done: set = field(default_factory=set)
    place: list = field(default_factory=list)  # next task of each worker's list


def dependencies(task):
    """Events of this iteration that a task waits for, in its order."""
    first = task["dependent_event"]
    ids = ([] if first is None else [first]) + [event for event in task.get("dependent_events", []) if event != first]
    return [event & 0xFFFFFFFF for event in ids]


def boxes_overlap(a, b):
    """Whether two boxes of regions share a place."""
    return all(low < other_high and other_low < high for (low, high), (other_low, other_high) in zip(a, b))


class Stuck:
    """The first iteration of all ranks with tasks of operator `op` of rank `rank` never ending; on the workers `only`, or on
    all."""

    def __init__(self, graphs, rank, op, only=None):
        self.rank, self.op, self.only = rank, op, only
        self.static = graphs[0]["placement"] == "static"
        self.ranks = [RankState(graph, defaultdict(int)) for graph in graphs]
        self.writers = defaultdict(list)  # of flagged tensors, on any rank: (rank, task, region)
        for number, state in enumerate(self.ranks):
            state.place = [0] * len(state.graph.get("worker_lists") or [])
            state.counters[1] = state.graph["all_events"][1]["num_triggers"]
            for index, task in enumerate(state.graph["all_tasks"]):
                for view in task["outputs"]:
                    if "flagged" in view["data_type"]:
                        self.writers[view["base_ptr"]].append((number, index, view["region"]))
        while self.advance():
            pass

    def missing_event(self, state, task):
        """The first event that a task still waits for."""
        events = state.graph["all_events"]
        return next((e for e in dependencies(task) if state.counters[e] < events[e]["num_triggers"]), None)

    def missing_words(self, task):
        """Whether flagged words that a task reads have not been written."""
        return any("flagged" in view["data_type"] and boxes_overlap(view["region"], region) and index not in self.ranks[writer].done
                   for view in task["inputs"] for writer, index, region in self.writers[view["base_ptr"]])

    def stalls(self, number, task, worker):
        """Whether the fault holds this task."""
        return number == self.rank and task["op_id"] == self.op and (self.only is None or worker in self.only)

    def try_task(self, number, index, worker):
        """Runs a task if it can run now."""
        state = self.ranks[number]
        task = state.graph["all_tasks"][index]
        if index in state.done or self.stalls(number, task, worker) or self.missing_event(state, task) is not None or self.missing_words(task):
            return False
        state.done.add(index)
        trigger = task["trigger_event"]
        if trigger is not None:
            remote = trigger >> 48 == 1
            self.ranks[(trigger >> 32) & 0xFFFF if remote else number].counters[trigger & 0xFFFFFFFF] += 1
        return True

    def advance(self):
        """Runs what can run; False when nothing can."""
        moved = False
        for number, state in enumerate(self.ranks):
            if not self.static:
                for index in range(2, len(state.graph["all_tasks"])):
                    moved |= self.try_task(number, index, None)
                continue
            for worker, tasks in enumerate(state.graph["worker_lists"]):
                while state.place[worker] < len(tasks) and self.try_task(number, tasks[state.place[worker]], worker):
                    state.place[worker] += 1
                    moved = True
        return moved

    def expected(self, number):
        """For a rank with static placement: {what: workers}, where what is ("runs", operator), ("event", number,
        wanted, seen) or ("flags", operator)."""
        state, found = self.ranks[number], defaultdict(set)
        for worker, tasks in enumerate(state.graph["worker_lists"]):
            if state.place[worker] == len(tasks):
                continue
            task = state.graph["all_tasks"][tasks[state.place[worker]]]
            if self.stalls(number, task, worker):
                found["runs", state.graph["ops"][self.op]].add(worker)
            elif (event := self.missing_event(state, task)) is not None:
                found["event", event, state.graph["all_events"][event]["num_triggers"], state.counters[event]].add(worker)
            else:
                found["flags", state.graph["ops"][task["op_id"]]].add(worker)
        return found


def told(lines):
    """{what: (workers, the line)} as `Stuck.expected` names it."""
    found = {}
    for line in lines:
        if line["runs"]:
            what = "runs", line["op"]
        elif line["event"]:
            what = "event", int(line["event"]), int(line["wanted"]), int(line["seen"])
        else:
            what = "flags", line["op"]
        found[what] = indices(line["who"])
    return found


def problems(stderr, graphs, rank, op, only=None):
    """What is wrong with the reports of all ranks in `stderr`; `graphs`: by name, each rank's."""
    wrong, lines = [], [found for text in stderr.splitlines() if (found := LINE.match(text))]
    if not any(line["timed_out"] for line in lines):
        wrong.append("no wait ran out of time")
    names = {line["graph"] for line in lines if line["graph"]}
    if len(names) != 1 or not names <= set(graphs):
        return [*wrong, f"the report names graphs {sorted(names)}; the job has {sorted(graphs)}"]
    stuck = Stuck(graphs[names.pop()], rank, op, only)
    for number in range(len(stuck.ranks)):
        own = [line for line in lines if int(line["rank"]) == number]
        wrong += [f"rank {number}: {text}" for text in rank_problems(stuck, number, own, stderr)]
    return wrong


def rank_problems(stuck, number, lines, stderr):
    """What is wrong with the lines of one rank."""
    state, wrong = stuck.ranks[number], []
    if f"rank {number}: run aborted: " not in stderr:
        return ["no report"]
    if len(lines) > 12:
        wrong.append(f"{len(lines)} lines")
    if any(line["iteration"] != "1" for line in lines):
        wrong.append("not in the first iteration")
    if any(line["tag"] and line["tag"] == line["tag_seen"] for line in lines):
        wrong.append("a wait for flagged words that have arrived")
    found = told([line for line in lines if not line["work"]])
    if stuck.static:
        expected = stuck.expected(number)
        if set(found) != set(expected):
            # If there are very many waits, the report has only the first ones.
            cut = f"rank {number}: " in "".join(re.findall(r"rank \d+: \d+ more waits?", stderr)) and set(found) <= set(expected)
            if not cut:
                wrong.append(f"reports {sorted(map(str, found))} instead of {sorted(map(str, expected))}")
        wrong += [f"{what}: workers {sorted(workers)}, not {sorted(expected[what])}" for what, workers in found.items()
                  if workers is not None and what in expected and workers != expected[what]]
        return wrong
    runs = {what[1] for what in found if what[0] == "runs"}
    if runs != ({state.graph["ops"][stuck.op]} if number == stuck.rank else set()):
        wrong.append(f"runs {sorted(runs)}")
    if not any(what[0] != "runs" for what in found):
        wrong.append("nothing is waited for")
    for what in found:
        if what[0] != "event":
            continue
        _, event, wanted, seen = what
        triggers = state.graph["all_events"][event]["num_triggers"]
        if wanted != triggers or not 0 <= seen < wanted or seen > state.counters[event]:
            wrong.append(f"event {event}: wanted {wanted}, seen {seen}; it has {triggers} triggers, of which {state.counters[event]} can come")
    return wrong


def load(folder, ranks):
    """{name: each rank's graph} of a folder that --emit-graph wrote."""
    found = defaultdict(dict)
    for path in folder.glob("rank-*.task_graph.json"):
        graph = json.loads(path.read_text())
        found[graph["name"]][graph["rank"]] = graph
    return {name: [by_rank[rank] for rank in range(ranks)] for name, by_rank in found.items()}

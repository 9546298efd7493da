#!/usr/bin/env python3
"""Fails if files import each other in a loop, and prints the loop.

Rust: an edge from each file to every file whose items it names, by `use` or by a path in the code. A re-exported name
counts as an import of the file that defines it. A module's list of its submodules (`mod x;`) is not an import, and
neither is anything under `#[cfg(test)]`.
kernels-cu's sources: an edge for every `#include "..."` of a file of this repository.

usage: scripts/check_imports.py [--edges FILE]
"""

import os
import re
import sys
from collections import defaultdict

CRATES = ["sys", "taskgraph", "taskgraph/simulate", "kernels-cu", "kernels-cu/emulator", "distributed", "launch", "tests", "tests/extension"]
SOURCES = "kernels-cu"
SUFFIXES = (".h", ".cuh", ".cu", ".cpp", ".inc", ".c")

TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|(?:b|c)?r(#*)".*?"\1|(?:b|c)?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\])'|[A-Za-z_]\w*|::|[{}();,*#\[\]!]|\S""",
    re.S,
)


def tokens_of(text):
    """The relevant tokens, without comments and literals."""
    found = []
    for match in TOKEN.finditer(text):
        token = match.group(0)
        if token.startswith(("//", "/*")) or token[-1] in "\"'" and len(token) > 1:
            continue
        found.append(token)
    return found


def matching(tokens, start, opening, closing):
    """The index after the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(tokens)):
        depth += (tokens[at] == opening) - (tokens[at] == closing)
        if depth == 0:
            return at + 1
    return len(tokens)


def without_tests(tokens):
    """The tokens without items under `#[cfg(test)]`."""
    kept, at = [], 0
    while at < len(tokens):
        if tokens[at : at + 7] != ["#", "[", "cfg", "(", "test", ")", "]"]:
            kept.append(tokens[at])
            at += 1
            continue
        at += 7
        while tokens[at : at + 2] == ["#", "["]:
            at = matching(tokens, at + 1, "[", "]")
        while at < len(tokens) and tokens[at] not in "{;":
            at += 1
        at = matching(tokens, at, "{", "}") if tokens[at : at + 1] == ["{"] else at + 1
    return kept


class Module:
    """A module: its file, its children, its definitions and its re-exports."""

    def __init__(self, path, file):
        self.path, self.file = path, file
        self.children = set()
        self.items = set()
        self.exports = {}
        self.globs = []
        self.imports = {}
        self.paths = []


ITEM = {"fn", "struct", "enum", "trait", "type", "const", "static", "union", "macro_rules"}
STOP = {"{", "}", ";", "(", ")", ","}


class Crate:
    """The modules of one crate."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.modules = {}
        root = os.path.join(folder, "src/lib.rs")
        if os.path.exists(root):
            self.read((name,), root, os.path.dirname(root))

    def read(self, path, file, folder):
        module = self.modules[path] = Module(path, file)
        with open(file, encoding="utf-8") as text:
            raw = text.read()
        tokens = without_tests(tokens_of(raw))
        places = dict(re.findall(r'#\[path = "([^"]+)"\]\s*(?:pub(?:\([^)]*\))? )?mod (\w+);', raw))
        self.scan(module, tokens, folder, {name: place for place, name in places.items()})

    def scan(self, module, tokens, folder, places):
        at, depth = 0, 0
        while at < len(tokens):
            token = tokens[at]
            # `use<..>` says what an `impl Trait` captures.
            captures = token == "use" and tokens[at + 1 : at + 2] == ["<"]
            if token == "use" and not captures and (at == 0 or tokens[at - 1] != "::"):
                end = at
                while end < len(tokens) and tokens[end] != ";":
                    end += 1
                public = at > 0 and (tokens[at - 1] == "pub" or tokens[at - 1] == ")")
                for path, name in tree(tokens[at + 1 : end]):
                    path = absolute(path, module.path)
                    module.paths.append(path)
                    if name == "*":
                        module.globs.append(path)
                    elif name != "_":
                        (module.exports if public else module.imports)[name] = path
                at = end
            elif token == "mod" and at + 2 < len(tokens) and tokens[at + 2] in (";", "{"):
                name = tokens[at + 1]
                module.children.add(name)
                child = module.path + (name,)
                if tokens[at + 2] == ";":
                    self.child(child, name, folder, places)
                else:
                    end = matching(tokens, at + 2, "{", "}")
                    inner = self.modules[child] = Module(child, module.file)
                    self.scan(inner, tokens[at + 3 : end - 1], os.path.join(folder, name), {})
                    at = end - 1
            elif token == "::" and at + 1 < len(tokens):
                start = at - 1
                if start >= 0 and re.match(r"\w", tokens[start]):
                    path, begin = [tokens[start]], at
                    while at + 1 < len(tokens) and tokens[at] == "::" and re.match(r"[A-Za-z_]", tokens[at + 1]):
                        path.append(tokens[at + 1])
                        at += 2
                    at -= at > begin
                    # The name before may be imported: its import is an edge already.
                    if path[0] in ("crate", "self", "super") or path[0] not in module.imports:
                        module.paths.append(absolute(path, module.path))
            elif token in ITEM and depth == 0 and at + 1 < len(tokens):
                name = tokens[at + 1] if tokens[at + 1] != "!" else tokens[at + 2]
                module.items.add(name)
            depth += (token == "{") - (token == "}")
            at += 1

    def child(self, path, name, folder, places):
        candidates = [os.path.join(folder, name + ".rs"), os.path.join(folder, name, "mod.rs")]
        if name in places:
            candidates = [os.path.join(os.path.dirname(self.modules[path[:-1]].file), places[name])]
        for file in candidates:
            if os.path.exists(file):
                self.read(path, file, os.path.join(folder, name))
                return


def absolute(path, module):
    """A path from the crate's root on."""
    path = list(path)
    if path and path[0] == "crate":
        return (module[0], *path[1:])
    if path and path[0] in ("self", "super"):
        base = list(module)
        if path[0] == "self":
            path = path[1:]
        while path and path[0] == "super":
            base, path = base[:-1], path[1:]
        return (*base, *path)
    return ("?", *path)


def tree(tokens):
    """The (path, name) of each leaf of a use tree."""
    leaves = []

    def walk(at, prefix):
        path = list(prefix)
        while at < len(tokens):
            token = tokens[at]
            if token == "{":
                at += 1
                while tokens[at] != "}":
                    at = walk(at, path)
                    if tokens[at] == ",":
                        at += 1
                return at + 1
            if token == "*":
                leaves.append((path, "*"))
                return at + 1
            if token in (",", "}"):
                break
            if token == "as":
                leaves.append((path, tokens[at + 1]))
                return at + 2
            if token != "::":
                path.append(token)
            at += 1
        if path != list(prefix):
            name = path[-1]
            leaves.append((path[:-1], path[-2]) if name == "self" and len(path) > 1 else (path, name))
        return at

    walk(0, [])
    return leaves


def defining(crates, path, seen=None):
    """The file that defines what `path` names, or None."""
    seen = seen or set()
    if path in seen:
        return None
    seen.add(path)
    crate = crates.get(path[0])
    if crate is None:
        return None
    module = crate.modules.get(path[:1])
    for at, name in enumerate(path[1:], 1):
        if module is None:
            return None
        if name in module.children:
            module = crate.modules.get(path[: at + 1])
            continue
        if name in module.items:
            return module.file
        for exported in (module.exports, module.imports):
            if name in exported:
                return defining(crates, anchored(crates, exported[name], module) + path[at + 1 :], seen)
        for glob in module.globs:
            found = defining(crates, anchored(crates, glob, module) + path[at:], seen)
            if found:
                return found
        return module.file
    return module.file if module else None


def anchored(crates, path, module):
    """A path that may begin with another crate, a child or an imported name."""
    if path[0] != "?":
        return path
    if len(path) > 1 and path[1] in module.children:
        return module.path + path[1:]
    return path[1:] if len(path) > 1 else path


def rust_edges(root):
    crates = {}
    for folder in CRATES:
        manifest = os.path.join(root, folder, "Cargo.toml")
        if os.path.exists(manifest):
            with open(manifest, encoding="utf-8") as text:
                manifest = text.read()
            # The library's name, where it is not the package's.
            named = re.search(r'^\[lib\]\nname = "([^"]+)"', manifest, re.M) or re.search(r'^name = "([^"]+)"', manifest, re.M)
            name = named.group(1).replace("-", "_")
            crates[name] = Crate(name, os.path.join(root, folder))
    edges = defaultdict(set)
    for crate in crates.values():
        for module in crate.modules.values():
            for path in module.paths:
                target = defining(crates, anchored(crates, path, module))
                if target and target != module.file:
                    edges[module.file].add(target)
    return edges


def include_edges(root):
    base = os.path.join(root, SOURCES)
    edges = defaultdict(set)
    folders = [os.path.join(base, folder) for folder in ("", "include", "protocol", "src")]
    for folder, _, files in os.walk(base):
        for name in files:
            if not name.endswith(SUFFIXES):
                continue
            file = os.path.join(folder, name)
            with open(file, encoding="utf-8") as text:
                included = re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', text.read(), re.M)
            for target in included:
                for start in [folder, *folders]:
                    path = os.path.normpath(os.path.join(start, target))
                    if os.path.exists(path):
                        edges[file].add(path)
                        break
    return edges


def components(edges):
    """Strongly connected components of several files (Tarjan, without recursion)."""
    index, low, stack, on_stack, found = {}, {}, [], set(), []
    for start in list(edges):
        if start in index:
            continue
        work = [(start, iter(sorted(edges.get(start, ()))))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, rest = work[-1]
            for target in rest:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(edges.get(target, ())))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = []
                    while True:
                        top = stack.pop()
                        on_stack.discard(top)
                        group.append(top)
                        if top == node:
                            break
                    if len(group) > 1:
                        found.append(sorted(group))
    return found


def shortest_loop(edges, group):
    """A shortest loop inside a component."""
    inside, best = set(group), None
    for start in group:
        before, queue = {start: None}, [start]
        for node in queue:
            for target in sorted(edges.get(node, ())):
                if target == start:
                    loop = [node]
                    while before[loop[-1]] is not None:
                        loop.append(before[loop[-1]])
                    if best is None or len(loop) < len(best):
                        best = loop[::-1]
                    queue.clear()
                    break
                if target in inside and target not in before:
                    before[target] = node
                    queue.append(target)
    return best or group


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.argv[1:] not in ([], ["--edges"]) and not (len(sys.argv) == 3 and sys.argv[1] == "--edges"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    status = 0
    for what, edges in [("Rust", rust_edges(root)), ("C++ and CUDA", include_edges(root))]:
        if len(sys.argv) == 3:
            for file, targets in sorted(edges.items()):
                if os.path.relpath(file, root) == sys.argv[2]:
                    print("\n".join(os.path.relpath(target, root) for target in sorted(targets)))
            continue
        files = set(edges) | {target for targets in edges.values() for target in targets}
        count = sum(len(targets) for targets in edges.values())
        print(f"{what}: {len(files)} files, {count} imports")
        # Without this check, a parser that reads nothing would look like files without imports.
        if count < 100:
            print(f"{what}: too few imports were found; is the repository complete?", file=sys.stderr)
            status = 1
        for group in components(edges):
            status = 1
            loop = [os.path.relpath(file, root) for file in shortest_loop(edges, group)]
            print(f"{len(group)} files import each other in a loop; a shortest one:", file=sys.stderr)
            print("  " + "\n    -> ".join([*loop, loop[0]]), file=sys.stderr)
            print("  all: " + ", ".join(os.path.relpath(file, root) for file in group), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""An op graph (`"graph"` of model.json) with many independent operators and their expected results."""

import json
import struct

import numpy as np

import reference as ref


def write_safetensors(path, tensors):
    """Writes tensors {name: array}: uint16 holds the bits of bf16, all others are written as f32."""
    header, offset = {}, 0
    for name, values in tensors.items():
        dtype, size = ("BF16", 2) if values.dtype == np.uint16 else ("F32", 4)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + size * values.size]}
        offset += size * values.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values, dtype="<u2" if values.dtype == np.uint16 else "<f4").data)


class Graph:
    """Cases in one graph of `rows` rows and `samples` samples; values are drawn from `random`. `sequences`: number of rows of each
    sequence. By default, all rows are one."""

    def __init__(self, name, rows, samples, random, wanted=None, sequences=None):
        self.name, self.rows, self.samples, self.random = name, rows, samples, random
        self.wanted = wanted or (lambda case: True)
        self.tensors, self.ops, self.cases, self.files = [], [], [], {}
        self.tokens, self.sequences = None, sequences
        self.case = ""

    def begin(self, what):
        """Starts a case; False if it was not asked for. Names of its tensors begin with its number."""
        if not self.wanted(what):
            return False
        self.case, self.what = f"c{len(self.cases)}", what
        return True

    def named(self, name):
        """A tensor's name within the case."""
        return f"{self.case}.{name}"

    def tensor(self, name, kind, dtype, values=None, dims=None, **more):
        """Declares a tensor; values are rounded to its type first. Returns its full name and its values."""
        full = self.named(name)
        entry = {"name": full, "kind": kind, "dtype": dtype}
        if values is not None:
            values = ref.rounded(values, dtype) if dtype in ref.UNIT else np.asarray(values, dtype=np.float64)
            self.files.setdefault(self.case, {})[full] = values
            entry["data"] = {"file": f"{self.name}.{self.case}.safetensors", "tensor": full}
        entry["dims"] = list(values.shape if dims is None else dims)
        self.tensors.append({**entry, **more})
        return full, values

    def normal(self, *shape, scale=1.0):
        """Draws new values."""
        return self.random.standard_normal(shape) * scale

    def op(self, op, inputs, outputs, **attrs):
        """Adds an operator."""
        outputs = [outputs] if isinstance(outputs, str) else outputs
        self.ops.append({"op": op, "inputs": inputs, "outputs": outputs, "attrs": attrs})

    def expect(self, output, compare):
        """Ends the case: `compare(outputs)` returns what is wrong with the case's outputs, or None, and the largest
        share of the allowed difference."""
        names = [output] if isinstance(output, str) else output
        self.cases.append((self.what, names, compare))

    def expect_values(self, output, values, spread, dtype):
        """Ends the case with a float output."""
        bound = ref.stored(values, spread, dtype)
        self.expect(output, lambda outputs: close(outputs[output], values, bound, dtype))

    def expect_all(self, outputs):
        """Ends the case with several float outputs: [(name, values, spread, dtype)]."""
        bounds = [(name, values, ref.stored(values, spread, dtype), dtype) for name, values, spread, dtype in outputs]

        def compare(found):
            verdicts = [(name, *close(found[name], values, bound, dtype)) for name, values, bound, dtype in bounds]
            problems = [f"{name}: {problem}" for name, problem, _ in verdicts if problem]
            return "; ".join(problems) or None, max(share for _, _, share in verdicts)

        self.expect([name for name, *_ in bounds], compare)

    def write(self, folder):
        """Writes the model.json and the files of its values; returns its path."""
        for case, tensors in self.files.items():
            write_safetensors(folder / f"{self.name}.{case}.safetensors", tensors)
        outputs = [name for _, names, _ in self.cases for name in names]
        graph = {"name": self.name, "rows": self.rows, "samples": self.samples, "tensors": self.tensors,
                 "ops": self.ops, "outputs": outputs}
        document = {"schema": "mpk-model/1", "graph": graph}
        if self.tokens is not None:
            document["generate"] = {"prompt_tokens": [self.tokens]}
        if self.sequences:
            graph["active"] = len(self.sequences)
            document["generate"] = {"prompt_tokens": [[0] * rows for rows in self.sequences]}
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(document))
        return path

    def compare(self, outputs):
        """Compares all cases with a run's outputs: [(case, problem or None, share)]."""
        found = []
        for what, names, compare in self.cases:
            missing = [name for name in names if name not in outputs]
            if missing:
                found.append((what, f"no output {missing[0]}", 0.0))
                continue
            problem, share = compare({name: outputs[name] for name in names})
            found.append((what, problem, share))
        return found


def array(output):
    """Values of an output; NaN and infinities are strings, which `float` reads."""
    return np.array([float(value) for value in output["values"]], dtype=np.float64).reshape(output["dims"])


def close(output, values, bound, dtype):
    """What is wrong with a float output, or None; and the largest share of the allowed difference."""
    if output["dtype"] != dtype or list(output["dims"]) != list(values.shape):
        return f"is {output['dtype']} {output['dims']}, expected {dtype} {list(values.shape)}", 0.0
    found = array(output)
    share = np.abs(found - values) / bound
    share = np.where(np.isnan(share), np.inf, share)
    if not np.all(share <= 1):
        at = np.unravel_index(np.argmax(share), share.shape)
        wrong = int(np.sum(~(share <= 1)))
        return (f"{wrong} of {share.size} elements differ; at {tuple(int(i) for i in at)} {found[at]:.7g} instead of "
                f"{values[at]:.7g} +- {bound[at]:.2g}"), float(share.max())
    return None, float(share.max())

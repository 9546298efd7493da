"""Writes expected.json: what Hugging Face transformers renders with the templates of this folder.

Usage: python make.py   (in this folder; needs transformers and jinja2; written with transformers 5.23, jinja2 3.1.6)
With folders of checkpoints as arguments, `python make.py DIR... > cases.json` does the same for their own templates.
"""

import datetime
import json
import pathlib
import sys

import transformers.utils.chat_template_utils as chat

NOW = datetime.datetime(2026, 3, 7, 9, 5, 3)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


chat.datetime = Clock

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "gets <the weather>\nof 'a' place & more: Zürich",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "the place"},
                "unit": {"type": ["string", "null"], "enum": ["C", "F", None]},
                "days": {"type": "number", "default": 1.0, "maximum": 1e22, "minimum": -0.00001},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def call(content, *calls):
    functions = [{"type": "function", "id": f"c{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


CONVERSATIONS = {
    "one": [say("user", "Hello, <world> & 'all'!")],
    "system": [say("system", "  Be kind. \n"), say("user", " Hi "), say("assistant", " Hello.\n"), say("user", "Bye\n\n")],
    "answered": [say("user", "2 + 2?"), say("assistant", "<think>\nadd\n</think>\n\n4")],
    "unicode": [say("user", "naïve 中文 😀 {{ not a tag }} {% nor this %}"), say("assistant", "ok"), say("user", "\ttab")],
    "thoughts": [
        say("user", "a"),
        say("assistant", "b", reasoning_content="because\n"),
        say("user", "c"),
        say("assistant", "<think>\nhm\n</think>\n\nd"),
    ],
    "tools": [
        say("system", "Use tools."),
        say("user", "Weather?"),
        call("", ("get_weather", {"place": "Zürich", "days": 2, "exact": True, "unit": None, "share": 0.5})),
        say("tool", '{"t": 3}'),
        say("tool", "<cold>"),
        say("assistant", "Cold."),
        say("user", "Thanks"),
    ],
    "two calls": [
        say("user", "Both?"),
        call("Now:", ("clock", {}), ("get_weather", {"place": "x", "list": [1, "a", {"b": []}]})),
        say("tool", {"time": 12.0, "tags": ["a", None]}),
    ],
    "text calls": [say("user", "x"), call(None, ("clock", "{}"), ("get_weather", '{"a": 1}')), say("user", "y")],
    "out of turn": [say("user", "a"), say("user", "b")],
    "strange role": [say("user", "a"), say("assistant", "b"), say("critic", "c")],
    "parts": [
        say("system", [{"type": "text", "text": "Sys"}]),
        say("user", [{"type": "image"}, {"type": "text", "text": " what is it? "}]),
    ],
    "number": [say("user", 7)],
    "gaps": [say("user", "a  b   c"), say("assistant", ""), say("user", "DON'T panic"), say("stop", "x"), say("user", "never")],
}
ARGUMENTS = [
    {},
    {"add_generation_prompt": False},
    {"enable_thinking": False, "date_string": "1 May"},
    {"tools": [WEATHER, CLOCK], "effort": "high", "extra": {"b": {"z": 1, "ä": [1, 1.5]}, "a": [True, None, 10**18]}},
]


def render(template, messages, arguments):
    given = {"add_generation_prompt": True, "tools": None, "documents": None, **TOKENS, **arguments}
    try:
        return {"text": chat._compile_jinja_template(template).render(messages=messages, **given)}
    except Exception as error:  # a template's own refusal, or a mistake in it: both are refusals
        return {"error": str(error)}


def templates():
    if len(sys.argv) == 1:
        return {path.name: path.read_text() for path in sorted(pathlib.Path(".").glob("*.jinja"))}
    return {path: next(pathlib.Path(path).glob("*.jinja")).read_text() for path in sys.argv[1:]}


cases = []
for name, template in templates().items():
    for conversation, messages in CONVERSATIONS.items():
        for arguments in ARGUMENTS:
            cases.append({"template": name, "conversation": conversation, "arguments": arguments, **render(template, messages, arguments)})
result = {"tokens": TOKENS, "now": NOW.isoformat(), "conversations": CONVERSATIONS, "cases": cases}
text = json.dumps(result, ensure_ascii=False, separators=(",", ":")).replace("},{\"template\"", "},\n{\"template\"")
if len(sys.argv) == 1:
    pathlib.Path("expected.json").write_text(text + "\n")
else:
    print(text)

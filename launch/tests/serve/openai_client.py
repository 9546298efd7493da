"""Talks to a server as users of the `openai` package do: openai_client.py BASE_URL MODEL. Prints ok in the end."""

import asyncio
import sys

import openai

BASE, MODEL = sys.argv[1:3]
MESSAGES = [{"role": "user", "content": "Hello"}]


def expect(condition, *what):
    if not condition:
        raise SystemExit(f"not as expected: {what}")


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def sync():
    client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=30)
    expect([m.id for m in client.models.list()] == [MODEL], "models")
    expect(client.models.retrieve(MODEL).id == MODEL, "one model")
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=100)
    answer = whole.choices[0].message
    expect(answer.role == "assistant" and answer.content, whole)
    expect(whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
    )
    expect(text_of(chunks) == answer.content, chunks)
    expect(chunks[0].choices[0].delta.role == "assistant", chunks[0])
    expect(chunks[-1].choices == [] and chunks[-1].usage == whole.usage, chunks[-1])
    expect(chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason, chunks[-2])
    expect(all(c.choices[0].finish_reason is None for c in chunks[:-2]), chunks)
    old = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=5, n=2)
    expect([c.index for c in old.choices] == [0, 1, 2, 3], old)
    probabilities = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = probabilities.choices[0].logprobs.content
    expect(len(content) == 3 and len(content[0].top_logprobs) == 2, content)
    extra = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, extra_body={"return_token_ids": True, "top_k": 1}
    )
    expect(len(extra.choices[0].token_ids) == 5, extra)
    for error, arguments in [
        (openai.NotFoundError, {"model": "other", "messages": MESSAGES}),
        (openai.BadRequestError, {"model": MODEL, "messages": MESSAGES, "temperature": -1}),
        (openai.BadRequestError, {"model": MODEL, "messages": []}),
    ]:
        try:
            client.chat.completions.create(**arguments)
            expect(False, arguments)
        except error as caught:
            expect(caught.body["message"], caught)
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()


async def asynchronous():
    client = openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=30)
    answers = await asyncio.gather(
        *(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20) for _ in range(4))
    )
    expect(len({a.choices[0].message.content for a in answers}) == 1, answers)
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, stream=True)
    chunks = [chunk async for chunk in stream]
    expect(text_of(chunks) == answers[0].choices[0].message.content, chunks)
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await client.close()


sync()
asyncio.run(asynchronous())
print("ok")

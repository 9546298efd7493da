#!/usr/bin/env python3
"""Runs Hugging Face transformers on this device: the fixtures, and a large random model made here.

    huggingface.py --device cuda --out FOLDER [--fixtures llama,qwen2] [--large full|small|none] [--seed S]

Writes FOLDER/fixtures.json, and FOLDER/large with a checkpoint, model.json and expected.json (tests/fixtures/README.md).

The large model has the shape of Qwen3-1.7B with an untied head (2.0 B parameters). Random weights alone have no
clear winners: among 151936 logits the two highest are often closer than bf16 tells apart. So the head has, for each
token, a pointer to a successor. It is just strong enough to win clearly in 94 % of the steps; in the others the context
decides. Of many random prompts, only those are kept whose greedy continuation is clear at every step (margin in float32 of
at least 0.25) and not a short cycle. The weights of attention, MLP and norms are so large that leaving out one of these
changes the log-probabilities far more than is allowed.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import models
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TOP, NEW_TOKENS, MIN_MARGIN, MIN_DISTINCT = 5, 24, 0.25, 9
MAX_ROUNDING = 0.09  # x (1 + |logprob|), of transformers in bf16: less than the allowed difference
LENGTHS = [1, 5, 17, 40, 70, 131, 300]  # the last is longer than a prefill chunk
CANDIDATES, ROUNDS = 64, 6
EMBEDDING_SPREAD, LOGIT_SPREAD, GAIN, CLEAR_SHARE = 3.0, 2.0, 1.0, 0.94
LARGE = {  # where they differ from models.LARGE_CONFIG
    "full": {},
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 5003},
}
# Names that transformers 4 and 5 share.
CONFIG_FIELDS = ["architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps",
                 "tie_word_embeddings", "eos_token_id"]


def say(text):
    print(f"huggingface: {text}", file=sys.stderr, flush=True)


def load(path, dtype, device):
    """Reads the checkpoint as stored on disk."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.to(device).eval()


@torch.no_grad()
def forced(model, prompt, tokens):
    """Log-probabilities [len(tokens), vocabulary] in float64 at each step along prompt + tokens, without a cache."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
    return logits.double().log_softmax(-1)


def error_of(logprobs, expected):
    """Largest |difference| / (1 + |logprob|) from expected [[token, logprob]..] lists."""
    tokens = torch.tensor([[token for token, _ in top] for top in expected], device=logprobs.device)
    values = torch.tensor([[value for _, value in top] for top in expected], device=logprobs.device, dtype=torch.float64)
    return float(((logprobs.gather(1, tokens) - values).abs() / (1 + values.abs())).max())


def check_fixture(name, device):
    """How far transformers on this device, in float32 and in the stored type, is from expected.json."""
    folder = REPOSITORY / ("examples/tiny" if name == "tiny" else f"tests/fixtures/{name}")
    expected = json.loads((REPOSITORY / "tests/fixtures" / name / "expected.json").read_text())
    result = {"name": name, "dtype": expected["dtype"], "steps": 0}
    for key, dtype in (("float32", torch.float32), ("stored", getattr(torch, expected["dtype"]))):
        model, worst, differing = load(folder, dtype, device), 0.0, []
        for index, request in enumerate(expected["requests"]):
            logprobs = forced(model, request["prompt_tokens"], request["tokens"])
            worst = max(worst, error_of(logprobs, request["logprobs"]))
            best = logprobs.argmax(-1).tolist()
            differing += [[index, step, request["margins"][step]] for step, token in enumerate(request["tokens"])
                          if best[step] != token]
            result["steps"] += len(best) if key == "stored" else 0
        result[key] = {"worst_error": worst, "differing": differing}
    return result


@torch.no_grad()
def randomize(model, generator):
    """Random weights; the head's successor rows come later."""
    hidden = model.config.hidden_size
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=torch.float32)
        if name.endswith("embed_tokens.weight"):
            weight.copy_(noise * EMBEDDING_SPREAD)
        elif name.endswith("lm_head.weight"):
            weight.copy_(noise * LOGIT_SPREAD / math.sqrt(hidden))
        elif weight.dim() == 1:
            weight.copy_(0.6 + 0.8 * torch.rand(weight.shape, generator=generator, device=weight.device))
        else:
            weight.copy_(noise * GAIN / math.sqrt(weight.shape[1]))


@torch.no_grad()
def plant(model, generator):
    """Adds to the head row of each token's successor the weakest pointer that makes it win clearly in CLEAR_SHARE of
    the steps (or the nearest possible share)."""
    vocabulary, device = model.config.vocab_size, model.device
    ids = torch.randint(vocabulary, (8, 24), generator=generator, device=device)
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, 8:].reshape(-1, model.config.hidden_size)
    tokens = ids[:, 8:].reshape(-1, 1)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    successor = torch.randperm(vocabulary, generator=generator, device=device)
    noise, pointer = (states @ head.T)[:, successor], states @ embedding.T  # by the token pointed from
    own = pointer.gather(1, tokens)
    unit = noise.max(-1).values.mean() / own.mean()
    best = (0.0, 0.0)
    for tenth in range(5, 31):
        strength = unit * tenth / 10
        logits = noise + strength * pointer
        lead = logits.gather(1, tokens) - logits.scatter(1, tokens, -torch.inf).max(-1, keepdim=True).values
        share = float((lead >= MIN_MARGIN).float().mean())
        best = max(best, (share, float(strength)))
        if share >= CLEAR_SHARE:
            break
    head[successor] += embedding * best[1]
    say(f"the successor wins clearly in {100 * best[0]:.0f} % of the steps; spread of its logit "
        f"{(noise.gather(1, tokens) + best[1] * own).std():.2f}, mean {float((best[1] * own).mean()):.1f}, highest other "
        f"{float(noise.max(-1).values.mean()):.1f}; cosine of state and token "
        f"{float(torch.cosine_similarity(states, embedding[tokens[:, 0]]).mean()):.2f}")


def make_checkpoint(kind, folder, device, seed):
    """Writes the checkpoint and returns the number of parameters."""
    large = models.LARGE_CONFIG | LARGE[kind]
    config = Qwen3Config(**{field: large[field] for field in CONFIG_FIELDS}, bos_token_id=None,
                         rope_parameters={"rope_type": "default", "rope_theta": large["rope_theta"]})
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model, generator)
    plant(model, generator)
    count = sum(weight.numel() for weight in model.parameters())
    model.to(torch.bfloat16).save_pretrained(folder)
    return count


@torch.no_grad()
def clear_prompts(model, prompts):
    """Those of `prompts` (all of one length) whose greedy continuation is clear and is not a short cycle."""
    step, past, tokens = torch.tensor(prompts, device=model.device), None, []
    clear = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
    for _ in range(NEW_TOKENS):
        out = model(input_ids=step, past_key_values=past, use_cache=True, logits_to_keep=1)
        values, top = out.logits[:, -1].topk(2)
        clear &= values[:, 0] - values[:, 1] >= MIN_MARGIN
        step, past = top[:, :1], out.past_key_values
        tokens.append(step)
    rows, clear = torch.cat(tokens, 1).tolist(), clear.tolist()
    return [(prompt, row) for prompt, row, good in zip(prompts, rows, clear) if good and len(set(row)) >= MIN_DISTINCT]


def expected_request(high, low, prompt, tokens):
    """The expected result of a prompt, in float32, and bf16's distance from it; None if it is not clear enough."""
    logprobs = forced(high, prompt, tokens)
    values, top = logprobs.topk(TOP)
    margins = (values[:, 0] - values[:, 1]).tolist()
    if top[:, 0].tolist() != tokens or min(margins) < MIN_MARGIN:
        return None
    expected = [list(map(list, zip(t, v))) for t, v in zip(top.tolist(), values.tolist())]
    in_bf16 = forced(low, prompt, tokens)
    error = error_of(in_bf16, expected)
    if in_bf16.argmax(-1).tolist() != tokens or error > MAX_ROUNDING:
        return None
    return {"prompt_tokens": prompt, "tokens": tokens, "finish_reason": "length", "finish_length": len(tokens),
            "margins": margins, "logprobs": expected, "bf16_error": error}


def make_large(kind, folder, device, seed):
    """The checkpoint, its model.json and expected.json."""
    started = time.monotonic()
    count = make_checkpoint(kind, folder, device, seed)
    say(f"{count / 1e9:.2f} B parameters written after {time.monotonic() - started:.1f} s")
    high, low = load(folder, torch.float32, device), load(folder, torch.bfloat16, device)
    generator = torch.Generator().manual_seed(seed)
    requests, lacking = [], []
    counts = []
    for length in LENGTHS:
        for _ in range(ROUNDS):
            prompts = torch.randint(high.config.vocab_size, (CANDIDATES, length), generator=generator).tolist()
            clear = clear_prompts(high, prompts)
            counts.append(len(clear))
            found = (expected_request(high, low, *pair) for pair in clear)
            request = next((request for request in found if request), None)
            if request:
                requests.append(request)
                break
        else:
            lacking.append(length)
    document = {
        "schema": "mpk-expected/1", "family": "qwen3", "dtype": "bfloat16", "parameters": count, "eos_token_ids": [0],
        "lengths_without_clear_prompt": lacking, "requests": requests,
    }
    (folder / "expected.json").write_text(json.dumps(document))
    (folder / "model.json").write_text(json.dumps({"schema": "mpk-model/1", "checkpoint": ".", **models.LARGE_SIZES}))
    say(f"{len(requests)} requests, none of lengths {lacking}; clear ones among {CANDIDATES} candidates: {counts}; after {time.monotonic() - started:.1f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fixtures", default="llama,qwen2,qwen3,mistral,tiny")
    parser.add_argument("--large", choices=[*LARGE, "none"], default="full")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.fixtures:
        results = [check_fixture(name, options.device) for name in options.fixtures.split(",")]
        (options.out / "fixtures.json").write_text(json.dumps(results))
    if options.large != "none":
        make_large(options.large, options.out / "large", options.device, options.seed)


if __name__ == "__main__":
    main()

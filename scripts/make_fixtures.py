#!/usr/bin/env python3
"""Make tests/fixtures: small random checkpoints of each family, and the results of Hugging Face transformers for them.

    pip install torch transformers tokenizers safetensors
    python3 scripts/make_fixtures.py            # all of them; or names: llama qwen2 qwen3 yarn mistral mistral-window qwen2-window tiny

The reference reads the checkpoint back from disk and computes in float32 (eager attention, no cache) on a CPU.
tests/fixtures/README.md describes expected.json.
"""

import argparse
import json
import math
import random
import shutil
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
TOP = 5
NEW_TOKENS = 24
PROMPT_LENGTHS = [1, 5, 17, 40, 70, 130, 33]
LOGIT_SPREAD = 6.0  # standard deviation of the logits: spreads the candidates, so that winners are clear
GAIN = 1.3  # of a projection: how much its outputs vary, for inputs of variance 1
QK_GAIN = 1.0
MAX_ROUNDING = 0.07  # x (1 + |logprob|), of Hugging Face in the stored dtype: less than what tests allow
MIN_MARGIN = {torch.bfloat16: 0.35, torch.float16: 0.2, torch.float32: 0.1}
MIN_DISTINCT = 9  # of NEW_TOKENS: a short cycle would test little

LLAMA_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
LLAMA_TEXT = [
    "Each rank holds a shard of the weights and runs the same graph; a task waits for its events and triggers one.",
    "The scheduler turns completed events into queued tasks, and the workers run them until the graph has ended.",
    "A tensor may be flagged: every word carries its epoch, and reading waits for it.",
]
LLAMA_PROMPT_ENDS = ["", "<|eot_id|>\n\nNaïve café: 42 tasks, 你好!"]
ROUND_TRIPS = [
    "In the beginning",
    " In the beginning",
    "  two spaces, then three   inside",
    "verse one\nverse two\n\nverse three\n",
    "one<|endoftext|>two",
    "<|endoftext|>",
    "<|endoftext",
    "And he said, I'll not; they've 1234 sheep.",
    "naïve café, Straße, Привет, 你好, \U0001f642",
    "e\u0301 (not composed)",
    "tab\tand carriage return\r\nend ",
    "LORD's",
]
TINY_PROMPTS = [
    "Thus saith the Lord GOD;",
    "In the beginning",
    "And it came to pass, when the king",
    "Hear the word of the LORD",
    "Praise ye the LORD",
    "And Jesus answered and said unto them,",
]


def shared(**more):
    return dict(num_attention_heads=8, max_position_embeddings=256, rms_norm_eps=1e-5, **more)


def families():
    """name -> (config, dtype, how config.json and generation_config.json are written)."""
    return {
        "llama": dict(
            config=LlamaConfig(
                **shared(hidden_size=128, intermediate_size=101, num_hidden_layers=2, num_key_value_heads=2),
                vocab_size=331,
                tie_word_embeddings=True,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            ),
            dtype=torch.bfloat16,
            transformers4=True,
            tokenizer=True,
            eos="tokenizer",
        ),
        "qwen2": dict(
            config=Qwen2Config(
                **shared(hidden_size=64, intermediate_size=171, num_hidden_layers=3, num_key_value_heads=2),
                vocab_size=203,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            ),
            dtype=torch.float16,
            eos="single",
        ),
        "qwen3": dict(
            config=Qwen3Config(
                **shared(hidden_size=72, intermediate_size=107, num_hidden_layers=3, num_key_value_heads=4),
                head_dim=16,
                vocab_size=467,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            ),
            dtype=torch.bfloat16,
            max_shard_size="150KB",
            eos="list",
        ),
        # Prompts and answers are longer than the original context; the first pairs are kept, the last divided.
        "yarn": dict(
            config=Qwen3Config(
                **shared(hidden_size=64, intermediate_size=93, num_hidden_layers=2, num_key_value_heads=2),
                head_dim=32,
                vocab_size=211,
                tie_word_embeddings=False,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 8.0,
                },
            ),
            dtype=torch.bfloat16,
            eos="single",
        ),
        "mistral": dict(
            config=MistralConfig(
                **shared(hidden_size=64, intermediate_size=93, num_hidden_layers=2, num_key_value_heads=4),
                head_dim=16,
                vocab_size=211,
                tie_word_embeddings=False,
                sliding_window=None,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            dtype=torch.float32,
            eos="config",
        ),
        # Windows that are no multiple of the pages' size, and several of which fit into the prompts.
        "mistral-window": dict(
            config=MistralConfig(
                **shared(hidden_size=64, intermediate_size=93, num_hidden_layers=2, num_key_value_heads=4),
                head_dim=16,
                vocab_size=211,
                tie_word_embeddings=False,
                sliding_window=21,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            dtype=torch.float32,
            eos="config",
        ),
        "qwen2-window": dict(
            config=Qwen2Config(
                **shared(hidden_size=64, intermediate_size=171, num_hidden_layers=3, num_key_value_heads=2),
                vocab_size=203,
                tie_word_embeddings=False,
                use_sliding_window=True,
                sliding_window=13,
                max_window_layers=1,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            ),
            dtype=torch.float16,
            eos="single",
        ),
    }


@torch.no_grad()
def randomize(model, seed):
    """Weights that make every part of the arithmetic matter: large attention scores, norms of either sign at the end."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("embed_tokens.weight") or name.endswith("lm_head.weight"):
            weight.copy_(noise * LOGIT_SPREAD / math.sqrt(hidden))
        elif name.endswith("bias"):
            weight.copy_(noise * 0.7)
        elif weight.dim() == 1:
            weight.copy_(0.6 + 0.8 * torch.rand(weight.shape, generator=generator))
            if name == "model.norm.weight":
                weight.mul_(noise.sign())  # otherwise tied embeddings make each token repeat itself
        else:
            gain = QK_GAIN if ".q_proj." in name or ".k_proj." in name else GAIN
            weight.copy_(noise * gain / math.sqrt(weight.shape[1]))


def llama_tokenizer(vocab_size):
    """A byte-level BPE tokenizer as Llama 3's: the begin token comes before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(LLAMA_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LLAMA_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in LLAMA_SPECIAL])
    assert tokenizer.get_vocab_size() == vocab_size
    begin = LLAMA_SPECIAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return tokenizer


def top_logprobs(logits):
    """Top candidates [[token, logprob]..] and the lead of the first over the second, from logits [vocab]."""
    logprobs = logits.double().log_softmax(-1)
    values, tokens = logprobs.topk(TOP)
    return list(zip(tokens.tolist(), values.tolist())), (values[0] - values[1]).item()


@torch.no_grad()
def greedy(model, prompt, count, min_margin=0.0):
    """Greedy tokens with their top candidates and margins; None where a margin is below `min_margin`."""
    ids, logprobs, margins = list(prompt), [], []
    for _ in range(count):
        top, margin = top_logprobs(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1])
        if margin < min_margin:
            return None
        ids.append(top[0][0])
        logprobs.append(top)
        margins.append(margin)
    return {"tokens": ids[len(prompt) :], "logprobs": logprobs, "margins": margins}


@torch.no_grad()
def rounding(low, prompt, request):
    """Worst |logprob difference| / (1 + |logprob|) when the model computes in its own dtype, and whether all tokens agree."""
    ids = torch.tensor([prompt + request["tokens"][:-1]])
    logits = low(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    logprobs = logits.double().log_softmax(-1)
    worst = max(
        abs(logprobs[i, token].item() - value) / (1 + abs(value))
        for i, top in enumerate(request["logprobs"])
        for token, value in top
    )
    return worst, logprobs.argmax(-1).tolist() == request["tokens"]


def load(path, dtype):
    """The checkpoint in its form on disk."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def clear_prompts(model, prompts, min_margin):
    """The `prompts` (all of the same length) whose greedy continuation keeps the margin and does not cycle."""
    step, cache = torch.tensor(prompts), None
    clear = torch.ones(len(prompts), dtype=torch.bool)
    tokens = []
    for _ in range(NEW_TOKENS):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        values, top = out.logits[:, -1].topk(2)
        clear &= values[:, 0] - values[:, 1] >= min_margin
        step, cache = top[:, :1], out.past_key_values
        tokens.append(step)
    rows = torch.cat(tokens, 1).tolist()
    return [prompts[i] for i, row in enumerate(rows) if clear[i] and len(set(row)) >= MIN_DISTINCT]


def draw_request(model, low, spec, length, choose):
    """A random prompt of `length` tokens whose winners are clear, what follows it, and its worst rounding."""
    margin = MIN_MARGIN[spec["dtype"]]
    vocab = spec["config"].vocab_size - (len(LLAMA_SPECIAL) if spec.get("tokenizer") else 0)
    for _ in range(50):
        prompts = [[choose.randrange(vocab) for _ in range(length)] for _ in range(256)]
        for prompt in clear_prompts(model, prompts, margin):
            request = greedy(model, prompt, NEW_TOKENS, margin)
            if request:
                error, agree = rounding(low, prompt, request)
                if agree and error < MAX_ROUNDING:
                    return {"prompt_tokens": prompt, **request}, error
    raise SystemExit(f"no clear request of length {length}")


def draw_text_request(model, low, spec, tokenizer, end, choose):
    """The same for a text: some words, then `end`."""
    margin, words = MIN_MARGIN[spec["dtype"]], " ".join(LLAMA_TEXT).split()
    for _ in range(5000):
        text = " ".join(choose.sample(words, 5)) + end
        prompt = tokenizer.encode(text).ids
        request = greedy(model, prompt, NEW_TOKENS, margin)
        if request and len(set(request["tokens"])) >= MIN_DISTINCT:
            error, agree = rounding(low, prompt, request)
            if agree and error < MAX_ROUNDING:
                return {"prompt": text, "prompt_tokens": prompt, **request}
    raise SystemExit("no clear request of text")


def choose_eos(requests, kind):
    """End-of-sequence ids such that one request (two for a list) ends early and the others do not."""
    chosen, used = [], set()
    for wanted in range({"list": 2}.get(kind, 1)):
        for index, request in enumerate(requests):
            others = {t for i, other in enumerate(requests) if i != index for t in other["tokens"]}
            early = [t for t in request["tokens"][4:18] if t not in others and request["tokens"].index(t) >= 4]
            if early and index not in used:
                chosen.append(early[0])
                used.add(index)
                break
    return chosen


def finish(request, eos):
    at = next((i + 1 for i, token in enumerate(request["tokens"]) if token in eos), None)
    request["finish_reason"] = "eos" if at else "length"
    request["finish_length"] = at or len(request["tokens"])


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def as_transformers4(path):
    """Rewrite config.json with the field names of transformers 4."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.46.3"
    write_json(path, dict(sorted(config.items())))


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def write_expected(path, head, requests, tokenizer_cases=()):
    """expected.json, with one line per list of a request."""
    lines = [f"  {json.dumps(key)}: {compact(value)}," for key, value in head.items()]
    if tokenizer_cases:
        lines.append('  "tokenizer": [')
        lines.append(",\n".join("    " + compact(case) for case in tokenizer_cases))
        lines.append("  ],")
    lines.append('  "requests": [')
    blocks = []
    for request in requests:
        request = dict(request)
        request["margins"] = [round(margin, 4) for margin in request["margins"]]
        request["logprobs"] = [[[token, round(value, 5)] for token, value in top] for top in request["logprobs"]]
        order = ["prompt", "prompt_tokens", "tokens", "finish_reason", "finish_length", "text", "margins", "logprobs"]
        fields = [f"      {json.dumps(key)}: {compact(request[key])}" for key in order if key in request]
        blocks.append("    {\n" + ",\n".join(fields) + "\n    }")
    path.write_text("{\n" + "\n".join(lines) + "\n" + ",\n".join(blocks) + "\n  ]\n}\n")


def head(family, dtype, eos):
    return {
        "schema": "mpk-expected/1",
        "family": family,
        "dtype": str(dtype).removeprefix("torch."),
        "reference": {"transformers": transformers.__version__, "torch": torch.__version__, "arithmetic": "float32"},
        "eos_token_ids": eos,
    }


def report(name, requests, worst):
    margins = sorted(margin for request in requests for margin in request["margins"])
    print(
        f"{name}: {len(requests)} requests, {len(margins)} tokens; margins min {margins[0]:.3f}, "
        f"10 % {margins[len(margins) // 10]:.3f}, median {margins[len(margins) // 2]:.3f}; "
        f"worst logprob error of Hugging Face in the stored dtype {worst:.4f} x (1 + |logprob|)",
        flush=True,
    )


def check_parts_matter(name, path, requests):
    """Fails if leaving out a part of the family's arithmetic would go unnoticed."""
    config = transformers.AutoConfig.from_pretrained(path)
    if name.endswith("-window"):
        check_window_matters(name, config, path, requests)
        return
    if name in ("llama", "mistral", "yarn"):  # no scaling; mistral: another base
        config.rope_parameters = {"rope_type": "default", "rope_theta": 20000.0 if name == "mistral" else 10000.0}
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()
    for key, weight in model.named_parameters():
        if key.endswith("bias"):
            weight.data.zero_()
        elif key.endswith("q_norm.weight") or key.endswith("k_norm.weight"):
            weight.data.fill_(1.0)
    same = [
        greedy(model, request["prompt_tokens"], NEW_TOKENS)["tokens"] == request["tokens"] for request in requests
    ]
    assert sum(same) <= 1, f"{name}: the expected tokens do not depend on the part that marks the family ({same})"


def check_window_matters(name, config, path, requests):
    """Fails if a model without the window, or with a window that is one position longer, would go unnoticed."""
    window = config.sliding_window
    long = [request for request in requests if len(request["prompt_tokens"]) > window]
    for other in (10000, window + 1):
        config.sliding_window = other
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        found = [rounding(model, request["prompt_tokens"], request) for request in long]
        errors, same = [round(error, 3) for error, _ in found], sum(same for _, same in found)
        print(f"{name}: with a window of {other}, {same} of {len(long)} long requests have the same tokens; errors {errors}")
        assert same == 0 or other == window + 1, f"{name}: the expected tokens do not depend on the window"
        assert min(errors) > 2 * MAX_ROUNDING, f"{name}: the expected log-probabilities do not depend on the window"


def make_family(name, spec, seed):
    path = FIXTURES / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    config, dtype = spec["config"], spec["dtype"]
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    tokenizer = llama_tokenizer(config.vocab_size) if spec.get("tokenizer") else None

    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    model.to(dtype).save_pretrained(path, max_shard_size=spec.get("max_shard_size", "5GB"))
    if spec.get("transformers4"):
        as_transformers4(path / "config.json")
    reference, low = load(path, torch.float32), load(path, dtype)
    choose = random.Random(seed)
    requests, errors = zip(*(draw_request(reference, low, spec, length, choose) for length in PROMPT_LENGTHS))
    requests = list(requests)

    generation = {"transformers_version": transformers.__version__}
    if spec["eos"] == "tokenizer":
        # As Llama 3 instruct models: config.json names one id, generation_config.json the ones that count.
        eos = [tokenizer.token_to_id(token) for token in LLAMA_SPECIAL[1:]]
        config_eos = eos[0]
        generation |= {"bos_token_id": tokenizer.token_to_id(LLAMA_SPECIAL[0]), "eos_token_id": eos}
    else:
        eos = choose_eos(requests, spec["eos"])
        # Only generation_config.json counts where both name ids.
        wrong = next(t for t in requests[0]["tokens"] if t not in eos)
        config_eos = eos[0] if spec["eos"] == "config" else wrong
        generation |= {"eos_token_id": eos if spec["eos"] == "list" else eos[0]}
    settings = json.loads((path / "config.json").read_text())
    settings["eos_token_id"] = config_eos
    write_json(path / "config.json", settings)
    if spec["eos"] == "config":
        (path / "generation_config.json").unlink(missing_ok=True)
    else:
        write_json(path / "generation_config.json", generation)

    cases = []
    if tokenizer:
        tokenizer.save(str(path / "tokenizer.json"))
        texts = [draw_text_request(reference, low, spec, tokenizer, end, choose) for end in LLAMA_PROMPT_ENDS]
        requests += texts
        cases = [(text, tokenizer.encode(text).ids) for text in ROUND_TRIPS + [r["prompt"] for r in texts]]
        cases = [{"text": text, "tokens": tokens} for text, tokens in cases]
    for request in requests:
        finish(request, eos)
        if tokenizer:
            kept = request["tokens"][: request["finish_length"]]
            request["text"] = tokenizer.decode([t for t in kept if t not in eos], skip_special_tokens=True)
    check_parts_matter(name, path, requests)
    write_json(
        path / "model.json",
        {
            "schema": "mpk-model/1",
            "name": f"fixture-{name}",
            "checkpoint": ".",
            "max_batch": 4,
            "max_seq_len": 192,
            "page_size": 16,
            "generate": {"max_new_tokens": NEW_TOKENS},
        },
    )
    write_expected(path / "expected.json", head(name, dtype, eos), requests, cases)
    for file in path.iterdir():
        file.chmod(0o644)
    report(name, requests, max(errors))


def make_tiny():
    """The expected output of examples/tiny; the checkpoint itself comes from scripts/train_tiny.py."""
    source, path = ROOT / "examples" / "tiny", FIXTURES / "tiny"
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    reference, low = load(source, torch.float32), load(source, torch.bfloat16)
    eos = [json.loads((source / "generation_config.json").read_text())["eos_token_id"]]
    requests, worst = [], 0.0
    for text in TINY_PROMPTS:
        prompt = tokenizer.encode(text).ids
        request = greedy(reference, prompt, 64)
        worst = max(worst, rounding(low, prompt, request)[0])
        finish(request, eos)
        kept = [t for t in request["tokens"][: request["finish_length"]] if t not in eos]
        requests.append({"prompt": text, "prompt_tokens": prompt, "text": tokenizer.decode(kept), **request})
    cases = [{"text": text, "tokens": tokenizer.encode(text).ids} for text in ROUND_TRIPS]
    write_expected(path / "expected.json", head("qwen3", torch.bfloat16, eos), requests, cases)
    report("tiny", requests, worst)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="fixtures to make (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    specs = families()
    unknown = set(args.names) - set(specs) - {"tiny"}
    if unknown:
        raise SystemExit(f"unknown fixtures: {', '.join(sorted(unknown))}; the fixtures are {', '.join(specs)}, tiny")
    for name in args.names or [*specs, "tiny"]:
        if name == "tiny":
            make_tiny()
        else:
            make_family(name, specs[name], args.seed)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Train examples/tiny: a small Qwen3 language model of the King James Bible, with its own tokenizer.

    apt-get install bible-kjv            # Debian's main archive; the text is in the public domain
    bible -f Gen1:1-Rev22:21 </dev/null >kjv.txt
    python3 scripts/train_tiny.py --text kjv.txt --out examples/tiny

Needs torch, transformers, tokenizers and safetensors. Takes minutes on a GPU, hours on a CPU. The seed fixes
the tokenizer, the split and the order of the batches; the last bits of the weights depend on the device.
"""

import argparse
import json
import math
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"
# The pre-tokenizer of Qwen2 and Qwen3: one digit is one piece.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HELD_OUT_EVERY = 23
SAMPLES = [
    "In the beginning",
    "And the LORD said unto Moses",
    "The LORD is my shepherd;",
    "And it came to pass in those days",
    "Blessed are they that",
    "And Jesus answered and said unto them,",
    "My son, hear the",
    "Then said the king",
    "Now these are the names of",
    "And I saw",
]


def read_chapters(path):
    """The chapters of `bible -f` output ("Ge1:1 In the beginning ..."), each one verse a line, without references."""
    chapters, current, name = [], [], None
    for number, line in enumerate(Path(path).read_text(encoding="ascii").splitlines(), 1):
        match = re.fullmatch(r"([0-9]?[A-Za-z]+[0-9]+):[0-9]+ (.+)", line)
        if not match:
            raise SystemExit(f"{path}:{number}: expected 'Ge1:1 text', as `bible -f Gen1:1-Rev22:21` prints it")
        if match[1] != name:
            name, current = match[1], []
            chapters.append(current)
        current.append(re.sub(" +", " ", match[2].strip()))
    return ["\n".join(verses) + "\n" for verses in chapters]


def train_tokenizer(chapters, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return tokenizer


class Corpus:
    """Chapters as token ids; batches are windows of a fresh shuffle of the chapters, each ended by END_OF_TEXT."""

    def __init__(self, tokenizer, chapters, length, generator):
        end = tokenizer.token_to_id(END_OF_TEXT)
        self.chapters = [encoding.ids + [end] for encoding in tokenizer.encode_batch(chapters)]
        self.tokens = sum(map(len, self.chapters))
        self.bytes = sum(len(text.encode()) for text in chapters)
        self.length, self.generator, self.windows = length, generator, []

    def epoch(self):
        order = list(self.chapters)
        self.generator.shuffle(order)
        ids = [token for chapter in order for token in chapter][self.generator.randrange(self.length) :]
        count = (len(ids) - 1) // self.length
        windows = [ids[i * self.length : (i + 1) * self.length + 1] for i in range(count)]
        self.generator.shuffle(windows)
        return windows

    def batch(self, size):
        while len(self.windows) < size:
            self.windows += self.epoch()
        taken, self.windows = self.windows[:size], self.windows[size:]
        return torch.tensor(taken)


@torch.no_grad()
def held_out_loss(model, corpus, device, batch=16):
    """Natural-log loss per token over whole chapters laid end to end, and how many tokens it is over."""
    model.eval()
    ids = [token for chapter in corpus.chapters for token in chapter]
    count = (len(ids) - 1) // corpus.length
    windows = torch.tensor([ids[i * corpus.length : (i + 1) * corpus.length + 1] for i in range(count)])
    total = 0.0
    for part in windows.split(batch):
        part = part.to(device)
        logits = model(input_ids=part[:, :-1]).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return total / (count * corpus.length)


def add_dropout(model, rate):
    """Dropout on the embedding and on what each block adds to the residual stream; returns the hooks."""
    blocks = [model.model.embed_tokens]
    for layer in model.model.layers:
        blocks += [layer.self_attn.o_proj, layer.mlp]
    return [
        block.register_forward_hook(lambda module, _, out: F.dropout(out, rate, module.training)) for block in blocks
    ]


def train(model, train_set, held_out, args, device):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    best, best_state, start = math.inf, None, time.monotonic()
    model.train()
    for step in range(args.steps):
        warm = min(1.0, (step + 1) / args.warmup)
        rate = args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = train_set.batch(args.batch).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = step + 1 == args.steps or time.monotonic() - start > args.max_seconds
        if (step + 1) % args.eval_every == 0 or last:
            value = held_out_loss(model, held_out, device)
            if value < best:
                best, best_state = value, {k: v.detach().clone() for k, v in model.state_dict().items()}
            print(
                f"step {step + 1}: train {loss.item():.4f} held out {value:.4f} (best {best:.4f}), "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
        if last:
            break
    model.load_state_dict(best_state)


@torch.no_grad()
def greedy(model, prompts, count):
    """Greedy continuations, [batch, prompt + count] tokens, of prompts [batch, prompt] of equal length."""
    training = model.training
    model.eval()
    ids, step, cache = prompts, prompts, None
    for _ in range(count):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        step, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        ids = torch.cat([ids, step], 1)
    model.train(training)
    return ids


def repeats(ids, start, size=4):
    """Mask [batch, length]: 1 where a token from `start` on completes a run of `size` tokens seen before in its row."""
    mask = torch.zeros(ids.shape)
    for row, tokens in enumerate(ids.tolist()):
        seen = set()
        for i in range(size - 1, len(tokens)):
            gram = tuple(tokens[i - size + 1 : i + 1])
            if gram in seen and i >= start:
                mask[row, i] = 1.0
            seen.add(gram)
    return mask.to(ids.device)


def repeated_share(model, corpus, device, prompt=16, count=64):
    """Share of the greedily continued tokens that complete a repeated run, over 32 windows of the text."""
    prompts = corpus.batch(32)[:, :prompt].to(device)
    return repeats(greedy(model, prompts, count), prompt).sum().item() / (32 * count)


def discourage_repeats(model, train_set, held_out, args, device):
    """Sequence-level unlikelihood (Welleck et al., 2019, "Neural Text Generation with Unlikelihood Training").

    A small model that continues greedily soon repeats itself. In addition to the usual loss on text, each step
    continues prompts greedily and lowers the probability of the tokens that complete a repeated run.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.repeat_lr, betas=(0.9, 0.98), weight_decay=0.0)
    choose, start = random.Random(args.seed), time.monotonic()
    model.train()
    for step in range(args.repeat_steps):
        for group in optimizer.param_groups:
            group["lr"] = args.repeat_lr * (1 - step / args.repeat_steps)
        text = train_set.batch(args.repeat_batch).to(device)
        text = text[:, : args.length // 2 + 1]
        loss = F.cross_entropy(model(input_ids=text[:, :-1]).logits.flatten(0, 1), text[:, 1:].flatten())
        prompt = choose.randrange(3, 24)
        ids = greedy(model, train_set.batch(args.repeat_batch)[:, :prompt].to(device), 80)
        mask = repeats(ids, prompt)[:, 1:]
        probability = model(input_ids=ids[:, :-1]).logits.softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        unlikely = -(torch.log1p(-probability.clamp(max=0.9999)) * mask).sum() / max(mask.sum().item(), 1.0)
        optimizer.zero_grad(set_to_none=True)
        (loss + args.repeat_weight * unlikely).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % args.eval_every == 0 or step + 1 == args.repeat_steps:
            print(
                f"repeats, step {step + 1}: held out {held_out_loss(model, held_out, device):.4f}, "
                f"repeated {repeated_share(model, held_out, device):.3f}, {time.monotonic() - start:.0f} s",
                flush=True,
            )


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="output of `bible -f Gen1:1-Rev22:21`")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=224)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--intermediate", type=int, default=496)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--length", type=int, default=512, help="number of tokens of a training sequence")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="stop training after this time")
    parser.add_argument("--resume", help="checkpoint of the same tokenizer and shape: skip to the second phase")
    parser.add_argument("--repeat-steps", type=int, default=250, help="steps of the second phase, against repeats")
    parser.add_argument("--repeat-lr", type=float, default=3e-4)
    parser.add_argument("--repeat-weight", type=float, default=0.5)
    parser.add_argument("--repeat-batch", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chapters = read_chapters(args.text)
    kept = [text for i, text in enumerate(chapters) if (i + 1) % HELD_OUT_EVERY]
    tokenizer = train_tokenizer(kept, args.vocab)
    end = tokenizer.token_to_id(END_OF_TEXT)
    train_set = Corpus(tokenizer, kept, args.length, random.Random(args.seed))
    held_out = Corpus(tokenizer, chapters[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY], args.length, random.Random(0))
    print(f"{len(chapters)} chapters; tokens: {train_set.tokens} to train on, {held_out.tokens} held out")

    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=None,
        use_cache=True,
    )
    model = Qwen3ForCausalLM(config).to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters on {device}")
    hooks = add_dropout(model, args.dropout)
    if args.resume:
        model.load_state_dict(Qwen3ForCausalLM.from_pretrained(args.resume, dtype=torch.float32).state_dict())
    else:
        train(model, train_set, held_out, args, device)
    discourage_repeats(model, train_set, held_out, args, device)
    for hook in hooks:
        hook.remove()

    model.to(torch.bfloat16).float()  # what is stored
    model.eval()
    loss = held_out_loss(model, held_out, device)
    bits = loss * held_out.tokens / held_out.bytes / math.log(2)
    print(f"held out, bf16 weights: {loss:.4f} nats per token, {bits:.4f} bits per byte")
    for prompt in SAMPLES:
        ids = greedy(model, torch.tensor([tokenizer.encode(prompt).ids], device=device), 96)
        print("---", json.dumps(tokenizer.decode(ids[0].tolist(), skip_special_tokens=False)))

    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save(str(args.out / "tokenizer.json"))
    write_json(
        args.out / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "eos_token": END_OF_TEXT,
            "model_max_length": args.length,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    for path in args.out.iterdir():
        path.chmod(0o644)



if __name__ == "__main__":
    main()

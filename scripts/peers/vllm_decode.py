"""Peer: vLLM with random weights of a shape, decode and prefill by its own engine.

    vllm_decode.py --folder FOLDER --tp N --batch 1,8 --context 512

FOLDER has the config.json of the model. Two generations differ only in the number of new tokens. The time of a decode step follows from their
difference, and the time of the shorter one is the prefill. Prints one JSON line per case.
"""

import argparse
import json
import time

SHORT, LONG = 1, 65


def main():
    """All cases."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", required=True)
    options.add_argument("--tp", type=int, default=1)
    options.add_argument("--batch", default="1")
    options.add_argument("--context", default="512")
    options.add_argument("--repeats", type=int, default=3)
    options = options.parse_args()
    from vllm import LLM, SamplingParams

    batches, contexts = (list(map(int, text.split(","))) for text in (options.batch, options.context))
    engine = LLM(model=options.folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                 tensor_parallel_size=options.tp, max_model_len=max(contexts) + LONG, max_num_seqs=max(batches),
                 enable_prefix_caching=False, disable_log_stats=True)

    def seconds(batch, context, new):
        sampling = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [(7 * i + r) % 31 for i in range(context)]} for r in range(batch)]
        begin = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    for context in contexts:
        for batch in batches:
            seconds(batch, context, LONG)
            short = sorted(seconds(batch, context, SHORT) for _ in range(options.repeats))
            long = sorted(seconds(batch, context, LONG) for _ in range(options.repeats))
            middle = options.repeats // 2
            print(json.dumps({"what": "decode", "tp": options.tp, "batch": batch, "context": context,
                              "ms": (long[middle] - short[middle]) / (LONG - SHORT) * 1e3}), flush=True)
            print(json.dumps({"what": "prefill", "tp": options.tp, "batch": batch, "prompt": context,
                              "ms": short[middle] * 1e3}), flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Compares two builds of mpk-run on one GPU: compare_sampling.sh MAIN NEW. Each folder has mpk-run and cache/ with its cubins
# (MPK_CACHE_DIR, mode 700; --make-cubins fills it on a machine with nvcc and without a GPU). Needs bash and python3 only.
#   MAIN/mpk-run: commit 1ce76b6. NEW/mpk-run: the build under test.
# 1. Small model, vocabulary 24,000: NEW's tokens on the GPU are those of the CPU target, in all settings.
# 2. Qwen3-8B with random weights, vocabulary 151,936, batch 8: MAIN's and NEW's tokens are equal; microseconds over greedy.
set -uo pipefail
main=$(realpath "${1:?MAIN}") new=$(realpath "${2:?NEW}") device=${DEVICE:-h200} runs=${RUNS:-3} new_tokens=${NEW_TOKENS:-129}
work=$(mktemp -d)
model() { # NAME HIDDEN LAYERS HEADS KV HEAD_DIM INTERMEDIATE VOCABULARY DTYPE BATCH
    cat >"$work/$1.json" <<J
{"schema":"mpk-model/1","name":"$1","config":{"architectures":["Qwen3ForCausalLM"],"hidden_size":$2,"num_hidden_layers":$3,
"num_attention_heads":$4,"num_key_value_heads":$5,"head_dim":$6,"intermediate_size":$7,"vocab_size":$8,"tie_word_embeddings":false,
"rms_norm_eps":1e-6,"rope_theta":1000000.0,"max_position_embeddings":4096,"torch_dtype":"$9","hidden_act":"silu"},
"weights":{"random":{"seed":1}},"max_batch":${10},"max_seq_len":256}
J
}
model mini 128 1 4 2 32 256 24000 float32 3
model large 4096 "${LAYERS:-36}" 32 8 128 12288 151936 bfloat16 8
small=(--prompt-tokens "1,2,3" --prompt-tokens "9,8,7,6" --prompt-tokens 5 --max-new-tokens 40)
prompt=$(seq -s, 100 116)
large=(--max-new-tokens "$new_tokens")
for i in 1 2 3 4 5 6 7 8; do large+=(--prompt-tokens "$prompt,$i"); done
fixed=(--ignore-eos --json --seed 7 --tuning off)
settings=("--temperature 0.8 --top-p 0.95" "--temperature 0.02 --top-p 0.95" "--temperature 0.8" "--temperature 0.02" "--temperature 0.6 --top-k 20 --top-p 0.95"
    "--temperature 0.8 --top-k 20" "--temperature 0.8 --top-p 0.9")
more=("--temperature 5 --top-p 0.9" "--temperature 0.3 --top-p 0.5" "--temperature 1.1 --min-p 0.02 --top-p 0.8" "--temperature 2 --top-k 100" "--temperature 3 --top-k 1000 --top-p 0.9"
    "--temperature 3 --top-k 3000" "--temperature 0.9 --top-p 0.9 --repetition-penalty 1.3 --presence-penalty 0.5 --frequency-penalty 0.3" "--temperature 0 --presence-penalty 2")
if [[ ${3:-} == --make-cubins ]]; then
    for build in "$main" "$new"; do
        mkdir -p "$build/cache"; chmod 700 "$build/cache"
        for of in mini large; do
            for how in --greedy "--temperature 0.8"; do
                MPK_CACHE_DIR=$build/cache "$build/mpk-run" "$work/$of.json" --ranks 1 --compile-only --tuning off --device "$device" $how || exit 1
            done
        done
    done
    exit 0
fi
run() { # BUILD MODEL OUT OPTIONS
    MPK_CACHE_DIR=$1/cache "$1/mpk-run" "$work/$2.json" "${fixed[@]}" "${@:4}" >"$work/$3" 2>"$work/$3.log" || { echo "FAILED $3"; tail -5 "$work/$3.log"; }
}
same() { python3 -c 'import json,sys; t=[[r["tokens"] for r in json.load(open(f))["requests"]] for f in sys.argv[1:3]]; print("equal " if t[0]==t[1] else "DIFFER", end=" ")' "$work/$1" "$work/$2"; }
for setting in "${settings[@]}" "${more[@]}"; do
    run "$new" mini cpu "${small[@]}" --backend cpu $setting
    run "$new" mini gpu "${small[@]}" --backend cuda $setting
    same cpu gpu; echo "mini: $setting"
done
us() { python3 -c 'import json,sys; print(round(1e3*json.load(open(sys.argv[1]))["timing"]["ms_per_token"],1), end=" ")' "$work/$1"; }
for ((r = 0; r < runs; r++)); do
    for setting in --greedy "${settings[@]}"; do
        for build in main new; do run "${!build}" large "$build" "${large[@]}" --backend cuda $setting; done
        same main new; echo "us a step, main and new: $(us main) $(us new) $setting"
    done
done

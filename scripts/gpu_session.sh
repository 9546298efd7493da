#!/usr/bin/env bash
# The checks for a short time on a machine with GPUs, in one call: correctness first, then figures compared with the
# peers.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_session.sh [--gpus K] [--seconds S] [--only PART,...] [--backend cuda|cpu] [--list]

Runs prebuilt binaries (target/release) in S seconds (default 580), the most important part first. Each part has its own time limit; if a
part ends early, the next one gets the remaining time. The parts' kernels are compiled first, on all cores. Prints `ok PART`, `FAILED PART` or
`skipped PART`, and writes each part's output to $OUT (default gpu-session): raw JSON, and its log. Exit status 0 only if no part failed.

  golden     fixtures against Hugging Face at 1, 2 and 4 ranks; operators, including wide products and prefill attention (gpu_check.sh)
  sampled    sampled tokens are the same on every number of ranks, and on the CPU
  nvshmem    the same tokens with --transport nvshmem
  host       the same tokens with --transport host (puts by the hosts over MPI), on 2 GPUs and with 2 ranks on one; and an abort
  online     requests that arrive while others run get the same tokens as alone
  decode     Qwen3-8B at TP 1, 2, 4 compared with PyTorch, batch 1 and 8, with the allreduce (bench_tp.py)
  prefill    the same for prompts
  sampling   the time that sampling adds to a decode step
  budget     how the time of a decode step is spent, batch 1 and 8
  tasks      the cost of a task, in both placements
  tune       the fastest choices for Qwen3-8B, decode at batch 1, 8 and 32 and a prompt (mpk-bench tune); last, because it takes all the
             remaining time

  --backend cpu   tests the script itself on a machine without GPUs, with the small example
TEXT
}

gpus="" seconds=580 only="" backend=cuda list=0
while [[ $# -gt 0 ]]; do
    case $1 in
    --gpus | --seconds | --only | --backend)
        [[ $# -ge 2 ]] || { echo "gpu_session: $1 needs a value" >&2; exit 2; }
        case $1 in
        --gpus) gpus=$2 ;;
        --seconds) seconds=$2 ;;
        --only) only=$2 ;;
        --backend) backend=$2 ;;
        esac
        shift
        ;;
    --list) list=1 ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        usage >&2
        exit 2
        ;;
    esac
    shift
done

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
cd "$repository"

# The parts in order, with the maximum seconds of each.
parts=(golden:150 sampled:60 nvshmem:40 host:90 online:40 decode:200 prefill:120 sampling:40 budget:60 tasks:30 tune:580)
names=" ${parts[*]%%:*} "
if [[ $list == 1 ]]; then
    printf '%s\n' "${parts[@]%%:*}"
    exit 0
fi
for name in ${only//,/ }; do
    [[ $names == *" $name "* ]] || { echo "gpu_session: no part $name; the parts are:$names" >&2; exit 2; }
done
case $backend in
cuda | cpu) ;;
*)
    echo "gpu_session: --backend $backend: expected cuda or cpu" >&2
    exit 2
    ;;
esac
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "gpu_session: --seconds $seconds: expected a number of seconds" >&2; exit 2; }
[[ -z $gpus || $gpus =~ ^[1-9][0-9]*$ ]] || { echo "gpu_session: --gpus $gpus: expected a number of GPUs" >&2; exit 2; }

release="${CARGO_TARGET_DIR:-$repository/target}/release"
for program in mpk-run mpk-bench; do
    [[ -x $release/$program ]] || { echo "gpu_session: no $release/$program; build it with 'cargo build --release -p mpk-launch'" >&2; exit 3; }
done
python="${MPK_PYTHON:-python3}"
if [[ -z $gpus ]]; then
    if [[ $backend == cpu ]]; then gpus=2; else gpus="$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | wc -l)"; fi
fi
if [[ $backend == cuda && $gpus == 0 ]]; then
    echo "gpu_session: no GPU on this machine; --backend cpu tests this script itself" >&2
    exit 3
fi
ranks="1"
for n in 2 4; do [[ $n -le $gpus ]] && ranks="$ranks $n"; done
most="${ranks##* }"

out="${OUT:-gpu-session}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
work="$(mktemp -d /tmp/mpk-session.XXXXXX)"
trap 'rm -rf "$work"' EXIT
# NVLink multicast can put a shared machine's GPUs out of service; nothing here needs it.
export NVSHMEM_DISABLE_NVLS=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NO_COLOR=1 PYTHONDONTWRITEBYTECODE=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

tiny="$repository/examples/tiny/model.json"
if [[ $backend == cuda ]]; then
    large=qwen3-8b context=512 steps=64 prompts=1x512,8x512,1x2048
else
    large=$tiny context=32 steps=8 prompts=1x32
fi

# Runs mpk-run or mpk-bench on $1 ranks; the rest is the command.
on_ranks() {
    local count=$1
    shift
    if [[ $count == 1 ]]; then "$@"; else mpirun -n "$count" --bind-to none "$@"; fi
}

# Writes the tokens of a run of mpk-run on $1 ranks and backend $2 to the file $3; more options follow.
tokens() {
    local count=$1 where=$2 file=$3
    shift 3
    on_ranks "$count" "$release/mpk-run" "$tiny" --backend "$where" --ignore-eos --json "$@" >"$file.json"
    "$python" -c 'import json, sys
for request in json.load(open(sys.argv[1]))["requests"]: print(request["tokens"])' "$file.json" >"$file"
}

# Succeeds if two files of tokens are equal.
equal() {
    cmp -s "$1" "$2" || { echo "tokens differ: $(basename "$1") and $(basename "$2")"; diff "$1" "$2" | head -4; return 1; }
}

part_golden() {
    local checks=golden,operators,bits where=()
    [[ $backend == cuda ]] || checks=golden where=(--backend cpu)
    MPK_CHECK_LIMIT="$1" OUT="$out" bash "$here/gpu_check.sh" --only "$checks" --gpus "$most" --binary "$release/mpk-run" \
        "${where[@]}"
}

part_sampled() {
    local options=(--prompt-tokens "1,2,3,4,5" --prompt-tokens "9,8,7" --max-new-tokens 48 --temperature 0.8 --top-p 0.95 --top-k 50 --seed 7)
    tokens 1 cpu "$out/sampled-cpu" "${options[@]}"
    local n
    for n in $ranks; do
        tokens "$n" "$backend" "$out/sampled-$n" "${options[@]}"
        equal "$out/sampled-cpu" "$out/sampled-$n" || return 1
    done
}

part_nvshmem() {
    [[ $backend == cuda && $most -gt 1 ]] || { echo "needs 2 GPUs"; return 77; }
    local options=(--prompt-tokens "1,2,3,4,5" --max-new-tokens 48 --greedy) n
    tokens 1 cuda "$out/greedy-1" "${options[@]}"
    for n in $ranks; do
        [[ $n == 1 ]] && continue
        tokens "$n" cuda "$out/greedy-nvshmem-$n" "${options[@]}" --transport nvshmem
        equal "$out/greedy-1" "$out/greedy-nvshmem-$n" || return 1
    done
}

# 2 ranks: on 2 GPUs if there are two, and on one. Then a rank that stalls ends both.
part_host() {
    [[ $backend == cuda ]] || { echo "needs a GPU"; return 77; }
    local options=(--prompt-tokens "1,2,3,4,5" --max-new-tokens 48 --greedy) lowering placement shown status
    tokens 1 cuda "$out/greedy-1" "${options[@]}"
    for shown in $([[ $gpus -gt 1 ]] && echo 0,1) 0; do
        for placement in static dynamic; do
            for lowering in copy-reduce one-shot two-shot; do
                [[ $shown != 0 || $lowering == copy-reduce ]] || continue
                CUDA_VISIBLE_DEVICES=$shown tokens 2 cuda "$out/greedy-host-${shown/,/-}-$placement-$lowering" "${options[@]}" \
                    --transport host --placement "$placement" --allreduce "$lowering"
                equal "$out/greedy-1" "$out/greedy-host-${shown/,/-}-$placement-$lowering" || return 1
                echo "ok GPUs $shown, $placement, $lowering: $(sed -n 's/.*"ms_per_token":\([0-9.]*\).*/\1/p' \
                    "$out/greedy-host-${shown/,/-}-$placement-$lowering.json") ms per token"
            done
        done
    done
    status=0
    timeout 60 mpirun -n 2 --bind-to none "$release/mpk-run" "$tiny" --backend cuda --transport host --allreduce copy-reduce --deadline 2 \
        --max-new-tokens 48 --ignore-eos --json --debug-stall 1:6:120000 >"$out/host-stall.txt" 2>&1 || status=$?
    [[ $status == 4 ]] || { echo "a stalled rank: exit status $status instead of 4"; return 1; }
}

# The example submits requests while others run, and compares each with the same request alone.
part_online() {
    local example="$release/examples/online" n
    [[ -x $example ]] || { echo "no $example; build it with 'cargo build --release -p mpk-launch --example online'"; return 77; }
    for n in $ranks; do
        on_ranks "$n" "$example" "$tiny" 200 static "$backend" >"$out/online-$n.txt" || { tail -3 "$out/online-$n.txt"; return 1; }
    done
}

part_decode() {
    local batch=1,8
    [[ $backend == cuda ]] || batch=1
    "$python" "$here/bench_tp.py" --model "$large" --tp "${ranks// /,}" --batch "$batch" --context "$context" --steps "$steps" --repeats 3 \
        --prompts "" --bytes 8192,131072 --peers torch --limit "$1" --backend "$backend" --bench "$release/mpk-bench" --python "$python" --output "$out/decode"
}

part_prefill() {
    local n batch prompt row
    local config="$work/config.json"
    for n in $ranks; do
        for row in ${prompts//,/ }; do
            batch="${row%x*}" prompt="${row#*x}"
            on_ranks "$n" "$release/mpk-bench" prefill --model "$large" --prompt "$prompt" --batch "$batch" --chunk 2048 --backend "$backend" \
                >>"$out/prefill.jsonl" || return 1
        done
    done
    [[ $backend == cuda ]] || return 0
    "$release/mpk-bench" model "$large" >"$config"
    for n in $ranks; do
        "$python" -m torch.distributed.run --standalone --nproc-per-node "$n" "$here/peers/torch_prefill.py" --config "$config" \
            --cases "$prompts" --seconds 40 >>"$out/prefill-torch.jsonl" || echo "no PyTorch figures at TP$n"
    done
}

# The same decode with graphs that sample; the difference is the cost of sampling.
part_sampling() {
    local n kind options
    for n in $ranks; do
        for kind in greedy sampled; do
            options=(--greedy)
            [[ $kind == sampled ]] && options=(--temperature 0.8 --top-p 0.95 --seed 7)
            local model="$tiny"
            if [[ $backend == cuda ]]; then
                model="$work/large.json"
                "$release/mpk-bench" model "$large" >"$model"
            fi
            on_ranks "$n" "$release/mpk-run" "$model" --backend "$backend" --prompt-tokens 1,2,3 --max-new-tokens 65 --ignore-eos --json \
                "${options[@]}" >"$out/step-$kind-$n.json" || return 1
            "$python" -c 'import json, sys
print(sys.argv[2], "ranks", sys.argv[3], json.load(open(sys.argv[1]))["timing"]["ms_per_token"], "ms per token")' "$out/step-$kind-$n.json" "$n" "$kind"
        done
    done
}

part_budget() {
    local n batch
    for n in $ranks; do
        for batch in 1 8; do
            on_ranks "$n" "$release/mpk-bench" decode --model "$large" --context "$context" --batch "$batch" --steps "$steps" --repeats 1 \
                --backend "$backend" --budget >>"$out/budget.jsonl" || return 1
        done
    done
}

part_tasks() {
    "$release/mpk-bench" tasks --backend "$backend" >"$out/tasks.jsonl"
}

part_tune() {
    local batch=1,8,32 prompt=2048
    [[ $backend == cuda ]] || batch=1 prompt=32
    "$release/mpk-bench" tune "$large" --batch "$batch" --prompt "$prompt" --context "$context" --steps "$steps" --limit "$(($1 - 10))" --dry-run \
        -- --backend "$backend" >"$out/tune.json"
}

# Fills the cubin cache with the parts' kernels, all at once: each takes a core for a minute, which the parts would
# otherwise spend.
compile_all() {
    local n file options
    "$release/mpk-bench" model "$large" >"$work/large.json"
    "$release/mpk-bench" model "$large" --prefill-chunk 2048 --max-seq-len 2112 >"$work/prompts.json"
    for n in $ranks; do
        options=(--ranks "$n" --compile-only --greedy)
        for file in "$tiny" "$work/large.json"; do
            "$release/mpk-run" "$file" "${options[@]}" &
            "$release/mpk-run" "$file" --ranks "$n" --compile-only --temperature 0.8 --top-p 0.95 &
        done
        "$release/mpk-run" "$work/large.json" "${options[@]}" --trace "$work/none.json" &
        "$release/mpk-run" "$work/prompts.json" "${options[@]}" &
        [[ $n == 1 ]] || "$release/mpk-run" "$tiny" "${options[@]}" --transport nvshmem &
    done
    wait
}

# Each part runs in a separate shell that `timeout` can end.
if [[ -n ${MPK_SESSION_PART:-} ]]; then
    "part_$MPK_SESSION_PART" "$MPK_SESSION_SECONDS"
    exit
fi
if [[ $backend == cuda ]]; then
    compile_all >"$out/compile.txt" 2>&1 || true # a part whose cubin is missing says why
    echo "compiled the parts' kernels in $SECONDS s"
fi
failed=0
for part in "${parts[@]}"; do
    name="${part%%:*}" limit="${part##*:}"
    [[ -z $only || ,$only, == *",$name,"* ]] || continue
    left=$((seconds - SECONDS))
    if [[ $left -lt 10 ]]; then
        echo "skipped $name: the time is over"
        continue
    fi
    [[ $limit -le $left ]] || limit=$left
    began=$SECONDS status=0
    MPK_SESSION_PART=$name MPK_SESSION_SECONDS=$limit OUT="$out" timeout --kill-after=5 "$limit" bash "${BASH_SOURCE[0]}" \
        --gpus "$gpus" --backend "$backend" >"$out/$name.txt" 2>&1 || status=$?
    took=$((SECONDS - began))
    case $status in
    0) echo "ok $name, $took s" ;;
    77) echo "skipped $name: $(tail -1 "$out/$name.txt")" ;;
    124 | 137)
        failed=1
        echo "FAILED $name: no end after $limit s"
        ;;
    *)
        failed=1
        echo "FAILED $name, exit status $status: $(tail -1 "$out/$name.txt")"
        ;;
    esac
done
exit "$failed"

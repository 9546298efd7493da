#!/usr/bin/env bash
# Attention changes, each alone against main, in one call on a GPU machine (nvcc, 16 cores, no cargo).
#   bash compare_attention.sh FOLDER [SECONDS]     results: $OUT (default FOLDER/out)
# FOLDER has VARIANT.tar.xz: mpk-run and mpk-bench, and for a change of kernels only main's programs with the folder kernels-cu. Run it in
# the root of a checkout. Variants: main prefill128. Phases: 1. compile everything, on all cores; 2. correctness; 3. times in turns, nothing beside them.
# If time runs out, call it again on the warm machine: the cubins are cached then, CHECKS=0 leaves out phase 2, TURNS="2 3" names turns.
set -uo pipefail
folder=$(realpath "$1"); limit=${2:-560}; out=${OUT:-$folder/out}
mkdir -p "$out"; export NO_COLOR=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
left() { echo $((limit - SECONDS)); }
variants=()
for v in main prefill128; do
    [[ -f $folder/$v.tar.xz ]] || { echo "no $v"; continue; }
    mkdir -p "$folder/$v" && tar -xJf "$folder/$v.tar.xz" -C "$folder/$v" && variants+=("$v")
    mkdir -p "$folder/cache-$v"; chmod 700 "$folder/cache-$v"
done
# run_as VARIANT COMMAND...: with the variant's cache and sources
run_as() {
    local v=$1; shift
    local sources=(); [[ -d $folder/$v/kernels-cu ]] && sources=("MPK_GPU_SOURCES=$folder/$v/kernels-cu")
    env MPK_CACHE_DIR="$folder/cache-$v" "${sources[@]}" "$@"
}
check() { run_as "$1" scripts/gpu_check.sh --only "$2" --gpus 1 --seed 7 --binary "$folder/$1/mpk-run" --cache "$folder/cache-$1" --out "$out/check-$1"; }
"$folder/main/mpk-bench" model qwen3-8b --max-batch 8 --max-seq-len 8448 --prefill-chunk 2048 >"$out/q8.json" # prompts
"$folder/main/mpk-bench" model qwen3-8b --max-batch 128 --max-seq-len 1024 --prefill-chunk 2048 >"$out/q128.json"
export MPK_CHECK_CASES='^attention'

echo "== 1. compile"
for v in "${variants[@]}"; do
    for m in q8 q128; do
        run_as "$v" "$folder/$v/mpk-run" "$out/$m.json" --ranks 1 --compile-only --greedy --tuning off >"$out/compile-$v-$m.txt" 2>&1 &
    done
    check "$v" compile,operators,golden >"$out/compile-check-$v.txt" 2>&1 &
done
wait
for v in "${variants[@]}"; do # spills of the whole kernel, and products that ptxas serialises (C75..)
    for m in q8 q128; do tail -1 "$out/compile-$v-$m.txt" | sed "s/^.*: /$v $m: /"; done
    strings -n 8 "$folder/cache-$v"/kernels/*.cubin | grep -oE "[1-9][0-9]+ bytes stack frame, [0-9]+ bytes spill stores, [0-9]+ bytes spill loads|C75[0-9]+" | sort | uniq -c
done
echo "== compiled after $SECONDS s"

echo "== 2. correctness"
for v in "${variants[@]}"; do
    [[ $v == main || ${CHECKS:-1} == 0 || $(left) -lt 60 ]] && continue
    for part in operators golden; do
        timeout 60 bash -c "$(declare -f run_as check); folder=$folder; out=$out; check $v $part" 2>&1 | tail -1 | sed "s/^/$v $part: /"
    done
done
echo "== checked after $SECONDS s"

echo "== 3. times"
bench() { # name variant model command...
    local name=$1 v=$2 m=$3 file=$out/$1-$2.$turn; shift 3
    [[ $(left) -gt 12 ]] || { echo "$v $name: no time left"; return; }
    run_as "$v" timeout 60 "$folder/$v/mpk-bench" "$@" --model "$out/$m.json" --tuning off --backend cuda \
        >"$file.json" 2>"$file.log" || tail -2 "$file.log"
    echo "$v $name $(grep -oE '"(ms[a-z_]*|[a-z_]*ms[a-z_]*|right)":[^,}]*[,}]' "$file.json" | tr -d '\n' | cut -c1-220)"
}
for turn in ${TURNS:-1 2}; do
    for p in 2048 8192 480; do for v in "${variants[@]}"; do bench p$p "$v" q8 prefill --prompt $p; done; done
    for b in 1 8; do for v in "${variants[@]}"; do bench b$b "$v" q8 decode --batch $b; done; done
    for v in "${variants[@]}"; do bench b128 "$v" q128 decode --batch 128; done
done
turn=budget # where the time of a layer goes
for v in "${variants[@]}"; do bench budget8 "$v" q8 decode --batch 8 --budget; bench budget2048 "$v" q8 prefill --prompt 2048 --budget; done
echo "== $SECONDS s"

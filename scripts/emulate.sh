#!/usr/bin/env bash
# Runs a command with the emulator in place of an NVIDIA GPU (docs/emulator.md), for example
#   scripts/emulate.sh target/release/mpk-run examples/tiny/model.json --backend cuda --prompt-tokens 1,2,3 --max-new-tokens 2
# Needs nvcc (scripts/setup.sh --cuda). MPK_EMULATOR_BUILT=1: the emulator has been built already.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"

if [[ $# == 0 || $1 == -h || $1 == --help ]]; then
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"
    exit $(($# == 0 ? 2 : 0))
fi
for candidate in "${MPK_EMULATOR_NVCC:-}" "${CUDA_HOME:-}/bin/nvcc" "${CUDA_PATH:-}/bin/nvcc" \
    "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc "$setup_folder/nvidia/cu13/bin/nvcc"; do
    if [[ -x $candidate && $candidate != "$repository"/kernels-cu/emulator/* ]]; then
        nvcc=$candidate
        break
    fi
done
if [[ -z ${nvcc:-} ]]; then
    echo "error: the emulator needs nvcc; install it with scripts/setup.sh --cuda" >&2
    exit 3
fi
if [[ ${MPK_EMULATOR_BUILT:-0} == 0 ]]; then
    (cd "$repository" && cargo build --quiet --release --locked -p mpk-emulator)
fi
folder="$target_folder/emulator"
mkdir -p "$folder/lib"
ln -sfn "$target_folder/release/libemulator.so" "$folder/lib/libcuda.so"
ln -sfn "$target_folder/release/libemulator.so" "$folder/lib/libcuda.so.1"
export MPK_EMULATOR_NVCC="$nvcc"
export CUDA_HOME="$repository/kernels-cu/emulator/toolkit"
export LD_LIBRARY_PATH="$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export MPK_CACHE_DIR="${MPK_EMULATOR_CACHE:-$folder/cache}"
# scripts/gpu_check.sh waits this many times longer than for a GPU.
export MPK_CHECK_PATIENCE="${MPK_CHECK_PATIENCE:-10}" MPK_CHECK_LIMIT="${MPK_CHECK_LIMIT:-24000}"
exec "$@"

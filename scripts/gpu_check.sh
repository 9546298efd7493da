#!/usr/bin/env bash
# Checks and times everything of the GPU target on a machine with NVIDIA GPUs.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_check.sh [--gpus K] [--only PART,...] [--binary FILE] [--out DIR] [--cache DIR] [--seed S] [--thorough]

Runs prebuilt binaries; needs no network and no cargo. Prints one line per check: `ok NAME ...`, `FAILED NAME ...` or
`skipped NAME ...`, and writes DIR/gpu-Kx.json (default $OUT, else gpu-results). The exit status is 0 only if nothing failed.

  --gpus K      GPUs to use (default: all)
  --only PARTS  the parts to run, in the order given, of: doctor, litmus, operators, golden, bits, sampled,
                serve, stall, abort, shared, sanitizer, start, skeleton, decode, prefill (default: all of them)
                compile[,PART...] fills the cubin cache for these parts (default: all) and runs none of them. It needs
                nvcc but no GPU, so it can be done on another machine, for an H200. On a GPU, every run first compiles
                the kernels that its cache lacks, before the parts' time begins
  --binary FILE mpk-run (default: target/release/mpk-run)
  --cache DIR   the cubin cache (default: $MPK_CACHE_DIR, else mpk-run's own)
  --seed S      seed of the operators' inputs (default: random; the report has it)
  --thorough    test every combination of placement, lowering and transport, instead of a few that cover each value

Needs mpirun, and python3 (or $MPK_PYTHON) with numpy, torch, transformers and safetensors. $MPK_PEERS names
the folder of the peers' programs (torch_decode.py, torch_allreduce.py).
TEXT
}

for argument in "$@"; do
    case $argument in
    -h | --help)
        usage
        exit 0
        ;;
    esac
done

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
python="${MPK_PYTHON:-python3}"

# NVLink multicast can put a shared machine's GPUs out of service; nothing here needs it.
export NVSHMEM_DISABLE_NVLS=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export NO_COLOR=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if ! command -v nvcc >/dev/null && [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; then
    export PATH="${CUDA_HOME:-/usr/local/cuda}/bin:$PATH"
fi

# Each part and each command has its own limit; this one is for problems outside of them.
exec timeout --signal=TERM --kill-after=10 "${MPK_CHECK_LIMIT:-2400}" "$python" "$here/gpu/check.py" "$@"

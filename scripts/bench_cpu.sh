#!/usr/bin/env bash
# Benchmark of the CPU target: ours, the peers and the floor from one run.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/bench_cpu.sh [--no-build] [ARGUMENTS FOR bench_cpu.py]

Builds in release mode (run scripts/setup.sh before the first time; --no-build uses the existing binaries). Then it
measures decode, prefill, graph building, start-up and memory, and compares them with llama.cpp and PyTorch if these
are installed. The machine must be otherwise idle. A round takes about 2 minutes. `scripts/bench_cpu.py --help` lists
further options.
END
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build=1
arguments=()
for argument in "$@"; do
    case $argument in
    --no-build) build=0 ;;
    -h | --help)
        usage
        echo
        exec python3 "$here/bench_cpu.py" --help
        ;;
    *) arguments+=("$argument") ;;
    esac
done
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
release="$target_folder/release"
if [[ $build == 1 || ! -x $release/mpk-run || ! -x $release/mpk-bench ]]; then
    bash "$here/setup.sh"
    echo "bench_cpu: building in release mode" >&2
    cargo build --quiet --release --locked --manifest-path "$repository/Cargo.toml" --package mpk-launch --bins >&2
fi
exec python3 "$here/bench_cpu.py" --release "$release" ${arguments[@]+"${arguments[@]}"}

#!/usr/bin/env bash
# Builds mpk-run and runs the tiny model on two ranks.
set -euo pipefail

usage() {
    cat <<'END'
usage: [MPK_RANKS=N] [MPK_MODEL=FILE] scripts/run.sh [ARGUMENTS FOR mpk-run]

Installs what is missing (scripts/setup.sh), builds in release mode, and runs
    mpirun -n N mpk-run FILE ARGUMENTS
By default N is 2 and FILE is examples/tiny/model.json. The text goes to standard output, everything else to
standard error. For example:
    scripts/run.sh --prompt "Once upon a time" --max-new-tokens 40
    MPK_RANKS=8 scripts/run.sh --json
END
}

# Only as the first argument: a later --help is for mpk-run.
case ${1:-} in
-h | --help)
    usage
    exit 0
    ;;
esac

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ranks="${MPK_RANKS:-2}"
if [[ ! $ranks =~ ^[1-9][0-9]*$ ]]; then
    echo "run: MPK_RANKS is '$ranks'; expected a number of ranks" >&2
    exit 2
fi
bash "$here/setup.sh"
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"

echo "run: building mpk-run in release mode" >&2
cargo build --quiet --release --locked --manifest-path "$repository/Cargo.toml" --package mpk-launch --bin mpk-run >&2

command=(mpirun -n "$ranks" "$target_folder/release/mpk-run"
    "${MPK_MODEL:-$repository/examples/tiny/model.json}" "$@")
echo "run: ${command[*]}" >&2
exec "${command[@]}"

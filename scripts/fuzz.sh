#!/usr/bin/env bash
# Coverage-guided fuzzing of the file readers, on the stable toolchain.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/fuzz.sh TARGET [SECONDS]

Builds fuzz/ with coverage instrumentation and runs libFuzzer on TARGET (a folder of fuzz/corpus) for SECONDS (600).
An input that crashes, or takes 20 seconds or a gigabyte, ends the run: it is kept in fuzz/artifacts, and the exit status is
not 0. Inputs that reach new code are kept in fuzz/found/TARGET. The last lines say how many inputs ran, how much code they
reached and how much memory they took.

TARGET `build` only builds all targets.
END
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
target="${1:-}"
seconds="${2:-600}"
[[ $target != -h && $target != --help ]] || { usage; exit 0; }
[[ $# -le 2 && $seconds =~ ^[0-9]+$ && -n $target && $target != */* ]] || { usage >&2; exit 2; }
if [[ $target != build && ! -d $here/../fuzz/corpus/$target ]]; then
    echo "fuzz: no target $target; the targets are: $(cd "$here/../fuzz/corpus" && echo *)" >&2
    exit 2
fi

# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
cd "$repository/fuzz"

# The options of cargo-fuzz, without the address sanitizer, which needs a nightly compiler: almost all of the Rust code is
# safe.
flags=(
    --cfg fuzzing
    -Cpasses=sancov-module
    -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares
    -Cdebug-assertions
)
# A separate target triple keeps these flags from build scripts and macros.
triple="$(rustc -vV | sed -n 's/^host: //p')"
RUSTFLAGS="${flags[*]}" cargo build --release --locked --target "$triple" --target-dir target
[[ $target != build ]] || exit 0

mkdir -p "found/$target" artifacts
exec "target/$triple/release/$target" "found/$target" "corpus/$target" \
    -max_total_time="$seconds" -timeout=20 -rss_limit_mb=1024 -max_len=16384 -print_final_stats=1 -artifact_prefix=artifacts/

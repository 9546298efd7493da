#!/bin/sh
# Builds the model checker with the protocol's own source and runs all checks (docs/model-checker.md).
#   kernels-cu/protocol/model/run.sh [CHECK]
# MPK_MODEL_LONG=1: larger sizes. MPK_MODEL_TRACE=1: shows the execution that a weakened order leads
# to.
set -eu
cd "$(dirname "$0")/.."
compiler="${CXX:-g++}"
build="$(mktemp -d)"
checker=""
trap 'test -z "$checker" || wait "$checker" || true; rm -rf "$build"' EXIT
flags="-std=c++20 -Wall -Wextra -Werror -U_FORTIFY_SOURCE -DMPK_MODEL -DMPK_DEBUG_CHECKS -I. -I../include"

# The checker itself.
(
    for file in graph shadow explore operations report main; do
        # shellcheck disable=SC2086
        "$compiler" $flags -O2 -c "model/$file.cpp" -o "$build/$file.o"
    done
) & checker=$!
# The checked code, with a call before each plain access. The calls are the checker's own, not
# ThreadSanitizer's.
for file in model/litmus.cpp model/checks/*.cpp cpu/*.cpp; do
    # shellcheck disable=SC2086
    "$compiler" $flags -O1 -fsanitize=thread -fno-threadsafe-statics -c "$file" -o "$build/check_$(basename "$file" .cpp).o"
done
wait "$checker"
"$compiler" "$build"/*.o -o "$build/model"
"$build/model" . "$@"

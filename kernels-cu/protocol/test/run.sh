#!/bin/sh
# Builds the protocol's tests with a C++ compiler alone and runs them twice: plain, and under ThreadSanitizer.
set -eu
cd "$(dirname "$0")/.."
compiler="${CXX:-g++}"
build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT

# Builds all tests into "$build/$1" with the flags that follow.
build_tests() {
    name="$1"; shift
    mkdir -p "$build/$name"
    flags="-std=c++20 -Wall -Wextra -Werror -pthread -DMPK_DEBUG_CHECKS -I. -I../include -Itest $*"
    # shellcheck disable=SC2086
    {
        "$compiler" $flags test/test_queue.cpp -o "$build/$name/queue"
        "$compiler" $flags test/test_batch.cpp cpu/*.cpp -o "$build/$name/batch"
        "$compiler" $flags test/test_graph.cpp test/graph_fixture.cpp cpu/*.cpp -o "$build/$name/graph"
    }
}

run_tests() {
    for test in queue batch graph; do
        timeout 120 "$build/$1/$test"
    done
}

build_tests plain -O2 & plain=$!
build_tests thread -O1 -g -fsanitize=thread & thread=$!
wait "$plain"
wait "$thread"
echo "protocol tests, plain"
run_tests plain
echo "protocol tests, ThreadSanitizer"
TSAN_OPTIONS="halt_on_error=1 exitcode=66 ${TSAN_OPTIONS:-}" run_tests thread

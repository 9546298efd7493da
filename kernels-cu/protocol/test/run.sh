#!/bin/sh
# Builds the protocol's tests with only a C++ compiler, and runs them twice: plain, and under ThreadSanitizer.
# For the long soak: test/soak.sh. For long online jobs: MPK_SOAK_REQUESTS=1000000 MPK_SOAK_SECONDS=36000 kernels-cu/protocol/test/run.sh
set -eu
cd "$(dirname "$0")/.."
compiler="${CXX:-g++}"
build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT

# Builds all tests into "$build/$1" with the flags that follow.
build_tests() {
    name="$1"; shift
    objects="$build/$name/objects"
    mkdir -p "$objects"
    flags="-std=c++20 -Wall -Wextra -Werror -pthread -DMPK_DEBUG_CHECKS -I. -I../include -Itest $*"
    # shellcheck disable=SC2086
    {
        # Objects that several tests share are compiled once.
        for file in cpu/*.cpp; do "$compiler" $flags -c "$file" -o "$objects/$(basename "$file" .cpp).o"; done
        "$compiler" $flags -c test/graph_fixture.cpp -o "$build/$name/fixture.o"
        "$compiler" $flags test/test_queue.cpp "$objects/proxy.o" -o "$build/$name/queue"
        "$compiler" $flags test/test_batch.cpp test/batch/*.cpp "$objects"/*.o -o "$build/$name/batch"
        "$compiler" $flags test/test_batch_edges.cpp "$objects"/*.o -o "$build/$name/batch_edges"
        "$compiler" $flags test/test_loop.cpp "$objects"/*.o -o "$build/$name/loop"
        "$compiler" $flags test/test_graph.cpp "$build/$name/fixture.o" "$objects"/*.o -o "$build/$name/graph"
        "$compiler" $flags test/test_online.cpp "$build/$name/fixture.o" "$objects"/*.o -o "$build/$name/online"
        "$compiler" $flags test/test_soak.cpp "$build/$name/fixture.o" "$objects"/*.o -o "$build/$name/soak"
    }
    # Negative control: releases weakened to relaxed, which ThreadSanitizer must notice.
    if [ "$name" = thread ]; then
        # shellcheck disable=SC2086
        "$compiler" $flags -DMPK_TEST_WEAKEN_RELEASE test/test_queue.cpp cpu/proxy.cpp -o "$build/$name/weakened"
    fi
}

# Older ThreadSanitizers fail with many bits of address randomisation, so it is switched off where that is allowed.
fixed=""
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed="setarch $(uname -m) -R"; fi

run_tests() {
    for test in queue batch batch_edges loop graph online soak; do
        # shellcheck disable=SC2086
        timeout "${MPK_SOAK_SECONDS:-120}" $fixed "$build/$1/$test"
    done
}

build_tests plain -O1 & plain=$!
build_tests thread -O1 -g -fsanitize=thread & thread=$!
wait "$plain"
wait "$thread"
echo "protocol tests, plain"
run_tests plain
echo "protocol tests, ThreadSanitizer"
TSAN_OPTIONS="halt_on_error=1 exitcode=66 ${TSAN_OPTIONS:-}" run_tests thread
# shellcheck disable=SC2086
if TSAN_OPTIONS="halt_on_error=1 exitcode=66" timeout 120 $fixed "$build/thread/weakened" >/dev/null 2>&1; then
    echo "ThreadSanitizer did not notice weakened releases" >&2
    exit 1
fi
echo "negative control: noticed"

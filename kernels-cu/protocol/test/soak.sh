#!/bin/sh
# The long soak of the protocol on the CPU target: jobs of a million iterations with random stalls and the shortest queues, every sum
# and token checked. It takes hours; test/run.sh runs a short one.
#
# usage: kernels-cu/protocol/test/soak.sh [ITERATIONS [RANKS...]]      default: 1000000 4 8
#
# For each number of ranks (2, 4 or 8) it runs four jobs: static placement, dynamic placement, and both in one run, twice. Each prints
# one line. The compiler is $CXX, or g++; $MPK_SOAK_FLAGS are flags such as -fsanitize=thread. It runs at low priority.
set -eu
cd "$(dirname "$0")/.."
iterations="${1:-1000000}"
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- 4 8
build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT
# shellcheck disable=SC2086
${CXX:-g++} -std=c++20 -O2 -Wall -Wextra -Werror -pthread -DMPK_DEBUG_CHECKS -I. -I../include -Itest ${MPK_SOAK_FLAGS:-} \
    test/test_soak.cpp test/graph_fixture.cpp cpu/*.cpp -o "$build/soak"
# The scheduler's lowest class if it is available, so that the machine stays usable.
low="nice -n 19"
if chrt -i 0 true 2>/dev/null; then low="chrt -i 0"; fi
for ranks in "$@"; do
    # shellcheck disable=SC2086
    MPK_SOAK_DEADLINE=1800 MPK_SOAK_ITERATIONS="$iterations" MPK_SOAK_RANKS="$ranks" $low "$build/soak"
done

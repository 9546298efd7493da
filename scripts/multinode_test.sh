#!/usr/bin/env bash
# Several nodes on one machine: runs jobs over network namespaces, and checks what they compute and how they end.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/multinode_test.sh [--long] [--program FILE] [--share I/N] [PART...]
       scripts/multinode_test.sh --probe

Makes nodes from network namespaces, each with its own host name and address, and runs mpk-run over them with mpirun. It runs the
named parts, or all of them:

  cases    every family, placements, lowerings, batches and prompts in chunks: the tokens of Hugging Face transformers, and the same
           bits as on one node; in one case, every access of every task is checked (MPK_SANITIZE)
  slow     the same over a network with 20 ms of delay and jitter, and over one that loses 1 % of the packets
  faults   a cut link (also at the first contact), a frozen node, a killed rank (also while loading), a stopped proxy, a killed
           mpirun, a killed daemon: every rank ends within the deadline and 10 s with status 4 and says which node is gone. No process is
           left, and no file in temporary folders or shared memory
  signals  SIGINT and SIGTERM to mpirun and to ranks of mpk-run and mpk-serve while they load: every rank ends within the same time,
           one says which signal it was, and no process or file is left. The same after SIGINT twice, also while the kernel runs: the
           second one ends every rank at once
  figures  times of a put with signal over the proxies and of MPI's own messages, and of the tiny model on two nodes and on one

--long runs all combinations (an hour). Without it, a selection runs that covers every value once, for CI.
--probe only checks whether this machine can run the test: status 0 or 3.
--share I/N runs every Nth fault and signal, starting with the Ith, so that N calls can run side by side.
--program names another mpk-run than target/release/mpk-run.

It needs root or user namespaces, and the programs unshare, nsenter (util-linux), python3 and mpirun. If the kernel does not allow
namespaces or links between them, it says what it has left out, and ends with status 0, or with 3 if MPK_REQUIRE_NAMESPACES is 1.
MPK_MULTINODE=0 skips the whole test and says so, for a machine that cannot run it for another reason.
END
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case ${1:-} in
-h | --help)
    usage
    exit 0
    ;;
esac
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
export MPK_MULTINODE_PROGRAM="${MPK_MULTINODE_PROGRAM:-$target_folder/release/mpk-run}"

left_out="jobs over several nodes (what they compute, delay and loss, cut links, frozen nodes, killed daemons)"
if [[ ${MPK_MULTINODE:-1} == 0 ]]; then
    echo "multinode: NOT TESTED: $left_out: MPK_MULTINODE is 0"
    [[ ${1:-} != --probe ]] || exit 3
    exit 0
fi
for program in unshare nsenter python3 mpirun; do
    if ! command -v "$program" >/dev/null; then
        echo "multinode: $program is missing (Debian: util-linux python3 openmpi-bin; scripts/setup.sh installs Open MPI)" >&2
        exit 3
    fi
done
# Separate network, process and mount namespaces: nothing that is created in them outlives them.
inside=(unshare --net --pid --fork --mount --mount-proc --kill-child)
[[ $(id -u) == 0 ]] || inside+=(--user --map-root-user)
status=0
problem="$("${inside[@]}" python3 "$here/multinode/probe.py" 2>&1)" || status=$?
# 77: the kernel refuses something, as the program says. Otherwise unshare was refused.
if [[ $status != 0 && $status != 77 && $problem != unshare:* ]]; then
    echo "multinode: the probe failed with status $status: $problem" >&2
    exit 1
fi
if [[ $status != 0 ]]; then
    echo "multinode: NOT TESTED: $left_out: namespaces are not allowed here: ${problem//$'\n'/ }"
    [[ ${1:-} != --probe && ${MPK_REQUIRE_NAMESPACES:-0} != 1 ]] || exit 3
    exit 0
fi
[[ ${1:-} != --probe ]] || exit 0
# Ranks in a user namespace are root there.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec "${inside[@]}" python3 "$here/multinode/main.py" "$@"

#!/usr/bin/env bash
# Several nodes on one machine: runs jobs over network namespaces, and checks what they compute and how they end.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/multinode_test.sh [--long] [--program FILE] [--share I/N] [PART...]
       scripts/multinode_test.sh --probe

Makes nodes of network namespaces, with host names and addresses of their own, and runs mpk-run over them with mpirun. Parts, all
unless some are named:

  cases    every family, placements, lowerings, batches and prompts in chunks: the tokens of Hugging Face transformers, and the same
           bits as on one node; one case with every access of every task checked (MPK_SANITIZE)
  slow     the same over a network with 20 ms of delay and jitter, and over one that loses 1 % of the packets
  faults   a link cut (also at the first contact), a node frozen, a rank killed (also while loading), a proxy stopped, mpirun and its
           daemon killed: every rank ends within the deadline and 10 s with status 4 and says which node is gone, and nothing is left
           behind, in temporary folders and shared memory too
  signals  SIGINT and SIGTERM to mpirun and to ranks of mpk-run and mpk-serve while they load: every rank ends within the same time,
           one says which signal it was, and nothing is left behind
  figures  a put with signal over the proxies beside MPI's own messages, and the tiny model on two nodes beside one

--long does all combinations (an hour); without it some of each that together meet everything once, for CI.
--probe only finds out whether this machine can do it: status 0 or 3.
--share I/N runs every Nth of the faults from the Ith, so that N calls can run side by side.
--program names another mpk-run than target/release/mpk-run.

Needs root or user namespaces, and of programs unshare, nsenter (util-linux), python3 and mpirun. Where the kernel does not allow
namespaces or links between them, it says so and what it has left out, and ends with status 0, or with 3 if MPK_REQUIRE_NAMESPACES is 1.
With MPK_MULTINODE=0 it leaves out everything and says so, on a machine that can't do it for another reason.
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

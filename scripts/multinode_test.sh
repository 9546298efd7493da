#!/usr/bin/env bash
# Several nodes on one machine: jobs over network namespaces, what they compute and how they end.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/multinode_test.sh [--long] [--program FILE] [PART...]
       scripts/multinode_test.sh --probe

Makes nodes of network namespaces, with host names and addresses of their own, and runs mpk-run over them with mpirun. Parts, all
unless some are named:

  cases    every family, placements, lowerings, batches and prompts in chunks: the tokens of Hugging Face transformers, and the same
           bits as on one node
  slow     the same over a network with 20 ms of delay and jitter, and over one that loses 1 % of the packets
  faults   a link cut, a node frozen, a rank killed, a proxy stopped, mpirun and its daemon killed: every rank ends within the deadline
           and 10 s with status 4 and says which node is gone, and nothing is left behind
  figures  a put with signal over the proxies beside MPI's own messages, and the tiny model on two nodes beside one

--long does all combinations (a quarter of an hour); without it some of each that together meet everything once, for CI.
--probe only finds out whether namespaces are allowed: status 0 or 3.
--program names another mpk-run than target/release/mpk-run.

Where namespaces are not allowed, it says so and ends with status 0, or with 3 if MPK_REQUIRE_NAMESPACES is 1.
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

# Network, process and mount namespaces of our own: nothing that is made in them outlives them.
inside=(unshare --net --pid --fork --mount --mount-proc --kill-child)
[[ $(id -u) == 0 ]] || inside+=(--user --map-root-user)
reason=""
if ! { command -v unshare && command -v nsenter && command -v ip && command -v python3; } >/dev/null; then
    reason="it takes unshare, nsenter, ip and python3 (Debian: util-linux iproute2 python3)"
elif ! problem="$("${inside[@]}" sh -c 'ip link add name probe1 type veth peer name probe2 && unshare --net --uts hostname probe' 2>&1)"; then
    reason="namespaces are not allowed here: ${problem//$'\n'/ }"
fi
if [[ ${1:-} == --probe ]]; then
    [[ -z $reason ]] || exit 3
    exit 0
fi
if [[ -n $reason ]]; then
    echo "multinode: NOT TESTED: jobs over several nodes (what they compute, delay and loss, cut links, frozen nodes, killed daemons): $reason"
    [[ ${MPK_REQUIRE_NAMESPACES:-0} != 1 ]] || exit 3
    exit 0
fi
# Ranks of a user namespace are root there.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec "${inside[@]}" python3 "$here/multinode/main.py" "$@"

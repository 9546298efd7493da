#!/usr/bin/env bash
# A soak test: requests with random arrivals, lengths, cancels and disconnecting clients, on two ranks of the CPU
# target.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/soak.sh [REQUESTS [MODEL]]

Runs REQUESTS (by default a million) through an engine of two ranks (tests/tests/online.rs, examples/online.rs). The tokens of each
request are compared with those of the same request alone. Every request must end, no page may stay in use, and memory must not grow
by more than a hundred bytes per request. Prints one line of figures, and ends with status 0 if all conditions hold. CI runs 20,000
requests. A million takes three minutes on two cores.

  MODEL      a model.json; by default tests/fixtures/soak, whose iterations are so short that the time goes into requests
  SOAK_RANKS ranks, 2 by default
END
}

case "${1:-}" in
-h | --help) usage; exit 0 ;;
esac
requests="${1:-1000000}"
[[ $requests =~ ^[0-9]+$ && $# -le 2 ]] || { usage >&2; exit 2; }
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
cd "$repository"
model="${2:-tests/fixtures/soak/model.json}"
cargo build --quiet --release --locked -p mpk-launch --example online
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
exec mpirun -n "${SOAK_RANKS:-2}" target/release/examples/online "$model" "$requests"

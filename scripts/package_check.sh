#!/usr/bin/env bash
# Checks that nvshmem-sys and its documentation build outside this repository, as from its published package: packs it, unpacks it in
# an empty folder, and runs cargo there. Needs no network, because it uses the crates of Cargo.lock.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
cd "$repository"
# Without any headers of NVSHMEM, because users of the package may have only its checked-in bindings.
unset NVSHMEM_HOME CUDA_HOME CUDA_PATH

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# Packing does not build; the build below uses the package alone.
cargo package --quiet --package nvshmem-sys --no-verify --allow-dirty --offline --target-dir "$work/packed"
tar -xzf "$work"/packed/package/nvshmem-sys-*.crate -C "$work"
mv "$work"/nvshmem-sys-* "$work/nvshmem-sys"
cd "$work/nvshmem-sys"
! grep -q 'path = "\.\.' Cargo.toml || { echo "package_check: the package refers to folders beside it" >&2; exit 1; }
# Reuses dependencies that have been built already.
export CARGO_TARGET_DIR="$target_folder/package"
cargo check --quiet --release --offline
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --release --offline --no-deps
[[ -f $CARGO_TARGET_DIR/doc/nvshmem_sys/index.html ]] || { echo "package_check: no documentation was generated" >&2; exit 1; }
echo "nvshmem-sys: its package builds and documents itself in $(find . -type f | wc -l) files, without this repository"

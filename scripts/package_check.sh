#!/usr/bin/env bash
# nvshmem-sys builds and documents itself outside this repository, as from its published package: packs it, unpacks it in an empty
# folder, and runs cargo there. Needs no network: the crates are those of Cargo.lock.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
cd "$repository"
# Neither the set-up's headers nor the user's: the package's own bindings are what its users have.
unset NVSHMEM_HOME CUDA_HOME CUDA_PATH

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# Packing does not build; what is built below is built from the package alone.
cargo package --quiet --package nvshmem-sys --no-verify --allow-dirty --offline --target-dir "$work/packed"
tar -xzf "$work"/packed/package/nvshmem-sys-*.crate -C "$work"
mv "$work"/nvshmem-sys-* "$work/nvshmem-sys"
cd "$work/nvshmem-sys"
! grep -q 'path = "\.\.' Cargo.toml || { echo "package_check: the package names folders beside it" >&2; exit 1; }
# Dependencies that are built already are used again.
export CARGO_TARGET_DIR="$target_folder/package"
cargo check --quiet --release --offline
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --release --offline --no-deps
[[ -f $CARGO_TARGET_DIR/doc/nvshmem_sys/index.html ]] || { echo "package_check: no documentation was made" >&2; exit 1; }
echo "nvshmem-sys: its package builds and documents itself in $(find . -type f | wc -l) files, without this repository"

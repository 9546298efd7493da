#!/usr/bin/env bash
# Everything that CI checks.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/test.sh [STEP...]

Installs what is missing (scripts/setup.sh --cuda --deny --clients), then runs the steps named, or all of them,
in this order, and stops at the first step that fails:

  format     cargo fmt --check
  imports    no files import each other in a loop (scripts/check_imports.py)
  scripts    shellcheck and ruff on all scripts
  lint       clippy on all targets, warnings are errors
  doc        rustdoc on all crates, warnings are errors
  deny       cargo-deny: licences, sources, banned and duplicate crates (offline: no advisories)
  protocol   the protocol's C++ tests under ThreadSanitizer, and its model checks
  build      the binaries and examples, in release mode
  doctest    the examples in the documentation
  extension  another crate's additions to the open sets (tests/extension)
  sanitize   every operator, in graphs of one and several ranks, and model families, under the region sanitizer of the CPU
             target (needs cargo-nextest)
  test       all other tests, with cargo-nextest if it is installed, otherwise with cargo test

Only if named, because they take long:

  sanitize_all  the same for each kernel's own tests too
  package       nvshmem-sys and its documentation build outside this repository (scripts/package_check.sh)

Everything is built in release mode, so that dependencies are built once. The last line is the test runner's.
END
}

all_steps=(format imports scripts lint doc deny protocol build doctest extension sanitize test)
more_steps=(sanitize_all package)
steps=()
for argument in "$@"; do
    case $argument in
    -h | --help)
        usage
        exit 0
        ;;
    *)
        if [[ " ${all_steps[*]} ${more_steps[*]} " != *" $argument "* ]]; then
            usage >&2
            exit 2
        fi
        steps+=("$argument")
        ;;
    esac
done
[[ ${#steps[@]} -gt 0 ]] || steps=("${all_steps[@]}")

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ -n ${NVSHMEM_HOME:-} ]]; then
    echo "test: ignoring NVSHMEM_HOME, because the tests need the pinned version"
    unset NVSHMEM_HOME
fi
# The tests that compile for GPUs need it too.
unset CUDA_HOME CUDA_PATH
started=$SECONDS
echo "==> setup"
bash "$here/setup.sh" --cuda --deny --clients
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
cd "$repository"
echo "    $((SECONDS - started)) s"

# Short, because Open MPI creates sockets below it.
TMPDIR="$(mktemp -d /tmp/mpk-test.XXXXXX)"
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT

# Tests that need NVSHMEM's files, CUDA's compiler or the server's clients must fail instead of being skipped.
export MPK_REQUIRE_NVSHMEM=1 MPK_REQUIRE_CUDA=1 MPK_REQUIRE_CLIENTS=1
# Namespaces need the kernel's permission, which cannot be installed. Without it, a user's machine says what is not tested, and
# CI fails.
if [[ ${CI:-} == true ]]; then
    export MPK_REQUIRE_NAMESPACES="${MPK_REQUIRE_NAMESPACES:-1}"
fi
cargo_options=(--workspace --release --locked)
# Two for each core, see the profile.
nextest_options=(--test-threads $((2 * $(nproc))))

# Succeeds if a component of the toolchain can be used; rustup adds it if necessary.
component() {
    cargo "$1" --version >/dev/null 2>&1 && return
    if command -v rustup >/dev/null && rustup component add "$2" >&2; then
        return
    fi
    echo "    skipped: $2 is not installed and there is no rustup to add it"
    return 1
}

step_format() { ! component fmt rustfmt || cargo fmt --all --check; }
step_imports() { python3 scripts/check_imports.py; }
step_scripts() {
    local bin="$setup_folder/clients/bin"
    git ls-files -z '*.sh' | xargs -0 "$bin/shellcheck" --external-sources --severity=warning &&
        git ls-files -z '*.py' | xargs -0 "$bin/ruff" check --quiet --no-cache --isolated --select E4,E7,E9,F --
}
step_lint() { ! component clippy clippy || cargo clippy --quiet "${cargo_options[@]}" --all-targets -- -D warnings; }
step_doc() { RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps "${cargo_options[@]}"; }
# cargo-deny checks the crates of all platforms; a build has fetched only those of this one.
step_deny() { cargo fetch --quiet --locked && cargo deny --offline --log-level warn check bans licenses sources; }
# Side by side; each has parts that need one core only.
step_protocol() { printf 'kernels-cu/protocol/%s/run.sh\n' test model | xargs -P 2 -n 1 sh; }
step_build() { cargo build --quiet "${cargo_options[@]}" --bins --examples; }
step_doctest() { cargo test --quiet "${cargo_options[@]}" --doc; }
# Not a member of the workspace; it uses the libraries that are built there.
step_extension() { python3 "$here/extension.py"; }
# Compares every task's reads and writes with what it declared: whole graphs of several ranks.
step_sanitize() { sanitized 'binary(user_graph) | binary(golden) & test(/on_2_ranks$/)'; }
# Also kernels one by one.
step_sanitize_all() {
    sanitized 'package(mpk-kernels) & test(/^(tasks|sanitizer)::/) | binary(user_graph) | binary(golden) & test(/on_2_ranks$/)'
}
sanitized() {
    if ! cargo nextest --version >/dev/null 2>&1; then
        echo "    skipped: cargo-nextest is not installed"
        return
    fi
    MPK_SANITIZE=1 cargo nextest run "${cargo_options[@]}" --cargo-quiet --profile ci "${nextest_options[@]}" -E "$1"
}
step_package() { bash "$here/package_check.sh"; }
step_test() {
    # Says what is left out if this machine does not allow network namespaces. In CI that is a failure, found before the other
    # tests take their time. MPK_MULTINODE=0 is a deliberate choice and is respected everywhere.
    local status=0
    bash "$here/multinode_test.sh" --probe || status=$?
    if [[ $status == 3 && ${MPK_REQUIRE_NAMESPACES:-0} == 1 && ${MPK_MULTINODE:-1} != 0 ]]; then
        echo "    CI must not skip these tests: allow namespaces, or set MPK_MULTINODE=0"
        return 3
    fi
    [[ $status == 0 || $status == 3 ]] || return "$status"
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run "${cargo_options[@]}" --cargo-quiet --profile ci "${nextest_options[@]}"
    else
        # One line at the end for all test binaries, as with nextest.
        cargo test --quiet "${cargo_options[@]}" --no-fail-fast --lib --bins --tests 2>&1 | awk '
            { print }
            /^test result:/ { passed += $4; failed += $6; ignored += $8 }
            END {
                printf "test result: %s. %d passed; %d failed; %d ignored; all test binaries\n",
                    failed ? "FAILED" : "ok", passed, failed, ignored
            }'
    fi
}

number=0
for step in "${steps[@]}"; do
    number=$((number + 1))
    echo "==> $step ($number of ${#steps[@]})"
    step_started=$SECONDS
    status=0
    "step_$step" || status=$?
    if [[ $status != 0 ]]; then
        echo "FAILED: $step, after $((SECONDS - step_started)) s (exit status $status)"
        exit "$status"
    fi
    # Nothing follows the runner's closing line.
    [[ $step == test && $number == "${#steps[@]}" ]] || echo "    $((SECONDS - step_started)) s"
done

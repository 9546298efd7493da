# shellcheck shell=bash
# Sourced by the other scripts: the environment for building and running. Sets nothing that is already set, and nothing
# that would make Cargo rebuild the results of a plain `cargo build`.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
setup_folder="$repository/.setup"
export PATH="$setup_folder/bin:$PATH"
if ! command -v cargo >/dev/null && [[ -x "$HOME/.cargo/bin/cargo" ]]; then
    export PATH="$HOME/.cargo/bin:$PATH"
fi

# The folder that Cargo builds into.
# shellcheck disable=SC2034
target_folder="${CARGO_TARGET_DIR:-$repository/target}"

# Prints the folder of a libclang in one of the places that bindgen searches itself, or fails.
standard_libclang() {
    local file
    for file in /usr/lib/llvm-*/lib/libclang.so* /usr/lib/llvm-*/lib/libclang-*.so* \
        /usr/lib/*-linux-gnu/libclang*.so* /usr/lib64/libclang*.so* /usr/lib/libclang*.so* \
        /usr/local/lib/libclang*.so*; do
        if [[ -e $file && $file != *libclang-cpp* ]]; then
            dirname "$file"
            return 0
        fi
    done
    return 1
}

# Prints the folder of a libclang elsewhere, or fails.
other_libclang() {
    local file
    for file in /usr/lib64/llvm*/lib*/libclang.so* /opt/llvm*/lib/libclang.so* \
        "$(ldconfig -p 2>/dev/null | sed -n 's/.*=> \(.*libclang[-.0-9]*\.so.*\)/\1/p' | head -n 1)"; do
        if [[ -e $file ]]; then
            dirname "$file"
            return 0
        fi
    done
    return 1
}

if [[ -z ${LIBCLANG_PATH:-} ]] && ! standard_libclang >/dev/null && libclang="$(other_libclang)"; then
    export LIBCLANG_PATH="$libclang"
fi

# Open MPI refuses root and more ranks than cores, and in containers cannot copy between processes.
if [[ $(id -u) == 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
    export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"
fi
export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
export OMPI_MCA_btl_vader_single_copy_mechanism="${OMPI_MCA_btl_vader_single_copy_mechanism:-none}"

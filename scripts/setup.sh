#!/usr/bin/env bash
# Installs everything that building, running and testing need.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/setup.sh [--cuda | --cuda12] [--nvshmem] [--deny] [--clients] [--check]

Makes sure that a Rust toolchain, a C++ compiler, Open MPI and libclang are installed. It installs what is
missing with apt-get, as root or through sudo. If neither is possible, it prints the command to run and
ends with exit status 3. It is quick if nothing is missing.

  --cuda      also what compiles models for NVIDIA GPUs: CUDA's compiler and disassembler, and NVSHMEM, from PyPI into
              .setup/nvidia, pinned (about 165 MB to download, under NVIDIA's licences, which are stored
              in the same folder). Needs no GPU and no driver. The compiled models need a driver of CUDA 13 (580 or later)
  --cuda12    the same for drivers of CUDA 12 (525 or later): NVSHMEM for CUDA 12 from PyPI into .setup/nvidia (about 75 MB), and
              the compiler of a CUDA toolkit 12.4 or later on this machine. PyPI has no such compiler; if this machine has none,
              setup.sh prints the commands that install NVIDIA's toolkit
  --nvshmem   only the part of --cuda that the tests of the nvshmem-sys crate need: NVSHMEM's and CUDA's headers
              and NVSHMEM's libraries (about 65 MB)
  --deny      also cargo-deny, built with cargo into .setup/bin, pinned (under two minutes on 2 cores)
  --clients   also the Python packages of scripts/clients.txt, the server's clients in the tests and the checkers of the
              scripts (shellcheck, ruff), from PyPI into .setup/clients (about 50 MB to download), and curl
  --check     only say what is missing; the exit status is 3 if something is missing

Everything that does not come from the distribution goes below .setup/, which git ignores. Remove that
folder to undo the set-up. Building, and running on the CPU, need none of it. If NVSHMEM_HOME names your own
NVSHMEM, --nvshmem does nothing. If CUDA_HOME names your own toolkit too, --cuda does nothing either.
END
}

nvshmem_version=3.4.5
cuda_nvcc_version=13.0.88
cuda_nvvm_version=13.0.88
cuda_nvdisasm_version=13.5.37
# For --nvshmem, only the headers of these three are used, to parse NVSHMEM's.
cuda_runtime_version=13.0.96
cuda_crt_version=13.0.88
cuda_cccl_version=13.0.85
cargo_deny_version=0.18.9

want_cuda=false want_cuda12=false want_nvshmem=false want_deny=false want_clients=false check_only=false
for argument in "$@"; do
    case $argument in
    --cuda) want_cuda=true ;;
    --cuda12) want_cuda12=true ;;
    --nvshmem) want_nvshmem=true ;;
    --deny) want_deny=true ;;
    --clients) want_clients=true ;;
    --check) check_only=true ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        usage >&2
        exit 2
        ;;
    esac
done

if $want_cuda12 && { $want_cuda || $want_nvshmem; }; then
    echo "setup: use --cuda12 instead of --cuda and --nvshmem, not together with them" >&2
    exit 2
fi

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/setup-env.sh
source "$here/setup-env.sh"
cd "$repository"

say() { echo "setup: $*" >&2; }
lack() {
    say "$*"
    exit 3
}

work="" # a folder below .setup that is removed on exit
trap '[[ -z $work ]] || rm -rf "$work"' EXIT

has_cxx() { command -v cc >/dev/null && { command -v c++ || command -v g++ || command -v clang++; } >/dev/null; }
has_mpi() { command -v mpicc >/dev/null && command -v mpirun >/dev/null; }
has_libclang() {
    [[ -n ${LIBCLANG_PATH:-} ]] || standard_libclang >/dev/null || return 1
    # The library cannot parse anything without clang's own headers.
    compgen -G '/usr/lib*/llvm*/lib*/clang/*/include/stddef.h' >/dev/null ||
        compgen -G '/usr/lib*/clang/*/include/stddef.h' >/dev/null || [[ -n ${BINDGEN_EXTRA_CLANG_ARGS:-} ]]
}
has_pip() { python3 -m pip --version >/dev/null 2>&1; }

installed_versions() { cat "$setup_folder/nvidia/versions" 2>/dev/null; }
has_cuda() { [[ $(installed_versions) == "$nvidia_versions$nvcc_versions" ]]; }
has_nvshmem() { has_cuda || [[ $(installed_versions) == "$nvidia_versions" ]]; }
has_nvshmem12() { [[ $(installed_versions) == "nvshmem-cu12 $nvshmem_version" ]]; }
has_clients() { cmp -s scripts/clients.txt "$setup_folder/clients/clients.txt"; }
has_deny() { [[ $(cargo deny --version 2>/dev/null) =~ ^cargo-deny\ 0\.(1[89]|[2-9][0-9])\. ]]; }
nvidia_versions="nvshmem $nvshmem_version, cuda-runtime $cuda_runtime_version, cuda-crt $cuda_crt_version"
nvidia_versions+=", cuda-cccl $cuda_cccl_version"
nvcc_versions=", cuda-nvcc $cuda_nvcc_version, nvvm $cuda_nvvm_version, nvdisasm $cuda_nvdisasm_version"
if $want_cuda && [[ -n ${CUDA_HOME:-} && -n ${NVSHMEM_HOME:-} ]]; then
    want_cuda=false want_nvshmem=true
fi
! $want_cuda || want_nvshmem=false

wants_nvidia() {
    if $want_cuda12; then
        [[ -z ${NVSHMEM_HOME:-} ]] && ! has_nvshmem12
    elif $want_cuda; then ! has_cuda; else $want_nvshmem && [[ -z ${NVSHMEM_HOME:-} ]] && ! has_nvshmem; fi
}
wants_clients() { $want_clients && ! has_clients; }

check_rust() {
    local needed found
    needed="$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)"
    if ! command -v cargo >/dev/null || ! command -v rustc >/dev/null; then
        lack "no Rust toolchain was found; install $needed or later: https://rustup.rs"
    fi
    found="$(rustc --version | cut -d ' ' -f 2)"
    if [[ $(printf '%s\n' "$needed" "${found%%-*}" | sort -V | head -n 1) != "$needed" ]]; then
        lack "Rust $found is too old, $needed or later is needed; with rustup: rustup update stable"
    fi
}

install_packages() {
    local missing=() words=()
    has_cxx || { missing+=(g++ make) && words+=("a C++ compiler"); }
    has_mpi || { missing+=(openmpi-bin libopenmpi-dev) && words+=("Open MPI"); }
    has_libclang || { missing+=(libclang-dev) && words+=(libclang); }
    if { wants_nvidia || wants_clients; } && ! has_pip; then
        missing+=(python3-pip) && words+=(pip)
    fi
    if $want_clients && ! command -v curl >/dev/null; then
        missing+=(curl) && words+=(curl)
    fi
    [[ ${#missing[@]} -gt 0 ]] || return 0

    local list command
    list="$(printf '%s, ' "${words[@]}")"
    command="apt-get install -y --no-install-recommends ${missing[*]}"
    if $check_only; then
        lack "missing: ${list%, }; to install: sudo $command"
    elif ! command -v apt-get >/dev/null; then
        lack "missing: ${list%, }; install what your distribution calls: ${missing[*]}"
    fi
    local as_root=()
    if [[ $(id -u) != 0 ]]; then
        # Without a terminal sudo cannot ask for a password.
        if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
            as_root=(sudo)
        else
            lack "missing: ${list%, }; type this, then start again: sudo apt-get update && sudo $command"
        fi
    fi
    say "installing ${list%, }: ${missing[*]}"
    "${as_root[@]}" apt-get -qq -o DPkg::Lock::Timeout=300 update >&2 ||
        say "apt-get update failed; trying with the existing package lists"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 \
        install -y --no-install-recommends "${missing[@]}" >&2 ||
        lack "apt-get could not install ${missing[*]}"
}

# Downloads packages from PyPI and puts them into .setup/nvidia: download_nvidia VERSIONS KEEP FAILURE PACKAGE...
# VERSIONS is the text of the version file. KEEP (true or false) says whether the packages are added to those already in the
# folder. FAILURE is the message if pip fails. The folder is replaced at the end, so an interrupted download changes nothing.
download_nvidia() {
    local versions="$1" keep="$2" failure="$3" wheel nvidia
    shift 3
    work="$(mktemp -d "$setup_folder/nvidia.XXXXXX")"
    nvidia="$work/unpacked/nvidia"
    mkdir "$work/unpacked"
    if $keep; then
        cp -al "$setup_folder/nvidia" "$nvidia"
        rm "$nvidia/versions"
    fi
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --dest "$work/wheels" "$@" >&2 || lack "$failure"
    for wheel in "$work/wheels"/*.whl; do
        python3 -m zipfile -e "$wheel" "$work/unpacked"
    done
    mv "$work/unpacked"/*.dist-info "$nvidia/"
    # The linker looks for the name without the version.
    ln -sf libnvshmem_host.so.3 "$nvidia/nvshmem/lib/libnvshmem_host.so"
    if $want_cuda; then
        # The zip module drops the permissions.
        find "$nvidia/cu13/bin" "$nvidia/cu13/nvvm/bin" -maxdepth 1 -type f -exec chmod +x {} +
        "$nvidia/cu13/bin/nvcc" --version >/dev/null || lack "the downloaded nvcc does not run on this machine"
    fi
    echo "$versions" >"$nvidia/versions"
    rm -rf "$setup_folder/nvidia"
    mv "$nvidia" "$setup_folder/nvidia"
    rm -rf "$work"
    work=""
    # Cargo watches this file; a change makes nvshmem-sys look for headers again.
    touch sys/wrapper.h
}

install_nvidia() {
    if $want_nvshmem && [[ -n ${NVSHMEM_HOME:-} ]]; then
        say "NVSHMEM_HOME is set: using $NVSHMEM_HOME${CUDA_HOME:+, and CUDA_HOME: $CUDA_HOME}"
        return
    fi
    wants_nvidia || return 0
    local option=--nvshmem files="NVSHMEM's headers and libraries" keep=false packages=()
    if $want_cuda; then
        option=--cuda files="CUDA's compiler and NVSHMEM"
    fi
    ! $check_only || lack "missing: $files; to install: scripts/setup.sh $option"
    if has_nvshmem; then
        keep=true
    else
        packages+=("nvidia-nvshmem-cu13==$nvshmem_version" "nvidia-cuda-runtime==$cuda_runtime_version"
            "nvidia-cuda-crt==$cuda_crt_version" "nvidia-cuda-cccl==$cuda_cccl_version")
    fi
    local versions="$nvidia_versions"
    if $want_cuda; then
        packages+=("nvidia-cuda-nvcc==$cuda_nvcc_version" "nvidia-nvvm==$cuda_nvvm_version"
            "nvidia-cuda-nvdisasm==$cuda_nvdisasm_version")
        versions+="$nvcc_versions"
    fi
    say "downloading $files from PyPI into .setup/nvidia: ${packages[*]}"
    download_nvidia "$versions" "$keep" \
        "pip could not download the packages; without a network, set NVSHMEM_HOME and CUDA_HOME instead" "${packages[@]}"
}

# Prints the folder of a CUDA toolkit with a compiler of CUDA 12.4 or later, but not 13.
find_cuda12() {
    local folder release
    for folder in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda-12* /usr/local/cuda; do
        [[ -x $folder/bin/nvcc ]] || continue
        release="$("$folder/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')"
        if [[ $release == 12.* && ${release#12.} -ge 4 ]]; then
            echo "$folder"
            return 0
        fi
    done
    return 1
}

# Prints how to install NVIDIA's toolkit for CUDA 12 on this distribution.
cuda12_commands() {
    local id="" version="" name=""
    # shellcheck source=/dev/null
    [[ ! -r /etc/os-release ]] || { id="$(. /etc/os-release && echo "${ID:-}")" version="$(. /etc/os-release && echo "${VERSION_ID:-}")"; }
    case $id in
    ubuntu) name="ubuntu${version//./}" ;;
    debian) name="debian${version%%.*}" ;;
    *)
        echo "  install NVIDIA's CUDA toolkit 12.9 and set CUDA_HOME to its folder (https://developer.nvidia.com/cuda-12-9-1-download-archive)"
        return
        ;;
    esac
    echo "  curl -fLO https://developer.download.nvidia.com/compute/cuda/repos/$name/$(uname -m)/cuda-keyring_1.1-1_all.deb"
    echo "  sudo dpkg -i cuda-keyring_1.1-1_all.deb && sudo apt-get update"
    echo "  sudo apt-get install cuda-nvcc-12-9 cuda-cudart-dev-12-9 cuda-cccl-12-9"
}

install_cuda12() {
    $want_cuda12 || return 0
    local toolkit
    if ! toolkit="$(find_cuda12)"; then
        say "no compiler of CUDA 12.4 to 12.9 was found in CUDA_HOME or /usr/local, and PyPI has none. To install NVIDIA's:"
        cuda12_commands >&2
        exit 3
    fi
    if wants_nvidia; then
        ! $check_only || lack "missing: NVSHMEM for CUDA 12; to install: scripts/setup.sh --cuda12"
        say "downloading NVSHMEM for CUDA 12 from PyPI into .setup/nvidia"
        download_nvidia "nvshmem-cu12 $nvshmem_version" false \
            "pip could not download the package; without a network, set NVSHMEM_HOME instead" "nvidia-nvshmem-cu12==$nvshmem_version"
    fi
    [[ ${CUDA_HOME:-} == "$toolkit" ]] || say "to compile with it: export CUDA_HOME=$toolkit"
}

# A driver for CUDA 12 cannot load code that CUDA 13 compiled.
warn_of_old_driver() {
    local served
    served="$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' | head -n 1)" || return 0
    if $want_cuda && [[ $served == 12.* ]]; then
        say "this machine's driver supports CUDA $served and cannot load code that CUDA 13 compiled; update the driver to 580 or later, or use --cuda12"
    fi
}

install_clients() {
    wants_clients || return 0
    ! $check_only || lack "missing: the server's clients; to install: scripts/setup.sh --clients"
    say "downloading the server's clients from PyPI into .setup/clients: scripts/clients.txt"
    work="$(mktemp -d "$setup_folder/clients.XXXXXX")"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
        --only-binary=:all: --target "$work/new" -r scripts/clients.txt >&2 ||
        lack "pip could not install the packages of scripts/clients.txt"
    cp scripts/clients.txt "$work/new/"
    rm -rf "$setup_folder/clients"
    mv "$work/new" "$setup_folder/clients"
    rm -rf "$work"
    work=""
}

install_deny() {
    has_deny && return
    ! $check_only || lack "missing: cargo-deny; to install: scripts/setup.sh --deny"
    say "building cargo-deny $cargo_deny_version into .setup/bin (once, under two minutes on 2 cores)"
    work="$(mktemp -d "$setup_folder/deny.XXXXXX")"
    # It runs for a second, so a quick build matters more than a quick program.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_DEBUG=0 \
        CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_STRIP=debuginfo \
        CARGO_TARGET_DIR="$work" \
        cargo install --quiet cargo-deny --version "$cargo_deny_version" --locked --no-default-features \
        --root "$setup_folder" --no-track --force >&2 ||
        lack "cargo-deny could not be built"
    rm -rf "$work"
    work=""
}

check_rust
install_packages
warn_of_old_driver
if $want_cuda || $want_cuda12 || $want_nvshmem || $want_deny || $want_clients; then
    mkdir -p "$setup_folder"
    exec 9>"$setup_folder/lock"
    flock 9
    if $want_cuda12; then install_cuda12; else install_nvidia; fi
    ! $want_deny || install_deny
    install_clients
fi
say "everything is in place"

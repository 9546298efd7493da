#!/usr/bin/env bash
# Compiles the CPU kernels a second time, with a call before each load and store, into one shared
# library:
#   build.sh OUTPUT.so
# Scalar code only: it has the same loops and addresses as the vector levels.
set -euo pipefail
out="$(realpath -m "$1")"
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
build="$out.build.$$"
mkdir -p "$build"
trap 'rm -rf "$build"' EXIT
# Possibly several words, such as "ccache g++".
read -ra cxx <<<"${CXX:-c++}"
flags=(-std=c++20 -g1 -fPIC -fno-math-errno -ffp-contract=off -fno-gnu-unique -Wno-psabi -Iinclude -Iprotocol -Isrc)
watched=(-O1 -fsanitize=kernel-address)
if "${cxx[@]}" --version | grep -qi clang; then
    watched+=(-mllvm -asan-instrumentation-with-call-threshold=0 -mllvm -asan-stack=0 -mllvm -asan-globals=0)
    flags=("${flags[@]/-fno-gnu-unique/}")
else
    watched+=(--param asan-instrumentation-with-call-threshold=0 --param asan-stack=0 --param asan-globals=0)
fi
# One entry per task type, from the lines that register them.
{
    echo '#include "mpk/abi.h"'
    echo 'namespace mpk::sanitizer { int checked(const char*, mpk_kernel_fn, const mpk_kernel_args*); }'
    sed -n 's/^pub mod \(.*\);$/\1/p' src/tasks/mod.rs | while read -r name; do
        compgen -G "src/tasks/$name/cpu*.cpp" >/dev/null || continue
        echo "extern \"C\" int mpk_task_$name(const mpk_kernel_args*);"
        echo "extern \"C\" int mpk_sanitized_$name(const mpk_kernel_args* args) {"
        echo "  return mpk::sanitizer::checked(\"$name\", mpk_task_$name, args);"
        echo "}"
    done
} >"$build/entries.cc"
"${cxx[@]}" "${flags[@]}" -O2 -c "$build/entries.cc" -o "$build/entries.o"
"${cxx[@]}" "${flags[@]}" -O2 -c src/cpu/sanitizer/regions.cpp -o "$build/regions.o"
for source in src/cpu/*.cpp protocol/cpu/*.cpp src/tasks/*/cpu*.cpp; do
    stem="$(basename "$source" .cpp)"
    level=()
    case $stem in
    *avx*) continue ;;
    scalar | *_scalar) level=(-DMPK_ISA=scalar -DMPK_ISA_SCALAR=1) ;;
    esac
    echo "$source ${level[*]}"
done | while read -r source level; do
    # shellcheck disable=SC2086
    "${cxx[@]}" "${flags[@]}" "${watched[@]}" $level -c "$source" -o "$build/$(echo "$source" | tr / _).o"
done
"${cxx[@]}" -shared -Wl,-Bsymbolic -Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset "$build"/*.o -o "$build/all.so"
mv "$build/all.so" "$out"

#!/usr/bin/env bash
# Compiles the CPU kernels a second time, with a call before each load and store, into one shared
# library:
#   build.sh OUTPUT.so
# Scalar code only: it has the same loops and addresses as the vector levels.
set -euo pipefail
out="$(realpath -m "$1")"
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
build="$out.build.$$"
mkdir -p "$build/kernels" "$build/checks"
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
# One entry per task type, from the lines that register them, and for the test kernels.
entry() {
    echo "extern \"C\" int mpk_task_$1(const mpk_kernel_args*);"
    echo "extern \"C\" int mpk_sanitized_$1(const mpk_kernel_args* args) {"
    echo "  return mpk::sanitizer::$3(\"$2\", mpk_task_$1, args);"
    echo "}"
}
{
    echo '#include "mpk/abi.h"'
    echo 'namespace mpk::sanitizer {'
    echo 'int checked(const char*, mpk_kernel_fn, const mpk_kernel_args*);'
    echo 'int checked_test(const char*, mpk_kernel_fn, const mpk_kernel_args*);'
    echo '}'
    sed -n 's/^pub mod \(.*\);$/\1/p' src/tasks/mod.rs | while read -r name; do
        compgen -G "src/tasks/$name/cpu*.cpp" >/dev/null || continue
        entry "$name" "$name" checked
        ! grep -q "mpk_task_${name}_ready" src/tasks/"$name"/cpu*.cpp || entry "${name}_ready" "$name" checked_test
    done
    entry probe probe checked
    entry probe_wait probe checked
    entry probe_ready probe checked_test
} >"$build/entries.cc"
"${cxx[@]}" "${flags[@]}" -O2 -c "$build/entries.cc" -o "$build/checks/entries.o"
for source in operands parts regions report; do
    "${cxx[@]}" "${flags[@]}" -O2 -c "src/cpu/sanitizer/$source.cpp" -o "$build/checks/$source.o"
done
for source in src/cpu/*.cpp protocol/cpu/*.cpp src/tasks/*/cpu*.cpp src/cpu/sanitizer/probe.cpp; do
    stem="$(basename "$source" .cpp)"
    level=()
    case $stem in
    *avx*) continue ;;
    scalar | *_scalar) level=(-DMPK_ISA=scalar -DMPK_ISA_SCALAR=1) ;;
    esac
    echo "$source ${level[*]}"
done | while read -r source level; do
    # shellcheck disable=SC2086
    "${cxx[@]}" "${flags[@]}" "${watched[@]}" $level -c "$source" -o "$build/kernels/$(echo "$source" | tr / _).o"
done
# Static variables that change are hidden from the check, and a task has no use for them.
for object in "$build"/kernels/src_tasks_*.o; do
    size -A "$object" | awk '$1 ~ /^\.t?(data|bss)/ && $1 !~ /^\.data\.rel\.ro/ && $2 > 0 { exit 1 }' || {
        echo "$object: a task's kernel has static variables" >&2
        exit 1
    }
done
# The kernels come first. If both parts contain the same inline function, the linker takes the first copy, and that must be
# the one with the calls.
"${cxx[@]}" -shared -Wl,-Bsymbolic -Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset \
    "$build"/kernels/*.o "$build"/checks/*.o -o "$build/all.so"
mv "$build/all.so" "$out"

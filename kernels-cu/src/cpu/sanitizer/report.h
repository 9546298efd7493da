// What the region sanitizer prints.
#pragma once

#include <stdint.h>

#include "cpu/sanitizer/parts.h"

namespace mpk {
namespace sanitizer {

// Prints that the task is about to access the memory, and keeps the text for mpk_sanitizer_report.
void report_access(const char* type, const Call& call, uintptr_t at, uint64_t bytes, bool write, const char* why);
// Prints that the batch breaks an assumption.
void report_batch(const char* type, const Call& call, const char* what);

} // namespace sanitizer
} // namespace mpk

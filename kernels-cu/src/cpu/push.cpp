#include "cpu/push.h"

#include "platform/platform.h"

extern "C" bool mpk_push_words(const mpk_rank* rank, uint32_t pe, uint64_t* words, const uint64_t* values, uint32_t count) {
  return mpk::platform::put_words(rank, pe, words, values, count);
}

extern "C" bool mpk_put_with_signal(const mpk_rank* rank, uint32_t pe, void* to, const void* from, uint64_t bytes, uint64_t* signal, uint64_t value) {
  return mpk::platform::put_with_signal(rank, pe, to, from, bytes, signal, value);
}

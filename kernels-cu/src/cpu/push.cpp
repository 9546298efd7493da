#include "cpu/push.h"

#include "platform/platform.h"

extern "C" bool mpk_push_words(const mpk_rank* rank, uint32_t pe, uint64_t* words, const uint64_t* values, uint32_t count) {
  return mpk::platform::put_words(rank, pe, words, values, count);
}

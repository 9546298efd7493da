/* The batch step's own memory (mpk_rank.batch_private): slots, waiting requests, free pages. The host zeroes it and
 * batch_begin sets it up; after that only the batch step touches it. It outlives a launch: the next launch continues
 * with it. */
#ifndef MPK_PROTOCOL_BATCH_STATE_H
#define MPK_PROTOCOL_BATCH_STATE_H

#include "platform/platform.h"

namespace mpk {

constexpr uint32_t kNone = 0xFFFFFFFFu;

struct BatchSlot {
  uint32_t request;   /* kNone: free */
  uint32_t order;     /* of admission; the earliest prompt gets rows first, the latest request gives up its pages first */
  uint32_t context;   /* tokens in the KV cache */
  uint32_t prompt;    /* tokens to cache before the next one is sampled: the prompt, and after a preemption also the new tokens so far */
  uint32_t generated; /* new tokens so far */
  uint32_t limit;     /* maximum number of new tokens */
  uint32_t pages;
  uint32_t kept;      /* number of leading pages that the prefix cache also has: the slot only reads them */
  uint32_t keyed;     /* pages of the prompt that may be put into the prefix cache */
  uint32_t rows;      /* in the current iteration */
  int32_t last_token;
  uint32_t first_token, min_new_tokens; /* mpk_request's */
  uint32_t logprobs;  /* log-probabilities of each of its tokens, at most mpk_batch_config.top_k */
};

/* A token that the last iteration sampled and that the host has not yet received. */
struct PendingToken {
  uint32_t request, number; /* number of the request's new tokens before this one */
  int32_t token;
  uint32_t sample;
};

/* A request that has ended, which the host does not know yet. */
struct EndedRequest {
  uint32_t request, finish;
};

enum RequestState : uint32_t { kUnknown = 0, kWaiting = 1, kInSlot = 2, kFinished = 3 };

/* State of an entry of the request table. */
struct RequestRecord {
  uint32_t state;     /* enum RequestState */
  uint32_t generated; /* while it waits: new tokens before it was preempted */
  uint32_t order;     /* BatchSlot.order, kept while it waits */
  uint32_t cached;    /* tokens of its prompt that it found in the prefix cache when it first got a slot */
};

/* A page of the KV cache (pages.h). A free page is all zeros except for the owner. */
struct Page {
  mpk_page_key key; /* kept pages: key of the contents */
  uint32_t owner;   /* the slot that writes it, or kKept, or kNone */
  uint32_t readers; /* kept pages: slots that have it */
  uint32_t next;    /* kept pages: the next one in the same bucket, plus 1; 0: none */
  uint32_t older, newer; /* kept pages without readers: neighbours in the order of last use */
  uint32_t reserved;
};
constexpr uint32_t kKept = 0xFFFFFFFEu;

/* The batch step's own part of mpk_batch_output: where results go, and its figures so far. It has a copy because, on a GPU, reading
 * host memory takes microseconds. The rest of mpk_batch_output is written only (statistics), or belongs to the host (`reader`). */
struct BatchOutput {
  mpk_request_output* requests;
  int32_t* tokens;
  int32_t* top_tokens;
  float* top_logprobs;
  float* token_logprobs;
  uint64_t prefill_ns, decode_ns;
  uint64_t prefill_iterations, decode_steps;
  uint64_t full_ns, full_steps;
  uint32_t entries_taken;
};

struct BatchState {
  uint32_t open;      /* the iteration whose end may be claimed; 0: none, or a thread has claimed it (publication.h) */
  uint32_t iteration; /* the current one */
  uint32_t begun;     /* 1: set up; a later launch continues with this state */
  uint32_t decision;  /* number of the last decision that was applied (admission.h) */
  uint32_t decided;   /* rank 0: number of the last decision that it made */
  uint32_t next_admission; /* entries in effect, modulo 2^30 */
  uint32_t stopping;  /* 1: the run ends when no work is left */
  uint32_t waiting_head, waiting; /* first of the waiting requests, and their number */
  uint32_t running;   /* slots in use */
  uint32_t free_pages;
  uint32_t unused_pages; /* kept pages without readers */
  uint32_t bucket_mask;
  uint32_t changes;   /* counts what may let the first waiting request in: pages freed, pages kept, cancels */
  uint32_t held_up;   /* 1 + the value of `changes` when the first waiting request found no slot or too few pages */
  uint32_t admitted;
  uint32_t pending;   /* tokens that the host has not received */
  uint64_t finished;
  uint64_t told;      /* finished requests that the host knows of */
  uint64_t preemptions;
  uint64_t prefix_queries, prefix_hits, evictions; /* mpk_batch_output's */
  uint64_t expected;  /* mpk_control.progress once all published iterations are done */
  uint64_t hash;
  uint64_t started_ns; /* when the current iteration began */
  BatchOutput output;
  /* The arrays of BatchArrays follow. */
};

/* Addresses of the arrays. */
struct BatchArrays {
  Page* pages;           /* [num_pages], and one more: the end of the list in order of last use */
  BatchSlot* slots;      /* [max_batch] */
  PendingToken* pending; /* [max_samples] in order of arrival */
  int32_t* top_tokens;   /* [max_samples][top_k], by sample; the first BatchSlot.logprobs are valid */
  float* top_logprobs;
  RequestRecord* records; /* [num_requests] */
  uint32_t* waiting;     /* [num_requests] a ring: each entry of the request table waits at most once */
  EndedRequest* ended;   /* [num_requests] a ring: an entry is not reused before the host knows that it has ended */
  uint32_t* free_list;   /* [num_pages] a stack: the last entry is taken first */
  uint32_t* buckets;     /* [page_buckets] first page of each, plus 1; 0: none */
  float* token_logprobs; /* [max_samples] by sample, of requests with log-probabilities; none if top_k is 0 */
};

MPK_DEVICE BatchState* batch_state(const mpk_rank* rank) { return static_cast<BatchState*>(rank->batch_private); }

/* Buckets of the prefix cache, a power of two. */
MPK_DEVICE uint32_t page_buckets(const mpk_batch_config* config) {
  if (config->num_page_keys == 0) return 0;
  uint32_t buckets = 1;
  while (buckets < config->num_pages) buckets *= 2;
  return buckets;
}

MPK_DEVICE BatchArrays batch_arrays(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchArrays arrays;
  arrays.pages = reinterpret_cast<Page*>(batch_state(rank) + 1);
  arrays.slots = reinterpret_cast<BatchSlot*>(arrays.pages + config->num_pages + 1);
  const uint64_t top = static_cast<uint64_t>(config->max_samples) * config->top_k;
  arrays.pending = reinterpret_cast<PendingToken*>(arrays.slots + config->max_batch);
  arrays.top_tokens = reinterpret_cast<int32_t*>(arrays.pending + config->max_samples);
  arrays.top_logprobs = reinterpret_cast<float*>(arrays.top_tokens + top);
  arrays.records = reinterpret_cast<RequestRecord*>(arrays.top_logprobs + top);
  arrays.waiting = reinterpret_cast<uint32_t*>(arrays.records + config->num_requests);
  arrays.ended = reinterpret_cast<EndedRequest*>(arrays.waiting + config->num_requests);
  arrays.free_list = reinterpret_cast<uint32_t*>(arrays.ended + config->num_requests);
  arrays.buckets = arrays.free_list + config->num_pages;
  arrays.token_logprobs = reinterpret_cast<float*>(arrays.buckets + page_buckets(config));
  return arrays;
}

MPK_DEVICE uint64_t batch_state_bytes(const mpk_batch_config* config) {
  const uint64_t samples = config->max_samples, requests = config->num_requests, pages = config->num_pages;
  return sizeof(BatchState) + sizeof(Page) * (pages + 1) + sizeof(BatchSlot) * config->max_batch +
         (sizeof(PendingToken) + 8 * static_cast<uint64_t>(config->top_k)) * samples +
         (sizeof(RequestRecord) + sizeof(uint32_t) + sizeof(EndedRequest)) * requests + sizeof(uint32_t) * (pages + page_buckets(config)) +
         (config->top_k != 0 ? sizeof(float) * samples : 0);
}

/* Mixes one more value into a hash of the batch state (the finaliser of splitmix64). */
MPK_DEVICE uint64_t folded(uint64_t hash, uint64_t value) {
  uint64_t mixed = hash + 0x9E3779B97F4A7C15ull + value;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return mixed ^ (mixed >> 31);
}
MPK_DEVICE void fold(BatchState* state, uint64_t value) { state->hash = folded(state->hash, value); }

}  // namespace mpk

#endif

/* The only ABI header: every struct that Rust, the CPU target and the GPU target share.
 *
 * Plain C, fixed-size fields, no conditional layout. Rust reads it through bindgen. Sizes are asserted at the
 * end of this file, and again in Rust (`kernels_cu::abi`). Pointers are 64-bit addresses in the memory of the
 * rank that runs the graph: host memory on the CPU target, device memory on the GPU.
 */
#ifndef MPK_ABI_H
#define MPK_ABI_H

#include <stddef.h>
#include <stdint.h>

#define MPK_ABI_VERSION 5u

/* ---- identifiers -------------------------------------------------------------------------------------- */

/* TaskId: iteration in bits 63..32, index in bits 31..0. */
#define MPK_TASK_TERMINATE 0u
#define MPK_TASK_BEGIN 1u

/* EventId: bits 63..48 tag, bits 47..32 owner rank, bits 31..0 index. */
#define MPK_EVENT_INVALID 0xFFFFFFFFFFFFFFFFull
#define MPK_EVENT_TAG_LOCAL 0u
#define MPK_EVENT_TAG_NVSHMEM 1u
#define MPK_EVENT_TERMINATION 0u
#define MPK_EVENT_BEGIN 1u
#define MPK_EVENT_END 2u /* end of task graph, in every graph */

enum mpk_event_type {
  MPK_EVENT_EMPTY = 0,                 /* polled by the tasks that depend on it */
  MPK_EVENT_LAUNCH_TASKS = 1,          /* its scheduler queues tasks [first_task, last_task) */
  MPK_EVENT_LAUNCH_MASSIVE_TASKS = 2,  /* the same; the local schedulers may split the tasks between them */
  MPK_EVENT_LAUNCH_DEPENDENT_TASKS = 3,/* event 1: starts everything that waits for nothing else */
  MPK_EVENT_END_OF_TASK_GRAPH = 4,     /* all work of the iteration is done: run the batch step */
  MPK_EVENT_TERMINATION_TYPE = 5,
};

/* Only the task types that the protocol itself knows have fixed numbers. The registry
 * (kernels_cu::registry) numbers the others from MPK_TASK_TYPE_FIRST_REGISTERED on. */
enum mpk_core_task_type {
  MPK_TASK_TYPE_TERMINATE = 0,
  MPK_TASK_TYPE_BEGIN_TASK_GRAPH = 1,
  MPK_TASK_TYPE_EMPTY = 2,
  MPK_TASK_TYPE_NVSHMEM_COPY = 3,
  MPK_TASK_TYPE_NVSHMEM_SIGNAL = 4,
  MPK_TASK_TYPE_REDUCE = 5,
  MPK_TASK_TYPE_FIRST_REGISTERED = 16,
};

enum mpk_dtype {
  MPK_F32 = 0,
  MPK_F16 = 1,
  MPK_BF16 = 2,
  MPK_I32 = 3,
  MPK_U32 = 4,
  MPK_U8 = 5,
  /* 8-byte words: an f32 in the low half, the tag of the write in the high half (MPK_FLAG_TAG). */
  MPK_F32_FLAGGED = 6,
};

/* For a graph: how its tasks reach workers. For a rank: the placement of its graphs; MPK_MIXED if it has both. */
enum mpk_placement { MPK_STATIC = 0, MPK_DYNAMIC = 1, MPK_MIXED = 2 };

/* Physical layout of a constant matrix [rows, k]; `strides[0]` is k rounded up to MPK_TILE_K.
 * MPK_LAYOUT_TILED: rows (output columns of a linear) in tiles of 16. Inside a tile,
 *   bf16: [k/2][16 rows][2]; f16 and f32: [k][16 rows]. Rows are padded with zeros to a multiple of 16, so the
 *   tile of row r (a multiple of 16) starts at element r * strides[0]. */
enum mpk_layout { MPK_LAYOUT_STRIDED = 0, MPK_LAYOUT_TILED = 1, MPK_LAYOUT_FRAGMENT = 2, MPK_LAYOUT_PAIRED = 3 };
#define MPK_TILE_ROWS 16u
#define MPK_TILE_K 2u
/* MPK_LAYOUT_FRAGMENT (GPU): rows in tiles of 16 as above, k rounded up to MPK_FRAGMENT_K. A tile is a sequence of blocks of 16 k,
 * 256 elements each. Element (row, k) of a block, both 0..15, is at
 *   2-byte types: ((row % 8 * 4 + k / 4) * 4 + k % 4 / 2 * 2 + row / 8) * 2 + k % 2. So lane row % 8 * 4 + k / 4 of a warp finds
 *                 its part of the left operand of mma.m16n8k16 in 16 adjacent bytes. The product takes k in the order
 *                 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, ..., so a lane needs four adjacent elements of the right operand;
 *   f32:          (k % 8 * 2 + k / 8) * 16 + row: one half-warp has the first 8 k, the other the last 8. */
#define MPK_FRAGMENT_K 16u
/* MPK_LAYOUT_PAIRED (GPU): MPK_LAYOUT_FRAGMENT for [gate | up], with the rows in another order. Tile t has the gates t * MPK_PAIR_ROWS ..
 * + MPK_PAIR_ROWS and then their ups. Then a lane's sums of the product have each gate next to its up, and the smallest share of a
 * gated product is one tile. Dimensions and strides of operands count rows in this order. */
#define MPK_PAIR_ROWS 8u
/* MPK_LAYOUT_WIDE: activations of 2-byte types, as wide products read them. A strided tensor [row tiles, column tiles,
 * MPK_WIDE_ROWS, MPK_WIDE_COLUMNS] whose last dimension is permuted, so that one copy brings 128 rows x 64 columns to shared
 * memory as wgmma reads its right operand (128-byte swizzle). Columns are padded with zeros. Column c, 0..63, of row r is, within
 * that row's 128 bytes, element
 *   ((c / 16 * 2 + j / 8) ^ r % 8) * 8 + j % 8, where j = c % 4 / 2 * 8 + c % 16 / 4 * 2 + c % 2 is the place of c in its group
 * of 16: MPK_LAYOUT_FRAGMENT's order of k. */
#define MPK_WIDE_ROWS 128u
#define MPK_WIDE_COLUMNS 64u
/* With few rows, column tiles are narrower, so that tasks of 16 columns write whole tiles. There is a multiple of 4 of these
 * tiles, with a 32-byte swizzle. Narrow tiles of at most 64 rows have 16, 32 or 64 rows instead of 128, so that one copy brings
 * several column tiles. Column c, 0..15, of row r is, within that row's 32 bytes, element (j / 8 ^ r / 4 % 2) * 8 + j % 8. */
#define MPK_WIDE_NARROW 16u

/* ---- the task graph ----------------------------------------------------------------------------------- */

#define MPK_MAX_DIMS 4
#define MPK_MAX_ARGS 8
#define MPK_MAX_PARAMS 30
/* Limits on a GPU: operands of a task, and ranks with dynamic placement. */
#define MPK_GPU_MAX_OPERANDS 12
#define MPK_GPU_MAX_DYNAMIC_RANKS 64

/* A view into a tensor. `addr` is the address in this rank's memory. For symmetric tensors, the same
 * view at another rank is mpk_rank.sym[pe] + (addr - mpk_rank.sym[rank]). Where a task other than a copy stores its result on
 * another rank, `addr` is already the address there, and `pe` is -1. */
typedef struct mpk_operand {
  uint64_t addr;
  uint32_t dims[MPK_MAX_DIMS];
  uint32_t strides[MPK_MAX_DIMS]; /* in elements */
  uint8_t dtype;                  /* enum mpk_dtype */
  uint8_t ndim;
  uint8_t layout;                 /* enum mpk_layout */
  uint8_t symmetric;              /* 1: in the symmetric heap */
  int32_t pe;                     /* rank that owns the memory; -1: plain stores to `addr`, -2: every rank */
} mpk_operand;

typedef struct mpk_dependency {
  uint32_t event;
  uint32_t epochs_back; /* 0: of this iteration */
} mpk_dependency;

#define MPK_TASK_FLAGGED_INPUTS 1u /* reads flagged tensors: its kernel has a `ready` test */

typedef struct mpk_task {
  uint64_t trigger_event; /* EventId, or MPK_EVENT_INVALID */
  uint32_t first_operand; /* inputs, then outputs, in mpk_graph.operands */
  uint32_t first_dependency;
  uint16_t num_inputs;
  uint16_t num_outputs;
  uint16_t num_dependencies;
  uint16_t task_type;
  uint16_t variant; /* index in mpk_graph.variants */
  uint16_t flags;
  uint32_t worker;  /* static placement: the worker whose list it is in; otherwise UINT32_MAX */
  uint32_t op;      /* index of the operator that the task came from, for the timeline */
  int32_t args[MPK_MAX_ARGS]; /* constants of this task; their meaning depends on the task type */
  uint32_t code;               /* GPU: index of its kernel variant in the cubin's jump table, or MPK_NO_CODE */
  uint32_t flag_count;         /* flagged tensors in the graph; 0: the task touches none */
  uint32_t flag_number;        /* number of the flagged tensor that the task touches, from 0 */
} mpk_task;

/* Tag of the flagged words that a task writes or waits for: epoch x flagged tensors + number. It may wrap. Flagged
 * tensors of a graph may share memory, so a word may hold what another tensor, or an earlier epoch, wrote. Each word of
 * a tensor is written once per epoch, so no two writes of a word have the same tag. Tags are compared for equality: a
 * reader sees the tag that it waits for or an older one, because the next write comes after its read (the verifier
 * proves this). An old tag must not recur after a wrap, but rows that are not in use keep their tags. So every
 * MPK_FLAG_REFRESH_EPOCHS epochs, the tasks that write and read flagged words treat all rows as in use. Then no tag is
 * older than 2^14 epochs of at most 2^16 writes. */
#define MPK_FLAG_TAG(task, epoch) ((epoch) * (task).flag_count + (task).flag_number)
#define MPK_FLAG_REFRESH_EPOCHS 16384u
#define MPK_FLAG_REFRESH(task, epoch) ((task).flag_count != 0 && (epoch) % MPK_FLAG_REFRESH_EPOCHS == 0)

#define MPK_NO_CODE 0xFFFFFFFFu /* begin, terminate, empty, nvshmem_signal: nothing to run */

typedef struct mpk_event {
  uint32_t num_triggers; /* ready when the counter is at least num_triggers x epoch */
  uint32_t first_task;   /* half-open range of the tasks that it launches */
  uint32_t last_task;
  uint16_t event_type;
  uint16_t remote_triggers; /* 1: other ranks trigger it (its EventId has the NVSHMEM tag) */
} mpk_event;

typedef struct mpk_variant {
  uint16_t task_type;
  uint16_t num_params;
  uint32_t scratch_bytes; /* bytes of a worker's scratch memory that this variant needs */
  uint32_t params[MPK_MAX_PARAMS]; /* the task type's params struct (src/tasks/NAME/params.h), as words */
} mpk_variant;

typedef struct mpk_graph {
  uint32_t num_tasks, num_events, num_variants, num_operands, num_dependencies, num_workers;
  uint32_t rows;    /* capacity: token rows of one iteration */
  uint32_t samples; /* capacity: rows that sample a token */
  uint32_t active;  /* capacity: active slots of one iteration */
  uint32_t placement;
  const mpk_task* tasks;
  const mpk_event* events;
  const mpk_variant* variants;
  const mpk_operand* operands;
  const mpk_dependency* dependencies;
  const uint32_t* worker_first; /* static: num_workers + 1 offsets into worker_tasks */
  const uint32_t* worker_tasks;
  uint64_t* counters;           /* symmetric: num_events counters, MPK_COUNTER_STRIDE words apart */
  uint32_t* launched;           /* dynamic: last epoch in which each event that peers trigger was launched; only the remote scheduler uses it */
} mpk_graph;

#define MPK_COUNTER_STRIDE 8u

/* ---- batch step --------------------------------------------------------------------------------------- */

enum mpk_finish { MPK_RUNNING = 0, MPK_FINISH_LENGTH = 1, MPK_FINISH_EOS = 2, MPK_FINISH_CANCELLED = 3 };
enum mpk_admission_kind {
  MPK_ADMIT = 0,  /* the request in this entry of the request table starts to wait for a slot */
  MPK_CANCEL = 1, /* ends the request in this entry of the table; no effect if it has ended */
  MPK_STOP = 2,   /* the run ends as soon as no work is left; a later MPK_ADMIT revokes this */
};

/* One entry of a rank's admission ring. All ranks have the same entries in the same order. */
typedef struct mpk_admission {
  uint32_t kind;
  uint32_t request; /* in mpk_batch_config.requests */
} mpk_admission;

/* How a request's tokens are chosen, and what is told of them. All zeros: greedy, without log-probabilities. Only graphs with the
 * sampling operators read more than `logprobs`. */
enum mpk_sampling_flags {
  MPK_SAMPLING_ON = 1,        /* use the fields below; otherwise the token is the greedy one */
  MPK_SAMPLING_NOISE = 2,     /* draw at random; otherwise take the highest processed logit */
  MPK_SAMPLING_PENALTIES = 4, /* there is a penalty, so the request's tokens are counted from position 0 on */
};

typedef struct mpk_sampling {
  uint64_t seed;              /* key of the noise; the counter is (position of the new token, token id) */
  uint32_t flags;             /* enum mpk_sampling_flags */
  uint32_t top_k;             /* keep only this many of the highest logits; 0: all */
  float inverse_temperature;  /* every logit is multiplied by it */
  float top_p;                /* keep the fewest tokens whose probabilities add up to at least this; 1: all */
  float log_min_p;            /* natural logarithm of min_p: keep logits at most this far below the highest; -infinity: all */
  float repetition;           /* logits below 0 of prompt tokens and new tokens are multiplied by it; 1: no penalty */
  float inverse_repetition;   /* their other logits are multiplied by this, 1 / repetition */
  float presence;             /* subtracted from the logit of each token that is among the new tokens */
  float frequency;            /* subtracted from that logit once per occurrence among the new tokens */
  uint32_t num_prompt_tokens; /* tokens from this position on are new; preemption does not change it */
  uint32_t logprobs;          /* number of highest log-probabilities to compute for each new token; 0: none. Of more than
                               * mpk_batch_config.top_k, only top_k are computed */
  uint32_t reserved;
} mpk_sampling;

/* One entry of the request table. The entry is reused after the request has ended. */
typedef struct mpk_request {
  uint32_t first_token; /* in mpk_batch_config.tokens: the prompt, followed by room for max_new_tokens */
  uint32_t num_prompt_tokens;
  uint32_t max_new_tokens;
  uint32_t first_output; /* in mpk_batch_output.tokens, with room for max_new_tokens */
  mpk_sampling sampling;
  uint32_t min_new_tokens; /* an end-of-sequence token ends the request only if at least this many new tokens precede it; all ones: never */
  uint32_t quiet;          /* 1: nobody reads its tokens early, so only its first token and its end ring the host's bell or notify its reader */
} mpk_request;

/* Numbers of admission entries are modulo 2^30; this is the mask. */
#define MPK_ENTRY_COUNT_MASK 0x3FFFFFFFu

/* Key of a full page of a prompt: a keyed hash of all tokens up to the end of the page. Rank 0's host computes it with a secret key of
 * its own, so nobody can construct prompts that share a key: protocol/pages.h. */
typedef struct mpk_page_key {
  uint64_t words[2];
} mpk_page_key;

/* Index in mpk_batch_config.page_keys of the key of a prompt's first page. Prompts have disjoint ranges of tokens, each with room for
 * one more token, so their ranges of keys are disjoint too. All of them together need MPK_PAGE_KEYS(tokens, page size) entries. */
#define MPK_FIRST_PAGE_KEY(first_token, page_size) (((first_token) + (page_size) - 1) / (page_size))
#define MPK_PAGE_KEYS(tokens, page_size) (MPK_FIRST_PAGE_KEY(tokens, page_size) + 1)

/* Constant for a launch. The memory behind the pointers changes while the kernel runs (protocol/admission.h). */
typedef struct mpk_batch_config {
  uint32_t max_batch, max_seq_len, page_size, num_pages, pages_per_slot;
  uint32_t max_rows;        /* largest mpk_graph.rows */
  uint32_t max_samples;     /* largest mpk_graph.samples, at least max_batch */
  uint32_t num_requests;    /* entries of the request table */
  uint32_t num_eos;
  uint32_t admission_ring;  /* entries of the admission ring, a power of two */
  uint32_t top_k;           /* maximum of mpk_sampling.logprobs; 0: no graph computes any */
  uint32_t generate;        /* 0: run `fixed_iterations` iterations of graph 0 on the batch as it is */
  uint32_t fixed_iterations;
  uint32_t prefill_rows;    /* maximum number of prompt rows in an iteration that also generates; 0: as many as fit */
  uint32_t on_demand;       /* 1: a slot takes pages as it needs them; 0: all that it can need, at admission */
  uint32_t max_drafts;      /* columns of mpk_batch.draft_token; 0: no slot has drafts */
  uint32_t num_page_keys;   /* MPK_PAGE_KEYS of all tokens; 0: no prefix cache */
  uint32_t reserved;
  uint64_t idle_exit_ns;    /* the kernel ends after this long without work; 0: never */
  int32_t* tokens;          /* the host writes prompts; the batch step appends accepted tokens */
  const mpk_request* requests;       /* [num_requests] */
  const int32_t* eos;       /* ids that end a sequence (mpk_request.min_new_tokens) */
  const mpk_page_key* page_keys;     /* [num_page_keys] by MPK_FIRST_PAGE_KEY */
  const mpk_admission* admissions;   /* [admission_ring] entry n is at n modulo admission_ring */
  const uint32_t* num_admissions;    /* entries that this rank's host has written, modulo 2^30; on rank 0: entries that all hosts have written */
} mpk_batch_config;

/* Results for the host, read while the kernel runs. */
typedef struct mpk_request_output {
  uint32_t num_tokens;    /* released after the tokens (and log-probabilities) it counts */
  uint32_t finish;        /* enum mpk_finish, released after num_tokens */
  uint32_t cached_tokens; /* prompt tokens that came from the prefix cache. Written before the first token is counted */
} mpk_request_output;

typedef struct mpk_batch_output {
  mpk_request_output* requests;
  int32_t* tokens;          /* by mpk_request.first_output */
  int32_t* top_tokens;      /* [same index][top_k], of which the first mpk_sampling.logprobs are written */
  float* top_logprobs;
  float* token_logprobs;    /* [same index] log-probability of the token, if its request wants any; NaN: not known */
  uint64_t prefill_ns, decode_ns; /* iterations with any prompt row count as prefill */
  uint64_t prefill_iterations, decode_steps;
  uint64_t full_ns, full_steps; /* decode steps of a full batch, where every slot generates, and their time */
  /* Released after the results that they count, and after the statistics. */
  uint64_t finished;        /* requests that have ended, in total */
  uint32_t entries_taken;   /* entries of the admission ring that are in effect, modulo 2^30 */
  /* Relaxed: statistics. */
  uint32_t running, waiting, free_pages; /* requests in slots, requests that wait for a slot, pages that no slot has */
  uint64_t preemptions;
  uint64_t prefix_queries;  /* prompt tokens that were looked up in the prefix cache */
  uint64_t prefix_hits;     /* prompt tokens that were found there */
  uint64_t evictions;       /* pages that were evicted from it */
  /* CPU target, written by the host at any time: an eventfd of rank 0's process. New tokens are announced there and not on
   * mpk_control.bell, so only the thread that passes them on wakes. 0: there is none. */
  int32_t reader;
} mpk_batch_output;

/* What one iteration works on. Only the batch step writes it, and it is constant while the
 * iteration runs. "Active slot" a is the a-th slot that takes part; its rows are contiguous. */
typedef struct mpk_batch {
  uint32_t iteration; /* from 1 */
  uint32_t graph;
  uint32_t epoch;     /* number of runs of this graph, including this one */
  uint32_t num_rows, num_samples, num_active, prompt_rows;
  uint32_t stop;      /* 1: there is no further iteration; leave */
  uint64_t hash;      /* of the batch state; travels with the candidates for tokens */
  int32_t* row_token;    /* [max_rows] */
  int32_t* row_active;   /* [max_rows] active slot of the row */
  int32_t* row_position; /* [max_rows] */
  int32_t* active_slot;  /* [max_batch] */
  int32_t* active_first_row;
  int32_t* active_num_rows;
  int32_t* active_context; /* tokens in the KV cache before this iteration */
  int32_t* sample_row;     /* [max_samples] row whose logits are wanted; the samples of an active slot are adjacent */
  int32_t* sample_active;
  int32_t* active_num_samples; /* [max_batch] */
  int32_t* page_table;     /* [max_batch slots][pages_per_slot] */
  mpk_sampling* sampling;  /* [max_batch slots] of the request in each slot; NULL: all requests are greedy */
  /* written by the last tasks of a graph, read by the next batch step */
  int32_t* next_token;     /* [max_samples] by sample */
  int32_t* top_token;      /* [max_samples][top_k] */
  float* top_logprob;
  float* token_logprob;    /* [max_samples] of next_token; NULL: it is looked up among the top_k */
  /* Speculative decoding; NULL: no graph does it. Its tasks write the following arrays, and the next batch step reads them. */
  int32_t* accepted;       /* [max_batch] by active slot: how many of its samples are accepted, at least 1 */
  int32_t* num_drafts;     /* [max_batch] by slot: number of draft tokens, which may follow the slot's next token */
  int32_t* draft_token;    /* [max_batch][max_drafts] the draft tokens; each is a row of the next iteration if there is room */
} mpk_batch;

/* ---- a rank -------------------------------------------------------------------------------------------- */

enum mpk_abort_code {
  MPK_OK = 0,
  MPK_ABORT_DEADLINE = 1,   /* a wait saw no progress for deadline_ns */
  MPK_ABORT_DIVERGED = 2,   /* ranks disagree on the batch state */
  MPK_ABORT_PEER = 3,       /* another rank aborted, or is lost */
  MPK_ABORT_INTERRUPT = 4,  /* Ctrl-C */
  MPK_ABORT_KERNEL = 5,     /* a task kernel found an impossible state */
  MPK_ABORT_QUEUE = 6,      /* a proven queue bound did not hold */
  MPK_ABORT_ITERATIONS = 7, /* the run has used up the 32-bit iteration numbers */
};

enum mpk_worker_state {
  MPK_WORKER_IDLE = 0,         /* waits for an iteration or a task */
  MPK_WORKER_WAITS_EVENT = 1,
  MPK_WORKER_WAITS_FLAG = 2,
  MPK_WORKER_RUNS = 3,
  MPK_WORKER_LEFT = 4,
};

/* The last iteration of a run, and the last epoch of a graph. Numbers are compared and multiplied in 32 bits, so the
 * batch step ends the run (MPK_ABORT_ITERATIONS) before they wrap. */
#define MPK_LAST_ITERATION 0xFFFFFFFEu

/* CPU: how many cores a rank's threads have. It decides how waits pass the time. */
enum mpk_cores {
  MPK_CORES_ENOUGH = 0, /* one per thread: waits spin first */
  MPK_CORES_FEW = 1,    /* fewer than threads: waits yield at once, and sleep soon */
  MPK_CORES_PROXY = 2,  /* one per thread but none for the proxy. Most waits of such a rank are for the proxy: they yield at once, and sleep late */
};

/* How a rank adds to the counters that peers trigger. The whole job uses one way, because two kinds of atomics on one
 * counter are not atomic with each other. */
enum mpk_signals {
  MPK_SIGNALS_DIRECT = 0,  /* the machine's own atomics: all ranks reach each other's memory, or the hosts carry the puts */
  MPK_SIGNALS_NVSHMEM = 1, /* NVSHMEM's signals, also to ranks within reach and to this rank itself: some ranks are out of reach */
};

/* What a worker or scheduler is doing. The thread itself writes it (relaxed); the host reads it for the report. */
typedef struct mpk_status {
  uint32_t state, graph, task, iteration;
  uint64_t event; /* EventId */
  uint64_t wanted, seen;
  uint32_t timed_out; /* 1: this wait timed out */
  uint32_t reserved;
  uint64_t streamed; /* GPU, kernels with MPK_WITHOUT (config.cuh): weight bytes read in this launch's full-batch steps, written at its end */
  uint64_t pad;
} mpk_status;

#define MPK_LAUNCH_STOP 0x80000000u

/* Room for the decisions that a rank has not read yet. Rank 0 does not end an iteration before every rank has begun it. So a
 * slow rank has at most three unread decisions: two of the previous iteration (if the first one found nothing to run), and
 * the next one. */
#define MPK_DECISIONS 4u

/* First block of the symmetric heap. */
typedef struct mpk_control {
  uint32_t abort;      /* enum mpk_abort_code; any rank may set it at any rank */
  uint32_t abort_rank; /* the first rank to set it, as far as this rank knows */
  uint64_t pad0[7];
  uint64_t progress;   /* tasks done on this rank */
  uint32_t parks;      /* odd while the rank has nothing to run and waits for requests without a deadline */
  uint32_t pad1[13];
  uint32_t iteration;  /* published (release) after mpk_batch has been written, in one 64-bit store with `launch` */
  uint32_t launch;     /* graph of that iteration; MPK_LAUNCH_STOP: there is no further iteration */
  uint32_t pad2[14];
  uint32_t running;    /* workers still in their loop */
  uint32_t bell;       /* CPU target: changes when there is news for this rank's host, which may sleep on it */
  uint32_t pad3[14];
  uint64_t decisions[MPK_DECISIONS]; /* rank 0 writes its decisions here, at every rank: protocol/admission.h */
  uint64_t pad4[8 - MPK_DECISIONS];
} mpk_control;

/* What a task waited for between fetched_ns and ready_ns: the number of its last dependency that was missing, or */
#define MPK_TRACE_NO_WAIT 0xFFFFFFFFu /* no wait */
#define MPK_TRACE_QUEUE 0xFFFFFFFEu   /* dynamic placement: the worker's queues were empty */
#define MPK_TRACE_HELD 0xFFFFFFFDu    /* dynamic placement: every task that the worker had was waiting for flagged words, or for an earlier epoch */

/* A task or a batch step on the timeline: protocol/trace.h. */
typedef struct mpk_trace_record {
  uint64_t fetched_ns, ready_ns, done_ns; /* one clock per rank; for a batch step: when it began, had published, had handed out the results */
  uint32_t iteration, task;
  uint16_t graph, worker;
  uint32_t waited_for; /* for a batch step: number of active requests in the iteration that it has published */
  uint32_t peer_ns; /* time between ready_ns and done_ns spent waiting for flagged words; for a batch step: number of rows */
  uint32_t page_ns; /* GPU, likewise: waiting for a stage of streamed weights; for a batch step: tokens in the KV caches of its requests */
} mpk_trace_record;

/* One ring of a remote scheduler queue. A ring has one producer (one sending rank) and is in the
 * receiver's symmetric memory. A push is one put-with-signal: the entry, then tail. */
typedef struct mpk_remote_entry {
  uint32_t event;     /* index of the receiver's event */
  uint32_t iteration;
  uint32_t graph;
  uint32_t epoch;     /* epoch of that graph: a late entry must not launch the next epoch */
} mpk_remote_entry;

typedef struct mpk_remote_ring {
  uint64_t tail;   /* entries pushed in total, written by the sender */
  uint64_t pad[7];
  /* mpk_remote_entry entries[capacity] follow */
} mpk_remote_ring;

/* A queue of 64-bit ids in this rank's memory. A slot holds id + 1, or 0 if it is empty. The consumer
 * writes the 0 back, so a producer that finds its slot taken waits. */
typedef struct mpk_queue {
  uint64_t tail;   /* producers take a ticket here */
  uint64_t pad0[7];
  uint64_t head;   /* only the consumer uses it */
  uint64_t pad1[7];
  uint64_t* slots;
  uint64_t mask;   /* capacity - 1, capacity a power of two */
  uint64_t pad2[6];
} mpk_queue;

/* What a rank's proxy carries to ranks whose memory cannot be reached by stores (protocol/frames.h): frames, one after the other, in
 * the order in which they were begun. */
enum mpk_frame_kind {
  MPK_FRAME_SKIP = 0,  /* padding: the next frame is `bytes` further on, at the start of the ring */
  MPK_FRAME_ROWS = 1,  /* `rows` rows of `row_bytes` bytes each, to `offset`, `stride` apart */
  MPK_FRAME_ADD = 2,   /* add `value` to the counter at `offset` */
  MPK_FRAME_WORDS = 3, /* `rows` words of 8 bytes, each written in one store */
};

typedef struct mpk_frame {
  uint32_t bytes;     /* of the frame with its payload; a multiple of 16 */
  uint32_t kind;      /* enum mpk_frame_kind */
  uint32_t to;        /* destination rank */
  uint32_t rows;
  uint64_t offset;    /* in the receiver's symmetric heap */
  uint64_t stride;
  uint64_t value;
  uint32_t row_bytes;
  uint32_t reserved;
  /* the payload follows */
} mpk_frame;

/* Frames begin at multiples of this in a ring. */
#define MPK_FRAME_ALIGN 64u

/* GPU: frames that arrive from other ranks. The rank's proxy writes frames, and a warp of the kernel carries them out
 * (protocol/gpu/inbox.cuh). All of it is in host memory. */
typedef struct mpk_inbox {
  uint64_t tail;     /* bytes written in total, released after the frames below it */
  uint64_t pad0[7];
  uint64_t head;     /* bytes read in total, written by the GPU */
  uint64_t pad1[7];
  uint64_t capacity; /* a power of two */
  uint8_t* bytes;
  uint64_t* abort;   /* mpk_rank.host_abort: an abort does not wait for the frames before it */
  uint64_t pad2[5];
} mpk_inbox;

/* A ring of frames. The threads of a rank write concurrently; its proxy reads. For a GPU, the struct is in GPU memory, and the
 * pointers lead to host memory. */
typedef struct mpk_proxy {
  uint64_t reserved; /* bytes reserved by writers in total */
  uint64_t pad0[7];
  uint64_t seen;     /* the latest `*head` that a writer has seen */
  uint64_t pad1[7];
  uint64_t capacity; /* bytes, a power of two, at least 4 x MPK_FRAME_BYTES */
  uint64_t* head;    /* bytes read in total */
  uint32_t* written; /* [capacity / MPK_FRAME_ALIGN]: at the start of a frame, the lap of the ring (from 1) in which that frame is complete */
  uint8_t* bytes;
  uint64_t* abort;   /* GPU: the abort word for the proxy, which cannot read the GPU's memory */
  mpk_inbox* inbox;  /* GPU */
  uint8_t* stage;    /* GPU: [MPK_INBOX_STAGE] in GPU memory, for the reader of the inbox */
  int (*help)(void* helper); /* CPU: takes one turn of the proxy. Returns 1, or 0 if another thread is taking one. NULL: only the proxy's own thread does */
  void* helper;
} mpk_proxy;
/* Bytes of the inbox that its reader fetches at a time. */
#define MPK_INBOX_STAGE 16384u
/* Size of the largest frame in bytes. */
#define MPK_FRAME_BYTES 65536u

struct mpk_rank;
struct mpk_kernel_args;

/* A task's kernel on the CPU target. Returns MPK_OK or an abort code. */
typedef int (*mpk_kernel_fn)(const struct mpk_kernel_args*);

typedef struct mpk_kernel {
  mpk_kernel_fn run;
  mpk_kernel_fn ready; /* NULL, or a function that returns 1 when every flagged word that the task reads has arrived; it does not wait */
} mpk_kernel;

/* Everything that one rank's persistent kernel needs to know. */
typedef struct mpk_rank {
  uint32_t abi_version;
  uint32_t rank, world;
  uint32_t num_workers, num_schedulers; /* schedulers: if some graph is dynamic (the local ones, then one remote) */
  uint32_t num_graphs;
  uint32_t placement;
  uint32_t oversubscribed; /* CPU: enum mpk_cores */
  uint64_t deadline_ns;
  uint8_t** sym;           /* [world] base address of each rank's symmetric heap, as seen from this rank; NULL if
                              stores cannot reach it */
  mpk_control* control;    /* = sym[rank] */
  mpk_graph* graphs;
  mpk_batch_config* batch_config;
  mpk_batch* batch;
  mpk_batch_output* batch_output;
  void* batch_private;     /* the batch step's own state: slots, free pages (mpk_batch_private_bytes) */
  mpk_queue* worker_queues;    /* dynamic: [num_workers][num_schedulers] */
  mpk_queue* scheduler_queues; /* dynamic: one per local scheduler, num_schedulers - (world > 1) in all; the capacity is
                                  more than the number of events of the largest graph, so a worker never waits */
  uint64_t remote_rings;       /* dynamic: offset in the symmetric heap of [world] rings, one per sender */
  uint64_t remote_ring_bytes;  /* distance between two rings */
  uint64_t remote_ring_capacity;
  uint64_t* remote_pushed;     /* [world] entries that this rank has pushed to each peer; bit 63: a push is in progress */
  const mpk_kernel* kernels;   /* by task type */
  uint8_t** scratch;           /* [num_workers] */
  mpk_status* status;          /* [num_workers + num_schedulers]; GPU, static: followed by one for the batch step */
  mpk_trace_record* trace;     /* [num_workers + 1][trace_capacity] or NULL: protocol/trace.h */
  uint64_t* trace_count;       /* [num_workers + 1] records written in total; the last trace_capacity of them are kept */
  uint64_t trace_capacity;     /* a power of two */
  /* Debug: on this rank, worker 0 (GPU: every worker) sleeps for stall_ns before each task of operator stall_op
   * (UINT32_MAX: none). */
  uint64_t stall_ns;
  uint32_t stall_op;
  uint32_t signals;            /* enum mpk_signals */
  uint64_t* host_abort;        /* GPU: host memory in which the host requests an abort: enum mpk_abort_code, the origin in the upper half */
  mpk_proxy* proxy;            /* carries puts to the ranks whose sym is NULL; NULL if there are none */
  uint32_t threads_per_core;   /* CPU: workers and schedulers, of all ranks, that share a core; 0: unknown */
  uint32_t pad;
} mpk_rank;

typedef struct mpk_kernel_args {
  const mpk_rank* rank;
  const mpk_graph* graph;
  const mpk_task* task;
  const mpk_operand* inputs;
  const mpk_operand* outputs;
  const uint32_t* params;
  const mpk_batch* batch;
  uint8_t* scratch;
  uint32_t worker;
  uint32_t task_index;
} mpk_kernel_args;

#ifdef __cplusplus
#define MPK_ASSERT_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), "ABI size of " #type)
#else
#define MPK_ASSERT_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "ABI size of " #type)
#endif
MPK_ASSERT_SIZE(mpk_operand, 48);
MPK_ASSERT_SIZE(mpk_dependency, 8);
MPK_ASSERT_SIZE(mpk_task, 80);
MPK_ASSERT_SIZE(mpk_event, 16);
MPK_ASSERT_SIZE(mpk_variant, 128);
MPK_ASSERT_SIZE(mpk_sampling, 56);
MPK_ASSERT_SIZE(mpk_request, 80);
MPK_ASSERT_SIZE(mpk_status, 64);
MPK_ASSERT_SIZE(mpk_trace_record, 48);
MPK_ASSERT_SIZE(mpk_admission, 8);
MPK_ASSERT_SIZE(mpk_page_key, 16);
MPK_ASSERT_SIZE(mpk_request_output, 12);
MPK_ASSERT_SIZE(mpk_control, 320);
MPK_ASSERT_SIZE(mpk_remote_entry, 16);
MPK_ASSERT_SIZE(mpk_remote_ring, 64);
MPK_ASSERT_SIZE(mpk_queue, 192);
MPK_ASSERT_SIZE(mpk_frame, 48);
MPK_ASSERT_SIZE(mpk_inbox, 192);
MPK_ASSERT_SIZE(mpk_proxy, 200);

/* ---- entry points of the CPU target (C linkage) --------------------------------------------------------- */
#ifdef __cplusplus
extern "C" {
#endif
/* Bytes of mpk_rank.batch_private for this configuration; the caller zeroes them. */
uint64_t mpk_batch_private_bytes(const mpk_batch_config* config);
/* First batch step of a launch. One thread of each rank calls it once; it may have to wait for requests. The loops wait for it. If
 * it returns an abort code, all loops leave with that code. */
int mpk_cpu_begin(mpk_rank* rank);
/* Wakes every thread that sleeps until this word changes. Called after mpk_batch_config.num_admissions has grown. */
void mpk_cpu_wake(uint32_t* word);
/* mpk_cpu_ring changes the word and wakes its sleepers. mpk_cpu_sleep sleeps until the word differs from `seen`, or
 * for `ns` (mpk_control.bell). */
void mpk_cpu_ring(uint32_t* word);
void mpk_cpu_sleep(const uint32_t* word, uint32_t seen, uint64_t ns);
/* The loops. Each runs on its own thread until the batch step stops the run or the rank aborts. */
void mpk_cpu_worker(mpk_rank* rank, uint32_t worker);
void mpk_cpu_scheduler(mpk_rank* rank, uint32_t scheduler);
/* Sets the abort word at this rank and at every rank within reach. */
void mpk_cpu_abort(mpk_rank* rank, uint32_t code);
/* For the proxy: the rank that the next frame goes to; UINT32_MAX if there is no frame. */
uint32_t mpk_proxy_next(const mpk_proxy* proxy);
/* For the proxy: takes the next frames out of the ring and copies them to `out`: as many adjacent frames for the same rank as
 * fit. Returns their size in bytes. `room` is at least MPK_FRAME_BYTES. */
uint64_t mpk_proxy_take(mpk_proxy* proxy, uint8_t* out, uint64_t room);
/* For the receiver's proxy: carries out the frames in this rank's heap. Returns MPK_OK, or MPK_ABORT_QUEUE if they
 * are not valid. */
int mpk_proxy_apply(uint8_t* heap, uint64_t heap_bytes, const uint8_t* frames, uint64_t bytes);
/* The same for a heap of `heap_bytes` in GPU memory: passes the frames to the kernel. MPK_INBOX_FULL: no room now,
 * try again. */
int mpk_inbox_put(mpk_inbox* inbox, uint64_t heap_bytes, const uint8_t* frames, uint64_t bytes);
#define MPK_INBOX_FULL (-1)
/* After the kernel has ended: copies the next unread frame to `out` (MPK_FRAME_BYTES) and removes it. Returns its
 * bytes; 0: none. */
uint64_t mpk_inbox_take(mpk_inbox* inbox, uint8_t* out);
#ifdef __cplusplus
}
#endif

#endif /* MPK_ABI_H */

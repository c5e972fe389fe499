/* One set for all heads from their ranked lists: the heads take turns, and a bit per position tells what is in. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define FAIR_TURNS (1 << 14) /* per thread: below, waking a thread costs more than it saves */

enum failure { DONE, BAD_ID, NO_MEMORY };

struct rank_union {
    const int32_t *ids, *counts; /* [batch, heads, width] and [batch, heads] */
    int32_t *merged, *found;     /* [batch, limit] and [batch] */
    int64_t batch, heads, width, limit, universe, threads;
};

struct plan {
    const struct rank_union *call;
    int *failure;
};

/* Mark the first `limit` distinct ids of a row; how many there are, or -1 if one is not in the universe. */
static int64_t mark(const struct rank_union *call, int64_t row, uint64_t *marks)
{
    const int32_t *ids = call->ids + row * call->heads * call->width, *counts = call->counts + row * call->heads;
    int64_t found = 0, ranks = 0;
    for (int64_t head = 0; head < call->heads; head++)
        ranks = counts[head] > ranks ? counts[head] : ranks;
    ranks = ranks < call->width ? ranks : call->width;
    for (int64_t rank = 0; rank < ranks; rank++)
        for (int64_t head = 0; head < call->heads; head++) {
            if (rank >= counts[head])
                continue;
            const int64_t id = ids[head * call->width + rank];
            if ((uint64_t)id >= (uint64_t)call->universe)
                return -1;
            found += !(marks[id / 64] >> id % 64 & 1);
            marks[id / 64] |= (uint64_t)1 << id % 64;
            if (found == call->limit)
                return found;
        }
    return found;
}

/* One item: one row of the batch. */
static void merge_row(const void *job, int64_t row)
{
    const struct plan *plan = job;
    const struct rank_union *call = plan->call;
    const int64_t words = (call->universe + 63) / 64;
    int32_t *merged = call->merged + row * call->limit;
    uint64_t *marks = calloc((size_t)words, sizeof *marks);
    const int64_t found = marks ? mark(call, row, marks) : -1;
    if (found < 0) {
        __atomic_store_n(plan->failure, marks ? BAD_ID : NO_MEMORY, __ATOMIC_RELAXED);
        free(marks);
        return;
    }
    int64_t at = 0;
    for (int64_t word = 0; word < words; word++)
        for (uint64_t bits = marks[word]; bits; bits &= bits - 1)
            merged[at++] = (int32_t)(word * 64 + __builtin_ctzll(bits));
    for (; at < call->limit; at++)
        merged[at] = -1;
    call->found[row] = (int32_t)found;
    free(marks);
}

__attribute__((visibility("default"))) int64_t saccade_rank_union(const struct rank_union *call)
{
    int failure = DONE;
    const struct plan plan = {.call = call, .failure = &failure};
    const int64_t fair = call->batch * call->heads * call->width / FAIR_TURNS;
    pool_run(merge_row, &plan, call->batch, fair < call->threads ? fair : call->threads);
    return failure;
}

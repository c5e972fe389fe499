/* Decoding attention on a CPU: one query per row and head against all tokens of the row, or against a chosen set.
 *
 * A plain C ABI without Python or torch: library.py fills a `struct call` and reads a number back. One pass over keys
 * and values: in blocks of tokens, scores first, then weights against the running maximum, then the weighted values.
 * Memory is what this costs, so each phase fetches the rows that the next one reads: gathered rows are beyond what the
 * hardware foresees. Work is cut into items (row, head, span of tokens) whose partial sums are joined at the end. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bfloat16 is widened as on a little-endian machine"
#endif

#define ABI_VERSION 1 /* raised with every change of `struct call` or of a function's meaning; library.py checks it */

#define BLOCK 128      /* most tokens per block */
#define GATHERED 64    /* tokens per block where they are read from here and there */
#define LINEAR_BYTES 6144 /* keys per block where they are neighbours */
#define MOST_GROUP 32  /* query heads per KV head */
#define MOST_DIM 256   /* numbers per head */
#define SHORTEST 512   /* tokens of a span: below, joining costs more than it spreads */
#define FAIR_BYTES (1 << 19) /* of cache per thread: below, waking a thread costs more than it saves */

enum pooling { NONE, MAX, MEAN, EACH };
enum failure { DONE, BAD_ROW, BAD_PAGE, BAD_WIDTH, BAD_SHAPE, NO_MEMORY };

/* Everything 8 bytes wide, so that ctypes and every compiler lay it out alike. */
struct call {
    const float *q;                /* [batch, query_heads, dim] */
    const char *k, *v;             /* token s of page p, head h: p · page + s · slot + h · head bytes from here */
    const int32_t *table;          /* [batch, row_pages] */
    const int32_t *starts, *lengths;
    const int32_t *ids, *counts;   /* [batch, sets, width] and [batch, sets]; NULL: all tokens */
    float *out;                    /* [batch, query_heads, dim] or NULL */
    float *scores;                 /* [batch, kv_heads or (EACH) query_heads, max_len] or NULL */
    double scale;
    int64_t k_page, k_slot, k_head, v_page, v_slot, v_head; /* bytes */
    int64_t batch, query_heads, kv_heads, dim, bf16;
    int64_t page, pages, row_pages, max_len;
    int64_t sets, width, unit;
    int64_t pooling, threads, lanes; /* lanes: widest vectors to use, 0 for the machine's */
};

struct plan {
    const struct call *call;
    int group;          /* query heads per item */
    int64_t heads;      /* items' heads per row: KV heads, or query heads where each has its own set */
    int64_t spans;      /* per head: the longest row decides, so that shorter ones may have empty spans */
    int64_t chunk;      /* tokens of a span, or units of a set */
    int block;          /* tokens of a block, a multiple of 16 up to BLOCK */
    int fetch;          /* whether to fetch ahead: in long runs of neighbours the hardware does it better */
    float *partials;    /* per item and query head: maximum, sum of weights, weighted values */
};

/* Bytes from the storage's start to the tokens of a block; places after the count, up to a multiple of 4, repeat it. */
struct block {
    int count;
    int64_t token; /* logical position of the first; of use where all tokens are read */
    int64_t k[BLOCK], v[BLOCK];
};

/* Walks over the tokens of one item. */
struct reader {
    const struct call *call;
    const int32_t *table, *ids;
    int block;
    int64_t row, head, group;
    int64_t start, length;      /* of the row, in slots */
    int64_t k_base, v_base;     /* bytes to the KV head */
    int64_t at, end;            /* next token and the one to stop at, or (ids) next entry of the set */
    int64_t run, run_end;       /* tokens of the entry that were not read yet */
};

static void open_item(struct reader *reader, const struct plan *plan, int64_t index)
{
    const struct call *call = plan->call;
    int64_t span = index % plan->spans, head = index / plan->spans % plan->heads;
    int64_t row = index / plan->spans / plan->heads, all, set;
    int64_t kv_head = head * plan->group / (call->query_heads / call->kv_heads);
    *reader = (struct reader){
        .call = call, .block = plan->block, .row = row, .head = head, .group = plan->group,
        .table = call->table + row * call->row_pages,
        .start = call->starts[row], .length = call->lengths[row],
        .k_base = kv_head * call->k_head, .v_base = kv_head * call->v_head,
    };
    all = reader->length;
    if (call->ids) {
        set = row * call->sets + (call->sets == 1 ? 0 : head);
        reader->ids = call->ids + set * call->width;
        all = call->counts[set] < call->width ? call->counts[set] : call->width;
    }
    reader->at = span * plan->chunk;
    reader->end = reader->at + plan->chunk < all ? reader->at + plan->chunk : all;
    if (!call->ids) {
        reader->run = reader->at;
        reader->run_end = reader->end;
    }
}

/* Whether there is a token to read; steps to the next entry of the set where one is used up. */
static int more(struct reader *reader)
{
    while (reader->run >= reader->run_end) {
        if (!reader->ids || reader->at >= reader->end)
            return 0;
        int64_t unit = reader->call->unit, id = reader->ids[reader->at++];
        if (id < 0 || id * unit >= reader->length)
            continue;
        reader->run = id * unit;
        reader->run_end = reader->run + unit < reader->length ? reader->run + unit : reader->length;
    }
    return 1;
}

static void read_block(struct reader *reader, struct block *block)
{
    const struct call *call = reader->call;
    int count = 0;
    block->token = reader->run;
    while (count < reader->block && more(reader)) {
        /* Neither is negative, and a 32-bit division takes half the time of a 64-bit one. */
        uint32_t slot = (uint32_t)(reader->start + reader->run), number = 0;
        if (call->row_pages > 1) {
            number = slot / (uint32_t)call->page;
            slot -= number * (uint32_t)call->page;
        }
        int64_t page = reader->table[number];
        int64_t k = reader->k_base + page * call->k_page + slot * call->k_slot;
        int64_t v = reader->v_base + page * call->v_page + slot * call->v_slot;
        int64_t some = reader->run_end - reader->run;
        some = some < call->page - slot ? some : call->page - slot;
        some = some < reader->block - count ? some : reader->block - count;
        for (int64_t i = 0; i < some; i++) {
            block->k[count + i] = k + i * call->k_slot;
            block->v[count + i] = v + i * call->v_slot;
        }
        count += (int)some;
        reader->run += some;
    }
    block->count = count;
    for (int i = count; i % 4; i++) {
        block->k[i] = block->k[count - 1];
        block->v[i] = block->v[count - 1];
    }
}

/* Store a block's raw scores `[rows][BLOCK]` as the pooling wants them. */
static void keep_scores(const struct reader *reader, const struct block *block, const float *scores)
{
    const struct call *call = reader->call;
    const int64_t heads = call->pooling == EACH ? call->query_heads : call->kv_heads;
    const int64_t first = call->pooling == EACH ? reader->head * reader->group : reader->head;
    float *to = call->scores + (reader->row * heads + first) * call->max_len + block->token;
    const size_t bytes = sizeof(float) * (size_t)block->count;
    if (call->pooling == MEAN)
        memcpy(to, scores + (call->out ? reader->group * BLOCK : 0), bytes);
    if (call->pooling == EACH)
        for (int64_t row = 0; row < reader->group; row++)
            memcpy(to + row * call->max_len, scores + row * BLOCK, bytes);
    if (call->pooling == MAX) {
        memcpy(to, scores, bytes);
        for (int64_t row = 1; row < reader->group; row++)
            for (int i = 0; i < block->count; i++)
                to[i] = scores[row * BLOCK + i] > to[i] ? scores[row * BLOCK + i] : to[i];
    }
}

#define INLINE static inline __attribute__((always_inline))
/* Into the second-level cache: the first has too few slots for outstanding lines. */
#define PREFETCH(at, bytes)                                                                                            \
    do {                                                                                                               \
        __builtin_prefetch((at), 0, 2);                                                                                      \
        if ((bytes) > 64)                                                                                              \
            __builtin_prefetch((at) + 64, 0, 2);                                                                             \
    } while (0)
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 16")
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

#ifdef __x86_64__

#define LANES 4
#define MOST_ROWS 2
#define NAME(x) base_##x
#include "kernel.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define LANES 8
#define MOST_ROWS 2
#define NAME(x) v3_##x
#include "kernel.h"
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define LANES 16
#define MOST_ROWS 4
#define NAME(x) v4_##x
#include "kernel.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else /* other processors: vectors of 128 bits, which NEON has and every compiler can split */

#define LANES 4
#define MOST_ROWS 4
#define NAME(x) base_##x
#include "kernel.h"

#endif

struct level {
    const char *name;
    int64_t lanes;
    pool_task attend;
    void (*exps)(float *, int64_t);
};

/* The widest vectors that the machine has, that fit into `dim` and that are at most `lanes` wide (0: any). */
static struct level choose(int64_t dim, int64_t lanes)
{
    const int64_t most = lanes ? lanes : 16;
#ifdef __x86_64__
    __builtin_cpu_init();
    const int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (v4 && most >= 16 && dim % 32 == 0)
        return (struct level){"x86-64-v4", 16, v4_attend, v4_exps};
    if (v3 && most >= 8 && dim % 16 == 0)
        return (struct level){"x86-64-v3", 8, v3_attend, v3_exps};
    return (struct level){"x86-64", 4, base_attend, base_exps};
#else
    (void)dim;
    (void)most;
    return (struct level){"portable", 4, base_attend, base_exps};
#endif
}

/* Every row lies in its pages, every page in the storage: after this no index needs a check but the set's. */
static enum failure check(const struct call *call)
{
    if (call->dim < 1 || call->dim > MOST_DIM || call->dim % 16 || call->query_heads % call->kv_heads ||
        call->query_heads / call->kv_heads > MOST_GROUP || call->page < 1 || call->page > INT32_MAX)
        return BAD_SHAPE;
    for (int64_t row = 0; row < call->batch; row++) {
        const int64_t start = call->starts[row], end = start + call->lengths[row];
        const int32_t *table = call->table + row * call->row_pages;
        uint32_t wrong = 0;
        if (start < 0 || call->lengths[row] < 1 || end > call->row_pages * call->page)
            return BAD_ROW;
        if (call->scores && call->lengths[row] > call->max_len)
            return BAD_WIDTH;
        for (int64_t i = start / call->page; i < (end + call->page - 1) / call->page; i++)
            wrong |= (uint32_t)((uint32_t)table[i] >= (uint64_t)call->pages);
        if (wrong)
            return BAD_PAGE;
    }
    return DONE;
}

/* Cut the work into items: with one thread a span is a whole row, else there are several per thread. */
static int64_t make_plan(struct plan *plan, const struct call *call)
{
    int64_t longest = 0, total = 0, threads = call->threads;
    int64_t unit = call->ids ? call->unit : 1;
    plan->call = call;
    plan->heads = call->ids && call->sets == call->query_heads ? call->query_heads : call->kv_heads;
    plan->group = (int)(call->query_heads / plan->heads);
    for (int64_t row = 0; row < call->batch; row++)
        for (int64_t head = 0; head < plan->heads; head++) {
            int64_t entries = call->lengths[row];
            if (call->ids)
                entries = call->counts[row * call->sets + (call->sets == 1 ? 0 : head)];
            longest = entries > longest ? entries : longest;
            total += entries > 0 ? entries : 0;
        }
    /* Measured (Zen 4): neighbours run best when a block of keys fills about a page of memory. */
    const int64_t fill = LINEAR_BYTES / (call->dim * (call->bf16 ? 2 : 4)) / 16 * 16;
    plan->fetch = call->ids || call->row_pages > 1;
    plan->block = plan->fetch ? GATHERED : fill < 16 ? 16 : fill > BLOCK ? BLOCK : (int)fill;
    const int64_t bytes = total * unit * call->dim * (call->bf16 ? 4 : 8);
    threads = threads < bytes / FAIR_BYTES ? threads : bytes / FAIR_BYTES;
    plan->chunk = longest > 0 ? longest : 1;
    if (threads > 1) {
        int64_t fair = total / (4 * threads), shortest = (SHORTEST + unit - 1) / unit;
        fair = fair > shortest ? fair : shortest;
        fair = unit == 1 ? (fair + BLOCK - 1) / BLOCK * BLOCK : fair;
        plan->chunk = plan->chunk < fair ? plan->chunk : fair;
    }
    plan->spans = longest > 0 ? (longest + plan->chunk - 1) / plan->chunk : 1;
    return threads;
}

/* Join the spans of every head: each one's sums are relative to its own maximum. */
static void join(const struct plan *plan)
{
    const struct call *call = plan->call;
    const int64_t dim = call->dim, step = plan->group * (dim + 2);
    for (int64_t head = 0; head < call->batch * call->query_heads; head++) {
        const float *first = plan->partials + head / plan->group * plan->spans * step + head % plan->group * (dim + 2);
        float *out = call->out + head * dim, max = -INFINITY, total = 0.0f;
        for (int64_t span = 0; span < plan->spans; span++)
            max = first[span * step] > max ? first[span * step] : max;
        memset(out, 0, sizeof(float) * (size_t)dim);
        for (int64_t span = 0; span < plan->spans; span++) {
            const float *partial = first + span * step;
            if (partial[1] == 0.0f) /* no token, or none that weighs anything */
                continue;
            const float factor = partial[0] == max ? 1.0f : expf(partial[0] - max);
            total += factor * partial[1];
            for (int64_t i = 0; i < dim; i++)
                out[i] += factor * partial[2 + i];
        }
        /* An empty set has no output: 0 / 0 says so. */
        for (int64_t i = 0; i < dim; i++)
            out[i] /= total;
    }
}

#define EXPORT __attribute__((visibility("default")))

EXPORT int64_t saccade_abi_version(void)
{
    return ABI_VERSION;
}

EXPORT int64_t saccade_call_size(void)
{
    return (int64_t)sizeof(struct call);
}

EXPORT const char *saccade_level(int64_t dim, int64_t lanes)
{
    return choose(dim, lanes).name;
}

/* exp of `count` numbers, a multiple of 16, in place: for the tests. */
EXPORT void saccade_exp(float *numbers, int64_t count, int64_t lanes)
{
    choose(32, lanes).exps(numbers, count);
}

EXPORT int64_t saccade_attention(const struct call *call)
{
    struct plan plan;
    enum failure failure = check(call);
    if (failure != DONE)
        return failure;
    const int64_t threads = make_plan(&plan, call), items = call->batch * plan.heads * plan.spans;
    plan.partials = NULL;
    if (call->out) {
        plan.partials = malloc(sizeof(float) * (size_t)(items * plan.group * (call->dim + 2)));
        if (!plan.partials)
            return NO_MEMORY;
    }
    if (call->scores) {
        const int64_t per_row = call->pooling == EACH ? call->query_heads : call->kv_heads;
        for (int64_t row = 0; row < call->batch * per_row; row++)
            for (int64_t i = call->lengths[row / per_row]; i < call->max_len; i++)
                call->scores[row * call->max_len + i] = -INFINITY;
    }
    pool_run(choose(call->dim, call->lanes).attend, &plan, items, threads);
    if (call->out)
        join(&plan);
    free(plan.partials);
    return DONE;
}

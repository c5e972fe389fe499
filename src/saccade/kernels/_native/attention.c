/* Decoding attention on a CPU: one query per row and head against all tokens of the row, or against a chosen set.
 *
 * A plain C ABI without Python or torch: library.py fills a `struct call` and reads a number back. One pass over keys
 * and values: in blocks of tokens, scores first, then weights against the running maximum, then the weighted values.
 * Memory is what this costs, so each phase fetches the rows that the next one reads: gathered rows are beyond what the
 * hardware foresees. The work of all heads, dense and sparse, goes into one pool and is cut into items (row, head, span
 * of tokens) of about equal size (LycheeDecode, appendix C), whose partial sums are joined at the end.
 *
 * Page bounds are scored here too (`struct bounds`): the same product with two rows of numbers per page. And they are
 * made here (`struct update`). */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bfloat16.h"
#include "compiler.h"
#include "pool.h"

#define ABI_VERSION 14 /* raised with every change of a struct or of a function's meaning; library.py checks it */

#define BLOCK 128      /* most tokens per block */
#define GATHERED 32    /* tokens per block of a set */
#define FETCHED 64     /* tokens per block of a run, where rows are fetched ahead */
#define LINEAR_BYTES 6144 /* keys per block where they are neighbours */
#define MOST_GROUP 32  /* query heads per KV head */
#define MOST_DIM 256   /* numbers per head */
#define LEAST_PAGE 4   /* tokens of a page where keys are columns */
#define SHORTEST 512   /* tokens of a span: below, joining costs more than it spreads */
#define PER_THREAD 4   /* spans, so that one who is late leaves something to the others */
#define FAIR_BYTES (1 << 19) /* of cache per thread: below, waking a thread costs more than it saves */

enum pooling { NONE, MAX, MEAN, EACH };
enum failure { DONE, BAD_ROW, BAD_PAGE, BAD_WIDTH, BAD_SHAPE, NO_MEMORY };

/* Everything 8 bytes wide, so that ctypes and every compiler lay it out alike. */
struct call {
    const void *q;                 /* [batch, query_heads, dim], bfloat16 if `narrow`, else float */
    const char *k, *v;             /* token s of page p, head h: p · page + s · slot + h · head bytes from here */
    const int32_t *table;          /* [batch, row_pages] */
    const int32_t *starts, *lengths;
    const int32_t *ids, *counts;   /* [batch, sets, width] and [batch, sets]; NULL: all tokens */
    const uint8_t *dense;          /* [kv_heads], which attend to all tokens in spite of `ids`; NULL: none */
    const int32_t *kept;           /* [kv_heads], place among the heads whose scores are kept, or -1; NULL: all are */
    void *out;                     /* as q, or NULL */
    float *scores;                 /* [batch, kept_heads or (EACH) that many groups, max_len] or NULL */
    const float *sinks;            /* [query_heads], logits of tokens without a value, or NULL */
    double scale, soft_cap; /* soft_cap: of scaled scores, 0: none */
    int64_t k_page, k_slot, k_head, k_dim, v_page, v_slot, v_head; /* bytes; k_dim: 0 where a key's numbers are
        neighbours, else how far apart they are: then keys are columns, and neighbouring tokens are neighbours */
    int64_t tiled; /* keys are columns of pairs: a line of 64 bytes holds two numbers of 16 tokens each, k_dim is from
        line to line; a line of values holds 16 numbers of two tokens, the next 16 lie behind those of all the page */
    int64_t batch, query_heads, kv_heads, dim, bf16, narrow;
    int64_t page, pages, row_pages, max_len;
    int64_t sets, width, unit;
    int64_t kept_heads;
    int64_t pooling, threads, lanes; /* lanes: widest vectors to use, 0 for the machine's */
};

struct item {
    int64_t row, head; /* KV head */
    int64_t first;     /* query head, of `group` */
    int group, kept;   /* kept: where the scores go, or -1 */
    int64_t set;       /* number of the set, or -1: all tokens */
    int64_t at, end;   /* tokens, or entries of the set */
    int64_t partial;   /* where the sums of the first query head go */
};

struct plan {
    const struct call *call;
    struct item *items; /* of one row and query head next to each other */
    int64_t count;
    float *partials;    /* per item and query head: maximum, sum of weights, weighted values */
};

/* Whether the hardware foresees long runs of short rows. Measured: Zen 4 does, and is a fifth slower where they are
 * fetched; a Xeon with AMX reads them at half its bandwidth, and at nine tenths where they are fetched. */
#ifdef __x86_64__
#define FORESEEN __builtin_cpu_is("amd")
#else
#define FORESEEN 1
#endif

#include "reader.h"

/* Where the scores of an item's first query head (or of all its heads together) from a token on are kept. */
static float *keep_at(const struct call *call, const struct item *item, int64_t token)
{
    const int64_t each = call->pooling == EACH ? item->group : 1;
    return call->scores + (item->row * call->kept_heads + item->kept) * each * call->max_len + token;
}

/* Store raw scores `[rows][BLOCK]` as the pooling wants them, in rows that are `step` numbers apart. */
static void keep_scores(float *to, int64_t step, const float *scores, int rows, int count, int64_t pooling)
{
    const size_t bytes = sizeof(float) * (size_t)count;
    const float part = 1.0f / (float)rows;
    memcpy(to, scores, bytes);
    for (int row = 1; row < rows; row++) {
        const float *more = scores + row * BLOCK;
        if (pooling == EACH)
            memcpy(to + row * step, more, bytes);
        else if (pooling == MEAN)
            for (int i = 0; i < count; i++)
                to[i] += more[i];
        else
            for (int i = 0; i < count; i++)
                to[i] = more[i] > to[i] ? more[i] : to[i];
    }
    for (int i = 0; pooling == MEAN && rows > 1 && i < count; i++)
        to[i] *= part;
}

#include "pages.h"

/* At the start of a cache line: else the speed of the inner loops depends on what stands before them. */
#define INNER static __attribute__((aligned(64)))
/* Into the second-level cache: the first has too few slots for outstanding lines. */
#define PREFETCH(at, bytes)                                                                                            \
    (__builtin_prefetch((at), 0, 2), (bytes) > 64 ? __builtin_prefetch((at) + 64, 0, 2) : (void)0)

#ifdef __x86_64__
#include <immintrin.h>

#define LANES 4
#define MOST_ROWS 2
#define NAME(x) base_##x
#include "level.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define LANES 8
#define MOST_ROWS 2
#define NAME(x) v3_##x
#include "level.h"
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
#include "level.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__) ? __clang_major__ >= 11 : __GNUC__ >= 11
/* Products of bfloat16 pairs, where the compiler knows them: half the instructions for scores, a third for values. */
#define DOTS
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif
#define DOT
#define LANES 16
#define MOST_ROWS 4
#define NAME(x) dot_##x
#include "level.h"
#undef DOT
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#else /* other processors: vectors of 128 bits, which NEON has and every compiler can split */

#define LANES 4
#define MOST_ROWS 4
#define NAME(x) base_##x
#include "level.h"

#endif

struct level {
    const char *name;
    int64_t lanes;
    pool_task attend, bound_pages, update_pages;
    void (*exps)(float *, int64_t);
    int products; /* of bfloat16 pairs */
};

/* The widest vectors that the machine has, that fit into `dim` and that are at most `lanes` wide (0: any). Products of
 * bfloat16 pairs count as 32 lanes. */
static struct level choose(int64_t dim, int64_t lanes)
{
#ifdef __x86_64__
    const int64_t own = machine_lanes(lanes);
#ifdef DOTS
    if (own == 16 && (!lanes || lanes >= 32) && dim % 32 == 0 && __builtin_cpu_supports("avx512bf16"))
        return (struct level){"x86-64-v4 with bf16", 16, dot_attend, dot_bound_pages, v4_update_pages, v4_exps, 1};
#endif
    if (own == 16 && dim % 32 == 0)
        return (struct level){"x86-64-v4", 16, v4_attend, v4_bound_pages, v4_update_pages, v4_exps};
    if (own >= 8 && dim % 16 == 0)
        return (struct level){"x86-64-v3", 8, v3_attend, v3_bound_pages, v3_update_pages, v3_exps};
    return (struct level){"x86-64", 4, base_attend, base_bound_pages, base_update_pages, base_exps};
#else
    (void)dim, (void)lanes;
    return (struct level){"portable", 4, base_attend, base_bound_pages, base_update_pages, base_exps};
#endif
}

/* The widest vectors to use where keys are columns: as many neighbouring tokens lie in one page. */
static int64_t column_lanes(int64_t lanes, int64_t page)
{
    return !lanes || page < lanes ? page : lanes;
}

static int fits(int64_t dim, int64_t query_heads, int64_t kv_heads)
{
    return dim > 0 && dim <= MOST_DIM && dim % 16 == 0 && kv_heads > 0 && query_heads % kv_heads == 0 &&
           query_heads / kv_heads <= MOST_GROUP;
}

/* Whether the pages of `page` slots that slots `start..end` of a row lie in are among the storage's `pages`. */
static int among(const int32_t *table, int64_t start, int64_t end, int64_t page, int64_t pages)
{
    uint32_t wrong = 0;
    for (int64_t i = start / page; i < (end + page - 1) / page; i++)
        wrong |= (uint32_t)((uint32_t)table[i] >= (uint64_t)pages);
    return !wrong;
}

/* Every touched token lies in its row's pages, these in the storage, and their bounds in blocks that exist. `pages` is
 * the most that a row touches, `tokens` how many there are. */
static enum failure check_update(const struct update *call, int64_t *pages, int64_t *tokens)
{
    if (!fits(call->dim, 1, 1) || call->page < (call->k_dim ? LEAST_PAGE : 1) || call->page > INT32_MAX ||
        call->unit < 1)
        return BAD_SHAPE;
    *pages = *tokens = 0;
    for (int64_t row = 0; row < call->batch; row++) {
        const struct touched touched = find_touched(call, row);
        if (touched.first == touched.stop)
            continue;
        const int64_t start = call->starts[row] + touched.first * call->unit;
        const int64_t end = call->starts[row] + touched.end;
        const int64_t room = (call->blocks_of ? call->row_blocks : 1) * call->block_pages;
        if (call->starts[row] < 0 || end > call->row_pages * call->page)
            return BAD_ROW;
        if (touched.stop > room)
            return BAD_WIDTH;
        if (!among(call->table + row * call->row_pages, start, end, call->page, call->pages))
            return BAD_PAGE;
        if (call->blocks_of && !among(call->blocks_of + row * call->row_blocks, touched.first, touched.stop,
                                      call->block_pages, call->blocks))
            return BAD_PAGE;
        *pages = touched.stop - touched.first > *pages ? touched.stop - touched.first : *pages;
        *tokens += end - start;
    }
    return DONE;
}

/* Every row lies in its pages, every page in the storage: after this no index needs a check but the set's. */
static enum failure check(const struct call *call)
{
    if (!fits(call->dim, call->query_heads, call->kv_heads) || call->page < (call->k_dim ? LEAST_PAGE : 1) ||
        call->page > INT32_MAX)
        return BAD_SHAPE;
    if (call->tiled && (call->page % 32 || !call->bf16 || !call->narrow || !choose(call->dim, call->lanes).products))
        return BAD_SHAPE;
    for (int64_t row = 0; row < call->batch; row++) {
        const int64_t start = call->starts[row], end = start + call->lengths[row];
        const int32_t *table = call->table + row * call->row_pages;
        if (start < 0 || call->lengths[row] < 1 || end > call->row_pages * call->page)
            return BAD_ROW;
        if (call->scores && call->lengths[row] > call->max_len)
            return BAD_WIDTH;
        if (!among(table, start, end, call->page, call->pages))
            return BAD_PAGE;
    }
    return DONE;
}

/* Cut one head's tokens, or entries of a set, into spans of equal size, at most `chunk` tokens; items NULL: only count.
 * A head without any has one item, so that its output is written. */
static int64_t cut_head(const struct call *call, struct item head, int64_t chunk, struct item *items, int64_t *tokens)
{
    const int64_t unit = head.set < 0 ? 1 : call->unit, entries = head.end, most = chunk < unit ? 1 : chunk / unit;
    const int64_t spans = entries > 0 ? (entries - 1) / most + 1 : 1;
    int64_t size = (entries + spans - 1) / spans;
    if (unit == 1 && spans > 1)
        size = (size + BLOCK - 1) / BLOCK * BLOCK; /* whole blocks; `chunk` is made of them too */
    *tokens += entries * unit;
    for (int64_t span = 0; items && span < spans; span++) {
        items[span] = head;
        items[span].at = span * size < entries ? span * size : entries;
        items[span].end = (span + 1) * size < entries ? (span + 1) * size : entries;
        items[span].partial = head.partial + span * head.group;
    }
    return spans;
}

/* The pool of all heads' work, cut; first those that attend to all tokens, which are the most. Returns the number of
 * items; `tokens` counts theirs and `sums` the query heads. */
static int64_t cut(const struct call *call, int64_t chunk, struct item *items, int64_t *tokens, int64_t *sums)
{
    const int64_t group = call->query_heads / call->kv_heads;
    int64_t count = 0;
    *tokens = *sums = 0;
    for (int sparse = 0; sparse < 2; sparse++)
        for (int64_t row = 0; row < call->batch; row++)
            for (int64_t head = 0; head < call->kv_heads; head++) {
                if (sparse != (call->ids && !(call->dense && call->dense[head])))
                    continue;
                struct item item = {.row = row, .head = head, .set = -1, .end = call->lengths[row], .group = (int)group,
                                    .kept = call->kept ? call->kept[head] : (int)head};
                if (sparse && call->sets == call->query_heads)
                    item.group = 1;
                for (item.first = head * group; item.first < (head + 1) * group; item.first += item.group) {
                    if (sparse) {
                        item.kept = -1;
                        item.set = row * call->sets + (call->sets == 1 ? 0 : item.first / item.group);
                        item.end = call->counts[item.set] < call->width ? call->counts[item.set] : call->width;
                        item.end = item.end > 0 ? item.end : 0;
                    }
                    item.partial = *sums;
                    const int64_t spans = cut_head(call, item, chunk, items ? items + count : NULL, tokens);
                    count += spans;
                    *sums += spans * item.group;
                }
            }
    return count;
}

/* With one thread an item is all that a head attends to, else there are several per thread. Returns the threads that
 * are worth waking, or 0 when memory is short. */
static int64_t make_plan(struct plan *plan, const struct call *call)
{
    int64_t tokens, sums, chunk = INT64_MAX;
    *plan = (struct plan){.call = call};
    cut(call, chunk, NULL, &tokens, &sums);
    const int64_t fair = tokens * call->dim * (call->bf16 ? 4 : 8) / FAIR_BYTES;
    const int64_t threads = fair < 1 ? 1 : fair < call->threads ? fair : call->threads;
    if (threads > 1) {
        chunk = tokens / (PER_THREAD * threads);
        chunk = chunk > SHORTEST ? (chunk + BLOCK - 1) / BLOCK * BLOCK : SHORTEST;
    }
    plan->count = cut(call, chunk, NULL, &tokens, &sums);
    plan->items = malloc(sizeof(struct item) * (size_t)(plan->count + 1));
    if (!plan->items)
        return 0;
    cut(call, chunk, plan->items, &tokens, &sums);
    if (call->out) {
        plan->partials = malloc(sizeof(float) * (size_t)(sums * (call->dim + 2) + 1));
        if (!plan->partials)
            return 0;
    }
    return threads;
}

/* Join `spans` parts of one head's output: each one's sums are relative to its own maximum. `sink` is the logit of
 * a further token, without a value, or -INFINITY. */
static void join_head(float *out, const float *first, int64_t spans, int64_t step, int64_t dim, float sink)
{
    float max = sink, total = 0.0f;
    for (int64_t span = 0; span < spans; span++)
        max = first[span * step] > max ? first[span * step] : max;
    memset(out, 0, sizeof(float) * (size_t)dim);
    for (int64_t span = 0; span < spans; span++) {
        const float *partial = first + span * step;
        if (partial[1] == 0.0f) /* no token, or none that weighs anything */
            continue;
        const float factor = partial[0] == max ? 1.0f : expf(partial[0] - max);
        total += factor * partial[1];
        for (int64_t i = 0; i < dim; i++)
            out[i] += factor * partial[2 + i];
    }
    if (sink != -INFINITY)
        total += expf(sink - max);
    /* An empty set has no output: 0 / 0 says so. */
    for (int64_t i = 0; i < dim; i++)
        out[i] /= total;
}

static void join(const struct plan *plan)
{
    const struct call *call = plan->call;
    const int64_t dim = call->dim;
    float joined[MOST_DIM];
    for (int64_t index = 0, spans; index < plan->count; index += spans) {
        const struct item *item = &plan->items[index];
        for (spans = 1; index + spans < plan->count; spans++)
            if (item[spans].row != item->row || item[spans].first != item->first)
                break;
        for (int64_t query = 0; query < item->group; query++) {
            const int64_t at = (item->row * call->query_heads + item->first + query) * dim;
            float *out = call->narrow ? joined : (float *)call->out + at;
            join_head(out, plan->partials + (item->partial + query) * (dim + 2), spans, item->group * (dim + 2), dim,
                      call->sinks ? call->sinks[item->first + query] : -INFINITY);
            for (int64_t i = 0; call->narrow && i < dim; i++)
                ((uint16_t *)call->out)[at + i] = narrow(out[i]);
        }
    }
}

/* -INFINITY to the places of `rows` rows of `step` numbers from number `from` on. */
static void hide(float *scores, int64_t rows, int64_t step, int64_t from)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = from; i < step; i++)
            scores[row * step + i] = -INFINITY;
}

EXPORT int64_t saccade_abi_version(void)
{
    return ABI_VERSION;
}

EXPORT int64_t saccade_call_size(void)
{
    return (int64_t)(sizeof(struct call) + sizeof(struct bounds) + sizeof(struct update));
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
    const int64_t threads = make_plan(&plan, call);
    if (threads) {
        const int64_t each = call->kept_heads * (call->pooling == EACH ? call->query_heads / call->kv_heads : 1);
        for (int64_t row = 0; call->scores && row < call->batch; row++)
            hide(call->scores + row * each * call->max_len, each, call->max_len, call->lengths[row]);
        const int64_t lanes = call->k_dim ? column_lanes(call->lanes, call->page) : call->lanes;
        pool_run(choose(call->dim, lanes).attend, &plan, plan.count, threads);
        if (call->out)
            join(&plan);
    }
    free(plan.items);
    free(plan.partials);
    return threads ? DONE : NO_MEMORY;
}

EXPORT int64_t saccade_page_scores(const struct bounds *call)
{
    if (!fits(call->dim, call->query_heads, call->kv_heads) || call->unit < 1)
        return BAD_SHAPE;
    const int64_t each = call->pooling == EACH ? call->query_heads : call->kv_heads;
    int64_t longest = 0, total = 0;
    for (int64_t row = 0; row < call->batch; row++) {
        const int64_t used = pages_used(call, row);
        const int32_t *table = call->table && used ? call->table + row * call->row_blocks : NULL;
        if (table && !among(table, 0, used, call->block_pages, call->blocks))
            return BAD_PAGE;
        longest = used > longest ? used : longest;
        total += used * call->kv_heads;
        hide(call->scores + row * each * call->pages, each, call->pages, used);
    }
    /* A page is two rows of numbers, as a token is. */
    const int64_t fair = total * call->dim * (call->bf16 ? 4 : 8) / FAIR_BYTES;
    const int64_t threads = fair < call->threads ? fair : call->threads;
    struct bounds_plan plan = {.call = call, .spans = 1, .chunk = longest};
    if (threads > 1) {
        plan.chunk = (total / (PER_THREAD * threads) + BLOCK) / BLOCK * BLOCK;
        plan.spans = (longest + plan.chunk - 1) / plan.chunk;
    }
    pool_run(choose(call->dim, call->lanes).bound_pages, &plan, call->batch * call->kv_heads * plan.spans, threads);
    return DONE;
}

EXPORT int64_t saccade_update_pages(const struct update *call)
{
    int64_t pages, tokens;
    const enum failure failure = check_update(call, &pages, &tokens);
    if (failure != DONE)
        return failure;
    const int64_t fair = tokens * call->kv_heads * call->dim * (call->bf16 ? 2 : 4) / FAIR_BYTES;
    const struct update_plan plan = {.call = call, .spans = (pages + UPDATED - 1) / UPDATED};
    const int64_t lanes = call->k_dim ? column_lanes(call->lanes, call->page) : call->lanes;
    pool_run(choose(call->dim, lanes).update_pages, &plan, call->batch * call->kv_heads * plan.spans,
             fair < call->threads ? fair : call->threads);
    return DONE;
}

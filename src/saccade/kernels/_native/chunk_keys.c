/* Means of neighbouring tokens' keys, taken where they lie.
 *
 * A mean is summed in the tokens' order, as torch sums it: the results are the same bits. */
#include "compiler.h"
#include "pool.h"

#define LANES 16 /* numbers at a time: divides every head dim, and needs no wider vectors than any machine has */
#define SPAN 64 /* chunks of an item */
#define FAIR_BYTES (1 << 19) /* of cache per thread: below, waking a thread costs more than it saves */

enum failure { DONE, BAD_ROW, BAD_PAGE, BAD_WIDTH, BAD_SHAPE };

/* Everything 8 bytes wide, so that ctypes and every compiler lay it out alike. */
struct chunk_keys {
    const char *k;        /* number i of token s of page p, head h: p · page + s · slot + h · head + i · dim bytes on */
    const int32_t *table; /* [batch, row_pages] */
    const int32_t *starts;
    const int32_t *edges; /* [batch, chunks + 1], ascending: where they differ, inside of the row */
    float *means;         /* [batch, kv_heads, chunks, dim] */
    int64_t k_page, k_slot, k_head, k_dim, tiled; /* bytes; tiled: pairs are `k_dim` apart, see attention.c */
    int64_t batch, kv_heads, dim, bf16;
    int64_t page, pages, row_pages, chunks;
    int64_t threads;
};

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half __attribute__((vector_size(2 * LANES)));

/* LANES numbers, `step` bytes apart; of tiles pairs of numbers are. */
INLINE vec load(const char *at, int64_t step, int bf16, int tiled)
{
    const int64_t size = bf16 ? 2 : 4;
    char apart[4 * LANES];
    for (int i = 0; step != size && i < LANES; i++)
        memcpy(apart + i * size, at + (tiled ? i / 2 * step + i % 2 * size : i * step), (size_t)size);
    const char *from = step == size ? at : apart;
    vec numbers;
    half words;
    if (bf16) {
        memcpy(&words, from, sizeof words);
        numbers = (vec)(__builtin_convertvector(words, uvec) << 16);
    } else
        memcpy(&numbers, from, sizeof numbers);
    return numbers;
}

/* Add `count` keys of a page from slot `first` on to `to`. */
INLINE void take(float *to, const struct chunk_keys *call, const char *keys, int64_t first, int64_t count, int64_t step,
                 int bf16, int tiled)
{
    for (int64_t i = 0; i < call->dim; i += LANES) {
        vec held;
        memcpy(&held, to + i, sizeof held);
        for (int64_t slot = first; slot < first + count; slot++) {
            const int64_t at = tiled ? slot / 16 * 16 * call->k_slot + slot % 16 * 4 : slot * call->k_slot;
            held += load(keys + at + (tiled ? i / 2 : i) * step, step, bf16, tiled);
        }
        memcpy(to + i, &held, sizeof held);
    }
}

static void take_any(float *to, const struct chunk_keys *call, const char *keys, int64_t first, int64_t count)
{
    if (call->tiled)
        take(to, call, keys, first, count, call->k_dim, 1, 1);
    else if (call->bf16 && call->k_dim == 2)
        take(to, call, keys, first, count, 2, 1, 0);
    else if (!call->bf16 && call->k_dim == 4)
        take(to, call, keys, first, count, 4, 0, 0);
    else
        take(to, call, keys, first, count, call->k_dim, (int)call->bf16, 0);
}

/* The mean of a row's chunk `begin..end`; zeros of no token. */
static void pool_chunk(const struct chunk_keys *call, int64_t row, int64_t head, int64_t begin, int64_t end, float *to)
{
    const int64_t dim = call->dim;
    for (int64_t i = 0; i < dim; i++)
        to[i] = 0.0f;
    for (int64_t at = call->starts[row] + begin, stop = call->starts[row] + end, some; at < stop; at += some) {
        const int64_t number = at / call->page, slot = at - number * call->page;
        const char *keys = call->k + call->table[row * call->row_pages + number] * call->k_page;
        some = stop - at < call->page - slot ? stop - at : call->page - slot;
        take_any(to, call, keys + head * call->k_head, slot, some);
    }
    for (int64_t i = 0; i < dim && begin < end; i++)
        to[i] /= (float)(end - begin);
}

/* One item: some chunks of one KV head of one row. */
static void pool_chunks(const void *job, int64_t index)
{
    const struct chunk_keys *call = job;
    const int64_t spans = (call->chunks + SPAN - 1) / SPAN, first = index % spans * SPAN;
    const int64_t last = first + SPAN < call->chunks ? first + SPAN : call->chunks;
    const int64_t place = index / spans, row = place / call->kv_heads;
    const int32_t *edges = call->edges + row * (call->chunks + 1);
    for (int64_t chunk = first; chunk < last; chunk++)
        pool_chunk(call, row, place % call->kv_heads, edges[chunk], edges[chunk + 1],
                   call->means + (place * call->chunks + chunk) * call->dim);
}

EXPORT int64_t saccade_chunk_keys(const struct chunk_keys *call)
{
    int64_t tokens = 0;
    if (call->dim < 1 || call->dim % LANES || call->page < 1)
        return BAD_SHAPE;
    for (int64_t row = 0; row < call->batch; row++) {
        const int32_t *edges = call->edges + row * (call->chunks + 1), *table = call->table + row * call->row_pages;
        const int64_t begin = (int64_t)call->starts[row] + edges[0];
        const int64_t end = (int64_t)call->starts[row] + edges[call->chunks];
        if (begin >= end)
            continue;
        if (begin < 0 || end > call->row_pages * call->page)
            return BAD_ROW;
        for (int64_t i = begin / call->page; i <= (end - 1) / call->page; i++)
            if (table[i] < 0 || table[i] >= call->pages)
                return BAD_PAGE;
        tokens += end - begin;
    }
    const int64_t fair = tokens * call->kv_heads * call->dim * (call->bf16 ? 2 : 4) / FAIR_BYTES;
    pool_run(pool_chunks, call, call->batch * call->kv_heads * ((call->chunks + SPAN - 1) / SPAN),
             fair < call->threads ? fair : call->threads);
    return DONE;
}

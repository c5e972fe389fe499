/* Exact top-k of rows of scores: ties go to the lower position.
 *
 * Reading the row once is what this costs. A sample gives a floor that hardly more than k entries reach; one pass
 * collects those; a bisection over their keys finds the cut. Nothing rests on the sample: where too few reach the floor
 * the row is read again without one, and where too many do, the best k of the collected ones raise it. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define STEP 64           /* entries looked at at once */
#define SAMPLED 4096      /* most entries of a sample */
#define SAMPLED_SHARE 16  /* of how many entries one is in the sample */
#define NEIGHBOURS 8      /* that are in the sample together: half a cache line */
#define FAIR_BYTES (1 << 19) /* of scores per thread: below, waking a thread costs more than it saves */
#define KEY_OF_INFINITY 0x7f800000

enum failure { DONE, BAD_LENGTH, BAD_SHAPE, NO_MEMORY };

struct topk {
    const char *scores; /* entry n of row (b, g): b · row_step + g · group_step + 4 · n bytes from here */
    const int32_t *lengths; /* [batch], in tokens */
    int32_t *ids, *counts;  /* [batch, groups, kept + last] and [batch, groups] */
    int64_t row_step, group_step, batch, groups, width, kept;
    int64_t last;   /* entries that end a row and are in its set unranked */
    int64_t ranked; /* whether the best comes first, not the lowest position */
    int64_t unit;   /* tokens of an entry */
    int64_t numerator, denominator, minimum; /* of its entries' share that a row's set has at most, the last ones among
        them, and how many it may have in any case; denominator 0: no bound */
    int64_t threads, lanes; /* lanes: widest vectors to use, 0 for the machine's */
};

/* Entries of a row. */
static int64_t entries_of(const struct topk *call, int64_t row)
{
    return (call->lengths[row] + call->unit - 1) / call->unit;
}

/* Entries that a row of so many may have in its set: their share, rounded up. */
static int64_t most_of(const struct topk *call, int64_t entries)
{
    if (!call->denominator)
        return entries;
    const int64_t share = (entries * call->numerator + call->denominator - 1) / call->denominator;
    const int64_t most = share < call->minimum ? call->minimum : share;
    return most < entries ? most : entries;
}

/* Entries in order of position, and room for some more. */
struct best {
    int32_t *keys, *positions;
    int64_t count, room, wanted;
    int32_t floor; /* the key that others have to reach */
};

typedef int64_t (*counter)(const int32_t *keys, int64_t count, int32_t floor);

/* Keys compare as the numbers do; adding 0 makes both zeros equal. */
static inline int32_t key_of(float number)
{
    int32_t bits;
    number += 0.0f;
    memcpy(&bits, &number, sizeof bits);
    return bits ^ (bits >> 31 & INT32_MAX);
}

/* The opposite; NaN for keys beyond both infinities. */
static inline float number_of(int32_t key)
{
    float number;
    key ^= key >> 31 & INT32_MAX;
    memcpy(&number, &key, sizeof number);
    return number;
}

static inline void put(struct best *best, const float *row, int64_t position)
{
    best->keys[best->count] = key_of(row[position]);
    best->positions[best->count++] = (int32_t)position;
}

/* A key that the best `rank` of more than `rank` keys reach. All others are below it and `level` is 0; or it is the
 * last one's, and `level` tells how many of those equal to it are among the best. */
static int32_t find_cut(int32_t *keys, int64_t count, int64_t rank, counter count_keys, int64_t *level)
{
    int64_t low = INT32_MAX, high = INT32_MIN, above = 0; /* `above` reach `high`, fewer than `rank` */
    for (int64_t i = 0; i < count; i++) {
        low = keys[i] < low ? keys[i] : low;
        high = keys[i] > high ? keys[i] : high;
    }
    for (int64_t i = count; i < count + STEP; i++)
        keys[i] = INT32_MIN;
    for (high++; high - low > 1;) {
        const int64_t middle = low + (high - low) / 2;
        const int64_t reach = count_keys(keys, count, (int32_t)middle);
        *level = 0;
        if (reach == rank)
            return (int32_t)middle;
        if (reach > rank) {
            low = middle;
        } else {
            high = middle;
            above = reach;
        }
    }
    *level = rank - above;
    return (int32_t)low;
}

/* Keep the best that are wanted; of equal ones the lower positions. */
static void narrow(struct best *best, counter count_keys)
{
    int64_t level, kept = 0;
    if (best->count <= best->wanted)
        return;
    const int32_t cut = find_cut(best->keys, best->count, best->wanted, count_keys, &level);
    /* Where there is a level, what comes later has to be above it. */
    best->floor = level && cut < INT32_MAX ? cut + 1 : cut;
    level = level ? level : best->count;
    for (int64_t i = 0; i < best->count; i++) {
        const int32_t key = best->keys[i];
        const int64_t even = key == cut && level > 0;
        best->keys[kept] = key;
        best->positions[kept] = best->positions[i];
        kept += key > cut || even;
        level -= even;
    }
    best->count = kept;
}

/* A key that more than the wanted entries of a row of `count` reach, but not many more, if the row is like a sample. */
static int32_t sample_floor(struct best *best, const float *row, int64_t count, counter count_keys)
{
    const int64_t share = count / SAMPLED_SHARE < SAMPLED ? count / SAMPLED_SHARE : SAMPLED;
    const int64_t places = share / NEIGHBOURS, sampled = places * NEIGHBOURS;
    const double expected = (double)sampled * (double)best->wanted / (double)count;
    const int64_t rank = (int64_t)(expected + 3.0 * sqrt(expected)) + 1; /* three standard deviations */
    int64_t level;
    if (rank >= sampled)
        return INT32_MIN;
    for (int64_t place = 0; place < places; place++)
        for (int64_t i = 0; i < NEIGHBOURS; i++)
            best->keys[place * NEIGHBOURS + i] = key_of(row[place * (count / places) + i]);
    return find_cut(best->keys, sampled, rank, count_keys, &level);
}

#define LEVEL "topk_level.h"
#include "levels.h"

/* Write positions from the best key down: a stable radix sort, byte by byte, of what is in order of position. */
static void rank_entries(const struct best *best, uint64_t *from, uint64_t *to, int32_t *ids)
{
    int32_t starts[4][256] = {{0}};
    for (int64_t i = 0; i < best->count; i++) {
        const uint32_t worse = (uint32_t)INT32_MAX - (uint32_t)best->keys[i];
        from[i] = (uint64_t)worse << 32 | (uint32_t)best->positions[i];
        for (int byte = 0; byte < 4; byte++)
            starts[byte][worse >> 8 * byte & 255]++;
    }
    for (int byte = 0; byte < 4; byte++) {
        const int shift = 32 + 8 * byte;
        if (starts[byte][from[0] >> shift & 255] == best->count)
            continue;
        for (int32_t value = 0, start = 0; value < 256; value++) {
            const int32_t next = start + starts[byte][value];
            starts[byte][value] = start;
            start = next;
        }
        for (int64_t i = 0; i < best->count; i++)
            to[starts[byte][from[i] >> shift & 255]++] = from[i];
        uint64_t *sorted = to;
        to = from;
        from = sorted;
    }
    for (int64_t i = 0; i < best->count; i++)
        ids[i] = (int32_t)(uint32_t)from[i];
}

/* The memory of one row: keys and positions, and twice both of what is kept, to be sorted. */
struct memory {
    void *all;
    struct best best;
    uint64_t *pairs;
};

static int take_memory(struct memory *memory, const struct topk *call)
{
    /* Half of it is free after each narrowing; a sample fits too, and the padding that counting reads. */
    const int64_t room = 2 * call->kept + SAMPLED, padded = room + STEP;
    const size_t pairs = call->ranked ? sizeof(uint64_t) * 2 * (size_t)call->kept : 0;
    memory->all = malloc(pairs + sizeof(int32_t) * 2 * (size_t)padded);
    memory->pairs = memory->all;
    memory->best.keys = (int32_t *)((char *)memory->all + pairs);
    memory->best.positions = memory->best.keys + padded;
    memory->best.room = room;
    return memory->all != NULL;
}

struct plan {
    const struct topk *call;
    int *failed;
};

/* Write the best `count` of the first `length` entries; whether memory sufficed. */
static int write_best(const struct topk *call, const float *scores, int64_t length, int64_t count, int32_t *ids)
{
    struct memory memory;
    struct best *best = &memory.best;
    if (!take_memory(&memory, call))
        return 0;
    best->wanted = count;
    best->count = 0;
    if (count < length)
        OF_LEVEL(machine_lanes(call->lanes), choose)(best, scores, length);
    else
        for (int64_t i = 0; i < count; i++)
            put(best, scores, i);
    if (call->ranked)
        rank_entries(best, memory.pairs, memory.pairs + call->kept, ids);
    else
        memcpy(ids, best->positions, sizeof(int32_t) * (size_t)count);
    free(memory.all);
    return 1;
}

/* One item: one row of scores. */
static void choose_row(const void *job, int64_t index)
{
    const struct plan *plan = job;
    const struct topk *call = plan->call;
    const int64_t row = index / call->groups, group = index % call->groups, width = call->kept + call->last;
    const int64_t length = entries_of(call, row), last = length < call->last ? length : call->last;
    const int64_t ranked = length - last, size = most_of(call, length) - last;
    const float *scores = (const float *)(call->scores + row * call->row_step + group * call->group_step);
    int32_t *ids = call->ids + index * width;
    int64_t count = ranked < call->kept ? ranked : call->kept;
    count = size < count ? size : count;
    count = count > 0 ? count : 0;
    if (count && !write_best(call, scores, ranked, count, ids))
        __atomic_store_n(plan->failed, 1, __ATOMIC_RELAXED);
    for (int64_t i = 0; i < width - count; i++)
        ids[count + i] = i < last ? (int32_t)(ranked + i) : -1;
    call->counts[index] = (int32_t)(count + last);
}

__attribute__((visibility("default"))) int64_t saccade_topk(const struct topk *call)
{
    int failed = 0;
    if (call->width > INT32_MAX || call->kept > call->width || call->kept < 0 || call->last < 0 || call->unit < 1)
        return BAD_SHAPE;
    for (int64_t row = 0; row < call->batch; row++)
        if (call->lengths[row] < 0 || entries_of(call, row) > call->width)
            return BAD_LENGTH;
    const struct plan plan = {.call = call, .failed = &failed};
    const int64_t rows = call->batch * call->groups, fair = rows * call->width * 4 / FAIR_BYTES;
    pool_run(choose_row, &plan, rows, fair < call->threads ? fair : call->threads);
    return failed ? NO_MEMORY : DONE;
}

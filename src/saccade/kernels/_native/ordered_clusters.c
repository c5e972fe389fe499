/* What follows the two k-means of a group of chunks: clusters in order of their units, chunks in order of their
 * clusters, both sorted by counting; and how far the chunks below each reach.
 *
 * Squares are added up in float64 and rooted once: the root of the largest is the largest root. */
#include <math.h>
#include <stdlib.h>

#include "compiler.h"
#include "pool.h"

#define SUMS 8 /* added up side by side */
#define FAIR_NUMBERS (1 << 17) /* of keys per thread: below, waking a thread costs more than it saves */
#define INFLATION (1 + 0x1p-23) /* so that rounding float64 to float32 never shrinks a radius */

enum failure { DONE, BAD_LABEL, BAD_PARENT, NO_MEMORY };

/* Everything 8 bytes wide, so that ctypes and every compiler lay it out alike. */
struct ordered_clusters {
    const float *keys;      /* [problems, chunks, dim] */
    const int64_t *labels;  /* [problems, chunks]; `clusters` for what is not there */
    const char *centroids;  /* [problems, clusters, dim], numbers of `size` bytes */
    const int64_t *parents; /* [problems, clusters]; `units` for what is not there */
    const char *tops;       /* [problems, units, dim], numbers of `size` bytes */
    const int64_t *lengths; /* [problems, chunks] */
    float *unit_radii;      /* [problems, units], as all of units */
    int64_t *unit_tokens, *unit_offsets;
    char *ordered;          /* [problems, clusters, dim], numbers of `size` bytes */
    float *radii;           /* [problems, clusters] */
    int64_t *numbers, *offsets;
    int64_t *members;       /* [problems, chunks] */
    int64_t problems, chunks, clusters, units, dim, size, threads; /* size: 4 of float32, 2 of bfloat16 */
};

struct plan {
    const struct ordered_clusters *call;
    int *failure;
};

/* Memory of one problem. */
struct work {
    double *squares; /* [clusters + units], the largest yet of each cluster's chunks, and of each unit's */
    float *nodes;    /* [clusters + units, dim], their centroids */
    int64_t *places; /* [clusters + 1 or more]: by its number, where a cluster has gone */
    int64_t *next;   /* [clusters + units or more]: where the next one of a label goes */
};

INLINE double square(const float *one, const float *other, int64_t dim)
{
    double sums[SUMS] = {0}, total = 0.0;
    int64_t i = 0;
    for (; i + SUMS <= dim; i += SUMS)
        for (int lane = 0; lane < SUMS; lane++) {
            const double apart = (double)one[i + lane] - (double)other[i + lane];
            sums[lane] += apart * apart;
        }
    for (; i < dim; i++) {
        const double apart = (double)one[i] - (double)other[i];
        total += apart * apart;
    }
    for (int lane = 0; lane < SUMS; lane++)
        total += sums[lane];
    return total;
}

/* NaN stays: it is unequal to itself, and nothing is more. */
INLINE void keep_larger(double *most, double value)
{
    if (value > *most || value != value)
        *most = value;
}

static void widen(float *to, const char *from, int64_t count, int64_t size)
{
    if (size == 4) {
        memcpy(to, from, sizeof *to * (size_t)count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        const uint32_t word = (uint32_t)half << 16;
        memcpy(to + i, &word, sizeof word);
    }
}

/* Where each of labels 0 to `most` begins among `count` labels in order: to `next`, all but the last to `offsets`. */
static void begin(int64_t *next, int64_t *offsets, const int64_t *labels, const int64_t *places, int64_t count,
                  int64_t most)
{
    memset(next, 0, sizeof *next * (size_t)(most + 1));
    for (int64_t i = 0; i < count; i++)
        next[places ? places[labels[i]] : labels[i]]++;
    for (int64_t label = 0, first = 0; label <= most; label++) {
        const int64_t own = next[label];
        next[label] = first;
        first += own;
    }
    memcpy(offsets, next, sizeof *offsets * (size_t)most);
}

static void order(const struct ordered_clusters *call, int64_t problem, const struct work *work)
{
    const int64_t chunks = call->chunks, clusters = call->clusters, units = call->units, dim = call->dim;
    const int64_t *labels = call->labels + problem * chunks, *parents = call->parents + problem * clusters;
    const int64_t *lengths = call->lengths + problem * chunks;
    const float *keys = call->keys + problem * chunks * dim;
    const char *centroids = call->centroids + problem * clusters * dim * call->size;
    char *ordered = call->ordered + problem * clusters * dim * call->size;
    int64_t *numbers = call->numbers + problem * clusters, *members = call->members + problem * chunks;
    int64_t *tokens = call->unit_tokens + problem * units;

    begin(work->next, call->unit_offsets + problem * units, parents, NULL, clusters, units);
    for (int64_t number = 0; number < clusters; number++) {
        const int64_t place = work->next[parents[number]]++;
        work->places[number] = place;
        numbers[place] = number;
        memcpy(ordered + place * dim * call->size, centroids + number * dim * call->size, (size_t)(dim * call->size));
    }
    work->places[clusters] = clusters;
    begin(work->next, call->offsets + problem * clusters, labels, work->places, chunks, clusters);
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) /* of a cluster the latest first */
        members[work->next[work->places[labels[chunk]]]++] = chunk;

    widen(work->nodes, ordered, clusters * dim, call->size);
    widen(work->nodes + clusters * dim, call->tops + problem * units * dim * call->size, units * dim, call->size);
    memset(work->squares, 0, sizeof *work->squares * (size_t)(clusters + units));
    memset(tokens, 0, sizeof *tokens * (size_t)units);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t number = labels[chunk], place = work->places[number];
        if (number == clusters)
            continue;
        keep_larger(&work->squares[place], square(keys + chunk * dim, work->nodes + place * dim, dim));
        const int64_t unit = parents[number];
        if (unit == units)
            continue;
        const float *top = work->nodes + (clusters + unit) * dim;
        keep_larger(&work->squares[clusters + unit], square(keys + chunk * dim, top, dim));
        tokens[unit] += lengths[chunk];
    }
    for (int64_t place = 0; place < clusters; place++)
        call->radii[problem * clusters + place] = (float)(sqrt(work->squares[place]) * INFLATION);
    for (int64_t unit = 0; unit < units; unit++)
        call->unit_radii[problem * units + unit] = (float)(sqrt(work->squares[clusters + unit]) * INFLATION);
}

/* One item: one problem. */
static void order_problem(const void *job, int64_t problem)
{
    const struct plan *plan = job;
    const struct ordered_clusters *call = plan->call;
    const size_t nodes = (size_t)(call->clusters + call->units);
    const struct work work = {
        .squares = malloc(sizeof *work.squares * nodes),
        .nodes = malloc(sizeof *work.nodes * nodes * (size_t)call->dim),
        .places = malloc(sizeof *work.places * nodes),
        .next = malloc(sizeof *work.next * nodes),
    };
    if (work.squares && work.nodes && work.places && work.next)
        order(call, problem, &work);
    else
        __atomic_store_n(plan->failure, NO_MEMORY, __ATOMIC_RELAXED);
    free(work.squares);
    free(work.nodes);
    free(work.places);
    free(work.next);
}

/* Whether one of `count` numbers is below 0 or above `most`. */
static int outside(const int64_t *numbers, int64_t count, int64_t most)
{
    int any = 0;
    for (int64_t i = 0; i < count; i++)
        any |= (uint64_t)numbers[i] > (uint64_t)most;
    return any;
}

EXPORT int64_t saccade_ordered_clusters(const struct ordered_clusters *call)
{
    int failure = DONE;
    if (outside(call->labels, call->problems * call->chunks, call->clusters))
        return BAD_LABEL;
    if (outside(call->parents, call->problems * call->clusters, call->units))
        return BAD_PARENT;
    const struct plan plan = {.call = call, .failure = &failure};
    const int64_t fair = call->problems * call->chunks * call->dim / FAIR_NUMBERS;
    pool_run(order_problem, &plan, call->problems, fair < call->threads ? fair : call->threads);
    return failure;
}

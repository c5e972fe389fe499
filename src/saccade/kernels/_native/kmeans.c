/* Spherical k-means (LycheeCluster, section 4.3): nearly all of it is inner products of vectors and centroids.
 *
 * A vector's largest product is kept, and a bound on all its others. When only some centroids have moved, a vector is
 * compared with these; with the others only where its own centroid has moved away below the bound. The products that
 * are left out could not have changed anything: the result is that of computing all of them. */
#include <math.h>
#include <stdlib.h>

#include "compiler.h"
#include "heap.h"
#include "pool.h"

#define ROWS 6           /* vectors of a tile */
#define MOST_TILE 64     /* columns of the widest tile */
#define SPAN 96          /* vectors of an item: so often is every centroid read */
#define FAIR_PRODUCTS (1 << 20) /* multiplications per thread: below, waking a thread costs more than it saves */

enum failure { DONE, BAD_SHAPE, NO_MEMORY };

/* Everything 8 bytes wide, so that ctypes and every compiler lay it out alike. */
struct kmeans {
    const float *vectors; /* [heads, count, dim] */
    const int64_t *counts, *made; /* [heads]: vectors and clusters that are there */
    int64_t *labels;      /* [heads, count]; `clusters` for what is not there */
    float *centroids;     /* [heads, clusters, dim]; zeros for what is not there */
    int64_t heads, count, dim, clusters, iterations;
    int64_t threads, lanes;
};

/* Centroids by columns, so that a lane is a centroid: those that have moved first. */
struct packed {
    float *panels;
    int32_t *numbers; /* of the centroid in each column */
    int64_t count, room, dim, moved; /* room: whole panels; moved: the first so many have */
};

static inline int64_t whole_tiles(int64_t columns)
{
    return (columns + MOST_TILE - 1) / MOST_TILE * MOST_TILE;
}

struct nearest {
    float product, others; /* with its centroid; at least that with any other */
    int32_t number;
};

/* One head at work: as many vectors and clusters as it has. */
struct work {
    const struct kmeans *call;
    int64_t count, clusters;
    const float *vectors;
    float *centroids, *updated;
    struct packed packed;
    struct nearest *nearest;  /* [count] */
    int32_t *labels, *sizes;  /* [count] after refilling; [clusters] */
    uint8_t *moved;           /* [clusters] */
    struct entry *entries;    /* [count] */
    int64_t lanes;
};

static inline void consider(struct nearest *nearest, float product, int32_t number)
{
    if (product > nearest->product || (product == nearest->product && number < nearest->number)) {
        nearest->others = nearest->product;
        nearest->product = product;
        nearest->number = number;
    } else if (product > nearest->others)
        nearest->others = product;
}

#define LEVEL "kmeans_level.h"
#include "levels.h"

static void assign(const void *job, int64_t index)
{
    const struct work *work = job;
    const struct packed *packed = &work->packed;
    const int64_t dim = packed->dim, end = (index + 1) * SPAN < work->count ? (index + 1) * SPAN : work->count;
    for (int64_t first = index * SPAN; first < end; first += ROWS) {
        const int count = (int)(end - first < ROWS ? end - first : ROWS);
        struct nearest fresh[ROWS], *all[ROWS], *again[ROWS];
        const float *rows[ROWS], *rows_again[ROWS];
        int lost = 0;
        for (int row = 0; row < ROWS; row++) {
            const int64_t number = first + (row < count ? row : count - 1);
            const struct nearest *old = &work->nearest[number];
            const int stays = packed->moved < packed->count && !work->moved[old->number];
            /* Whose centroid stays looks for a better one only. */
            fresh[row] = stays ? *old : (struct nearest){-INFINITY, -INFINITY, old->number};
            rows[row] = work->vectors + number * dim;
            all[row] = &fresh[row];
        }
        OF_LEVEL(work->lanes, scan)(packed, rows, all, count, 0, packed->moved);
        for (int row = 0; row < count && packed->moved < packed->count; row++) {
            const struct nearest *old = &work->nearest[first + row];
            if (!work->moved[old->number])
                continue;
            if (fresh[row].product > old->others) {
                fresh[row].others = old->others > fresh[row].others ? old->others : fresh[row].others;
            } else {
                again[lost] = &fresh[row];
                rows_again[lost++] = rows[row];
            }
        }
        for (int row = lost; lost && row < ROWS; row++)
            rows_again[row] = rows_again[0];
        if (lost)
            OF_LEVEL(work->lanes, scan)(packed, rows_again, again, lost, packed->moved, packed->count);
        memcpy(&work->nearest[first], fresh, sizeof *fresh * (size_t)count);
    }
}

/* Columns of all centroids, those that have moved first. */
static void pack(struct work *work)
{
    struct packed *packed = &work->packed;
    packed->moved = 0;
    for (int64_t number = 0; number < packed->count; number++)
        if (work->moved[number])
            packed->numbers[packed->moved++] = (int32_t)number;
    for (int64_t number = 0, column = packed->moved; number < packed->count; number++)
        if (!work->moved[number])
            packed->numbers[column++] = (int32_t)number;
    OF_LEVEL(work->lanes, pack)(packed, work->centroids);
}

/* Every empty cluster in turn takes the vector that is farthest from its own centroid, from a cluster that has two. */
static void refill(struct work *work)
{
    const int64_t count = work->count, clusters = work->clusters;
    int64_t empty = 0;
    memset(work->sizes, 0, sizeof *work->sizes * (size_t)clusters);
    for (int64_t i = 0; i < count; i++)
        work->sizes[work->labels[i] = work->nearest[i].number]++;
    while (empty < clusters && work->sizes[empty])
        empty++;
    if (empty == clusters)
        return;
    for (int64_t i = 0; i < count; i++)
        work->entries[i] = (struct entry){key_of(-work->nearest[i].product, (int32_t)i), i};
    heapify(work->entries, count);
    for (int64_t left = count; left > 0 && empty < clusters; left--) {
        const int64_t vector = pop(work->entries, left).value;
        if (work->sizes[work->labels[vector]] < 2)
            continue;
        work->sizes[work->labels[vector]]--;
        work->sizes[work->labels[vector] = (int32_t)empty] = 1;
        while (empty < clusters && work->sizes[empty])
            empty++;
    }
}

/* Centroids become the normalised sums of their members, unless these are zero. Returns whether one has moved. */
static int average(struct work *work)
{
    const int64_t dim = work->call->dim, clusters = work->clusters;
    int any = 0;
    memset(work->updated, 0, sizeof *work->updated * (size_t)(clusters * dim));
    for (int64_t i = 0; i < work->count; i++) {
        float *sum = work->updated + work->labels[i] * dim;
        for (int64_t j = 0; j < dim; j++)
            sum[j] += work->vectors[i * dim + j];
    }
    for (int64_t number = 0; number < clusters; number++) {
        float *centroid = work->centroids + number * dim, *sum = work->updated + number * dim;
        double squares = 0.0;
        for (int64_t j = 0; j < dim; j++)
            squares += (double)sum[j] * sum[j];
        const float length = (float)sqrt(squares);
        if (length > 0.0f)
            for (int64_t j = 0; j < dim; j++)
                sum[j] /= length;
        work->moved[number] = length > 0.0f && memcmp(sum, centroid, sizeof *sum * (size_t)dim) != 0;
        if (work->moved[number])
            memcpy(centroid, sum, sizeof *sum * (size_t)dim);
        any |= work->moved[number];
    }
    return any;
}

/* Threads that work on one head: more would cost more than they save. */
static int64_t fair_threads(const struct kmeans *call, int64_t count, int64_t clusters)
{
    const int64_t fair = count * clusters * call->dim / FAIR_PRODUCTS;
    return fair < call->threads ? fair : call->threads;
}

static void run(struct work *work, int64_t head)
{
    const struct kmeans *call = work->call;
    const int64_t count = call->counts[head], clusters = call->made[head], dim = call->dim;
    int64_t *labels = call->labels + head * call->count;
    work->count = count;
    work->clusters = work->packed.count = clusters;
    work->packed.room = whole_tiles(clusters);
    work->vectors = call->vectors + head * call->count * dim;
    work->centroids = call->centroids + head * call->clusters * dim;
    memset(work->centroids, 0, sizeof *work->centroids * (size_t)(call->clusters * dim));
    for (int64_t number = 0; number < clusters; number++)
        memcpy(work->centroids + number * dim, work->vectors + number * count / clusters * dim,
               sizeof *work->vectors * (size_t)dim);
    memset(work->nearest, 0, sizeof *work->nearest * (size_t)count);
    memset(work->moved, 1, (size_t)clusters);
    for (int64_t iteration = 0, any = count > 0; iteration < call->iterations && any; iteration++) {
        pack(work);
        pool_run(assign, work, (count + SPAN - 1) / SPAN, fair_threads(call, count, clusters));
        refill(work);
        any = average(work);
    }
    for (int64_t i = 0; i < call->count; i++)
        labels[i] = i < count ? work->labels[i] : call->clusters;
}

/* Several heads at work, each with memory of its own: whoever is done takes the next. */
struct crew {
    struct work *works;
    int64_t *next;
};

static void run_heads(const void *job, int64_t index)
{
    const struct crew *crew = job;
    struct work *work = &crew->works[index];
    for (int64_t head; (head = __atomic_fetch_add(crew->next, 1, __ATOMIC_RELAXED)) < work->call->heads;)
        run(work, head);
}

/* Returns whether there was enough memory. */
static int equip(struct work *work, const struct kmeans *call)
{
    const int64_t count = call->count, clusters = call->clusters, dim = call->dim;
    *work = (struct work){.call = call, .lanes = machine_lanes(call->lanes), .packed = {.dim = dim}};
    work->packed.panels = aligned_alloc(64, sizeof(float) * (size_t)(whole_tiles(clusters) * dim));
    work->packed.numbers = malloc(sizeof *work->packed.numbers * (size_t)clusters);
    work->updated = malloc(sizeof *work->updated * (size_t)(clusters * dim));
    work->nearest = malloc(sizeof *work->nearest * (size_t)count);
    work->labels = malloc(sizeof *work->labels * (size_t)count);
    work->sizes = malloc(sizeof *work->sizes * (size_t)clusters);
    work->moved = malloc((size_t)clusters);
    work->entries = malloc(sizeof *work->entries * (size_t)count);
    return work->packed.panels && work->packed.numbers && work->updated && work->nearest && work->labels &&
           work->sizes && work->moved && work->entries;
}

static void discharge(struct work *work)
{
    free(work->packed.panels);
    free(work->packed.numbers);
    free(work->updated);
    free(work->nearest);
    free(work->labels);
    free(work->sizes);
    free(work->moved);
    free(work->entries);
}

EXPORT int64_t saccade_spherical_kmeans(const struct kmeans *call)
{
    const int64_t count = call->count, clusters = call->clusters;
    if (call->dim < 1 || clusters < 1 || clusters > count || count > INT32_MAX || call->iterations < 1)
        return BAD_SHAPE;
    /* Large heads one after the other, each by all threads; of small ones every thread takes some whole. */
    const int64_t inside = fair_threads(call, count, clusters);
    const int64_t fair = fair_threads(call, call->heads * count, clusters);
    const int64_t wanted = inside < call->threads && inside < call->heads ? fair : 1;
    const int64_t width = wanted > call->heads ? call->heads : wanted < 1 ? 1 : wanted;
    struct work *works = calloc((size_t)width, sizeof *works);
    int64_t next = 0;
    int enough = works != NULL;
    for (int64_t i = 0; enough && i < width; i++)
        enough = equip(&works[i], call);
    if (enough)
        pool_run(run_heads, &(struct crew){works, &next}, width, width);
    for (int64_t i = 0; works && i < width; i++)
        discharge(&works[i]);
    free(works);
    return enough ? DONE : NO_MEMORY;
}

/* Search of the cluster index (LycheeCluster, section 4.4): units by their bounds, their clusters, these clusters'
 * chunks until the budget is full, and the tokens of it all. One item is one KV head of one row.
 *
 * Heaps take the place of sorts: what a search keeps is a small part of what it ranks. */
#include <math.h>
#include <stdlib.h>

#include "bfloat16.h"
#include "compiler.h"
#include "heap.h"
#include "pool.h"

#define LEVEL "cluster_level.h"
#include "levels.h"

#define MOST_DIM 256
#define FAIR_BYTES (1 << 18) /* of centroids per thread: below, waking a thread costs more than it saves */

enum failure { DONE, BAD_TREE, BAD_SHAPE, NO_MEMORY };

/* Everything 8 bytes wide, so that ctypes and every compiler lay it out alike. Tables of heads are
 * [slots, held_heads, n]: the addresses are those of the first head that is searched. */
struct search {
    const void *q;                              /* [batch, query_heads, dim], bfloat16 if `narrow`, else float */
    const char *unit_centroids, *centroids;     /* units (clusters) vectors of dim numbers */
    const float *unit_radii, *radii;
    const int32_t *unit_offsets, *unit_tokens;  /* units + 1; units */
    const int32_t *numbers, *offsets;           /* clusters; clusters + 1 */
    const int32_t *members;                     /* chunks */
    const int32_t *edges, *ends;                /* [slots, edges_room]; [slots] */
    const int32_t *slots, *lengths;             /* [batch]; slots NULL: a row's is that of its own number */
    int32_t *ids, *counts;                      /* [batch, heads, width] and [batch, heads] */
    int64_t batch, query_heads, heads, held_heads, dim, bf16, narrow;
    int64_t units, clusters, chunks, edges_room;
    int64_t budget, sinks;
    int64_t most_clusters, most_chunks, width;  /* what the result has room for */
    int64_t threads, lanes;
};

struct search_plan {
    const struct search *call;
    int64_t lanes;
    int failure;
};

/* One head's part of the tables. */
struct tree {
    const char *unit_centroids, *centroids;
    const float *unit_radii, *radii;
    const int32_t *unit_offsets, *unit_tokens, *numbers, *offsets, *members, *edges;
};

struct query {
    _Alignas(64) float numbers[MOST_DIM];
    float norm;
    int64_t lanes;
};

static struct tree find_tree(const struct search *call, int64_t slot, int64_t head)
{
    const int64_t place = slot * call->held_heads + head, vector = call->dim * (call->bf16 ? 2 : 4);
    return (struct tree){
        .unit_centroids = call->unit_centroids + place * call->units * vector,
        .centroids = call->centroids + place * call->clusters * vector,
        .unit_radii = call->unit_radii + place * call->units,
        .radii = call->radii + place * call->clusters,
        .unit_offsets = call->unit_offsets + place * (call->units + 1),
        .unit_tokens = call->unit_tokens + place * call->units,
        .numbers = call->numbers + place * call->clusters,
        .offsets = call->offsets + place * (call->clusters + 1),
        .members = call->members + place * call->chunks,
        .edges = call->edges + slot * call->edges_room,
    };
}

/* The mean of the group's queries. */
static void pool_query(const struct search *call, int64_t row, int64_t head, struct query *query)
{
    const int64_t group = call->query_heads / call->heads, dim = call->dim;
    const int64_t first = (row * call->query_heads + head * group) * dim;
    float mean[MOST_DIM], squares = 0.0f;
    for (int64_t i = 0; i < dim; i++) {
        mean[i] = 0.0f;
        for (int64_t each = 0; each < group; each++)
            mean[i] += number_at(call->q, first + each * dim + i, call->narrow);
        mean[i] /= (float)group;
        squares += mean[i] * mean[i];
    }
    query->norm = sqrtf(squares);
    OF_LEVEL(query->lanes, order_query)(mean, dim, (int)call->bf16, query->numbers);
}

static void find_bounds(const struct search *call, const struct query *query, const char *vectors, const float *radii,
                        int64_t count, float *bounds)
{
    OF_LEVEL(query->lanes, bound_nodes)
    (query->numbers, query->norm, vectors, radii, count, call->dim, (int)call->bf16, bounds);
}

/* So many bytes into the second-level cache, from where they may lie: nothing is read here. */
static void fetch(const void *at, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)at + i, 0, 2);
}

static void fetch_clusters(const struct search *call, const struct tree *tree, int64_t first, int64_t count)
{
    const int64_t vector = call->dim * (call->bf16 ? 2 : 4);
    fetch(tree->centroids + first * vector, count * vector);
    fetch(tree->radii + first, count * 4);
    fetch(tree->numbers + first, count * 4);
    fetch(tree->offsets + first, count * 4);
}

/* Entries of the clusters of the kept units, at most `most_clusters`, as a heap. Returns how many, or -1 where memory is
 * short, -2 where the tree does not fit together. */
static int64_t find_candidates(const struct search *call, const struct tree *tree, const struct query *query,
                               struct entry **found)
{
    const int64_t largest = call->units > call->clusters ? call->units : call->clusters;
    const int64_t room = call->most_clusters < call->clusters ? call->most_clusters : call->clusters;
    struct entry *entries = malloc(sizeof *entries * (size_t)(call->units + room) + sizeof(float) * (size_t)largest);
    if (!entries)
        return -1;
    struct entry *units = entries + room;
    float *bounds = (float *)(units + call->units);
    *found = entries;
    find_bounds(call, query, tree->unit_centroids, tree->unit_radii, call->units, bounds);
    int64_t filled = 0;
    for (int64_t unit = 0; unit < call->units; unit++)
        if (tree->unit_tokens[unit] > 0)
            units[filled++] = (struct entry){key_of(bounds[unit], (int32_t)unit), unit};
    heapify(units, filled);
    /* First all units that are kept, of which everything is fetched: what they lead to lies here and there. */
    int64_t count = 0, tokens = 0, left = filled;
    for (; left > 0 && count < room && tokens < 4 * call->budget; left--) {
        const int64_t unit = pop(units, left).value, first = tree->unit_offsets[unit];
        const int64_t more = tree->unit_offsets[unit + 1] - first;
        if (first < 0 || more < 0 || first + more > call->clusters)
            return -2;
        fetch_clusters(call, tree, first, more);
        units[left - 1].value = unit;
        tokens += tree->unit_tokens[unit];
        count += more;
    }
    count = 0;
    for (int64_t kept = filled - 1; kept >= left; kept--) {
        const int64_t first = tree->unit_offsets[units[kept].value], vector = call->dim * (call->bf16 ? 2 : 4);
        int64_t more = tree->unit_offsets[units[kept].value + 1] - first;
        more = more < room - count ? more : room - count;
        find_bounds(call, query, tree->centroids + first * vector, tree->radii + first, more, bounds);
        for (int64_t i = 0; i < more; i++)
            entries[count++] = (struct entry){key_of(bounds[i], tree->numbers[first + i]), first + i};
        /* Their chunks, by numbers that have come meanwhile. */
        const int64_t from = tree->offsets[first], to = tree->offsets[first + more];
        if (from >= 0 && to <= call->chunks)
            fetch(tree->members + from, (to - from) * 4);
    }
    heapify(entries, count);
    return count;
}

/* Chunks of the best of `count` clusters until the next one does not fit into `room` tokens, as a heap of which the
 * first to pop is the first by position. Returns how many, or -2. */
static int64_t take_chunks(const struct search *call, const struct tree *tree, struct entry *clusters, int64_t count,
                           int64_t room, struct entry *chunks)
{
    int64_t taken = 0;
    for (; count > 0; count--) {
        const int64_t cluster = pop(clusters, count).value;
        const int64_t first = tree->offsets[cluster], stop = tree->offsets[cluster + 1];
        if (first < 0 || stop > call->chunks)
            return -2;
        for (int64_t i = first; i < stop; i++) {
            const int64_t chunk = tree->members[i];
            if (chunk < 0 || chunk >= call->edges_room - 1)
                return -2;
            room -= tree->edges[chunk + 1] - tree->edges[chunk];
            if (room < 0 || taken == call->most_chunks)
                goto full;
            chunks[taken++] = (struct entry){-chunk, chunk};
        }
    }
full:
    heapify(chunks, taken);
    return taken;
}

/* `size` neighbouring tokens behind `count` of a set; what it has no room for is only counted. */
static int64_t add_tokens(const struct search *call, int32_t *ids, int64_t count, int32_t first, int64_t size)
{
    const int64_t room = call->width - count, fits = size < room ? size : room;
    for (int64_t i = 0; i < fits; i++)
        ids[count + i] = first + (int32_t)i;
    return count + (size > 0 ? size : 0);
}

static int search_one(const struct search *call, int64_t lanes, int64_t row, int64_t head)
{
    const int64_t slot = call->slots ? call->slots[row] : row;
    const int32_t length = call->lengths[row], end = call->ends[slot];
    int32_t *ids = call->ids + (row * call->heads + head) * call->width;
    int64_t count = 0;
    if (end > 0 && length > call->budget) {
        const struct tree tree = find_tree(call, slot, head);
        struct query query = {.lanes = lanes};
        struct entry *clusters = NULL;
        pool_query(call, row, head, &query);
        const int64_t candidates = find_candidates(call, &tree, &query, &clusters);
        const int64_t most = call->most_chunks < call->chunks ? call->most_chunks : call->chunks;
        struct entry *chunks = malloc(sizeof *chunks * (size_t)(most + 1));
        int64_t taken = candidates < 0 ? candidates : -1;
        if (candidates >= 0 && chunks)
            taken = take_chunks(call, &tree, clusters, candidates, call->budget - call->sinks - (length - end), chunks);
        count = add_tokens(call, ids, count, 0, call->sinks);
        for (int64_t left = taken; left > 0; left--) {
            const int64_t chunk = pop(chunks, left).value;
            const int32_t first = tree.edges[chunk];
            count = add_tokens(call, ids, count, first, tree.edges[chunk + 1] - first);
        }
        count = add_tokens(call, ids, count, end, length - end);
        free(clusters);
        free(chunks);
        if (taken < 0)
            return taken == -1 ? NO_MEMORY : BAD_TREE;
    } else
        count = add_tokens(call, ids, count, 0, length);
    for (int64_t i = count; i < call->width; i++)
        ids[i] = -1;
    call->counts[row * call->heads + head] = (int32_t)count;
    return DONE;
}

static void search_head(const void *job, int64_t index)
{
    const struct search_plan *plan = job;
    const int failure = search_one(plan->call, plan->lanes, index / plan->call->heads, index % plan->call->heads);
    if (failure)
        __atomic_store_n(&((struct search_plan *)plan)->failure, failure, __ATOMIC_RELAXED);
}

EXPORT int64_t saccade_cluster_search(const struct search *call)
{
    if (call->dim < 1 || call->dim > MOST_DIM || call->dim % 16 || call->heads < 1 || call->query_heads % call->heads ||
        call->most_clusters < 1 || call->most_chunks < 1)
        return BAD_SHAPE;
    const int64_t nodes = call->units + (call->most_clusters < call->clusters ? call->most_clusters : call->clusters);
    const int64_t fair = call->batch * call->heads * nodes * call->dim * (call->bf16 ? 2 : 4) / FAIR_BYTES;
    const int64_t lanes = machine_lanes(call->lanes);
    struct search_plan plan = {call, lanes == 16 && call->dim % 32 ? 8 : lanes, DONE};
    pool_run(search_head, &plan, call->batch * call->heads, fair < call->threads ? fair : call->threads);
    return plan.failure;
}

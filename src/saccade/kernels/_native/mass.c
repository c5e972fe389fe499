/* Scores of tokens by the attention that the set of each should draw, behind the products of queries and means. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "compiler.h"
#include "pool.h"

#define WIDEST 16     /* lanes: rows of sets have room for whole vectors */
#define LOGS 256      /* sizes of which the logarithms are looked up */
#define SPAN 8192     /* tokens of an item */
#define FAIR_SETS (1 << 14) /* per thread: below, waking a thread costs more than it saves */

enum failure { DONE, BAD_SLOT, NO_MEMORY };

/* Everything 8 bytes wide, so that Python and every compiler lay it out alike; steps are in entries. */
struct mass {
    const float *products;          /* [batch, heads · group, places] */
    const float *q;                 /* [batch, heads · group, dim] */
    const int32_t *slots, *lengths; /* [batch] */
    const int32_t *sizes;           /* set j of slot s, head h: s · set_slot + h · set_head + j from here */
    const float *spreads;           /* alike */
    const void *labels;             /* `label_bytes` each, token p: s · label_slot + h · label_head + p from here */
    const int32_t *ends, *used;     /* [held] */
    float *scores;                  /* [batch, heads · (each ? group : 1), width] */
    double scale, spread;
    int64_t set_slot, set_head, label_slot, label_head, label_bytes, room; /* room: labels of a slot */
    int64_t held, batch, heads, group, dim, places, width;
    int64_t sinks, tokens, sets; /* as in MassSettings and MassTree */
    int64_t each, threads, lanes;
};

/* Those of one head of one slot. */
struct sets {
    const float *spreads, *logs;
    int64_t count;
    float scale;
};

struct plan {
    const struct mass *call;
    float *logs, *logits, *shares; /* of every KV head of the batch, its query heads if each is asked for */
    int64_t row, spans;            /* floats of a row of sets; items of a row of tokens */
    float known[LOGS];
};

#define LEVEL "mass_level.h"
#include "levels.h"

/* How far a row's scores are defined, and how far its tokens are in sets. */
static int64_t length_of(const struct mass *call, int64_t row)
{
    return call->lengths[row] < call->width ? call->lengths[row] : call->width;
}

static int64_t end_of(const struct mass *call, int64_t row, int64_t stop)
{
    const int64_t end = call->ends[call->slots[row]], indexed = end < call->room ? end : call->room;
    return indexed < stop ? indexed : stop;
}

/* One item: the sets of one KV head of one row. */
static void share_sets(const void *job, int64_t index)
{
    const struct plan *plan = job;
    const struct mass *call = plan->call;
    const int64_t row = index / call->heads, head = index % call->heads, slot = call->slots[row];
    const int64_t first = slot * call->set_slot + head * call->set_head, rows = call->each ? call->group : 1;
    const int64_t used = call->used[slot], count = used < call->places ? used : call->places;
    const int32_t *sizes = call->sizes + first;
    float *logs = plan->logs + index * plan->row, *shares = plan->shares + index * rows * plan->row;
    for (int64_t place = 0; place < plan->row; place++) {
        const int32_t size = place < count ? sizes[place] : 0;
        logs[place] = size <= 0 ? -INFINITY : size < LOGS ? plan->known[size] : logf((float)size);
    }
    memset(shares, 0, sizeof *shares * (size_t)(rows * plan->row));
    const struct sets sets = {call->spreads + first, logs, count, (float)call->scale};
    for (int64_t member = 0; member < call->group; member++) {
        const int64_t query = index * call->group + member;
        double squares = 0.0;
        for (int64_t i = 0; i < call->dim; i++)
            squares += (double)call->q[query * call->dim + i] * (double)call->q[query * call->dim + i];
        const float deviation = (float)(call->spread * sqrt(squares / (double)call->dim));
        OF_LEVEL(machine_lanes(call->lanes), add_shares)
        (&sets, call->products + query * call->places, deviation, plan->logits + index * plan->row,
         shares + (call->each ? member : 0) * plan->row);
    }
}

/* One item: a span of tokens of one row of scores. */
static void score_tokens(const void *job, int64_t index)
{
    const struct plan *plan = job;
    const struct mass *call = plan->call;
    const int64_t rows = call->each ? call->group : 1, line = index / plan->spans, row = line / rows / call->heads;
    const int64_t slot = call->slots[row], head = line / rows % call->heads, from = index % plan->spans * SPAN;
    const int64_t length = length_of(call, row), stop = from + SPAN < length ? from + SPAN : length;
    const int64_t end = end_of(call, row, stop), first = slot * call->label_slot + head * call->label_head;
    const int16_t *narrow = (const int16_t *)call->labels + first;
    const int32_t *wide = (const int32_t *)call->labels + first;
    float *scores = call->scores + line * call->width;
    int64_t at = from;
    for (; at < stop && at < call->sinks; at++)
        scores[at] = INFINITY;
    while (at < end) {
        const int64_t number = at / call->tokens, last = (number + 1) * call->tokens, to = last < end ? last : end;
        const float *shares = plan->shares + line * plan->row + number * call->sets;
        if (call->label_bytes == 2)
            for (; at < to; at++)
                scores[at] = shares[narrow[at]];
        else
            for (; at < to; at++)
                scores[at] = shares[wide[at]];
    }
    for (; at < stop; at++)
        scores[at] = INFINITY;
}

EXPORT int64_t saccade_token_mass(const struct mass *call)
{
    const int64_t pairs = call->batch * call->heads, lines = pairs * (call->each ? call->group : 1);
    for (int64_t row = 0; row < call->batch; row++)
        if (call->slots[row] < 0 || call->slots[row] >= call->held)
            return BAD_SLOT;
    struct plan plan = {.call = call, .row = (call->places + WIDEST - 1) / WIDEST * WIDEST};
    float *memory = malloc(sizeof *memory * (size_t)((2 * pairs + lines) * plan.row));
    if (memory == NULL)
        return NO_MEMORY;
    plan.logs = memory;
    plan.logits = memory + pairs * plan.row;
    plan.shares = plan.logits + pairs * plan.row;
    plan.spans = (call->width + SPAN - 1) / SPAN;
    for (int size = 0; size < LOGS; size++)
        plan.known[size] = logf((float)size);
    const int64_t sets = pairs * call->group * call->places / FAIR_SETS, tokens = lines * call->width / FAIR_SETS / 4;
    pool_run(share_sets, &plan, pairs, sets < call->threads ? sets : call->threads);
    pool_run(score_tokens, &plan, lines * plan.spans, tokens < call->threads ? tokens : call->threads);
    free(memory);
    return DONE;
}

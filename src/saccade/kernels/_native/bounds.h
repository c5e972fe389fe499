/* The arithmetic of page bounds: how large q·k can be at most on each page. */

/* Bounds of `count` pages for `rows` queries, given by their positive and negative parts, four pages at a time. Where
 * they are scattered, later ones are fetched meanwhile: one after the other the hardware does that better. */
INLINE void NAME(bound)(const struct bounds *call, const struct places *places, int count, const float *positive,
                        const float *negative, float *scores, int rows, int bf16, int scattered)
{
    const int pairs = (int)call->dim / PAIR, bytes = PAIR * (bf16 ? 2 : 4);
    for (int page = 0; page < count; page += 4) {
        const char *sides[2][4], *later[2][4];
        vec sums[4][MOST_ROWS];
        UNROLL for (int u = 0; u < 4; u++) {
            const int64_t number = page + u < count ? page + u : count - 1;
            const int64_t upper = scattered ? places->upper[page + u] : *places->upper + number * call->upper_page;
            const int64_t lower = scattered ? places->lower[page + u] : *places->lower + number * call->lower_page;
            sides[0][u] = call->upper + upper;
            sides[1][u] = call->lower + lower;
            later[0][u] = scattered ? call->upper + places->upper[page + AHEAD + u] : NULL;
            later[1][u] = scattered ? call->lower + places->lower[page + AHEAD + u] : NULL;
            UNROLL for (int row = 0; row < rows; row++)
                sums[u][row] = (vec){0};
        }
        for (int pair = 0; pair < pairs; pair++)
            UNROLL for (int side = 0; side < 2; side++) {
                const float *queries = (side ? negative : positive) + pair * PAIR;
                vec first[4], second[4];
                UNROLL for (int u = 0; u < 4; u++) {
                    NAME(load)(sides[side][u] + pair * bytes, bf16, &first[u], &second[u]);
                    if (scattered)
                        PREFETCH(later[side][u] + pair * bytes, bytes);
                }
                UNROLL for (int row = 0; row < rows; row++) {
                    vec even, odd;
                    memcpy(&even, queries + row * MOST_DIM, sizeof even);
                    memcpy(&odd, queries + row * MOST_DIM + LANES, sizeof odd);
                    UNROLL for (int u = 0; u < 4; u++) {
                        sums[u][row] += first[u] * even;
                        sums[u][row] += second[u] * odd;
                    }
                }
            }
        UNROLL for (int row = 0; row < rows; row++)
            NAME(add_up)(sums[0][row], sums[1][row], sums[2][row], sums[3][row], scores + row * BLOCK + page);
    }
}

typedef void (*NAME(bounder))(const struct bounds *, const struct places *, int, const float *, const float *, float *);

#define BOUNDER(rows, bf16)                                                                                            \
    INNER void NAME(bound_##rows##_##bf16)(const struct bounds *call, const struct places *places, int count,          \
                                            const float *positive, const float *negative, float *scores)               \
    {                                                                                                                  \
        if (!call->table)                                                                                              \
            NAME(bound)(call, places, count, positive, negative, scores, rows, bf16, 0);                               \
        else                                                                                                           \
            NAME(bound)(call, places, count, positive, negative, scores, rows, bf16, 1);                               \
    }
BOUNDER(1, 0) BOUNDER(2, 0) BOUNDER(1, 1) BOUNDER(2, 1)
#if MOST_ROWS == 4
BOUNDER(3, 0) BOUNDER(4, 0) BOUNDER(3, 1) BOUNDER(4, 1)
#define TABLE {{NAME(bound_1_0), NAME(bound_2_0), NAME(bound_3_0), NAME(bound_4_0)},                                   \
               {NAME(bound_1_1), NAME(bound_2_1), NAME(bound_3_1), NAME(bound_4_1)}}
#else
#define TABLE {{NAME(bound_1_0), NAME(bound_2_0)}, {NAME(bound_1_1), NAME(bound_2_1)}}
#endif
static const NAME(bounder) NAME(bounders)[2][MOST_ROWS] = TABLE;

/* One item: some pages of one KV head of one row. */
static void NAME(bound_pages)(const void *job, int64_t index)
{
    const struct bounds_plan *plan = job;
    const struct bounds *call = plan->call;
    const int64_t span = index % plan->spans, head = index / plan->spans % call->kv_heads;
    const int64_t row = index / plan->spans / call->kv_heads;
    const int64_t used = pages_used(call, row), from = span * plan->chunk;
    const int64_t to = from + plan->chunk < used ? from + plan->chunk : used;
    const int bf16 = (int)call->bf16, dim = (int)call->dim, group = (int)(call->query_heads / call->kv_heads);
    const int rows = call->pooling == MEAN ? 1 : group;
    float *out = call->scores + (row * call->kv_heads + head) * (call->pooling == EACH ? group : 1) * call->pages;
    _Alignas(64) float positive[MOST_GROUP][MOST_DIM], negative[MOST_GROUP][MOST_DIM];
    _Alignas(64) float scores[MOST_GROUP][BLOCK];
    struct places places;

    const float *q = call->q + (row * call->query_heads + head * group) * dim;
    for (int i = 0; i < dim; i++) {
        const int64_t at = NAME(place)(i, bf16);
        float mean = 0.0f;
        for (int each = 0; each < group; each++)
            mean += q[each * dim + i];
        mean /= (float)group;
        for (int each = 0; each < rows; each++) {
            const float number = call->pooling == MEAN ? mean : q[each * dim + i];
            /* Written so that NaN, which is neither, stays in both. */
            positive[each][at] = number < 0.0f ? 0.0f : number;
            negative[each][at] = number > 0.0f ? 0.0f : number;
        }
    }
    for (int64_t page = from; page < to; page += BLOCK) {
        const int count = (int)(to - page < BLOCK ? to - page : BLOCK);
        find_pages(call, row, head, page, count, &places);
        for (int each = 0, some; each < rows; each += some) {
            some = NAME(share)(rows - each);
            NAME(bounders)[bf16][some - 1](call, &places, count, positive[each], negative[each], scores[each]);
        }
        keep_scores(out + page, call->pages, scores[0], rows, count, call->pooling);
    }
}

#undef BOUNDER
#undef TABLE

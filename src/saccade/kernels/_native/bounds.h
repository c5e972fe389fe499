/* The arithmetic of page bounds: how large q·k can be at most on each page. */

/* Where the numbers of four pages from `page` on lie and, to be asked for twice, those of later ones: upper bounds, then
 * lower. Places after the count are the last page's. */
INLINE void NAME(find_sides)(const struct bounds *call, const struct places *places, int page, int count,
                             int scattered, int fetch, const char *sides[2][4], const char *later[2][2][4])
{
    UNROLL for (int u = 0; u < 4; u++) {
        const int64_t number = page + u < count ? page + u : count - 1;
        const int64_t upper = scattered ? places->upper[page + u] : *places->upper + number * call->upper_page;
        const int64_t lower = scattered ? places->lower[page + u] : *places->lower + number * call->lower_page;
        sides[0][u] = call->upper + upper;
        sides[1][u] = call->lower + lower;
        UNROLL for (int far = 0; fetch && far < 2; far++) {
            const int ahead = far ? AHEAD : AHEAD / 2;
            later[far][0][u] = scattered ? call->upper + places->upper[page + ahead + u]
                                         : sides[0][u] + ahead * call->upper_page;
            later[far][1][u] = scattered ? call->lower + places->lower[page + ahead + u]
                                         : sides[1][u] + ahead * call->lower_page;
        }
    }
}

/* Bounds of `count` pages for `rows` queries, given by their positive and negative parts, four pages at a time. */
INLINE void NAME(bound)(const struct bounds *call, const struct places *places, int count, const void *positive,
                        const void *negative, float *scores, int rows, int bf16, int scattered, int fetch)
{
    const int pairs = (int)call->dim / PAIR, bytes = PAIR * (bf16 ? 2 : 4);
    for (int page = 0; page < count; page += 4) {
        const char *sides[2][4], *later[2][2][4];
        vec sums[4][MOST_ROWS];
        NAME(find_sides)(call, places, page, count, scattered, fetch, sides, later);
        UNROLL for (int u = 0; u < 4; u++)
            UNROLL for (int row = 0; row < rows; row++)
                sums[u][row] = (vec){0};
        for (int pair = 0; pair < pairs; pair++)
            UNROLL for (int side = 0; side < 2; side++) {
                const float *queries = (const float *)(side ? negative : positive) + pair * PAIR;
                vec first[4], second[4];
                UNROLL for (int u = 0; u < 4; u++) {
                    NAME(load)(sides[side][u] + pair * bytes, bf16, &first[u], &second[u]);
                    UNROLL for (int far = 0; fetch && far < 2; far++)
                        PREFETCH(later[far][side][u] + pair * bytes, bytes);
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

#ifdef DOT
/* The same by products of bfloat16 pairs, for queries that are bfloat16 numbers. */
INLINE void NAME(dot_bound)(const struct bounds *call, const struct places *places, int count, const void *positive,
                            const void *negative, float *scores, int rows, int scattered, int fetch)
{
    const int pairs = (int)call->dim / PAIR, bytes = 2 * PAIR;
    for (int page = 0; page < count; page += 4) {
        const char *sides[2][4], *later[2][2][4];
        __m512 sums[4][MOST_ROWS];
        NAME(find_sides)(call, places, page, count, scattered, fetch, sides, later);
        UNROLL for (int u = 0; u < 4; u++)
            UNROLL for (int row = 0; row < rows; row++)
                sums[u][row] = _mm512_setzero_ps();
        for (int pair = 0; pair < pairs; pair++)
            UNROLL for (int side = 0; side < 2; side++) {
                const uint16_t *queries = (const uint16_t *)(side ? negative : positive) + pair * PAIR;
                __m512i bound[4];
                UNROLL for (int u = 0; u < 4; u++) {
                    bound[u] = _mm512_loadu_si512(sides[side][u] + pair * bytes);
                    UNROLL for (int far = 0; fetch && far < 2; far++)
                        PREFETCH(later[far][side][u] + pair * bytes, bytes);
                }
                UNROLL for (int row = 0; row < rows; row++) {
                    const __m512i query = _mm512_load_si512(queries + row * MOST_DIM);
                    UNROLL for (int u = 0; u < 4; u++)
                        sums[u][row] = _mm512_dpbf16_ps(sums[u][row], (__m512bh)bound[u], (__m512bh)query);
                }
            }
        UNROLL for (int row = 0; row < rows; row++)
            NAME(add_up)((vec)sums[0][row], (vec)sums[1][row], (vec)sums[2][row], (vec)sums[3][row],
                         scores + row * BLOCK + page);
    }
}
#endif

typedef void (*NAME(bounder))(const struct bounds *, const struct places *, int, const void *, const void *, float *);

/* Scattered pages are fetched; of neighbours those longer than two cache lines and those not foreseen, as in reader.h */
#define BOUNDER(name, op, ...)                                                                                         \
    INNER void NAME(name)(const struct bounds *call, const struct places *places, int count, const void *positive,     \
                          const void *negative, float *scores)                                                         \
    {                                                                                                                  \
        if (call->table)                                                                                               \
            NAME(op)(call, places, count, positive, negative, scores, __VA_ARGS__, 1, 1);                              \
        else if ((call->bf16 && call->dim > 64) || !FORESEEN)                                                          \
            NAME(op)(call, places, count, positive, negative, scores, __VA_ARGS__, 0, 1);                              \
        else                                                                                                           \
            NAME(op)(call, places, count, positive, negative, scores, __VA_ARGS__, 0, 0);                              \
    }
BOUNDER(bound_1_0, bound, 1, 0) BOUNDER(bound_2_0, bound, 2, 0)
BOUNDER(bound_1_1, bound, 1, 1) BOUNDER(bound_2_1, bound, 2, 1)
#if MOST_ROWS == 4
BOUNDER(bound_3_0, bound, 3, 0) BOUNDER(bound_4_0, bound, 4, 0)
BOUNDER(bound_3_1, bound, 3, 1) BOUNDER(bound_4_1, bound, 4, 1)
#define TABLE {{NAME(bound_1_0), NAME(bound_2_0), NAME(bound_3_0), NAME(bound_4_0)},                                   \
               {NAME(bound_1_1), NAME(bound_2_1), NAME(bound_3_1), NAME(bound_4_1)}}
#else
#define TABLE {{NAME(bound_1_0), NAME(bound_2_0)}, {NAME(bound_1_1), NAME(bound_2_1)}}
#endif
static const NAME(bounder) NAME(bounders)[2][MOST_ROWS] = TABLE;
#ifdef DOT
BOUNDER(dot_bound_1, dot_bound, 1) BOUNDER(dot_bound_2, dot_bound, 2)
BOUNDER(dot_bound_3, dot_bound, 3) BOUNDER(dot_bound_4, dot_bound, 4)
static const NAME(bounder) NAME(dot_bounders)[MOST_ROWS] = {NAME(dot_bound_1), NAME(dot_bound_2), NAME(dot_bound_3),
                                                            NAME(dot_bound_4)};
#endif

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
#ifdef DOT
    _Alignas(64) uint16_t words[2][MOST_GROUP][MOST_DIM];
    uint32_t lost = 0;
#endif

    const int64_t first = (row * call->query_heads + head * group) * dim;
    for (int i = 0; i < dim; i++) {
        const int64_t at = NAME(place)(i, bf16);
        float mean = 0.0f;
        for (int each = 0; each < group; each++)
            mean += number_at(call->q, first + each * dim + i, call->narrow);
        mean /= (float)group;
        for (int each = 0; each < rows; each++) {
            const float number =
                call->pooling == MEAN ? mean : number_at(call->q, first + each * dim + i, call->narrow);
            /* Written so that NaN, which is neither, stays in both. */
            positive[each][at] = number < 0.0f ? 0.0f : number;
            negative[each][at] = number > 0.0f ? 0.0f : number;
#ifdef DOT
            uint32_t bits;
            memcpy(&bits, &number, sizeof bits);
            lost |= bits;
            words[0][each][i] = (uint16_t)(number < 0.0f ? 0 : bits >> 16);
            words[1][each][i] = (uint16_t)(number > 0.0f ? 0 : bits >> 16);
#endif
        }
    }
#ifdef DOT
    const int dot = bf16 && !(lost & 0xffff);
#endif
    for (int64_t page = from; page < to; page += BLOCK) {
        const int count = (int)(to - page < BLOCK ? to - page : BLOCK);
        find_pages(call, row, head, page, count, &places);
        for (int each = 0, some; each < rows; each += some) {
            some = NAME(share)(rows - each);
#ifdef DOT
            if (dot) {
                NAME(dot_bounders)[some - 1](call, &places, count, words[0][each], words[1][each], scores[each]);
                continue;
            }
#endif
            NAME(bounders)[bf16][some - 1](call, &places, count, positive[each], negative[each], scores[each]);
        }
        keep_scores(out + page, call->pages, scores[0], rows, count, call->pooling);
    }
}

#undef BOUNDER
#undef TABLE

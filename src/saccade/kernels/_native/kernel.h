/* The arithmetic of one work item, written once for vectors of LANES floats.
 *
 * attention.c includes this file once per instruction set, with LANES, MOST_ROWS and NAME defined and the compiler's
 * target switched. (Function multi-versioning would be shorter, but GCC splits generic vectors for the base target
 * before it clones.)
 *
 * Numbers come in pairs of vectors, 2 · LANES at a time. A pair of bfloat16 is read as LANES words of 32 bits, whose
 * halves become float32 by a shift and a mask: half the work of widening, but the first vector of the pair holds the
 * even numbers and the second the odd ones. Queries are brought into that order before, outputs out of it after. */

typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(uvec) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ivec) __attribute__((vector_size(4 * LANES)));

#define vec NAME(vec)
#define uvec NAME(uvec)
#define ivec NAME(ivec)
#define PAIR (2 * LANES)

/* Four lanes at a time: the low halves of a and b interleaved; the high ones; their low and high pairs side by side. */
#if LANES == 16
#define LOW(a, b) SHUFFLE(ivec, a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(a, b) SHUFFLE(ivec, a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW2(a, b) SHUFFLE(ivec, a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) SHUFFLE(ivec, a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define BY8(a) SHUFFLE(ivec, a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define BY4(a) SHUFFLE(ivec, a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define FOLD(a) (a += BY8(a), a += BY4(a))
#elif LANES == 8
#define LOW(a, b) SHUFFLE(ivec, a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) SHUFFLE(ivec, a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW2(a, b) SHUFFLE(ivec, a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH2(a, b) SHUFFLE(ivec, a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define BY4(a) SHUFFLE(ivec, a, a, 4, 5, 6, 7, 0, 1, 2, 3)
#define FOLD(a) (a += BY4(a))
#else
#define LOW(a, b) SHUFFLE(ivec, a, b, 0, 4, 1, 5)
#define HIGH(a, b) SHUFFLE(ivec, a, b, 2, 6, 3, 7)
#define LOW2(a, b) SHUFFLE(ivec, a, b, 0, 1, 4, 5)
#define HIGH2(a, b) SHUFFLE(ivec, a, b, 2, 3, 6, 7)
#define FOLD(a) ((void)0)
#endif

INLINE void NAME(load)(const char *at, int bf16, vec *first, vec *second)
{
    if (bf16) {
        uvec words;
        memcpy(&words, at, sizeof words);
        *first = (vec)(words << 16);
        *second = (vec)(words & 0xffff0000u);
    } else {
        memcpy(first, at, sizeof *first);
        memcpy(second, at + sizeof *first, sizeof *second);
    }
}

/* exp for arguments up to 0 (and a rounding error above): 0 below the smallest normal number; relative error 1e-7. */
INLINE vec NAME(exp)(vec x)
{
    const float round = 12582912.0f; /* 1.5 · 2^23: adding it leaves the nearest integer in the low bits */
    vec shifted = x * 1.44269504f + round;
    vec whole = shifted - round;
    vec rest = x - whole * 0.693359375f + whole * 2.12194440e-4f; /* ln 2 in two parts: the first product is exact */
    /* exp(rest) on |rest| <= ln(2) / 2 to 3e-9, by weighted least squares. */
    vec series = rest * 1.38144672e-3f + 8.36878084e-3f;
    series = series * rest + 4.16683927e-2f;
    series = series * rest + 1.66665196e-1f;
    series = series * rest + 4.99999940e-1f;
    series = series * rest * rest + rest + 1.0f;
    uvec power = ((uvec)shifted << 23) + (uvec)series;
    uvec absent = (uvec)(x < -87.3365f);
    return (vec)(power & ~absent);
}

/* Raw scores of `rows` queries against the block's keys, four tokens at a time; meanwhile the rows at `places`
 * from `ahead` are fetched (NULL: none). */
INLINE void NAME(score)(const struct block *block, const struct call *call, const char *ahead, const int64_t *places,
                        const float *queries, float *scores, int rows, int bf16)
{
    const int pairs = (int)call->dim / PAIR, bytes = PAIR * (bf16 ? 2 : 4);
    for (int token = 0; token < block->count; token += 4) {
        const char *keys[4], *later[4];
        vec sums[4][MOST_ROWS];
        UNROLL for (int u = 0; u < 4; u++) {
            keys[u] = call->k + block->k[token + u];
            later[u] = ahead ? ahead + places[token + u] : NULL;
            UNROLL for (int row = 0; row < rows; row++)
                sums[u][row] = (vec){0};
        }
        for (int pair = 0; pair < pairs; pair++) {
            vec first[4], second[4];
            UNROLL for (int u = 0; u < 4; u++) {
                NAME(load)(keys[u] + pair * bytes, bf16, &first[u], &second[u]);
                if (ahead)
                    PREFETCH(later[u] + pair * bytes, bytes);
            }
            UNROLL for (int row = 0; row < rows; row++) {
                vec even, odd;
                memcpy(&even, queries + row * MOST_DIM + pair * PAIR, sizeof even);
                memcpy(&odd, queries + row * MOST_DIM + pair * PAIR + LANES, sizeof odd);
                UNROLL for (int u = 0; u < 4; u++) {
                    sums[u][row] += first[u] * even;
                    sums[u][row] += second[u] * odd;
                }
            }
        }
        /* Four vectors become four sums by adding interleaved halves, three operations per sum instead of eight. */
        UNROLL for (int row = 0; row < rows; row++) {
            vec a = LOW(sums[0][row], sums[1][row]) + HIGH(sums[0][row], sums[1][row]);
            vec b = LOW(sums[2][row], sums[3][row]) + HIGH(sums[2][row], sums[3][row]);
            vec all = LOW2(a, b) + HIGH2(a, b);
            FOLD(all);
            memcpy(scores + row * BLOCK + token, &all, 16);
        }
    }
}

/* Add the block's values, weighted, to `pairs` pairs of columns of `rows` sums; meanwhile the keys of
 * `next` are fetched (NULL: none). */
INLINE void NAME(mix)(const struct block *block, const struct block *next, const struct call *call, int column,
                      const float *weights, float *sums, int rows, int pairs, int bf16)
{
    const int bytes = PAIR * (bf16 ? 2 : 4), offset = column / PAIR * bytes;
    const char *values = call->v + offset, *keys = call->k + offset;
    vec total[MOST_ROWS][4];
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int i = 0; i < 2 * pairs; i++)
            memcpy(&total[row][i], sums + row * MOST_DIM + column + i * LANES, sizeof(vec));
    for (int token = 0; token < block->count; token++) {
        UNROLL for (int pair = 0; pair < pairs; pair++) {
            vec first, second;
            NAME(load)(values + block->v[token] + pair * bytes, bf16, &first, &second);
            if (next)
                PREFETCH(keys + next->k[token] + pair * bytes, bytes);
            UNROLL for (int row = 0; row < rows; row++) {
                total[row][2 * pair] += first * weights[row * BLOCK + token];
                total[row][2 * pair + 1] += second * weights[row * BLOCK + token];
            }
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int i = 0; i < 2 * pairs; i++)
            memcpy(sums + row * MOST_DIM + column + i * LANES, &total[row][i], sizeof(vec));
}

typedef void (*NAME(scorer))(const struct block *, const struct call *, const char *, const int64_t *, const float *,
                             float *);
typedef void (*NAME(mixer))(const struct block *, const struct block *, const struct call *, const float *, float *);

#define SCORER(rows, bf16)                                                                                             \
    static void NAME(score_##rows##_##bf16)(const struct block *block, const struct call *call, const char *ahead,     \
                                            const int64_t *places, const float *queries, float *scores)                \
    {                                                                                                                  \
        NAME(score)(block, call, ahead, places, queries, scores, rows, bf16);                                          \
    }
#define MIXER(rows, bf16)                                                                                              \
    static void NAME(mix_##rows##_##bf16)(const struct block *block, const struct block *next,                         \
                                          const struct call *call, const float *weights, float *sums)                  \
    {                                                                                                                  \
        int column = 0, dim = (int)call->dim;                                                                          \
        for (; column + 2 * PAIR <= dim; column += 2 * PAIR)                                                           \
            NAME(mix)(block, next, call, column, weights, sums, rows, 2, bf16);                                        \
        if (column < dim)                                                                                              \
            NAME(mix)(block, next, call, column, weights, sums, rows, 1, bf16);                                        \
    }
#define BOTH(rows, bf16) SCORER(rows, bf16) MIXER(rows, bf16)
BOTH(1, 0) BOTH(2, 0) BOTH(1, 1) BOTH(2, 1)
#if MOST_ROWS == 4
BOTH(3, 0) BOTH(4, 0) BOTH(3, 1) BOTH(4, 1)
#define TABLE(op) {{NAME(op##_1_0), NAME(op##_2_0), NAME(op##_3_0), NAME(op##_4_0)},                                   \
                   {NAME(op##_1_1), NAME(op##_2_1), NAME(op##_3_1), NAME(op##_4_1)}}
#else
#define TABLE(op) {{NAME(op##_1_0), NAME(op##_2_0)}, {NAME(op##_1_1), NAME(op##_2_1)}}
#endif
static const NAME(scorer) NAME(scorers)[2][MOST_ROWS] = TABLE(score);
static const NAME(mixer) NAME(mixers)[2][MOST_ROWS] = TABLE(mix);

/* How many of the remaining rows to do at once: evenly split, at most MOST_ROWS. */
static int NAME(share)(int rest)
{
    int passes = (rest + MOST_ROWS - 1) / MOST_ROWS;
    return (rest + passes - 1) / passes;
}

/* Turn one row's raw scores into weights against the running maximum; sums made against an older one are scaled. */
static void NAME(soften)(float *scores, int count, float scale, float *max, vec *total, float *sums, int dim)
{
    vec highest = (vec){0} - INFINITY;
    for (int i = 0; i < count; i++)
        scores[i] *= scale;
    for (int i = count; i % LANES; i++)
        scores[i] = -INFINITY;
    for (int i = 0; i < count; i += LANES) {
        vec logits;
        memcpy(&logits, scores + i, sizeof logits);
        ivec above = logits > highest;
        highest = (vec)(((ivec)logits & above) | ((ivec)highest & ~above));
    }
    float peak = *max;
    UNROLL for (int lane = 0; lane < LANES; lane++)
        peak = highest[lane] > peak ? highest[lane] : peak;
    if (peak > *max) {
        vec factor = NAME(exp)((vec){0} + (*max - peak));
        *total *= factor;
        for (int column = 0; column < dim; column++)
            sums[column] *= factor[0];
        *max = peak;
    }
    if (peak == -INFINITY)
        peak = 0.0f; /* every score so far is -inf: the difference would be NaN where the weight is 0 */
    for (int i = 0; i < count; i += LANES) {
        vec weights;
        memcpy(&weights, scores + i, sizeof weights);
        weights = NAME(exp)(weights - peak);
        *total += weights;
        memcpy(scores + i, &weights, sizeof weights);
    }
}

static int64_t NAME(place)(int64_t index, int bf16)
{
    /* Where number `index` of a row stands among pairs of vectors. */
    int64_t inside = index % PAIR;
    return bf16 ? index - inside + inside / 2 + inside % 2 * LANES : index;
}

/* One work item: part of the tokens of one KV head (or query head) of one row. */
static void NAME(attend)(const void *job, int64_t index)
{
    const struct plan *plan = job;
    const struct call *call = plan->call;
    const int bf16 = (int)call->bf16, dim = (int)call->dim, group = plan->group;
    /* Rows of queries: the group's own, where they are wanted, and their mean. Of these `mixed` attend. */
    const int own = call->out || call->pooling != MEAN ? group : 0, rows = own + (call->pooling == MEAN);
    const int mixed = call->out ? group : 0;
    _Alignas(64) float queries[MOST_GROUP + 1][MOST_DIM], sums[MOST_GROUP][MOST_DIM];
    _Alignas(64) float scores[MOST_GROUP + 1][BLOCK];
    vec total[MOST_GROUP];
    float max[MOST_GROUP];
    struct block blocks[2] = {{0}}, *block = &blocks[0], *next = &blocks[1];
    struct reader reader;

    open_item(&reader, plan, index);
    const float *q = call->q + (reader.row * call->query_heads + reader.head * group) * dim;
    for (int i = 0; i < dim; i++) {
        int64_t to = NAME(place)(i, bf16);
        float mean = 0.0f;
        for (int row = 0; row < group; row++) {
            if (row < own)
                queries[row][to] = q[row * dim + i];
            mean += q[row * dim + i];
        }
        if (rows > own)
            queries[own][to] = mean / (float)group;
    }
    for (int row = 0; row < group; row++) {
        max[row] = -INFINITY;
        total[row] = (vec){0};
        memset(sums[row], 0, sizeof(float) * (size_t)dim);
    }

    read_block(&reader, block);
    while (block->count) {
        read_block(&reader, next);
        /* The keys of this block were fetched during the last one. Now come its values, or the next keys. */
        const char *ahead = !plan->fetch ? NULL : call->out ? call->v : call->k;
        const int64_t *places = call->out ? block->v : next->k;
        for (int row = 0, some; row < rows; row += some) {
            some = NAME(share)(rows - row);
            NAME(scorers)[bf16][some - 1](block, call, ahead, places, queries[row], scores[row]);
        }
        if (call->scores)
            keep_scores(&reader, block, scores[0]);
        for (int row = 0; row < mixed; row++)
            NAME(soften)(scores[row], block->count, (float)call->scale, &max[row], &total[row], sums[row], dim);
        for (int row = 0, some; row < mixed; row += some) {
            some = NAME(share)(mixed - row);
            NAME(mixers)[bf16][some - 1](block, plan->fetch ? next : NULL, call, scores[row], sums[row]);
        }
        struct block *done = block;
        block = next;
        next = done;
    }
    if (!call->out)
        return;
    float *partial = plan->partials + index * group * (dim + 2);
    for (int row = 0; row < group; row++, partial += dim + 2) {
        partial[0] = max[row];
        partial[1] = 0.0f;
        for (int lane = 0; lane < LANES; lane++)
            partial[1] += total[row][lane];
        for (int i = 0; i < dim; i++)
            partial[2 + i] = sums[row][NAME(place)(i, bf16)];
    }
}

static void NAME(exps)(float *numbers, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES) {
        vec some;
        memcpy(&some, numbers + i, sizeof some);
        some = NAME(exp)(some);
        memcpy(numbers + i, &some, sizeof some);
    }
}

#undef vec
#undef uvec
#undef ivec
#undef PAIR
#undef LOW
#undef HIGH
#undef LOW2
#undef HIGH2
#undef BY8
#undef BY4
#undef FOLD
#undef SCORER
#undef MIXER
#undef BOTH
#undef TABLE
#undef LANES
#undef MOST_ROWS
#undef NAME

/* The arithmetic of one item of attention. */

/* Raw scores of `rows` queries against the block's keys, four tokens at a time; meanwhile `ahead` is fetched. */
INLINE void NAME(score)(const struct block *block, const struct call *call, const struct ahead *ahead,
                        const float *queries, float *scores, int rows, int bf16)
{
    const int pairs = (int)call->dim / PAIR, bytes = PAIR * (bf16 ? 2 : 4);
    for (int token = 0; token < block->count; token += 4) {
        const char *keys[4];
        vec sums[4][MOST_ROWS];
        UNROLL for (int u = 0; u < 4; u++) {
            keys[u] = call->k + block->k[token + u];
            UNROLL for (int row = 0; row < rows; row++)
                sums[u][row] = (vec){0};
        }
        for (int pair = 0; pair < pairs; pair++) {
            vec first[4], second[4];
            UNROLL for (int u = 0; u < 4; u++) {
                NAME(load)(keys[u] + pair * bytes, bf16, &first[u], &second[u]);
                FETCH(ahead, token + u, pair * bytes, bytes);
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
        UNROLL for (int row = 0; row < rows; row++)
            NAME(add_up)(sums[0][row], sums[1][row], sums[2][row], sums[3][row], scores + row * BLOCK + token);
    }
}

/* Where the keys of a block's four groups from `group` on lie, and of the next four; sums of nothing yet. */
INLINE void NAME(find_groups)(const struct block *block, const struct call *call, int group, const char *keys[4],
                              const char *later[4], vec sums[4][MOST_ROWS], int rows)
{
    UNROLL for (int u = 0; u < 4; u++) {
        keys[u] = call->k + block->k[group + u];
        later[u] = call->k + block->k[group + 4 + u];
        UNROLL for (int row = 0; row < rows; row++)
            sums[u][row] = (vec){0};
    }
}

/* The scores of a block's four groups from `group` on, a token per lane. */
INLINE void NAME(keep_lanes)(const struct block *block, int group, vec sums[4][MOST_ROWS], float *scores, int rows)
{
    UNROLL for (int u = 0; u < 4; u++) {
        const int first = block->first[group + u], count = block->first[group + u + 1] - first;
        UNROLL for (int row = 0; row < rows; row++) {
            float lanes[LANES];
            memcpy(lanes, &sums[u][row], sizeof lanes);
            if (count == LANES)
                memcpy(scores + row * BLOCK + first, lanes, sizeof lanes);
            else
                for (int token = first; token < first + count; token++) {
                    SCALAR; /* a few tokens: as vectors, a thousand copies of this loop were four fifths of the library */
                    scores[row * BLOCK + token] = lanes[block->lane[token]];
                }
        }
    }
}

/* The same where keys are columns: four groups of tokens at a time, one token per lane. Meanwhile the next four groups
 * are fetched, and what `ahead` names first: a little with every number, as all at once holds up the keys. */
INLINE void NAME(score_columns)(const struct block *block, const struct call *call, const struct ahead *ahead,
                                const float *queries, float *scores, int rows, int bf16)
{
    const int dim = (int)call->dim, bytes = LANES * (bf16 ? 2 : 4);
    for (int group = 0; group < block->groups; group += 4) {
        const char *keys[4], *later[4];
        vec sums[4][MOST_ROWS];
        NAME(find_groups)(block, call, group, keys, later, sums, rows);
        const int from = block->first[group], to = block->first[group + 4];
        const int part = call->out ? (to - from) * (bf16 ? 2 : 4) : 0; /* bytes of a token's row each time */
        int token = from, done = 0;
        for (int i = 0; i < dim; i++) {
            if (ahead) {
                for (int line = 0; line < part; line += 64)
                    PREFETCH(ahead->near + ahead->near_places[token] + done + line, 64);
                if (++token == to) {
                    token = from;
                    done += part;
                }
            }
            UNROLL for (int u = 0; u < 4; u++) {
                const vec key = NAME(load_lanes)(keys[u] + i * call->k_dim, bf16);
                if (ahead)
                    PREFETCH(later[u] + i * call->k_dim, bytes);
                UNROLL for (int row = 0; row < rows; row++)
                    sums[u][row] += key * queries[row * MOST_DIM + i];
            }
        }
        NAME(keep_lanes)(block, group, sums, scores, rows);
    }
}

/* Add the block's values, weighted, to `pairs` pairs of columns of `rows` sums; meanwhile `ahead` is fetched. */
INLINE void NAME(mix)(const struct block *block, const struct ahead *ahead, const struct call *call, int column,
                      const float *weights, float *sums, int rows, int pairs, int bf16)
{
    const int bytes = PAIR * (bf16 ? 2 : 4), offset = column / PAIR * bytes;
    const char *values = call->v + offset;
    vec total[MOST_ROWS][4];
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int i = 0; i < 2 * pairs; i++)
            memcpy(&total[row][i], sums + row * MOST_DIM + column + i * LANES, sizeof(vec));
    for (int token = 0; token < block->count; token++) {
        UNROLL for (int pair = 0; pair < pairs; pair++) {
            vec first, second;
            NAME(load)(values + block->v[token] + pair * bytes, bf16, &first, &second);
            FETCH(ahead, token, offset + pair * bytes, bytes);
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

#ifdef DOT
/* `score` by products of bfloat16 pairs, for queries that are bfloat16 numbers: the products are exact in float32. */
INLINE void NAME(dot_score)(const struct block *block, const struct call *call, const struct ahead *ahead,
                            const uint16_t *queries, float *scores, int rows)
{
    const int pairs = (int)call->dim / PAIR, bytes = 2 * PAIR;
    for (int token = 0; token < block->count; token += 4) {
        const char *keys[4];
        __m512 sums[4][MOST_ROWS];
        UNROLL for (int u = 0; u < 4; u++) {
            keys[u] = call->k + block->k[token + u];
            UNROLL for (int row = 0; row < rows; row++)
                sums[u][row] = _mm512_setzero_ps();
        }
        for (int pair = 0; pair < pairs; pair++) {
            __m512i key[4];
            UNROLL for (int u = 0; u < 4; u++) {
                key[u] = _mm512_loadu_si512(keys[u] + pair * bytes);
                FETCH(ahead, token + u, pair * bytes, bytes);
            }
            UNROLL for (int row = 0; row < rows; row++) {
                const __m512i query = _mm512_load_si512(queries + row * MOST_DIM + pair * PAIR);
                UNROLL for (int u = 0; u < 4; u++)
                    sums[u][row] = _mm512_dpbf16_ps(sums[u][row], (__m512bh)key[u], (__m512bh)query);
            }
        }
        UNROLL for (int row = 0; row < rows; row++)
            NAME(add_up)((vec)sums[0][row], (vec)sums[1][row], (vec)sums[2][row], (vec)sums[3][row],
                         scores + row * BLOCK + token);
    }
}

/* `mix` two tokens at a time: their numbers interleaved, times their weights in bfloat16. */
INLINE void NAME(dot_mix)(const struct block *block, const struct ahead *ahead, const struct call *call, int column,
                          const uint16_t *weights, float *sums, int rows, int pairs)
{
    const int bytes = 2 * PAIR, offset = column * 2;
    const char *values = call->v + offset;
    __m512 total[MOST_ROWS][4];
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int i = 0; i < 2 * pairs; i++)
            total[row][i] = _mm512_load_ps(sums + row * MOST_DIM + column + i * LANES);
    for (int token = 0; token < block->count; token += 2) {
        const int both = token + 1 < block->count;
        UNROLL for (int pair = 0; pair < pairs; pair++) {
            const __m512i one = _mm512_loadu_si512(values + block->v[token] + pair * bytes);
            const __m512i two =
                both ? _mm512_loadu_si512(values + block->v[token + 1] + pair * bytes) : _mm512_setzero_si512();
            FETCH(ahead, token, offset + pair * bytes, bytes);
            FETCH(ahead, token + both, offset + pair * bytes, bytes);
            const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(one, two);
            const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(one, two);
            UNROLL for (int row = 0; row < rows; row++) {
                int32_t weight;
                memcpy(&weight, weights + row * BLOCK + token, sizeof weight);
                const __m512bh pair_of_weights = (__m512bh)_mm512_set1_epi32(weight);
                total[row][2 * pair] = _mm512_dpbf16_ps(total[row][2 * pair], low, pair_of_weights);
                total[row][2 * pair + 1] = _mm512_dpbf16_ps(total[row][2 * pair + 1], high, pair_of_weights);
            }
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int i = 0; i < 2 * pairs; i++)
            _mm512_store_ps(sums + row * MOST_DIM + column + i * LANES, total[row][i]);
}

/* `score_columns` of tiles, in which a line holds two numbers of 16 tokens each. */
INLINE void NAME(dot_score_tiles)(const struct block *block, const struct call *call, const struct ahead *ahead,
                                  const uint16_t *queries, float *scores, int rows)
{
    const int pairs = (int)call->dim / 2;
    for (int group = 0; group < block->groups; group += 4) {
        const char *keys[4], *later[4];
        vec sums[4][MOST_ROWS];
        NAME(find_groups)(block, call, group, keys, later, sums, rows);
        for (int pair = 0; pair < pairs; pair++) {
            /* A token's values are one line for eight pairs of its key. */
            for (int token = block->first[group] + pair % 8; ahead && call->out && token < block->first[group + 4];
                 token += 8)
                PREFETCH(ahead->near + ahead->near_places[token] + pair / 8 * value_line(call), LINE);
            UNROLL for (int u = 0; u < 4; u++) {
                const __m512bh key = (__m512bh)_mm512_loadu_si512(keys[u] + pair * LINE);
                if (ahead)
                    PREFETCH(later[u] + pair * LINE, LINE);
                UNROLL for (int row = 0; row < rows; row++) {
                    int32_t both;
                    memcpy(&both, queries + row * MOST_DIM + 2 * pair, sizeof both);
                    sums[u][row] = (vec)_mm512_dpbf16_ps((__m512)sums[u][row], key, (__m512bh)_mm512_set1_epi32(both));
                }
            }
        }
        NAME(keep_lanes)(block, group, sums, scores, rows);
    }
}

/* `dot_mix` of tiles, in which a line holds 16 numbers of two tokens each. */
INLINE void NAME(dot_mix_tiles)(const struct block *block, const struct ahead *ahead, const struct call *call,
                                int column, const uint16_t *weights, float *sums, int rows, int pairs)
{
    const char *values = call->v + column / 16 * value_line(call);
    __m512 total[MOST_ROWS][4];
    (void)ahead; /* the values were fetched with the scores */
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int i = 0; i < 2 * pairs; i++)
            total[row][i] = _mm512_load_ps(sums + row * MOST_DIM + column + i * LANES);
    for (int token = 0, some; token < block->count; token += some) {
        const int64_t at = block->v[token], odd = at % LINE / 2; /* the line's second token */
        some = token + 1 < block->count && block->v[token + 1] == at + 2 ? 2 : 1;
        /* A neighbour outside of the set may hold NaN, which a weight of 0 would not hide. */
        const __m512i wanted = _mm512_set1_epi32(some == 2 ? -1 : odd ? (int)0xffff0000 : 0xffff);
        __m512bh shares[MOST_ROWS];
        UNROLL for (int row = 0; row < rows; row++) {
            const uint16_t *own = weights + row * BLOCK + token;
            const uint32_t both = some == 2 ? own[0] | (uint32_t)own[1] << 16 : (uint32_t)own[0] << 16 * odd;
            shares[row] = (__m512bh)_mm512_set1_epi32((int)both);
        }
        UNROLL for (int i = 0; i < 2 * pairs; i++) {
            const __m512i line = _mm512_loadu_si512(values + at - 2 * odd + i * value_line(call));
            const __m512bh numbers = (__m512bh)_mm512_and_si512(line, wanted);
            UNROLL for (int row = 0; row < rows; row++)
                total[row][i] = _mm512_dpbf16_ps(total[row][i], numbers, shares[row]);
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int i = 0; i < 2 * pairs; i++)
            _mm512_store_ps(sums + row * MOST_DIM + column + i * LANES, total[row][i]);
}

typedef void (*NAME(dot_scorer))(const struct block *, const struct call *, struct ahead, const uint16_t *,
                                 float *);
typedef void (*NAME(dot_mixer))(const struct block *, struct ahead, const struct call *, const uint16_t *,
                                float *);

#define DOT_ROWS(rows, of)                                                                                             \
    INNER void NAME(dot_score##of##_##rows)(const struct block *block, const struct call *call, struct ahead next,     \
                                       const uint16_t *queries, float *scores)                                         \
    {                                                                                                                  \
        FETCHING(NAME(dot_score##of)(block, call, ahead, queries, scores, rows));                                      \
    }                                                                                                                  \
    INNER void NAME(dot_mix##of##_##rows)(const struct block *block, struct ahead next, const struct call *call,       \
                                     const uint16_t *weights, float *sums)                                             \
    {                                                                                                                  \
        int column = 0, dim = (int)call->dim;                                                                          \
        for (; column + 2 * PAIR <= dim; column += 2 * PAIR)                                                           \
            FETCHING(NAME(dot_mix##of)(block, ahead, call, column, weights, sums, rows, 2));                           \
        if (column < dim)                                                                                              \
            FETCHING(NAME(dot_mix##of)(block, ahead, call, column, weights, sums, rows, 1));                           \
    }
DOT_ROWS(1, ) DOT_ROWS(2, ) DOT_ROWS(3, ) DOT_ROWS(4, )
DOT_ROWS(1, _tiles) DOT_ROWS(2, _tiles) DOT_ROWS(3, _tiles) DOT_ROWS(4, _tiles)
#undef DOT_ROWS
#define OF_ROWS(op) {NAME(op##_1), NAME(op##_2), NAME(op##_3), NAME(op##_4)}
static const NAME(dot_scorer) NAME(dot_scorers)[2][MOST_ROWS] = {OF_ROWS(dot_score), OF_ROWS(dot_score_tiles)};
static const NAME(dot_mixer) NAME(dot_mixers)[2][MOST_ROWS] = {OF_ROWS(dot_mix), OF_ROWS(dot_mix_tiles)};
#undef OF_ROWS

/* The group's queries as bfloat16; 0 if one of them is no such number. */
static int NAME(short_queries)(const struct call *call, int64_t first, int rows, int dim, uint16_t (*to)[MOST_DIM])
{
    uint32_t lost = 0;
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < dim; i++) {
            const float number = number_at(call->q, first + row * dim + i, call->narrow);
            uint32_t bits;
            memcpy(&bits, &number, sizeof bits);
            lost |= bits;
            to[row][i] = (uint16_t)(bits >> 16);
        }
    return !(lost & 0xffff);
}
#endif

typedef void (*NAME(scorer))(const struct block *, const struct call *, struct ahead, const float *, float *);
typedef void (*NAME(mixer))(const struct block *, struct ahead, const struct call *, const float *, float *);

#define SCORER(op, rows, bf16)                                                                                         \
    INNER void NAME(op##_##rows##_##bf16)(const struct block *block, const struct call *call,                          \
                                           struct ahead next, const float *queries, float *scores)                     \
    {                                                                                                                  \
        FETCHING(NAME(op)(block, call, ahead, queries, scores, rows, bf16));                                           \
    }
#define MIXER(rows, bf16)                                                                                              \
    INNER void NAME(mix_##rows##_##bf16)(const struct block *block, struct ahead next,                                 \
                                          const struct call *call, const float *weights, float *sums)                  \
    {                                                                                                                  \
        int column = 0, dim = (int)call->dim;                                                                          \
        for (; column + 2 * PAIR <= dim; column += 2 * PAIR)                                                           \
            FETCHING(NAME(mix)(block, ahead, call, column, weights, sums, rows, 2, bf16));                             \
        if (column < dim)                                                                                              \
            FETCHING(NAME(mix)(block, ahead, call, column, weights, sums, rows, 1, bf16));                             \
    }
#define ALL(rows, bf16) SCORER(score, rows, bf16) SCORER(score_columns, rows, bf16) MIXER(rows, bf16)
ALL(1, 0) ALL(2, 0) ALL(1, 1) ALL(2, 1)
#if MOST_ROWS == 4
ALL(3, 0) ALL(4, 0) ALL(3, 1) ALL(4, 1)
#define TABLE(op) {{NAME(op##_1_0), NAME(op##_2_0), NAME(op##_3_0), NAME(op##_4_0)},                                   \
                   {NAME(op##_1_1), NAME(op##_2_1), NAME(op##_3_1), NAME(op##_4_1)}}
#else
#define TABLE(op) {{NAME(op##_1_0), NAME(op##_2_0)}, {NAME(op##_1_1), NAME(op##_2_1)}}
#endif
static const NAME(scorer) NAME(scorers)[2][2][MOST_ROWS] = {TABLE(score), TABLE(score_columns)};
static const NAME(mixer) NAME(mixers)[2][MOST_ROWS] = TABLE(mix);

/* Where a mixer leaves the sum of column `index`. */
static int64_t NAME(sum_place)(int64_t index, int bf16)
{
#ifdef DOT
    const int64_t inside = index % PAIR;
    if (bf16) /* interleaving works within 128 bits */
        return index - inside + inside % 8 / 4 * LANES + inside / 8 * 4 + inside % 4;
#endif
    return NAME(place)(index, bf16);
}

/* cap · tanh(x / cap) of a row's scaled scores; absolute error 2e-7 · cap. */
static void NAME(cap_scores)(float *scores, int count, float cap)
{
    for (int i = count; i % LANES; i++)
        scores[i] = 0.0f;
    for (int i = 0; i < count; i += LANES) {
        vec x;
        memcpy(&x, scores + i, sizeof x);
        const uvec sign = (uvec)x & ((uvec){0} + 0x80000000u);
        const vec e = NAME(exp)((vec)((uvec)x ^ sign) * (-2.0f / cap));
        const vec capped = (1.0f - e) / (1.0f + e) * cap;
        x = (vec)((uvec)capped | sign);
        memcpy(scores + i, &x, sizeof x);
    }
}

/* Turn one row's raw scores into weights against the running maximum; sums made against an older one are scaled.
 * `words`: the weights in bfloat16, whose sum is then what is added up; NULL: they stay float32. */
static void NAME(soften)(float *scores, uint16_t *words, int count, float scale, float cap, float *max, vec *total,
                         float *sums, int dim)
{
    vec highest = (vec){0} - INFINITY;
    float peaks[4], peak = *max;
    for (int i = 0; i < count; i += LANES) {
        vec logits;
        memcpy(&logits, scores + i, sizeof logits);
        logits *= scale;
        memcpy(scores + i, &logits, sizeof logits);
    }
    if (cap > 0.0f)
        NAME(cap_scores)(scores, count, cap);
    for (int i = count; i % LANES; i++)
        scores[i] = -INFINITY;
    for (int i = 0; i < count; i += LANES) {
        vec logits;
        memcpy(&logits, scores + i, sizeof logits);
        highest = NAME(higher)(logits, highest);
    }
    REDUCE(NAME(higher), highest, highest, highest, highest, peaks);
    peak = peaks[0] > peak ? peaks[0] : peak;
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
#ifdef DOT
        if (words) {
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)weights);
            _mm256_store_si256((__m256i *)(words + i), rounded);
            weights = (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
        }
#else
        (void)words;
#endif
        *total += weights;
        memcpy(scores + i, &weights, sizeof weights);
    }
}

/* One item: part of the tokens that one KV head (or query head) of one row attends to. */
static void NAME(attend)(const void *job, int64_t index)
{
    const struct plan *plan = job;
    const struct call *call = plan->call;
    const struct item *item = &plan->items[index];
    const int bf16 = (int)call->bf16, columns = call->k_dim != 0, dim = (int)call->dim, group = item->group;
    const int kept = call->scores && item->kept >= 0;
    const int mixed = call->out ? group : 0; /* queries that attend; the others are only scored */
    _Alignas(64) float queries[MOST_GROUP][MOST_DIM], sums[MOST_GROUP][MOST_DIM];
    _Alignas(64) float scores[MOST_GROUP][BLOCK];
    vec total[MOST_GROUP];
    float max[MOST_GROUP];
#ifdef DOT
    _Alignas(64) uint16_t words[MOST_GROUP][MOST_DIM], weights[MOST_GROUP][BLOCK];
#endif
    struct block blocks[2] = {{0}}, *block = &blocks[0], *next = &blocks[1];
    struct reader reader;

    open_item(&reader, plan, item, LANES);
    const int64_t first = (item->row * call->query_heads + item->first) * dim;
    for (int i = 0; i < dim; i++) {
        int64_t to = columns ? i : NAME(place)(i, bf16);
        for (int row = 0; row < group; row++)
            queries[row][to] = number_at(call->q, first + row * dim + i, call->narrow);
    }
    for (int row = 0; row < group; row++) {
        max[row] = -INFINITY;
        total[row] = (vec){0};
        memset(sums[row], 0, sizeof(float) * (size_t)dim);
    }

#ifdef DOT
    const int tiled = (int)call->tiled;
    const int dot = bf16 && columns == tiled && NAME(short_queries)(call, first, group, dim, words);
#endif

    read_block(&reader, block);
    while (block->count) {
        read_block(&reader, next);
        if (columns && next->count)
            memcpy(block->k + (block->groups + 3) / 4 * 4, next->k, 4 * sizeof next->k[0]);
        /* The keys of this block were fetched during the last one. Now come its values and the next keys, then the next
         * values; or, without values, the next keys alone. */
        struct ahead ahead = {0};
        if (reader.fetch && call->out)
            ahead = (struct ahead){call->v, call->k, block->v, next->k};
        else if (reader.fetch)
            ahead = (struct ahead){call->k, call->k, next->k, next->k};
        int row = 0, some;
#ifdef DOT
        for (; dot && row < group; row += some) {
            some = NAME(share)(group - row);
            NAME(dot_scorers)[tiled][some - 1](block, call, ahead, words[row], scores[row]);
            ahead = (struct ahead){0}; /* once for all queries */
        }
#endif
        for (; row < group; row += some) {
            some = NAME(share)(group - row);
            NAME(scorers)[columns][bf16][some - 1](block, call, ahead, queries[row], scores[row]);
            ahead = (struct ahead){0};
        }
        if (kept)
            keep_scores(keep_at(call, item, block->token), call->max_len, scores[0], group, block->count, call->pooling);
        if (reader.fetch)
            ahead = columns ? (struct ahead){0} : (struct ahead){call->k, call->v, next->k, next->v};
        for (row = 0; row < mixed; row++) {
            uint16_t *short_weights = NULL;
#ifdef DOT
            short_weights = bf16 ? weights[row] : NULL;
#endif
            NAME(soften)(scores[row], short_weights, block->count, (float)call->scale, (float)call->soft_cap, &max[row],
                         &total[row], sums[row], dim);
        }
        for (row = 0; row < mixed; row += some) {
            some = NAME(share)(mixed - row);
#ifdef DOT
            if (bf16) {
                NAME(dot_mixers)[tiled][some - 1](block, ahead, call, weights[row], sums[row]);
                ahead = (struct ahead){0};
                continue;
            }
#endif
            NAME(mixers)[bf16][some - 1](block, ahead, call, scores[row], sums[row]);
            ahead = (struct ahead){0};
        }
        struct block *done = block;
        block = next;
        next = done;
    }
    if (!call->out)
        return;
    float *partial = plan->partials + item->partial * (dim + 2);
    for (int row = 0; row < group; row++, partial += dim + 2) {
        partial[0] = max[row];
        partial[1] = 0.0f;
        for (int lane = 0; lane < LANES; lane++)
            partial[1] += total[row][lane];
        for (int i = 0; i < dim; i++)
            partial[2 + i] = sums[row][call->tiled ? i : NAME(sum_place)(i, bf16)];
    }
}

#undef SCORER
#undef MIXER
#undef ALL
#undef TABLE

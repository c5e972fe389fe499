/* The bounds of pages, from the keys. */

/* Take `count` keys, each `step` bytes behind the last, into the bounds `low` and `high`, whose numbers stand as in
 * pairs of vectors. */
static void NAME(take_rows)(const char *keys, int64_t step, int64_t count, int dim, int bf16, float *low, float *high)
{
    for (int i = 0; i < dim; i += PAIR, keys += PAIR * (bf16 ? 2 : 4)) {
        vec lows[2], highs[2];
        memcpy(lows, low + i, sizeof lows);
        memcpy(highs, high + i, sizeof highs);
        for (int64_t token = 0; token < count; token++) {
            vec key[2];
            NAME(load)(keys + token * step, bf16, &key[0], &key[1]);
            UNROLL for (int side = 0; side < 2; side++) {
                lows[side] = NAME(least)(lows[side], key[side]);
                highs[side] = NAME(most)(highs[side], key[side]);
            }
        }
        memcpy(low + i, lows, sizeof lows);
        memcpy(high + i, highs, sizeof highs);
    }
}

/* Take the ends of four numbers from number `i` on into the bounds. */
INLINE void NAME(keep_ends)(float ends[2][4], int i, int bf16, float *low, float *high)
{
    UNROLL for (int u = 0; u < 4; u++) {
        const int64_t to = NAME(place)(i + u, bf16);
        low[to] = ends[0][u] < low[to] || ends[0][u] != ends[0][u] ? ends[0][u] : low[to];
        high[to] = ends[1][u] > high[to] || ends[1][u] != ends[1][u] ? ends[1][u] : high[to];
    }
}

/* The same for `count` tokens from `slot` on of a page of `slots`, whose keys are columns `step` bytes apart. */
static void NAME(take_columns)(const char *keys, int64_t step, int64_t slot, int64_t count, int64_t slots, int dim,
                               int bf16, float *low, float *high)
{
    /* Fewer tokens than lanes: some of their neighbours, which do not count, are read with them. */
    const int64_t first = slot < slots - LANES ? slot : slots - LANES, from = count < LANES ? first : slot;
    ivec wanted;
    UNROLL for (int lane = 0; lane < LANES; lane++)
        wanted[lane] = from + lane >= slot && from + lane < slot + count ? -1 : 0;
    const ivec above = (ivec)((vec){0} + INFINITY) & ~wanted, below = (ivec)((vec){0} - INFINITY) & ~wanted;
    for (int i = 0; i < dim; i += 4) {
        vec lows[4], highs[4];
        float ends[2][4];
        UNROLL for (int u = 0; u < 4; u++) {
            lows[u] = (vec){0} + INFINITY;
            highs[u] = (vec){0} - INFINITY;
        }
        for (int64_t done = 0; done < count; done += LANES) {
            /* The last vector reaches back to tokens that were taken already. */
            const int64_t at = count < LANES || done + LANES <= count ? from + done : slot + count - LANES;
            UNROLL for (int u = 0; u < 4; u++) {
                const ivec key = (ivec)NAME(load_lanes)(keys + at * (bf16 ? 2 : 4) + (i + u) * step, bf16) & wanted;
                lows[u] = NAME(least)(lows[u], (vec)(key | above));
                highs[u] = NAME(most)(highs[u], (vec)(key | below));
            }
        }
        REDUCE(NAME(least), lows[0], lows[1], lows[2], lows[3], ends[0]);
        REDUCE(NAME(most), highs[0], highs[1], highs[2], highs[3], ends[1]);
        NAME(keep_ends)(ends, i, bf16, low, high);
    }
}

/* The same for tiles, a group of tokens after the other; `step` bytes from token to token if they were rows. */
static void NAME(take_tiles)(const char *keys, int64_t step, int64_t slot, int64_t count, int dim, float *low,
                             float *high)
{
    for (int64_t at = slot / LANES * LANES; at < slot + count; at += LANES) {
        const char *group = keys + at / 16 * 16 * step + at % 16 * 4;
        ivec wanted;
        UNROLL for (int lane = 0; lane < LANES; lane++)
            wanted[lane] = at + lane >= slot && at + lane < slot + count ? -1 : 0;
        const ivec above = (ivec)((vec){0} + INFINITY) & ~wanted, below = (ivec)((vec){0} - INFINITY) & ~wanted;
        for (int i = 0; i < dim; i += 4, group += 2 * LINE) {
            vec keys_of[4], lows[4], highs[4];
            float ends[2][4];
            NAME(load)(group, 1, &keys_of[0], &keys_of[1]);
            NAME(load)(group + LINE, 1, &keys_of[2], &keys_of[3]);
            UNROLL for (int u = 0; u < 4; u++) {
                lows[u] = (vec)(((ivec)keys_of[u] & wanted) | above);
                highs[u] = (vec)(((ivec)keys_of[u] & wanted) | below);
            }
            REDUCE(NAME(least), lows[0], lows[1], lows[2], lows[3], ends[0]);
            REDUCE(NAME(most), highs[0], highs[1], highs[2], highs[3], ends[1]);
            NAME(keep_ends)(ends, i, 1, low, high);
        }
    }
}

/* One item: some of the pages of one KV head of one row. */
static void NAME(update_pages)(const void *job, int64_t index)
{
    const struct update_plan *plan = job;
    const struct update *call = plan->call;
    const int64_t span = index % plan->spans, head = index / plan->spans % call->kv_heads;
    const int64_t row = index / plan->spans / call->kv_heads;
    const int bf16 = (int)call->bf16, dim = (int)call->dim;
    const struct touched touched = find_touched(call, row);
    const int32_t *table = call->table + row * call->row_pages;
    const int64_t from = touched.first + span * UPDATED;
    const int64_t to = from + UPDATED < touched.stop ? from + UPDATED : touched.stop;
    _Alignas(64) float low[MOST_DIM], high[MOST_DIM];

    for (int64_t page = from; page < to; page++) {
        const int64_t end = (page + 1) * call->unit < touched.end ? (page + 1) * call->unit : touched.end;
        for (int i = 0; i < dim; i++) {
            low[i] = INFINITY;
            high[i] = -INFINITY;
        }
        for (int64_t token = page * call->unit, some; token < end; token += some) {
            const int64_t number = (call->starts[row] + token) / call->page;
            const int64_t slot = call->starts[row] + token - number * call->page;
            const char *keys = call->k + table[number] * call->k_page + head * call->k_head;
            some = end - token < call->page - slot ? end - token : call->page - slot;
            if (call->tiled)
                NAME(take_tiles)(keys, call->k_slot, slot, some, dim, low, high);
            else if (call->k_dim)
                NAME(take_columns)(keys, call->k_dim, slot, some, call->page, dim, bf16, low, high);
            else
                NAME(take_rows)(keys + slot * call->k_slot, call->k_slot, some, dim, bf16, low, high);
        }
        int64_t block = row, place = page;
        if (call->blocks_of) {
            block = call->blocks_of[row * call->row_blocks + page / call->block_pages];
            place = page % call->block_pages;
        }
        char *lower = call->lower + block * call->lower_block + head * call->lower_head + place * call->lower_page;
        char *upper = call->upper + block * call->upper_block + head * call->upper_head + place * call->upper_page;
        for (int i = 0; i < dim; i += PAIR) {
            vec sides[2][2];
            memcpy(sides[0], low + i, sizeof sides[0]);
            memcpy(sides[1], high + i, sizeof sides[1]);
            NAME(store)(lower + i * (bf16 ? 2 : 4), bf16, sides[0][0], sides[0][1]);
            NAME(store)(upper + i * (bf16 ? 2 : 4), bf16, sides[1][0], sides[1][1]);
        }
    }
}

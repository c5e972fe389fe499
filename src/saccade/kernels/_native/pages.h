/* Bounds of pages: how they are asked for, and where they lie. */

/* Everything 8 bytes wide, as above. */
struct bounds {
    const void *q;             /* [batch, query_heads, dim], bfloat16 if `narrow`, else float */
    const char *lower, *upper; /* page p of block b: b · block + head · head + p · page bytes from here */
    const int32_t *lengths;    /* [batch], in tokens */
    const int32_t *table;      /* [batch, row_blocks], each with block_pages pages; NULL: block b is all of row b */
    float *scores;             /* [batch, kv_heads or (EACH) query_heads, pages] */
    int64_t lower_block, lower_head, lower_page, upper_block, upper_head, upper_page; /* bytes */
    int64_t batch, query_heads, kv_heads, dim, bf16, narrow;
    int64_t blocks, block_pages, row_blocks;
    int64_t pages, unit; /* unit: tokens of a page */
    int64_t pooling, threads, lanes;
};

struct bounds_plan {
    const struct bounds *call;
    int64_t spans, chunk; /* per head; pages of a span. The longest row decides: shorter ones may have empty spans */
};

static int64_t pages_used(const struct bounds *call, int64_t row)
{
    const int64_t used = (call->lengths[row] + call->unit - 1) / call->unit;
    return used < 0 ? 0 : used < call->pages ? used : call->pages;
}

#define AHEAD 32 /* pages, a multiple of 8, between the ones that are fetched first and those that are scored */

/* Bytes from the bounds' starts to the pages of one head, some at a time. */
struct places {
    int64_t lower[BLOCK + AHEAD], upper[BLOCK + AHEAD];
};

/* Places of `count` pages of a row and head from page `first` on; without a table of the first only, as the others
 * follow. The last is repeated, to a multiple of 4 and as often as is fetched ahead. */
static void find_pages(const struct bounds *call, int64_t row, int64_t head, int64_t first, int count,
                       struct places *places)
{
    const int64_t lower = head * call->lower_head, upper = head * call->upper_head;
    places->lower[0] = lower + row * call->lower_block + first * call->lower_page;
    places->upper[0] = upper + row * call->upper_block + first * call->upper_page;
    for (int i = 0; call->table && i < (count + 3) / 4 * 4 + AHEAD; i++) {
        uint32_t page = (uint32_t)(first + (i < count ? i : count - 1)), number = page / (uint32_t)call->block_pages;
        const int64_t block = call->table[row * call->row_blocks + number];
        page -= number * (uint32_t)call->block_pages;
        places->lower[i] = lower + block * call->lower_block + page * call->lower_page;
        places->upper[i] = upper + block * call->upper_block + page * call->upper_page;
    }
}

/* Everything 8 bytes wide, as above. */
struct update {
    const char *k;           /* as in `struct call` */
    char *lower, *upper;     /* as in `struct bounds` */
    const int32_t *table;    /* [batch, row_pages] */
    const int32_t *starts, *lengths;
    const int32_t *changed;  /* [batch], first changed token of each row */
    const int32_t *blocks_of; /* `table` of `struct bounds` */
    int64_t k_page, k_slot, k_head, k_dim, tiled; /* bytes; `tiled` as in `struct call` */
    int64_t lower_block, lower_head, lower_page, upper_block, upper_head, upper_page; /* bytes */
    int64_t batch, kv_heads, dim, bf16;
    int64_t page, pages, row_pages;
    int64_t blocks, block_pages, row_blocks;
    int64_t unit, count; /* tokens of a page of bounds; changed tokens of each row */
    int64_t filled;      /* whether pages that a row has yet to fill are left as they are */
    int64_t threads, lanes;
};

#define UPDATED 64 /* pages of an item */

struct update_plan {
    const struct update *call;
    int64_t spans; /* per head. The row that touches most decides: others may have empty spans */
};

/* Pages `first..stop` that a row's changed tokens lie in, and the end of its tokens in them. */
struct touched {
    int64_t first, stop, end;
};

static struct touched find_touched(const struct update *call, int64_t row)
{
    const int64_t length = call->lengths[row], begin = call->changed[row] < 0 ? 0 : call->changed[row];
    const int64_t last = call->filled ? length / call->unit * call->unit : length;
    int64_t end = call->changed[row] + call->count;
    end = end < last ? end : last;
    if (end <= begin)
        return (struct touched){0};
    const int64_t stop = (end - 1) / call->unit + 1;
    return (struct touched){begin / call->unit, stop, stop * call->unit < length ? stop * call->unit : length};
}

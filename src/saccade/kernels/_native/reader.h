/* Walking over the tokens of one item of attention.c, block by block. */

/* Bytes from the storage's start to the tokens of a block; places after the count, up to a multiple of 4, repeat it.
 *
 * Where keys are columns, `k` are places of groups of neighbouring tokens, as many as a vector has lanes, some of which
 * the block wants: `first[i]..first[i + 1]` of its tokens are in group i, each at its `lane`. */
struct block {
    int count, groups;
    int64_t token; /* logical position of the first; of use where all tokens are read */
    int64_t k[BLOCK + 4], v[BLOCK];
    uint8_t first[BLOCK + 4], lane[BLOCK];
};

/* Walks over the tokens of one item. */
struct reader {
    const struct call *call;
    const int32_t *table, *ids;
    int block;                  /* tokens of a block, a multiple of 16 up to BLOCK */
    int lanes;                  /* tokens of a group, a power of 2 */
    int fetch;                  /* whether to fetch ahead, or leave it to the hardware: see below */
    int64_t start, length;      /* of the row, in slots */
    int64_t k_base, v_base;     /* bytes to the KV head */
    int64_t at, end;            /* next token and the one to stop at, or (ids) next entry of the set */
    int64_t run, run_end;       /* tokens of the entry that were not read yet */
};

#define LINE 64 /* bytes that a tile's numbers of two columns or two tokens take; a cache line */

/* Bytes between the lines of a token's values in tiles; and from a page's values to those of a slot. */
static inline int64_t value_line(const struct call *call)
{
    return call->page / 2 * LINE;
}

static inline int64_t value_place(const struct call *call, int64_t slot)
{
    return call->tiled ? slot / 2 * LINE + slot % 2 * 2 : slot * call->v_slot;
}

static void open_item(struct reader *reader, const struct plan *plan, const struct item *item, int lanes)
{
    const struct call *call = plan->call;
    /* Measured (Zen 4): neighbours run best when a block of keys fills about a page of memory. */
    const int64_t fill = LINEAR_BYTES / (call->dim * (call->bf16 ? 2 : 4)) / 16 * 16;
    /* Measured (Zen 4): what the hardware foresees suffices for long runs of rows of 128 bytes, and for float32. */
    const int hard = call->dim > 64 || (call->scores && call->pooling == EACH); /* many rows of scores are written */
    const int fetch = item->set >= 0 || call->row_pages > 1 || call->k_dim || (call->bf16 && hard) || !FORESEEN;
    *reader = (struct reader){
        .call = call, .lanes = lanes, .fetch = fetch, .at = item->at, .end = item->end,
        .block = item->set >= 0 ? GATHERED : fetch ? FETCHED : fill < 16 ? 16 : fill > BLOCK ? BLOCK : (int)fill,
        .table = call->table + item->row * call->row_pages,
        .start = call->starts[item->row], .length = call->lengths[item->row],
        .k_base = item->head * call->k_head, .v_base = item->head * call->v_head,
    };
    if (item->set >= 0) {
        reader->ids = call->ids + item->set * call->width;
    } else {
        reader->run = item->at;
        reader->run_end = item->end;
    }
}

/* Whether there is a token to read; steps to the next entry of the set where one is used up. */
static int more(struct reader *reader)
{
    while (reader->run >= reader->run_end) {
        if (!reader->ids || reader->at >= reader->end)
            return 0;
        int64_t unit = reader->call->unit, id = reader->ids[reader->at++];
        if (id < 0 || id * unit >= reader->length)
            continue;
        reader->run = id * unit;
        reader->run_end = reader->run + unit < reader->length ? reader->run + unit : reader->length;
    }
    return 1;
}

/* The storage page of the next token and, in `slot`, where in it. */
static int64_t find_token(const struct reader *reader, uint32_t *slot)
{
    /* Neither is negative, and a 32-bit division takes half the time of a 64-bit one. */
    uint32_t number = 0;
    *slot = (uint32_t)(reader->start + reader->run);
    if (reader->call->row_pages > 1) {
        number = *slot / (uint32_t)reader->call->page;
        *slot -= number * (uint32_t)reader->call->page;
    }
    return reader->table[number];
}

/* Single tokens of a cache whose rows are a page each: no runs, no divisions. */
static int read_tokens(struct reader *reader, struct block *block)
{
    const struct call *call = reader->call;
    const int64_t k = reader->k_base + reader->table[0] * call->k_page + reader->start * call->k_slot;
    const int64_t v = reader->v_base + reader->table[0] * call->v_page + reader->start * call->v_slot;
    int count = 0;
    for (; count < reader->block && reader->at < reader->end; reader->at++) {
        const int64_t id = reader->ids[reader->at];
        block->k[count] = k + id * call->k_slot;
        block->v[count] = v + id * call->v_slot;
        count += id >= 0 && id < reader->length;
    }
    return count;
}

static void read_rows(struct reader *reader, struct block *block)
{
    const struct call *call = reader->call;
    const int single = reader->ids && call->unit == 1 && call->row_pages == 1;
    int count = single ? read_tokens(reader, block) : 0;
    block->token = reader->run;
    while (!single && count < reader->block && more(reader)) {
        uint32_t slot;
        int64_t page = find_token(reader, &slot);
        int64_t k = reader->k_base + page * call->k_page + slot * call->k_slot;
        int64_t v = reader->v_base + page * call->v_page + slot * call->v_slot;
        int64_t some = reader->run_end - reader->run;
        some = some < call->page - slot ? some : call->page - slot;
        some = some < reader->block - count ? some : reader->block - count;
        for (int64_t i = 0; i < some; i++) {
            block->k[count + i] = k + i * call->k_slot;
            block->v[count + i] = v + i * call->v_slot;
        }
        count += (int)some;
        reader->run += some;
    }
    block->count = count;
    for (int i = count; i % 4; i++) {
        block->k[i] = block->k[count - 1];
        block->v[i] = block->v[count - 1];
    }
}

/* The same where keys are columns. A block may be longer by what belongs to its last group, so that the next one does
 * not read that again. */
static void read_columns(struct reader *reader, struct block *block)
{
    const struct call *call = reader->call;
    int count = 0, groups = 0;
    block->token = reader->run;
    while (more(reader)) {
        uint32_t slot;
        const int64_t page = find_token(reader, &slot);
        /* The last group of a page that is no multiple of the lanes reaches back into the one before. */
        int64_t group = slot & ~(uint32_t)(reader->lanes - 1);
        group = group < call->page - reader->lanes ? group : call->page - reader->lanes;
        const int64_t k = reader->k_base + page * call->k_page + group * call->k_slot;
        const int64_t v = reader->v_base + page * call->v_page;
        const int lane = (int)(slot - group);
        if (!groups || block->k[groups - 1] != k || block->lane[count - 1] >= lane) {
            if (count >= reader->block)
                break;
            block->first[groups] = (uint8_t)count;
            block->k[groups++] = k;
        }
        int64_t some = reader->run_end - reader->run;
        some = some < reader->lanes - lane ? some : reader->lanes - lane;
        for (int64_t i = 0; i < some; i++) {
            block->lane[count + i] = (uint8_t)(lane + i);
            block->v[count + i] = v + value_place(call, slot + i);
        }
        count += (int)some;
        reader->run += some;
    }
    block->count = count;
    block->groups = groups;
    /* Four more than the scores need: the next block's first are fetched with this one's last. */
    for (int i = groups; i < (groups + 3) / 4 * 4 + 4; i++) {
        block->first[i] = (uint8_t)count;
        block->k[i] = groups ? block->k[groups - 1] : 0;
    }
}

static void read_block(struct reader *reader, struct block *block)
{
    if (reader->call->k_dim)
        read_columns(reader, block);
    else
        read_rows(reader, block);
}

/* What comes next: rows at places that are numbered as the block's at hand. The processor drops what it cannot take at
 * once, so that every row is asked for twice (measured: random rows of 128 bytes come at 25 GB/s, asked once at 20). */
struct ahead {
    const char *near, *far; /* both NULL: nothing is fetched */
    const int64_t *near_places, *far_places;
};
#define FETCH(ahead, token, offset, bytes)                                                                             \
    do {                                                                                                               \
        if (ahead) {                                                                                                   \
            PREFETCH((ahead)->near + (ahead)->near_places[token] + (offset), bytes);                                   \
            PREFETCH((ahead)->far + (ahead)->far_places[token] + (offset), bytes);                                     \
        }                                                                                                              \
    } while (0)
/* A call of what is inlined twice: with `ahead` the address of what is fetched, and with NULL. */
#define FETCHING(call)                                                                                                 \
    do {                                                                                                               \
        if (next.near) {                                                                                               \
            const struct ahead *ahead = &next;                                                                         \
            call;                                                                                                      \
        } else {                                                                                                       \
            const struct ahead *ahead = NULL;                                                                          \
            call;                                                                                                      \
        }                                                                                                              \
    } while (0)

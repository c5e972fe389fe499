/* The loops over scores and keys, for vectors of LANES numbers. */

typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));

/* Bit i: number i of 16 is not less than `floor` (NaN never is). */
static inline __attribute__((always_inline)) uint64_t NAME(reaching)(const float *numbers, float floor)
{
#if LANES == 16
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(numbers), _mm512_set1_ps(floor), _CMP_NLT_UQ);
#elif LANES == 8
    const __m256 all = _mm256_set1_ps(floor);
    return (uint64_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(numbers), all, _CMP_NLT_UQ)) |
           (uint64_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(numbers + 8), all, _CMP_NLT_UQ)) << 8;
#else
    NAME(ints) bits = {0}, bit = {1, 2, 4, 8};
    for (int i = 0; i < 16; i += 4, bit <<= 4) {
        NAME(floats) some;
        memcpy(&some, numbers + i, sizeof some);
        bits |= bit & ~(some < floor);
    }
    return (uint64_t)(bits[0] | bits[1] | bits[2] | bits[3]);
#endif
}

/* How many of the keys, which are padded with the least one to whole steps, are at least `floor`, not the least one. */
static __attribute__((aligned(64))) int64_t NAME(count_keys)(const int32_t *keys, int64_t count, int32_t floor)
{
    NAME(ints) hits[2] = {{0}, {0}};
    for (int64_t i = 0; i < count; i += 2 * LANES)
        for (int half = 0; half < 2; half++) {
            NAME(ints) some;
            memcpy(&some, keys + i + half * LANES, sizeof some);
            hits[half] -= some >= floor;
        }
    int64_t sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += hits[0][lane] + hits[1][lane];
    return sum;
}

/* Collect the entries from `at` to `end` that reach the floor, which rises each time that there is no room left. */
static void NAME(collect)(struct best *best, const float *row, int64_t at, int64_t end)
{
    float floor = number_of(best->floor);
    for (; at + STEP <= end; at += STEP) {
        uint64_t hits = NAME(reaching)(row + at, floor) | NAME(reaching)(row + at + 16, floor) << 16 |
                        NAME(reaching)(row + at + 32, floor) << 32 | NAME(reaching)(row + at + 48, floor) << 48;
        for (; hits; hits &= hits - 1)
            put(best, row, at + __builtin_ctzll(hits));
        if (best->count + STEP > best->room) {
            narrow(best, NAME(count_keys));
            if (best->floor > KEY_OF_INFINITY)
                return;
            floor = number_of(best->floor);
        }
    }
    for (; at < end; at++)
        if (!(row[at] < floor))
            put(best, row, at);
}

/* The best `best->wanted` of `count` entries, more than are wanted, in order of position. */
static void NAME(choose)(struct best *best, const float *row, int64_t count)
{
    best->floor = sample_floor(best, row, count, NAME(count_keys));
    best->count = 0;
    NAME(collect)(best, row, 0, count);
    if (best->count < best->wanted) { /* the sample was not like the row */
        best->floor = INT32_MIN;
        best->count = 0;
        NAME(collect)(best, row, 0, count);
    }
    narrow(best, NAME(count_keys));
}

/* Vectors of LANES floats: types, reading, adding up, exp.
 *
 * Numbers come in pairs of vectors, 2 · LANES at a time. A pair of bfloat16 is read as LANES words of 32 bits, whose
 * halves become float32 by a shift and a mask: half the work of widening, but the first vector of the pair holds the
 * even numbers and the second the odd ones. Queries are brought into that order before, outputs out of it after. */

typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(uvec) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ivec) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(half) __attribute__((vector_size(2 * LANES)));

#define vec NAME(vec)
#define uvec NAME(uvec)
#define ivec NAME(ivec)
#define half NAME(half)
#define PAIR (2 * LANES)

/* Four lanes at a time: the low halves of a and b interleaved; the high ones; their low and high pairs side by side. */
#if LANES == 16
#define LOW(a, b) SHUFFLE(ivec, a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(a, b) SHUFFLE(ivec, a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW2(a, b) SHUFFLE(ivec, a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) SHUFFLE(ivec, a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define BY8(a) SHUFFLE(ivec, a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define BY4(a) SHUFFLE(ivec, a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define FOLD(op, a) (a = op(a, BY8(a)), a = op(a, BY4(a)))
#elif LANES == 8
#define LOW(a, b) SHUFFLE(ivec, a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) SHUFFLE(ivec, a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW2(a, b) SHUFFLE(ivec, a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH2(a, b) SHUFFLE(ivec, a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define BY4(a) SHUFFLE(ivec, a, a, 4, 5, 6, 7, 0, 1, 2, 3)
#define FOLD(op, a) (a = op(a, BY4(a)))
#else
#define LOW(a, b) SHUFFLE(ivec, a, b, 0, 4, 1, 5)
#define HIGH(a, b) SHUFFLE(ivec, a, b, 2, 6, 3, 7)
#define LOW2(a, b) SHUFFLE(ivec, a, b, 0, 1, 4, 5)
#define HIGH2(a, b) SHUFFLE(ivec, a, b, 2, 3, 6, 7)
#define FOLD(op, a) ((void)0)
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

/* One vector of neighbours, in their order. */
INLINE vec NAME(load_lanes)(const char *at, int bf16)
{
    vec lanes;
    if (bf16) {
        half words;
        memcpy(&words, at, sizeof words);
        return (vec)(__builtin_convertvector(words, uvec) << 16);
    }
    memcpy(&lanes, at, sizeof lanes);
    return lanes;
}

/* The opposite of load. */
INLINE void NAME(store)(char *at, int bf16, vec first, vec second)
{
    if (bf16) {
        const uvec words = (uvec)first >> 16 | ((uvec)second & 0xffff0000u);
        memcpy(at, &words, sizeof words);
    } else {
        memcpy(at, &first, sizeof first);
        memcpy(at + sizeof first, &second, sizeof second);
    }
}

/* Four vectors become four numbers by joining interleaved halves, three operations for each instead of eight. */
#define REDUCE(op, a, b, c, d, numbers)                                                                                \
    do {                                                                                                               \
        vec ab = op(LOW(a, b), HIGH(a, b)), cd = op(LOW(c, d), HIGH(c, d));                                            \
        vec all = op(LOW2(ab, cd), HIGH2(ab, cd));                                                                     \
        FOLD(op, all);                                                                                                 \
        memcpy(numbers, &all, 16);                                                                                     \
    } while (0)
#define ADD(a, b) ((a) + (b))

INLINE void NAME(add_up)(vec a, vec b, vec c, vec d, float *sums)
{
    REDUCE(ADD, a, b, c, d, sums);
}

/* Lanewise the lesser of two; NaN where one of them is. */
INLINE vec NAME(least)(vec a, vec b)
{
    const ivec take = (a < b) | (a != a);
    return (vec)(((ivec)a & take) | ((ivec)b & ~take));
}

INLINE vec NAME(most)(vec a, vec b)
{
    const ivec take = (a > b) | (a != a);
    return (vec)(((ivec)a & take) | ((ivec)b & ~take));
}

/* Lanewise the greater of two; b where one of them is NaN. */
INLINE vec NAME(higher)(vec a, vec b)
{
    const ivec take = a > b;
    return (vec)(((ivec)a & take) | ((ivec)b & ~take));
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

static int64_t NAME(place)(int64_t index, int bf16)
{
    /* Where number `index` of a row stands among pairs of vectors. */
    int64_t inside = index % PAIR;
    return bf16 ? index - inside + inside / 2 + inside % 2 * LANES : index;
}

/* How many of the remaining rows to do at once: evenly split, at most MOST_ROWS. */
static int NAME(share)(int rest)
{
    int passes = (rest + MOST_ROWS - 1) / MOST_ROWS;
    return (rest + passes - 1) / passes;
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

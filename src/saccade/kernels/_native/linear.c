/* The product of one bfloat16 weight with a few rows: what decoding a token does with every layer's weights.
 *
 * All weights are read once per call, whatever the number of rows, and reading them is what the call costs. Several
 * neighbouring rows of the weight are done at once, against all rows of x, while those behind them are fetched line
 * after line: the memory is fastest in its own order (measured: twice as fast as four rows fetched side by side). Every
 * output is one sum in float32, whose order depends on the level alone: not on the rows that come with it, nor on the
 * threads. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bfloat16.h"
#include "compiler.h"
#include "pool.h"

#define MOST_ROWS 8          /* of x */
#define MOST_OUTPUTS 4       /* rows of the weight at once */
#define AHEAD 8192           /* bytes of the weight between what is fetched and what is read */
#define SPAN_BYTES (1 << 17) /* of the weight per item of the pool */
#define FAIR_BYTES (1 << 19) /* of the weight per thread: below, waking a thread costs more than it saves */

enum failure { DONE, BAD_SHAPE, NO_MEMORY };

struct job {
    const char *weight;   /* bfloat16 [outputs, inputs] */
    const uint16_t *bias; /* [outputs] or NULL */
    const char *x;        /* rows that are `step` bytes apart, as the level's spread makes them */
    uint16_t *y;          /* bfloat16 [rows, outputs] */
    int64_t rows, inputs, outputs, step, span;
};

#define LEVEL "linear_level.h"
#include "levels.h"

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 11 : __GNUC__ >= 11)
#define PRODUCTS /* the compiler knows the instructions that multiply bfloat16 */
#ifdef __clang__
#pragma clang attribute push(                                                                                          \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif
#define LANES 16
#define PAIRS_AT_ONCE
#define NAME(x) products_##x
#include LEVEL
#undef NAME
#undef PAIRS_AT_ONCE
#undef LANES
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

struct level {
    int64_t lanes, size; /* size: bytes of a number of x, as spread makes it */
    pool_task multiply;
    void (*spread)(char *, const uint16_t *, int64_t, int64_t);
};

/* What the machine has of at most `lanes` floats per vector (0: any). Above 16 there are products of bfloat16: as fast
 * as float32 for up to four rows, twice as fast for eight; they take denormal numbers for 0. */
static struct level choose(int64_t lanes)
{
    const int64_t own = machine_lanes(lanes);
#ifdef PRODUCTS
    if (own == 16 && (!lanes || lanes >= 32) && __builtin_cpu_supports("avx512bf16"))
        return (struct level){16, 2, products_multiply, products_spread};
#endif
    return (struct level){own, 4, OF_LEVEL(own, multiply), OF_LEVEL(own, spread)};
}

/* y = x · weightᵀ + bias, all bfloat16 and contiguous: x [rows, inputs], weight [outputs, inputs], bias [outputs] or
 * NULL, y [rows, outputs]; rounded once. `lanes`: widest vectors to use, as `choose` reads it. */
EXPORT int64_t saccade_linear(const uint16_t *x, const char *weight, const uint16_t *bias, uint16_t *y, int64_t rows,
                              int64_t inputs, int64_t outputs, int64_t threads, int64_t lanes)
{
    if (rows < 1 || rows > MOST_ROWS || inputs < 1 || outputs < 1)
        return BAD_SHAPE;
    const struct level level = choose(lanes);
    const int64_t pair = 2 * level.lanes, padded = (inputs + pair - 1) / pair * pair, step = padded * level.size;
    char *spread = aligned_alloc(64, (size_t)(rows * step + 63) / 64 * 64);
    if (!spread)
        return NO_MEMORY;
    for (int64_t row = 0; row < rows; row++)
        level.spread(spread + row * step, x + row * inputs, inputs, padded);
    const int64_t bytes = inputs * 2, fair = outputs * bytes / FAIR_BYTES;
    const int64_t useful = fair < 1 ? 1 : fair < threads ? fair : threads;
    int64_t span = useful > 1 ? SPAN_BYTES / bytes / MOST_OUTPUTS * MOST_OUTPUTS : outputs;
    span = span < MOST_OUTPUTS ? MOST_OUTPUTS : span;
    const struct job job = {weight, bias, spread, y, rows, inputs, outputs, step, span};
    pool_run(level.multiply, &job, (outputs + span - 1) / span, useful);
    free(spread);
    return DONE;
}

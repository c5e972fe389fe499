/* The product of linear.c, for vectors of LANES floats.
 *
 * With PAIRS_AT_ONCE neighbouring bfloat16 are multiplied and added up as they lie, else both become float32. */

#include "vectors.h"

/* Sums that registers hold beside what is added to them. */
#if LANES == 16 || !defined(__x86_64__)
#define MOST_SUMS 16
#else
#define MOST_SUMS 8
#endif

/* A row of x, 0 from `inputs` up to `padded`, in the order in which a weight's numbers are multiplied. */
static void NAME(spread)(char *to, const uint16_t *x, int64_t inputs, int64_t padded)
{
#ifdef PAIRS_AT_ONCE
    memcpy(to, x, sizeof *x * (size_t)inputs);
    memset(to + sizeof *x * (size_t)inputs, 0, sizeof *x * (size_t)(padded - inputs));
#else
    const int64_t whole = inputs / PAIR * PAIR;
    for (int64_t i = 0; i < padded; i += PAIR, to += 2 * sizeof(vec)) {
        uint16_t rest[PAIR] = {0};
        const uint16_t *from = i < whole ? x + i : memcpy(rest, x + i, sizeof *x * (size_t)(inputs - whole));
        vec first, second;
        NAME(load)((const char *)from, 1, &first, &second);
        memcpy(to, &first, sizeof first);
        memcpy(to + sizeof first, &second, sizeof second);
    }
#endif
}

/* Bytes that PAIR numbers of x take. */
#ifdef PAIRS_AT_ONCE
#define WIDTH (2 * PAIR)
#else
#define WIDTH (4 * PAIR)
#endif

/* Add PAIR products to the sums of `many` outputs and `rows` rows. */
INLINE void NAME(add_pairs)(vec sums[], const char *const weights[], int64_t from, const char *x, int64_t step,
                            int many, int rows)
{
#ifdef PAIRS_AT_ONCE
    __m512bh numbers[MOST_OUTPUTS];
    UNROLL
    for (int i = 0; i < many; i++)
        numbers[i] = (__m512bh)_mm512_loadu_si512(weights[i] + from);
    UNROLL
    for (int row = 0; row < rows; row++) {
        const __m512bh others = (__m512bh)_mm512_loadu_si512(x + row * step);
        UNROLL
        for (int i = 0; i < many; i++)
            sums[i * rows + row] = (vec)_mm512_dpbf16_ps((__m512)sums[i * rows + row], numbers[i], others);
    }
#else
    vec first[MOST_OUTPUTS], second[MOST_OUTPUTS];
    UNROLL
    for (int i = 0; i < many; i++)
        NAME(load)(weights[i] + from, 1, &first[i], &second[i]);
    UNROLL
    for (int row = 0; row < rows; row++) {
        vec left, right;
        memcpy(&left, x + row * step, sizeof left);
        memcpy(&right, x + row * step + sizeof left, sizeof right);
        UNROLL
        for (int i = 0; i < many; i++) {
            sums[i * rows + row] += first[i] * left;
            sums[i * rows + row] += second[i] * right;
        }
    }
#endif
}

/* `many` neighbouring outputs, from `output` on, of `rows` rows. */
INLINE void NAME(outputs)(const struct job *job, int64_t output, int many, int rows)
{
    const int64_t bytes = job->inputs * 2, whole = bytes / (2 * PAIR) * (2 * PAIR);
    const char *weights[MOST_OUTPUTS], *x = job->x;
    vec sums[MOST_SUMS] = {{0}};
    float totals[MOST_SUMS];
    UNROLL
    for (int i = 0; i < many; i++)
        weights[i] = job->weight + (output + i) * bytes;
    const char *ahead = weights[many - 1] + AHEAD;
    for (int64_t from = 0; from < whole; from += 2 * PAIR, x += WIDTH) {
        UNROLL
        for (int i = 0; i < many; i++, ahead += 2 * PAIR) {
            /* The processor drops what it cannot take at once: asked three times, it is a fifth faster (measured). */
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead - AHEAD / 2, 0, 2);
            __builtin_prefetch(ahead - AHEAD / 4 * 3, 0, 2);
        }
        NAME(add_pairs)(sums, weights, from, x, job->step, many, rows);
    }
    if (whole < bytes) {
        char rest[MOST_OUTPUTS][2 * PAIR] = {{0}};
        const char *rests[MOST_OUTPUTS];
        UNROLL
        for (int i = 0; i < many; i++)
            rests[i] = memcpy(rest[i], weights[i] + whole, (size_t)(bytes - whole));
        NAME(add_pairs)(sums, rests, 0, x, job->step, many, rows);
    }
    UNROLL
    for (int i = 0; i < many * rows; i += 4)
        NAME(add_up)(sums[i], sums[i + 1], sums[i + 2], sums[i + 3], totals + i);
    for (int i = 0; i < many; i++)
        for (int row = 0; row < rows; row++) {
            float total = totals[i * rows + row];
            if (job->bias)
                total += widen(job->bias[output + i]);
            job->y[row * job->outputs + output + i] = narrow(total);
        }
}

/* As many outputs at once as there are registers for. */
#define MANY(rows) (4 * (rows) <= MOST_SUMS ? 4 : 2 * (rows) <= MOST_SUMS ? 2 : 1)
#define ROWS(rows)                                                                                                     \
    case rows:                                                                                                         \
        for (; output + MANY(rows) <= end; output += MANY(rows))                                                       \
            NAME(outputs)(job, output, MANY(rows), rows);                                                              \
        for (; output < end; output++)                                                                                 \
            NAME(outputs)(job, output, 1, rows);                                                                       \
        break;

static void NAME(multiply)(const void *work, int64_t index)
{
    const struct job *job = work;
    int64_t output = index * job->span;
    const int64_t end = output + job->span < job->outputs ? output + job->span : job->outputs;
    switch (job->rows) {
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4)
        ROWS(5)
        ROWS(6)
        ROWS(7)
        ROWS(8)
    }
}

#undef ROWS
#undef MANY
#undef MOST_SUMS
#undef WIDTH
#include "forget.h"

/* Upper bounds of neighbouring nodes for one query; levels.h includes this file once per instruction set. */

#define MOST_ROWS 1
#include "vectors.h"

/* `bounds[i]` = query · vector i + norm · radius i, for vectors of `dim` numbers one behind the other. The query's
 * numbers lie as `place` says; `dim` is a multiple of PAIR. */
static void NAME(bound_nodes)(const float *query, float norm, const char *vectors, const float *radii, int64_t count,
                              int64_t dim, int bf16, float *bounds)
{
    const int64_t pairs = dim / PAIR, size = PAIR * (bf16 ? 2 : 4);
    for (int64_t node = 0; node < count; node += 4) {
        const char *at[4];
        vec sums[4];
        float products[4];
        UNROLL for (int u = 0; u < 4; u++) {
            at[u] = vectors + (node + u < count ? node + u : count - 1) * pairs * size;
            sums[u] = (vec){0};
        }
        for (int64_t pair = 0; pair < pairs; pair++) {
            vec even, odd, first, second;
            memcpy(&even, query + pair * PAIR, sizeof even);
            memcpy(&odd, query + pair * PAIR + LANES, sizeof odd);
            UNROLL for (int u = 0; u < 4; u++) {
                NAME(load)(at[u] + pair * size, bf16, &first, &second);
                sums[u] += first * even;
                sums[u] += second * odd;
            }
        }
        NAME(add_up)(sums[0], sums[1], sums[2], sums[3], products);
        for (int64_t i = node; i < node + 4 && i < count; i++)
            bounds[i] = products[i - node] + norm * radii[i];
    }
}

/* The query in the order in which vectors are read. */
static void NAME(order_query)(const float *query, int64_t dim, int bf16, float *ordered)
{
    for (int64_t i = 0; i < dim; i++)
        ordered[NAME(place)(i, bf16)] = query[i];
}

#undef MOST_ROWS
#include "forget.h"

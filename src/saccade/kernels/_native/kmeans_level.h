/* The nearest centroids of some vectors, by tiles of inner products; levels.h includes this file once per instruction
 * set. A product is summed in the order of its numbers, so that it does not depend on the tile it is in. */

#define MOST_ROWS (LANES == 16 ? 4 : 2)
#define TILE (MOST_ROWS * LANES) /* columns; a panel of packed centroids has as many */
#include "vectors.h"

/* `panel` has the numbers of TILE centroids, [dim][TILE]. Bit i of the result: row i has a product of at
 * least `floors[i]`. */
INLINE int NAME(multiply)(const float *const rows[ROWS], const float *panel, int64_t dim, const float *floors,
                          float products[ROWS][TILE])
{
    vec sums[ROWS][MOST_ROWS];
    UNROLL for (int row = 0; row < ROWS; row++)
        UNROLL for (int i = 0; i < MOST_ROWS; i++)
            sums[row][i] = (vec){0};
    for (int64_t at = 0; at < dim; at++) {
        vec columns[MOST_ROWS];
        UNROLL for (int i = 0; i < MOST_ROWS; i++)
            memcpy(&columns[i], panel + at * TILE + i * LANES, sizeof(vec));
        UNROLL for (int row = 0; row < ROWS; row++) {
            const float number = rows[row][at];
            UNROLL for (int i = 0; i < MOST_ROWS; i++)
                sums[row][i] += columns[i] * number;
        }
    }
    int reached = 0;
    UNROLL for (int row = 0; row < ROWS; row++) {
        ivec any = sums[row][0] >= floors[row];
        UNROLL for (int i = 1; i < MOST_ROWS; i++)
            any |= sums[row][i] >= floors[row];
        int64_t words[LANES / 2], found = 0;
        memcpy(words, &any, sizeof any);
        UNROLL for (int i = 0; i < LANES / 2; i++)
            found |= words[i];
        if (found) {
            UNROLL for (int i = 0; i < MOST_ROWS; i++)
                memcpy(products[row] + i * LANES, &sums[row][i], sizeof(vec));
            reached |= 1 << row;
        }
    }
    return reached;
}

/* Bring `nearest` of up to ROWS vectors up to date with columns `from..to` of the packed centroids. */
static __attribute__((aligned(64))) void NAME(scan)(const struct packed *packed, const float *const rows[ROWS],
                                                     struct nearest *const nearest[ROWS], int count, int64_t from,
                                                     int64_t to)
{
    _Alignas(64) float products[ROWS][TILE];
    float floors[ROWS];
    for (int row = 0; row < ROWS; row++)
        floors[row] = row < count ? nearest[row]->others : INFINITY;
    for (int64_t panel = from / TILE; panel * TILE < to; panel++) {
        const float *numbers = packed->panels + panel * TILE * packed->dim;
        int reached = NAME(multiply)(rows, numbers, packed->dim, floors, products) & ((1 << count) - 1);
        const int64_t first = panel * TILE > from ? panel * TILE : from;
        const int64_t stop = panel * TILE + TILE < to ? panel * TILE + TILE : to;
        for (int row = 0; reached; row++, reached >>= 1) {
            if (!(reached & 1))
                continue;
            /* Most products are below: one comparison for each of them. */
            for (int64_t column = first; column < stop; column++)
                if (products[row][column - panel * TILE] >= floors[row]) {
                    consider(nearest[row], products[row][column - panel * TILE], packed->numbers[column]);
                    floors[row] = nearest[row]->others;
                }
        }
    }
}

static void NAME(pack)(const struct packed *packed, const float *centroids)
{
    for (int64_t column = 0; column < packed->room; column++) {
        float *to = packed->panels + column / TILE * TILE * packed->dim + column % TILE;
        for (int64_t i = 0; i < packed->dim; i++)
            to[i * TILE] = column < packed->count ? centroids[packed->numbers[column] * packed->dim + i] : 0.0f;
    }
}

#undef TILE
#undef MOST_ROWS
#include "forget.h"

/* Shares of attention that sets should draw; levels.h includes this file once per instruction set. */

#define MOST_ROWS 1
#include "vectors.h"

/* Numbers `at` to `at` + LANES of `count`; 0 behind them. */
INLINE vec NAME(some)(const float *numbers, int64_t at, int64_t count)
{
    vec lanes = {0};
    if (at + LANES <= count)
        memcpy(&lanes, numbers + at, sizeof lanes);
    else
        memcpy(&lanes, numbers + at, sizeof(float) * (size_t)(count - at));
    return lanes;
}

/* Add the softmax over `count` sets of scale · (product + deviation · spread) + log to `shares`, as `logits` may be
 * overwritten. Where a log is -infinity there is no set, whatever else is left of it. Logs, logits and shares have room
 * for whole vectors. */
static void NAME(add_shares)(const struct sets *sets, const float *products, float deviation, float *logits,
                             float *shares)
{
    const int64_t count = sets->count;
    vec most = (vec){0} - INFINITY, total = {0};
    for (int64_t at = 0; at < count; at += LANES) {
        const vec product = NAME(some)(products, at, count), spread = NAME(some)(sets->spreads, at, count);
        vec log;
        memcpy(&log, sets->logs + at, sizeof log);
        const ivec there = log > -INFINITY;
        const vec found = sets->scale * (product + deviation * spread) + log;
        const vec logit = (vec)(((ivec)found & there) | ((ivec)log & ~there));
        most = NAME(higher)(logit, most);
        memcpy(logits + at, &logit, sizeof logit);
    }
    float largest = -INFINITY, sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++)
        largest = most[lane] > largest ? most[lane] : largest;
    for (int64_t at = 0; at < count; at += LANES) {
        vec logit;
        memcpy(&logit, logits + at, sizeof logit);
        logit = NAME(exp)(logit - largest);
        total += logit;
        memcpy(logits + at, &logit, sizeof logit);
    }
    for (int lane = 0; lane < LANES; lane++)
        sum += total[lane];
    for (int64_t at = 0; at < count; at += LANES) {
        vec share, part;
        memcpy(&share, shares + at, sizeof share);
        memcpy(&part, logits + at, sizeof part);
        share += part / sum;
        memcpy(shares + at, &share, sizeof share);
    }
}

#undef MOST_ROWS
#include "forget.h"

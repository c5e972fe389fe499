/* A small pool of threads for the kernels. */
#ifndef SACCADE_POOL_H
#define SACCADE_POOL_H

#include <stdint.h>

typedef void (*pool_task)(const void *job, int64_t index);

/* Run task(job, 0 .. count - 1), the caller and at most `threads` - 1 others taking one index after the other; returns
 * when all are done. A pool that serves another caller is not waited for: then the caller does everything itself. */
void pool_run(pool_task task, const void *job, int64_t count, int64_t threads);

#endif

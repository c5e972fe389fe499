/* Threads that sleep between jobs. Not OpenMP: torch brings its own runtime, and two of them spin against each other. */
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

#define MOST_WORKERS 255

static struct {
    pthread_mutex_t owner; /* held by the caller whose job runs */
    pthread_mutex_t lock;  /* guards everything below but `next` */
    pthread_cond_t start, finished;
    uint64_t generation; /* number of the job, so that a worker takes part in each at most once */
    int64_t workers;     /* threads that exist */
    int64_t open;        /* workers that may still join the current job; 0 once the caller has seen its end */
    int64_t running;     /* workers inside the current job */
    int64_t next, count; /* next index to take, by atomic addition */
    pool_task task;
    const void *job;
} pool = {
    .owner = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .start = PTHREAD_COND_INITIALIZER,
    .finished = PTHREAD_COND_INITIALIZER,
};

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void take(pool_task task, const void *job, int64_t count)
{
    for (;;) {
        int64_t index = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED);
        if (index >= count)
            return;
        task(job, index);
    }
}

static void *work(void *unused)
{
    (void)unused;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.open == 0 || pool.generation == seen)
            pthread_cond_wait(&pool.start, &pool.lock);
        seen = pool.generation;
        pool.open--;
        pool.running++;
        pool_task task = pool.task;
        const void *job = pool.job;
        int64_t count = pool.count;
        pthread_mutex_unlock(&pool.lock);
        take(task, job, count);
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0)
            pthread_cond_signal(&pool.finished);
    }
    return NULL;
}

/* A fork waits for the current job and takes both locks, so that the child finds the state at rest. Its threads are
 * gone: it starts from nothing and makes its own when it needs some. */
static void before_fork(void)
{
    pthread_mutex_lock(&pool.owner);
    pthread_mutex_lock(&pool.lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owner);
}

static void in_child(void)
{
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.start, NULL);
    pthread_cond_init(&pool.finished, NULL);
    pool.generation = 0;
    pool.workers = pool.open = pool.running = 0;
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}

/* Create workers until there are `wanted`, or as many as the system gives. */
static void grow(int64_t wanted)
{
    sigset_t all, old;
    pthread_attr_t detached;
    if (pool.workers >= wanted)
        return;
    if (pthread_attr_init(&detached))
        return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    /* The stack of some systems (macOS: 512 KB, musl: 128 KB) is near what an item needs. */
    pthread_attr_setstacksize(&detached, 1 << 20);
    /* A worker inherits a full mask: signals are for the threads of the program. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (pool.workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, work, NULL))
            break;
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&detached);
}

void pool_run(pool_task task, const void *job, int64_t count, int64_t threads)
{
    if (threads > count)
        threads = count;
    if (threads > MOST_WORKERS + 1)
        threads = MOST_WORKERS + 1;
    if (threads > 1)
        pthread_once(&once, watch_forks);
    if (threads <= 1 || pthread_mutex_trylock(&pool.owner)) {
        for (int64_t index = 0; index < count; index++)
            task(job, index);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    grow(threads - 1);
    pool.task = task;
    pool.job = job;
    pool.count = count;
    __atomic_store_n(&pool.next, 0, __ATOMIC_RELAXED);
    pool.open = threads - 1 < pool.workers ? threads - 1 : pool.workers;
    pool.generation++;
    pthread_cond_broadcast(&pool.start);
    pthread_mutex_unlock(&pool.lock);
    take(task, job, count);
    /* Whoever has not woken by now is not needed any more, and must not join: the job's memory ends with this call. */
    pthread_mutex_lock(&pool.lock);
    pool.open = 0;
    while (pool.running)
        pthread_cond_wait(&pool.finished, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owner);
}

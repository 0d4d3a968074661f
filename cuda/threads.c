/* The pool: workers sleep on a condition variable, having been awake for a moment in case more work
 * follows at once, as it does from layer to layer: to be woken takes as long as a small model's
 * attention. Meanwhile they yield to any thread that has work, such as torch's own. A round of
 * work is announced by a step of `round`; jobs are handed out by an atomic counter; the caller
 * takes part, then waits for the workers that joined, awake too. Workers start at first use. A
 * forked child has none and starts anew. */
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { MAX_THREADS = 256, AWAKE_NS = 100000 };

#define STAY_AWAKE_WHILE(condition)                                                       \
    for (int64_t until = nanoseconds() + AWAKE_NS; (condition) && nanoseconds() < until;) \
    pause_briefly()

static struct {
    pthread_mutex_t owner; /* held by the caller whose jobs run */
    pthread_mutex_t lock;  /* guards what follows, and the two conditions */
    pthread_cond_t wake, idle;
    int num_workers, sleeping, threads; /* of this round */
    int64_t num_jobs;
    rx_job *run; /* NULL: a worker late for its round has nothing to join */
    void *context;
    atomic_uint round;
    atomic_int joined, num_threads; /* the latter is what callers are told to use */
    atomic_int_fast64_t next;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .idle = PTHREAD_COND_INITIALIZER,
          .num_threads = 1};

static void forget_workers(void) {
    pool.num_workers = pool.sleeping = pool.joined = 0;
    pool.run = NULL;
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.idle, NULL);
}

static void set_up(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void take_jobs(int64_t num_jobs, rx_job *run, void *context, int thread) {
    for (;;) {
        const int64_t job = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (job >= num_jobs) return;
        run(context, job, thread);
    }
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    for (int i = 0; i < 16; i++) __builtin_ia32_pause();
#elif defined(__aarch64__)
    for (int i = 0; i < 16; i++) __asm__ volatile("yield");
#endif
    sched_yield();
}

static void *work(void *number) {
    const int thread = (int)(intptr_t)number;
    unsigned seen = 0;
    for (;;) {
        STAY_AWAKE_WHILE(atomic_load(&pool.round) == seen);
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.round) == seen) {
            pool.sleeping++;
            pthread_cond_wait(&pool.wake, &pool.lock);
            pool.sleeping--;
        }
        seen = atomic_load(&pool.round);
        rx_job *run = thread < pool.threads ? pool.run : NULL;
        void *context = pool.context;
        const int64_t num_jobs = pool.num_jobs;
        if (run) atomic_fetch_add(&pool.joined, 1);
        pthread_mutex_unlock(&pool.lock);
        if (!run) continue;
        take_jobs(num_jobs, run, context, thread);
        pthread_mutex_lock(&pool.lock);
        if (atomic_fetch_sub(&pool.joined, 1) == 1) pthread_cond_signal(&pool.idle);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

static void start_workers(int wanted) {
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    for (pthread_t id; pool.num_workers < wanted; pool.num_workers++)
        if (pthread_create(&id, &attr, work, (void *)(intptr_t)(pool.num_workers + 1))) break;
    pthread_attr_destroy(&attr);
}

void rx_parallel(int threads, int64_t num_jobs, rx_job *run, void *context) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_up);
    if (threads == 1 || num_jobs < 2 || pthread_mutex_trylock(&pool.owner)) {
        for (int64_t job = 0; job < num_jobs; job++) run(context, job, 0);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    start_workers(threads - 1);
    pool.threads = threads;
    pool.run = run;
    pool.context = context;
    pool.num_jobs = num_jobs;
    atomic_store(&pool.next, 0);
    atomic_fetch_add(&pool.round, 1);
    if (pool.sleeping) pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    take_jobs(num_jobs, run, context, 0);
    pthread_mutex_lock(&pool.lock);
    pool.run = NULL;
    pthread_mutex_unlock(&pool.lock);
    STAY_AWAKE_WHILE(atomic_load(&pool.joined));
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.joined)) pthread_cond_wait(&pool.idle, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owner);
}

void rx_set_num_threads(int num_threads) {
    const int n = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
    atomic_store(&pool.num_threads, n > 1 ? n : 1);
}

int rx_num_threads(void) { return atomic_load(&pool.num_threads); }

/* The pool: workers sleep on a condition variable, having spun for a moment in case more work
 * follows at once, as it does from layer to layer. A round of work is announced by an odd-even
 * step of `round`; jobs are handed out by an atomic counter; the caller takes part, then waits for
 * the workers that joined. Workers start at first use. A forked child has none and starts anew. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { MAX_THREADS = 256, SPINS = 2000 };

static struct {
    pthread_mutex_t owner;  /* held by the caller whose jobs run */
    pthread_mutex_t lock;   /* guards what follows, and the two conditions */
    pthread_cond_t wake, idle;
    int num_threads, num_workers, joined, sleeping;
    atomic_uint round;
    atomic_int_fast64_t next;
    int64_t num_jobs;
    void (*run)(void *, int64_t);
    void *context;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .idle = PTHREAD_COND_INITIALIZER,
          .num_threads = 1};

static pthread_key_t memory_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

struct memory {
    void *slots[2];
    size_t bytes[2];
};

static void free_memory(void *value) {
    struct memory *memory = value;
    free(memory->slots[0]);
    free(memory->slots[1]);
    free(memory);
}

static void before_fork(void) {
    pthread_mutex_lock(&pool.owner);
    pthread_mutex_lock(&pool.lock);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owner);
}

static void after_fork_in_child(void) {
    pool.num_workers = pool.sleeping = 0;
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.idle, NULL);
    after_fork_in_parent();
}

static void set_up(void) {
    pthread_key_create(&memory_key, free_memory);
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void *rx_thread_memory(int slot, size_t bytes) {
    pthread_once(&once, set_up);
    struct memory *memory = pthread_getspecific(memory_key);
    if (!memory) {
        memory = calloc(1, sizeof *memory);
        if (!memory || pthread_setspecific(memory_key, memory)) return free(memory), NULL;
    }
    if (memory->bytes[slot] < bytes) {
        free(memory->slots[slot]);
        bytes = (bytes + 4095) & ~(size_t)4095;
        memory->slots[slot] = aligned_alloc(64, bytes);
        memory->bytes[slot] = memory->slots[slot] ? bytes : 0;
    }
    return memory->slots[slot];
}

static void take_jobs(int64_t num_jobs, void (*run)(void *, int64_t), void *context) {
    for (;;) {
        const int64_t job = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (job >= num_jobs) return;
        run(context, job);
    }
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void *work(void *unused) {
    (void)unused;
    unsigned seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.round) == seen; i++) pause_briefly();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.round) == seen) {
            pool.sleeping++;
            pthread_cond_wait(&pool.wake, &pool.lock);
            pool.sleeping--;
        }
        seen = atomic_load(&pool.round);
        /* None is open for a worker late for its round, or beyond the number wanted by now. */
        void (*run)(void *, int64_t) = pool.joined < pool.num_threads - 1 ? pool.run : NULL;
        void *context = pool.context;
        const int64_t num_jobs = pool.num_jobs;
        if (run) pool.joined++;
        pthread_mutex_unlock(&pool.lock);
        if (!run) continue;
        take_jobs(num_jobs, run, context);
        pthread_mutex_lock(&pool.lock);
        if (--pool.joined == 0) pthread_cond_signal(&pool.idle);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

static void start_workers(int wanted) {
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (pool.num_workers < wanted && !pthread_create(&thread, &attr, work, NULL))
        pool.num_workers++;
    pthread_attr_destroy(&attr);
}

void rx_parallel(int64_t num_jobs, void (*run)(void *, int64_t), void *context) {
    pthread_once(&once, set_up);
    const int threads = rx_num_threads();
    if (threads == 1 || num_jobs < 2 || pthread_mutex_trylock(&pool.owner)) {
        for (int64_t job = 0; job < num_jobs; job++) run(context, job);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    start_workers(threads - 1);
    pool.run = run;
    pool.context = context;
    pool.num_jobs = num_jobs;
    atomic_store(&pool.next, 0);
    atomic_fetch_add(&pool.round, 1);
    if (pool.sleeping) pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    take_jobs(num_jobs, run, context);
    pthread_mutex_lock(&pool.lock);
    pool.run = NULL;
    while (pool.joined) pthread_cond_wait(&pool.idle, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owner);
}

void rx_set_num_threads(int num_threads) {
    pthread_mutex_lock(&pool.lock);
    pool.num_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    pthread_mutex_unlock(&pool.lock);
}

int rx_num_threads(void) {
    pthread_mutex_lock(&pool.lock);
    const int n = pool.num_threads;
    pthread_mutex_unlock(&pool.lock);
    return n;
}

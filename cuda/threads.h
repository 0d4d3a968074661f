/* A small pool of threads for the C kernels. */
#ifndef RX_THREADS_H
#define RX_THREADS_H

#include <stddef.h>
#include <stdint.h>

/* Runs run(context, job) once for each job in [0, num_jobs), in any order, on the pool's threads
 * and the caller's; returns when all are done. While another caller has the pool, the jobs run on
 * the caller's thread alone. */
void rx_parallel(int64_t num_jobs, void (*run)(void *context, int64_t job), void *context);

/* Threads that take part, the caller's included; at least 1. */
void rx_set_num_threads(int num_threads);
int rx_num_threads(void);

/* This thread's own memory `slot` (0 or 1) of at least `bytes`, aligned to 64, kept between calls
 * and freed with the thread; contents are not kept when it grows. NULL when there is no memory. */
void *rx_thread_memory(int slot, size_t bytes);

#endif

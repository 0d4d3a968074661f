/* A small pool of threads for the C kernels. */
#ifndef RX_THREADS_H
#define RX_THREADS_H

#include <stdint.h>

/* `thread` is in [0, threads), of no other job that runs for the same caller. */
typedef void rx_job(void *context, int64_t job, int thread);

/* Runs each job in [0, num_jobs) once, in any order, on at most `threads`, the caller's included;
 * returns when all are done. While another caller has the pool, the jobs run on the caller's
 * thread alone. */
void rx_parallel(int threads, int64_t num_jobs, rx_job *run, void *context);

/* Threads that take part, the caller's included; at least 1. */
void rx_set_num_threads(int num_threads);
int rx_num_threads(void);

#endif

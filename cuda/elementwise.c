/* What stands between a model's matrix products, on CPUs: RMS norm and rotary embedding. Rows are
 * bf16, sums and products fp32, and each result is rounded once. The loops are plain C,
 * compiled for each instruction set; `LANES` sums a row keep it free of an order of additions
 * that the compiler could not vectorise. */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 32, ELEMS_A_JOB = 32768 };

INLINE float load(const uint16_t *p, int64_t i) {
    const uint32_t bits = (uint32_t)p[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounds to the nearest, ties to even. */
INLINE void store(uint16_t *p, int64_t i, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    p[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE void norm_row(const struct rx_rows *r, int64_t x, int64_t out) {
    float sums[LANES] = {0}, sum = 0;
    int i = 0;
    for (; i + LANES <= r->dim; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const float value = load(r->x, x + i + j);
            sums[j] += value * value;
        }
    for (; i < r->dim; i++) sums[i % LANES] += load(r->x, x + i) * load(r->x, x + i);
    for (int j = 0; j < LANES; j++) sum += sums[j];
    const float scale = 1.0f / sqrtf(sum / (float)r->dim + r->eps);
#pragma GCC ivdep /* out may be x itself */
    for (i = 0; i < r->dim; i++)
        store(r->out, out + i, load(r->x, x + i) * scale * load(r->weight, i));
}

/* The first rotary_dim elements of a head are pairs (i, i + rotary_dim / 2), each turned by the
 * token's angle i. */
INLINE void rotate_row(const struct rx_rows *r, int64_t x, int64_t out, int64_t angle) {
    const int half = r->rotary_dim / 2;
#pragma GCC ivdep
    for (int i = 0; i < half; i++) {
        const float a = load(r->x, x + i), b = load(r->x, x + half + i);
        const float cos_a = load(r->cos, angle + i), sin_a = load(r->sin, angle + i);
        store(r->out, out + i, a * cos_a - b * sin_a);
        store(r->out, out + half + i, b * cos_a + a * sin_a);
    }
}

INLINE void run_rows(const struct rx_rows *r, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < r->num_heads; h++) {
            const int64_t x = t * r->x_stride + h * r->dim, out = t * r->out_stride + h * r->dim;
            if (r->weight)
                norm_row(r, x, out);
            else
                rotate_row(r, x, out, t * r->rotary_dim);
        }
}

#define VARIANT(name)                                                       \
    static void name(const struct rx_rows *r, int64_t begin, int64_t end) { \
        run_rows(r, begin, end);                                            \
    }

VARIANT(run_plain)
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) VARIANT(run_avx2)
__attribute__((target("avx512f,avx512bw,avx512vl,fma,prefer-vector-width=512"))) VARIANT(run_avx512)
#endif

static int64_t tokens_a_job(const struct rx_rows *r) {
    return 1 + ELEMS_A_JOB / ((int64_t)r->num_heads * r->dim);
}

static void run_job(void *context, int64_t job, int thread) {
    (void)thread;
    const struct rx_rows *r = context;
    const int64_t step = tokens_a_job(r), begin = job * step;
    const int64_t end = begin + step < r->num_tokens ? begin + step : r->num_tokens;
#if defined(__x86_64__)
    const char *isa = rx_cpu_isa();
    if (!strcmp(isa, "avx2")) return run_avx2(r, begin, end);
    if (strcmp(isa, "plain")) return run_avx512(r, begin, end);
#endif
    run_plain(r, begin, end);
}

void rx_rows_cpu(struct rx_rows *rows) {
    const int64_t step = tokens_a_job(rows);
    rx_parallel((rows->num_tokens + step - 1) / step, run_job, rows);
}

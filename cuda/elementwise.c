/* What stands between a model's matrix products, on CPUs: RMS norm, rotary embedding and the
 * gate of a feed-forward layer. Rows are fp32 or bf16, sums and products fp32, and each result is
 * rounded once. The loops are plain C, compiled for each instruction set; `LANES` sums a row keep
 * it free of an order of additions that the compiler could not vectorise. */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 32, ELEMS_A_JOB = 32768 };

INLINE float load(enum rx_dtype dtype, const void *p, int64_t i) {
    if (dtype == RX_F32) return ((const float *)p)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounds to the nearest, ties to even. */
INLINE void store(enum rx_dtype dtype, void *p, int64_t i, float x) {
    if (dtype == RX_F32) {
        ((float *)p)[i] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    ((uint16_t *)p)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* e^x for |x| <= 87 to 2e-7 of it: 2^n e^r with |r| <= ln(2) / 2, e^r by its series. */
INLINE float exponential(float x) {
    const float n = rintf(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln(2) in two parts */
    float e = 1.0f / 5040;
    e = e * r + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return e * scale;
}

INLINE void norm_row(enum rx_dtype dtype, const struct rx_rows *r, int64_t x, int64_t out) {
    float sums[LANES] = {0}, sum = 0;
    int i = 0;
    for (; i + LANES <= r->dim; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const float value = load(dtype, r->x, x + i + j);
            sums[j] += value * value;
        }
    for (; i < r->dim; i++) {
        const float value = load(dtype, r->x, x + i);
        sums[i % LANES] += value * value;
    }
    for (int j = 0; j < LANES; j++) sum += sums[j];
    const float scale = 1.0f / sqrtf(sum / (float)r->dim + r->eps);
#pragma GCC ivdep /* out may be x itself */
    for (i = 0; i < r->dim; i++)
        store(dtype, r->out, out + i,
              load(dtype, r->x, x + i) * scale * load(dtype, r->weight, i));
}

/* The first rotary_dim elements of a head are pairs (i, i + rotary_dim / 2), each turned by the
 * token's angle i. */
INLINE void rotate_row(enum rx_dtype dtype, const struct rx_rows *r, int64_t x, int64_t out,
                       int64_t angle) {
    const int half = r->rotary_dim / 2;
#pragma GCC ivdep
    for (int i = 0; i < half; i++) {
        const float a = load(dtype, r->x, x + i), b = load(dtype, r->x, x + half + i);
        const float cos_a = load(dtype, r->cos, angle + i), sin_a = load(dtype, r->sin, angle + i);
        store(dtype, r->out, out + i, a * cos_a - b * sin_a);
        store(dtype, r->out, out + half + i, b * cos_a + a * sin_a);
    }
}

/* A row is 2 * dim long, gates and then values; gate / (1 + e^-gate) * value. */
INLINE void gate_row(enum rx_dtype dtype, const struct rx_rows *r, int64_t x, int64_t out) {
#pragma GCC ivdep
    for (int i = 0; i < r->dim; i++) {
        const float gate = load(dtype, r->x, x + i);
        const float low = gate < -87.0f ? -87.0f : gate > 87.0f ? 87.0f : gate;
        store(dtype, r->out, out + i,
              gate / (1.0f + exponential(-low)) * load(dtype, r->x, x + r->dim + i));
    }
}

INLINE void run_rows(enum rx_dtype dtype, const struct rx_rows *r, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < r->num_heads; h++) {
            const int64_t x = t * r->x_stride + h * r->dim, out = t * r->out_stride + h * r->dim;
            if (r->weight)
                norm_row(dtype, r, x, out);
            else if (r->cos)
                rotate_row(dtype, r, x, out, t * r->rotary_dim);
            else
                gate_row(dtype, r, x, out);
        }
}

#define VARIANT(name)                                                       \
    static void name(const struct rx_rows *r, int64_t begin, int64_t end) { \
        if (r->dtype == RX_F32)                                             \
            run_rows(RX_F32, r, begin, end);                                \
        else                                                                \
            run_rows(RX_BF16, r, begin, end);                               \
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
    rx_parallel(rx_num_threads(), (rows->num_tokens + step - 1) / step, run_job, rows);
}

/* The tile kernel in vectors of VL floats, compiled once for each instruction set, whose file
 * defines VL, vmax, bcast4 and the register blocks before it includes this one.
 *
 * A vector holds 4 floats of each of VL/4 rows, in lanes of 128 bits:
 *
 *     queries   q[row vector][d / 4][row][d % 4]
 *     logits    s[row vector][token / 4][row][token % 4]      then, in place, weights
 *     outputs   o[row vector][d / 4][row][d % 4]
 *
 * so that keys and values are used as they lie in the page, 4 floats broadcast to all rows, and
 * nothing is transposed but 4 x 4 sums. Rows in fp32 whose width is a multiple of 4 are read in
 * place; others are widened to fp32 a block at a time. */
#include "attention_tile.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#ifndef max_of_lanes
#define max_of_lanes(x) (x)
#define sum_of_lanes(x) (x)
#endif

enum { ROWS_PER_VEC = VL / 4, MAX_VECS = MAX_ROWS / ROWS_PER_VEC, GROUPS = BLOCK / 4, RUN = 8 };

/* How logits lie in vectors: QUADS as above; attention_amx.c has [token][16 rows] and, for up to 4
 * rows, [4 tokens][4 rows]. */
enum layout { QUADS, ROWS, COMPACT };

typedef float vf __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vf_any __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(VL * 2), aligned(2), may_alias));

#if VL == 16
#define PER_ROW(a, b, c, d) \
    {a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d, 8 + a, 8 + b, 8 + c, 8 + d, 12 + a, 12 + b, 12 + c, \
     12 + d}
#elif VL == 8
#define PER_ROW(a, b, c, d) {a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d}
#else
#define PER_ROW(a, b, c, d) {a, b, c, d}
#endif

struct scratch {
    float *q, *s, *o, *kv;
    vf m[MAX_VECS], l[MAX_VECS], fix[MAX_VECS];
    vi low[MAX_VECS], high[MAX_VECS];
};

/* Where the keys and values of up to BLOCK tokens lie, in runs of RUN tokens. */
struct block {
    int n;
    const char *k[BLOCK / RUN], *v[BLOCK / RUN];
};

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf select_vf(vi take, vf a, vf b) { return (vf)((take & (vi)a) | (~take & (vi)b)); }

/* 2^x for x <= 0, exactly 0 for -infinity; relative error below 3e-7. Polynomial of 2^f on
 * [-1/2, 1/2] fitted at Chebyshev nodes; 2^0 is exactly 1. */
INLINE vf exp2_vf(vf x) {
#ifdef exp2_scale
    x = vmax(splat(-512.0f), x);
    const vf n = round_vf(x), f = x - n;
#else
    x = vmax(splat(-127.0f), x);
    const vf shifted = x + 12582912.0f; /* 1.5 * 2^23: rounds to an integer in the low bits */
    const vf f = x - (shifted - 12582912.0f);
#endif
    vf p = f * 0x1.5f0896p-10f + 0x1.3cbf6cp-7f;
    p = p * f + 0x1.c6af6cp-5f;
    p = p * f + 0x1.ebfa4ap-3f;
    p = p * f + 0x1.62e430p-1f;
    p = p * f + 1.0f;
#ifdef exp2_scale
    return exp2_scale(p, n);
#else
    return p * (vf)(((vu)shifted + 127) << 23);
#endif
}

INLINE float exp2_scalar(float x) { return exp2_vf(splat(x))[0]; }

/* cap * tanh(x / cap) with 2/cap and cap in base 2 folded in: `twice` = 2 log2(e) / cap. */
INLINE vf soft_cap(vf x, float twice, float cap) {
    const vi sign = (vi)x & (int32_t)0x80000000;
    const vf e = exp2_vf((vf)((vi)(x * twice) | (int32_t)0x80000000));
    return (vf)((vi)(cap * (1.0f - e) / (1.0f + e)) | sign);
}

INLINE vf spread(vf x, int i) { return __builtin_shuffle(x, (vi)PER_ROW(i, i, i, i)); }

/* Vectors of 4 partial sums for one token each to one vector of 4 tokens. */
INLINE vf sum4(vf a, vf b, vf c, vf d) {
    const vi lo = PER_ROW(0, VL, 1, VL + 1), hi = PER_ROW(2, VL + 2, 3, VL + 3);
    const vi lo2 = PER_ROW(0, 1, VL, VL + 1), hi2 = PER_ROW(2, 3, VL + 2, VL + 3);
    const vf ab = __builtin_shuffle(a, b, lo) + __builtin_shuffle(a, b, hi);
    const vf cd = __builtin_shuffle(c, d, lo) + __builtin_shuffle(c, d, hi);
    return __builtin_shuffle(ab, cd, lo2) + __builtin_shuffle(ab, cd, hi2);
}

INLINE vf max_in_row(vf x) {
    x = vmax(x, __builtin_shuffle(x, (vi)PER_ROW(2, 3, 0, 1)));
    return vmax(x, __builtin_shuffle(x, (vi)PER_ROW(1, 0, 3, 2)));
}

static void widen(const char *src, enum rx_dtype dtype, int n, int padded, float *dst) {
    int i = 0;
    if (dtype == RX_F32) {
        memcpy(dst, src, (size_t)n * 4);
        i = n;
    } else if (dtype == RX_BF16) {
        const uint16_t *h = (const uint16_t *)src;
        for (; i + VL <= n; i += VL)
            store(dst + i, (vf)(__builtin_convertvector(*(const vh_any *)(h + i), vu) << 16));
        for (; i < n; i++) {
            const uint32_t bits = (uint32_t)h[i] << 16;
            memcpy(dst + i, &bits, 4);
        }
    } else {
        const _Float16 *h = (const _Float16 *)src;
        for (; i < n; i++) dst[i] = (float)h[i];
    }
    for (; i < padded; i++) dst[i] = 0;
}

static void narrow(const float *src, enum rx_dtype dtype, int n, char *dst) {
    for (int i = 0; i < n; i++) {
        if (dtype == RX_F16) {
            ((_Float16 *)dst)[i] = (_Float16)src[i];
        } else {
            uint32_t bits;
            memcpy(&bits, src + i, 4);
            const uint32_t even = bits + 0x7fff + (bits >> 16 & 1);
            ((uint16_t *)dst)[i] = (uint16_t)((src[i] != src[i] ? bits | 0x400000 : even) >> 16);
        }
    }
}

static int padded_dim(const struct rx_layer *layer) { return (layer->head_dim + 3) / 4 * 4; }

static inline size_t body_scratch_bytes(const struct rx_layer *layer) {
    const size_t dim = (size_t)padded_dim(layer);
    const size_t floats = 2 * MAX_ROWS * dim + MAX_ROWS * BLOCK + 2 * BLOCK * dim;
    return sizeof(struct scratch) + 4 * floats + 4096;
}

static struct scratch *carve(const struct rx_tile *t, void *memory) {
    struct scratch *s = memory;
    const size_t dim = (size_t)padded_dim(t->layer);
    float *next = (float *)(((uintptr_t)(s + 1) + 63) & ~(uintptr_t)63);
    s->q = next, next += MAX_ROWS * dim;
    s->o = next, next += MAX_ROWS * dim;
    s->s = next, next += MAX_ROWS * BLOCK;
    s->kv = next;
    return s;
}

/* Per lane the positions its row sees, less the lane's own place among a vector's tokens. */
static void set_limits(const struct rx_tile *t, vi *low, vi *high, int vecs, enum layout layout) {
    int32_t *lo = (int32_t *)low, *hi = (int32_t *)high;
    for (int i = 0; i < vecs * VL; i++) {
        const int r = layout == QUADS ? i / 4 : layout == ROWS ? i : i % 4;
        const int token = layout == QUADS ? i % 4 : layout == ROWS ? 0 : i / 4;
        lo[i] = r < t->num_rows ? t->low[r] - token : 0;
        hi[i] = r < t->num_rows ? t->high[r] - token : INT32_MAX;
    }
}

INLINE int vecs_of_head(const struct rx_tile *t) {
    return (t->num_rows + ROWS_PER_VEC - 1) / ROWS_PER_VEC;
}

static inline void body_prepare(const struct rx_tile *t, void *memory) {
    struct scratch *s = carve(t, memory);
    const int dim = padded_dim(t->layer), vecs = vecs_of_head(t);
    for (int i = 0; i < t->num_heads * vecs * ROWS_PER_VEC; i++) {
        const int head = i / ROWS_PER_VEC / vecs, row = i - head * vecs * ROWS_PER_VEC;
        const char *q = t->q[head * t->num_rows + row % t->num_rows];
        float *to = s->q + (size_t)(i / ROWS_PER_VEC) * ROWS_PER_VEC * dim + i % ROWS_PER_VEC * 4;
        widen(q, t->layer->dtype, t->layer->head_dim, dim, s->kv);
        for (int g = 0; g < dim / 4; g++) memcpy(to + (size_t)g * VL, s->kv + g * 4, 16);
    }
    set_limits(t, s->low, s->high, vecs, QUADS);
}

INLINE int64_t row_at(const struct rx_tile *t, int pos) {
    return t->pages[pos / t->page_size] * t->page_bytes + pos % t->page_size * t->row_bytes;
}

/* Runs lie in one page where RUN divides the page size; elsewhere they are not located. */
static void locate(const struct rx_tile *t, int begin, int end, struct block *b) {
    b->n = end - begin < BLOCK ? end - begin : BLOCK;
    for (int i = 0; t->page_size % RUN == 0 && i * RUN < b->n; i++) {
        const int64_t at = row_at(t, begin + i * RUN);
        b->k[i] = t->k + at;
        b->v[i] = t->v + at;
    }
}

/* The lines of what is computed next, a block's next head or the next block's first. They are asked
 * for between computations, one of keys and one of values at a time: many at once wait for each
 * other and keep the processor. They are few enough to be in the cache still when used. */
struct ahead {
    const struct block *block;
    int64_t from, run_lines; /* bytes to the head's first token in a run; lines of a run */
    int64_t left;            /* lines of the current run */
    int run, runs;
    const char *k, *v;
};

INLINE struct ahead ahead_of(const struct rx_tile *t, const struct block *now,
                             const struct block *next, int head) {
    const int is_last = head + 1 == t->num_heads;
    const struct block *block = is_last ? next : now;
    return (struct ahead){.block = block,
                          .from = is_last ? 0 : (head + 1) * t->head_bytes,
                          .run_lines = (RUN * t->row_bytes + 63) / 64,
                          .runs = t->page_size % RUN == 0 ? (block->n + RUN - 1) / RUN : 0};
}

INLINE void ask(struct ahead *a) {
    if (a->left == 0) {
        if (a->run == a->runs) return;
        a->k = a->block->k[a->run] + a->from;
        a->v = a->block->v[a->run++] + a->from;
        a->left = a->run_lines;
    }
    __builtin_prefetch(a->k, 0, 2);
    __builtin_prefetch(a->v, 0, 2);
    a->k += 64, a->v += 64, a->left--;
}

/* A head's runs of `now` in fp32: where they lie, or widened in scratch. Values of no token
 * are 0. */
static void open_block(const struct rx_tile *t, struct scratch *s, const struct block *now,
                       int head, int pos, int dim, const float **k, const float **v) {
    const struct rx_layer *layer = t->layer;
    const int64_t from = head * t->head_bytes;
    const int in_place =
        layer->dtype == RX_F32 && dim == layer->head_dim && t->page_size % RUN == 0;
    for (int i = 0; i * RUN < now->n; i++) {
        float *to_k = s->kv + (size_t)i * RUN * dim, *to_v = to_k + (size_t)BLOCK * dim;
        k[i] = in_place ? (const float *)(now->k[i] + from) : to_k;
        v[i] = to_v;
        if (in_place && (i + 1) * RUN <= now->n) {
            v[i] = (const float *)(now->v[i] + from);
            continue;
        }
        for (int j = i * RUN; j < (i + 1) * RUN; j++, to_k += dim, to_v += dim) {
            if (j >= now->n) {
                memset(to_v, 0, (size_t)dim * 4);
                continue;
            }
            const int64_t at = row_at(t, pos + j) + from;
            widen(t->v + at, layer->dtype, layer->head_dim, dim, to_v);
            if (!in_place) widen(t->k + at, layer->dtype, layer->head_dim, dim, to_k);
        }
    }
}

/* s[vecs][tokens] = q . k over `groups` of 4 floats. */
INLINE void logits(const float *q, int groups, const float *k, float *s, int vecs, int tokens,
                   struct ahead *ahead) {
    vf acc[24], kg[8];
#pragma GCC unroll 64
    for (int i = 0; i < vecs * tokens; i++) acc[i] = (vf){0};
    for (int g = 0; g < groups; g++) {
#pragma GCC unroll 8
        for (int i = 0; i < tokens; i++) kg[i] = bcast4(k + 4 * (i * groups + g));
        ask(ahead);
#pragma GCC unroll 8
        for (int r = 0; r < vecs; r++) {
            const vf qg = load(q + (r * groups + g) * VL);
#pragma GCC unroll 8
            for (int i = 0; i < tokens; i++) acc[r * tokens + i] += qg * kg[i];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < vecs; r++)
#pragma GCC unroll 2
        for (int i = 0; i < tokens; i += 4) {
            const vf *a = acc + r * tokens + i;
            store(s + (r * GROUPS + i / 4) * VL, sum4(a[0], a[1], a[2], a[3]));
        }
}

/* o[vecs][groups] = o * fix + p . v over the n tokens of a block. */
INLINE void outputs(const float *p, const float *const *v, int n, int at, float *o, int o_groups,
                    const vf *fix, int vecs, int groups, struct ahead *ahead) {
    vf acc[24], weights[4], w[4];
#pragma GCC unroll 8
    for (int r = 0; r < vecs; r++)
#pragma GCC unroll 16
        for (int g = 0; g < groups; g++)
            acc[r * groups + g] = load(o + (r * o_groups + g) * VL) * fix[r];
    for (int i = 0; i < n; i += 4) {
        const float *vj = v[i / RUN] + i % RUN * 4 * o_groups + at;
#pragma GCC unroll 8
        for (int r = 0; r < vecs; r++) weights[r] = load(p + (r * GROUPS + i / 4) * VL);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++, vj += 4 * o_groups) {
#pragma GCC unroll 8
            for (int r = 0; r < vecs; r++) w[r] = spread(weights[r], j);
            for (int g = 0; g < groups; g += 8) ask(ahead);
#pragma GCC unroll 16
            for (int g = 0; g < groups; g++) {
                const vf vg = bcast4(vj + 4 * g);
#pragma GCC unroll 8
                for (int r = 0; r < vecs; r++) acc[r * groups + g] += w[r] * vg;
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < vecs; r++)
#pragma GCC unroll 16
        for (int g = 0; g < groups; g++) store(o + (r * o_groups + g) * VL, acc[r * groups + g]);
}

/* Logits of `groups` vectors to weights, in place. Updates m and l, and returns what the output so
 * far is to be multiplied with. `low` is NULL where all rows see all tokens. */
INLINE vf weigh(const struct rx_layer *layer, float *s, int groups, enum layout layout, int pos,
                const vi *low, const vi *high, vf *m, vf *l, struct ahead *ahead) {
    const float log2e = 1.44269504f, cap = layer->softcap * log2e;
    const float scale = cap != 0 ? 1 : layer->scale * log2e;
    vf top = splat(-INFINITY), sum[4] = {{0}, {0}, {0}, {0}};
    for (int g = 0; g < groups; g++) {
        ask(ahead);
        vf x = load(s + g * VL);
        if (cap != 0) x = soft_cap(x, 2 * log2e * layer->scale / layer->softcap, cap);
        if (low) {
            const int32_t at = pos + (layout == ROWS ? g : 4 * g);
            x = select_vf((at >= *low) & (at < *high), x, splat(-INFINITY));
        }
        if (low || cap != 0) store(s + g * VL, x);
        top = vmax(top, x);
    }
    if (layout == QUADS) top = max_in_row(top);
    if (layout == COMPACT) top = max_of_lanes(top);
    top = vmax(*m, top * scale);
    const vf fix = exp2_vf(*m - top);
    const int unroll = layout == ROWS ? 16 : 2;
    for (int g = 0; g < groups; g += unroll)
#pragma GCC unroll 16
        for (int i = 0; i < unroll; i++) {
            const vf p = exp2_vf(load(s + (g + i) * VL) * scale - top);
            store(s + (g + i) * VL, p);
            sum[layout == ROWS ? i % 4 : 0] += p;
        }
    if (layout == ROWS) sum[0] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
    if (layout == COMPACT) sum[0] = sum_of_lanes(sum[0]);
    *l = *l * fix + sum[0];
    *m = top;
    return fix;
}

static void all_logits(const struct rx_tile *t, const struct scratch *s, const float *q,
                       const float *const *k, int n, int groups, struct ahead *ahead) {
    const int vecs = vecs_of_head(t);
    int r = 0;
#define LOGITS(VECS, TOKENS)                                                           \
    for (int i = 0; i < n; i += TOKENS)                                                \
        logits(q + (size_t)r * groups * VL, groups, k[i / RUN] + i % RUN * 4 * groups, \
               s->s + (r * GROUPS + i / 4) * VL, VECS, TOKENS, ahead);                 \
    r += VECS
    while (vecs - r >= LOGIT_VECS) { LOGITS(LOGIT_VECS, 4); }
    while (vecs - r >= 2) { LOGITS(2, 4); }
    while (vecs - r >= 1) { LOGITS(1, 8); }
#undef LOGITS
}

static void all_outputs(const struct rx_tile *t, const struct scratch *s, float *o,
                        const float *const *v, int n, int groups, struct ahead *ahead) {
    const int vecs = vecs_of_head(t);
    for (int r = 0; r < vecs;) {
        const int take = vecs - r >= OUTPUT_VECS ? OUTPUT_VECS : 1;
        int g = 0;
#define OUTPUTS(VECS, NUM)                                                                  \
    for (; groups - g >= NUM; g += NUM)                                                     \
    outputs(s->s + (size_t)r * GROUPS * VL, v, n, 4 * g, o + ((size_t)r * groups + g) * VL, \
            groups, s->fix + r, VECS, NUM, ahead)
        if (take == OUTPUT_VECS) {
            OUTPUTS(OUTPUT_VECS, OUTPUT_GROUPS);
            OUTPUTS(OUTPUT_VECS, 1);
        } else {
            OUTPUTS(1, OUTPUT_GROUPS_ONE);
            OUTPUTS(1, 4);
            OUTPUTS(1, 1);
        }
#undef OUTPUTS
        r += take;
    }
}

static inline void body_attend(const struct rx_tile *t, void *memory, int begin, int end,
                               int up_to) {
    struct scratch *s = carve(t, memory);
    const struct rx_layer *layer = t->layer;
    const int dim = padded_dim(layer), groups = dim / 4, vecs = vecs_of_head(t);
    struct block blocks[2];
    for (int i = 0; i < t->num_heads * vecs; i++) s->m[i] = splat(RX_NONE), s->l[i] = (vf){0};
    memset(s->o, 0, (size_t)t->num_heads * vecs * ROWS_PER_VEC * dim * 4);
    locate(t, begin, end, &blocks[0]);
    for (int pos = begin, turn = 0; pos < end; pos += BLOCK, turn ^= 1) {
        const struct block *now = &blocks[turn], *next = &blocks[turn ^ 1];
        const int padded = (now->n + RUN - 1) / RUN * RUN;
        const int masked = pos < t->max_low || pos + padded > t->min_high;
        locate(t, pos + BLOCK, pos + BLOCK < up_to ? up_to : pos + BLOCK, &blocks[turn ^ 1]);
        for (int head = 0, first = 0; head < t->num_heads; head++, first += vecs) {
            const float *k[BLOCK / RUN], *v[BLOCK / RUN];
            struct ahead ahead = ahead_of(t, now, next, head);
            open_block(t, s, now, head, pos, dim, k, v);
            all_logits(t, s, s->q + (size_t)first * groups * VL, k, padded, groups, &ahead);
            for (int r = 0; r < vecs; r++)
                s->fix[r] =
                    weigh(layer, s->s + (size_t)r * GROUPS * VL, padded / 4, QUADS, pos,
                          masked ? &s->low[r] : NULL, &s->high[r], &s->m[first + r],
                          &s->l[first + r], &ahead);
            all_outputs(t, s, s->o + (size_t)first * groups * VL, v, padded, groups, &ahead);
        }
    }
    for (int i = 0; i < t->num_heads * t->num_rows; i++) {
        const int r = i % t->num_rows, vec = i / t->num_rows * vecs + r / ROWS_PER_VEC;
        const int lane = r % ROWS_PER_VEC * 4;
        const float *o = s->o + (size_t)vec * groups * VL + lane;
        const float *l = (const float *)&s->l[vec] + lane;
        float *part = t->part[i], *end_of_o = part + rx_part_stride(layer->head_dim) - 16;
        for (int g = 0; g < groups; g++) memcpy(part + 4 * g, o + (size_t)g * VL, 16);
        for (float *rest = part + dim; rest < end_of_o; rest++) *rest = 0;
        end_of_o[0] = s->m[vec][lane];
        end_of_o[1] = (l[0] + l[2]) + (l[1] + l[3]);
    }
}

static void body_fold(float *total, const float *part, int num_rows, int head_dim) {
    const int stride = rx_part_stride(head_dim), width = stride - 16;
    for (int r = 0; r < num_rows; r++, total += stride, part += stride) {
        const float m = total[width] > part[width] ? total[width] : part[width];
        const float a = exp2_scalar(total[width] - m), b = exp2_scalar(part[width] - m);
        for (int d = 0; d < width; d += VL)
            store(total + d, load(total + d) * a + load(part + d) * b);
        total[width] = m;
        total[width + 1] = total[width + 1] * a + part[width + 1] * b;
    }
}

static void body_finish(const struct rx_tile *t, const float *total) {
    const int stride = rx_part_stride(t->layer->head_dim), width = stride - 16;
    float row[width];
    for (int r = 0; r < t->num_heads * t->num_rows; r++, total += stride) {
        float l = total[width + 1], a = 1;
        if (t->layer->sinks) {
            const float sink = t->sink[r] * 1.44269504f;
            const float m = total[width] > sink ? total[width] : sink;
            a = exp2_scalar(total[width] - m);
            l = l * a + exp2_scalar(sink - m);
        }
        a = l == 0 ? 0 : a / l; /* a row that sees nothing is zeros */
        for (int d = 0; d < width; d += VL) store(row + d, load(total + d) * a);
        if (t->layer->dtype == RX_F32) memcpy(t->out[r], row, (size_t)t->layer->head_dim * 4);
        else narrow(row, t->layer->dtype, t->layer->head_dim, t->out[r]);
    }
}

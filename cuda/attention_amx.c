/* The tile kernel for bf16 on AMX tiles; fp32, fp16 and widths that are not a multiple of 32 take
 * the AVX-512 body. 16 query rows are the columns of a tile, so that keys are used as they lie in
 * the page and a row's result does not depend on its neighbours:
 *
 *     s[16 tokens][16 rows]  = K[16 tokens][32 dims] . Q^T[16 pairs of dims][16 rows]
 *     o[16 rows][16 dims]   += P[16 rows][32 tokens] . V[16 pairs of tokens][16 dims]
 *
 * Queries are packed once a tile, values once a block, weights once a block and 16 rows.
 * Weights are rounded to bf16, their sum is not. */
#if defined(__x86_64__) && defined(__linux__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")
#include <immintrin.h>
#define VL 16
#define LOGIT_VECS 6
#define OUTPUT_VECS 3
#define OUTPUT_GROUPS 8
#define OUTPUT_GROUPS_ONE 16
#define bcast4(p) _mm512_broadcast_f32x4(_mm_loadu_ps(p))
#define vmax(a, b) _mm512_max_ps(a, b)
#define round_vf(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define exp2_scale(p, n) _mm512_scalef_ps(p, n)
#define max_of_lanes(x) reduce_lanes(x, 1)
#define sum_of_lanes(x) reduce_lanes(x, 0)
/* Of the 4 lanes of 128 bits, the result in each; a sum is (0 + 2) + (1 + 3). */
static inline __attribute__((always_inline)) __m512 reduce_lanes(__m512 x, int max) {
    const __m512 y = _mm512_shuffle_f32x4(x, x, 0x4e);
    x = max ? _mm512_max_ps(x, y) : _mm512_add_ps(x, y);
    const __m512 z = _mm512_shuffle_f32x4(x, x, 0xb1);
    return max ? _mm512_max_ps(x, z) : _mm512_add_ps(x, z);
}
#include "attention_body.h"

enum { COLUMNS = MAX_ROWS / 16, TILE = 512 /* bf16 */, CHUNKS = BLOCK / 32 };

struct amx_scratch {
    float *s;              /* [columns][BLOCK][16 rows], or compact[BLOCK / 4] */
    float *o;              /* [columns][16 rows][head_dim] */
    uint16_t *q;           /* [columns][head_dim / 32] tiles */
    uint16_t *k;           /* [BLOCK][head_dim], of pages too small to be used in place */
    uint16_t *v;           /* [CHUNKS][head_dim / 16] tiles */
    uint16_t *p;           /* [CHUNKS] tiles */
    const uint16_t *zeros; /* [head_dim] */
    vf m[COLUMNS], l[COLUMNS];
    vi low[COLUMNS], high[COLUMNS];
};

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

static int takes(const struct rx_layer *l) { return l->dtype == RX_BF16 && l->head_dim % 32 == 0; }

static size_t amx_scratch_bytes(const struct rx_layer *layer) {
    if (!takes(layer)) return body_scratch_bytes(layer);
    const size_t dim = (size_t)layer->head_dim;
    return sizeof(struct amx_scratch) + 4 * MAX_ROWS * (BLOCK + dim) + 2 * MAX_ROWS * dim +
           2 * (2 * BLOCK + 1) * dim + 2 * CHUNKS * TILE + 4096;
}

static struct amx_scratch *amx_carve(const struct rx_layer *layer, void *memory) {
    struct amx_scratch *a = memory;
    const size_t dim = (size_t)layer->head_dim;
    char *next = (char *)(((uintptr_t)(a + 1) + 63) & ~(uintptr_t)63);
    a->s = (float *)next, next += 4 * MAX_ROWS * BLOCK;
    a->o = (float *)next, next += 4 * MAX_ROWS * dim;
    a->q = (uint16_t *)next, next += 2 * MAX_ROWS * dim;
    a->k = (uint16_t *)next, next += 2 * BLOCK * dim;
    a->v = (uint16_t *)next, next += 2 * BLOCK * dim;
    a->p = (uint16_t *)next, next += 2 * CHUNKS * TILE;
    a->zeros = (const uint16_t *)next;
    return a;
}

/* Tile loads do not tell the compiler what they read: stores before them must be done. */
INLINE void finish_stores(void) { __asm__ volatile("" ::: "memory"); }

/* 16 vectors of 16 words, rows to columns. */
INLINE void transpose(__m512i *x) {
    __m512i y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

static void amx_prepare(const struct rx_tile *t, void *memory) {
    if (!takes(t->layer)) {
        body_prepare(t, memory);
        return;
    }
    struct amx_scratch *a = amx_carve(t->layer, memory);
    const int dim = t->layer->head_dim, columns = (t->num_rows + 15) / 16;
    memset((void *)(uintptr_t)a->zeros, 0, (size_t)dim * 2);
    for (int c = 0; c < columns; c++)
        for (int d = 0; d < dim; d += 32) {
            __m512i x[16];
            for (int r = 0; r < 16; r++)
                x[r] = c * 16 + r < t->num_rows ? _mm512_loadu_si512(t->q[c * 16 + r] + 2 * d)
                                                : _mm512_setzero_si512();
            transpose(x);
            uint16_t *to = a->q + (c * dim + d) * 16;
            for (int r = 0; r < 16; r++) _mm512_store_si512(to + r * 32, x[r]);
        }
    set_limits(t, a->low, a->high, columns, t->num_rows <= 4 ? COMPACT : ROWS);
    memset(a->p, 0, 2 * CHUNKS * TILE);
}

/* s of `count` times 16 tokens and of one or two columns of rows. */
INLINE void amx_logits(const struct amx_scratch *a, const char *const *k, int64_t k_bytes, int dim,
                       int token, int column, int columns) {
    const uint16_t *q = a->q + column * dim * 16;
    float *s = a->s + (column * BLOCK + token) * 16;
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < dim; d += 32) {
        _tile_loadd(6, q + d * 16, 64);
        _tile_loadd(4, k[0] + 2 * d, k_bytes);
        _tile_loadd(5, k[1] + 2 * d, k_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (columns == 2) {
            _tile_loadd(7, q + (dim + d) * 16, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_loadd(4, k[2] + 2 * d, k_bytes);
            _tile_loadd(5, k[3] + 2 * d, k_bytes);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
    _tile_stored(0, s, 64);
    _tile_stored(1, s + 256, 64);
    _tile_stored(2, columns == 2 ? s + BLOCK * 16 : s + 512, 64);
    _tile_stored(3, columns == 2 ? s + BLOCK * 16 + 256 : s + 768, 64);
}

/* Indices 0, second, 1, second + 1, ... of 16-bit elements. */
INLINE __m512i interleave(int second) {
    const vu i = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (__m512i)(i * 0x10001 + ((uint32_t)second << 16));
}

/* Weights of one column of rows, [tokens][16 rows] in fp32, to tiles of [16 rows][32 tokens]. */
INLINE void pack_weights(const float *s, int chunks, uint16_t *p) {
    const __m512i pairs = interleave(16);
    for (int c = 0; c < chunks; c++, s += 512, p += TILE) {
        __m512i x[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const __m512bh both = _mm512_cvtne2ps_pbh(load(s + i * 32 + 16), load(s + i * 32));
            x[i] = _mm512_permutexvar_epi16(pairs, (__m512i)both);
        }
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_store_si512(p + i * 32, x[i]);
    }
}

/* Up to 4 rows, where most of a tile would be idle columns: logits to vectors of 4 tokens, 4 apart,
 * of 4 rows: vector 4 i + j holds tokens 16 i + j + {0, 4, 8, 12}. */
INLINE void compact_logits(float *s, int tokens) {
    for (int i = 0; i < tokens; i += 16)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const float *at = s + (i + j) * 16;
            __m512 x = _mm512_castps128_ps512(_mm_load_ps(at));
            x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_load_ps(at + 64));
            x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_load_ps(at + 128));
            x = _mm512_mask_broadcast_f32x4(x, 0xf000, _mm_load_ps(at + 192));
            store(s + BLOCK * 16 + i * 4 + j * 16, x);
        }
}

INLINE void pack_compact_weights(const float *s, int chunks, uint16_t *p) {
    for (int c = 0; c < chunks; c++, p += TILE) {
        vf rows[2][4];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, s += 64) {
            const vf w[4] = {load(s), load(s + 16), load(s + 32), load(s + 48)};
            const vf ab = _mm512_unpacklo_ps(w[0], w[1]), AB = _mm512_unpackhi_ps(w[0], w[1]);
            const vf cd = _mm512_unpacklo_ps(w[2], w[3]), CD = _mm512_unpackhi_ps(w[2], w[3]);
            rows[i][0] = _mm512_shuffle_ps(ab, cd, 0x44);
            rows[i][1] = _mm512_shuffle_ps(ab, cd, 0xee);
            rows[i][2] = _mm512_shuffle_ps(AB, CD, 0x44);
            rows[i][3] = _mm512_shuffle_ps(AB, CD, 0xee);
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
            _mm512_store_si512(p + r * 32, (__m512i)_mm512_cvtne2ps_pbh(rows[1][r], rows[0][r]));
    }
}

/* Values of pairs of tokens, interleaved: tiles of [16 pairs][16 dims][2], the first of two with
 * dims 0-3, 8-11, 16-19, 24-27 of 32, the second with the others. */
static void pack_values(const struct rx_tile *t, const struct amx_scratch *a, const struct block *b,
                        const struct block *next, int pos, int dim, int chunks) {
    for (int i = 0; i < chunks * 16; i++) {
        const char *v[2];
        for (int j = 2 * i; j < 2 * i + 2; j++)
            v[j % 2] = j >= b->n ? (const char *)a->zeros
                       : t->page_size % RUN
                           ? t->v + row_at(t, pos + j)
                           : b->v[j / RUN] + j % RUN * t->row_bytes;
        fetch(t, next, 2 * i, 2);
        uint16_t *to = a->v + i / 16 * dim * 32 + i % 16 * 32;
        for (int d = 0; d < dim; d += 32, to += 2 * TILE) {
            const __m512i x = _mm512_loadu_si512(v[0] + 2 * d);
            const __m512i y = _mm512_loadu_si512(v[1] + 2 * d);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
            _mm512_store_si512(to + TILE, _mm512_unpackhi_epi16(x, y));
        }
    }
}

/* o of one column of rows and of 32 or 64 dims += weights . values. */
INLINE void amx_outputs(const struct amx_scratch *a, float *o, int dim, int d, int chunks,
                        int wide) {
    const int64_t row = 4 * dim;
    finish_stores();
    _tile_loadd(0, o + d, row);
    _tile_loadd(1, o + d + 16, row);
    if (wide) {
        _tile_loadd(2, o + d + 32, row);
        _tile_loadd(3, o + d + 48, row);
    }
    for (int c = 0; c < chunks; c++) {
        const uint16_t *v = a->v + (c * dim + d) * 32;
        _tile_loadd(4, a->p + c * TILE, 64);
        _tile_loadd(6, v, 64);
        _tile_loadd(7, v + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (wide) {
            _tile_loadd(6, v + 2 * TILE, 64);
            _tile_loadd(7, v + 3 * TILE, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, o + d, row);
    _tile_stored(1, o + d + 16, row);
    if (wide) {
        _tile_stored(2, o + d + 32, row);
        _tile_stored(3, o + d + 48, row);
    }
}

static void amx_attend(const struct rx_tile *t, void *memory, int begin, int end, int ahead) {
    if (!takes(t->layer)) {
        body_attend(t, memory, begin, end, ahead);
        return;
    }
    struct amx_scratch *a = amx_carve(t->layer, memory);
    const int dim = t->layer->head_dim, columns = (t->num_rows + 15) / 16;
    const int in_place = t->page_size % 16 == 0;
    struct tile_config mine = {.palette = 1}, before;
    for (int i = 0; i < 8; i++) mine.rows[i] = 16, mine.bytes_per_row[i] = 64;
    _tile_storeconfig(&before);
    _tile_loadconfig(&mine);
    struct block blocks[2];
    for (int c = 0; c < columns; c++) a->m[c] = splat(RX_NONE), a->l[c] = (vf){0};
    memset(a->o, 0, (size_t)columns * 16 * dim * 4);
    locate(t, begin, end, &blocks[0]);
    for (int pos = begin, turn = 0; pos < end; pos += BLOCK, turn ^= 1) {
        const struct block *now = &blocks[turn], *next = &blocks[turn ^ 1];
        const int chunks = (now->n + 31) / 32, tokens = chunks * 32;
        locate(t, pos + BLOCK, pos + BLOCK < ahead ? ahead : pos + BLOCK, &blocks[turn ^ 1]);
        const char *k[BLOCK / 16];
        for (int i = 0; i < BLOCK; i += 16) { /* where there are no tokens, any keys will do */
            k[i / 16] = in_place ? now->k[i < now->n ? i / RUN : 0]
                                 : (const char *)(a->k + i * dim);
            for (int j = i; !in_place && j < i + 16; j++)
                memcpy(a->k + j * dim,
                       j < now->n ? t->k + row_at(t, pos + j) : (const char *)a->zeros,
                       (size_t)dim * 2);
        }
        for (int c = 0; c < columns; c += 2)
            if (c + 1 == columns) amx_logits(a, k, dim * 2, dim, 0, c, 1);
            else
                for (int i = 0; i < tokens; i += 32)
                    amx_logits(a, k + i / 16, dim * 2, dim, i, c, 2);
        pack_values(t, a, now, next, pos, dim, chunks);
        const int masked = pos < t->max_low || pos + tokens > t->min_high;
        const vi *low = masked ? a->low : NULL;
        for (int c = 0; c < columns; c++, low += masked) {
            float *s = a->s + c * BLOCK * 16, *o = a->o + c * 16 * dim;
            vf fix;
            if (t->num_rows <= 4) {
                compact_logits(s, tokens);
                s += BLOCK * 16;
                fix = weigh(t->layer, s, tokens / 4, COMPACT, pos, low, a->high, a->m, a->l);
                pack_compact_weights(s, chunks, a->p);
            } else {
                fix = weigh(t->layer, s, tokens, ROWS, pos, low, &a->high[c], &a->m[c], &a->l[c]);
                pack_weights(s, chunks, a->p);
            }
            const int rows = t->num_rows - c * 16 < 16 ? t->num_rows - c * 16 : 16;
            if (pos > begin && _mm512_cmp_ps_mask(fix, splat(1), _CMP_NEQ_UQ))
                for (int r = 0; r < rows; r++)
                    for (int d = r * dim; d < (r + 1) * dim; d += 16)
                        store(o + d, load(o + d) * fix[r]);
            for (int d = 0; d < dim; d += 64) amx_outputs(a, o, dim, d, chunks, d + 64 <= dim);
        }
    }
    _tile_loadconfig(&before);
    for (int r = 0; r < t->num_rows; r++) {
        const float *o = a->o + r * dim;
        float *part = t->part[r];
        for (int d = 0; d < dim; d += 32) { /* undoes the order of pack_values */
            const vf x = load(o + d), y = load(o + d + 16);
            const vf even = _mm512_shuffle_f32x4(x, y, 0x44);
            const vf odd = _mm512_shuffle_f32x4(x, y, 0xee);
            store(part + d, _mm512_shuffle_f32x4(even, even, 0xd8));
            store(part + d + 16, _mm512_shuffle_f32x4(odd, odd, 0xd8));
        }
        part += rx_part_stride(dim) - 16;
        part[0] = a->m[r / 16][r % 16];
        part[1] = a->l[r / 16][r % 16];
    }
}

const struct rx_tile_kernel rx_tile_amx = {"amx", amx_scratch_bytes, amx_prepare,
                                           amx_attend, body_fold, body_finish};
#endif

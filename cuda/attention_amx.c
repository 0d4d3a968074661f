/* The tile kernel for bf16 on AMX tiles, for widths that are a multiple of 32. Rows are taken in
 * columns of W = 16, or of W = 4 where a head has no more than that, as in decoding. Rows are the
 * columns of a tile, so that keys are used as they lie in the page and a row's result does not
 * depend on its neighbours:
 *
 *     s[16 tokens][W rows]  = K[16 tokens][32 dims] . Q^T[16 pairs of dims][W rows]
 *     o[W rows][16 dims]   += P[W rows][32 tokens] . V[16 pairs of tokens][16 dims]
 *
 * Queries are packed once a tile, values once a block and head, weights once a block and column.
 * Of 16 tokens a pair is t and t + 4. Weights are rounded to bf16, their sum is not. */
#if defined(__x86_64__) && defined(__linux__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")
#include "attention_avx512.h"
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

/* How often lines are asked for with two tiles of keys or values; as often as that they are while
 * values are packed. */
enum { ASK_BY_KEYS = 7, ASK_BY_VALUES = 6 };
enum { COLUMNS = MAX_ROWS / 4, TILE = 512 /* bf16 */, CHUNKS = BLOCK / 32 };
/* Tile registers, as macros since their names go to the assembler. Values lie in K0 and K1. */
#define S0 0
#define S1 1
#define Q 2
#define K0 3
#define K1 4
#define O0 5
#define O1 6
#define P 7

struct amx_scratch {
    float *s;              /* [columns][BLOCK][W], of one head */
    float *o;              /* [heads][columns][W][head_dim] */
    uint16_t *q;           /* [heads][columns][head_dim / 32] tiles */
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

static size_t amx_scratch_bytes(const struct rx_layer *layer) {
    if (layer->dtype != RX_BF16 || layer->head_dim % 32) return 0;
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

/* Rows of a column, and columns of a head. */
INLINE int width_of(const struct rx_tile *t) { return t->num_rows <= 4 ? 4 : 16; }
INLINE int columns_of(const struct rx_tile *t) { return (t->num_rows + 15) / 16; }

static void amx_prepare(const struct rx_tile *t, void *memory) {
    struct amx_scratch *a = amx_carve(t->layer, memory);
    const int dim = t->layer->head_dim, width = width_of(t), columns = columns_of(t);
    memset((void *)(uintptr_t)a->zeros, 0, (size_t)dim * 2);
    uint16_t *to = a->q;
    for (int c = 0; c < t->num_heads * columns; c++)
        for (int d = 0; d < dim; d += 32) {
            __m512i x[16];
            for (int i = 0; i < 16; i++) {
                const int r = c % columns * 16 + i;
                x[i] = r < t->num_rows
                           ? _mm512_loadu_si512(t->q[c / columns * t->num_rows + r] + 2 * d)
                           : _mm512_setzero_si512();
            }
            transpose(x);
            const __mmask16 kept = width == 4 ? 0xf : 0xffff;
            for (int i = 0; i < 16; i++, to += 2 * width) _mm512_mask_storeu_epi32(to, kept, x[i]);
        }
    set_limits(t, a->low, a->high, columns, width == 4 ? COMPACT : ROWS);
}

/* s of 32 tokens and one column of rows, whose queries are q. */
INLINE void amx_logits(const uint16_t *q, int width, const char *const *k, int dim, float *s,
                       struct ahead *ahead) {
    finish_stores();
    _tile_zero(S0);
    _tile_zero(S1);
    for (int d = 0; d < dim; d += 32) {
        _tile_loadd(Q, q + d * width, 4 * width);
        _tile_loadd(K0, k[0] + 2 * d, 2 * dim);
        _tile_loadd(K1, k[1] + 2 * d, 2 * dim);
        for (int i = 0; i < ASK_BY_KEYS; i++) ask(ahead);
        _tile_dpbf16ps(S0, K0, Q);
        _tile_dpbf16ps(S1, K1, Q);
    }
    _tile_stored(S0, s, 4 * width);
    _tile_stored(S1, s + 16 * width, 4 * width);
}

/* The first token of the i-th pair; 4 behind it is the second. */
INLINE int first_of_pair(int i) { return i / 8 * 16 + i % 8 / 2 + i % 2 * 8; }

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
            const float *first = s + first_of_pair(i) * 16;
            const __m512bh both = _mm512_cvtne2ps_pbh(load(first + 64), load(first));
            x[i] = _mm512_permutexvar_epi16(pairs, (__m512i)both);
        }
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_store_si512(p + i * 32, x[i]);
    }
}

/* Weights of 4 rows, [tokens / 4][4 tokens][4 rows] in fp32, to tiles of [4 rows][32 tokens]. */
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

/* A head's values of pairs of tokens, interleaved: tiles of [16 pairs][16 dims][2], the first of
 * two with dims 0-3, 8-11, 16-19, 24-27 of 32, the second with the others. */
static void pack_values(const struct rx_tile *t, const struct amx_scratch *a, const struct block *b,
                        struct ahead *ahead, int head, int pos, int dim, int chunks) {
    const int64_t from = head * t->head_bytes;
    for (int i = 0; i < chunks * 16; i++) {
        const char *v[2];
        for (int second = 0; second < 2; second++) {
            const int j = first_of_pair(i) + 4 * second;
            v[second] = j >= b->n ? (const char *)a->zeros
                        : t->page_size % RUN
                            ? t->v + from + row_at(t, pos + j)
                            : b->v[j / RUN] + from + j % RUN * t->row_bytes;
        }
        uint16_t *to = a->v + i / 16 * dim * 32 + i % 16 * 32;
        for (int d = 0; d < dim; d += 32, to += 2 * TILE) {
            ask(ahead);
            const __m512i x = _mm512_loadu_si512(v[0] + 2 * d);
            const __m512i y = _mm512_loadu_si512(v[1] + 2 * d);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
            _mm512_store_si512(to + TILE, _mm512_unpackhi_epi16(x, y));
        }
    }
}

/* o of one column of rows and of 32 dims += weights . values. */
INLINE void amx_outputs(const struct amx_scratch *a, float *o, int dim, int d, int chunks,
                        struct ahead *ahead) {
    _tile_loadd(O0, o + d, 4 * dim);
    _tile_loadd(O1, o + d + 16, 4 * dim);
    for (int c = 0; c < chunks; c++) {
        const uint16_t *v = a->v + (c * dim + d) * 32;
        _tile_loadd(P, a->p + c * TILE, 64);
        for (int i = 0; i < ASK_BY_VALUES; i++) ask(ahead);
        _tile_loadd(K0, v, 64);
        _tile_loadd(K1, v + TILE, 64);
        _tile_dpbf16ps(O0, P, K0);
        _tile_dpbf16ps(O1, P, K1);
    }
    _tile_stored(O0, o + d, 4 * dim);
    _tile_stored(O1, o + d + 16, 4 * dim);
}

/* Where the head's keys lie in rows of 16 tokens; where there are none, any keys will do. */
static void open_keys(const struct rx_tile *t, const struct amx_scratch *a, const struct block *b,
                      int head, int pos, int dim, const char **k) {
    const int64_t from = head * t->head_bytes;
    for (int i = 0; i < BLOCK; i += 16) {
        if (t->page_size % 16 == 0) {
            k[i / 16] = b->k[i < b->n ? i / RUN : 0] + from;
            continue;
        }
        k[i / 16] = (const char *)(a->k + i * dim);
        for (int j = i; j < i + 16; j++)
            memcpy(a->k + j * dim,
                   j < b->n ? t->k + from + row_at(t, pos + j) : (const char *)a->zeros,
                   (size_t)dim * 2);
    }
}

static void amx_attend(const struct rx_tile *t, void *memory, int begin, int end, int up_to) {
    struct amx_scratch *a = amx_carve(t->layer, memory);
    const int dim = t->layer->head_dim, width = width_of(t), columns = columns_of(t);
    struct tile_config mine = {.palette = 1}, before;
    for (int i = 0; i < 8; i++) {
        mine.rows[i] = i == O0 || i == O1 || i == P ? width : 16;
        mine.bytes_per_row[i] = i == S0 || i == S1 || i == Q ? 4 * width : 64;
    }
    _tile_storeconfig(&before);
    _tile_loadconfig(&mine);
    struct block blocks[2];
    for (int c = 0; c < t->num_heads * columns; c++) a->m[c] = splat(RX_NONE), a->l[c] = (vf){0};
    memset(a->o, 0, (size_t)t->num_heads * columns * width * dim * 4);
    locate(t, begin, end, &blocks[0]);
    for (int pos = begin, turn = 0; pos < end; pos += BLOCK, turn ^= 1) {
        const struct block *now = &blocks[turn], *next = &blocks[turn ^ 1];
        const int chunks = (now->n + 31) / 32, tokens = chunks * 32;
        const int masked = pos < t->max_low || pos + tokens > t->min_high;
        locate(t, pos + BLOCK, pos + BLOCK < up_to ? up_to : pos + BLOCK, &blocks[turn ^ 1]);
        for (int head = 0; head < t->num_heads; head++) {
            const char *k[BLOCK / 16];
            struct ahead ahead = ahead_of(t, now, next, head);
            open_keys(t, a, now, head, pos, dim, k);
            for (int i = 0; i < tokens; i += 32)
                for (int c = 0; c < columns; c++)
                    amx_logits(a->q + (head * columns + c) * dim * width, width, k + i / 16, dim,
                               a->s + (c * BLOCK + i) * width, &ahead);
            for (int c = 0; c < columns; c++) {
                const int at = head * columns + c;
                const vi *low = masked ? &a->low[c] : NULL;
                float *s = a->s + c * BLOCK * width, *o = a->o + at * width * dim;
                vf fix;
                if (width == 4) {
                    fix = weigh(t->layer, s, tokens / 4, COMPACT, pos, low, &a->high[c], &a->m[at],
                                &a->l[at], &ahead);
                    pack_compact_weights(s, chunks, a->p);
                } else {
                    fix = weigh(t->layer, s, tokens, ROWS, pos, low, &a->high[c], &a->m[at],
                                &a->l[at], &ahead);
                    pack_weights(s, chunks, a->p);
                }
                if (c == 0) pack_values(t, a, now, &ahead, head, pos, dim, chunks);
                const int rows = t->num_rows - c * 16 < width ? t->num_rows - c * 16 : width;
                if (pos > begin && _mm512_cmp_ps_mask(fix, splat(1), _CMP_NEQ_UQ))
                    for (int r = 0; r < rows; r++)
                        for (int d = r * dim; d < (r + 1) * dim; d += 16)
                            store(o + d, load(o + d) * fix[r]);
                finish_stores();
                for (int d = 0; d < dim; d += 32) amx_outputs(a, o, dim, d, chunks, &ahead);
            }
        }
    }
    _tile_loadconfig(&before);
    for (int i = 0; i < t->num_heads * t->num_rows; i++) {
        const int r = i % t->num_rows, at = i / t->num_rows * columns + r / 16;
        const float *o = a->o + (at * width + r % 16) * dim;
        float *part = t->part[i];
        for (int d = 0; d < dim; d += 32) { /* undoes the order of pack_values */
            const vf x = load(o + d), y = load(o + d + 16);
            const vf even = _mm512_shuffle_f32x4(x, y, 0x44);
            const vf odd = _mm512_shuffle_f32x4(x, y, 0xee);
            store(part + d, _mm512_shuffle_f32x4(even, even, 0xd8));
            store(part + d + 16, _mm512_shuffle_f32x4(odd, odd, 0xd8));
        }
        part += rx_part_stride(dim) - 16;
        part[0] = a->m[at][r % 16];
        part[1] = a->l[at][r % 16];
    }
}

const struct rx_tile_kernel rx_tile_amx = {"amx", amx_scratch_bytes, amx_prepare,
                                           amx_attend, body_fold, body_finish};
#endif

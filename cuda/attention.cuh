// attention.cuh - what the tensor-core kernels share: a warp's 16 query rows against tiles of keys.
//
// A team is one warp, or one block of four, that shares tiles of keys and values in shared memory:
//
//     q [16 x warps][D + 8]   k, v [2 stages][KEYS][D + 8]      16-bit elements
//
// The 16 bytes beyond each row put the eight rows that ldmatrix reads in different banks. While a
// warp works on one stage, the other is being filled. Each warp owns 16 rows; the lane with
// g = lane / 4 and t = lane % 4 holds rows g and g + 8, and of every 8 columns 2t and 2t + 1.
//
// Tiles begin at absolute multiples of KEYS and a masked key changes no bit of a row's sums, so a
// row's result does not depend on the rows beside it.
#pragma once
#include "kernels.h"
#include "plan.h"
#include "simt.h"

constexpr float NEG_INF = -__builtin_inff();
constexpr float LOG2E = 1.4426950408889634f;

struct AttentionArgs {
    rx_layer layer;
    rx_batch batch;
    int32_t page_shift;  // page_size == 1 << page_shift
};

// Positions from `first` to `last` that a row attends to; last < first for a row that is none.
struct Span {
    int32_t first, last;
};

SIMT_DEVICE Span span_of(const AttentionArgs& a, int32_t position) {
    const int32_t first = a.layer.window ? position - a.layer.window + 1 : 0;
    return {first > 0 ? first : 0, position};
}

template <int WARPS>
struct Team {
    static constexpr int THREADS = WARPS * 32, ROWS = WARPS * 16;
    static SIMT_DEVICE int thread() { return threadIdx.x % THREADS; }
    static SIMT_DEVICE void sync() {
        if constexpr (WARPS == 1) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    }
};

template <int D, int KEYS, int WARPS>
struct Tiles {
    static constexpr int PITCH = D + 8;
    uint16_t q[Team<WARPS>::ROWS][PITCH];
    uint16_t k[2][KEYS][PITCH], v[2][KEYS][PITCH];
};

// A warp's running softmax, in powers of two; `sum` is each lane's own share until quad_sum.
template <int D>
struct Sums {
    float out[D / 8][4] = {}, max[2] = {NEG_INF, NEG_INF}, sum[2] = {};
};

SIMT_DEVICE float quad_sum(float x) {
    x += shfl_xor(x, 1);
    return x + shfl_xor(x, 2);
}

SIMT_DEVICE float quad_max(float x) {
    x = fmaxf(x, shfl_xor(x, 1));
    return fmaxf(x, shfl_xor(x, 2));
}

// 16 bytes of any alignment.
template <class T>
SIMT_DEVICE uint4 load16(const T* p) {
    if (((uintptr_t)p & 15) == 0) return *(const uint4*)p;
    union {
        T element[16 / sizeof(T)];
        uint4 all;
    } u;
    SIMT_UNROLL
    for (int i = 0; i < int(16 / sizeof(T)); i++) u.element[i] = p[i];
    return u.all;
}

// Where a position's keys of one head lie; its values lie `value_distance` further.
SIMT_DEVICE int64_t key_offset(const AttentionArgs& a, const int32_t* pages, int32_t position,
                               int kv_head) {
    const int64_t page = pages[position >> a.page_shift];
    const int32_t slot = position & (a.batch.page_size - 1);
    return page * a.layer.page_stride + a.layer.layer_offset +
           ((int64_t)kv_head * a.batch.page_size + slot) * a.layer.head_dim;
}

SIMT_DEVICE int64_t value_distance(const AttentionArgs& a) {
    return (int64_t)a.layer.kv_heads * a.batch.page_size * a.layer.head_dim;
}

// One sequence's keys and values of one head, as 16-bit elements. Sizes in bytes.
struct Context {
    const int32_t* pages;
    const char* keys;  // in page 0
    uint32_t page_bytes, value_bytes;
    int32_t page_shift;
};

SIMT_DEVICE Context context_of(const AttentionArgs& a, int32_t seq, int kv_head) {
    const int64_t head = (int64_t)kv_head * a.batch.page_size * a.layer.head_dim;
    return {a.batch.pages + a.batch.page_indptr[seq],
            (const char*)a.layer.pool + 2 * (a.layer.layer_offset + head),
            (uint32_t)(2 * a.layer.page_stride), (uint32_t)(2 * value_distance(a)), a.page_shift};
}

// The team's queries: row r is head r % group of a kv head, of the token `token_of(r / group)`.
template <int D, int KEYS, int WARPS, class F>
SIMT_DEVICE void load_queries(Tiles<D, KEYS, WARPS>& tiles, const AttentionArgs& a,
                              int32_t first_row, int32_t num_rows, int kv_head, F token_of) {
    const int group = a.layer.q_heads / a.layer.kv_heads;
    for (int i = Team<WARPS>::thread(); i < Team<WARPS>::ROWS * (D / 8);
         i += Team<WARPS>::THREADS) {
        const int32_t row = first_row + i / (D / 8), dim = i % (D / 8) * 8;
        uint4 q = {0, 0, 0, 0};
        if (row < num_rows) {
            q = load16((const uint16_t*)a.layer.q + token_of(row / group) * a.layer.q_stride +
                       (kv_head * group + row % group) * a.layer.q_head_stride + dim);
        }
        *(uint4*)&tiles.q[i / (D / 8)][dim] = q;
    }
}

// Start filling a stage with the keys and values at [begin, begin + KEYS); zeros from `end` on.
template <int D, int KEYS, int WARPS>
SIMT_DEVICE void load_tile(Tiles<D, KEYS, WARPS>& tiles, int stage, const Context& c,
                           int32_t begin, int32_t end) {
    constexpr int THREADS = Team<WARPS>::THREADS, NUM = KEYS * (D / 8) / THREADS;
    static_assert(KEYS * (D / 8) % THREADS == 0, "every thread copies alike");
    const int thread = Team<WARPS>::thread();
    // All page ids first: none of these loads has to wait for another.
    uint32_t page[NUM];
    SIMT_UNROLL
    for (int i = 0; i < NUM; i++) {
        const int32_t position = begin + (thread + i * THREADS) / (D / 8);
        page[i] = position < end ? c.pages[position >> c.page_shift] : 0;
    }
    SIMT_UNROLL
    for (int i = 0; i < NUM; i++) {
        const int row = (thread + i * THREADS) / (D / 8);
        const int dim = (thread + i * THREADS) % (D / 8) * 8;
        const uint32_t slot = (uint32_t)(begin + row) & ((1u << c.page_shift) - 1);
        const char* key = c.keys + (uint64_t)page[i] * c.page_bytes + (slot * D + dim) * 2;
        const bool valid = begin + row < end;
        cp_async16(&tiles.k[stage][row][dim], key, valid);
        cp_async16(&tiles.v[stage][row][dim], key + c.value_bytes, valid);
    }
    cp_async_commit();
}

// scores[n] = rows x keys 8n .. 8n + 7 of the tile.
template <class E, int D, int KEYS, int WARPS>
SIMT_DEVICE void score_tile(float (&scores)[KEYS / 8][4], const Tiles<D, KEYS, WARPS>& tiles,
                            int stage) {
    const int lane = threadIdx.x % 32, warp_row = Team<WARPS>::thread() / 32 * 16;
    SIMT_UNROLL
    for (int n = 0; n < KEYS / 8; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0;
    SIMT_UNROLL
    for (int d = 0; d < D; d += 16) {
        uint32_t q[4];
        ldmatrix_x4(q, &tiles.q[warp_row + lane % 16][d + lane / 16 * 8]);
        SIMT_UNROLL
        for (int n = 0; n < KEYS / 16; n++) {
            uint32_t k[4];
            const int row = n * 16 + lane % 8 + lane / 16 * 8;
            ldmatrix_x4(k, &tiles.k[stage][row][d + lane / 8 % 2 * 8]);
            E::mma(scores[2 * n], q, k);
            E::mma(scores[2 * n + 1], q, k + 2);
        }
    }
}

// Scores become weights 2^(score - max); sums so far are scaled to the new max.
template <int D, int KEYS>
SIMT_DEVICE void softmax_tile(float (&scores)[KEYS / 8][4], Sums<D>& sums, const AttentionArgs& a,
                              const Span rows[2], int32_t begin) {
    const float cap = a.layer.softcap;
    float scale = a.layer.scale * LOG2E;  // from a score to a power of two
    if (cap > 0) {
        SIMT_UNROLL
        for (int n = 0; n < KEYS / 8; n++) {
            SIMT_UNROLL
            for (int i = 0; i < 4; i++) {
                const float power = fast_exp2(scores[n][i] * (2 * scale / cap));
                scores[n][i] = 1 - 2 * fast_reciprocal(1 + power);  // tanh
            }
        }
        scale = cap * LOG2E;
    }
    SIMT_UNROLL
    for (int r = 0; r < 2; r++) {
        if (begin < rows[r].first || begin + KEYS - 1 > rows[r].last) {
            const int32_t column = begin + threadIdx.x % 4 * 2;
            SIMT_UNROLL
            for (int n = 0; n < KEYS / 8; n++) {
                SIMT_UNROLL
                for (int e = 0; e < 2; e++) {
                    const int32_t position = column + n * 8 + e;
                    if (position < rows[r].first || position > rows[r].last) {
                        scores[n][2 * r + e] = NEG_INF;
                    }
                }
            }
        }
        float max = NEG_INF;
        SIMT_UNROLL
        for (int n = 0; n < KEYS / 8; n++) {
            max = fmaxf(max, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
        }
        max = fmaxf(sums.max[r], quad_max(max) * scale);
        const float base = max == NEG_INF ? 0 : max;
        const float shrink = fast_exp2(sums.max[r] - base);
        sums.max[r] = max;
        sums.sum[r] *= shrink;
        SIMT_UNROLL
        for (int i = 0; i < D / 8; i++) {
            sums.out[i][2 * r] *= shrink;
            sums.out[i][2 * r + 1] *= shrink;
        }
        SIMT_UNROLL
        for (int n = 0; n < KEYS / 8; n++) {
            SIMT_UNROLL
            for (int e = 0; e < 2; e++) {
                float& score = scores[n][2 * r + e];
                score = fast_exp2(score * scale - base);
                sums.sum[r] += score;
            }
        }
    }
}

// out += weights x values. The scores' C fragments are, packed, the A fragments of this product.
template <class E, int D, int KEYS, int WARPS>
SIMT_DEVICE void weigh_tile(Sums<D>& sums, const float (&weights)[KEYS / 8][4],
                            const Tiles<D, KEYS, WARPS>& tiles, int stage) {
    const int lane = threadIdx.x % 32;
    SIMT_UNROLL
    for (int n = 0; n < KEYS / 16; n++) {
        const float *left = weights[2 * n], *right = weights[2 * n + 1];
        const uint32_t p[4] = {E::pack(left[0], left[1]), E::pack(left[2], left[3]),
                               E::pack(right[0], right[1]), E::pack(right[2], right[3])};
        SIMT_UNROLL
        for (int i = 0; i < D / 16; i++) {
            uint32_t v[4];
            ldmatrix_x4_trans(v, &tiles.v[stage][n * 16 + lane % 16][i * 16 + lane / 16 * 8]);
            E::mma(sums.out[2 * i], p, v);
            E::mma(sums.out[2 * i + 1], p, v + 2);
        }
    }
}

// The team's rows, whose queries every thread has stored in tiles.q, attend to [begin, end).
// `begin` is a multiple of KEYS. The whole team must come here with the same range; a warp without
// rows only helps to load.
template <class E, int D, int KEYS, int WARPS>
SIMT_DEVICE void attend(Tiles<D, KEYS, WARPS>& tiles, Sums<D>& sums, const AttentionArgs& a,
                        const Context& context, const Span rows[2], bool has_rows, int32_t begin,
                        int32_t end) {
    load_tile(tiles, 0, context, begin, end);
    int stage = 0;
    for (int32_t key = begin; key < end; key += KEYS, stage ^= 1) {
        cp_async_wait<0>();
        Team<WARPS>::sync();  // the stage is filled, and nobody reads the other one any more
        if (key + KEYS < end) load_tile(tiles, stage ^ 1, context, key + KEYS, end);
        if (!has_rows) continue;
        float scores[KEYS / 8][4];
        score_tile<E>(scores, tiles, stage);
        softmax_tile<D, KEYS>(scores, sums, a, rows, key);
        weigh_tile<E, D, KEYS>(sums, scores, tiles, stage);
    }
    Team<WARPS>::sync();  // tiles may be filled again
}

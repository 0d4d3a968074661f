// decode.cu - one new token a sequence: partial results by split, then their merge.
//
//     split_kernel    a warp takes (sequence, split, kv head); the query heads of the group are
//                     rows of its tile
//     shared_kernel   a block takes (sequences that share a split, split, kv head, 64 rows); rows
//                     are (sequence, query head) and the split is loaded once for all
//     merge_kernel    a block takes (sequence, query head) and adds up its splits in fixed order
//
// The split kernels' grids are persistent: they stride over the plan's lists, whatever their length.
// A row meets the same tiles in the same order in both, so grouping changes no bit.
//
// Partial results: out [slot][q_head][D] not divided by the sum, then (max, sum) [slot][q_head],
// in powers of two; slot = partials[seq] + split.
#include "launch.cuh"

constexpr int DECODE_WARPS = 2, SHARED_WARPS = 4, MERGE_WARPS = 4;

template <int D>
constexpr int DECODE_KEYS = D > 128 ? 16 : 32;

template <int D, int WARPS>
using DecodeTiles = Tiles<D, DECODE_KEYS<D>, WARPS>;

SIMT_DEVICE float* partial_stats(const AttentionArgs& a) {
    return (float*)a.batch.workspace +
           a.batch.plan.num_partials * a.layer.q_heads * a.layer.head_dim;
}

// Rows `first_row` ... of (member, query head of the group) against one split. Team-uniform.
template <class E, int D, int WARPS>
SIMT_DEVICE void attend_split(DecodeTiles<D, WARPS>& tiles, const AttentionArgs& a,
                              const int32_t* members, int count, int first_row, int split,
                              int kv_head) {
    constexpr int KEYS = DECODE_KEYS<D>;
    const int32_t* words = a.batch.plan.words;
    const int group = a.layer.q_heads / a.layer.kv_heads, num_rows = count * group;
    int32_t first_seen = a.batch.kv_lens[members[0]];
    int32_t end = first_seen < (split + 1) * RX_SPLIT ? first_seen : (split + 1) * RX_SPLIT;
    for (int i = 0; i < count; i++) {
        const Span span = span_of(a, a.batch.kv_lens[members[i]] - 1);
        first_seen = span.first < first_seen ? span.first : first_seen;
    }
    if (end <= first_seen) return;  // outside every window
    int32_t begin = first_seen / KEYS * KEYS;
    begin = begin > split * RX_SPLIT ? begin : split * RX_SPLIT;

    load_queries(tiles, a, first_row, num_rows, kv_head,
                 [&](int32_t member) { return a.batch.cu_seqlens_q[members[member]]; });
    const int lane = threadIdx.x % 32;
    const int own_row = first_row + Team<WARPS>::thread() / 32 * 16 + lane / 4;
    Span rows[2];
    for (int r = 0; r < 2; r++) {
        const int row = own_row + 8 * r;
        rows[r] = {0, -1};
        if (row < num_rows) rows[r] = span_of(a, a.batch.kv_lens[members[row / group]] - 1);
    }
    Sums<D> sums;
    attend<E>(tiles, sums, a, context_of(a, members[0], kv_head), rows,
              own_row - lane / 4 < num_rows, begin, end);

    SIMT_UNROLL
    for (int r = 0; r < 2; r++) {
        const int row = own_row + 8 * r;
        const float sum = quad_sum(sums.sum[r]);
        if (row >= num_rows) continue;
        const int64_t slot = words[words[RX_PARTIALS] + members[row / group]] + split;
        const int64_t at = slot * a.layer.q_heads + kv_head * group + row % group;
        float* out = (float*)a.batch.workspace + at * D + lane % 4 * 2;
        SIMT_UNROLL
        for (int i = 0; i < D / 8; i++) {
            out[i * 8] = sums.out[i][2 * r];
            out[i * 8 + 1] = sums.out[i][2 * r + 1];
        }
        if (lane % 4 == 0) {
            partial_stats(a)[2 * at] = sums.max[r];
            partial_stats(a)[2 * at + 1] = sum;
        }
    }
}

template <class E, int D>
__global__ void __launch_bounds__(DECODE_WARPS * 32)
    split_kernel(const __grid_constant__ AttentionArgs a) {
    const int32_t* words = a.batch.plan.words;
    const int32_t* singles = words + words[RX_SINGLES];
    const int warp = threadIdx.x / 32;
    auto& tiles = ((DecodeTiles<D, 1>*)shared_memory())[warp];
    const int64_t num_items = (int64_t)words[RX_NUM_SINGLES] * a.layer.kv_heads;
    // Neighbouring items go to different blocks: a short list still spreads over the device.
    for (int64_t item = blockIdx.x + (int64_t)gridDim.x * warp; item < num_items;
         item += (int64_t)gridDim.x * DECODE_WARPS) {
        const int32_t* single = singles + item / a.layer.kv_heads * 2;
        attend_split<E, D, 1>(tiles, a, single, 1, 0, single[1], (int)(item % a.layer.kv_heads));
    }
}

template <class E, int D>
__global__ void __launch_bounds__(SHARED_WARPS * 32, 2)
    shared_kernel(const __grid_constant__ AttentionArgs a) {
    constexpr int ROWS = Team<SHARED_WARPS>::ROWS;
    const int32_t* words = a.batch.plan.words;
    auto& tiles = *(DecodeTiles<D, SHARED_WARPS>*)shared_memory();
    const int group = a.layer.q_heads / a.layer.kv_heads;
    const int64_t num_items = (int64_t)words[RX_NUM_SHARED] * a.layer.kv_heads;
    const int64_t num_tiles = num_items * ((RX_MEMBERS * group + ROWS - 1) / ROWS);
    // All first tiles, then all second ones: those beyond a list of members cost every block alike.
    for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const int first_row = (int)(tile / num_items) * ROWS;
        const int64_t item = tile % num_items;
        const int32_t* shared = words + words[RX_SHARED] + item / a.layer.kv_heads * 3;
        if (first_row >= shared[1] * group) continue;
        attend_split<E, D, SHARED_WARPS>(tiles, a, words + words[RX_MEMBER_SEQS] + shared[0],
                                         shared[1], first_row, shared[2],
                                         (int)(item % a.layer.kv_heads));
    }
}

template <int D>
struct MergeShared {
    float out[MERGE_WARPS][D], sum[MERGE_WARPS];
};

template <class E, int D>
__global__ void __launch_bounds__(MERGE_WARPS * 32)
    merge_kernel(const __grid_constant__ AttentionArgs a) {
    auto& shared = *(MergeShared<D>*)shared_memory();
    const int32_t* words = a.batch.plan.words;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, q_heads = a.layer.q_heads;
    const int32_t row = blockIdx.x / q_heads, head = blockIdx.x % q_heads;
    if (row >= words[RX_NUM_DECODE]) return;
    const int32_t seq = words[words[RX_DECODE] + row];
    const Span span = span_of(a, a.batch.kv_lens[seq] - 1);
    const int begin = span.first / RX_SPLIT, end = span.last / RX_SPLIT + 1;
    // Of split s: partial[s * q_heads * D + dim] and stats[s * q_heads * 2].
    const int64_t at = (int64_t)words[words[RX_PARTIALS] + seq] * q_heads + head;
    const float* partial = (const float*)a.batch.workspace + at * D;
    const float* stats = partial_stats(a) + at * 2;

    const float sink = a.layer.sinks ? a.layer.sinks[head] * LOG2E : NEG_INF;
    float max = sink;
    for (int s = begin + lane; s < end; s += 32) {
        max = fmaxf(max, stats[(int64_t)s * q_heads * 2]);
    }
    for (int mask = 16; mask; mask /= 2) max = fmaxf(max, shfl_xor(max, mask));

    // Each warp takes every fourth split, counted from the context's beginning.
    float sum = 0, out[D / 32] = {};
    SIMT_UNROLL_4
    for (int s = begin + (warp - begin % MERGE_WARPS + MERGE_WARPS) % MERGE_WARPS; s < end;
         s += MERGE_WARPS) {
        const float weight = fast_exp2(stats[(int64_t)s * q_heads * 2] - max);
        sum += weight * stats[(int64_t)s * q_heads * 2 + 1];
        SIMT_UNROLL
        for (int i = 0; i < D / 32; i++) {
            out[i] += weight * partial[(int64_t)s * q_heads * D + i * 32 + lane];
        }
    }
    SIMT_UNROLL
    for (int i = 0; i < D / 32; i++) shared.out[warp][i * 32 + lane] = out[i];
    if (lane == 0) shared.sum[warp] = sum;
    __syncthreads();
    if (threadIdx.x < D / 2) {
        float total = fast_exp2(sink - max), low = 0, high = 0;
        for (int w = 0; w < MERGE_WARPS; w++) {
            total += shared.sum[w];
            low += shared.out[w][2 * threadIdx.x];
            high += shared.out[w][2 * threadIdx.x + 1];
        }
        const int32_t token = a.batch.cu_seqlens_q[seq];
        uint16_t* target = (uint16_t*)a.layer.out + token * a.layer.out_stride +
                           head * a.layer.out_head_stride;
        *(uint32_t*)(target + 2 * threadIdx.x) = E::pack(low / total, high / total);
    }
}

const char* launch_decode(const AttentionArgs& a, void* stream) {
    return for_instance(a.layer, [&](auto instance) -> const char* {
        using E = typename decltype(instance)::Element;
        constexpr int D = decltype(instance)::DIM;
        const size_t single = DECODE_WARPS * sizeof(DecodeTiles<D, 1>);
        const size_t shared = sizeof(DecodeTiles<D, SHARED_WARPS>);
        const char* error = launch(split_kernel<E, D>, persistent_blocks(single),
                                   DECODE_WARPS * 32, single, stream, a);
        if (!error && a.batch.plan.num_shared) {
            error = launch(shared_kernel<E, D>, persistent_blocks(shared), SHARED_WARPS * 32,
                           shared, stream, a);
        }
        if (error) return error;
        return launch(merge_kernel<E, D>, (int64_t)a.batch.plan.num_decode * a.layer.q_heads,
                      MERGE_WARPS * 32, sizeof(MergeShared<D>), stream, a);
    });
}

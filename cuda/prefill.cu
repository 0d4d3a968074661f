// prefill.cu - several new tokens of a sequence, after any number of cached ones.
//
// A block of four warps takes 64 rows of one kv head. Rows are (token, query head of the group) in
// that order, so a tile of a grouped model holds few tokens and their keys serve every head. The
// plan's items are 64 tokens, which is `group` tiles: the grid is num_prefill x q_heads blocks.
#include "launch.cuh"

constexpr int PREFILL_WARPS = 4;

template <int D>
constexpr int PREFILL_KEYS = D > 128 ? 32 : 64;

template <int D>
using PrefillTiles = Tiles<D, PREFILL_KEYS<D>, PREFILL_WARPS>;

template <class E, int D>
__global__ void __launch_bounds__(PREFILL_WARPS * 32)
    prefill_kernel(const __grid_constant__ AttentionArgs a) {
    constexpr int KEYS = PREFILL_KEYS<D>, ROWS = Team<PREFILL_WARPS>::ROWS;
    auto& tiles = *(PrefillTiles<D>*)shared_memory();
    const int32_t* words = a.batch.plan.words;
    const int group = a.layer.q_heads / a.layer.kv_heads;
    const int32_t* item = words + words[RX_PREFILL] + blockIdx.x / a.layer.q_heads * 2;
    const int kv_head = blockIdx.x % a.layer.q_heads / group;
    const int32_t seq = item[0], first_token = a.batch.cu_seqlens_q[seq];
    const int32_t q_len = a.batch.cu_seqlens_q[seq + 1] - first_token;
    const int32_t cached = a.batch.kv_lens[seq] - q_len;
    const int32_t num_rows = q_len * group;
    static_assert(ROWS == RX_BLOCK_TOKENS, "an item is as many tiles as a group has heads");
    const int32_t first_row = (item[1] * group + (int)(blockIdx.x % group)) * ROWS;
    if (first_row >= num_rows) return;

    load_queries(tiles, a, first_row, num_rows, kv_head,
                 [&](int32_t token) { return first_token + token; });
    const int lane = threadIdx.x % 32;
    const int32_t own_row = first_row + threadIdx.x / 32 * 16 + lane / 4;
    Span rows[2];
    for (int r = 0; r < 2; r++) {
        const int32_t row = own_row + 8 * r;
        rows[r] = {0, -1};
        if (row < num_rows) rows[r] = span_of(a, cached + row / group);
    }
    const int32_t last_row = (first_row + ROWS < num_rows ? first_row + ROWS : num_rows) - 1;
    const int32_t begin = span_of(a, cached + first_row / group).first / KEYS * KEYS;
    const int32_t end = cached + last_row / group + 1;
    Sums<D> sums;
    attend<E>(tiles, sums, a, context_of(a, seq, kv_head), rows,
              own_row - lane / 4 < num_rows, begin, end);

    SIMT_UNROLL
    for (int r = 0; r < 2; r++) {
        const int32_t row = own_row + 8 * r;
        float sum = quad_sum(sums.sum[r]);
        if (row >= num_rows) continue;
        const int q_head = kv_head * group + row % group;
        float shrink = 1;
        if (a.layer.sinks) {
            const float sink = a.layer.sinks[q_head] * LOG2E, max = fmaxf(sums.max[r], sink);
            shrink = fast_exp2(sums.max[r] - max);
            sum = sum * shrink + fast_exp2(sink - max);
        }
        shrink /= sum;
        uint16_t* out = (uint16_t*)a.layer.out +
                        (first_token + row / group) * a.layer.out_stride +
                        q_head * a.layer.out_head_stride + lane % 4 * 2;
        SIMT_UNROLL
        for (int i = 0; i < D / 8; i++) {
            *(uint32_t*)(out + i * 8) =
                E::pack(sums.out[i][2 * r] * shrink, sums.out[i][2 * r + 1] * shrink);
        }
    }
}

const char* launch_prefill(const AttentionArgs& a, void* stream) {
    return for_instance(a.layer, [&](auto instance) {
        using E = typename decltype(instance)::Element;
        constexpr int D = decltype(instance)::DIM;
        return launch(prefill_kernel<E, D>, (int64_t)a.batch.plan.num_prefill * a.layer.q_heads,
                      PREFILL_WARPS * 32, sizeof(PrefillTiles<D>), stream, a);
    });
}

// reference.cu - attention in fp32, plainly: no tensor cores, no TF32, any head_dim up to 256.
//
// A warp takes (token, query head) and goes through the keys one by one, each lane with the
// dimensions lane, lane + 32, ... It serves fp32 models and is what the fast kernels are held to.
#include "launch.cuh"

constexpr int REFERENCE_WARPS = 4, MAX_DIM = 256;

SIMT_DEVICE float warp_sum(float x) {
    for (int mask = 16; mask; mask /= 2) x += shfl_xor(x, mask);
    return x;
}

__global__ void __launch_bounds__(REFERENCE_WARPS * 32)
    reference_kernel(const __grid_constant__ AttentionArgs a) {
    constexpr int NUM = MAX_DIM / 32;
    const rx_layer& layer = a.layer;
    const int32_t* words = a.batch.plan.words;
    const int lane = threadIdx.x % 32, dim = layer.head_dim;
    const int64_t item = (int64_t)blockIdx.x * REFERENCE_WARPS + threadIdx.x / 32;
    const int64_t token = item / layer.q_heads;
    if (token >= a.batch.num_tokens) return;
    const int head = (int)(item % layer.q_heads);
    const int32_t seq = words[words[RX_TOKENS] + token];
    if (seq < 0) return;
    const int kv_head = head / (layer.q_heads / layer.kv_heads);
    const Span span =
        span_of(a, a.batch.kv_lens[seq] - a.batch.cu_seqlens_q[seq + 1] + (int32_t)token);
    const int32_t* pages = a.batch.pages + a.batch.page_indptr[seq];
    const float* row = (const float*)layer.q + token * layer.q_stride + head * layer.q_head_stride;

    float q[NUM], out[NUM] = {}, max = layer.sinks ? layer.sinks[head] : NEG_INF;
    float sum = layer.sinks ? 1 : 0;
    SIMT_UNROLL
    for (int i = 0; i < NUM; i++) {
        q[i] = lane + 32 * i < dim ? row[lane + 32 * i] * layer.scale : 0;
    }
    for (int32_t position = span.first; position <= span.last; position++) {
        const float* key = (const float*)layer.pool + key_offset(a, pages, position, kv_head);
        const float* value = key + value_distance(a);
        float score = 0;
        SIMT_UNROLL
        for (int i = 0; i < NUM; i++) {
            if (lane + 32 * i < dim) score += q[i] * key[lane + 32 * i];
        }
        score = warp_sum(score);
        if (layer.softcap > 0) score = layer.softcap * tanhf(score / layer.softcap);
        const float larger = fmaxf(max, score);
        const float shrink = expf(max - larger), weight = expf(score - larger);
        max = larger;
        sum = sum * shrink + weight;
        SIMT_UNROLL
        for (int i = 0; i < NUM; i++) {
            if (lane + 32 * i < dim) out[i] = out[i] * shrink + weight * value[lane + 32 * i];
        }
    }
    float* target = (float*)layer.out + token * layer.out_stride + head * layer.out_head_stride;
    SIMT_UNROLL
    for (int i = 0; i < NUM; i++) {
        if (lane + 32 * i < dim) target[lane + 32 * i] = out[i] / sum;
    }
}

const char* launch_reference(const AttentionArgs& a, void* stream) {
    const int64_t num_warps = (int64_t)a.batch.num_tokens * a.layer.q_heads;
    return launch(reference_kernel, (num_warps + REFERENCE_WARPS - 1) / REFERENCE_WARPS,
                  REFERENCE_WARPS * 32, 0, stream, a);
}

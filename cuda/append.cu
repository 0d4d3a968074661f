// append.cu - a step's new keys and values, [token][kv head][dim] by strides, into their pages.
//
// One thread moves 16 bytes. Rows of the input may have any alignment, pages are aligned.
#include "launch.cuh"

constexpr int APPEND_THREADS = 256;

template <class T>
__global__ void __launch_bounds__(APPEND_THREADS)
    append_kernel(const __grid_constant__ AttentionArgs a) {
    constexpr int NUM = 16 / sizeof(T);
    const rx_layer& layer = a.layer;
    const int chunks = layer.head_dim / NUM;
    int64_t i = (int64_t)blockIdx.x * APPEND_THREADS + threadIdx.x;
    const int dim = (int)(i % chunks) * NUM;
    i /= chunks;
    const int head = (int)(i % layer.kv_heads);
    i /= layer.kv_heads;
    const bool is_value = i % 2;
    const int64_t token = i / 2;
    if (token >= a.batch.num_tokens) return;
    const int32_t* words = a.batch.plan.words;
    const int32_t seq = words[words[RX_TOKENS] + token];
    if (seq < 0) return;
    const int32_t position =
        a.batch.kv_lens[seq] - a.batch.cu_seqlens_q[seq + 1] + (int32_t)token;
    const int32_t* pages = a.batch.pages + a.batch.page_indptr[seq];
    T* target = (T*)layer.pool + key_offset(a, pages, position, head) +
                (is_value ? value_distance(a) : 0) + dim;
    const T* source = is_value
                          ? (const T*)layer.v + token * layer.v_stride + head * layer.v_head_stride
                          : (const T*)layer.k + token * layer.k_stride + head * layer.k_head_stride;
    *(uint4*)target = load16(source + dim);
}

const char* launch_append(const AttentionArgs& a, void* stream) {
    const int size = a.layer.dtype == RX_F32 ? 4 : 2;
    const int64_t num_threads = (int64_t)a.batch.num_tokens * 2 * a.layer.kv_heads *
                                (a.layer.head_dim * size / 16);
    const int64_t grid = (num_threads + APPEND_THREADS - 1) / APPEND_THREADS;
    return size == 4 ? launch(append_kernel<uint32_t>, grid, APPEND_THREADS, 0, stream, a)
                     : launch(append_kernel<uint16_t>, grid, APPEND_THREADS, 0, stream, a);
}

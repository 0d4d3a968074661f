// attention.cu - one layer's call on a CUDA device: append the new keys and values, then attend.
//
// Sequences with one new token go to the decode kernels, with several to the prefill kernel, both
// in the same call; fp32 goes to the reference kernel. All launches are on the caller's stream.
#include "launch.cuh"

static bool multiple_of_16(uint64_t bytes) { return bytes % 16 == 0; }

// Why the kernels cannot do it, or NULL.
static const char* refusal(const rx_layer& layer, const rx_batch& batch) {
    const int size = layer.dtype == RX_F32 ? 4 : 2;
    if (batch.page_size < 1 || batch.page_size > 128 || batch.page_size & (batch.page_size - 1)) {
        return "the CUDA kernels take a page_size of 1, 2, 4, 8, 16, 32, 64 or 128";
    }
    if (layer.q_heads % layer.kv_heads || layer.q_heads / layer.kv_heads > 16) {
        return "the CUDA kernels take 1 to 16 query heads for each key/value head";
    }
    if (layer.dtype == RX_F32 && (layer.head_dim > 256 || layer.head_dim % 4)) {
        return "the CUDA kernels take a head_dim up to 256, in fours, in float32";
    }
    if (!(layer.scale > 0)) return "the CUDA kernels take a scale above 0";
    if (!multiple_of_16((uint64_t)layer.pool) || !multiple_of_16(layer.page_stride * size) ||
        !multiple_of_16(layer.layer_offset * size)) {
        return "the CUDA kernels take pages and layers that begin at multiples of 16 bytes";
    }
    if (layer.page_stride * size >> 32) return "the CUDA kernels take pages below 4 GiB";
    if (((uint64_t)layer.out | layer.out_stride * size | layer.out_head_stride * size) % 4) {
        return "the CUDA kernels write rows that begin at multiples of 4 bytes";
    }
    const int64_t floats = batch.plan.num_partials * layer.q_heads * (layer.head_dim + 2);
    if (layer.dtype != RX_F32 && batch.workspace_bytes < floats * 4) {
        return "the workspace is too small for the step's partial results";
    }
    if (layer.dtype == RX_F32) return nullptr;
    return for_instance(layer, [](auto) -> const char* { return nullptr; });
}

extern "C" const char* rx_attention_cuda(const rx_layer* layer, const rx_batch* batch,
                                         void* stream) {
    if (batch->num_tokens == 0) return nullptr;
    if (const char* why = refusal(*layer, *batch)) return why;
    OnDeviceOf device(layer->pool);
    if (device.error) return device.error;
    AttentionArgs a = {*layer, *batch, 0};
    while (1 << a.page_shift < batch->page_size) a.page_shift++;
    const char* error = layer->k ? launch_append(a, stream) : nullptr;
    if (!error && layer->dtype == RX_F32) return launch_reference(a, stream);
    if (!error && batch->plan.num_prefill) error = launch_prefill(a, stream);
    if (!error && batch->plan.num_decode) error = launch_decode(a, stream);
    return error;
}

// page_copy.cu - gather and scatter of many pages, whole or a range of their layers.
//
// A few blocks keep a bus busy and leave the machine to the computation: each thread has four
// 16-byte loads in flight. Either side is device memory or registered host memory.
#include "launch.cuh"

constexpr int COPY_THREADS = 1024, COPY_UNROLL = 4;

__global__ void __launch_bounds__(COPY_THREADS)
    copy_kernel(const __grid_constant__ rx_copy copy, uint32_t page_chunks, uint32_t num_chunks) {
    const uint32_t stride = gridDim.x * COPY_THREADS;
    for (uint32_t first = blockIdx.x * COPY_THREADS + threadIdx.x; first < num_chunks;) {
        uint4 data[COPY_UNROLL];
        char* target[COPY_UNROLL];
        SIMT_UNROLL
        for (int i = 0; i < COPY_UNROLL; i++, first += stride) {
            target[i] = nullptr;
            if (first >= num_chunks) continue;
            const uint32_t page = first / page_chunks;
            const int64_t within = (int64_t)(first % page_chunks) * 16;
            data[i] = load16_once(copy.src + copy.src_ids[page] * copy.src_stride + within);
            target[i] = copy.dst + copy.dst_ids[page] * copy.dst_stride + within;
        }
        SIMT_UNROLL
        for (int i = 0; i < COPY_UNROLL; i++) {
            if (target[i]) store16_once(target[i], data[i]);
        }
    }
}

extern "C" const char* rx_copy_cuda(const rx_copy* copy, int max_blocks, void* stream) {
    if (copy->num_pages == 0 || copy->nbytes == 0) return nullptr;
    const uint64_t sizes = (uint64_t)copy->src | (uint64_t)copy->dst | copy->src_stride |
                           copy->dst_stride | copy->nbytes;
    if (sizes % 16) return "the copy kernel takes pages and ranges in multiples of 16 bytes";
    const int64_t page_chunks = copy->nbytes / 16, num_chunks = page_chunks * copy->num_pages;
    if (num_chunks > 0x7fffffff) return "the copy kernel takes at most 32 GiB at once";
    if (max_blocks < 1 || max_blocks > 1024) return "max_blocks must be between 1 and 1024";
    OnDeviceOf device(copy->dst, copy->src);
    if (device.error) return device.error;
    const int64_t wanted =
        (num_chunks + COPY_THREADS * COPY_UNROLL - 1) / (COPY_THREADS * COPY_UNROLL);
    return launch(copy_kernel, wanted < max_blocks ? wanted : max_blocks, COPY_THREADS, 0, stream,
                  *copy, (uint32_t)page_chunks, (uint32_t)num_chunks);
}

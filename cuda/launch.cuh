// launch.cuh - from a call to a checked launch of the right instance.
#pragma once
#include "attention.cuh"

inline const char* error_text(cudaError_t error) {
    if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) {
        return "no usable CUDA device: is there a GPU, and an NVIDIA driver recent enough?";
    }
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// For a scope, makes the device current on which `memory` lies, or else `other`.
struct OnDeviceOf {
    int before = -1;
    const char* error;

    explicit OnDeviceOf(const void* memory, const void* other = nullptr) {
        cudaPointerAttributes where = {};
        int current = -1;
        error = error_text(cudaPointerGetAttributes(&where, memory));
        if (!error && where.type != cudaMemoryTypeDevice && other) {
            error = error_text(cudaPointerGetAttributes(&where, other));
        }
        if (!error && where.type != cudaMemoryTypeDevice) error = "the memory is on no CUDA device";
        if (!error) error = error_text(cudaGetDevice(&current));
        if (!error && current != where.device) {
            error = error_text(cudaSetDevice(where.device));
            before = current;
        }
    }
    ~OnDeviceOf() {
        if (before >= 0) cudaSetDevice(before);
    }
};

// The launchers, each beside its kernels. The device is current, the call is supported.
const char* launch_append(const AttentionArgs& a, void* stream);
const char* launch_decode(const AttentionArgs& a, void* stream);
const char* launch_prefill(const AttentionArgs& a, void* stream);
const char* launch_reference(const AttentionArgs& a, void* stream);

template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), int64_t grid, int threads, size_t shared,
                   void* stream, const Args&... args) {
    if (grid > 0x7fffffff) return "more blocks than a launch can have; make the step smaller";
    if (shared > 48 << 10) {
        const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (error != cudaSuccess) return error_text(error);
    }
    SIMT_LAUNCH(kernel, dim3((unsigned)grid), dim3((unsigned)threads), shared, stream, args...);
    return error_text(cudaGetLastError());
}

// Blocks with `shared` bytes each that fit on the current device at once.
inline int64_t persistent_blocks(size_t shared) {
    int device = 0, num_sms = 1, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    const int64_t fit = bytes / (int64_t)(shared + 1024);  // 1 KiB a block is the system's
    return num_sms * (fit > 0 ? fit : 1);
}

template <class E, int D>
struct Instance {
    using Element = E;
    static constexpr int DIM = D;
};

// Calls `f` with the Instance for the layer's dtype and head_dim.
template <class F>
const char* for_instance(const rx_layer& layer, F f) {
#if defined(RX_ONE_INSTANCE)  // quick builds for the tests
    if (layer.head_dim == 64 && layer.dtype == RX_BF16) return f(Instance<Bf16, 64>{});
#else
    const bool bf16 = layer.dtype == RX_BF16;
    switch (layer.head_dim) {
        case 64: return bf16 ? f(Instance<Bf16, 64>{}) : f(Instance<F16, 64>{});
        case 96: return bf16 ? f(Instance<Bf16, 96>{}) : f(Instance<F16, 96>{});
        case 128: return bf16 ? f(Instance<Bf16, 128>{}) : f(Instance<F16, 128>{});
        case 256: return bf16 ? f(Instance<Bf16, 256>{}) : f(Instance<F16, 256>{});
    }
#endif
    return "the CUDA kernels take head_dim 64, 96, 128 or 256 in bfloat16 and float16";
}

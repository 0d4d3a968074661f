// simt.h - the words kernels are written in, for nvcc and for the host compiler.
//
// Under nvcc they are thin wrappers around PTX. Under g++ simt_host.h gives the same names with
// one fiber per CUDA thread, so that the real kernels run in the tests on any machine. Kernels use
// only what stands here and in the CUDA subset both sides know (threadIdx, __syncthreads, ...);
// inline PTX stands nowhere else.
//
// Fragments of mma.m16n8k16 (g = lane / 4, t = lane % 4; two 16-bit elements a register):
//     A [16 x 16]  a0: row g, cols 2t..   a1: row g + 8, cols 2t..   a2, a3: the same, cols 8 + 2t..
//     B [16 x 8]   b0: rows 2t.., col g   b1: rows 8 + 2t.., col g
//     C [16 x 8]   c0, c1: row g, cols 2t, 2t + 1     c2, c3: row g + 8
#pragma once
#include <stdint.h>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#define SIMT_DEVICE __device__ __forceinline__
#define SIMT_UNROLL _Pragma("unroll")
#define SIMT_UNROLL_4 _Pragma("unroll 4")

// The block's dynamic shared memory.
SIMT_DEVICE unsigned char* shared_memory() {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    return shared_bytes;
}

#define SIMT_LAUNCH(kernel, grid, block, shared, stream, ...) \
    (kernel)<<<(grid), (block), (shared), (cudaStream_t)(stream)>>>(__VA_ARGS__)

SIMT_DEVICE float shfl_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

// Start copying 16 bytes from global to shared memory; zeros instead where not `valid`.
SIMT_DEVICE void cp_async16(void* shared, const void* global, bool valid) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    const int num_bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global),
                 "r"(num_bytes)
                 : "memory");
}

SIMT_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Wait until at most N of this thread's groups are in flight; others still need a barrier.
template <int N>
SIMT_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lanes 8i .. 8i + 7 give the rows of matrix i.
SIMT_DEVICE void ldmatrix_x4(uint32_t out[4], const void* row) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

SIMT_DEVICE void ldmatrix_x4_trans(uint32_t out[4], const void* row) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

SIMT_DEVICE void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

SIMT_DEVICE void mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats rounded to nearest even into one register, `low` in the low half.
SIMT_DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

SIMT_DEVICE uint32_t pack_f16(float low, float high) {
    uint32_t out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// 2^x, within 2 ulp; 0 for -infinity.
SIMT_DEVICE float fast_exp2(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(out) : "f"(x));
    return out;
}

// 1 / x, within 1 ulp; 0 for infinity.
SIMT_DEVICE float fast_reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(out) : "f"(x));
    return out;
}

// 16 bytes that no cache need keep: pages on their way between tiers.
SIMT_DEVICE uint4 load16_once(const void* p) { return __ldcs((const uint4*)p); }
SIMT_DEVICE void store16_once(void* p, uint4 value) { __stcs((uint4*)p, value); }

#else
#include "simt_host.h"
#endif

// The element types of the tensor-core kernels.
struct Bf16 {
    static SIMT_DEVICE uint32_t pack(float low, float high) { return pack_bf16(low, high); }
    static SIMT_DEVICE void mma(float c[4], const uint32_t a[4], const uint32_t b[2]) {
        mma_bf16(c, a, b);
    }
};

struct F16 {
    static SIMT_DEVICE uint32_t pack(float low, float high) { return pack_f16(low, high); }
    static SIMT_DEVICE void mma(float c[4], const uint32_t a[4], const uint32_t b[2]) {
        mma_f16(c, a, b);
    }
};

// simt_host.h - the words of simt.h under the host compiler.
//
// The emulation is as unforgiving as it can be: a late cp.async leaves NaN behind until it is
// waited for (an early one lands at once), misaligned accesses of 16 bytes are errors, shuffles
// order nothing between lanes, and bank conflicts of ldmatrix are counted.
// Left out: partial masks, blocks that are no multiple of 32 threads, atomics, clusters.
#pragma once
#include <cmath>

#include "simt_fibers.h"

#define __global__
#define __grid_constant__
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define SIMT_DEVICE inline
#define SIMT_UNROLL
#define SIMT_UNROLL_4

namespace simt {

// ---- asynchronous copies ---------------------------------------------------------------------
inline void land(const Copy& copy) {
    *(uint4*)copy.shared = copy.valid ? *(const uint4*)copy.global : uint4{0, 0, 0, 0};
}

inline void check_aligned(const void* p, const char* message) {
    if ((uintptr_t)p & 15) die(message);
}

// ---- 16-bit floats ---------------------------------------------------------------------------
inline float bits_to_f32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline float bf16_to_f32(uint16_t bits) { return bits_to_f32((uint32_t)bits << 16); }

inline float f16_to_f32(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}

inline uint16_t f32_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t f32_to_f16(float value) {
    const _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    if ((bits & 0x7fff) > 0x7c00) return 0x7fff;
    return bits;
}

// ---- matrices (fragments as drawn in simt.h) -------------------------------------------------
struct MatrixRow {
    uint16_t row[8];
    uint32_t out[4];
    uintptr_t address;
};

inline void load_matrices(Warp& warp, bool transposed) {
    for (int m = 0; m < 4; m++) {
        unsigned banks = 0;  // eight rows of 16 bytes are free of conflicts in eight groups of banks
        for (int i = 0; i < 8; i++) {
            const unsigned bank = ((MatrixRow*)warp.io[m * 8 + i])->address >> 4 & 7;
            stats.bank_conflicts += banks >> bank & 1;
            banks |= 1u << bank;
        }
        stats.ldmatrix++;
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane >> 2, t = (lane & 3) * 2;
            uint16_t element[2];
            for (int e = 0; e < 2; e++) {
                const int row = transposed ? t + e : g, col = transposed ? g : t + e;
                element[e] = ((MatrixRow*)warp.io[m * 8 + row])->row[col];
            }
            ((MatrixRow*)warp.io[lane])->out[m] = element[0] | (uint32_t)element[1] << 16;
        }
    }
}

inline void load_matrix(const char* op, uint32_t out[4], const void* row, bool transposed) {
    check_aligned(row, "misaligned row of ldmatrix");
    MatrixRow io;
    for (int i = 0; i < 8; i++) io.row[i] = ((const uint16_t*)row)[i];
    io.address = (uintptr_t)row;
    collective(op, 0, &io, [transposed](Warp& warp) { load_matrices(warp, transposed); });
    memcpy(out, io.out, 16);
}

struct MmaOperands {
    float* c;
    const uint32_t *a, *b;
};

template <float (*to_f32)(uint16_t)>
inline void multiply(Warp& warp) {
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const MmaOperands& io = *(MmaOperands*)warp.io[lane];
        const int g = lane >> 2, t = (lane & 3) * 2;
        for (int e = 0; e < 2; e++) {
            for (int i = 0; i < 4; i++) {
                a[g + i % 2 * 8][t + e + i / 2 * 8] = to_f32((uint16_t)(io.a[i] >> 16 * e));
            }
            for (int i = 0; i < 2; i++) {
                b[t + e + i * 8][g] = to_f32((uint16_t)(io.b[i] >> 16 * e));
                c[g + i * 8][t + e] = io.c[2 * i + e];
            }
        }
    }
    for (int i = 0; i < 16; i++) {
        for (int k = 0; k < 16; k++) {
            const float scale = a[i][k];
            for (int j = 0; j < 8; j++) c[i][j] += scale * b[k][j];
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane >> 2, t = (lane & 3) * 2;
        for (int i = 0; i < 4; i++) {
            ((MmaOperands*)warp.io[lane])->c[i] = c[g + i / 2 * 8][t + i % 2];
        }
    }
}

}  // namespace simt

// ---- the names kernels use -------------------------------------------------------------------
#define SIMT_TEXT2(x) #x
#define SIMT_TEXT(x) SIMT_TEXT2(x)
#define SIMT_HERE(name) name " " __FILE__ ":" SIMT_TEXT(__LINE__)
#define __syncthreads() simt::sync_threads(SIMT_HERE("__syncthreads"))
#define __syncwarp() simt::sync_warp(SIMT_HERE("__syncwarp"), __LINE__)
#define threadIdx (simt::block.current->thread)
#define blockIdx (simt::block.index)
#define blockDim (simt::block.block)
#define gridDim (simt::block.grid)
#define SIMT_LAUNCH(kernel, grid, threads, shared, stream, ...) \
    ((void)(stream), simt::launch(grid, threads, shared, [=] { (kernel)(__VA_ARGS__); }))

inline unsigned char* shared_memory() { return (unsigned char*)simt::block.shared; }

inline float shfl_xor(float value, int mask, int line = __builtin_LINE()) {
    struct Operands {
        float in, out;
        int mask;
    } io{value, 0, mask};
    simt::collective("shfl_xor", line, &io, [](simt::Warp& warp) {
        for (int lane = 0; lane < 32; lane++) {
            Operands& mine = *(Operands*)warp.io[lane];
            mine.out = ((Operands*)warp.io[lane ^ mine.mask])->in;
        }
    });
    return io.out;
}

inline void cp_async16(void* shared, const void* global, bool valid) {
    simt::check_aligned(shared, "misaligned target of cp.async");
    if (valid) simt::check_aligned(global, "misaligned source of cp.async");
    const simt::Copy copy{shared, global, valid};
    if (!simt::config.late_copies) return simt::land(copy);
    *(uint4*)shared = uint4{~0u, ~0u, ~0u, ~0u};
    simt::block.current->open.push_back(copy);
}

inline void cp_async_commit() {
    simt::Fiber* f = simt::block.current;
    if (!f->open.empty() || !f->groups.empty()) f->groups.push_back(std::move(f->open));
    f->open.clear();
}

template <int N>
inline void cp_async_wait() {
    auto& groups = simt::block.current->groups;
    while (groups.size() > N) {
        for (const simt::Copy& copy : groups.front()) simt::land(copy);
        groups.erase(groups.begin());
    }
}

inline void ldmatrix_x4(uint32_t out[4], const void* row) {
    simt::load_matrix("ldmatrix", out, row, false);
}

inline void ldmatrix_x4_trans(uint32_t out[4], const void* row) {
    simt::load_matrix("ldmatrix.trans", out, row, true);
}

inline void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    simt::MmaOperands io{c, a, b};
    simt::collective("mma.bf16", 0, &io, simt::multiply<simt::bf16_to_f32>);
}

inline void mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    simt::MmaOperands io{c, a, b};
    simt::collective("mma.f16", 0, &io, simt::multiply<simt::f16_to_f32>);
}

inline uint32_t pack_bf16(float low, float high) {
    return simt::f32_to_bf16(low) | (uint32_t)simt::f32_to_bf16(high) << 16;
}

inline uint32_t pack_f16(float low, float high) {
    return simt::f32_to_f16(low) | (uint32_t)simt::f32_to_f16(high) << 16;
}

inline float fast_exp2(float x) { return exp2f(x); }
inline float fast_reciprocal(float x) { return 1 / x; }

inline uint4 load16_once(const void* p) {
    simt::check_aligned(p, "misaligned 16-byte load");
    return *(const uint4*)p;
}

inline void store16_once(void* p, uint4 value) {
    simt::check_aligned(p, "misaligned 16-byte store");
    *(uint4*)p = value;
}

// ---- the part of the runtime library that launchers use --------------------------------------
typedef int cudaError_t;
struct cudaPointerAttributes {
    int type, device;
};
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum { cudaErrorInsufficientDriver = 35, cudaErrorNoDevice = 100 };
enum { cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2 };
enum { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerMultiprocessor };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };

inline cudaError_t cudaGetLastError() { return std::exchange(simt::last_error, 0); }
inline const char* cudaGetErrorString(cudaError_t e) { return e ? "emulated error" : "no error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void*) {
    return *out = {cudaMemoryTypeDevice, 0}, cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* out, int attribute, int) {
    const bool sms = attribute == cudaDevAttrMultiProcessorCount;
    return *out = sms ? simt::config.num_sms : (int)simt::SHARED_LIMIT, cudaSuccess;
}
template <class Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
    return bytes > (int)simt::SHARED_LIMIT ? cudaErrorInvalidValue : cudaSuccess;
}

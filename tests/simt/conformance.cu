// conformance.cu - each word of simt.h on random bits, one warp a block, for nvcc and for g++.
//
// A lane reads IN words and writes OUT words; [block][lane][word] on both sides.
#include "simt.h"

template <bool TRANSPOSED>
struct Ldmatrix {
    static constexpr int IN = 4, OUT = 4;
    static SIMT_DEVICE void run(const uint32_t* in, uint32_t* out) {
        uint4* rows = (uint4*)shared_memory();
        rows[threadIdx.x] = *(const uint4*)in;
        __syncwarp();
        TRANSPOSED ? ldmatrix_x4_trans(out, rows + threadIdx.x)
                   : ldmatrix_x4(out, rows + threadIdx.x);
    }
};

struct ShflXor {
    static constexpr int IN = 1, OUT = 5;
    static SIMT_DEVICE void run(const uint32_t* in, uint32_t* out) {
        for (int i = 0; i < 5; i++) {
            const float got = shfl_xor(*(const float*)in, 1 << i);
            out[i] = *(const uint32_t*)&got;
        }
    }
};

// Four words of data, then whether they are to be copied.
struct CpAsync {
    static constexpr int IN = 8, OUT = 4;
    static SIMT_DEVICE void run(const uint32_t* in, uint32_t* out) {
        uint4* slots = (uint4*)shared_memory();
        cp_async16(slots + threadIdx.x, in, in[4] & 1);
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
        const uint4 got = slots[threadIdx.x ^ 7];
        out[0] = got.x, out[1] = got.y, out[2] = got.z, out[3] = got.w;
    }
};

template <class E>
struct Pack {
    static constexpr int IN = 2, OUT = 1;
    static SIMT_DEVICE void run(const uint32_t* in, uint32_t* out) {
        out[0] = E::pack(((const float*)in)[0], ((const float*)in)[1]);
    }
};

// A, B, then C.
template <class E>
struct Mma {
    static constexpr int IN = 10, OUT = 4;
    static SIMT_DEVICE void run(const uint32_t* in, uint32_t* out) {
        for (int i = 0; i < 4; i++) out[i] = in[6 + i];
        E::mma((float*)out, in, in + 4);
    }
};

struct Exp2 {
    static constexpr int IN = 1, OUT = 1;
    static SIMT_DEVICE void run(const uint32_t* in, uint32_t* out) {
        *(float*)out = fast_exp2(*(const float*)in);
    }
};

struct Reciprocal {
    static constexpr int IN = 1, OUT = 1;
    static SIMT_DEVICE void run(const uint32_t* in, uint32_t* out) {
        *(float*)out = fast_reciprocal(*(const float*)in);
    }
};

struct Once {
    static constexpr int IN = 4, OUT = 4;
    static SIMT_DEVICE void run(const uint32_t* in, uint32_t* out) {
        store16_once(out, load16_once(in));
    }
};

template <class Op>
__global__ void conformance_kernel(const uint32_t* in, uint32_t* out) {
    const int64_t lane = (int64_t)blockIdx.x * 32 + threadIdx.x;
    alignas(16) uint32_t result[8];
    Op::run(in + lane * Op::IN, result);
    for (int i = 0; i < Op::OUT; i++) out[lane * Op::OUT + i] = result[i];
}

template <class Op>
static int run_op(const uint32_t* in, uint32_t* out, int blocks, void* stream) {
    SIMT_LAUNCH(conformance_kernel<Op>, dim3(blocks), dim3(32), 512, stream, in, out);
    return (int)cudaGetLastError();
}

// 0, or CUDA's error; -1 for an unknown name.
extern "C" int conformance(int op, const uint32_t* in, uint32_t* out, int blocks, void* stream) {
    switch (op) {
        case 0: return run_op<Ldmatrix<false>>(in, out, blocks, stream);
        case 1: return run_op<Ldmatrix<true>>(in, out, blocks, stream);
        case 2: return run_op<ShflXor>(in, out, blocks, stream);
        case 3: return run_op<CpAsync>(in, out, blocks, stream);
        case 4: return run_op<Pack<Bf16>>(in, out, blocks, stream);
        case 5: return run_op<Pack<F16>>(in, out, blocks, stream);
        case 6: return run_op<Mma<Bf16>>(in, out, blocks, stream);
        case 7: return run_op<Mma<F16>>(in, out, blocks, stream);
        case 8: return run_op<Exp2>(in, out, blocks, stream);
        case 9: return run_op<Once>(in, out, blocks, stream);
        case 10: return run_op<Reciprocal>(in, out, blocks, stream);
    }
    return -1;
}

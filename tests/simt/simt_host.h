// simt_host.h - the words of simt.h under the host compiler: CUDA blocks run on the CPU.
//
// Each CUDA thread is a fiber. A block's fibers run one at a time until they meet a collective or
// a barrier, in an order the test picks. The emulation is as unforgiving as it can be:
//   - shared memory starts as NaN and is followed by a canary that is checked when a block ends;
//   - a late cp.async leaves NaN behind until it is waited for, an early one lands at once;
//   - lanes of one warp in different collectives, a barrier that some threads never reach, copies in
//     flight at exit, misaligned 16-byte accesses and bad launches are errors;
//   - shuffles order nothing between lanes, __syncwarp and __syncthreads do: ThreadSanitizer sees
//     fibers as threads and these as their only synchronisation.
// An error prints a line that begins with "SIMT ERROR" and ends the process with status 97.
// Left out: partial masks, blocks that are no multiple of 32 threads, atomics, clusters.
#pragma once
#if !defined(__x86_64__)
#error "the emulation switches stacks in x86-64 assembly"
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

#define __global__
#define __grid_constant__
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define SIMT_DEVICE inline
#define SIMT_UNROLL
#define SIMT_UNROLL_4

namespace simt {

enum Order { FORWARD, REVERSE, RANDOM };
enum State { READY, IN_COLLECTIVE, AT_BARRIER, DONE };
constexpr int ERROR_STATUS = 97, MAX_WARPS = 32, CANARY = 64;
constexpr size_t STACK_BYTES = 256 << 10, SHARED_LIMIT = 232448, RING_SLOT = 256 << 10;

struct Config {
    int order = FORWARD;
    unsigned seed = 1;
    int late_copies = 1;
    int num_sms = 3;
};

struct Stats {
    long switches, blocks, ldmatrix, bank_conflicts;
};

struct Copy {
    void* shared;
    const void* global;
    bool valid;
};

struct Fiber {
    void* sp;
    char* stack;
    State state;
    int lane, warp;
    dim3 thread;
    std::vector<std::vector<Copy>> groups;  // committed, oldest first
    std::vector<Copy> open;                 // not committed yet
    const char* place = "start";
    void* asan_stack = nullptr;
    void* tsan_fiber = nullptr;
};

struct Warp {
    uint32_t arrived;
    int num_ready, line;
    const char* op;
    void* io[32];  // each lane's operands of the collective
    char order;    // what ThreadSanitizer synchronises on
};

struct Block {
    std::vector<Fiber*> fibers;
    Warp warps[MAX_WARPS];
    int num_threads, num_at_barrier, num_done;
    dim3 index, block, grid;
    char* shared;
    size_t shared_bytes;
    const std::function<void()>* body;
    Fiber* current = nullptr;
    void* main_sp;
    void *main_asan, *main_tsan;
    const void* main_bottom;
    size_t main_size;
    uint64_t random;
    char barrier, launched, ended;  // what ThreadSanitizer synchronises on

    unsigned next_random() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return (unsigned)(random >> 11);
    }
};

inline Config config;
inline Stats stats;
inline Block block;
inline int last_error = 0;

[[noreturn]] inline void die(const char* message) {
    const Fiber* f = block.current;
    fprintf(stderr, "SIMT ERROR: %s (block %u, thread %d, last at %s)\n", message, block.index.x,
            f ? f->warp * 32 + f->lane : -1, f ? f->place : "launch");
    fflush(stderr);
    _exit(ERROR_STATUS);
}

// ---- what the sanitizers are told ------------------------------------------------------------
// Between quiet() and loud() the scheduler works, which is no part of the program under test.
#if defined(__SANITIZE_THREAD__)
inline void quiet() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
inline void loud() { AnnotateIgnoreWritesEnd("", 0), AnnotateIgnoreReadsEnd("", 0); }
inline void release(void* p) { __tsan_release(p); }
inline void acquire(void* p) { __tsan_acquire(p); }
#else
inline void quiet() {}
inline void loud() {}
inline void release(void*) {}
inline void acquire(void*) {}
#endif

// ---- fibers ----------------------------------------------------------------------------------
extern "C" void simt_switch(void** save_sp, void* load_sp);
asm(R"(
.text
.weak simt_switch
.type simt_switch,@function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");

inline void yield_to_scheduler(Fiber* f) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&f->asan_stack, block.main_bottom, block.main_size);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(block.main_tsan, 1);
#endif
    simt_switch(&f->sp, block.main_sp);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f->asan_stack, &block.main_bottom, &block.main_size);
#endif
}

inline void resume(Fiber* f) {
    block.current = f;
    stats.switches++;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&block.main_asan, f->stack, STACK_BYTES);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(f->tsan_fiber, 1);
#endif
    simt_switch(&block.main_sp, f->sp);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(block.main_asan, nullptr, nullptr);
#endif
    block.current = nullptr;
}

inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block.main_bottom, &block.main_size);
#endif
    quiet();
    for (;;) {
        Fiber* f = block.current;
        acquire(&block.launched);
        loud();
        (*block.body)();
        quiet();
        if (!f->open.empty() || !f->groups.empty()) die("a thread ended with copies in flight");
        release(&block.ended);
        f->state = DONE;
        block.num_done++;
        block.warps[f->warp].num_ready--;
        yield_to_scheduler(f);
    }
}

inline Fiber* new_fiber(int index) {
    Fiber* f = new Fiber;
    f->lane = index % 32;
    f->warp = index / 32;
    f->stack = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f->stack == MAP_FAILED) die("no memory for a fiber's stack");
    mprotect(f->stack, 4096, PROT_NONE);
#if defined(__SANITIZE_THREAD__)
    f->tsan_fiber = __tsan_create_fiber(0);
#endif
    void** top = (void**)(f->stack + STACK_BYTES - 64);
    *--top = nullptr;  // fiber_main never returns
    *--top = (void*)fiber_main;
    for (int i = 0; i < 6; i++) *--top = nullptr;  // the registers simt_switch pops
    f->sp = top;
    return f;
}

// ---- collectives and barriers ----------------------------------------------------------------
// The last lane to arrive runs `all` on every lane's operands.
template <class All>
inline void collective(const char* op, int line, void* io, All&& all) {
    quiet();
    Fiber* f = block.current;
    Warp& warp = block.warps[f->warp];
    f->place = op;
    if (warp.arrived == 0) {
        warp.op = op;
        warp.line = line;
    } else if (warp.line != line || strcmp(warp.op, op)) {
        die("a warp diverged: its lanes are in different collectives");
    }
    warp.io[f->lane] = io;
    warp.arrived |= 1u << f->lane;
    if (warp.arrived == 0xffffffffu) {
        warp.arrived = 0;
        all(warp);
        for (int lane = 0; lane < 32; lane++) {
            block.fibers[f->warp * 32 + lane]->state = READY;
        }
        warp.num_ready = 32;
        loud();
    } else {
        f->state = IN_COLLECTIVE;
        warp.num_ready--;
        loud();
        yield_to_scheduler(f);
    }
}

inline void sync_warp(const char* place, int line) {
    Warp& warp = block.warps[block.current->warp];
    release(&warp.order);
    collective(place, line, nullptr, [](Warp&) {});
    acquire(&warp.order);
}

inline void sync_threads(const char* place) {
    release(&block.barrier);
    quiet();
    Fiber* f = block.current;
    f->place = place;
    f->state = AT_BARRIER;
    block.num_at_barrier++;
    block.warps[f->warp].num_ready--;
    loud();
    yield_to_scheduler(f);
    acquire(&block.barrier);
}

// ---- the scheduler ---------------------------------------------------------------------------
inline void permute(int* items, int n) {
    for (int i = 0; i < n; i++) items[i] = config.order == REVERSE ? n - 1 - i : i;
    if (config.order != RANDOM) return;
    for (int i = n - 1; i > 0; i--) std::swap(items[i], items[block.next_random() % (i + 1)]);
}

inline void make_all_ready() {
    for (int i = 0; i < block.num_threads; i++) block.fibers[i]->state = READY;
    for (int i = 0; i < block.num_threads / 32; i++) block.warps[i].num_ready = 32;
}

inline void run_block() {
    int warps[MAX_WARPS], lanes[32];
    const int num_warps = block.num_threads / 32;
    make_all_ready();
    for (int i = 0; i < num_warps; i++) block.warps[i].arrived = 0;
    block.num_at_barrier = block.num_done = 0;
    while (block.num_done < block.num_threads) {
        bool ran = false;
        permute(warps, num_warps);
        for (int i = 0; i < num_warps; i++) {
            while (block.warps[warps[i]].num_ready) {
                permute(lanes, 32);
                for (int lane : lanes) {
                    Fiber* f = block.fibers[warps[i] * 32 + lane];
                    if (f->state == READY) resume(f), ran = true;
                }
            }
        }
        if (block.num_at_barrier == block.num_threads) {
            block.num_at_barrier = 0;
            make_all_ready();
        } else if (!ran) {
            for (Fiber* f : block.fibers) {
                if (f->state == IN_COLLECTIVE || f->state == AT_BARRIER) block.current = f;
            }
            die("deadlock: threads wait at a barrier or collective that others never reach");
        }
    }
}

inline char* new_shared_memory(size_t bytes) {
#if defined(__SANITIZE_THREAD__)
    // Addresses of their own for each of many blocks: reuse is no race.
    static char* ring = (char*)mmap(nullptr, RING_SLOT << 10, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    static unsigned slot = 0;
    char* memory = ring + RING_SLOT * (slot++ & 1023);
#else
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, bytes)) die("no memory for a block's shared memory");
#endif
    memset(memory, 0xff, bytes);  // NaN in every float type
    return (char*)memory;
}

inline void launch(dim3 grid, dim3 threads, size_t shared_bytes, std::function<void()> body) {
    const unsigned n = threads.x * threads.y * threads.z;
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535 ||
        !n || n > 1024 || shared_bytes > SHARED_LIMIT) {
        last_error = 9;  // cudaErrorInvalidConfiguration
        return;
    }
    if (n % 32) die("the emulation wants whole warps");
    quiet();
#if defined(__SANITIZE_THREAD__)
    block.main_tsan = __tsan_get_current_fiber();
#endif
    while (block.fibers.size() < n) block.fibers.push_back(new_fiber((int)block.fibers.size()));
    for (unsigned i = 0; i < n; i++) {
        block.fibers[i]->thread =
            dim3(i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y);
    }
    block.num_threads = (int)n;
    block.block = threads;
    block.grid = grid;
    block.body = &body;
    block.random = config.seed * 0x9E3779B97F4A7C15ull + 1;
    block.shared_bytes = shared_bytes;
    release(&block.launched);
    for (size_t i = 0; i < (size_t)grid.x * grid.y * grid.z; i++) {
        block.index = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
        size_t canary = CANARY;
#if defined(__SANITIZE_ADDRESS__)
        canary = 0;  // the red zone sees more
#endif
        block.shared = new_shared_memory(shared_bytes + canary);
        run_block();
        for (size_t j = 0; j < canary; j++) {
            if (block.shared[shared_bytes + j] != (char)0xff) die("write beyond shared memory");
        }
#if !defined(__SANITIZE_THREAD__)
        free(block.shared);
#endif
        stats.blocks++;
    }
    acquire(&block.ended);
    loud();
}

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
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2 };
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

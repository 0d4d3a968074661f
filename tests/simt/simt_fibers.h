// simt_fibers.h - CUDA blocks on the CPU: threads as fibers, their barriers and collectives.
//
// A block's fibers run one at a time until they meet a collective or a barrier, in an order the
// test picks. Shared memory starts as NaN and is followed by a canary that is checked when the
// block ends. Lanes of one warp in different collectives, a barrier that some threads never reach,
// copies in flight at exit and bad launches are errors: a line that begins with "SIMT ERROR", and
// the process ends with status 97.
//
// ThreadSanitizer sees fibers as threads, and barriers and __syncwarp as all that orders them.
#pragma once
#if !defined(__x86_64__)
#error "the emulation switches stacks in x86-64 assembly"
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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

}  // namespace simt

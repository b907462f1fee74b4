// Enough of CUDA for g++ to compile the kernels of this repository, and a scheduler that runs them on the CPU.
//
// Every CUDA thread is a fiber that runs until it waits: at a warp collective for its warp, at __syncthreads() for its
// block, at a cluster barrier for its cluster. The blocks of a cluster are alive together, clusters run one after another.
// A seed permutes clusters, blocks, warps and lanes, and decides how far one gets before others go on: a kernel whose
// answer depends on any of it gives itself away. Blocks therefore must not wait for those of other clusters (ours do not).
// A launch reports instead of hanging: barriers that some threads never reach, lanes in different collectives.
// Shared memory is a block's own, filled with garbage before it runs, and ends with it.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace host_cuda {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 256 * 1024;
constexpr size_t STACK_STAGGER = 64 * 13;  // else all stacks' tops share a few lines of the cache

struct Index {
    unsigned int x, y, z;
};

// ------------------------------------------------------------------------------------------------ switching stacks

#if defined(__x86_64__)
// Saves the registers a callee must keep on the old stack and takes them from the new one. swapcontext() would make two
// system calls for every switch.
extern "C" void host_cuda_switch(void** save_stack_pointer, void* new_stack_pointer);
asm(R"(
.text
.globl host_cuda_switch
.type host_cuda_switch, @function
host_cuda_switch:
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
.size host_cuda_switch, .-host_cuda_switch
.section .note.GNU-stack,"",@progbits
.text
)");
struct Context {
    void* stack_pointer;
};
inline void prepare(Context& c, char* stack, size_t bytes, void (*entry)()) {
    void** top = (void**)(stack + bytes);
    *--top = nullptr;  // entry never returns; keeps the alignment that a call leaves
    *--top = (void*)entry;
    for (int i = 0; i < 6; ++i) {
        *--top = nullptr;
    }
    c.stack_pointer = top;
}
inline void switch_context(Context& from, Context& to) { host_cuda_switch(&from.stack_pointer, to.stack_pointer); }
#else
struct Context {
    ucontext_t context;
};
inline void prepare(Context& c, char* stack, size_t bytes, void (*entry)()) {
    getcontext(&c.context);
    c.context.uc_stack.ss_sp = stack;
    c.context.uc_stack.ss_size = bytes;
    c.context.uc_link = nullptr;
    makecontext(&c.context, entry, 0);
}
inline void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
#endif

// ------------------------------------------------------------------------------------------------ threads and barriers

// A barrier's generation grows when all have arrived; a waiting thread remembers the one it saw.
struct Barrier {
    unsigned int arrived = 0;
    unsigned long long generation = 0;

    void arrive(unsigned int members) {
        if (++arrived == members) {
            arrived = 0;
            ++generation;
        }
    }
};

struct Warp {
    Barrier barrier;
    unsigned int live = 0;
    unsigned int order[LANES];  // of its threads
    // Two sets: a lane may post its next value while others still read the last.
    uint64_t values[2][LANES];
    const char* collective = nullptr;  // in which they meet
};

struct Block {
    Index index = {};
    Barrier barrier;
    unsigned int live = 0;
    bool started = false;
    char* shared = nullptr;  // null until the kernel asks for it
};

struct Thread {
    Context context;
    char* stack = nullptr;
    size_t stack_bytes = 0;
    Index index = {};
    Block* block = nullptr;
    Warp* warp = nullptr;
    bool done = false;
    const char* waits_for = nullptr;
    const unsigned long long* generation = nullptr;  // waits while this still is `seen`
    unsigned long long seen = 0;
    bool arrived_at_cluster = false;  // and did not wait yet, for the generation after
    unsigned long long cluster_seen = 0;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
#endif

    bool runnable() const { return !done && (!generation || *generation != seen); }
};

// Of the cluster that runs.
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline std::vector<Block> blocks;
inline Barrier cluster_state;

inline unsigned int block_threads = 0;
inline Context scheduler;
inline Thread* current = nullptr;
inline std::string failure;
inline Index block_dim = {}, grid_dim = {};
inline void (*kernel)(const void*) = nullptr;
inline const void* kernel_params = nullptr;
inline std::mutex one_launch;
#if defined(__SANITIZE_ADDRESS__)
inline void* scheduler_fake_stack = nullptr;
inline const void* scheduler_stack = nullptr;
inline size_t scheduler_stack_size = 0;
#endif

inline void leave_thread() {
    Thread& self = *current;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(self.done ? nullptr : &self.fake_stack, scheduler_stack, scheduler_stack_size);
#endif
    switch_context(self.context, scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(self.fake_stack, &scheduler_stack, &scheduler_stack_size);
#endif
}

inline void enter_thread(Thread& t) {
    current = &t;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, t.stack, t.stack_bytes);
#endif
    switch_context(scheduler, t.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
    current = nullptr;
}

inline void thread_main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
    current->block->started = true;
    kernel(kernel_params);
    current->done = true;
    --current->warp->live;
    --current->block->live;
    leave_thread();
}

inline void wait(const Barrier& barrier, unsigned long long seen, const char* what) {
    if (barrier.generation != seen) {
        return;
    }
    Thread& self = *current;
    self.waits_for = what;
    self.generation = &barrier.generation;
    self.seen = seen;
    leave_thread();
    self.generation = nullptr;
}

inline void arrive_and_wait(Barrier& barrier, unsigned int members, const char* what) {
    const unsigned long long seen = barrier.generation;
    barrier.arrive(members);
    wait(barrier, seen, what);
}

// Of all threads of the cluster, in two steps.
inline void cluster_arrive() {
    Thread& self = *current;
    if (self.arrived_at_cluster) {
        failure = "a thread arrives at the cluster's barrier twice and does not wait in between";
    }
    self.arrived_at_cluster = true;
    self.cluster_seen = cluster_state.generation;
    cluster_state.arrive((unsigned int)blocks.size() * block_threads);
}
inline void cluster_wait() {
    Thread& self = *current;
    if (!self.arrived_at_cluster) {
        failure = "a thread waits at the cluster's barrier and did not arrive";
        return;
    }
    self.arrived_at_cluster = false;
    wait(cluster_state, self.cluster_seen, "the cluster's barrier");
}
inline void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}

// Post a value, wait for all lanes, and see everyone's.
inline const uint64_t* exchange(unsigned int mask, uint64_t value, const char* what) {
    const unsigned int lane = current->index.x % LANES;
    Warp& warp = *current->warp;
    const unsigned int set = warp.barrier.generation & 1;
    warp.values[set][lane] = value;
    if (mask != 0xFFFFFFFFu) {
        failure = std::string(what) + ": only whole warps are supported";
    }
    if (warp.barrier.arrived == 0) {
        warp.collective = what;
    } else if (warp.collective != what) {
        failure = std::string("lanes of a warp meet in different collectives: ") + what + " and " + warp.collective;
    }
    arrive_and_wait(warp.barrier, LANES, what);
    return warp.values[set];
}

// ------------------------------------------------------------------------------------------------ shared memory

// What the kernel's one declaration says.
inline size_t shared_bytes = 0, shared_alignment = 0;
inline int shared_line = 0;

// Allocated, so that AddressSanitizer knows where it ends.
inline char* shared_of(Block& block) {
    if (!block.shared) {
        block.shared = (char*)::operator new(shared_bytes, std::align_val_t(shared_alignment));
        memset(block.shared, 0xA5, shared_bytes);
    }
    return block.shared;
}

inline void forget_shared(Block& block) {
    if (block.shared) {
        ::operator delete(block.shared, std::align_val_t(shared_alignment));
        block.shared = nullptr;
    }
}

inline void* shared_memory(size_t bytes, size_t alignment, int line) {
    if (!shared_line) {
        shared_bytes = bytes;
        shared_alignment = alignment;
        shared_line = line;
    } else if (shared_line != line) {
        failure = "a kernel declares shared memory twice";
    }
    return shared_of(*current->block);
}

// Where block `rank` of the cluster has what this block has at `local`.
inline void* cluster_address(void* local, unsigned int rank) {
    const char* mine = current->block->shared;
    const size_t offset = (size_t)((char*)local - mine);
    if (!mine || offset >= shared_bytes) {
        failure = "cluster_address() of what is not this block's shared memory";
    } else if (rank >= blocks.size()) {
        failure =
            "cluster_address() in block " + std::to_string(rank) + " of a cluster of " + std::to_string(blocks.size());
    } else if (!blocks[rank].started || !blocks[rank].live) {
        failure = "shared memory of block " + std::to_string(blocks[rank].index.x) + " is used " +
                  (blocks[rank].started ? "after its end" : "before it runs");
    } else {
        return shared_of(blocks[rank]) + offset;
    }
    return local;
}

// ------------------------------------------------------------------------------------------------ launching

struct Random {  // splitmix64
    uint64_t state;
    uint64_t below(uint64_t n) {
        uint64_t z = state += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return (z ^ (z >> 31)) % n;
    }
    void shuffle(unsigned int* items, size_t count) {
        for (size_t i = count; i > 1; --i) {
            std::swap(items[i - 1], items[below(i)]);
        }
    }
};

inline std::string describe_deadlock() {
    for (const Thread& t : threads) {
        if (!t.done) {
            return "deadlock in block " + std::to_string(t.block->index.x) + ": thread " + std::to_string(t.index.x) +
                   " waits at " + t.waits_for + " for threads that never come";
        }
    }
    return "";
}

inline void start_cluster(unsigned int first_block, Random& random) {
    cluster_state = Barrier();
    for (Block& block : blocks) {
        forget_shared(block);
        block = Block();
        block.index.x = first_block++;
        block.live = block_threads;
    }
    for (unsigned int w = 0; w < warps.size(); ++w) {
        warps[w].barrier = Barrier();
        warps[w].live = LANES;
        for (unsigned int lane = 0; lane < LANES; ++lane) {
            warps[w].order[lane] = w * LANES + lane;
        }
        random.shuffle(warps[w].order, LANES);
    }
    for (Thread& t : threads) {
        t.done = t.arrived_at_cluster = false;
        t.generation = nullptr;
        prepare(t.context, t.stack, t.stack_bytes, thread_main);
    }
}

// Lets each lane run until it waits; whether any could.
inline bool run_warp(const Warp& warp) {
    bool progress = false;
    for (unsigned int i : warp.order) {
        if (threads[i].runnable()) {
            enter_thread(threads[i]);
            progress = true;
        }
    }
    return progress;
}

inline bool run_warps(const unsigned int* order, unsigned int count, bool far) {
    bool progress = false;
    for (unsigned int n = 0; n < count; ++n) {
        const Warp& warp = warps[order[n]];
        while (warp.live && run_warp(warp) && failure.empty()) {
            progress = true;
            if (!far) {
                break;
            }
        }
    }
    return progress;
}

// Before others go on, a warp may go to its next collective or as far as it can, and so may a block: by the seed.
inline void run_cluster(Random& random) {
    const bool far_warps = random.below(2), far_blocks = random.below(2);
    const unsigned int parts = far_blocks ? (unsigned int)blocks.size() : 1;
    const unsigned int part_warps = (unsigned int)warps.size() / parts;
    static std::vector<unsigned int> part_order, order;
    part_order.resize(parts);
    std::iota(part_order.begin(), part_order.end(), 0);
    random.shuffle(part_order.data(), parts);
    order.resize(warps.size());
    for (unsigned int part = 0; part < parts; ++part) {
        unsigned int* first = order.data() + part * part_warps;
        std::iota(first, first + part_warps, part_order[part] * part_warps);
        random.shuffle(first, part_warps);
    }
    const auto live = [](const Block& block) { return block.live > 0; };
    while (std::any_of(blocks.begin(), blocks.end(), live)) {
        bool progress = false;
        for (unsigned int part = 0; part < parts; ++part) {
            while (run_warps(order.data() + part * part_warps, part_warps, far_warps) && failure.empty()) {
                progress = true;
            }
        }
        if (failure.empty() && !progress) {
            failure = describe_deadlock();
        }
        if (!failure.empty()) {
            return;
        }
    }
}

inline std::string run_grid(unsigned int grid, unsigned int block, unsigned int cluster, uint64_t order_seed) {
    if (block % LANES != 0) {
        return "only whole warps are supported";
    }
    if (cluster == 0 || grid % cluster != 0) {
        return "the grid is not made of whole clusters";
    }
    static std::vector<char*> stacks;
    while (stacks.size() < cluster * block) {
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) {
            return "no memory for a thread's stack";
        }
        stacks.push_back((char*)stack);
    }
    threads.assign(cluster * block, Thread());
    warps.assign(cluster * block / LANES, Warp());
    blocks.assign(cluster, Block());
    for (unsigned int i = 0; i < threads.size(); ++i) {
        threads[i].stack = stacks[i];
        threads[i].stack_bytes = STACK_BYTES - i % 64 * STACK_STAGGER;
        threads[i].index.x = i % block;
        threads[i].block = &blocks[i / block];
        threads[i].warp = &warps[i / LANES];
    }
    block_threads = block;
    block_dim = {block, 1, 1};
    grid_dim = {grid, 1, 1};
    shared_line = 0;
    failure.clear();
    Random random{order_seed};
    std::vector<unsigned int> order(grid / cluster);
    std::iota(order.begin(), order.end(), 0);
    random.shuffle(order.data(), order.size());
    for (unsigned int n : order) {
        start_cluster(n * cluster, random);
        run_cluster(random);
        if (!failure.empty()) {
            break;
        }
    }
    for (Block& b : blocks) {
        forget_shared(b);
    }
    return failure;
}

}  // namespace host_cuda

// ------------------------------------------------------------------------------------------------ the CUDA names

#define __global__
#define __device__
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx (::host_cuda::current->index)
#define blockIdx (::host_cuda::current->block->index)
#define blockDim (::host_cuda::block_dim)
#define gridDim (::host_cuda::grid_dim)
#define CUPYSPEC_SHARED(TYPE, name) \
    TYPE& name = *(TYPE*)::host_cuda::shared_memory(sizeof(TYPE), alignof(TYPE), __LINE__)

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

inline float __uint_as_float(unsigned int bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline double __longlong_as_double(long long bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}
inline long long __double_as_longlong(double value) {
    long long bits;
    memcpy(&bits, &value, 8);
    return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __double2float_ru(double value) {
    const float near = (float)value;
    return (double)near < value ? nextafterf(near, INFINITY) : near;
}
inline float __double2float_rd(double value) {
    const float near = (float)value;
    return (double)near > value ? nextafterf(near, -INFINITY) : near;
}
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz((unsigned int)value); }
inline int __ffs(int value) { return __builtin_ffs(value); }

inline void __syncthreads() {
    ::host_cuda::arrive_and_wait(::host_cuda::current->block->barrier, ::host_cuda::block_threads, "__syncthreads()");
}
inline void __threadfence() {}

template <typename T> inline T host_cuda_shuffle(unsigned int mask, T value, int source, const char* what) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    const int lane = threadIdx.x % ::host_cuda::LANES;
    const uint64_t* all = ::host_cuda::exchange(mask, bits, what);
    T result;
    memcpy(&result, &all[source >= 0 && source < ::host_cuda::LANES ? source : lane], sizeof(T));
    return result;
}
template <typename T> inline T __shfl_xor_sync(unsigned int mask, T value, int lanes) {
    return host_cuda_shuffle(mask, value, (int)(threadIdx.x % 32) ^ lanes, "__shfl_xor_sync()");
}
template <typename T> inline T __shfl_up_sync(unsigned int mask, T value, unsigned int by) {
    return host_cuda_shuffle(mask, value, (int)(threadIdx.x % 32) - (int)by, "__shfl_up_sync()");
}
template <typename T> inline T __shfl_sync(unsigned int mask, T value, int lane) {
    return host_cuda_shuffle(mask, value, lane, "__shfl_sync()");
}
inline unsigned int __ballot_sync(unsigned int mask, int predicate) {
    const uint64_t* all = ::host_cuda::exchange(mask, predicate != 0, "__ballot_sync()");
    unsigned int ballot = 0;
    for (int lane = 0; lane < 32; ++lane) {
        ballot |= (unsigned int)all[lane] << lane;
    }
    return ballot;
}

inline void __syncwarp(unsigned int mask = 0xFFFFFFFFu) { ::host_cuda::exchange(mask, 0, "__syncwarp()"); }

// One thread runs at a time.
template <typename T> inline T atomicMin(T* at, T value) {
    const T old = *at;
    *at = value < old ? value : old;
    return old;
}
template <typename T> inline T atomicAdd(T* at, T value) {
    const T old = *at;
    *at = old + value;
    return old;
}
template <typename T> inline T atomicOr(T* at, T value) {
    const T old = *at;
    *at = old | value;
    return old;
}

// ------------------------------------------------------------------------------------------------ the library's entry

namespace host_cuda {

template <typename P> void call_with(void (*kernel)(P), const void* params) { kernel(*(const P*)params); }
template <auto KERNEL> void call(const void* params) { call_with(KERNEL, params); }

struct Entry {
    const char* name;
    void (*call)(const void* params);
};

const Entry* entries();  // written by backend.py; ends with a null name

}  // namespace host_cuda

// Runs a kernel by name. Returns a message, empty if all went well; valid until the next launch.
extern "C" const char* host_cuda_launch(const char* name, unsigned int grid, unsigned int block, unsigned int cluster,
                                        const void* params, uint64_t order_seed) {
    const std::lock_guard<std::mutex> lock(host_cuda::one_launch);
    static std::string message;
    message = "no such kernel";
    for (const host_cuda::Entry* entry = host_cuda::entries(); entry->name; ++entry) {
        if (!strcmp(entry->name, name)) {
            host_cuda::kernel = entry->call;
            host_cuda::kernel_params = params;
            message = host_cuda::run_grid(grid, block, cluster, order_seed);
        }
    }
    return message.c_str();
}

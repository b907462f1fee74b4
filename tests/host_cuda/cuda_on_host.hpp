// Enough of CUDA for g++ to compile the kernels of this repository, and a scheduler that runs them on the CPU.
//
// Every CUDA thread is a fiber that runs until it waits: at __syncthreads() for its block, at a warp collective for its
// warp. Blocks run one after another, in an order permuted by a seed, as are the threads of a block: a kernel whose
// answer depends on either gives itself away. Blocks therefore must not wait for each other (ours do not).
// A launch reports instead of hanging: barriers that some threads never reach, lanes in different collectives.
// Shared memory is filled with garbage before every block.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <mutex>
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
inline void prepare(Context& c, char* stack, void (*entry)()) {
    void** top = (void**)(stack + STACK_BYTES);
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
inline void prepare(Context& c, char* stack, void (*entry)()) {
    getcontext(&c.context);
    c.context.uc_stack.ss_sp = stack;
    c.context.uc_stack.ss_size = STACK_BYTES;
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
};

struct Thread {
    Context context;
    char* stack = nullptr;
    Index index = {};
    bool done = false;
    const char* waits_for = nullptr;
    const unsigned long long* generation = nullptr;  // waits while this still is `seen`
    unsigned long long seen = 0;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
#endif

    bool runnable() const { return !done && (!generation || *generation != seen); }
};

struct Warp {
    Barrier barrier;
    // Two sets: a lane may post its next value while others still read the last.
    uint64_t values[2][LANES];
    const char* collective[2][LANES];
};

inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline Barrier block_barrier;
inline unsigned int block_threads = 0;
inline Context scheduler;
inline Thread* current = nullptr;
inline std::string failure;
inline Index block_index = {}, block_dim = {}, grid_dim = {};
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
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, t.stack, STACK_BYTES);
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
    kernel(kernel_params);
    current->done = true;
    leave_thread();
}

inline void arrive(Barrier& barrier, unsigned int members, const char* what) {
    if (++barrier.arrived == members) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    Thread& self = *current;
    self.waits_for = what;
    self.generation = &barrier.generation;
    self.seen = barrier.generation;
    leave_thread();
    self.generation = nullptr;
}

// Post a value, wait for all lanes, and see everyone's.
inline const uint64_t* exchange(unsigned int mask, uint64_t value, const char* what) {
    const unsigned int lane = current->index.x % LANES;
    Warp& warp = warps[current->index.x / LANES];
    const unsigned int set = warp.barrier.generation & 1;
    warp.values[set][lane] = value;
    warp.collective[set][lane] = what;
    if (mask != 0xFFFFFFFFu) {
        failure = std::string(what) + ": only whole warps are supported";
    }
    arrive(warp.barrier, LANES, what);
    for (int other = 0; other < LANES; ++other) {
        if (warp.collective[set][other] != what) {
            failure = std::string("lanes of a warp meet in different collectives: ") + what + " and " +
                      warp.collective[set][other];
        }
    }
    return warp.values[set];
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
    template <typename T> void shuffle(std::vector<T>& items) {
        for (size_t i = items.size(); i > 1; --i) {
            std::swap(items[i - 1], items[below(i)]);
        }
    }
};

extern "C" char __start_host_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_host_shared[] __attribute__((weak, visibility("hidden")));

inline std::string describe_deadlock() {
    for (const Thread& t : threads) {
        if (&t - threads.data() < (long)block_threads && !t.done) {
            return "deadlock in block " + std::to_string(block_index.x) + ": thread " + std::to_string(t.index.x) +
                   " waits at " + t.waits_for + " for threads that never come";
        }
    }
    return "";
}

// Warps in permuted order, and the lanes of each.
inline void run_block(Random& random) {
    for (char* byte = __start_host_shared; byte < __stop_host_shared; ++byte) {
        *byte = (char)0xA5;
    }
    block_barrier = Barrier();
    std::vector<int> warp_order, order;
    for (unsigned int w = 0; w < block_threads / LANES; ++w) {
        warps[w].barrier = Barrier();
        warp_order.push_back(w);
    }
    random.shuffle(warp_order);
    for (int w : warp_order) {
        std::vector<int> lanes;
        for (int lane = 0; lane < LANES; ++lane) {
            lanes.push_back(w * LANES + lane);
        }
        random.shuffle(lanes);
        order.insert(order.end(), lanes.begin(), lanes.end());
    }
    for (int i : order) {
        Thread& t = threads[i];
        t.done = false;
        t.generation = nullptr;
        prepare(t.context, t.stack, thread_main);
    }
    for (size_t live = order.size(); live > 0;) {
        bool progress = false;
        for (int i : order) {
            Thread& t = threads[i];
            if (t.runnable()) {
                enter_thread(t);
                progress = true;
                live -= t.done;
            }
        }
        if (!failure.empty()) {
            return;
        }
        if (!progress) {
            failure = describe_deadlock();
            return;
        }
    }
}

inline std::string run_grid(unsigned int grid, unsigned int block, uint64_t order_seed) {
    if (block % LANES != 0) {
        return "only whole warps are supported";
    }
    while (threads.size() < block) {
        Thread t;
        t.index.x = (unsigned int)threads.size();
        t.stack = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (t.stack == MAP_FAILED) {
            return "no memory for a thread's stack";
        }
        threads.push_back(t);
    }
    warps.resize(block / LANES > warps.size() ? block / LANES : warps.size());
    block_threads = block;
    block_dim = {block, 1, 1};
    grid_dim = {grid, 1, 1};
    failure.clear();
    Random random{order_seed};
    std::vector<unsigned int> blocks(grid);
    for (unsigned int i = 0; i < grid; ++i) {
        blocks[i] = i;
    }
    random.shuffle(blocks);
    for (unsigned int b : blocks) {
        block_index = {b, 0, 0};
        run_block(random);
        if (!failure.empty()) {
            break;
        }
    }
    return failure;
}

}  // namespace host_cuda

// ------------------------------------------------------------------------------------------------ the CUDA names

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("host_shared")))
#define threadIdx (::host_cuda::current->index)
#define blockIdx (::host_cuda::block_index)
#define blockDim (::host_cuda::block_dim)
#define gridDim (::host_cuda::grid_dim)

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
inline float __fmul_rn(float a, float b) { return a * b; }
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
    ::host_cuda::arrive(::host_cuda::block_barrier, ::host_cuda::block_threads, "__syncthreads()");
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

struct Entry {
    const char* name;
    void (*call)(const void* params);
};

const Entry* entries();  // by the file of entry points; ends with a null name

}  // namespace host_cuda

// Runs a kernel by name. Returns a message, empty if all went well; valid until the next launch.
extern "C" const char* host_cuda_launch(const char* name, unsigned int grid, unsigned int block, const void* params,
                                        uint64_t order_seed) {
    const std::lock_guard<std::mutex> lock(host_cuda::one_launch);
    static std::string message;
    message = "no such kernel";
    for (const host_cuda::Entry* entry = host_cuda::entries(); entry->name; ++entry) {
        if (!strcmp(entry->name, name)) {
            host_cuda::kernel = entry->call;
            host_cuda::kernel_params = params;
            message = host_cuda::run_grid(grid, block, order_seed);
        }
    }
    return message.c_str();
}

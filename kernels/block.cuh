// Reductions of a warp and of a block. A name says who holds the result: `_all`, every thread.
//
// Warp functions: all 32 lanes call them together; no barrier, no shared memory.
// Block functions: all threads call them together; each begins with a barrier, so `shared` may be reused between calls
// and earlier reads of it are over.
#pragma once

namespace cupyspec {

// Shared memory, declared at the top of a kernel; tests/host_cuda brings its own.
#ifndef CUPYSPEC_SHARED
#define CUPYSPEC_SHARED(TYPE, name) __shared__ TYPE name
#endif

// Clusters: blocks that run at the same time and may wait for each other. From compute capability 9.0 on.
#ifndef CUPYSPEC_CLUSTERS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define CUPYSPEC_CLUSTERS 0
#else
#define CUPYSPEC_CLUSTERS 1
#endif
#endif

constexpr unsigned int FULL_WARP = 0xFFFFFFFFu;
constexpr int LANES = 32;

__device__ inline int lane_index() { return threadIdx.x % LANES; }
__device__ inline int warp_index() { return threadIdx.x / LANES; }

// Butterfly 16, 8, 4, 2, 1: part of the contract, as the order of a float sum is.
__device__ inline float warp_sum_all(float value) {
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    }
    return value;
}

// Skips NaN, as fmaxf does.
__device__ inline float warp_max_all(float value) {
    for (int offset = 16; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
    }
    return value;
}

__device__ inline unsigned long long warp_max_all(unsigned long long value) {
    for (int offset = 16; offset > 0; offset /= 2) {
        const unsigned long long other = __shfl_xor_sync(FULL_WARP, value, offset);
        value = other > value ? other : value;
    }
    return value;
}

__device__ inline unsigned long long warp_min_all(unsigned long long value) {
    for (int offset = 16; offset > 0; offset /= 2) {
        const unsigned long long other = __shfl_xor_sync(FULL_WARP, value, offset);
        value = other < value ? other : value;
    }
    return value;
}

// Sum over this lane and the lanes below it.
__device__ inline float warp_inclusive_sum(float value) {
    for (int offset = 1; offset < LANES; offset *= 2) {
        const float below = __shfl_up_sync(FULL_WARP, value, offset);
        if (lane_index() >= offset) {
            value += below;
        }
    }
    return value;
}

template <int WARPS> struct BlockScratch {
    unsigned long long keys[WARPS];
};

template <int WARPS>
__device__ inline unsigned long long block_min_all(unsigned long long value, BlockScratch<WARPS>& shared) {
    value = warp_min_all(value);
    __syncthreads();
    if (lane_index() == 0) {
        shared.keys[warp_index()] = value;
    }
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) {
        value = shared.keys[w] < value ? shared.keys[w] : value;
    }
    return value;
}

// The first says that this thread runs, the second waits until all of the cluster do: only then may a block write to
// another's shared memory.
__device__ inline void cluster_arrive() {
#if CUPYSPEC_CLUSTERS && defined(__CUDA_ARCH__)
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#elif CUPYSPEC_CLUSTERS
    ::host_cuda::cluster_arrive();
#endif
}
__device__ inline void cluster_wait() {
#if CUPYSPEC_CLUSTERS && defined(__CUDA_ARCH__)
    asm volatile("barrier.cluster.wait;" ::: "memory");
#elif CUPYSPEC_CLUSTERS
    ::host_cuda::cluster_wait();
#endif
}

// Waits for all threads of the cluster; what they wrote before, to global memory too, is seen after. Without clusters a
// block is one of its own.
__device__ inline void cluster_sync() {
#if !CUPYSPEC_CLUSTERS
    __syncthreads();
#elif defined(__CUDA_ARCH__)
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#else
    ::host_cuda::cluster_barrier();
#endif
}

// Writes to the shared variable that block `rank` of the cluster has under this address.
__device__ inline void cluster_store(unsigned long long* address, int rank, unsigned long long value) {
#if !CUPYSPEC_CLUSTERS
    *address = value;
#elif defined(__CUDA_ARCH__)
    unsigned int remote;
    const unsigned int local = (unsigned int)__cvta_generic_to_shared(address);
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote), "l"(value) : "memory");
#else
    *(unsigned long long*)::host_cuda::cluster_address(address, rank) = value;
#endif
}

// Of two kernels in a row, where the launch of the second lets it start before the first has ended: the first says that
// the second may start, the second waits until the first has ended and its writes are seen.
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_last_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace cupyspec

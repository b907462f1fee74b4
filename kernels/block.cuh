// Reductions of a warp and of a block. A name says who holds the result: `_all`, every thread.
//
// Warp functions: all 32 lanes call them together; no barrier, no shared memory.
// Block functions: all threads call them together; each begins with a barrier, so `shared` may be reused between calls
// and earlier reads of it are over.
#pragma once

namespace cupyspec {

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
    float sums[WARPS];
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

template <int WARPS>
__device__ inline unsigned long long block_max_all(unsigned long long value, BlockScratch<WARPS>& shared) {
    return ~block_min_all<WARPS>(~value, shared);
}

struct Bounds {
    float lower, upper, total;
};

// Running sums over the threads of a block. A thread's lower bound is bit for bit the upper bound of the thread before
// it, and total is the last upper bound.
template <int WARPS> __device__ inline Bounds block_running_sum(float value, BlockScratch<WARPS>& shared) {
    const float inclusive = warp_inclusive_sum(value);
    __syncthreads();
    if (lane_index() == LANES - 1) {
        shared.sums[warp_index()] = inclusive;
    }
    __syncthreads();
    float base = 0.0f, total = 0.0f;  // of the warps before this one; of all
    for (int w = 0; w < WARPS; ++w) {
        base = w == warp_index() ? total : base;
        total += shared.sums[w];
    }
    const float below = __shfl_up_sync(FULL_WARP, inclusive, 1);
    return {lane_index() == 0 ? base : base + below, base + inclusive, total};
}

}  // namespace cupyspec

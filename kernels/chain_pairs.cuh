// Pairs of a chain's score rows: what is kept of their segments (segment.cuh), and their totals.
#pragma once

#include "chain.cuh"

namespace cupyspec {

template <typename T>
__device__ inline Pair warp_segment_pair_all(const WarpSegment<T, SEG>& mine, Need need, bool probs, float scale) {
    if (need == NEED_ARGMAX) {
        return mine.greedy_pair_all();
    }
    return probs ? mine.probability_pair_all() : mine.softmax_pair_all(scale);
}

__device__ inline Pair warp_combine_all(const Pair* pairs, long long segments, Need need, float scale) {
    return need == NEED_ARGMAX ? warp_combine_greedy_all(pairs, segments)
                               : warp_combine_sums_all(pairs, segments, scale);
}

}  // namespace cupyspec

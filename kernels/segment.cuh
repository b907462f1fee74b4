// A segment: SEG consecutive ids of one score row, the unit in which weights are summed and raced.
//
// Order of a sum (part of the contract): a granule's 8 ids ascending; lane l adds granules l, l+32, l+64, ...; then a
// butterfly. Absent ids (at or above the vocabulary size) add +0. Rows that are not aligned to 16 bytes are read by
// narrower loads in the same order, so a sum does not depend on alignment, layout or storage type.
#pragma once

#include "block.cuh"
#include "dtypes.cuh"

namespace cupyspec {

constexpr int GRANULE = 8;

// The stored bits of one granule.
template <typename T> struct alignas(16) Granule {
    unsigned int words[GRANULE * sizeof(T) / 4];
};

__device__ inline unsigned int value_bits(const Granule<float>& g, int j) { return g.words[j]; }
__device__ inline unsigned int value_bits(const Granule<BFloat16>& g, int j) {
    return j % 2 ? g.words[j / 2] & 0xFFFF0000u : g.words[j / 2] << 16;
}
__device__ inline unsigned int value_bits(const Granule<Half>& g, int j) {
    return widen(Half{(unsigned short)(g.words[j / 2] >> (j % 2 * 16))});
}

template <typename T> __device__ inline bool is_aligned(const T* row) { return (unsigned long long)row % 16 == 0; }

template <typename T> __device__ inline Granule<T> load_vector(const T* row, long long first) {
    Granule<T> g;
    const uint4* from = (const uint4*)(row + first);
    for (int v = 0; v < (int)sizeof(g) / 16; ++v) {
        const uint4 quad = from[v];
        g.words[4 * v] = quad.x;
        g.words[4 * v + 1] = quad.y;
        g.words[4 * v + 2] = quad.z;
        g.words[4 * v + 3] = quad.w;
    }
    return g;
}

__device__ inline unsigned int stored_bits(const float* row, int j) { return ((const unsigned int*)row)[j]; }
template <typename T> __device__ inline unsigned int stored_bits(const T* row, int j) { return row[j].bits; }

// Any alignment; ids at or above `vocab` are not read and get `fill`.
template <typename T>
__device__ inline Granule<T> load_scalars(const T* row, long long first, long long vocab, unsigned int fill) {
    Granule<T> g;
    constexpr int PER_WORD = 4 / (int)sizeof(T);
    const int exist = first + GRANULE <= vocab ? GRANULE : (int)(vocab - first);  // may be negative
#pragma unroll
    for (int word = 0; word < GRANULE / PER_WORD; ++word) {
        unsigned int bits = 0;
#pragma unroll
        for (int part = 0; part < PER_WORD; ++part) {
            const int j = word * PER_WORD + part;
            bits |= (j < exist ? stored_bits(row + first, j) : fill) << (part * 16);
        }
        g.words[word] = bits;
    }
    return g;
}

template <typename T>
__device__ inline Granule<T> load_granule(const T* row, long long first, long long vocab, unsigned int fill) {
    return is_aligned(row) && first + GRANULE <= vocab ? load_vector(row, first)
                                                       : load_scalars(row, first, vocab, fill);
}

// What is kept of a segment, or of a whole row.
//   logits, sampled: (largest logit, sum of 2^((z - largest) * scale)); all -inf: (-inf, 0)
//   probabilities:   (0, sum)
//   greedy:          (largest logit, bits of its lowest id); all -inf: -inf
// A fault (NaN, +inf; for probabilities also negative) makes sum NaN, or in a greedy pair max.
struct alignas(8) Pair {
    float max, sum;
};

__device__ inline float quiet_nan() { return float_of(0x7FC00000u); }
__device__ inline float minus_inf() { return float_of(NEG_INF_BITS); }
__device__ inline bool is_nan(float x) { return (__float_as_uint(x) & 0x7FFFFFFFu) > INF_BITS; }

// exp((z - pivot) / T) as a power of 2; scale = log2(e) / T. exp2f is good to 2 ulp, so what counts is the rounding of
// its argument: below |t| * 2^-23, that is a relative 2^-17 for a weight of 2^-60 and 2^-20 for one of 2^-10.
__device__ inline float weight_of_logit(float z, float pivot, float scale) { return exp2f((z - pivot) * scale); }

// Never below 2^-126: a flushed scale would turn -inf * scale into NaN. (In float: many GPUs are slow at double.)
__device__ inline float logit_scale(float temperature) { return fmaxf(1.44269504f / temperature, MIN_NORMAL); }

// A pivot to subtract from logits: -inf - -inf is no weight.
__device__ inline float finite_pivot(float max) { return max == minus_inf() ? 0.0f : max; }

// One warp reads one segment of one row. All loads are issued before the first use.
template <typename T, int SEG> struct WarpSegment {
    static_assert(SEG % (GRANULE * LANES) == 0, "a segment is a whole number of granules for every lane");
    static constexpr int GRANULES = SEG / (GRANULE * LANES);  // of one lane

    Granule<T> granules[GRANULES];
    unsigned int first_id;  // of this lane's granule 0

    __device__ void load(const T* row, unsigned int segment, long long vocab, unsigned int fill) {
        const long long first = (long long)segment * SEG;
        first_id = segment * SEG + lane_index() * GRANULE;
        if (is_aligned(row) && first + SEG <= vocab) {
#pragma unroll
            for (int g = 0; g < GRANULES; ++g) {
                granules[g] = load_vector(row, first_id + g * GRANULE * LANES);
            }
        } else {
#pragma unroll
            for (int g = 0; g < GRANULES; ++g) {
                granules[g] = load_scalars(row, first_id + g * GRANULE * LANES, vocab, fill);
            }
        }
    }

    __device__ Pair softmax_pair_all(float scale) const {
        float max = minus_inf();
#pragma unroll
        for (int g = 0; g < GRANULES; ++g) {
#pragma unroll
            for (int j = 0; j < GRANULE; ++j) {
                max = fmaxf(max, float_of(value_bits(granules[g], j)));
            }
        }
        max = warp_max_all(max);
        const float pivot = finite_pivot(max);
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < GRANULES; ++g) {
            float granule = 0.0f;
#pragma unroll
            for (int j = 0; j < GRANULE; ++j) {
                // A NaN or +inf anywhere makes the sum NaN (inf - inf), though fmaxf skipped the NaN.
                granule += weight_of_logit(float_of(value_bits(granules[g], j)), pivot, scale);
            }
            sum += granule;
        }
        return {max, warp_sum_all(sum)};
    }

    __device__ Pair probability_pair_all() const {
        float sum = 0.0f;
        bool bad = false;
#pragma unroll
        for (int g = 0; g < GRANULES; ++g) {
            float granule = 0.0f;
#pragma unroll
            for (int j = 0; j < GRANULE; ++j) {
                const unsigned int bits = value_bits(granules[g], j);
                bad |= bad_probability(bits);
                granule += clean_probability(bits);
            }
            sum += granule;
        }
        sum = warp_sum_all(sum);
        return {0.0f, __ballot_sync(FULL_WARP, bad) ? quiet_nan() : sum};
    }

    __device__ Pair greedy_pair_all() const {
        unsigned int best_key = 0, best_bits = NEG_INF_BITS, best_id = first_id;
        bool bad = false;
#pragma unroll
        for (int g = 0; g < GRANULES; ++g) {
#pragma unroll
            for (int j = 0; j < GRANULE; ++j) {
                const unsigned int bits = value_bits(granules[g], j), key = order_key(bits);
                bad |= bad_logit(bits);
                if (key > best_key) {  // strict and ascending: the lowest id of a tie
                    best_key = key;
                    best_bits = bits;
                    best_id = first_id + g * GRANULE * LANES + j;
                }
            }
        }
        const unsigned long long mine = (unsigned long long)best_key << 32 | ~best_id;
        const unsigned long long best = warp_max_all(mine);
        const int winner = __ffs((int)__ballot_sync(FULL_WARP, mine == best)) - 1;
        best_bits = __shfl_sync(FULL_WARP, best_bits, winner);
        const float max = __ballot_sync(FULL_WARP, bad) ? quiet_nan() : float_of(best_bits);
        return {max, float_of(~(unsigned int)best)};
    }
};

// WarpSegment::softmax_pair_all() bit for bit, reading the segment twice instead of holding it: for rare rows, in a
// kernel that has no registers to spare.
template <typename T, int SEG>
__device__ Pair warp_reread_pair_all(const T* row, long long segment, long long vocab, float scale) {
    const long long first = segment * SEG + lane_index() * GRANULE;
    float max = minus_inf();
#pragma unroll 1
    for (int g = 0; g < SEG / (GRANULE * LANES); ++g) {
        const Granule<T> scores = load_granule(row, first + g * GRANULE * LANES, vocab, Storage<T>::NEG_INF);
#pragma unroll
        for (int j = 0; j < GRANULE; ++j) {
            max = fmaxf(max, float_of(value_bits(scores, j)));
        }
    }
    max = warp_max_all(max);
    const float pivot = finite_pivot(max);
    float sum = 0.0f;
#pragma unroll 1
    for (int g = 0; g < SEG / (GRANULE * LANES); ++g) {
        const Granule<T> scores = load_granule(row, first + g * GRANULE * LANES, vocab, Storage<T>::NEG_INF);
        float granule = 0.0f;
#pragma unroll
        for (int j = 0; j < GRANULE; ++j) {
            granule += weight_of_logit(float_of(value_bits(scores, j)), pivot, scale);
        }
        sum += granule;
    }
    return {max, warp_sum_all(sum)};
}

// A row's pair from its segments' pairs: lane l takes pairs l, l+32, ..., then a butterfly.
__device__ inline Pair warp_combine_sums_all(const Pair* pairs, long long segments, float scale) {
    float max = minus_inf();
    for (long long s = lane_index(); s < segments; s += LANES) {
        max = fmaxf(max, pairs[s].max);
    }
    max = warp_max_all(max);
    const float pivot = finite_pivot(max);
    float sum = 0.0f;
    for (long long s = lane_index(); s < segments; s += LANES) {
        sum += pairs[s].sum * weight_of_logit(pairs[s].max, pivot, scale);
    }
    return {max, warp_sum_all(sum)};
}

__device__ inline Pair warp_combine_greedy_all(const Pair* pairs, long long segments) {
    unsigned long long best = 0;
    bool bad = false;
    for (long long s = lane_index(); s < segments; s += LANES) {
        const unsigned int bits = __float_as_uint(pairs[s].max), id = __float_as_uint(pairs[s].sum);
        bad |= is_nan(pairs[s].max);
        const unsigned long long key = (unsigned long long)order_key(bits) << 32 | ~id;
        best = key > best ? key : best;
    }
    best = warp_max_all(best);
    const unsigned int key = (unsigned int)(best >> 32);
    const unsigned int bits = key & 0x80000000u ? key & 0x7FFFFFFFu : ~key;  // order_key() undone
    const float max = __ballot_sync(FULL_WARP, bad) ? quiet_nan() : float_of(bits);
    return {max, float_of(~(unsigned int)best)};
}

}  // namespace cupyspec

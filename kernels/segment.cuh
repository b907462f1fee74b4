// A segment: SEG consecutive ids of one score row, the unit in which weights are summed and raced.
//
// Order of a sum (part of the contract): a granule's 8 ids ascending; lane l adds granules l, l+32, l+64, ...; then a
// butterfly. Absent ids (at or above the vocabulary size) add +0. Rows that are not aligned to 16 bytes are put together
// from aligned loads, so a sum does not depend on alignment, layout or storage type.
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

// Puts stored bits in a value's place.
__device__ inline void set_stored(Granule<float>& g, int j, unsigned int bits) { g.words[j] = bits; }
template <typename T> __device__ inline void set_stored(Granule<T>& g, int j, unsigned int bits) {
    const unsigned int shift = j % 2 * 16;
    g.words[j / 2] = (g.words[j / 2] & ~(0xFFFFu << shift)) | bits << shift;
}

// The larger value at each place; a NaN only where both are.
__device__ inline Granule<float> max_by_place(const Granule<float>& a, const Granule<float>& b) {
    Granule<float> larger;
#pragma unroll
    for (int j = 0; j < GRANULE; ++j) {
        larger.words[j] = __float_as_uint(fmaxf(float_of(a.words[j]), float_of(b.words[j])));
    }
    return larger;
}
template <typename T> __device__ inline Granule<T> max_by_place(const Granule<T>& a, const Granule<T>& b) {
    Granule<T> larger;
#pragma unroll
    for (int word = 0; word < GRANULE / 2; ++word) {
        larger.words[word] = max_of_two(T{}, a.words[word], b.words[word]);
    }
    return larger;
}

// 16 bytes at an aligned address. At least one of them lies in [begin, end), and whoever owns one owns the line of memory
// with them all; the others mean nothing. On the CPU, where a sanitizer looks, they are not read.
__device__ inline uint4 load_quad(const char* at, const char* begin, const char* end) {
#ifdef __CUDA_ARCH__
    (void)begin, (void)end;
    return *(const uint4*)at;
#else
    uint4 quad = {};
    for (int byte = 0; byte < 16; ++byte) {
        if (at + byte >= begin && at + byte < end) {
            ((char*)&quad)[byte] = at[byte];
        }
    }
    return quad;
#endif
}

// As many quads as `words` holds, from `at` on; nothing behind `end`.
template <int WORDS>
__device__ inline void load_quads(const char* at, const char* begin, const char* end, unsigned int (&words)[WORDS]) {
#pragma unroll
    for (int q = 0; q < WORDS / 4; ++q) {
        const uint4 quad = at + 16 * q < end ? load_quad(at + 16 * q, begin, end) : uint4{0, 0, 0, 0};
        words[4 * q] = quad.x;
        words[4 * q + 1] = quad.y;
        words[4 * q + 2] = quad.z;
        words[4 * q + 3] = quad.w;
    }
}

// All words BY places down, if wanted.
template <int BY, int WORDS> __device__ inline void move_down(unsigned int (&words)[WORDS], bool wanted) {
#pragma unroll
    for (int w = 0; w + BY < WORDS; ++w) {
        words[w] = wanted ? words[w + BY] : words[w];
    }
}

// Granules of one lane: the first from id `first` on, each 32 granules behind the one before. Ids at or above `vocab` are
// not there and get `fill`. All loads are issued before the first use, whatever the alignment of the row.
template <typename T, int COUNT>
__device__ inline void load_granules(const T* row, long long first, long long vocab, unsigned int fill,
                                     Granule<T> (&granules)[COUNT]) {
    constexpr int WORDS = (int)sizeof(Granule<T>) / 4, STRIDE = LANES * (int)sizeof(Granule<T>);
    const char *begin = (const char*)row, *end = (const char*)(row + vocab), *at = (const char*)(row + first);
    const unsigned int shift = (unsigned int)((unsigned long long)row % 16);
    if (shift == 0) {
#pragma unroll
        for (int g = 0; g < COUNT; ++g) {
            load_quads(at + g * STRIDE, begin, end, granules[g].words);
        }
    } else {
        // A granule lies across one quad more than it is long: all of their words, moved down by `shift` bytes.
        unsigned int words[COUNT][WORDS + 4];
#pragma unroll
        for (int g = 0; g < COUNT; ++g) {
            load_quads(at - shift + g * STRIDE, begin, end, words[g]);
        }
#pragma unroll
        for (int g = 0; g < COUNT; ++g) {
            move_down<2>(words[g], shift & 8);
            move_down<1>(words[g], shift & 4);
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                const unsigned long long both = (unsigned long long)words[g][w + 1] << 32 | words[g][w];
                granules[g].words[w] = (unsigned int)(both >> (shift % 4 * 8));
            }
        }
    }
    if (first + ((COUNT - 1) * LANES + 1) * GRANULE > vocab) {
#pragma unroll
        for (int g = 0; g < COUNT; ++g) {
#pragma unroll
            for (int j = 0; j < GRANULE; ++j) {
                if (first + g * GRANULE * LANES + j >= vocab) {
                    set_stored(granules[g], j, fill);
                }
            }
        }
    }
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

// One warp asks for a segment that it will read next: a line of memory for each lane, two where scores are wide.
template <typename T, int SEG> __device__ inline void warp_prefetch(const T* row, long long segment, long long vocab) {
#ifdef __CUDA_ARCH__
    constexpr int LINE = 128 / (int)sizeof(T);  // ids
#pragma unroll
    for (int line = 0; line < SEG / LINE; line += LANES) {
        const long long id = segment * SEG + (line + lane_index()) * LINE;
        if (line + lane_index() < SEG / LINE && id < vocab) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(row + id));
        }
    }
#else
    (void)row, (void)segment, (void)vocab;
#endif
}

// One warp reads one segment of one row. All loads are issued before the first use.
template <typename T, int SEG> struct WarpSegment {
    static_assert(SEG % (GRANULE * LANES) == 0, "a segment is a whole number of granules for every lane");
    static constexpr int GRANULES = SEG / (GRANULE * LANES);  // of one lane

    Granule<T> granules[GRANULES];
    unsigned int first_id;  // of this lane's granule 0

    __device__ void load(const T* row, unsigned int segment, long long vocab, unsigned int fill) {
        first_id = segment * SEG + lane_index() * GRANULE;
        load_granules(row, first_id, vocab, fill, granules);
    }

    __device__ Pair softmax_pair_all(float scale) const {
        Granule<T> largest = granules[0];
#pragma unroll
        for (int g = 1; g < GRANULES; ++g) {
            largest = max_by_place(largest, granules[g]);
        }
        float max = minus_inf();
#pragma unroll
        for (int j = 0; j < GRANULE; ++j) {
            max = fmaxf(max, float_of(value_bits(largest, j)));
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

// A row's pair from its segments' pairs: lane l takes pairs l, l+32, ..., then a butterfly.
__device__ inline Pair warp_combine_sums_all(const Pair* pairs, long long segments, float scale) {
    constexpr int HELD = 8;  // pairs a lane holds, so that it reads them once, all in flight together
    Pair held[HELD];
    float max = minus_inf();
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int s = lane_index() + k * LANES;
        held[k] = s < segments ? pairs[s] : Pair{minus_inf(), 0.0f};
    }
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        max = fmaxf(max, held[k].max);
    }
#pragma unroll 1
    for (long long s = lane_index() + HELD * LANES; s < segments; s += LANES) {
        max = fmaxf(max, pairs[s].max);
    }
    max = warp_max_all(max);
    const float pivot = finite_pivot(max);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        sum += held[k].sum * weight_of_logit(held[k].max, pivot, scale);
    }
#pragma unroll 1
    for (long long s = lane_index() + HELD * LANES; s < segments; s += LANES) {
        sum += pairs[s].sum * weight_of_logit(pairs[s].max, pivot, scale);
    }
    return {max, warp_sum_all(sum)};
}

__device__ inline Pair warp_combine_greedy_all(const Pair* pairs, long long segments) {
    unsigned long long best = 0;
    bool bad = false;
#pragma unroll 1
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

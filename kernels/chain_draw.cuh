// A draw: weights of a row or of its residual, the race of segments, the pick inside the winner.
#pragma once

#include "chain.cuh"

namespace cupyspec {

using Scratch = BlockScratch<DECIDE_WARPS>;

// What a token is drawn from: weights of the target row, or what is left of them beside the draft.
enum WeightsKind {
    TARGET_ONLY,   // p
    LESS_ONE_HOT,  // p without `hot`; Sigmoid: p^ without it
    LESS_DRAFT     // [p - q]+; Sigmoid: [p^ - q^]+
};

// One side of a residual: p = 2^((z - pivot) * scale) * factor, or a probability as it is.
struct Side {
    float pivot, scale, factor;
    bool probs;
};

// One side of a sigmoid residual, on logits before temperature: 0 below `low`, 1 above `high`, else the sigmoid of
// (z * slope - alpha / (beta - alpha)).
struct SigmoidSide {
    float low, high, slope;
};

struct Weights {
    const Target* target;
    const Draft* draft;
    Side target_side, draft_side;
    SigmoidSide target_sigmoid, draft_sigmoid;
    long long hot;
    WeightsKind kind;
    bool judge_target, judge_draft;  // rows nobody has read in full yet
};

// Bits of a judgement made while racing; a block leaves them in the high byte of `arrived`.
enum Seen { SEEN_TARGET_BAD = 1, SEEN_DRAFT_BAD = 2, SEEN_TARGET_SCORE = 4, SEEN_DRAFT_SCORE = 8 };

__device__ Side make_side(const Scores& s, const Pair& total, float temperature) {
    return {finite_pivot(total.max), logit_scale(temperature), s.probs ? 1.0f : 1.0f / total.sum, (bool)s.probs};
}

// The pivot carries what float32 can hold of log_normalizer * T, the factor the rest.
__device__ Side make_side(double log_normalizer, float temperature) {
    const double whole = log_normalizer * temperature;
    const float pivot = (float)whole;
    return {pivot, logit_scale(temperature), (float)exp((pivot - whole) / temperature), false};
}

// Never fused with a subtraction: where p equals q nothing may be left of [p - q]+.
__device__ inline float side_weight(const Side& side, unsigned int bits) {
    return side.probs ? clean_probability(bits)
                      : __fmul_rn(weight_of_logit(float_of(bits), side.pivot, side.scale), side.factor);
}

// Bounds rounded such that a float z lies beyond one exactly where z / T lies beyond alpha or beta in double.
__device__ SigmoidSide make_sigmoid_side(const ChainParams& p, float temperature) {
    const double slope = 1.0 / ((p.beta - p.alpha) * temperature);
    return {__double2float_ru(p.alpha * temperature), __double2float_rd(p.beta * temperature),
            slope < 3.4e38 ? (float)slope : 3.4e38f};
}

// [p^ - q^]+ of two logits, as sigma(a) sigma(-b) (-expm1(b - a)): the plain difference would cancel.
__device__ float sigmoid_residual(const SigmoidSide& target, const SigmoidSide& draft, float offset, float target_logit,
                                  float draft_logit) {
    if (target_logit < target.low || draft_logit > draft.high) {
        return 0.0f;
    }
    const bool target_is_1 = target_logit > target.high, draft_is_0 = draft_logit < draft.low;
    const float a = target_logit * target.slope, b = draft_logit * draft.slope;
    // A factor is 1 where its side is clamped.
    const float target_inverse = target_is_1 ? 1.0f : 1.0f + expf(offset - a);
    const float draft_inverse = draft_is_0 ? 1.0f : 1.0f + expf(b - offset);
    const float difference = target.slope == draft.slope ? (draft_logit - target_logit) * target.slope : b - a;
    const float left = target_is_1 || draft_is_0 ? 1.0f : -expm1f(difference);
    return fmaxf(left / (target_inverse * draft_inverse), 0.0f);
}

struct GranuleWeights {
    float values[GRANULE];
    float sum;  // ids ascending
};

// Scores of the ids first .. first + 7 on both sides.
struct GranuleScores {
    Granule<Target> target;
    Granule<Draft> draft;
};

// WHOLE: all ids exist and rows are aligned, known of a whole segment at once: then no load hangs on a branch.
template <bool WHOLE>
__device__ inline void load_scores(const ChainParams& p, const Weights& w, long long first, GranuleScores& scores) {
    if (WHOLE) {
        scores.target = load_vector(w.target, first);
    } else {
        const unsigned int fill = w.target_side.probs ? 0u : Storage<Target>::NEG_INF;
        scores.target = load_granule(w.target, first, p.vocab_size, fill);
    }
    if (w.kind == LESS_DRAFT) {
        if (WHOLE) {
            scores.draft = load_vector(w.draft, first);
        } else {
            const unsigned int fill = w.draft_side.probs ? 0u : Storage<Draft>::NEG_INF;
            scores.draft = load_granule(w.draft, first, p.vocab_size, fill);
        }
    }
}

// Weights of the ids first .. first + 7. `seen` collects the judgement.
__device__ GranuleWeights granule_weights(const ChainParams& p, const Weights& w, const GranuleScores& scores,
                                          long long first, unsigned int& seen) {
    const long long hot = w.hot - first;
    const float sigmoid_offset = RULE == RULE_SIGMOID ? (float)(p.alpha / (p.beta - p.alpha)) : 0.0f;
    GranuleWeights out;
    out.sum = 0.0f;
#pragma unroll
    for (int j = 0; j < GRANULE; ++j) {
        const unsigned int target_bits = value_bits(scores.target, j);
        const unsigned int draft_bits = w.kind == LESS_DRAFT ? value_bits(scores.draft, j) : NEG_INF_BITS;
        if (w.judge_target) {
            seen |= bad_logit(target_bits) ? SEEN_TARGET_BAD : target_bits != NEG_INF_BITS ? SEEN_TARGET_SCORE : 0;
        }
        if (w.judge_draft) {
            seen |= bad_logit(draft_bits) ? SEEN_DRAFT_BAD : draft_bits != NEG_INF_BITS ? SEEN_DRAFT_SCORE : 0;
        }
        float weight;
        if (RULE == RULE_TOKEN || w.kind == TARGET_ONLY) {
            weight = side_weight(w.target_side, target_bits);
            weight = w.kind == LESS_DRAFT ? fmaxf(weight - side_weight(w.draft_side, draft_bits), 0.0f) : weight;
        } else {
            const float draft_logit = w.kind == LESS_DRAFT ? float_of(draft_bits) : minus_inf();
            weight =
                sigmoid_residual(w.target_sigmoid, w.draft_sigmoid, sigmoid_offset, float_of(target_bits), draft_logit);
        }
        weight = w.kind == LESS_ONE_HOT && hot == j ? 0.0f : weight;
        out.values[j] = weight;
        out.sum += weight;
    }
    return out;
}

// A power of two that brings weights of a row summing to `total` near 1: keys then neither underflow nor overflow.
__device__ float race_scale(const Side& side, const Pair& total) {
    if (!side.probs) {
        return 1.0f;
    }
    const int exponent = 254 - (int)(__float_as_uint(total.sum) >> 23 & 255u);
    return float_of((unsigned int)(exponent < 1 ? 1 : exponent) << 23);
}

struct Draw {
    unsigned long long seed, step;
    int purpose;
    unsigned int position;
};

__device__ Words segment_words(const Draw& draw, unsigned int segment) {
    return random_words(draw.seed, draw.step, draw.purpose, draw.position, segment);
}

// (key, segment) as one number whose order is theirs: keys are positive, so their bits order as they do.
__device__ unsigned long long race_key(const Draw& draw, unsigned int segment, float weight) {
    if (!(weight > 0.0f)) {
        return NO_KEY;
    }
    const float key = unit_exponential(segment_words(draw, segment).w0) / weight;
    return (unsigned long long)__float_as_uint(key) << 32 | segment;
}

// Race of a row whose segment pairs are known: one thread a segment. All threads get the winner.
__device__ unsigned long long block_race_pairs_all(const ChainParams& p, const Pair* pairs, const Side& side,
                                                   float scale, const Draw& draw, Scratch& scratch) {
    unsigned long long best = NO_KEY;
    for (long long s = threadIdx.x; s < p.segments; s += DECIDE_THREADS) {
        const float weight = pairs[s].sum * weight_of_logit(pairs[s].max, side.pivot, side.scale) * scale;
        const unsigned long long key = race_key(draw, (unsigned int)s, weight);
        best = key < best ? key : best;
    }
    return block_min_all(best, scratch);
}

// This lane's part of a segment's weight.
template <bool WHOLE>
__device__ float lane_segment_sum(const ChainParams& p, const Weights& w, long long segment, unsigned int& seen) {
    const long long first = segment * SEG + lane_index() * GRANULE;
    float sum = 0.0f;
#pragma unroll 1  // more granules at once spill
    for (int g = 0; g < SEG / (GRANULE * LANES); ++g) {
        GranuleScores scores = {};
        load_scores<WHOLE>(p, w, first + g * GRANULE * LANES, scores);
        sum += granule_weights(p, w, scores, first + g * GRANULE * LANES, seen).sum;
    }
    return sum;
}

// The smallest key of this block's segments, by the order of segment.cuh, goes into the row's race.
__device__ void block_race_segments(const ChainParams& p, const Weights& w, float scale, const Draw& draw, long long b,
                                    long long part) {
    const bool aligned = is_aligned(w.target) && (w.kind != LESS_DRAFT || is_aligned(w.draft));
    unsigned long long best = NO_KEY;
    unsigned int seen = 0;
    for (long long s = part * DECIDE_WARPS + warp_index(); s < p.segments; s += p.blocks_per_row * DECIDE_WARPS) {
        const bool whole = aligned && (s + 1) * SEG <= p.vocab_size;
        const float sum = whole ? lane_segment_sum<true>(p, w, s, seen) : lane_segment_sum<false>(p, w, s, seen);
        const unsigned long long key = race_key(draw, (unsigned int)s, warp_sum_all(sum) * scale);
        best = key < best ? key : best;
    }
    if (lane_index() == 0 && best != NO_KEY) {
        atomicMin(&p.race[b], best);
    }
    if (seen) {
        atomicOr(&p.arrived[b], seen << 24);
    }
}

// The token inside a segment: the smallest id whose running sum of weights exceeds u times their total; where rounding
// leaves none, the last id of positive weight. All threads get it; -1 if no weight is positive.
__device__ long long block_pick_all(const ChainParams& p, const Weights& w, const Draw& draw, unsigned int segment,
                                    Scratch& scratch) {
    const long long first = (long long)segment * SEG + threadIdx.x * GRANULE;
    const bool inside = (int)threadIdx.x < SEG / GRANULE;
    GranuleWeights mine = {};
    if (inside) {
        unsigned int seen = 0;
        GranuleScores scores = {};
        load_scores<false>(p, w, first, scores);
        mine = granule_weights(p, w, scores, first, seen);
    }
    const Bounds bounds = block_running_sum(mine.sum, scratch);
    const float level = coin(segment_words(draw, segment).w1) * bounds.total;
    // A float running sum may waver where nothing is added: only a thread with weight of its own may win.
    const bool reaches = mine.sum > 0.0f && bounds.upper > level;
    unsigned long long winner = block_min_all(reaches ? threadIdx.x : NO_KEY, scratch);
    if (winner == NO_KEY) {
        winner = block_max_all(mine.sum > 0.0f ? threadIdx.x + 1 : 0, scratch) - 1;
    }
    unsigned long long token = 0;  // id + 1
    if (inside && threadIdx.x == winner) {
        float upper = bounds.lower;
        bool found = false;
#pragma unroll
        for (int j = 0; j < GRANULE; ++j) {
            upper += mine.values[j];
            if (mine.values[j] > 0.0f && !found) {
                token = first + j + 1;
                found = upper > level;
            }
        }
    }
    return (long long)block_max_all(token, scratch) - 1;
}

__device__ int seen_faults(const Weights& w, unsigned int seen) {
    int faults = 0;
    if (w.judge_target) {
        faults |= seen & SEEN_TARGET_BAD ? STATUS_TARGET_INVALID : seen & SEEN_TARGET_SCORE ? 0 : STATUS_TARGET_EMPTY;
    }
    if (w.judge_draft) {
        faults |= (seen & SEEN_DRAFT_BAD) || !(seen & SEEN_DRAFT_SCORE) ? STATUS_DRAFT_INVALID : 0;
    }
    return faults;
}

}  // namespace cupyspec

// A draw: weights of a row or of its residual, the race of segments, the pick inside the winner.
#pragma once

#include "chain.cuh"

namespace cupyspec {

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

// Bits of a judgement made while racing.
enum Seen { SEEN_TARGET_BAD = 1, SEEN_DRAFT_BAD = 2, SEEN_TARGET_SCORE = 4, SEEN_DRAFT_SCORE = 8 };

__device__ inline Side make_side(const Scores& s, const Pair& total, float temperature) {
    return {finite_pivot(total.max), logit_scale(temperature), s.probs ? 1.0f : 1.0f / total.sum, (bool)s.probs};
}

// The pivot carries what float32 can hold of log_normalizer * T, the factor the rest.
__device__ __noinline__ Side make_side(double log_normalizer, float temperature) {
    const double whole = log_normalizer * temperature;
    const float pivot = (float)whole;
    return {pivot, logit_scale(temperature), (float)exp((pivot - whole) / temperature), false};
}

// Never fused with a subtraction: where p equals q nothing may be left of [p - q]+.
__device__ inline float logit_weight(const Side& side, unsigned int bits) {
    return __fmul_rn(weight_of_logit(float_of(bits), side.pivot, side.scale), side.factor);
}

// Bounds rounded such that a float z lies beyond one exactly where z / T lies beyond alpha or beta in double.
__device__ SigmoidSide make_sigmoid_side(const ChainParams& p, float temperature) {
    const double slope = 1.0 / ((p.beta - p.alpha) * temperature);
    return {__double2float_ru(p.alpha * temperature), __double2float_rd(p.beta * temperature),
            slope < 3.4e38 ? (float)slope : 3.4e38f};
}

// 1 - e^x for x <= 0, without cancellation near 0.
__device__ inline float one_less_exp(float x) {
    const float series = 1.0f + x * (0.5f + x * (1.6666667e-1f + x * (4.1666668e-2f + x * 8.3333333e-3f)));
    return x > -0.125f ? -x * series : 1.0f - exp2f(x * 1.44269504f);
}

// [p^ - q^]+ of two logits, as sigma(a) sigma(-b) (1 - e^(b - a)): the plain difference would cancel.
__device__ inline float sigmoid_residual(const SigmoidSide& target, const SigmoidSide& draft, float offset,
                                         float target_logit, float draft_logit) {
    if (target_logit < target.low || draft_logit > draft.high) {
        return 0.0f;
    }
    const bool target_is_1 = target_logit > target.high, draft_is_0 = draft_logit < draft.low;
    const float a = target_logit * target.slope, b = draft_logit * draft.slope;
    // A factor is 1 where its side is clamped.
    const float target_inverse = target_is_1 ? 1.0f : 1.0f + exp2f((offset - a) * 1.44269504f);
    const float draft_inverse = draft_is_0 ? 1.0f : 1.0f + exp2f((b - offset) * 1.44269504f);
    const float difference = target.slope == draft.slope ? (draft_logit - target_logit) * target.slope : b - a;
    const float left = target_is_1 || draft_is_0 ? 1.0f : difference < 0.0f ? one_less_exp(difference) : 0.0f;
    return __fdividef(left, target_inverse * draft_inverse);
}

struct GranuleWeights {
    float values[GRANULE];
    float sum;  // ids ascending
};

// Scores of a lane's granules on both sides.
template <int COUNT> struct LaneScores {
    Granule<Target> target[COUNT];
    Granule<Draft> draft[COUNT];
};

template <int COUNT>
__device__ inline void load_scores(const ChainParams& p, const Weights& w, long long first, LaneScores<COUNT>& scores) {
    load_granules(w.target, first, p.vocab_size, fill_of<Target>(w.target_side.probs), scores.target);
    if (w.kind == LESS_DRAFT) {
        load_granules(w.draft, first, p.vocab_size, fill_of<Draft>(w.draft_side.probs), scores.draft);
    }
}

// What is wrong with a granule of logits, and whether it has a score at all.
template <typename T> __device__ unsigned int judge_granule(const Granule<T>& scores, Seen bad, Seen score) {
    unsigned int seen = 0;
#pragma unroll
    for (int j = 0; j < GRANULE; ++j) {
        const unsigned int bits = value_bits(scores, j);
        seen |= bad_logit(bits) ? bad : bits != NEG_INF_BITS ? score : 0;
    }
    return seen;
}

template <bool LOGITS, typename T>
__device__ void side_weights(const Side& side, const Granule<T>& scores, float* values) {
    if (!LOGITS && side.probs) {
#pragma unroll
        for (int j = 0; j < GRANULE; ++j) {
            values[j] = clean_probability(value_bits(scores, j));
        }
    } else {
#pragma unroll
        for (int j = 0; j < GRANULE; ++j) {
            values[j] = logit_weight(side, value_bits(scores, j));
        }
    }
}

template <bool PLAIN>
__device__ inline void sigmoid_weights(const ChainParams& p, const Weights& w, const Granule<Target>& target,
                                       const Granule<Draft>& draft, float* values) {
    const float offset = (float)(p.alpha / (p.beta - p.alpha));
#pragma unroll
    for (int j = 0; j < GRANULE; ++j) {
        const float draft_logit = PLAIN || w.kind == LESS_DRAFT ? float_of(value_bits(draft, j)) : minus_inf();
        values[j] =
            sigmoid_residual(w.target_sigmoid, w.draft_sigmoid, offset, float_of(value_bits(target, j)), draft_logit);
    }
}

// Whether a draw is what most are: from what is left of logits beside logits.
__device__ inline bool is_plain(const Weights& w) {
    return w.kind == LESS_DRAFT && !w.target_side.probs && !w.draft_side.probs;
}

// Weights of the ids first .. first + 7. `seen` collects the judgement. PLAIN: is_plain() holds.
template <bool PLAIN>
__device__ GranuleWeights granule_weights(const ChainParams& p, const Weights& w, const Granule<Target>& target,
                                          const Granule<Draft>& draft, long long first, unsigned int& seen) {
    if (w.judge_target) {
        seen |= judge_granule(target, SEEN_TARGET_BAD, SEEN_TARGET_SCORE);
    }
    if (w.judge_draft) {
        seen |= judge_granule(draft, SEEN_DRAFT_BAD, SEEN_DRAFT_SCORE);
    }
    GranuleWeights out;
    if (RULE == RULE_TOKEN || w.kind == TARGET_ONLY) {
        side_weights<PLAIN>(w.target_side, target, out.values);
        if (PLAIN || w.kind == LESS_DRAFT) {
            float less[GRANULE];
            side_weights<PLAIN>(w.draft_side, draft, less);
#pragma unroll
            for (int j = 0; j < GRANULE; ++j) {
                out.values[j] = fmaxf(out.values[j] - less[j], 0.0f);
            }
        }
    } else {
        sigmoid_weights<PLAIN>(p, w, target, draft, out.values);
    }
    if (!PLAIN && w.kind == LESS_ONE_HOT) {
        const long long hot = w.hot - first;
#pragma unroll
        for (int j = 0; j < GRANULE; ++j) {
            out.values[j] = hot == j ? 0.0f : out.values[j];
        }
    }
    out.sum = 0.0f;
#pragma unroll
    for (int j = 0; j < GRANULE; ++j) {
        out.sum += out.values[j];
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
    Noise noise;
    int purpose;
    unsigned int position;
};

__device__ Words segment_words(const Draw& draw, unsigned int segment) {
    return random_words(draw.noise.seed, draw.noise.step, draw.purpose, draw.position, segment);
}

// (key, segment) as one number whose order is theirs: keys are positive, so their bits order as they do.
__device__ unsigned long long race_key(const Draw& draw, unsigned int segment, float weight) {
    if (!(weight > 0.0f)) {
        return NO_KEY;
    }
    const float key = unit_exponential(segment_words(draw, segment).w0) / weight;
    return (unsigned long long)__float_as_uint(key) << 32 | segment;
}

// Key of a segment whose weight is known by its pair.
__device__ unsigned long long pair_key(const Pair& pair, unsigned int segment, const Side& side, float scale,
                                       const Draw& draw) {
    return race_key(draw, segment, pair.sum * weight_of_logit(pair.max, side.pivot, side.scale) * scale);
}

constexpr int LANE_GRANULES = SEG / (GRANULE * LANES);  // of a segment

// Weight of this lane's granule from id `first` on.
__device__ __noinline__ float granule_weight(const ChainParams& p, const Weights& w, long long first,
                                             unsigned int& seen) {
    LaneScores<1> scores = {};
    load_scores(p, w, first, scores);
    return granule_weights<false>(p, w, scores.target[0], scores.draft[0], first, seen).sum;
}

// Weights of the granules that a lane has of a segment, by which it is summed and picked from.
struct LaneSums {
    float granules[LANE_GRANULES];

    // In the order of segment.cuh.
    __device__ float warp_total_all() const {
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < LANE_GRANULES; ++g) {
            sum += granules[g];
        }
        return warp_sum_all(sum);
    }
};

__device__ inline LaneSums sum_lane(const ChainParams& p, const Weights& w, unsigned int segment, unsigned int& seen) {
    const long long first = (long long)segment * SEG + lane_index() * GRANULE;
    LaneSums sums;
#pragma unroll
    for (int g = 0; g < LANE_GRANULES; ++g) {
        sums.granules[g] = granule_weight(p, w, first + g * GRANULE * LANES, seen);
    }
    return sums;
}

// The same where is_plain() holds: loads of both sides are in flight together.
constexpr int TOGETHER = LANE_GRANULES < 4 ? LANE_GRANULES : sizeof(Target) + sizeof(Draft) > 4 ? 2 : 4;

__device__ inline LaneSums sum_lane_plain(const ChainParams& p, const Weights& w, unsigned int segment,
                                          unsigned int& seen) {
    const long long first = (long long)segment * SEG + lane_index() * GRANULE;
    LaneSums sums;
#pragma unroll
    for (int base = 0; base < LANE_GRANULES; base += TOGETHER) {
        LaneScores<TOGETHER> scores;
        load_granules(w.target, first + base * GRANULE * LANES, p.vocab_size, Storage<Target>::NEG_INF, scores.target);
        load_granules(w.draft, first + base * GRANULE * LANES, p.vocab_size, Storage<Draft>::NEG_INF, scores.draft);
#pragma unroll
        for (int g = 0; g < TOGETHER; ++g) {
            sums.granules[base + g] = granule_weights<true>(p, w, scores.target[g], scores.draft[g], first, seen).sum;
        }
    }
    return sums;
}

// What a warp has found in its part of the race.
struct Best {
    unsigned long long key;
    LaneSums sums;  // of that segment
};

// The smallest key among every `step`-th segment from `start` on; by one warp.
__device__ inline Best warp_race_segments_all(const ChainParams& p, const Weights& w, float scale, const Draw& draw,
                                              unsigned int start, unsigned int step, unsigned int& seen) {
    const bool plain = is_plain(w);
    Best best = {NO_KEY, {}};
#pragma unroll 1
    for (unsigned int s = start; s < p.segments; s += step) {
        if (plain) {
            warp_prefetch<Target, SEG>(w.target, (long long)s + step, p.vocab_size);
            warp_prefetch<Draft, SEG>(w.draft, (long long)s + step, p.vocab_size);
        }
        const LaneSums sums = plain ? sum_lane_plain(p, w, s, seen) : sum_lane(p, w, s, seen);
        const unsigned long long key = race_key(draw, s, sums.warp_total_all() * scale);
        if (key < best.key) {
            best = {key, sums};
        }
    }
    return best;
}

// The token inside a segment: the smallest id whose running sum of weights exceeds u times their total; where rounding
// leaves none, the last id of positive weight. By one warp; -1 if no weight is positive.
//
// Running sums: of a granule's ids; of the granules of each 32 by warp_inclusive_sum(); of those sums in order. A
// granule's lower bound is bit for bit the upper bound of the one before it, and the total is the last upper bound.
__device__ __noinline__ long long warp_pick_all(const ChainParams& p, const Weights& w, const Draw& draw,
                                                unsigned int segment, const LaneSums& of_segment) {
    const LaneSums sums = of_segment;
    unsigned int seen = 0;
    float lower[LANE_GRANULES], upper[LANE_GRANULES];
    float total = 0.0f;
#pragma unroll
    for (int g = 0; g < LANE_GRANULES; ++g) {
        const float inclusive = warp_inclusive_sum(sums.granules[g]);
        const float below = __shfl_up_sync(FULL_WARP, inclusive, 1);
        lower[g] = lane_index() == 0 ? total : total + below;
        upper[g] = total + inclusive;
        total += __shfl_sync(FULL_WARP, inclusive, LANES - 1);
    }
    const float level = coin(segment_words(draw, segment).w1) * total;
    int winner = -1;  // granule of the segment
    float bound = 0.0f;
#pragma unroll
    for (int g = LANE_GRANULES - 1; g >= 0; --g) {  // the last one of positive weight, unless one reaches the level
        const unsigned int positive = __ballot_sync(FULL_WARP, sums.granules[g] > 0.0f);
        if (winner < 0 && positive) {
            winner = g * LANES + 31 - __clz((int)positive);
            bound = lower[g];
        }
    }
#pragma unroll
    for (int g = LANE_GRANULES - 1; g >= 0; --g) {
        // A float running sum may waver where nothing is added: only a granule with weight of its own may win.
        const unsigned int reaches = __ballot_sync(FULL_WARP, sums.granules[g] > 0.0f && upper[g] > level);
        if (reaches) {
            winner = g * LANES + __ffs((int)reaches) - 1;
            bound = lower[g];
        }
    }
    if (winner < 0) {
        return -1;
    }
    unsigned int token = 0;
    if (lane_index() == winner % LANES) {
        const long long start = (long long)segment * SEG + winner * GRANULE;
        LaneScores<1> scores = {};
        load_scores(p, w, start, scores);
        const GranuleWeights mine = granule_weights<false>(p, w, scores.target[0], scores.draft[0], start, seen);
        float running = bound;
        bool found = false;
#pragma unroll
        for (int j = 0; j < GRANULE; ++j) {
            running += mine.values[j];
            if (mine.values[j] > 0.0f && !found) {
                token = (unsigned int)(start + j);
                found = running > level;
            }
        }
    }
    return __shfl_sync(FULL_WARP, token, winner % LANES);
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

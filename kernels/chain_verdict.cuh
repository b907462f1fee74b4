// Whether the draft at a chain position is accepted, and whether the score rows it depends on are fit for use.
#pragma once

#include "chain.cuh"

namespace cupyspec {

// Verdict at a chain position: ACCEPT, or why the chain stops there. A bad score row is its status bits.
enum Verdict { ACCEPT = 0, REJECT = 64, DRAFTS_END = 128 };

// Fault of a score row by its total: `invalid` for a value that no score may have, `empty` where no token has a chance.
__device__ inline int judge_total(const Pair& total, Need need, int invalid, int empty) {
    if (need == NEED_NOTHING) {
        return 0;
    }
    if (need == NEED_ARGMAX) {
        return is_nan(total.max) ? invalid : total.max == minus_inf() ? empty : 0;
    }
    return is_nan(total.sum) ? invalid : total.sum == 0.0f ? empty : 0;
}

// 2^x with float32's precision over double's range; 0 for a NaN, whose row is judged elsewhere.
__device__ inline double exp2_of(double x) {
    if (!(x > -1020.0)) {
        return 0.0;
    }
    const double whole = rint(x < 1020.0 ? x : 1020.0);
    return exp2f((float)(x - whole)) * __longlong_as_double((long long)((int)whole + 1023) << 52);
}

__device__ bool is_finite(double x) { return x - x == 0.0; }

// A draft and what its verdict takes beside its rows' totals.
struct Candidate {
    long long id;
    unsigned int target_bits, draft_bits;  // its scores
    float coin;
};

// One thread reads the draft at position i < L. A greedy row compares ids, and reads no score.
__device__ inline Candidate read_candidate(const ChainParams& p, const Row& row, const Noise& noise, int i) {
    Candidate x = {draft_token(p, row, i), 0, 0, 0.0f};
    if (!row.target_greedy) {
        x.target_bits = widen(target_row(p, row, i)[x.id]);
        if (p.has_draft && !row.draft_greedy) {
            x.draft_bits = widen(draft_row(p, row, i)[x.id]);
        }
        x.coin = coin(random_words(noise.seed, noise.step, PURPOSE_ACCEPT, i, 0).w0);
    }
    return x;
}

__device__ __noinline__ double sigmoid_value(const ChainParams& p, double logit) {
    if (logit < p.alpha || logit > p.beta) {
        return logit < p.alpha ? 0.0 : 1.0;
    }
    return 1.0 / (1.0 + exp(-(logit - p.alpha) / (p.beta - p.alpha)));
}

// Totals of the score rows at one position.
struct Totals {
    Pair target, draft;
};

// One side's probability of a draft: weight / sum, and what is wrong with the score row.
struct Share {
    double weight, sum;
    int faults;
};

// One thread: side and position i <= L. `rate` is log2(e) / temperature. The draft's share is 1 of a one-hot draft, and at
// i = L, where only the target's faults count.
__device__ inline Share share_of(const ChainParams& p, const Row& row, bool of_draft, int i, const Candidate& x,
                                 const Totals& totals, double rate) {
    const Scores& s = of_draft ? p.draft : p.target;
    const Pair total = of_draft ? totals.draft : totals.target;
    const Need need = of_draft ? draft_need(p, row, i) : target_need(p, row, i);
    const int invalid = of_draft ? STATUS_DRAFT_INVALID : STATUS_TARGET_INVALID;
    Share share = {1.0, 1.0, judge_total(total, need, invalid, of_draft ? STATUS_DRAFT_INVALID : STATUS_TARGET_EMPTY)};
    if (row.target_greedy || (of_draft && (!p.has_draft || i == row.drafts))) {
        return share;
    }
    if (of_draft && row.draft_greedy) {
        share.weight = x.id == __float_as_uint(total.sum);
        return share;
    }
    const unsigned int bits = of_draft ? x.draft_bits : x.target_bits;
    double pivot = total.max;
    share.sum = total.sum;
    if (s.log_normalizer) {
        const double log_normalizer = log_normalizer_at(p, s, row, row.start + (of_draft ? 0 : row.b) + i, i);
        pivot = log_normalizer * (of_draft ? row.draft_temperature : row.target_temperature);
        share.sum = 1.0;
        share.faults |= is_finite(log_normalizer) ? 0 : invalid;
    }
    if (i == row.drafts) {
        return share;
    }
    if (s.probs) {
        share = {clean_probability(bits), 1.0, share.faults};
    } else if (RULE == RULE_SIGMOID) {
        const double temperature = of_draft ? row.draft_temperature : row.target_temperature;
        share = {sigmoid_value(p, (double)float_of(bits) / temperature), 1.0, share.faults};
        share.faults |= bad_logit(bits) ? invalid : 0;
    } else {
        share.weight = exp2_of((float_of(bits) - pivot) * rate);
        share.faults |= s.log_normalizer && bad_logit(bits) ? invalid : 0;
    }
    return share;
}

// One thread judges position i <= L by both sides.
__device__ inline int judge(const ChainParams& p, const Row& row, int i, const Candidate& x, const Totals& totals,
                            const Share& target, const Share& draft) {
    const int faults = target.faults | draft.faults;
    if (faults) {
        return faults;
    }
    if (i == row.drafts) {
        return DRAFTS_END;
    }
    if (row.target_greedy) {
        return x.id == __float_as_uint(totals.target.sum) ? ACCEPT : REJECT;
    }
    // u l q < p, both sides times both sums.
    const double lenience = RULE == RULE_TOKEN ? p.lenience : 1.0;
    const double price = (double)x.coin * lenience * draft.weight * target.sum;
    const double target_probability = target.weight * draft.sum;
    return target_probability > 0.0 && price < target_probability ? ACCEPT : REJECT;
}

}  // namespace cupyspec

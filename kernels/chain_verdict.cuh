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

// Probability of one id, in double: K of them a row decide what is accepted.
__device__ double probability_of(const Scores& s, unsigned int bits, const Pair& total, float temperature) {
    if (s.probs) {
        return clean_probability(bits);
    }
    return exp(((double)float_of(bits) - total.max) / temperature) / total.sum;
}

__device__ double probability_of(unsigned int bits, double log_normalizer, float temperature) {
    return exp(((double)float_of(bits) - log_normalizer * temperature) / temperature);
}

__device__ bool is_finite(double x) { return x - x == 0.0; }

// p(x) of the token rule and the faults seen on the way.
template <typename T>
__device__ double token_probability(const ChainParams& p, const Scores& s, const Row& row, const T* scores,
                                    long long row_index, int i, long long x, const Pair& total, float temperature,
                                    int invalid, int& faults) {
    const unsigned int bits = widen(scores[x]);
    if (!s.log_normalizer) {
        return probability_of(s, bits, total, temperature);
    }
    const double log_normalizer = log_normalizer_at(p, s, row, row_index, i);
    if (!is_finite(log_normalizer) || bad_logit(bits)) {
        faults |= invalid;
    }
    return probability_of(bits, log_normalizer, temperature);
}

__device__ double sigmoid_value(const ChainParams& p, double logit) {
    if (logit < p.alpha || logit > p.beta) {
        return logit < p.alpha ? 0.0 : 1.0;
    }
    return 1.0 / (1.0 + exp(-(logit - p.alpha) / (p.beta - p.alpha)));
}

template <typename T>
__device__ double sigmoid_probability(const ChainParams& p, const T* scores, long long x, float temperature,
                                      int invalid, int& faults) {
    const unsigned int bits = widen(scores[x]);
    faults |= bad_logit(bits) ? invalid : 0;
    return sigmoid_value(p, (double)float_of(bits) / temperature);
}

// One thread judges position i < L.
__device__ int judge_draft(const ChainParams& p, const Row& row, const Pair* totals, int i) {
    const int draft_slot = (int)p.num_drafts + 1 + i;
    const Need target_need = slot_need(p, row, i), draft_need = slot_need(p, row, draft_slot);
    int faults = judge_total(totals[i], target_need, STATUS_TARGET_INVALID, STATUS_TARGET_EMPTY) |
                 judge_total(totals[draft_slot], draft_need, STATUS_DRAFT_INVALID, STATUS_DRAFT_INVALID);
    const long long x = draft_token(p, row, i);
    if (row.target_greedy) {
        return faults ? faults : x == __float_as_uint(totals[i].sum) ? ACCEPT : REJECT;
    }
    const Target* target = target_row(p, row, i);
    double target_probability, draft_probability = 1.0;  // of x
    if (RULE == RULE_SIGMOID) {
        target_probability = sigmoid_probability(p, target, x, row.target_temperature, STATUS_TARGET_INVALID, faults);
    } else {
        target_probability = token_probability(p, p.target, row, target, row.start + row.b + i, i, x, totals[i],
                                               row.target_temperature, STATUS_TARGET_INVALID, faults);
    }
    if (p.has_draft && row.draft_greedy) {
        draft_probability = x == __float_as_uint(totals[draft_slot].sum);
    } else if (p.has_draft) {
        const Draft* draft = draft_row(p, row, i);
        if (RULE == RULE_SIGMOID) {
            draft_probability = sigmoid_probability(p, draft, x, row.draft_temperature, STATUS_DRAFT_INVALID, faults);
        } else {
            draft_probability = token_probability(p, p.draft, row, draft, row.start + i, i, x, totals[draft_slot],
                                                  row.draft_temperature, STATUS_DRAFT_INVALID, faults);
        }
    }
    if (faults) {
        return faults;
    }
    const Words words = random_words(row_seed(p, row.b), row_step(p, row.b), PURPOSE_ACCEPT, i, 0);
    const double lenience = RULE == RULE_TOKEN ? p.lenience : 1.0;
    const double price = (double)coin(words.w0) * lenience * draft_probability;
    return target_probability > 0.0 && price < target_probability ? ACCEPT : REJECT;
}

// The row after the last draft: only the target is judged.
__device__ int judge_end(const ChainParams& p, const Row& row, const Pair* totals) {
    const int i = row.drafts;
    int faults = judge_total(totals[i], slot_need(p, row, i), STATUS_TARGET_INVALID, STATUS_TARGET_EMPTY);
    if (p.target.log_normalizer && !row.target_greedy &&
        !is_finite(log_normalizer_at(p, p.target, row, row.start + row.b + i, i))) {
        faults |= STATUS_TARGET_INVALID;
    }
    return faults ? faults : DRAFTS_END;
}

}  // namespace cupyspec

// Verification of a chain of drafts, and sampling (a chain of none): logits or probabilities in, tokens out.
//
//   B rows, K draft tokens, V vocabulary, S = ceil(V / SEG) segments.
//   target scores [B, K+1, V], draft scores [B, K, V] or none (one-hot drafts), float32, float16 or bfloat16 each;
//   padded, ragged, or flattened ([T+B, V] and [T, V]); any outer strides.
//   tokens [B, K+1]: the accepted prefix, one more token, then -1. num_accepted [B]. status [B].
//
// chain_stats   one warp: one segment of one score row -> one pair in scratch (segment.cuh). Rows that no decision needs
//               are not read. Also clears the race that chain_decide counts on: nothing survives a call.
// chain_totals  one warp: the pairs of one score row -> one. Only launched where a batch row has many pairs.
// chain_decide  blocks_per_row blocks: each decides the row from the pairs (the same in every block, so nothing is handed
//               over); after a rejection the row's blocks race its segments and the last one picks the token. Other rows
//               are finished by their first block.
//
// Rules: Token (arXiv 2211.17192, 2302.01318) and Sigmoid (arXiv 2406.11016), see docs of cupyspec.rules. A temperature
//   below 2^-126 is greedy. A rejected row whose residual is zero everywhere draws from the target instead.
// Random numbers: coin i = word 0 at (ACCEPT, position i). The draw at stop position n uses, for segment s, word 0
//   (exponential) and word 1 (pick) at (RESIDUAL or BONUS, position n, segment s); sample() brings its purpose, position
//   and draw.
// A draw: key_s = E_s / W_s, W_s the segment's weight; the smallest key wins, the lowest segment on ties; then the pick
//   inside that segment. That is the categorical law.
// Ties of an argmax: the lowest id. Weights below 2^-126 count as 0 (-ftz=true).
// Deterministic bit for bit: no sum depends on launch shape, batch, alignment or layout; the atomics are a minimum, a bit
//   set and a count.
// No input value, id or length makes a kernel read or write out of bounds: lengths are clamped, ids compared first.
#include "chain.cuh"

// One module per specialisation: cupyspec/_compile.py defines these.
#ifndef TARGET_TYPE
#define TARGET_TYPE float
#endif
#ifndef DRAFT_TYPE
#define DRAFT_TYPE float
#endif
#ifndef TOKEN_TYPE
#define TOKEN_TYPE int
#endif
#ifndef CHAIN_RULE
#define CHAIN_RULE RULE_TOKEN
#endif
#ifndef SEGMENT
#define SEGMENT 2048
#endif

namespace cupyspec {

constexpr int STATS_THREADS = 128;
constexpr int DECIDE_THREADS = 256;
constexpr int DECIDE_WARPS = DECIDE_THREADS / LANES;
constexpr int MAX_DRAFTS = 255;
constexpr unsigned long long NO_KEY = ~0ull;

static_assert(SEGMENT / GRANULE <= DECIDE_THREADS, "the pick gives each thread at most one granule");

using Target = TARGET_TYPE;
using Draft = DRAFT_TYPE;
using Token = TOKEN_TYPE;
constexpr int RULE = CHAIN_RULE;
constexpr int SEG = SEGMENT;

// n / d for n, d >= 0; a 64-bit division costs as much as a third of a segment.
__device__ inline long long divide(long long n, long long d) {
    return (n | d) >> 32 ? n / d : (long long)((unsigned int)n / (unsigned int)d);
}

// ---------------------------------------------------------------------------------------------------- chain_stats

template <typename T>
__device__ Pair warp_segment_pair_all(const T* scores, unsigned int segment, long long vocab, Need need, bool probs,
                                      float scale) {
    WarpSegment<T, SEG> mine;
    mine.load(scores, segment, vocab, probs ? 0u : Storage<T>::NEG_INF);
    if (need == NEED_ARGMAX) {
        return mine.greedy_pair_all();
    }
    return probs ? mine.probability_pair_all() : mine.softmax_pair_all(scale);
}

__device__ void warp_stats(const ChainParams& p, long long b, int slot, unsigned int segment) {
    if (slot == 0 && segment == 0 && lane_index() == 0) {
        p.race[b] = NO_KEY;
        p.arrived[b] = 0;
    }
    const Row row = warp_read_row_all<Token>(p, b);
    const Need need = slot_need<RULE>(p, row, slot);
    if (need == NEED_NOTHING) {
        return;
    }
    const float scale = slot_scale(p, row, slot);
    Pair pair;
    if (slot <= p.num_drafts) {
        pair = warp_segment_pair_all(target_row<Target>(p, row, slot), segment, p.vocab_size, need, p.target.probs, scale);
    } else {
        const int i = slot - (int)p.num_drafts - 1;
        pair = warp_segment_pair_all(draft_row<Draft>(p, row, i), segment, p.vocab_size, need, p.draft.probs, scale);
    }
    if (lane_index() == 0) {
        p.pairs[pair_row(p, row, slot) * p.segments + segment] = pair;
    }
}

// ---------------------------------------------------------------------------------------------------- chain_totals

__device__ Pair warp_slot_total_all(const ChainParams& p, const Row& row, int slot, Need need) {
    const Pair* pairs = p.pairs + pair_row(p, row, slot) * p.segments;
    return need == NEED_ARGMAX ? warp_combine_greedy_all(pairs, p.segments)
                               : warp_combine_sums_all(pairs, p.segments, slot_scale(p, row, slot));
}

__device__ void warp_totals(const ChainParams& p, long long b, int slot) {
    const Row row = warp_read_row_all<Token>(p, b);
    const Need need = slot_need<RULE>(p, row, slot);
    if (need != NEED_NOTHING) {
        const Pair total = warp_slot_total_all(p, row, slot, need);
        if (lane_index() == 0) {
            p.totals[pair_row(p, row, slot)] = total;
        }
    }
}

// ---------------------------------------------------------------------------------------------------- chain_decide

struct Shared {
    Pair totals[2 * MAX_DRAFTS + 1];
    int verdicts[MAX_DRAFTS + 1];
    BlockScratch<DECIDE_WARPS> scratch;
    unsigned int arrived;
};

// Verdict at a chain position: ACCEPT, or why the chain stops there. A bad score row is its status bits.
enum Verdict { ACCEPT = 0, REJECT = 64, DRAFTS_END = 128 };

// Fault bits of a row's total: `invalid`, or twice that... see Status: 1 and 2 for targets, 4 and 4 for drafts.
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
__device__ double sigmoid_probability(const ChainParams& p, const T* scores, long long x, float temperature, int invalid,
                                      int& faults) {
    const unsigned int bits = widen(scores[x]);
    faults |= bad_logit(bits) ? invalid : 0;
    return sigmoid_value(p, (double)float_of(bits) / temperature);
}

// One thread judges position i < L.
__device__ int judge_draft(const ChainParams& p, const Row& row, const Pair* totals, int i) {
    const int draft_slot = (int)p.num_drafts + 1 + i;
    const Need target_need = slot_need<RULE>(p, row, i), draft_need = slot_need<RULE>(p, row, draft_slot);
    int faults = judge_total(totals[i], target_need, STATUS_TARGET_INVALID, STATUS_TARGET_EMPTY) |
                 judge_total(totals[draft_slot], draft_need, STATUS_DRAFT_INVALID, STATUS_DRAFT_INVALID);
    const long long x = draft_token<Token>(p, row, i);
    if (row.target_greedy) {
        return faults ? faults : x == __float_as_uint(totals[i].sum) ? ACCEPT : REJECT;
    }
    const Target* target = target_row<Target>(p, row, i);
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
        const Draft* draft = draft_row<Draft>(p, row, i);
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
    int faults = judge_total(totals[i], slot_need<RULE>(p, row, i), STATUS_TARGET_INVALID, STATUS_TARGET_EMPTY);
    if (p.target.log_normalizer && !row.target_greedy &&
        !is_finite(log_normalizer_at(p, p.target, row, row.start + row.b + i, i))) {
        faults |= STATUS_TARGET_INVALID;
    }
    return faults ? faults : DRAFTS_END;
}

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

struct Weights {
    const Target* target;
    const Draft* draft;
    Side target_side, draft_side;
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

__device__ inline float side_weight(const Side& side, unsigned int bits) {
    return side.probs ? clean_probability(bits)
                      : weight_of_logit(float_of(bits), side.pivot, side.scale) * side.factor;
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// [p^ - q^]+ of scaled logits, without the cancellation of the plain difference.
__device__ float sigmoid_residual(const ChainParams& p, float target_logit, float draft_logit) {
    const float inverse_range = (float)(1.0 / (p.beta - p.alpha)), alpha = (float)p.alpha;
    if (target_logit < p.alpha_up || draft_logit > p.beta_down) {
        return 0.0f;
    }
    const float a = (target_logit - alpha) * inverse_range, b = (draft_logit - alpha) * inverse_range;
    if (draft_logit < p.alpha_up) {
        return target_logit > p.beta_down ? 1.0f : sigmoid(a);
    }
    if (target_logit > p.beta_down) {
        return sigmoid(-b);
    }
    return fmaxf(sigmoid(a) * sigmoid(-b) * -expm1f((draft_logit - target_logit) * inverse_range), 0.0f);
}

struct GranuleWeights {
    float values[GRANULE];
    float sum;  // ids ascending
};

// Weights of the ids first .. first + 7. `seen` collects the judgement.
__device__ GranuleWeights granule_weights(const ChainParams& p, const Row& row, const Weights& w, long long first,
                                          unsigned int& seen) {
    const long long vocab = p.vocab_size;
    const Granule<Target> target = load_granule(w.target, first, vocab, w.target_side.probs ? 0u : Storage<Target>::NEG_INF);
    Granule<Draft> draft = {};
    if (w.kind == LESS_DRAFT) {
        draft = load_granule(w.draft, first, vocab, w.draft_side.probs ? 0u : Storage<Draft>::NEG_INF);
    }
    GranuleWeights out;
    out.sum = 0.0f;
    #pragma unroll
    for (int j = 0; j < GRANULE; ++j) {
        const unsigned int target_bits = value_bits(target, j), draft_bits = value_bits(draft, j);
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
            const float target_logit = float_of(target_bits) / row.target_temperature;
            const float draft_logit =
                w.kind == LESS_DRAFT ? float_of(draft_bits) / row.draft_temperature : minus_inf();
            weight = first + j < vocab ? sigmoid_residual(p, target_logit, draft_logit) : 0.0f;
        }
        weight = w.kind == LESS_ONE_HOT && first + j == w.hot ? 0.0f : weight;
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
__device__ unsigned long long block_race_pairs_all(const ChainParams& p, const Pair* pairs, const Side& side, float scale,
                                                   const Draw& draw, Shared& shared) {
    unsigned long long best = NO_KEY;
    for (long long s = threadIdx.x; s < p.segments; s += DECIDE_THREADS) {
        const float weight = pairs[s].sum * weight_of_logit(pairs[s].max, side.pivot, side.scale) * scale;
        const unsigned long long key = race_key(draw, (unsigned int)s, weight);
        best = key < best ? key : best;
    }
    return block_min_all<DECIDE_WARPS>(best, shared.scratch);
}

// The smallest key of this block's segments, by the order of segment.cuh, goes into the row's race.
__device__ void block_race_segments(const ChainParams& p, const Row& row, const Weights& w, float scale, const Draw& draw,
                                    long long part) {
    unsigned long long best = NO_KEY;
    unsigned int seen = 0;
    for (long long s = part * DECIDE_WARPS + warp_index(); s < p.segments; s += p.blocks_per_row * DECIDE_WARPS) {
        float sum = 0.0f;
        #pragma unroll 4
        for (int g = 0; g < SEG / (GRANULE * LANES); ++g) {
            sum += granule_weights(p, row, w, s * SEG + (g * LANES + lane_index()) * GRANULE, seen).sum;
        }
        const unsigned long long key = race_key(draw, (unsigned int)s, warp_sum_all(sum) * scale);
        best = key < best ? key : best;
    }
    if (lane_index() == 0 && best != NO_KEY) {
        atomicMin(&p.race[row.b], best);
    }
    if (seen) {
        atomicOr(&p.arrived[row.b], seen << 24);
    }
}

// The token inside a segment: the smallest id whose running sum of weights exceeds u times their total; where rounding
// leaves none, the last id of positive weight. All threads get it; -1 if no weight is positive.
__device__ long long block_pick_all(const ChainParams& p, const Row& row, const Weights& w, const Draw& draw,
                                    unsigned int segment, Shared& shared) {
    const long long first = (long long)segment * SEG + threadIdx.x * GRANULE;
    const bool inside = (int)threadIdx.x < SEG / GRANULE;
    GranuleWeights mine = {};
    if (inside) {
        unsigned int seen = 0;
        mine = granule_weights(p, row, w, first, seen);
    }
    const Bounds bounds = block_running_sum<DECIDE_WARPS>(mine.sum, shared.scratch);
    const float level = coin(segment_words(draw, segment).w1) * bounds.total;
    // A float running sum may waver where nothing is added: only a thread with weight of its own may win.
    const bool reaches = mine.sum > 0.0f && bounds.upper > level;
    unsigned long long winner = block_min_all<DECIDE_WARPS>(reaches ? threadIdx.x : NO_KEY, shared.scratch);
    if (winner == NO_KEY) {
        winner = block_max_all<DECIDE_WARPS>(mine.sum > 0.0f ? threadIdx.x + 1 : 0, shared.scratch) - 1;
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
    return (long long)block_max_all<DECIDE_WARPS>(token, shared.scratch) - 1;
}

// The row's answer; by one block.
__device__ void block_write(const ChainParams& p, const Row& row, int accepted, long long token, int status) {
    Token* tokens = (Token*)p.tokens + row.b * (p.num_drafts + 1);
    for (int i = threadIdx.x; i <= p.num_drafts; i += DECIDE_THREADS) {
        tokens[i] = (Token)(i < accepted ? draft_token<Token>(p, row, i) : i == accepted ? token : -1);
    }
    if (threadIdx.x == 0) {
        p.num_accepted[row.b] = accepted;
        p.status[row.b] = status;
    }
}

// sample() alone: natural log-sum-exp of the row. Greedy and inactive rows 0, bad ones NaN.
__device__ void write_log_normalizer(const ChainParams& p, const Row& row, const Pair& total, bool bad) {
    if (p.log_normalizer && threadIdx.x == 0) {
        float value = 0.0f;
        if (bad) {
            value = quiet_nan();
        } else if (row.runs && !row.target_greedy) {
            value = (float)((p.target.probs ? 0.0 : (double)total.max / row.target_temperature) + log((double)total.sum));
        }
        p.log_normalizer[row.b] = value;
    }
}

// Totals of the row's score rows, then every position's verdict. All threads get where the chain stops.
__device__ int block_decide_all(const ChainParams& p, const Row& row, Shared& shared) {
    for (int slot = warp_index(); slot < slots_per_row(p); slot += DECIDE_WARPS) {
        const Need need = slot_need<RULE>(p, row, slot);
        if (need != NEED_NOTHING) {
            const Pair total = p.totals ? p.totals[pair_row(p, row, slot)] : warp_slot_total_all(p, row, slot, need);
            if (lane_index() == 0) {
                shared.totals[slot] = total;
            }
        }
    }
    __syncthreads();
    unsigned long long stop = NO_KEY;
    for (int i = threadIdx.x; i <= row.drafts; i += DECIDE_THREADS) {
        const int verdict = i < row.drafts ? judge_draft(p, row, shared.totals, i) : judge_end(p, row, shared.totals);
        shared.verdicts[i] = verdict;
        if (verdict != ACCEPT && stop == NO_KEY) {
            stop = i;
        }
    }
    return (int)block_min_all<DECIDE_WARPS>(stop, shared.scratch);
}

// After a rejection at n: what the replacement is drawn from.
__device__ Weights residual_weights(const ChainParams& p, const Row& row, const Shared& shared, int n) {
    const int draft_slot = (int)p.num_drafts + 1 + n;
    Weights w = {};
    w.target = target_row<Target>(p, row, n);
    w.judge_target = RULE == RULE_SIGMOID || p.target.log_normalizer;
    if (RULE == RULE_TOKEN) {
        w.target_side = p.target.log_normalizer
                            ? make_side(log_normalizer_at(p, p.target, row, row.start + row.b + n, n), row.target_temperature)
                            : make_side(p.target, shared.totals[n], row.target_temperature);
    }
    w.kind = LESS_ONE_HOT;
    if (!p.has_draft || row.draft_greedy) {
        w.hot = p.has_draft ? __float_as_uint(shared.totals[draft_slot].sum) : draft_token<Token>(p, row, n);
        return w;
    }
    w.kind = LESS_DRAFT;
    w.draft = draft_row<Draft>(p, row, n);
    w.judge_draft = RULE == RULE_SIGMOID || p.draft.log_normalizer;
    if (RULE == RULE_TOKEN) {
        w.draft_side = p.draft.log_normalizer
                           ? make_side(log_normalizer_at(p, p.draft, row, row.start + n, n), row.draft_temperature)
                           : make_side(p.draft, shared.totals[draft_slot], row.draft_temperature);
    }
    return w;
}

// A draw from the target row n itself, by this block alone; its pairs are known, or made here.
__device__ long long block_draw_target_all(const ChainParams& p, const Row& row, int n, const Draw& draw, bool pairs_known,
                                           Shared& shared) {
    Pair* pairs = p.pairs + pair_row(p, row, n) * p.segments;
    Weights w = {};
    w.kind = TARGET_ONLY;
    w.target = target_row<Target>(p, row, n);
    if (!pairs_known) {
        const float scale = logit_scale(row.target_temperature);
        for (long long s = warp_index(); s < p.segments; s += DECIDE_WARPS) {
            const Pair pair = warp_segment_pair_all(w.target, (unsigned int)s, p.vocab_size, NEED_SUM, false, scale);
            if (lane_index() == 0) {
                pairs[s] = pair;
            }
        }
        __syncthreads();
        const Pair total = warp_combine_sums_all(pairs, p.segments, scale);
        __syncthreads();
        if (threadIdx.x == 0) {
            shared.totals[n] = total;
        }
        __syncthreads();
    }
    w.target_side = make_side(p.target, shared.totals[n], row.target_temperature);
    const float scale = race_scale(w.target_side, shared.totals[n]);
    const unsigned long long winner = block_race_pairs_all(p, pairs, w.target_side, scale, draw, shared);
    if (winner == NO_KEY) {
        return -1;
    }
    // Inside the segment its own largest logit is the pivot: no weight that matters underflows.
    const unsigned int segment = (unsigned int)winner;
    w.target_side.pivot = finite_pivot(pairs[segment].max);
    w.target_side.factor = 1.0f;
    return block_pick_all(p, row, w, draw, segment, shared);
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

// All blocks of a row: race the residual of position n. The last one draws the token and writes the row.
__device__ void block_resample(const ChainParams& p, const Row& row, int n, const Draw& draw, long long part,
                               Shared& shared) {
    const Weights w = residual_weights(p, row, shared, n);
    const float scale = race_scale(w.target_side, shared.totals[n]);
    block_race_segments(p, row, w, scale, draw, part);
    __threadfence();  // this block's part of the race, before its arrival
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.arrived = atomicAdd(&p.arrived[row.b], 1u);
        __threadfence();
    }
    __syncthreads();
    const unsigned int arrived = shared.arrived;
    if ((arrived & 0xFFFFFFu) != p.blocks_per_row - 1) {
        return;
    }
    const int faults = seen_faults(w, arrived >> 24);
    long long token = -1;
    if (!faults) {
        const unsigned long long winner = *(volatile unsigned long long*)&p.race[row.b];
        token = winner == NO_KEY ? block_draw_target_all(p, row, n, draw, !w.judge_target, shared)
                                 : block_pick_all(p, row, w, draw, (unsigned int)winner, shared);
    }
    block_write(p, row, n, token, row.status | faults);
}

__device__ void block_verify(const ChainParams& p, long long b, long long part, Shared& shared) {
    const Row row = warp_read_row_all<Token>(p, b);
    if (!row.runs) {
        if (part == 0) {
            block_write(p, row, 0, -1, row.status);
            write_log_normalizer(p, row, Pair{}, row.active);
        }
        return;
    }
    const int n = block_decide_all(p, row, shared);
    const int verdict = shared.verdicts[n];
    Draw draw = {};
    if (!row.target_greedy && (verdict == REJECT || verdict == DRAFTS_END)) {
        const int purpose = p.purpose ? p.purpose : verdict == REJECT ? PURPOSE_RESIDUAL : PURPOSE_BONUS;
        draw = {row_seed(p, b), row_step(p, b), purpose, draw_position(p, b, n)};
        if (verdict == REJECT) {
            block_resample(p, row, n, draw, part, shared);
            return;
        }
    }
    if (part != 0) {
        return;
    }
    const bool bad = verdict != REJECT && verdict != DRAFTS_END;
    long long token = -1;
    if (!bad) {
        token = row.target_greedy ? __float_as_uint(shared.totals[n].sum)
                                  : block_draw_target_all(p, row, n, draw, true, shared);
    }
    block_write(p, row, n, token, row.status | (bad ? verdict : 0));
    write_log_normalizer(p, row, shared.totals[n], bad);
}

}  // namespace cupyspec

// Grids are one-dimensional (grid.y ends at 65,535) and may be smaller than the work: each block or warp strides on.

extern "C" __global__ void __launch_bounds__(cupyspec::STATS_THREADS)
    chain_stats(const __grid_constant__ cupyspec::ChainParams p) {
    using namespace cupyspec;
    const long long warps = (long long)gridDim.x * (STATS_THREADS / LANES);
    const long long items = p.batch_size * slots_per_row(p) * p.segments;
    for (long long item = (long long)blockIdx.x * (STATS_THREADS / LANES) + warp_index(); item < items; item += warps) {
        const long long score_row = divide(item, p.segments), b = divide(score_row, slots_per_row(p));
        warp_stats(p, b, (int)(score_row - b * slots_per_row(p)), (unsigned int)(item - score_row * p.segments));
    }
}

extern "C" __global__ void __launch_bounds__(cupyspec::STATS_THREADS)
    chain_totals(const __grid_constant__ cupyspec::ChainParams p) {
    using namespace cupyspec;
    const long long warps = (long long)gridDim.x * (STATS_THREADS / LANES);
    const long long items = p.batch_size * slots_per_row(p);
    for (long long item = (long long)blockIdx.x * (STATS_THREADS / LANES) + warp_index(); item < items; item += warps) {
        const long long b = divide(item, slots_per_row(p));
        warp_totals(p, b, (int)(item - b * slots_per_row(p)));
    }
}

extern "C" __global__ void __launch_bounds__(cupyspec::DECIDE_THREADS)
    chain_decide(const __grid_constant__ cupyspec::ChainParams p) {
    using namespace cupyspec;
    __shared__ Shared shared;
    const long long items = p.batch_size * p.blocks_per_row;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        __syncthreads();  // the item before may still be reading `shared`
        const long long b = divide(item, p.blocks_per_row);
        block_verify(p, b, item - b * p.blocks_per_row, shared);
    }
}

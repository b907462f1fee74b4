// Verification of a chain of drafts, and sampling (a chain of none): logits or probabilities in, tokens out.
//
//   B rows, K draft tokens, V vocabulary, S = ceil(V / SEG) segments.
//   target scores [B, K+1, V], draft scores [B, K, V] or none (one-hot drafts), float32, float16 or bfloat16 each;
//   padded, ragged, or flattened ([T+B, V] and [T, V]); any outer strides.
//   tokens [B, K+1]: the accepted prefix, one more token, then -1. num_accepted [B]. status [B].
//
// chain_stats   one warp: one or two segments of one score row -> a pair each in scratch (segment.cuh). Rows that no
//               decision needs are not read. Also clears the race that chain_decide counts on: nothing survives a call.
// chain_totals  one warp: the pairs of one score row -> one. Only launched where a batch row has many pairs.
// chain_decide  blocks_per_row blocks: each decides the row from the pairs (the same in every block, so nothing is
//               handed over); after a rejection the row's blocks race its segments and the last one picks the token.
//               Other rows are finished by their first block.
//
// Rules: Token (arXiv 2211.17192, 2302.01318) and Sigmoid (arXiv 2406.11016). A temperature below 2^-126 is greedy. A
//   rejected row whose residual is zero everywhere draws from the target instead.
// Random numbers: coin i = word 0 at (ACCEPT, position i). The draw at stop position n uses, for segment s, word 0
//   (exponential) and word 1 (pick) at (RESIDUAL or BONUS, position n, segment s); sample() brings its purpose,
//   position and draw.
// A draw: key_s = E_s / W_s, W_s the segment's weight; the smallest key wins, the lowest segment on ties; then the pick
//   inside that segment. That is the categorical law.
// Ties of an argmax: the lowest id. Weights below 2^-126 count as 0 (-ftz=true).
// Deterministic bit for bit: no sum depends on launch shape, batch, alignment or layout; the atomics are a minimum, a
//   bit set and a count.
// No input value, id or length makes a kernel read or write out of bounds: lengths are clamped, ids compared first.
#include "chain_draw.cuh"
#include "chain_verdict.cuh"

namespace cupyspec {

constexpr int STATS_THREADS = 128;
// For Turing the compiler must be told that four blocks a multiprocessor will do: else it spills to fit a fifth.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define STATS_BOUNDS __launch_bounds__(cupyspec::STATS_THREADS, 4)
#else
#define STATS_BOUNDS __launch_bounds__(cupyspec::STATS_THREADS)
#endif

// Whether a warp may take two segments: registers hold two of 2 KiB, and none spills where both sides are so small.
constexpr bool PAIRED = SEG * sizeof(Target) <= 2048 && SEG * sizeof(Draft) <= 2048;

// n / d for n, d >= 0; a 64-bit division costs as much as a third of a segment.
__device__ inline long long divide(long long n, long long d) {
    return (n | d) >> 32 ? n / d : (long long)((unsigned int)n / (unsigned int)d);
}

// ---------------------------------------------------------------------------------------------------- chain_stats

template <typename T>
__device__ Pair warp_segment_pair_all(const WarpSegment<T, SEG>& mine, Need need, bool probs, float scale) {
    if (need == NEED_ARGMAX) {
        return mine.greedy_pair_all();
    }
    return probs ? mine.probability_pair_all() : mine.softmax_pair_all(scale);
}

// One segment of a score row, or it and the next: then all loads of both are in flight together.
template <typename T>
__device__ void warp_score_segments(const ChainParams& p, const T* scores, unsigned int segment, Need need, bool probs,
                                    float scale, Pair* pairs) {
    const unsigned int fill = probs ? 0u : Storage<T>::NEG_INF;
    const bool two = PAIRED && p.segments_per_warp == 2 && segment + 1 < p.segments;
    WarpSegment<T, SEG> first, second;
    first.load(scores, segment, p.vocab_size, fill);
    if (two) {
        second.load(scores, segment + 1, p.vocab_size, fill);
    }
    const Pair pair = warp_segment_pair_all(first, need, probs, scale);
    if (lane_index() == 0) {
        pairs[segment] = pair;
    }
    if (two) {
        const Pair next = warp_segment_pair_all(second, need, probs, scale);
        if (lane_index() == 0) {
            pairs[segment + 1] = next;
        }
    }
}

__device__ void warp_stats(const ChainParams& p, long long b, int slot, unsigned int segment) {
    if (slot == 0 && segment == 0 && lane_index() == 0) {
        p.race[b] = NO_KEY;
        p.arrived[b] = 0;
    }
    const Row row = warp_read_row_all(p, b);
    const Need need = slot_need(p, row, slot);
    if (need == NEED_NOTHING) {
        return;
    }
    const float scale = slot_scale(p, row, slot);
    Pair* pairs = p.pairs + pair_row(p, row, slot) * p.segments;
    if (slot <= p.num_drafts) {
        warp_score_segments(p, target_row(p, row, slot), segment, need, p.target.probs, scale, pairs);
    } else {
        const int i = slot - (int)p.num_drafts - 1;
        warp_score_segments(p, draft_row(p, row, i), segment, need, p.draft.probs, scale, pairs);
    }
}

// ---------------------------------------------------------------------------------------------------- chain_totals

__device__ Pair warp_slot_total_all(const ChainParams& p, const Row& row, int slot, Need need) {
    const Pair* pairs = p.pairs + pair_row(p, row, slot) * p.segments;
    return need == NEED_ARGMAX ? warp_combine_greedy_all(pairs, p.segments)
                               : warp_combine_sums_all(pairs, p.segments, slot_scale(p, row, slot));
}

__device__ void warp_totals(const ChainParams& p, long long b, int slot) {
    const Row row = warp_read_row_all(p, b);
    const Need need = slot_need(p, row, slot);
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
    Scratch scratch;
    // Here, not in every thread's registers:
    Row row;
    Draw draw;
    Weights weights;
    unsigned int arrived;
};

// The row's answer; by one block.
__device__ void block_write(const ChainParams& p, const Row& row, int accepted, long long token, int status) {
    Token* tokens = (Token*)p.tokens + row.b * (p.num_drafts + 1);
    for (int i = threadIdx.x; i <= p.num_drafts; i += DECIDE_THREADS) {
        tokens[i] = (Token)(i < accepted ? draft_token(p, row, i) : i == accepted ? token : -1);
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
            value =
                (float)((p.target.probs ? 0.0 : (double)total.max / row.target_temperature) + log((double)total.sum));
        }
        p.log_normalizer[row.b] = value;
    }
}

// Totals of the row's score rows, then every position's verdict. All threads get where the chain stops.
__device__ int block_decide_all(const ChainParams& p, const Row& row, Shared& shared) {
    for (int slot = warp_index(); slot < slots_per_row(p); slot += DECIDE_WARPS) {
        const Need need = slot_need(p, row, slot);
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
    return (int)block_min_all(stop, shared.scratch);
}

// After a rejection at n: what the replacement is drawn from.
__device__ Weights residual_weights(const ChainParams& p, const Row& row, const Shared& shared, int n) {
    const int draft_slot = (int)p.num_drafts + 1 + n;
    Weights w = {};
    w.target = target_row(p, row, n);
    w.judge_target = RULE == RULE_SIGMOID || p.target.log_normalizer;
    if (RULE == RULE_TOKEN) {
        w.target_side =
            p.target.log_normalizer
                ? make_side(log_normalizer_at(p, p.target, row, row.start + row.b + n, n), row.target_temperature)
                : make_side(p.target, shared.totals[n], row.target_temperature);
    }
    if (RULE == RULE_SIGMOID) {
        w.target_sigmoid = make_sigmoid_side(p, row.target_temperature);
    }
    w.kind = LESS_ONE_HOT;
    if (!p.has_draft || row.draft_greedy) {
        w.hot = p.has_draft ? __float_as_uint(shared.totals[draft_slot].sum) : draft_token(p, row, n);
        return w;
    }
    w.kind = LESS_DRAFT;
    w.draft = draft_row(p, row, n);
    w.judge_draft = RULE == RULE_SIGMOID || p.draft.log_normalizer;
    if (RULE == RULE_SIGMOID) {
        w.draft_sigmoid = make_sigmoid_side(p, row.draft_temperature);
    } else {
        w.draft_side = p.draft.log_normalizer
                           ? make_side(log_normalizer_at(p, p.draft, row, row.start + n, n), row.draft_temperature)
                           : make_side(p.draft, shared.totals[draft_slot], row.draft_temperature);
    }
    return w;
}

// A draw from the target row n itself, by this block alone; its pairs are known, or made here.
__device__ long long block_draw_target_all(const ChainParams& p, const Row& row, int n, bool pairs_known,
                                           Shared& shared) {
    const Draw& draw = shared.draw;
    Pair* pairs = p.pairs + pair_row(p, row, n) * p.segments;
    const Target* target = target_row(p, row, n);
    if (!pairs_known) {
        const float scale = logit_scale(row.target_temperature);
        for (long long s = warp_index(); s < p.segments; s += DECIDE_WARPS) {
            const Pair pair = warp_reread_pair_all<Target, SEG>(target, s, p.vocab_size, scale);
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
    const Side side = make_side(p.target, shared.totals[n], row.target_temperature);
    const float scale = race_scale(side, shared.totals[n]);
    const unsigned long long winner = block_race_pairs_all(p, pairs, side, scale, draw, shared.scratch);
    if (winner == NO_KEY) {
        return -1;
    }
    const unsigned int segment = (unsigned int)winner;
    if (threadIdx.x == 0) {
        Weights w = {};
        w.kind = TARGET_ONLY;
        w.target = target;
        // Inside the segment its own largest logit is the pivot: no weight that matters underflows.
        w.target_side = {finite_pivot(pairs[segment].max), side.scale, 1.0f, side.probs};
        shared.weights = w;
    }
    __syncthreads();
    return block_pick_all(p, shared.weights, draw, segment, shared.scratch);
}

// All blocks of a row: race the residual of position n. The last one draws the token and writes the row.
__device__ void block_resample(const ChainParams& p, const Row& row, int n, long long part, Shared& shared) {
    const Draw& draw = shared.draw;
    if (threadIdx.x == 0) {
        shared.weights = residual_weights(p, row, shared, n);
    }
    __syncthreads();
    const Weights& w = shared.weights;
    const float scale = race_scale(w.target_side, shared.totals[n]);
    block_race_segments(p, w, scale, draw, row.b, part);
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
        token = winner == NO_KEY ? block_draw_target_all(p, row, n, !w.judge_target, shared)
                                 : block_pick_all(p, w, draw, (unsigned int)winner, shared.scratch);
    }
    block_write(p, row, n, token, row.status | faults);
}

__device__ void block_verify(const ChainParams& p, long long b, long long part, Shared& shared) {
    if (warp_index() == 0) {
        const Row mine = warp_read_row_all(p, b);
        if (lane_index() == 0) {
            shared.row = mine;
        }
    }
    __syncthreads();
    const Row& row = shared.row;
    if (!row.runs) {
        if (part == 0) {
            block_write(p, row, 0, -1, row.status);
            write_log_normalizer(p, row, Pair{}, row.active);
        }
        return;
    }
    const int n = block_decide_all(p, row, shared);
    const int verdict = shared.verdicts[n];
    if (!row.target_greedy && (verdict == REJECT || verdict == DRAFTS_END)) {
        const int purpose = p.purpose ? p.purpose : verdict == REJECT ? PURPOSE_RESIDUAL : PURPOSE_BONUS;
        if (threadIdx.x == 0) {
            shared.draw = {row_seed(p, b), row_step(p, b), purpose, draw_position(p, b, n)};
        }
        __syncthreads();
        if (verdict == REJECT) {
            block_resample(p, row, n, part, shared);
            return;
        }
    }
    if (part != 0) {
        return;
    }
    const bool bad = verdict != REJECT && verdict != DRAFTS_END;
    long long token = -1;
    if (!bad) {
        token =
            row.target_greedy ? __float_as_uint(shared.totals[n].sum) : block_draw_target_all(p, row, n, true, shared);
    }
    block_write(p, row, n, token, row.status | (bad ? verdict : 0));
    write_log_normalizer(p, row, shared.totals[n], bad);
}

}  // namespace cupyspec

// Grids are one-dimensional (grid.y ends at 65,535) and may be smaller than the work: each block or warp strides on.

extern "C" __global__ void STATS_BOUNDS chain_stats(const __grid_constant__ cupyspec::ChainParams p) {
    using namespace cupyspec;
    const long long warps = (long long)gridDim.x * (STATS_THREADS / LANES);
    const long long per_row = divide(p.segments + p.segments_per_warp - 1, p.segments_per_warp);
    const long long items = p.batch_size * slots_per_row(p) * per_row;
    for (long long item = (long long)blockIdx.x * (STATS_THREADS / LANES) + warp_index(); item < items; item += warps) {
        const long long score_row = divide(item, per_row), b = divide(score_row, slots_per_row(p));
        const unsigned int segment = (unsigned int)((item - score_row * per_row) * p.segments_per_warp);
        warp_stats(p, b, (int)(score_row - b * slots_per_row(p)), segment);
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

extern "C" __global__ void __launch_bounds__(cupyspec::DECIDE_THREADS,
                                             2)  // two a multiprocessor: 128 registers, enough not to spill
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

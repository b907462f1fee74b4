// Verification of a chain of drafts, and sampling (a chain of none): logits or probabilities in, tokens out.
//
//   B rows, K draft tokens, V vocabulary, S = ceil(V / SEG) segments.
//   target scores [B, K+1, V], draft scores [B, K, V] or none (one-hot drafts), float32, float16 or bfloat16 each;
//   padded, ragged, or flattened ([T+B, V] and [T, V]); any outer strides.
//   tokens [B, K+1]: the accepted prefix, one more token, then -1. num_accepted [B]. status [B].
//
// chain_verify  blocks_per_row blocks verify one row: they read the score rows of its first positions, one warp a segment,
//               into pairs (segment.cuh); each decides from the pairs, the same in every block, how far the drafts are
//               accepted; if all are, they read on. So score rows behind a rejection are never read. After a rejection
//               they race the segments of the residual, and the block that holds the winner picks the token.
//               Where chain_stats ran before, all pairs are known and all positions are judged at once.
//
// The blocks of a row are one cluster. Without clusters (before compute capability 9.0) a row has one block, or several
//   where the pairs are known: then the last one to have raced picks the token.
//
// Rules: Token (arXiv 2211.17192, 2302.01318) and Sigmoid (arXiv 2406.11016). A temperature below 2^-126 is greedy. A
//   rejected row whose residual is zero everywhere draws from the target instead.
// Random numbers: coin i = word 0 at (ACCEPT, position i). The draw at stop position n uses, for segment s, word 0
//   (exponential) and word 1 (pick) at (RESIDUAL or BONUS, position n, segment s); sample() brings its purpose,
//   position and draw.
// A draw: key_s = E_s / W_s, W_s the segment's weight; the smallest key wins, the lowest segment on ties; then the pick
//   inside that segment. That is the categorical law.
// Ties of an argmax: the lowest id. Weights below 2^-126 count as 0 (-ftz=true).
// Deterministic bit for bit: no sum depends on launch shape, batch, alignment or layout.
// No input value, id or length makes a kernel read or write out of bounds: lengths are clamped, ids compared first.
#include "chain_draw.cuh"
#include "chain_pairs.cuh"
#include "chain_verdict.cuh"

namespace cupyspec {

constexpr int WARPS = VERIFY_THREADS / LANES;
// Threads of a multiprocessor whose registers hold what is in flight: 80 each for 16-bit scores, else 128. On some devices
// the compiler needs more than 80.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1200)
#define VERIFY_RESIDENT 512
#else
#define VERIFY_RESIDENT (sizeof(cupyspec::Target) + sizeof(cupyspec::Draft) > 4 ? 512 : 768)
#endif
#ifndef VERIFY_BLOCKS
#define VERIFY_BLOCKS (VERIFY_RESIDENT / VERIFY_THREADS)
#endif

// What the blocks of a row tell each other of the race.
struct Race {
    unsigned long long keys[MAX_BLOCKS_PER_ROW];
    unsigned long long seen[MAX_BLOCKS_PER_ROW];
};

struct Shared {
    ChainParams params;  // for functions that are called: a parameter of the kernel is out of their quick reach
    unsigned long long facts[FACTS];
    Row row;
    Noise noise;
    double rates[2];  // log2(e) / temperature of target and draft
    Candidate candidates[MAX_DRAFTS + 1];
    Totals totals[MAX_DRAFTS + 1];
    int stop, verdict;
    Draw draw;
    Weights weights;
    BlockScratch<WARPS> scratch;
    unsigned int seen[WARPS];
    Race race;
    unsigned int arrived;
};

// ---------------------------------------------------------------------------------------------- how far to accept

// Whether no score row need be read to judge the drafts: all of them are then judged at once.
__device__ bool reads_nothing(const ChainParams& p, const Row& row, int i) {
    return i < row.drafts && target_need(p, row, i) == NEED_NOTHING && draft_need(p, row, i) == NEED_NOTHING;
}

// The positions from `first` on that are judged together, and where their pairs lie.
__device__ Group next_group(const ChainParams& p, const Row& row, int first, int place) {
    if (p.pairs_known) {
        return {0, row.drafts + 1, 0};
    }
    if (reads_nothing(p, row, first)) {
        return {first, row.drafts, place};
    }
    const int end = first + p.positions_at_once;
    return {first, end < row.drafts + 1 ? end : row.drafts + 1, place};
}

// One warp: pairs of the segment on both sides at position i, where they are needed.
__device__ __noinline__ void warp_make_pairs(const ChainParams& p, const Row& row, int i, unsigned int segment,
                                             Pair* target_pair, Pair* draft_pair) {
    const Need of_target = target_need(p, row, i), of_draft = draft_need(p, row, i);
    if (of_target != NEED_NOTHING) {
        WarpSegment<Target, SEG> mine;
        mine.load(target_row(p, row, i), segment, p.vocab_size, fill_of<Target>(p.target.probs));
        const Pair pair = warp_segment_pair_all(mine, of_target, p.target.probs, logit_scale(row.target_temperature));
        if (lane_index() == 0) {
            *target_pair = pair;
        }
    }
    if (of_draft != NEED_NOTHING) {
        WarpSegment<Draft, SEG> mine;
        mine.load(draft_row(p, row, i), segment, p.vocab_size, fill_of<Draft>(p.draft.probs));
        const Pair pair = warp_segment_pair_all(mine, of_draft, p.draft.probs, logit_scale(row.draft_temperature));
        if (lane_index() == 0) {
            *draft_pair = pair;
        }
    }
}

// The blocks of a row together: pairs of a group's score rows.
__device__ void blocks_make_pairs(const ChainParams& p, const Row& row, const Group& group, int rank, Shared& shared) {
    const unsigned int segments = (unsigned int)p.segments, step = p.blocks_per_row * WARPS;
#pragma unroll 1
    for (int i = group.first; i < group.end; ++i) {
        const Target* target = target_row(p, row, i);
        const Draft* draft = draft_row(p, row, i);
        Pair* target_pairs = p.pairs + target_pair_row(p, row, group, i) * segments;
        Pair* draft_pairs = p.pairs + draft_pair_row(p, row, group, i) * segments;
        // What most calls are: then the loads of both sides are in flight together.
        const bool plain = target_need(p, row, i) == NEED_SUM && draft_need(p, row, i) == NEED_SUM && !p.target.probs &&
                           !p.draft.probs;
        const float target_scale = logit_scale(row.target_temperature);
        const float draft_scale = logit_scale(row.draft_temperature);
#pragma unroll 1
        for (unsigned int segment = rank * WARPS + warp_index(); segment < segments; segment += step) {
            if (plain) {
                warp_prefetch<Target, SEG>(target, (long long)segment + step, p.vocab_size);
                warp_prefetch<Draft, SEG>(draft, (long long)segment + step, p.vocab_size);
                WarpSegment<Target, SEG> of_target;
                WarpSegment<Draft, SEG> of_draft;
                of_target.load(target, segment, p.vocab_size, Storage<Target>::NEG_INF);
                of_draft.load(draft, segment, p.vocab_size, Storage<Draft>::NEG_INF);
                const Pair first = of_target.softmax_pair_all(target_scale);
                const Pair second = of_draft.softmax_pair_all(draft_scale);
                if (lane_index() == 0) {
                    target_pairs[segment] = first;
                    draft_pairs[segment] = second;
                }
            } else {
                warp_make_pairs(shared.params, row, i, segment, target_pairs + segment, draft_pairs + segment);
            }
        }
    }
}

// One block: totals of a group's score rows.
__device__ void block_make_totals(const ChainParams& p, const Group& group, Shared& shared) {
    const Row& row = shared.row;
#pragma unroll 1
    for (int item = warp_index(); item < 2 * (group.end - group.first); item += WARPS) {
        const int i = group.first + item / 2;
        const bool of_target = item % 2 == 0;
        const Need need = of_target ? target_need(p, row, i) : draft_need(p, row, i);
        if (need == NEED_NOTHING) {
            continue;
        }
        const long long at = of_target ? target_pair_row(p, row, group, i) : draft_pair_row(p, row, group, i);
        const float scale = logit_scale(of_target ? row.target_temperature : row.draft_temperature);
        const Pair total =
            p.totals ? p.totals[at] : warp_combine_all(p.pairs + at * p.segments, p.segments, need, scale);
        if (lane_index() == 0) {
            (of_target ? shared.totals[i].target : shared.totals[i].draft) = total;
        }
    }
}

// One warp, after a rejection at n: what the replacement is drawn from. A lane for each side.
__device__ inline void warp_residual_weights(const ChainParams& p, const Row& row, const Totals& totals, int n,
                                             Weights& w) {
    const bool less_draft = p.has_draft && !row.draft_greedy;
    if (lane_index() == 2) {
        w.target = target_row(p, row, n);
        w.judge_target = RULE == RULE_SIGMOID || p.target.log_normalizer;
        w.kind = LESS_ONE_HOT;
        w.judge_draft = false;
        if (!less_draft) {
            w.hot = p.has_draft ? __float_as_uint(totals.draft.sum) : draft_token(p, row, n);
        } else {
            w.kind = LESS_DRAFT;
            w.draft = draft_row(p, row, n);
            w.judge_draft = RULE == RULE_SIGMOID || p.draft.log_normalizer;
        }
    }
    if (lane_index() < 1 + less_draft) {
        const bool of_draft = lane_index() == 1;
        const Scores& s = of_draft ? p.draft : p.target;
        const float temperature = of_draft ? row.draft_temperature : row.target_temperature;
        Side side = {};
        if (RULE == RULE_SIGMOID) {
            (of_draft ? w.draft_sigmoid : w.target_sigmoid) = make_sigmoid_side(p, temperature);
        } else if (s.log_normalizer) {
            const long long at = row.start + (of_draft ? 0 : row.b) + n;
            side = make_side(log_normalizer_at(p, s, row, at, n), temperature);
        } else {
            side = make_side(s, of_draft ? totals.draft : totals.target, temperature);
        }
        (of_draft ? w.draft_side : w.target_side) = side;
    }
    __syncwarp();
}

// One warp judges a group, half of its lanes a side, and leaves in `shared` where the chain stops, why, and what is drawn
// there; verdict ACCEPT: it goes on behind the group.
__device__ inline void warp_judge(const ChainParams& p, const Group& group, Shared& shared) {
    constexpr int HALF = LANES / 2;
    const Row& row = shared.row;
    const bool of_draft = lane_index() >= HALF;
    int stop = group.first, verdict = ACCEPT;
#pragma unroll 1
    for (int base = group.first; base < group.end && verdict == ACCEPT; base += HALF) {
        const int i = base + lane_index() % HALF;
        Share mine = {};
        if (i < group.end) {
            mine = share_of(p, row, of_draft, i, shared.candidates[i], shared.totals[i], shared.rates[of_draft]);
        }
        const Share draft = {__shfl_xor_sync(FULL_WARP, mine.weight, HALF), __shfl_xor_sync(FULL_WARP, mine.sum, HALF),
                             __shfl_xor_sync(FULL_WARP, mine.faults, HALF)};
        if (i < group.end && !of_draft) {
            verdict = judge(p, row, i, shared.candidates[i], shared.totals[i], mine, draft);
        }
        const unsigned int stops = __ballot_sync(FULL_WARP, verdict != ACCEPT);
        const int first = stops ? __ffs((int)stops) - 1 : 0;
        stop = base + first;
        verdict = __shfl_sync(FULL_WARP, verdict, first);
    }
    if (lane_index() == 0) {
        shared.stop = stop;
        shared.verdict = verdict;
        const int purpose = p.purpose ? p.purpose : verdict == REJECT ? PURPOSE_RESIDUAL : PURPOSE_BONUS;
        shared.draw = {shared.noise, purpose, draw_position(p, shared.facts, stop)};
    }
    if (verdict == REJECT && !row.target_greedy) {
        warp_residual_weights(p, row, shared.totals[stop], stop, shared.weights);
    }
}

// ---------------------------------------------------------------------------------------------- the last token

// One warp: the row's answer.
__device__ void warp_write(const ChainParams& p, const Row& row, int accepted, long long token, int status) {
    Token* tokens = (Token*)p.tokens + row.b * (p.num_drafts + 1);
#pragma unroll 1
    for (int i = lane_index(); i <= p.num_drafts; i += LANES) {
        tokens[i] = (Token)(i < accepted ? draft_token(p, row, i) : i == accepted ? token : -1);
    }
    if (lane_index() == 0) {
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

// One block draws from the target row n itself and writes the answer. Its pairs lie at `pairs`, or are made there.
__device__ __noinline__ void block_draw_target(const ChainParams& p, int n, Pair* pairs, bool pairs_known, int status,
                                               Shared& shared) {
    const Row& row = shared.row;
    const Draw& draw = shared.draw;
    const Target* target = target_row(p, row, n);
    if (!pairs_known) {
        const float scale = logit_scale(row.target_temperature);
#pragma unroll 1
        for (unsigned int s = warp_index(); s < p.segments; s += WARPS) {
            WarpSegment<Target, SEG> mine;
            mine.load(target, s, p.vocab_size, fill_of<Target>(p.target.probs));
            const Pair pair = mine.softmax_pair_all(scale);
            if (lane_index() == 0) {
                pairs[s] = pair;
            }
        }
        __syncthreads();
        if (warp_index() == 0) {
            const Pair total = warp_combine_sums_all(pairs, p.segments, scale);
            if (lane_index() == 0) {
                shared.totals[n].target = total;
            }
        }
        __syncthreads();
    }
    Side side = make_side(p.target, shared.totals[n].target, row.target_temperature);
    const float scale = race_scale(side, shared.totals[n].target);
    unsigned long long best = NO_KEY;
#pragma unroll 1
    for (long long s = threadIdx.x; s < p.segments; s += VERIFY_THREADS) {
        const unsigned long long key = pair_key(pairs[s], (unsigned int)s, side, scale, draw);
        best = key < best ? key : best;
    }
    best = block_min_all(best, shared.scratch);
    if (warp_index() != 0) {
        return;
    }
    long long token = -1;
    if (best != NO_KEY) {
        const unsigned int segment = (unsigned int)best;
        if (lane_index() == 0) {
            Weights w = {};
            w.kind = TARGET_ONLY;
            w.target = target;
            // Inside the segment its own largest logit is the pivot: no weight that matters underflows.
            w.target_side = {finite_pivot(pairs[segment].max), side.scale, 1.0f, side.probs};
            shared.weights = w;
        }
        __syncwarp();
        unsigned int seen = 0;
        token = warp_pick_all(p, shared.weights, draw, segment, sum_lane(p, shared.weights, segment, seen));
    }
    warp_write(p, row, n, token, status);
}

// What the race of a row's blocks has come to, for one warp.
struct Outcome {
    unsigned long long winner;
    unsigned int seen;  // by all blocks
    bool finishes;      // whether this block is to finish the row
    bool has_winner;    // whether this warp has summed the winner's segment
};

// All blocks of a row race their segments of the residual.
__device__ Outcome blocks_race(const ChainParams& p, const Row& row, int rank, Best& best, Shared& shared) {
    const Weights& w = shared.weights;
    const float scale = race_scale(w.target_side, shared.totals[shared.stop].target);
    unsigned int seen = 0;
    best = warp_race_segments_all(shared.params, w, scale, shared.draw, rank * WARPS + warp_index(),
                                  p.blocks_per_row * WARPS, seen);
    if (w.judge_target || w.judge_draft) {
        for (int bit = SEEN_TARGET_BAD; bit <= SEEN_DRAFT_SCORE; bit *= 2) {
            seen |= __ballot_sync(FULL_WARP, seen & bit) ? bit : 0;
        }
    }
    if (lane_index() == 0) {
        shared.seen[warp_index()] = seen;
    }
    const unsigned long long mine = block_min_all(best.key, shared.scratch);  // its barriers order `seen` too
    for (int warp = 0; warp < WARPS; ++warp) {
        seen |= shared.seen[warp];
    }
    unsigned long long winner = mine;
    bool finishes = true;
    if (p.blocks_per_row > 1) {
#if CUPYSPEC_CLUSTERS
        if ((int)threadIdx.x < p.blocks_per_row) {
            cluster_store(&shared.race.keys[rank], threadIdx.x, mine);
            cluster_store(&shared.race.seen[rank], threadIdx.x, seen);
        }
        cluster_sync();
#pragma unroll 1
        for (int other = 0; other < p.blocks_per_row; ++other) {
            winner = shared.race.keys[other] < winner ? shared.race.keys[other] : winner;
            seen |= (unsigned int)shared.race.seen[other];
        }
        finishes = winner == NO_KEY ? rank == 0 : mine == winner;
#else
        volatile unsigned long long* keys = p.keys + row.b * p.blocks_per_row;
        if (threadIdx.x == 0) {
            keys[rank] = mine;
            if (seen) {
                atomicOr(&p.arrived[row.b], seen << 24);
            }
            __threadfence();  // this block's part of the race, before its arrival
            shared.arrived = atomicAdd(&p.arrived[row.b], 1u);
            __threadfence();
        }
        __syncthreads();
        finishes = (shared.arrived & 0xFFFFFFu) == (unsigned int)p.blocks_per_row - 1;
        if (finishes) {
            seen |= shared.arrived >> 24;
#pragma unroll 1
            for (int other = 0; other < p.blocks_per_row; ++other) {
                winner = keys[other] < winner ? keys[other] : winner;
            }
        }
#endif
    }
    return {winner, seen, finishes, best.key == winner};
}

// All blocks of a row: draw from the residual at position n, and write the answer.
__device__ void blocks_draw_residual(const ChainParams& p, int n, const Group& group, int rank, Shared& shared) {
    const Row& row = shared.row;
    const Weights& w = shared.weights;
    Best best;
    const Outcome race = blocks_race(p, row, rank, best, shared);
    if (!race.finishes) {
        return;
    }
    const int faults = seen_faults(w, race.seen);
    if (faults) {
        if (warp_index() == 0) {
            warp_write(p, row, n, -1, row.status | faults);
        }
    } else if (race.winner == NO_KEY) {
        // Where the target's pairs were not wanted there may be no place for those of every position: take the first.
        const bool known = !w.judge_target;
        const long long at = target_pair_row(p, row, group, known ? n : group.first);
        block_draw_target(shared.params, n, p.pairs + at * p.segments, known, row.status, shared);
    } else if (CUPYSPEC_CLUSTERS || p.blocks_per_row == 1 ? race.has_winner : warp_index() == 0) {
        unsigned int seen = 0;
        if (!race.has_winner) {
            best.sums = sum_lane(shared.params, w, (unsigned int)race.winner, seen);
        }
        const long long token = warp_pick_all(shared.params, w, shared.draw, (unsigned int)race.winner, best.sums);
        warp_write(p, row, n, token, row.status);
    }
}

__device__ void blocks_verify(const ChainParams& p, long long b, int rank, Shared& shared) {
    cluster_arrive();
    if (warp_index() == 0) {
        const Row mine = warp_read_row_all(p, b, shared.facts);
        const Noise noise = row_noise(p, b, shared.facts);
        if (lane_index() == 0) {
            shared.row = mine;
            shared.noise = noise;
        }
        if (lane_index() < 2) {
            shared.rates[lane_index()] =
                1.4426950408889634 / (lane_index() ? mine.draft_temperature : mine.target_temperature);
        }
#pragma unroll 1
        for (int i = lane_index(); mine.runs && i < mine.drafts; i += LANES) {
            shared.candidates[i] = read_candidate(p, mine, noise, i);
        }
    }
#pragma unroll 1
    for (int word = threadIdx.x; word < (int)sizeof(ChainParams) / 4; word += VERIFY_THREADS) {
        ((unsigned int*)&shared.params)[word] = ((const unsigned int*)&p)[word];
    }
    cluster_wait();
    wait_for_last_kernel();
    __syncthreads();
    const Row& row = shared.row;
    if (!row.runs) {
        if (rank == 0 && warp_index() == 0) {
            warp_write(p, row, 0, -1, row.status);
            write_log_normalizer(p, row, Pair{}, row.active);
        }
        return;
    }
    Group group = next_group(p, row, 0, 0);
    for (;;) {
        if (!p.pairs_known && !reads_nothing(p, row, group.first)) {
            blocks_make_pairs(p, row, group, rank, shared);
            cluster_sync();
        }
        block_make_totals(p, group, shared);
        __syncthreads();
        if (warp_index() == 0) {
            warp_judge(shared.params, group, shared);
        }
        __syncthreads();
        if (shared.verdict != ACCEPT) {
            break;
        }
        group = next_group(p, row, group.end, !group.place);
    }
    const int n = shared.stop, verdict = shared.verdict;
    if (verdict == REJECT && !row.target_greedy) {
        blocks_draw_residual(p, n, group, rank, shared);
        return;
    }
    if (rank != 0) {
        return;
    }
    if (verdict == DRAFTS_END && !row.target_greedy) {
        write_log_normalizer(p, row, shared.totals[n].target, false);
        block_draw_target(shared.params, n, p.pairs + target_pair_row(p, row, group, n) * p.segments, true, row.status,
                          shared);
    } else if (warp_index() == 0) {
        const bool bad = verdict != REJECT && verdict != DRAFTS_END;
        const long long token = bad ? -1 : (long long)__float_as_uint(shared.totals[n].target.sum);
        warp_write(p, row, n, token, row.status | (bad ? verdict : 0));
        write_log_normalizer(p, row, shared.totals[n].target, bad);
    }
}

}  // namespace cupyspec

// The blocks of a row have neighbouring numbers; a cluster is one row.
extern "C" __global__ void __launch_bounds__(VERIFY_THREADS, VERIFY_BLOCKS)
    chain_verify(const __grid_constant__ cupyspec::ChainParams p) {
    using namespace cupyspec;
    CUPYSPEC_SHARED(Shared, shared);
    const long long b = blockIdx.x / (unsigned int)p.blocks_per_row;
    blocks_verify(p, b, (int)(blockIdx.x - b * p.blocks_per_row), shared);
}

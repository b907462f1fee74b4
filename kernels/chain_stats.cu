// A head start for chain_verify where a batch has few rows: the whole device reads their scores at once.
//
// chain_stats   one warp: one segment of one score row -> a pair in scratch (segment.cuh). Rows that no decision needs
//               are not read. Clears what the blocks of chain_verify count without clusters: nothing survives a call.
// chain_totals  one warp: the pairs of one score row -> one. Only launched where a batch row has many pairs.
//
// Score rows of batch row b: target rows 0..K, then draft rows 0..K-1. Pairs lie as positions_at_once = K + 1 has them.
// Shapes, layouts and dtypes: chain_verify.cu. No input value, id or length makes a kernel read or write out of bounds.
#include "chain_pairs.cuh"

namespace cupyspec {

constexpr int STATS_THREADS = 128;
// Blocks of a multiprocessor: as many as need not spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define STATS_BLOCKS 4
#else
#define STATS_BLOCKS (sizeof(cupyspec::Target) + sizeof(cupyspec::Draft) > 4 ? 4 : 6)
#endif

struct Shared {
    unsigned long long facts[STATS_THREADS / LANES][FACTS];  // by warp
};

// n / d for n, d >= 0; a 64-bit division costs as much as a third of a segment.
__device__ inline long long divide(long long n, long long d) {
    return (n | d) >> 32 ? n / d : (long long)((unsigned int)n / (unsigned int)d);
}

// Score rows of a batch row.
__device__ inline long long score_rows(const ChainParams& p) {
    return p.num_drafts + 1 + (p.has_draft ? p.num_drafts : 0);
}

// What one warp does at a time.
struct Item {
    long long b;
    int score_row;
    unsigned int segment;
};

__device__ inline Item item_of(const ChainParams& p, long long number) {
    const long long at = divide(number, p.segments), b = divide(at, score_rows(p));
    return {b, (int)(at - b * score_rows(p)), (unsigned int)(number - at * p.segments)};
}

// Whether a score row's address and its being read hang on nothing but the call: then its loads need not wait for what
// the row's ids and lengths say, which is rarely that it is not needed.
__device__ inline bool reads_all(const ChainParams& p, bool summed) {
    return summed && !p.flattened && !p.active.data && !p.length.data;
}

__device__ void warp_target_stats(const ChainParams& p, long long b, int i, unsigned int segment,
                                  unsigned long long* facts) {
    const unsigned int fill = fill_of<Target>(p.target.probs);
    WarpSegment<Target, SEG> mine;
    Row row = {};
    row.b = b;
    const bool early = reads_all(p, i == p.num_drafts || !p.target.log_normalizer);
    if (early) {
        mine.load(target_row(p, row, i), segment, p.vocab_size, fill);
    }
    row = warp_read_row_all(p, b, facts);
    const Need need = target_need(p, row, i);
    if (need == NEED_NOTHING) {
        return;
    }
    if (!early) {
        mine.load(target_row(p, row, i), segment, p.vocab_size, fill);
    }
    const Pair pair = warp_segment_pair_all(mine, need, p.target.probs, logit_scale(row.target_temperature));
    if (lane_index() == 0) {
        p.pairs[target_pair_row(p, row, whole_chain(p), i) * p.segments + segment] = pair;
    }
}

__device__ void warp_draft_stats(const ChainParams& p, long long b, int i, unsigned int segment,
                                 unsigned long long* facts) {
    const unsigned int fill = fill_of<Draft>(p.draft.probs);
    WarpSegment<Draft, SEG> mine;
    Row row = {};
    row.b = b;
    const bool early = reads_all(p, p.has_draft && !p.draft.log_normalizer);
    if (early) {
        mine.load(draft_row(p, row, i), segment, p.vocab_size, fill);
    }
    row = warp_read_row_all(p, b, facts);
    const Need need = draft_need(p, row, i);
    if (need == NEED_NOTHING) {
        return;
    }
    if (!early) {
        mine.load(draft_row(p, row, i), segment, p.vocab_size, fill);
    }
    const Pair pair = warp_segment_pair_all(mine, need, p.draft.probs, logit_scale(row.draft_temperature));
    if (lane_index() == 0) {
        p.pairs[draft_pair_row(p, row, whole_chain(p), i) * p.segments + segment] = pair;
    }
}

// Asks for the scores of a warp's next item.
__device__ inline void warp_prefetch_item(const ChainParams& p, const Item& item) {
    const bool of_target = item.score_row <= p.num_drafts;
    const int i = of_target ? item.score_row : item.score_row - (int)p.num_drafts - 1;
    Row row = {};
    row.b = item.b;
    if (of_target && reads_all(p, i == p.num_drafts || !p.target.log_normalizer)) {
        warp_prefetch<Target, SEG>(target_row(p, row, i), item.segment, p.vocab_size);
    } else if (!of_target && reads_all(p, !p.draft.log_normalizer)) {
        warp_prefetch<Draft, SEG>(draft_row(p, row, i), item.segment, p.vocab_size);
    }
}

__device__ void warp_totals(const ChainParams& p, long long b, int score_row, unsigned long long* facts) {
    const Row row = warp_read_row_all(p, b, facts);
    const bool of_target = score_row <= p.num_drafts;
    const int i = of_target ? score_row : score_row - (int)p.num_drafts - 1;
    const Need need = of_target ? target_need(p, row, i) : draft_need(p, row, i);
    if (need == NEED_NOTHING) {
        return;
    }
    const Group all = whole_chain(p);
    const long long at = of_target ? target_pair_row(p, row, all, i) : draft_pair_row(p, row, all, i);
    const float scale = logit_scale(of_target ? row.target_temperature : row.draft_temperature);
    const Pair total = warp_combine_all(p.pairs + at * p.segments, p.segments, need, scale);
    if (lane_index() == 0) {
        p.totals[at] = total;
    }
}

}  // namespace cupyspec

// Grids are one-dimensional (grid.y ends at 65,535) and may be smaller than the work: each warp strides on.

extern "C" __global__ void __launch_bounds__(cupyspec::STATS_THREADS, STATS_BLOCKS)
    chain_stats(const __grid_constant__ cupyspec::ChainParams p) {
    using namespace cupyspec;
    CUPYSPEC_SHARED(Shared, shared);
    let_next_kernel_start();
    const long long warps = (long long)gridDim.x * (STATS_THREADS / LANES);
    const long long items = p.batch_size * score_rows(p) * p.segments;
#pragma unroll 1
    for (long long item = (long long)blockIdx.x * (STATS_THREADS / LANES) + warp_index(); item < items; item += warps) {
        if (item + warps < items) {
            warp_prefetch_item(p, item_of(p, item + warps));
        }
        const Item mine = item_of(p, item);
        if (mine.score_row == 0 && mine.segment == 0 && lane_index() == 0) {
            p.arrived[mine.b] = 0;
        }
        if (mine.score_row <= p.num_drafts) {
            warp_target_stats(p, mine.b, mine.score_row, mine.segment, shared.facts[warp_index()]);
        } else {
            warp_draft_stats(p, mine.b, mine.score_row - (int)p.num_drafts - 1, mine.segment,
                             shared.facts[warp_index()]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(cupyspec::STATS_THREADS)
    chain_totals(const __grid_constant__ cupyspec::ChainParams p) {
    using namespace cupyspec;
    CUPYSPEC_SHARED(Shared, shared);
    const long long warps = (long long)gridDim.x * (STATS_THREADS / LANES);
    const long long items = p.batch_size * score_rows(p);
    for (long long item = (long long)blockIdx.x * (STATS_THREADS / LANES) + warp_index(); item < items; item += warps) {
        const long long b = divide(item, score_rows(p));
        warp_totals(p, b, (int)(item - b * score_rows(p)), shared.facts[warp_index()]);
    }
}

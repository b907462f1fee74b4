// What the kernels of a chain are told, and a row's facts: draft count, temperatures, which score rows are read.
#pragma once

#include "block.cuh"
#include "dtypes.cuh"
#include "philox.cuh"
#include "segment.cuh"

// One module per specialisation, which defines these.
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
#define SEGMENT 1024
#endif
#ifndef VERIFY_THREADS  // of a block of chain_verify
#define VERIFY_THREADS 512
#endif

namespace cupyspec {

enum Rule { RULE_TOKEN = 0, RULE_SIGMOID = 1 };

constexpr int MAX_DRAFTS = 255;
constexpr int MAX_BLOCKS_PER_ROW = 8;  // what a cluster may have on every GPU that knows clusters
constexpr unsigned long long NO_KEY = ~0ull;

using Target = TARGET_TYPE;
using Draft = DRAFT_TYPE;
using Token = TOKEN_TYPE;
constexpr int RULE = CHAIN_RULE;
constexpr int SEG = SEGMENT;

// One side's scores. Padded rows lie at b * batch_stride + i * row_stride, flattened ones at row * row_stride; strides
// count elements, the last axis is contiguous.
struct Scores {
    const void* data;
    long long batch_stride, row_stride;
    const void* log_normalizer;  // or null; float32 or float64
    long long log_normalizer_batch_stride, log_normalizer_row_stride;
    int log_normalizer_is_double;
    int probs;
};

enum SeedKind {
    SEED_SPLIT,    // one number, split into a seed for each row
    SEED_PER_ROW,  // [B] integers, used as they are
    SEED_PAIRS     // [B, 2] uint32: high, low
};

// The one argument of every kernel; the host fills in the same struct.
struct ChainParams {
    Scores target, draft;
    // In the order of enum Fact. `length`: num_draft_tokens, or cu_num_draft_tokens of flattened rows. `seed_low`: the
    // second word where seeds are pairs.
    PerRow active, seed, seed_low, step, position, draw, length, target_temperature, draft_temperature;
    const void* draft_tokens;
    long long draft_tokens_batch_stride, draft_tokens_stride;
    void* tokens;              // [B, K + 1]
    int* num_accepted;         // [B]
    int* status;               // [B]
    float* log_normalizer;     // [B] or null
    Pair* pairs;               // scratch [B, pair_rows, segments]
    Pair* totals;              // scratch [B, pair_rows], or null: chain_verify combines pairs itself
    unsigned long long* keys;  // scratch [B, blocks_per_row], without clusters: each block's smallest (key, segment)
    unsigned int* arrived;     // scratch [B], without clusters: blocks that raced (low 24 bits), what they saw (high 8)
    long long batch_size, num_drafts, vocab_size, segments;
    long long all_drafts;   // flattened: T
    long long pair_rows;    // score rows a batch row has pairs of at one time
    double lenience;        // Token
    double alpha, beta;     // Sigmoid
    int positions_at_once;  // whose pairs lie in scratch together
    int pairs_known;        // chain_stats ran before: positions_at_once is K + 1
    int blocks_per_row;     // of chain_verify: one cluster where there are clusters
    int purpose;            // sample()'s, or 0
    int seed_kind;
    int has_draft;  // 0: one-hot drafts
    int flattened;
    int padding;
};

enum Status {
    STATUS_TARGET_INVALID = 1,
    STATUS_TARGET_EMPTY = 2,
    STATUS_DRAFT_INVALID = 4,
    STATUS_TOKEN_RANGE = 8,
    STATUS_LENGTH_RANGE = 16,
    STATUS_PARAMETER_RANGE = 32
};

// Bits that stand for ids which do not exist.
template <typename T> __device__ inline unsigned int fill_of(bool probs) { return probs ? 0u : Storage<T>::NEG_INF; }

// Facts of one batch row. All lanes of a warp hold the same.
struct Row {
    long long b;
    long long start;    // flattened: its first draft
    int drafts;         // L
    int status;         // bits 8, 16, 32
    bool active, runs;  // runs: active, and its parameters are in range
    bool target_greedy, draft_greedy;
    float target_temperature, draft_temperature;
};

__device__ inline long long draft_token(const ChainParams& p, const Row& row, int i) {
    const long long at = p.flattened ? (row.start + i) * p.draft_tokens_stride
                                     : row.b * p.draft_tokens_batch_stride + i * p.draft_tokens_stride;
    return ((const Token*)p.draft_tokens)[at];
}

// What is read of a row's parameters.
enum Fact {
    FACT_ACTIVE,
    FACT_SEED,
    FACT_SEED_LOW,
    FACT_STEP,
    FACT_POSITION,
    FACT_DRAW,
    FACT_LENGTH,  // flattened: where the row's drafts begin
    FACT_TARGET_TEMPERATURE,
    FACT_DRAFT_TEMPERATURE,
    FACT_END,  // flattened: where they end
    FACTS
};

// A lane each reads them, so that they come together.
__device__ inline unsigned long long read_fact(const ChainParams& p, long long b, int fact) {
    const PerRow& from = (&p.active)[fact == FACT_END ? FACT_LENGTH : fact];
    if (!from.data || (fact == FACT_END && !p.flattened)) {
        return from.value;
    }
    const unsigned long long stored = stored_value(from, fact == FACT_END ? b + 1 : b);
    if (fact == FACT_TARGET_TEMPERATURE || fact == FACT_DRAFT_TEMPERATURE) {
        return (unsigned long long)__double_as_longlong(real_value(from, stored));
    }
    return integer_value(from, stored);
}

// float32 of a temperature, and whether it is one: finite and not negative. Below 2^-126 it means greedy.
__device__ inline bool judge_temperature(unsigned long long fact, float& temperature, bool& greedy) {
    const double given = __longlong_as_double((long long)fact);
    temperature = (float)given;
    greedy = temperature < MIN_NORMAL;  // flushed to 0 or not, a subnormal is below
    return given >= 0.0 && temperature <= 3.4028234663852886e38f;
}

// A uint64 too large for a signed number counts as the largest.
__device__ inline long long length_of(const ChainParams& p, unsigned long long fact) {
    return p.length.type == ROW_UINT64 && fact >> 63 ? 0x7FFFFFFFFFFFFFFFll : (long long)fact;
}

// Clamped length and start of row b's drafts.
__device__ inline long long judge_length(const ChainParams& p, Row& row, const unsigned long long* facts) {
    long long length = length_of(p, facts[FACT_LENGTH]);
    if (p.flattened) {
        const long long given_start = length, given_end = length_of(p, facts[FACT_END]);
        const long long all = p.all_drafts;
        row.start = given_start < 0 ? 0 : given_start > all ? all : given_start;
        const long long end = given_end < row.start ? row.start : given_end > all ? all : given_end;
        length = end - row.start;
        if (row.start != given_start || end != given_end || (row.b == 0 && given_start != 0)) {
            row.status |= STATUS_LENGTH_RANGE;
        }
    }
    if (length < 0 || length > p.num_drafts) {
        length = length < 0 ? 0 : p.num_drafts;
        row.status |= STATUS_LENGTH_RANGE;
    }
    return length;
}

// The whole warp reads row b's facts, into `facts` of this warp in shared memory too. Drafts end at the first id that is
// -1 or does not exist.
__device__ inline Row warp_read_row_all(const ChainParams& p, long long b, unsigned long long* facts) {
    Row row = {};
    row.b = b;
    // Where ids lie does not hang on the row's length in padded rows: read the first of them along with the facts.
    const bool early = !p.flattened && lane_index() < p.num_drafts;
    const long long first_id = early ? draft_token(p, row, lane_index()) : 0;
    __syncwarp();  // the facts of the row before may still be read
    if (lane_index() < FACTS) {
        facts[lane_index()] = read_fact(p, b, lane_index());
    }
    __syncwarp();
    row.active = facts[FACT_ACTIVE] != 0;
    if (!row.active) {
        return row;
    }
    row.drafts = (int)judge_length(p, row, facts);
#pragma unroll 1
    for (int base = 0; base < row.drafts; base += LANES) {
        const int i = base + lane_index();
        const long long id = i >= row.drafts ? 0 : base == 0 && !p.flattened ? first_id : draft_token(p, row, i);
        const unsigned int ends = __ballot_sync(FULL_WARP, id < 0 || id >= p.vocab_size);
        const unsigned int wrong = __ballot_sync(FULL_WARP, id < -1 || id >= p.vocab_size);
        if (ends) {
            const int first = __ffs((int)ends) - 1;
            row.drafts = base + first;
            row.status |= wrong >> first & 1 ? STATUS_TOKEN_RANGE : 0;
        }
    }
    bool valid = judge_temperature(facts[FACT_TARGET_TEMPERATURE], row.target_temperature, row.target_greedy);
    if (p.has_draft) {
        valid &= judge_temperature(facts[FACT_DRAFT_TEMPERATURE], row.draft_temperature, row.draft_greedy);
    }
    row.status |= valid ? 0 : STATUS_PARAMETER_RANGE;
    row.runs = valid;
    return row;
}

// What all random numbers of a row have in common.
struct Noise {
    unsigned long long seed, step;
};

__device__ inline Noise row_noise(const ChainParams& p, long long b, const unsigned long long* facts) {
    unsigned long long seed = facts[FACT_SEED];
    if (p.seed_kind == SEED_PAIRS) {
        seed = seed << 32 | facts[FACT_SEED_LOW];
    } else if (p.seed_kind == SEED_SPLIT) {
        seed = split_seed(seed, (unsigned int)b);
    }
    return {seed, facts[FACT_STEP] & 0xFFFFFFFFFFFFFFull};
}

// Counter word y of the row's draw: chain position, or what sample() was told.
__device__ inline unsigned int draw_position(const ChainParams& p, const unsigned long long* facts, int n) {
    return p.purpose ? ((unsigned int)facts[FACT_POSITION] & 0xFFFFu) | (unsigned int)facts[FACT_DRAW] << 16
                     : (unsigned int)n;
}

__device__ inline const Target* target_row(const ChainParams& p, const Row& row, int i) {
    const Scores& s = p.target;
    return (const Target*)s.data +
           (p.flattened ? (row.start + row.b + i) * s.row_stride : row.b * s.batch_stride + i * s.row_stride);
}

__device__ inline const Draft* draft_row(const ChainParams& p, const Row& row, int i) {
    const Scores& s = p.draft;
    return (const Draft*)s.data +
           (p.flattened ? (row.start + i) * s.row_stride : row.b * s.batch_stride + i * s.row_stride);
}

// `row_index`: of the flattened array.
__device__ inline double log_normalizer_at(const ChainParams& p, const Scores& s, const Row& row, long long row_index,
                                           int i) {
    const long long at = p.flattened ? row_index * s.log_normalizer_row_stride
                                     : row.b * s.log_normalizer_batch_stride + i * s.log_normalizer_row_stride;
    return s.log_normalizer_is_double ? ((const double*)s.log_normalizer)[at]
                                      : (double)((const float*)s.log_normalizer)[at];
}

// Positions first .. end - 1, judged together. Their pairs lie in one of two places by turns, so that a block may write
// those of the next group while others still read.
struct Group {
    int first, end, place;
};

// Where the pairs of a group's score rows lie: target rows, then draft rows. By batch row and position in every layout, so
// that no two batch rows share scratch, even where flattened bounds overlap.
__device__ inline long long target_pair_row(const ChainParams& p, const Row& row, const Group& group, int i) {
    return row.b * p.pair_rows + group.place * 2 * p.positions_at_once + (i - group.first);
}
__device__ inline long long draft_pair_row(const ChainParams& p, const Row& row, const Group& group, int i) {
    return target_pair_row(p, row, group, i) + p.positions_at_once;
}

// Where all pairs are known.
__device__ inline Group whole_chain(const ChainParams& p) { return {0, (int)p.num_drafts + 1, 0}; }

enum Need { NEED_NOTHING, NEED_SUM, NEED_ARGMAX };

// What the decision wants to know of target row i, whole.
__device__ inline Need target_need(const ChainParams& p, const Row& row, int i) {
    if (!row.runs || i > row.drafts) {
        return NEED_NOTHING;
    }
    if (row.target_greedy) {
        return NEED_ARGMAX;
    }
    // The last row is drawn from, whatever is known of its normaliser.
    const bool summed = i == row.drafts || (RULE == RULE_TOKEN && !p.target.log_normalizer);
    return summed ? NEED_SUM : NEED_NOTHING;
}

// And of draft row i.
__device__ inline Need draft_need(const ChainParams& p, const Row& row, int i) {
    if (!row.runs || i >= row.drafts || !p.has_draft || row.target_greedy) {
        return NEED_NOTHING;
    }
    if (row.draft_greedy) {
        return NEED_ARGMAX;
    }
    return RULE == RULE_TOKEN && !p.draft.log_normalizer ? NEED_SUM : NEED_NOTHING;
}

}  // namespace cupyspec

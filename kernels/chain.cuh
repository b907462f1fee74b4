// What the kernels of chain.cu are told, and a row's facts: draft count, temperatures, which score rows are read.
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

namespace cupyspec {

enum Rule { RULE_TOKEN = 0, RULE_SIGMOID = 1 };

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

// One side's scores. Padded rows lie at b * batch_stride + i * row_stride, flattened ones at row * row_stride; strides
// count elements, the last axis is contiguous.
struct Scores {
    const void* data;
    long long batch_stride, row_stride;
    const void* log_normalizer;  // or null; float32 or float64
    long long log_normalizer_batch_stride, log_normalizer_row_stride;
    PerRow temperature;
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
    PerRow active, seed, step, position, draw, num_draft_tokens, cu_num_draft_tokens;
    long long seed_word_stride;  // SEED_PAIRS: between the two words
    const void* draft_tokens;
    long long draft_tokens_batch_stride, draft_tokens_stride;
    void* tokens;              // [B, K + 1]
    int* num_accepted;         // [B]
    int* status;               // [B]
    float* log_normalizer;     // [B] or null
    Pair* pairs;               // scratch [score rows, segments]
    Pair* totals;              // scratch [score rows], or null: chain_decide combines pairs itself
    unsigned long long* race;  // scratch [B]: smallest (key, segment)
    unsigned int* arrived;     // scratch [B]: blocks that raced (low 24 bits), what they saw (high 8)
    long long batch_size, num_drafts, vocab_size, segments;
    long long all_drafts;         // flattened: T
    long long blocks_per_row;     // of chain_decide
    long long segments_per_warp;  // of chain_stats: 1 or 2
    double lenience;              // Token
    double alpha, beta;           // Sigmoid
    int purpose;                  // sample()'s, or 0
    int seed_kind;
    int has_draft;  // 0: one-hot drafts
    int flattened;
};

enum Status {
    STATUS_TARGET_INVALID = 1,
    STATUS_TARGET_EMPTY = 2,
    STATUS_DRAFT_INVALID = 4,
    STATUS_TOKEN_RANGE = 8,
    STATUS_LENGTH_RANGE = 16,
    STATUS_PARAMETER_RANGE = 32
};

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

// float32 of a temperature, and whether it is one: finite and not negative. Below 2^-126 it means greedy.
__device__ inline bool read_temperature(const PerRow& from, long long b, float& temperature, bool& greedy) {
    const double given = load_real(from, b);
    temperature = (float)given;
    greedy = temperature < MIN_NORMAL;  // flushed to 0 or not, a subnormal is below
    return given >= 0.0 && temperature <= 3.4028234663852886e38f;
}

// Clamped length and start of row b's drafts.
__device__ inline void read_length(const ChainParams& p, Row& row, long long& length) {
    if (p.flattened) {
        const long long given_start = load_integer(p.cu_num_draft_tokens, row.b);
        const long long given_end = load_integer(p.cu_num_draft_tokens, row.b + 1);
        const long long all = p.all_drafts;
        row.start = given_start < 0 ? 0 : given_start > all ? all : given_start;
        const long long end = given_end < row.start ? row.start : given_end > all ? all : given_end;
        length = end - row.start;
        if (row.start != given_start || end != given_end || (row.b == 0 && given_start != 0)) {
            row.status |= STATUS_LENGTH_RANGE;
        }
    } else {
        length = load_integer(p.num_draft_tokens, row.b);
    }
    if (length < 0 || length > p.num_drafts) {
        length = length < 0 ? 0 : p.num_drafts;
        row.status |= STATUS_LENGTH_RANGE;
    }
}

// The whole warp reads row b's facts: drafts end at the first id that is -1 or does not exist.
__device__ inline Row warp_read_row_all(const ChainParams& p, long long b) {
    Row row = {};
    row.b = b;
    row.active = load_bits(p.active, b) != 0;
    if (!row.active) {
        return row;
    }
    long long length;
    read_length(p, row, length);
    row.drafts = (int)length;
    for (int base = 0; base < row.drafts; base += LANES) {
        const int i = base + lane_index();
        const long long id = i < row.drafts ? draft_token(p, row, i) : 0;
        const unsigned int ends = __ballot_sync(FULL_WARP, id < 0 || id >= p.vocab_size);
        const unsigned int wrong = __ballot_sync(FULL_WARP, id < -1 || id >= p.vocab_size);
        if (ends) {
            const int first = __ffs((int)ends) - 1;
            row.drafts = base + first;
            row.status |= wrong >> first & 1 ? STATUS_TOKEN_RANGE : 0;
        }
    }
    bool valid = read_temperature(p.target.temperature, b, row.target_temperature, row.target_greedy);
    if (p.has_draft) {
        valid &= read_temperature(p.draft.temperature, b, row.draft_temperature, row.draft_greedy);
    }
    row.status |= valid ? 0 : STATUS_PARAMETER_RANGE;
    row.runs = valid;
    return row;
}

__device__ inline unsigned long long row_seed(const ChainParams& p, long long b) {
    if (p.seed_kind == SEED_PAIRS) {
        const unsigned int* words = (const unsigned int*)p.seed.data + b * p.seed.stride;
        return (unsigned long long)words[0] << 32 | words[p.seed_word_stride];
    }
    const unsigned long long seed = load_bits(p.seed, b);  // a single one has stride 0
    return p.seed_kind == SEED_SPLIT ? split_seed(seed, (unsigned int)b) : seed;
}

__device__ inline unsigned long long row_step(const ChainParams& p, long long b) {
    return load_bits(p.step, b) & 0xFFFFFFFFFFFFFFull;
}

// Counter word y of the row's draw: chain position, or what sample() was told.
__device__ inline unsigned int draw_position(const ChainParams& p, long long b, int n) {
    if (!p.purpose) {
        return (unsigned int)n;
    }
    return ((unsigned int)load_bits(p.position, b) & 0xFFFFu) | (unsigned int)load_bits(p.draw, b) << 16;
}

// Slots number a batch row's score rows: target rows 0..K, then draft rows 0..K-1.
__device__ inline long long slots_per_row(const ChainParams& p) { return 2 * p.num_drafts + 1; }

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

// Where a slot's pairs lie: by batch row and position in every layout, so that no two batch rows share scratch, even where
// flattened bounds overlap.
__device__ inline long long pair_row(const ChainParams& p, const Row& row, int slot) {
    return row.b * slots_per_row(p) + slot;
}

enum Need { NEED_NOTHING, NEED_SUM, NEED_ARGMAX };

// What the decision wants to know of a whole score row.
__device__ inline Need slot_need(const ChainParams& p, const Row& row, int slot) {
    if (!row.runs) {
        return NEED_NOTHING;
    }
    if (slot <= p.num_drafts) {
        if (slot > row.drafts) {
            return NEED_NOTHING;
        }
        if (row.target_greedy) {
            return NEED_ARGMAX;
        }
        // The last row is drawn from, whatever is known of its normaliser.
        const bool summed = slot == row.drafts || (RULE == RULE_TOKEN && !p.target.log_normalizer);
        return summed ? NEED_SUM : NEED_NOTHING;
    }
    const int i = slot - (int)p.num_drafts - 1;
    if (i >= row.drafts || !p.has_draft || row.target_greedy) {
        return NEED_NOTHING;
    }
    if (row.draft_greedy) {
        return NEED_ARGMAX;
    }
    return RULE == RULE_TOKEN && !p.draft.log_normalizer ? NEED_SUM : NEED_NOTHING;
}

__device__ inline float slot_scale(const ChainParams& p, const Row& row, int slot) {
    return logit_scale(slot <= p.num_drafts ? row.target_temperature : row.draft_temperature);
}

}  // namespace cupyspec

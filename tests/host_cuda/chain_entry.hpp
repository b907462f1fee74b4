// What the shared library exports: a launch by kernel name, and the layout of the argument struct. Follows chain.cu.
#pragma once

#include <stddef.h>

namespace host_cuda {

template <void (*KERNEL)(cupyspec::ChainParams)> void call(const void* params) {
    KERNEL(*(const cupyspec::ChainParams*)params);
}

const Entry* entries() {
    static const Entry all[] = {{"chain_stats", call<chain_stats>},
                                {"chain_totals", call<chain_totals>},
                                {"chain_decide", call<chain_decide>},
                                {nullptr, nullptr}};
    return all;
}

}  // namespace host_cuda

// Sizes, then the offset of every member of ChainParams in order; ends with -1.
extern "C" const long long* host_cuda_layout() {
    using P = cupyspec::ChainParams;
    static const long long layout[] = {sizeof(P),
                                       sizeof(cupyspec::Scores),
                                       sizeof(cupyspec::PerRow),
                                       offsetof(P, target),
                                       offsetof(P, draft),
                                       offsetof(P, active),
                                       offsetof(P, seed),
                                       offsetof(P, step),
                                       offsetof(P, position),
                                       offsetof(P, draw),
                                       offsetof(P, num_draft_tokens),
                                       offsetof(P, cu_num_draft_tokens),
                                       offsetof(P, seed_word_stride),
                                       offsetof(P, draft_tokens),
                                       offsetof(P, draft_tokens_batch_stride),
                                       offsetof(P, draft_tokens_stride),
                                       offsetof(P, tokens),
                                       offsetof(P, num_accepted),
                                       offsetof(P, status),
                                       offsetof(P, log_normalizer),
                                       offsetof(P, pairs),
                                       offsetof(P, totals),
                                       offsetof(P, race),
                                       offsetof(P, arrived),
                                       offsetof(P, batch_size),
                                       offsetof(P, num_drafts),
                                       offsetof(P, vocab_size),
                                       offsetof(P, segments),
                                       offsetof(P, all_drafts),
                                       offsetof(P, blocks_per_row),
                                       offsetof(P, segments_per_warp),
                                       offsetof(P, lenience),
                                       offsetof(P, alpha),
                                       offsetof(P, beta),
                                       offsetof(P, purpose),
                                       offsetof(P, seed_kind),
                                       offsetof(P, has_draft),
                                       offsetof(P, flattened),
                                       -1};
    return layout;
}

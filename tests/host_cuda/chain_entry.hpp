// What the shared library exports: a launch by kernel name, and the layout of the argument struct. Follows chain.cu.
#pragma once

#include <stddef.h>

namespace host_cuda {

template <void (*KERNEL)(cupyspec::ChainParams)> void call(const void* params) {
    KERNEL(*(const cupyspec::ChainParams*)params);
}

struct Entry {
    const char* name;
    void (*call)(const void*);
};

constexpr Entry ENTRIES[] = {{"chain_stats", call<chain_stats>},
                             {"chain_totals", call<chain_totals>},
                             {"chain_decide", call<chain_decide>}};

}  // namespace host_cuda

// Returns a message, empty if all went well; valid until the next launch.
extern "C" const char* host_cuda_launch(const char* name, unsigned int grid, unsigned int block, const void* params,
                                        uint64_t order_seed) {
    const std::lock_guard<std::mutex> lock(host_cuda::one_launch);
    static std::string message;
    message = "no such kernel";
    for (const host_cuda::Entry& entry : host_cuda::ENTRIES) {
        if (!strcmp(entry.name, name)) {
            host_cuda::kernel = entry.call;
            host_cuda::kernel_params = params;
            message = host_cuda::run_grid(grid, block, order_seed);
        }
    }
    return message.c_str();
}

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
                                       offsetof(P, lenience),
                                       offsetof(P, alpha),
                                       offsetof(P, beta),
                                       offsetof(P, alpha_up),
                                       offsetof(P, beta_down),
                                       offsetof(P, purpose),
                                       offsetof(P, seed_kind),
                                       offsetof(P, has_draft),
                                       offsetof(P, flattened),
                                       offsetof(P, compact),
                                       offsetof(P, padding),
                                       -1};
    return layout;
}

// Random numbers: Philox4x32-10 (Salmon et al., SC 2011), the same words as the CPU path's.
//
// A number is a pure function of (row seed, step, purpose, position, draw, segment): no state, no hand-out order, so a
// token never depends on grid, block size or batch-mates.
#pragma once

namespace cupyspec {

// The top byte of counter word w: no two uses share a number.
enum Purpose {
    PURPOSE_DRAFT = 1,
    PURPOSE_TARGET = 2,
    PURPOSE_ACCEPT = 3,
    PURPOSE_RESIDUAL = 4,
    PURPOSE_BONUS = 5,
    PURPOSE_SPLIT = 255
};

struct Words {
    unsigned int w0, w1;
};

// Words 0 and 1 of ten rounds; nobody needs words 2 and 3.
__device__ inline Words philox(unsigned long long key, unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
    unsigned int key0 = (unsigned int)key, key1 = (unsigned int)(key >> 32);
#pragma unroll 1  // code that runs once is slow to fetch, not to run: short beats unrolled
    for (int round = 0; round < 10; ++round) {
        const unsigned long long product0 = 0xD2511F53ull * x, product1 = 0xCD9E8D57ull * z;
        x = (unsigned int)(product1 >> 32) ^ y ^ key0;
        y = (unsigned int)product1;
        z = (unsigned int)(product0 >> 32) ^ w ^ key1;
        w = (unsigned int)product0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {x, y};
}

// `position` holds the chain position in its low 16 bits and the draw in its high 16.
__device__ inline Words random_words(unsigned long long seed, unsigned long long step, int purpose,
                                     unsigned int position, unsigned int segment) {
    const unsigned int high = (unsigned int)(step >> 32) & 0xFFFFFFu;
    return philox(seed, segment, position, (unsigned int)step, high | ((unsigned int)purpose << 24));
}

// Row b's seed from a single one, also at B = 1.
__device__ inline unsigned long long split_seed(unsigned long long seed, unsigned int row) {
    const Words words = random_words(seed, 0, PURPOSE_SPLIT, 0, row);
    return words.w0 | ((unsigned long long)words.w1 << 32);
}

// Uniform on [0, 1): word * 2^-32 cut to 24 significant bits, hence exact. Cut, not rounded: rounding reaches 1.
__device__ inline float coin(unsigned int word) {
    const int excess = 8 - __clz((int)word);
    if (excess > 0) {
        word = (word >> excess) << excess;
    }
    return (float)word * 2.3283064365386963e-10f;
}

// Standard exponential: never 0, never infinite, small values resolved. (2r + 1) * 2^-33 is the middle of r's interval.
__device__ inline float unit_exponential(unsigned int word) {
    const float half_step = 1.1641532182693481e-10f;  // 2^-33
    if (word < 0x80000000u) {
        return -log1pf(-((float)(2 * word + 1) * half_step));
    }
    return -logf((float)(2 * (0u - word) - 1) * half_step);  // word >= 2^31, so 0 - word <= 2^31
}

}  // namespace cupyspec

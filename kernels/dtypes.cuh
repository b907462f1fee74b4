// Storage types of scores and of per-row parameters.
//
// No CUDA header is included: NVRTC then needs none, and g++ compiles the same text (tests/host_cuda).
// Scores are handled as float32 *bits* where order or validity is decided: CuPy compiles with -ftz=true, under which
// float comparisons take subnormals for zero, while integers see what is stored.
#pragma once

namespace cupyspec {

struct Half {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

constexpr unsigned int INF_BITS = 0x7F800000u;
constexpr unsigned int NEG_INF_BITS = 0xFF800000u;
constexpr unsigned int MIN_NORMAL_BITS = 0x00800000u;  // 2^-126
constexpr unsigned int TOO_LARGE_BITS = 0x5F800000u;   // 2^64: below it sums of any row stay finite
constexpr float MIN_NORMAL = 1.17549435e-38f;

__device__ inline float float_of(unsigned int bits) { return __uint_as_float(bits); }

// float32 bits of a stored value: exact for every type.
__device__ inline unsigned int widen(float value) { return __float_as_uint(value); }

__device__ inline unsigned int widen(BFloat16 value) { return (unsigned int)value.bits << 16; }

__device__ inline unsigned int widen(Half value) {
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return __float_as_uint(wide);
#else
    const unsigned int sign = (unsigned int)(value.bits & 0x8000u) << 16;
    const unsigned int magnitude = value.bits & 0x7FFFu;
    if (magnitude >= 0x7C00u) {
        return sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13);
    }
    if (magnitude >= 0x400u) {
        return sign | ((magnitude << 13) + (112u << 23));
    }
    return sign | __float_as_uint((float)magnitude * 5.9604644775390625e-8f);  // subnormal half: m * 2^-24
#endif
}

// Stored bit pattern of minus infinity, and of zero (0 in every type).
template <typename T> struct Storage;
template <> struct Storage<float> {
    static constexpr unsigned int NEG_INF = 0xFF800000u;
};
template <> struct Storage<Half> {
    static constexpr unsigned int NEG_INF = 0xFC00u;
};
template <> struct Storage<BFloat16> {
    static constexpr unsigned int NEG_INF = 0xFF80u;
};

// NaN or +inf: no logit.
__device__ inline bool bad_logit(unsigned int bits) { return (bits & 0x7FFFFFFFu) >= INF_BITS && bits != NEG_INF_BITS; }

// NaN, negative, or 2^64 and above: no probability. -0.0 is one.
__device__ inline bool bad_probability(unsigned int bits) { return bits >= TOO_LARGE_BITS && bits != 0x80000000u; }

// Below 2^-126 a probability counts as 0, on every back end.
__device__ inline float clean_probability(unsigned int bits) {
    return bits < MIN_NORMAL_BITS || bits == 0x80000000u ? 0.0f : float_of(bits);
}

// Unsigned integers in the order of the logits they stand for; -0.0 equals +0.0, subnormals keep their place.
__device__ inline unsigned int order_key(unsigned int bits) {
    if (bits == 0x80000000u) {
        bits = 0;
    }
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A parameter of each row, in the caller's own dtype; without `data` one number for all, in `value`:
// the bits of a double where load_real() reads it, else an integer.
struct PerRow {
    const void* data;
    long long stride;  // in elements
    unsigned long long value;
    int type;  // PerRowType
    int padding;
};

enum PerRowType {
    ROW_INT8,
    ROW_INT16,
    ROW_INT32,
    ROW_INT64,
    ROW_UINT8,  // and bool
    ROW_UINT16,
    ROW_UINT32,
    ROW_UINT64,
    ROW_FLOAT16,
    ROW_BFLOAT16,
    ROW_FLOAT32,
    ROW_FLOAT64
};

// Element `at` of an integer array as 64 bits: signed types sign-extend, unsigned ones zero-extend.
__device__ inline unsigned long long integer_at(const void* data, long long at, int type) {
    switch (type) {
        case ROW_INT8: return (unsigned long long)(long long)((const signed char*)data)[at];
        case ROW_INT16: return (unsigned long long)(long long)((const short*)data)[at];
        case ROW_INT32: return (unsigned long long)(long long)((const int*)data)[at];
        case ROW_UINT8: return ((const unsigned char*)data)[at];
        case ROW_UINT16: return ((const unsigned short*)data)[at];
        case ROW_UINT32: return ((const unsigned int*)data)[at];
        default: return ((const unsigned long long*)data)[at];
    }
}

__device__ inline unsigned long long load_bits(const PerRow& p, long long b) {
    return p.data ? integer_at(p.data, b * p.stride, p.type) : p.value;
}

// As a signed number; a uint64 too large for it counts as the largest.
__device__ inline long long load_integer(const PerRow& p, long long b) {
    const unsigned long long bits = load_bits(p, b);
    return p.type == ROW_UINT64 && bits >> 63 ? 0x7FFFFFFFFFFFFFFFll : (long long)bits;
}

__device__ inline double real_of(unsigned int float_bits) {
    if ((float_bits & 0x7F800000u) == 0) {  // -ftz=true would lose a subnormal, and a negative one is a fault
        const double magnitude = (double)(int)(float_bits & 0x7FFFFFu) * 1.401298464324817e-45;
        return float_bits >> 31 ? -magnitude : magnitude;
    }
    return (double)float_of(float_bits);
}

__device__ inline double load_real(const PerRow& p, long long b) {
    const long long at = b * p.stride;
    if (!p.data) {
        return __longlong_as_double((long long)p.value);
    }
    switch (p.type) {
        case ROW_FLOAT16: return real_of(widen(((const Half*)p.data)[at]));
        case ROW_BFLOAT16: return real_of(widen(((const BFloat16*)p.data)[at]));
        case ROW_FLOAT32: return real_of(((const unsigned int*)p.data)[at]);
        case ROW_FLOAT64: return ((const double*)p.data)[at];
        case ROW_UINT64: return (double)((const unsigned long long*)p.data)[at];
        default: return (double)(long long)integer_at(p.data, at, p.type);
    }
}

}  // namespace cupyspec

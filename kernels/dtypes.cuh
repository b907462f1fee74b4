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

// The larger of two 16-bit values at each half of a word; a NaN only where both are. `T{}` says which type.
template <typename T> __device__ inline unsigned int max_by_parts(unsigned int a, unsigned int b) {
    unsigned int larger = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const T left = {(unsigned short)(a >> shift)}, right = {(unsigned short)(b >> shift)};
        const float x = __uint_as_float(widen(left)), y = __uint_as_float(widen(right));
        larger |= (unsigned int)(x >= y || y != y ? left : right).bits << shift;
    }
    return larger;
}
__device__ inline unsigned int max_of_two(BFloat16, unsigned int a, unsigned int b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned int larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    return max_by_parts<BFloat16>(a, b);
#endif
}
__device__ inline unsigned int max_of_two(Half, unsigned int a, unsigned int b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned int larger;
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    return max_by_parts<Half>(a, b);
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
// the bits of a double where real_value() is asked for, else an integer.
struct PerRow {
    const void* data;
    long long stride;  // in elements
    unsigned long long value;
    int type;  // PerRowType
    int size;  // bytes of an element
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

__device__ inline unsigned long long stored_value(const PerRow& p, long long b) {
    const char* at = (const char*)p.data + b * p.stride * p.size;
    switch (p.size) {
        case 1: return *(const unsigned char*)at;
        case 2: return *(const unsigned short*)at;
        case 4: return *(const unsigned int*)at;
        default: return *(const unsigned long long*)at;
    }
}

// As 64 bits: signed types sign-extend, unsigned ones zero-extend.
__device__ inline unsigned long long integer_value(const PerRow& p, unsigned long long stored) {
    if (p.type <= ROW_INT32) {
        const int unused = 64 - 8 * p.size;
        return (unsigned long long)((long long)(stored << unused) >> unused);
    }
    return stored;
}

__device__ inline double real_of(unsigned int float_bits) {
    if ((float_bits & 0x7F800000u) == 0) {  // -ftz=true would lose a subnormal, and a negative one is a fault
        const double magnitude = (double)(int)(float_bits & 0x7FFFFFu) * 1.401298464324817e-45;
        return float_bits >> 31 ? -magnitude : magnitude;
    }
    return (double)float_of(float_bits);
}

__device__ inline double real_value(const PerRow& p, unsigned long long stored) {
    switch (p.type) {
        case ROW_FLOAT16: return real_of(widen(Half{(unsigned short)stored}));
        case ROW_BFLOAT16: return real_of(widen(BFloat16{(unsigned short)stored}));
        case ROW_FLOAT32: return real_of((unsigned int)stored);
        case ROW_FLOAT64: return __longlong_as_double((long long)stored);
        case ROW_UINT64: return (double)stored;
        default: return (double)(long long)integer_value(p, stored);
    }
}

}  // namespace cupyspec

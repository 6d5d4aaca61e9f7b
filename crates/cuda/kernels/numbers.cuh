// Numbers, loads, stores, reductions and random numbers that all kernels share.
//
// A program is compiled with -DELEMENT=<type> and, where a kernel has a second type, -DOTHER=<type>; each is f32, bf16 or
// f16. Kernels compute in f32 and round once, when they store. The compiler contracts nothing (-fmad=false): where a
// multiply-add is meant, it is written, so that the arithmetic is that of the processor's kernels.
//
// Three rules make results deterministic and independent of the grid: an element is computed by one thread or one block,
// sums over several go through partial sums of pieces that shapes alone determine, and floats are never added atomically.
#pragma once

typedef float f32;
typedef double f64;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

#define WARP 32
#define ALL_LANES 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)

// ---- Conversions, rounded to nearest even.

__device__ __forceinline__ f32 to_f32(f32 x) { return x; }
__device__ __forceinline__ f32 to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ f32 to_f32(f16 x) {
    f32 y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <class T> __device__ __forceinline__ T from_f32(f32 x);
template <> __device__ __forceinline__ f32 from_f32<f32>(f32 x) { return x; }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(f32 x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 from_f32<f16>(f32 x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Two numbers in one word, `low` in the lower half.
template <class T> __device__ __forceinline__ u32 pack(f32 low, f32 high) {
    return (u32)from_f32<T>(low).bits | (u32)from_f32<T>(high).bits << 16;
}

// ---- Groups of four elements, moved at once where they are aligned and whole.

template <class T> struct alignas(4 * sizeof(T)) Four {
    T x[4];
};

template <class T> __device__ __forceinline__ bool is_aligned(const T *x) { return (u64)x % sizeof(Four<T>) == 0; }

// Elements i .. i + 4 of n; those beyond the end are 0.
template <class T> __device__ __forceinline__ void load4(const T *from, u64 i, u64 n, bool aligned, f32 (&x)[4]) {
    if (aligned && i + 4 <= n) {
        const Four<T> four = *(const Four<T> *)(from + i);
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = to_f32(four.x[j]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = i + j < n ? to_f32(from[i + j]) : 0.0f;
    }
}

template <class T> __device__ __forceinline__ void store4(T *to, u64 i, u64 n, bool aligned, const f32 (&x)[4]) {
    if (aligned && i + 4 <= n) {
        Four<T> four;
#pragma unroll
        for (int j = 0; j < 4; j++) four.x[j] = from_f32<T>(x[j]);
        *(Four<T> *)(to + i) = four;
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j < n) to[i + j] = from_f32<T>(x[j]);
    }
}

// Elements of 16 bytes, the most that a thread moves at once.
template <class T> struct alignas(16) Chunk {
    static constexpr int COUNT = 16 / (int)sizeof(T);
    T x[COUNT];
};

template <class T> __device__ __forceinline__ bool has_chunks(const T *x) { return (u64)x % 16 == 0; }

// ---- Neighbouring columns 2c and 2c + 1 of the rows of a matrix, which one thread computes.

template <class T> struct alignas(2 * sizeof(T)) Two {
    T x[2];
};

// Whether both columns can be moved at once, in every row.
template <class T> __device__ __forceinline__ bool has_pairs(const T *x, u64 columns) {
    return (u64)x % sizeof(Two<T>) == 0 && columns % 2 == 0;
}

// Without `second`, the second column is beyond the row: it is 0, and is not stored.
template <bool PAIRS, class T> __device__ __forceinline__ Two<T> load2(const T *from, bool second) {
    if (PAIRS) return *(const Two<T> *)from;
    return {{from[0], second ? from[1] : from_f32<T>(0.0f)}};
}

template <bool PAIRS, class T> __device__ __forceinline__ void store2(T *to, bool second, f32 left, f32 right) {
    const Two<T> two = {{from_f32<T>(left), from_f32<T>(right)}};
    if (PAIRS) {
        *(Two<T> *)to = two;
    } else {
        to[0] = two.x[0];
        if (second) to[1] = two.x[1];
    }
}

// The threads of a grid walk over groups of four elements of n.
#define FOR_FOURS(i, n)                                                                                                \
    for (u64 i = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x); i < (n); i += 4 * (u64)gridDim.x * blockDim.x)

// The warps of a grid walk over n rows.
#define FOR_ROWS(row, n)                                                                                               \
    for (u64 row = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP; row < (n);                                     \
         row += (u64)gridDim.x * blockDim.x / WARP)

__device__ __forceinline__ int lane_index() { return threadIdx.x % WARP; }

// ---- Reductions over a warp, along a fixed tree; every lane gets the result.

__device__ __forceinline__ f32 warp_sum(f32 x) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

__device__ __forceinline__ f32 warp_max(f32 x) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
    return x;
}

// ---- Powers.

// x * 2^whole, in two factors, because 2^128 alone overflows.
__device__ __forceinline__ f32 scale_by_power(f32 x, int whole) {
    const int half = whole >> 1;
    return x * __int_as_float((half + 127) << 23) * __int_as_float((whole - half + 127) << 23);
}

// Adding 1.5 * 2^23 rounds to a whole number, which is then in the lower bits of the sum, too.
#define ROUND 12582912.0f

__device__ __forceinline__ int rounded_bits(f32 sum) { return __float_as_int(sum) - __float_as_int(ROUND); }

// e^x, by the processor's formula (Cephes): 0 below -87.3, infinite above 88.7; NaN stays NaN.
__device__ __forceinline__ f32 exponential(f32 x) {
    f32 clamped = 89.0f < x ? 89.0f : x;
    clamped = -88.0f > clamped ? -88.0f : clamped;
    const f32 sum = fmaf(clamped, 1.44269504f, ROUND), n = sum - ROUND;
    f32 r = fmaf(n, -0.6933594f, clamped);
    r = fmaf(n, 2.1219444e-4f, r);
    f32 p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3982e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 0.5f);
    const f32 y = fmaf(p, r * r, r) + 1.0f;
    const f32 scaled = scale_by_power(y, max(-126, rounded_bits(sum)));
    return x < -87.33654f ? 0.0f : scaled;
}

// 2^x, as the card approximates it: 2 units in the last place off; subnormal results are 0.
__device__ __forceinline__ f32 fast_power_of_two(f32 x) {
    f32 y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- Quotients.

// x / d for d from 1 to infinite, rounded to nearest; above 2^125, where only the last bits may differ, or x * 2^-126 becomes 0.
// The compiler's division branches for subnormal numbers, so that a thread would compute one element after the other.
__device__ __forceinline__ f32 quotient(f32 x, f32 d) {
    f32 r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    const f32 rough = x * r;
    const f32 inverse = fmaf(fmaf(-d, r, 1.0f), r, r);
    const f32 q = x * inverse;
    const f32 close = fmaf(fmaf(-d, q, x), inverse, q);
    return d < 0x1p125f && fabsf(q) < INFINITE ? close : rough;
}

// ---- GELU and its derivative, by the processor's formulas (crates/cpu/src/gelu.rs says why they are right).

#define GELU_TANH 0
#define GELU_ERF 1

// 2^v for v in [-126, 128].
__device__ __forceinline__ f32 gelu_power(f32 v) {
    const f32 sum = v + ROUND, whole = sum - ROUND;
    const f32 fraction = v - whole;
    f32 p = 1.5353362e-4f;
    p = fmaf(p, fraction, 1.3398874e-3f);
    p = fmaf(p, fraction, 9.618437e-3f);
    p = fmaf(p, fraction, 5.5503325e-2f);
    p = fmaf(p, fraction, 0.24022648f);
    p = fmaf(p, fraction, 0.6931472f);
    p = fmaf(p, fraction, 1.0f);
    return scale_by_power(p, rounded_bits(sum));
}

#define GELU_SLOPE -1.5957692f
#define GELU_SLOPE2 -2.3022082f
#define GELU_CUBE 0.044715f

__device__ __forceinline__ f32 gelu_exponent(f32 x) { return x * fmaf(x * x, GELU_CUBE * GELU_SLOPE2, GELU_SLOPE2); }

struct Tail {
    f32 a, e, m;
};

// a = |x|, at most 14, with exp(-a^2/2) and the quotient M(a) of the normal distribution's upper tail.
__device__ __forceinline__ Tail gelu_tail(f32 x) {
    const f32 size = x > 0.0f - x ? x : 0.0f - x;
    const f32 a = 14.0f < size ? 14.0f : size;
    f32 above = 4.077616e-3f;
    above = fmaf(above, a, 4.0372584e-2f);
    above = fmaf(above, a, 0.1824619f);
    above = fmaf(above, a, 0.43725097f);
    above = fmaf(above, a, 0.5f);
    f32 below = 1.0220939e-2f;
    below = fmaf(below, a, 0.10120587f);
    below = fmaf(below, a, 0.46742928f);
    below = fmaf(below, a, 1.199291f);
    below = fmaf(below, a, 1.6723869f);
    below = fmaf(below, a, 1.0f);
    return {a, exponential(-0.5f * (a * a)), quotient(above, below)};
}

__device__ __forceinline__ f32 gelu_value(f32 x, int form) {
    if (form == GELU_ERF) {
        const Tail t = gelu_tail(x);
        return (0.0f > x ? 0.0f : x) - t.a * (t.e * t.m);
    }
    f32 v = gelu_exponent(x);
    v = 128.0f < v ? 128.0f : v;
    v = -126.0f > v ? -126.0f : v;
    return quotient(x, 1.0f + gelu_power(v));
}

__device__ __forceinline__ f32 gelu_slope(f32 x, int form) {
    if (form == GELU_ERF) {
        const Tail t = gelu_tail(x);
        const f32 d = t.e * (t.a * 0.3989423f - t.m);
        return x < 0.0f ? -d : 1.0f + d;
    }
    x = 9.5f < x ? 9.5f : x;
    x = -9.5f > x ? -9.5f : x;
    const f32 e = gelu_power(gelu_exponent(x));
    const f32 s = quotient(1.0f, 1.0f + e);
    const f32 slope = fmaf(x * x, -3.0f * GELU_CUBE * GELU_SLOPE, -GELU_SLOPE);
    return s * fmaf(e * s, x * slope, 1.0f);
}

// ---- Random numbers by counter: SplitMix64's finaliser over key and counter, as on the processor.

#define GOLDEN 0x9e3779b97f4a7c15ull

__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Which elements a dropout keeps. `kept_min`: smallest random number whose element is kept; `factor`: 1 / (1 - p).
struct DropoutMask {
    u64 key;
    u64 kept_min;
    f32 factor;
};

// 64 bits are the numbers of an even counter (lower half) and of the odd one after it.
__device__ __forceinline__ f32 dropout_factor(const DropoutMask &mask, u64 counter) {
    const u64 bits = mix(mask.key + counter / 2 * GOLDEN);
    const u64 number = counter % 2 == 0 ? bits & 0xffffffffu : bits >> 32;
    return number >= mask.kept_min ? mask.factor : 0.0f;
}

// The factors of four neighbouring counters.
__device__ __forceinline__ void dropout_factors(const DropoutMask &mask, u64 counter, f32 (&factors)[4]) {
    if (counter % 2 != 0) {
#pragma unroll
        for (int j = 0; j < 4; j++) factors[j] = dropout_factor(mask, counter + j);
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const u64 bits = mix(mask.key + (counter + j) / 2 * GOLDEN);
        factors[j] = (bits & 0xffffffffu) >= mask.kept_min ? mask.factor : 0.0f;
        factors[j + 1] = bits >> 32 >= mask.kept_min ? mask.factor : 0.0f;
    }
}

// ---- Mistakes of the caller that only the data shows, such as a token outside of the vocabulary.

// `fault` is one word of memory: the number of the call, and the value that was found; 0 for none. The first one is kept.
__device__ __forceinline__ void report_fault(u64 *fault, u32 call, u32 value) {
    atomicCAS(fault, 0ull, (u64)call << 32 | value);
}

// The elementwise operations of f64, which only sums and losses use.
#include "numbers.cuh"

#define FOR_EACH(i, n)                                                                                                 \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)

// x = value.
extern "C" __global__ void fill_f64(f64 *x, u64 n, f32 value) {
    FOR_EACH(i, n) x[i] = value;
}

// into += from.
extern "C" __global__ void add_f64(const f64 *from, f64 *into, u64 n) {
    FOR_EACH(i, n) into[i] += from[i];
}

// out = x * scale, rounded once to f32. One thread.
extern "C" __global__ void scaled(const f64 *x, f32 scale, f32 *out) { *out = (f32)(*x * (f64)scale); }

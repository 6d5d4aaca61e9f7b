// fill, copies of columns, convert, add: each element by itself, bound by memory.
#include "numbers.cuh"

// x = value, rounded.
extern "C" __global__ void fill(ELEMENT *x, u64 n, f32 value) {
    const bool aligned = is_aligned(x);
    const f32 values[4] = {value, value, value, value};
    FOR_FOURS(i, n) store4(x, i, n, aligned, values);
}

// to = from, rounded.
extern "C" __global__ void convert(const ELEMENT *from, OTHER *to, u64 n) {
    const bool from_aligned = is_aligned(from), to_aligned = is_aligned(to);
    FOR_FOURS(i, n) {
        f32 x[4];
        load4(from, i, n, from_aligned, x);
        store4(to, i, n, to_aligned, x);
    }
}

// into += from, rounded once.
extern "C" __global__ void add(const ELEMENT *from, OTHER *into, u64 n) {
    const bool from_aligned = is_aligned(from), into_aligned = is_aligned(into);
    FOR_FOURS(i, n) {
        f32 x[4], y[4];
        load4(from, i, n, from_aligned, x);
        load4((const OTHER *)into, i, n, into_aligned, y);
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] += x[j];
        store4(into, i, n, into_aligned, y);
    }
}

// x *= factor, which is rounded to the type of x before.
extern "C" __global__ void multiply(ELEMENT *x, u64 n, f32 factor) {
    const f32 rounded = to_f32(from_f32<ELEMENT>(factor));
    const bool aligned = is_aligned(x);
    for (u64 i = 4 * (blockIdx.x * (u64)blockDim.x + threadIdx.x); i < n; i += 4 * gridDim.x * (u64)blockDim.x) {
        f32 y[4];
        load4((const ELEMENT *)x, i, n, aligned, y);
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] *= rounded;
        store4(x, i, n, aligned, y);
    }
}

// Row by row, `columns` elements of rows that are `from_row` and `to_row` apart; n = rows * columns.
extern "C" __global__ void copy_columns(const ELEMENT *from, u64 from_row, ELEMENT *to, u64 to_row, u64 columns, u64 n) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (u64)blockDim.x) {
        const u64 row = i / columns, column = i % columns;
        to[row * to_row + column] = from[row * from_row + column];
    }
}

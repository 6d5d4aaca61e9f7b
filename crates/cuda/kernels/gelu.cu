// GELU, forward and backward, in both forms.
#include "numbers.cuh"

// y = gelu(x).
extern "C" __global__ void gelu(const ELEMENT *x, ELEMENT *y, u64 n, int form) {
    const bool x_aligned = is_aligned(x), y_aligned = is_aligned(y);
    FOR_FOURS(i, n) {
        f32 values[4];
        load4(x, i, n, x_aligned, values);
#pragma unroll
        for (int j = 0; j < 4; j++) values[j] = gelu_value(values[j], form);
        store4(y, i, n, y_aligned, values);
    }
}

// dy becomes dx = dy * gelu'(x), in place; partial[b] = the sums over block b of rows of dx, before it is rounded.
// x, dy `[rows, columns]`, partial `[blocks, columns]`. Grid: (columns / threads, blocks of `grain` rows).
extern "C" __global__ void gelu_backward(const ELEMENT *x, ELEMENT *dy, f32 *partial, u64 rows, u64 columns, u64 grain,
                                         int form) {
    const u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const u64 first = blockIdx.y * grain, end = first + grain < rows ? first + grain : rows;
    f32 sum = 0.0f;
#pragma unroll 4
    for (u64 row = first; row < end; row++) {
        const u64 at = row * columns + column;
        const f32 dx = to_f32(dy[at]) * gelu_slope(to_f32(x[at]), form);
        dy[at] = from_f32<ELEMENT>(dx);
        sum += dx;
    }
    partial[blockIdx.y * columns + column] = sum;
}

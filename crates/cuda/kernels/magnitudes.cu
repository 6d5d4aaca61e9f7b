// Magnitudes of the outputs of a linear layer (DoRA): norms of weights with what an adapter adds, and columns over them.
//
// The sums over rows are those of the processor: blocks of rows by shape alone, each in f32 from zero, whose lines `bias.cu` adds.
#include "numbers.cuh"

// squares[o] = the sum over i of (w[o, i] + scale * the sum over k of b[o, k] a[k, i])^2. A warp computes an output; w[o, i] lies at
// o * of_output + i * of_input.
extern "C" __global__ void weight_squares(const ELEMENT *w, const ELEMENT *a, const ELEMENT *b, f32 *squares, u64 inputs, u64 outputs,
                                          u64 rank, u64 of_output, u64 of_input, f32 scale) {
    FOR_ROWS(o, outputs) {
        f32 sum = 0.0f;
        for (u64 i = lane_index(); i < inputs; i += WARP) {
            f32 value = to_f32(w[o * of_output + i * of_input]);
            for (u64 k = 0; k < rank; k++) value = fmaf(scale * to_f32(b[o * rank + k]), to_f32(a[k * inputs + i]), value);
            sum = fmaf(value, value, sum);
        }
        sum = warp_sum(sum);
        if (lane_index() == 0) squares[o] = sum;
    }
}

// `of` over the root of a sum of squares; 0 where that is 0.
__device__ __forceinline__ f32 over_norm(f32 of, f32 square) { return square > 0.0f ? of / sqrtf(square) : 0.0f; }

// y = (x - bias) * magnitude / sqrt(square) + bias in `columns` columns of rows that lie `stride` apart, from the first of which x and y
// point; n = rows * columns.
extern "C" __global__ void rescale(const ELEMENT *x, const ELEMENT *magnitudes, const f32 *squares, const ELEMENT *bias, ELEMENT *y,
                                   u64 stride, u64 columns, u64 n) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (u64)blockDim.x) {
        const u64 column = i % columns, at = i / columns * stride + column;
        const f32 shift = bias ? to_f32(bias[column]) : 0.0f;
        const f32 factor = over_norm(to_f32(magnitudes[column]), squares[column]);
        y[at] = from_f32<ELEMENT>((to_f32(x[at]) - shift) * factor + shift);
    }
}

// partial[b] = the sums over block b of rows of dy * (x - bias) / sqrt(square). Grid: (columns / 2 / threads, blocks of `grain` rows).
extern "C" __global__ void rescale_sums(const ELEMENT *x, const ELEMENT *dy, const f32 *squares, const ELEMENT *bias, f32 *partial,
                                        u64 rows, u64 columns, u64 stride, u64 grain) {
    const u64 first = 2 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    const u64 begin = blockIdx.y * grain, end = begin + grain < rows ? begin + grain : rows;
    for (u64 column = first; column < first + 2 && column < columns; column++) {
        const f32 shift = bias ? to_f32(bias[column]) : 0.0f, factor = over_norm(1.0f, squares[column]);
        f32 sum = 0.0f;
        for (u64 row = begin; row < end; row++) {
            const u64 at = row * stride + column;
            sum += to_f32(dy[at]) * (to_f32(x[at]) - shift) * factor;
        }
        partial[blockIdx.y * columns + column] = sum;
    }
}

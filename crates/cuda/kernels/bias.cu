// Sums over rows: the gradient of a bias, and the last step of every other sum over rows.
//
// Rows are cut into blocks by shape alone; each block is summed in f32 from zero, row after row, into its line of a table of
// partial sums, and the lines are added in order: the sums of the processor, addition by addition.
#include "numbers.cuh"

// partial[b] = the sums over block b of rows of dy `[rows, columns]`, which lie `stride` elements apart. Grid: (columns / threads, blocks of `grain` rows).
extern "C" __global__ void bias_sums(const ELEMENT *dy, f32 *partial, u64 rows, u64 columns, u64 stride, u64 grain) {
    const u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const u64 first = blockIdx.y * grain, end = first + grain < rows ? first + grain : rows;
    f32 sum = 0.0f;
#pragma unroll 8
    for (u64 row = first; row < end; row++) sum += to_f32(dy[row * stride + column]);
    partial[blockIdx.y * columns + column] = sum;
}

// out (+)= ((line 0 + line 1) + line 2) + .. of partial; lines lie `stride` elements apart.
extern "C" __global__ void add_blocks(const f32 *partial, u64 blocks, u64 stride, u64 columns, OTHER *out,
                                      int accumulate) {
    const u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    f32 sum = 0.0f;
    for (u64 block = 0; block < blocks; block++) sum += partial[block * stride + column];
    out[column] = from_f32<OTHER>(accumulate ? to_f32(out[column]) + sum : sum);
}

// Sums over rows: the gradient of a bias, and the last step of every other sum over rows.
//
// Rows are cut into blocks by shape alone; each block is summed in f32 from zero, row after row, into its line of a table of
// partial sums, and the lines are added in order: the sums of the processor, addition by addition.
#include "numbers.cuh"

// Rows of which a thread loads all elements before it adds the first.
#define ROWS_AT_ONCE 32

template <bool PAIRS, int ROWS>
__device__ __forceinline__ void add_rows(const ELEMENT *dy, u64 stride, bool second, f32 (&sums)[2]) {
    Two<ELEMENT> x[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) x[r] = load2<PAIRS>(dy + r * stride, second);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int j = 0; j < 2; j++) sums[j] += to_f32(x[r].x[j]);
}

template <bool PAIRS> __device__ __forceinline__ void sum_rows(const ELEMENT *dy, f32 *to, u64 rows, u64 stride, bool second) {
    f32 sums[2] = {0.0f, 0.0f};
    u64 row = 0;
    for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE)
        add_rows<PAIRS, ROWS_AT_ONCE>(dy + row * stride, stride, second, sums);
    for (; row < rows; row++) add_rows<PAIRS, 1>(dy + row * stride, stride, second, sums);
    store2<PAIRS>(to, second, sums[0], sums[1]);
}

// partial[b] = the sums over block b of rows of dy `[rows, columns]`, which lie `stride` elements apart. Grid: (columns / 2 /
// threads, blocks of `grain` rows).
extern "C" __global__ void bias_sums(const ELEMENT *dy, f32 *partial, u64 rows, u64 columns, u64 stride, u64 grain) {
    const u64 column = 2 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= columns) return;
    const u64 first = blockIdx.y * grain, some = first + grain < rows ? grain : rows - first;
    const ELEMENT *from = dy + first * stride + column;
    f32 *to = partial + blockIdx.y * columns + column;
    if (has_pairs(dy, stride) && has_pairs(partial, columns)) sum_rows<true>(from, to, some, stride, true);
    else sum_rows<false>(from, to, some, stride, column + 1 < columns);
}

// Lines that a thread loads before it adds the first.
#define LINES_AT_ONCE 64

// For each k: out[k] (+)= ((line 0 + line 1) + line 2) + .. of partial `[blocks, lines, columns]`, of lines k. What is null is
// not wanted. Grid: (columns / threads, lines).
extern "C" __global__ void add_blocks(const f32 *partial, u64 blocks, u64 lines, u64 columns, OTHER *out, OTHER *second,
                                      int accumulate) {
    const u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const f32 *from = partial + blockIdx.y * columns + column;
    OTHER *of_line = blockIdx.y == 0 ? out : second;
    if (!of_line) return;
    OTHER *to = of_line + column;
    const f32 old = accumulate ? to_f32(*to) : 0.0f;
    f32 sum = 0.0f;
    for (u64 block = 0; block < blocks; block += LINES_AT_ONCE) {
        f32 x[LINES_AT_ONCE];
#pragma unroll
        for (int b = 0; b < LINES_AT_ONCE; b++)
            if (block + b < blocks) x[b] = from[(block + b) * lines * columns];
#pragma unroll
        for (int b = 0; b < LINES_AT_ONCE; b++)
            if (block + b < blocks) sum += x[b];
    }
    *to = from_f32<OTHER>(accumulate ? old + sum : sum);
}

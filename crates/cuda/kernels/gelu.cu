// GELU, forward and backward, in both forms.
#include "numbers.cuh"

template <int FORM> __device__ __forceinline__ void gelu_of(const ELEMENT *x, ELEMENT *y, u64 n) {
    using Elements = Chunk<ELEMENT>;
    const bool aligned = has_chunks(x) && has_chunks(y);
    const u64 step = (u64)gridDim.x * blockDim.x * Elements::COUNT;
    for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * Elements::COUNT; i < n; i += step) {
        if (aligned && i + Elements::COUNT <= n) {
            Elements chunk = *(const Elements *)(x + i);
#pragma unroll
            for (int j = 0; j < Elements::COUNT; j++)
                chunk.x[j] = from_f32<ELEMENT>(gelu_value(to_f32(chunk.x[j]), FORM));
            *(Elements *)(y + i) = chunk;
        } else {
            for (int j = 0; j < Elements::COUNT && i + j < n; j++)
                y[i + j] = from_f32<ELEMENT>(gelu_value(to_f32(x[i + j]), FORM));
        }
    }
}

// y = gelu(x).
extern "C" __global__ void gelu(const ELEMENT *x, ELEMENT *y, u64 n, int form) {
    if (form == GELU_ERF) gelu_of<GELU_ERF>(x, y, n);
    else gelu_of<GELU_TANH>(x, y, n);
}

// Rows of which a thread loads all elements before it stores the first.
#define ROWS_AT_ONCE 8

template <bool PAIRS, int FORM, int ROWS>
__device__ __forceinline__ void differentiate_rows(const ELEMENT *x, ELEMENT *dy, u64 columns, bool second, f32 (&sums)[2]) {
    Two<ELEMENT> xs[ROWS], dys[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        xs[r] = load2<PAIRS>(x + r * columns, second);
        dys[r] = load2<PAIRS>((const ELEMENT *)dy + r * columns, second);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        f32 dx[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            dx[j] = to_f32(dys[r].x[j]) * gelu_slope(to_f32(xs[r].x[j]), FORM);
            sums[j] += dx[j];
        }
        store2<PAIRS>(dy + r * columns, second, dx[0], dx[1]);
    }
}

template <bool PAIRS, int FORM>
__device__ __forceinline__ void differentiate(const ELEMENT *x, ELEMENT *dy, f32 *to, u64 rows, u64 columns, bool second) {
    f32 sums[2] = {0.0f, 0.0f};
    u64 row = 0;
    for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE)
        differentiate_rows<PAIRS, FORM, ROWS_AT_ONCE>(x + row * columns, dy + row * columns, columns, second, sums);
    for (; row < rows; row++)
        differentiate_rows<PAIRS, FORM, 1>(x + row * columns, dy + row * columns, columns, second, sums);
    store2<PAIRS>(to, second, sums[0], sums[1]);
}

// dy becomes dx = dy * gelu'(x), in place; partial[b] = the sums over block b of rows of dx, before it is rounded.
// x, dy `[rows, columns]`, partial `[blocks, columns]`. Grid: (columns / 2 / threads, blocks of `grain` rows).
extern "C" __global__ void gelu_backward(const ELEMENT *x, ELEMENT *dy, f32 *partial, u64 rows, u64 columns, u64 grain,
                                         int form) {
    const u64 column = 2 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= columns) return;
    const u64 first = blockIdx.y * grain, some = first + grain < rows ? grain : rows - first;
    const u64 at = first * columns + column;
    f32 *to = partial + blockIdx.y * columns + column;
    const bool second = column + 1 < columns;
    const bool pairs = has_pairs(x, columns) && has_pairs(dy, columns) && has_pairs(partial, columns);
    if (form == GELU_ERF) {
        if (pairs) differentiate<true, GELU_ERF>(x + at, dy + at, to, some, columns, true);
        else differentiate<false, GELU_ERF>(x + at, dy + at, to, some, columns, second);
    } else {
        if (pairs) differentiate<true, GELU_TANH>(x + at, dy + at, to, some, columns, true);
        else differentiate<false, GELU_TANH>(x + at, dy + at, to, some, columns, second);
    }
}

// Gated activations: y = f(gate) * up, where a row is first all gates and then what they let through; forward and backward.
#include "numbers.cuh"

#define GATE_SILU 2

// x / (1 + e^-x).
__device__ __forceinline__ f32 silu_value(f32 x) { return quotient(x, 1.0f + exponential(0.0f - x)); }

// Its derivative, by the processor's formula (crates/cpu/src/gated.rs says why it is right).
__device__ __forceinline__ f32 silu_slope(f32 x) {
    x = 87.0f < x ? 87.0f : x;
    x = -87.0f > x ? -87.0f : x;
    const f32 e = exponential(0.0f - x);
    const f32 s = quotient(1.0f, 1.0f + e);
    return s * fmaf(e * s, x, 1.0f);
}

template <int GATE> __device__ __forceinline__ f32 gate_value(f32 x) {
    return GATE == GATE_SILU ? silu_value(x) : gelu_value(x, GATE);
}

template <int GATE> __device__ __forceinline__ f32 gate_slope(f32 x) {
    return GATE == GATE_SILU ? silu_slope(x) : gelu_slope(x, GATE);
}

// Elements of a row are computed in groups of neighbours, of which each moves 16 bytes where that is possible in every row.
using Elements = Chunk<ELEMENT>;

__device__ __forceinline__ bool has_rows_of_chunks(const ELEMENT *x, const ELEMENT *y, u64 columns) {
    return has_chunks(x) && has_chunks(y) && columns % Elements::COUNT == 0;
}

template <int GATE> __device__ __forceinline__ void forward(const ELEMENT *x, ELEMENT *y, u64 rows, u64 columns) {
    const bool aligned = has_rows_of_chunks(x, y, columns);
    const u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * Elements::COUNT;
    if (i >= columns) return;
    for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
        const ELEMENT *gate = x + row * 2 * columns + i, *up = gate + columns;
        ELEMENT *to = y + row * columns + i;
        if (aligned) {
            Elements g = *(const Elements *)gate;
            const Elements u = *(const Elements *)up;
#pragma unroll
            for (int j = 0; j < Elements::COUNT; j++)
                g.x[j] = from_f32<ELEMENT>(gate_value<GATE>(to_f32(g.x[j])) * to_f32(u.x[j]));
            *(Elements *)to = g;
        } else {
            for (int j = 0; j < Elements::COUNT && i + j < columns; j++)
                to[j] = from_f32<ELEMENT>(gate_value<GATE>(to_f32(gate[j])) * to_f32(up[j]));
        }
    }
}

// y = f(gate) * up. x `[rows, 2 columns]`, y `[rows, columns]`. Grid: (columns / elements of a thread / threads, rows, or fewer).
extern "C" __global__ void gated(const ELEMENT *x, ELEMENT *y, u64 rows, u64 columns, int gate) {
    if (gate == GATE_SILU) forward<GATE_SILU>(x, y, rows, columns);
    else if (gate == GELU_ERF) forward<GELU_ERF>(x, y, rows, columns);
    else forward<GELU_TANH>(x, y, rows, columns);
}

template <int GATE> __device__ __forceinline__ void differentiate(ELEMENT &gate, ELEMENT &up, ELEMENT dy) {
    const f32 g = to_f32(gate), d = to_f32(dy);
    gate = from_f32<ELEMENT>(d * to_f32(up) * gate_slope<GATE>(g));
    up = from_f32<ELEMENT>(d * gate_value<GATE>(g));
}

template <int GATE> __device__ __forceinline__ void backward(ELEMENT *x, const ELEMENT *dy, u64 rows, u64 columns) {
    const bool aligned = has_rows_of_chunks(x, dy, columns);
    const u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * Elements::COUNT;
    if (i >= columns) return;
    for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
        ELEMENT *gate = x + row * 2 * columns + i, *up = gate + columns;
        const ELEMENT *from = dy + row * columns + i;
        if (aligned) {
            Elements g = *(const Elements *)gate, u = *(const Elements *)up;
            const Elements d = *(const Elements *)from;
#pragma unroll
            for (int j = 0; j < Elements::COUNT; j++) differentiate<GATE>(g.x[j], u.x[j], d.x[j]);
            *(Elements *)gate = g;
            *(Elements *)up = u;
        } else {
            for (int j = 0; j < Elements::COUNT && i + j < columns; j++) differentiate<GATE>(gate[j], up[j], from[j]);
        }
    }
}

// x becomes dx, in place: dy * up * f'(gate), and behind it dy * f(gate). Shapes and grid as above.
extern "C" __global__ void gated_backward(ELEMENT *x, const ELEMENT *dy, u64 rows, u64 columns, int gate) {
    if (gate == GATE_SILU) backward<GATE_SILU>(x, dy, rows, columns);
    else if (gate == GELU_ERF) backward<GELU_ERF>(x, dy, rows, columns);
    else backward<GELU_TANH>(x, dy, rows, columns);
}

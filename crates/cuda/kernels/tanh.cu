// The hyperbolic tangent, forward and backward: each element by itself, bound by memory.
#include "numbers.cuh"

// y = tanh(x).
extern "C" __global__ void tanh_forward(const ELEMENT *x, ELEMENT *y, u64 n) {
    const bool x_aligned = is_aligned(x), y_aligned = is_aligned(y);
    FOR_FOURS(i, n) {
        f32 values[4];
        load4(x, i, n, x_aligned, values);
#pragma unroll
        for (int j = 0; j < 4; j++) values[j] = tanhf(values[j]);
        store4(y, i, n, y_aligned, values);
    }
}

// dy becomes dx = dy * (1 - y²), in place.
extern "C" __global__ void tanh_backward(const ELEMENT *y, ELEMENT *dy, u64 n) {
    const bool y_aligned = is_aligned(y), dy_aligned = is_aligned(dy);
    FOR_FOURS(i, n) {
        f32 values[4], slopes[4];
        load4(y, i, n, y_aligned, values);
        load4((const ELEMENT *)dy, i, n, dy_aligned, slopes);
#pragma unroll
        for (int j = 0; j < 4; j++) slopes[j] *= 1.0f - values[j] * values[j];
        store4(dy, i, n, dy_aligned, slopes);
    }
}

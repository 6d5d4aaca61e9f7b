// Dropout, with an optional residual. The mask is made where it is needed and never stored.
#include "numbers.cuh"

// to = from * factor (+ residual), where element i has the counter `first + i`; where rows of `columns` elements are parts of rows of
// `row`, element c of row r has `first + r * row + c`.
extern "C" __global__ void dropout(const ELEMENT *from, const ELEMENT *residual, ELEMENT *to, u64 n, u64 key,
                                   u64 kept_min, f32 factor, u64 first, u64 columns, u64 row) {
    const DropoutMask mask = {key, kept_min, factor};
    const bool from_aligned = is_aligned(from), to_aligned = is_aligned(to), residual_aligned = is_aligned(residual);
    FOR_FOURS(i, n) {
        f32 x[4], factors[4];
        load4(from, i, n, from_aligned, x);
        if (columns == row) dropout_factors(mask, first + i, factors);
        else {
#pragma unroll
            for (int j = 0; j < 4; j++)
                factors[j] = dropout_factor(mask, first + (i + j) / columns * row + (i + j) % columns);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] *= factors[j];
        if (residual != nullptr) {
            f32 more[4];
            load4(residual, i, n, residual_aligned, more);
#pragma unroll
            for (int j = 0; j < 4; j++) x[j] += more[j];
        }
        store4(to, i, n, to_aligned, x);
    }
}

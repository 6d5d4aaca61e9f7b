// Layer norm over the last dimension, forward and backward: a warp computes a row.
#include "numbers.cuh"

// y = (x - mean) * rstd * gamma + beta; x, y `[rows, hidden]`, mean and rstd `[rows]` f32.
extern "C" __global__ void layer_norm(const ELEMENT *x, const ELEMENT *gamma, const ELEMENT *beta, ELEMENT *y, f32 *mean,
                                      f32 *rstd, u64 rows, u64 hidden, f32 eps) {
    const int lane = lane_index();
    const bool gamma_aligned = is_aligned(gamma), beta_aligned = is_aligned(beta);
    FOR_ROWS(row, rows) {
        const ELEMENT *x_row = x + row * hidden;
        ELEMENT *y_row = y + row * hidden;
        const bool x_aligned = is_aligned(x_row), y_aligned = is_aligned(y_row);
        f32 sum = 0.0f;
        for (u64 i = 4 * lane; i < hidden; i += 4 * WARP) {
            f32 v[4];
            load4(x_row, i, hidden, x_aligned, v);
            sum += (v[0] + v[1]) + (v[2] + v[3]);
        }
        const f32 m = warp_sum(sum) / (f32)hidden;
        f32 squares = 0.0f;
        for (u64 i = 4 * lane; i < hidden; i += 4 * WARP) {
            f32 v[4];
            load4(x_row, i, hidden, x_aligned, v);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const f32 d = i + j < hidden ? v[j] - m : 0.0f;
                squares = fmaf(d, d, squares);
            }
        }
        const f32 r = 1.0f / sqrtf(warp_sum(squares) / (f32)hidden + eps);
        for (u64 i = 4 * lane; i < hidden; i += 4 * WARP) {
            f32 v[4], g[4], b[4];
            load4(x_row, i, hidden, x_aligned, v);
            load4(gamma, i, hidden, gamma_aligned, g);
            load4(beta, i, hidden, beta_aligned, b);
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = fmaf((v[j] - m) * r, g[j], b[j]);
            store4(y_row, i, hidden, y_aligned, v);
        }
        if (lane == 0) {
            mean[row] = m;
            rstd[row] = r;
        }
    }
}

// With n = (x - mean) * rstd and d = dy * gamma: dx (+)= rstd * (d - avg(d) - n * avg(d * n)).
extern "C" __global__ void layer_norm_backward(const ELEMENT *x, const ELEMENT *gamma, const f32 *mean, const f32 *rstd,
                                               const ELEMENT *dy, ELEMENT *dx, u64 rows, u64 hidden, int accumulate) {
    const int lane = lane_index();
    const bool gamma_aligned = is_aligned(gamma);
    FOR_ROWS(row, rows) {
        const ELEMENT *x_row = x + row * hidden, *dy_row = dy + row * hidden;
        ELEMENT *dx_row = dx + row * hidden;
        const bool x_aligned = is_aligned(x_row), dy_aligned = is_aligned(dy_row), dx_aligned = is_aligned(dx_row);
        const f32 m = mean[row], r = rstd[row];
        f32 sum_d = 0.0f, sum_dn = 0.0f;
        for (u64 i = 4 * lane; i < hidden; i += 4 * WARP) {
            f32 v[4], g[4], w[4];
            load4(x_row, i, hidden, x_aligned, v);
            load4(dy_row, i, hidden, dy_aligned, w);
            load4(gamma, i, hidden, gamma_aligned, g);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                // Beyond the row d is 0.
                const f32 d = w[j] * g[j];
                sum_d += d;
                sum_dn = fmaf(d, v[j] - m, sum_dn);
            }
        }
        const f32 scale = -r / (f32)hidden;
        const f32 shift = scale * warp_sum(sum_d), slope = scale * r * warp_sum(sum_dn);
        for (u64 i = 4 * lane; i < hidden; i += 4 * WARP) {
            f32 v[4], g[4], w[4], old[4];
            load4(x_row, i, hidden, x_aligned, v);
            load4(dy_row, i, hidden, dy_aligned, w);
            load4(gamma, i, hidden, gamma_aligned, g);
            if (accumulate) load4((const ELEMENT *)dx_row, i, hidden, dx_aligned, old);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = fmaf((v[j] - m) * r, slope, fmaf(r, w[j] * g[j], shift));
                if (accumulate) v[j] += old[j];
            }
            store4(dx_row, i, hidden, dx_aligned, v);
        }
    }
}

// partial[b] = the sums over block b of rows of dy * n and of dy. partial `[blocks, 2, hidden]`. Grid: (hidden / threads,
// blocks of `grain` rows). Runs before dx overwrites anything that it reads.
extern "C" __global__ void layer_norm_parameter_sums(const ELEMENT *x, const f32 *mean, const f32 *rstd,
                                                     const ELEMENT *dy, f32 *partial, u64 rows, u64 hidden, u64 grain) {
    const u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= hidden) return;
    const u64 first = blockIdx.y * grain, end = first + grain < rows ? first + grain : rows;
    f32 gamma = 0.0f, beta = 0.0f;
#pragma unroll 4
    for (u64 row = first; row < end; row++) {
        const u64 at = row * hidden + column;
        const f32 d = to_f32(dy[at]);
        gamma = fmaf(d, (to_f32(x[at]) - mean[row]) * rstd[row], gamma);
        beta += d;
    }
    f32 *line = partial + blockIdx.y * 2 * hidden;
    line[column] = gamma;
    line[hidden + column] = beta;
}

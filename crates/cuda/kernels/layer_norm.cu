// Layer norm over the last dimension, forward and backward: a warp computes a row. Without a mean (null) it is RMS norm: the same
// with a mean of 0.
//
// A lane has groups of four elements, 4 * WARP apart. Rows of whole groups, at most HELD of them for a lane, are read from memory
// once and stay in registers; others are read for each pass. The sums are the same.
#include "numbers.cuh"

#define HELD 8
// Groups that are loaded before the first of them is computed.
#define AT_ONCE 4

// Groups of a lane in a row of `hidden` elements.
__device__ __forceinline__ u32 groups_of(u64 hidden) { return (u32)((hidden + 4 * WARP - 1) / (4 * WARP)); }

// The first element of group g of this lane.
__device__ __forceinline__ u64 start_of(u32 g) { return 4 * ((u64)g * WARP + lane_index()); }

// Four elements as they lie in memory: two elements of 16 bits in a word.
struct alignas(sizeof(Four<ELEMENT>)) Packed {
    u32 x[sizeof(Four<ELEMENT>) / 4];
};

// Element j of packed ones.
template <class T> __device__ __forceinline__ f32 unpacked(const u32 *x, int j) {
    return to_f32(T{(u16)(x[j / 2] >> j % 2 * 16)});
}
template <> __device__ __forceinline__ f32 unpacked<f32>(const u32 *x, int j) { return __uint_as_float(x[j]); }
template <> __device__ __forceinline__ f32 unpacked<bf16>(const u32 *x, int j) {
    return __uint_as_float(j % 2 == 0 ? x[j / 2] << 16 : x[j / 2] & 0xffff0000u);
}

__device__ __forceinline__ void unpack(const Packed &group, f32 (&x)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = unpacked<ELEMENT>(group.x, j);
}

// Groups first .. first + AT_ONCE of a lane; what is beyond the row is 0.
struct Groups {
    f32 x[AT_ONCE][4];
};

// Where WHOLE, all groups are aligned, and inside or outside of the row as a whole.
template <bool WHOLE> __device__ __forceinline__ Groups load_groups(const ELEMENT *from, u32 first, u64 hidden) {
    Groups groups;
    Packed packed[AT_ONCE] = {};
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        const u64 i = start_of(first + k);
        if (WHOLE && i < hidden) packed[k] = *(const Packed *)(from + i);
        if (!WHOLE) load4(from, i, hidden, false, groups.x[k]);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
        if (WHOLE) unpack(packed[k], groups.x[k]);
    return groups;
}

template <bool WHOLE> __device__ __forceinline__ void store_groups(ELEMENT *to, u32 first, u64 hidden, const Groups &groups) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        const u64 i = start_of(first + k);
        if (WHOLE && i < hidden) {
            Four<ELEMENT> four;
#pragma unroll
            for (int j = 0; j < 4; j++) four.x[j] = from_f32<ELEMENT>(groups.x[k][j]);
            *(Four<ELEMENT> *)(to + i) = four;
        }
        if (!WHOLE) store4(to, i, hidden, false, groups.x[k]);
    }
}

// Elements of a row that a lane has, where they lie or in registers.
template <bool IN_REGISTERS> struct Row {
    const ELEMENT *at;
    __device__ __forceinline__ void load(const ELEMENT *from, u64) { at = from; }
    template <bool WHOLE> __device__ __forceinline__ Groups get(u32 first, u64 hidden) const {
        return load_groups<WHOLE>(at, first, hidden);
    }
};
template <> struct Row<true> {
    Packed x[HELD];
    __device__ __forceinline__ void load(const ELEMENT *from, u64 hidden) {
#pragma unroll
        for (u32 g = 0; g < HELD; g++) {
            x[g] = {};
            if (start_of(g) < hidden) x[g] = *(const Packed *)(from + start_of(g));
        }
    }
    template <bool> __device__ __forceinline__ Groups get(u32 first, u64) const {
        Groups groups;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) unpack(x[first + k], groups.x[k]);
        return groups;
    }
};

// f over the groups of a row, in order, AT_ONCE at a time.
template <bool IN_REGISTERS, class F> __device__ __forceinline__ void for_groups(u64 hidden, F f) {
    if (IN_REGISTERS) {
#pragma unroll
        for (u32 first = 0; first < HELD; first += AT_ONCE) f(first);
    } else {
        const u32 groups = groups_of(hidden);
        for (u32 first = 0; first < groups; first += AT_ONCE) f(first);
    }
}

template <bool WHOLE, bool IN_REGISTERS>
__device__ __forceinline__ void normalize(const ELEMENT *x, const ELEMENT *gamma, const ELEMENT *beta, ELEMENT *y, f32 *mean,
                                          f32 *rstd, u64 hidden, f32 eps) {
    Row<IN_REGISTERS> row;
    row.load(x, hidden);
    f32 m = 0.0f;
    if (mean) {
        f32 sum = 0.0f;
        for_groups<IN_REGISTERS>(hidden, [&](u32 first) {
            const Groups v = row.template get<WHOLE>(first, hidden);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) sum += (v.x[k][0] + v.x[k][1]) + (v.x[k][2] + v.x[k][3]);
        });
        m = warp_sum(sum) / (f32)hidden;
    }
    f32 squares = 0.0f;
    for_groups<IN_REGISTERS>(hidden, [&](u32 first) {
        const Groups v = row.template get<WHOLE>(first, hidden);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const f32 d = start_of(first + k) + (WHOLE ? 0 : j) < hidden ? v.x[k][j] - m : 0.0f;
                squares = fmaf(d, d, squares);
            }
        }
    });
    const f32 r = 1.0f / sqrtf(warp_sum(squares) / (f32)hidden + eps);
    for_groups<IN_REGISTERS>(hidden, [&](u32 first) {
        const Groups weights = load_groups<WHOLE>(gamma, first, hidden);
        Groups biases = {};
        if (beta) biases = load_groups<WHOLE>(beta, first, hidden);
        Groups v = row.template get<WHOLE>(first, hidden);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) v.x[k][j] = fmaf((v.x[k][j] - m) * r, weights.x[k][j], biases.x[k][j]);
        }
        store_groups<WHOLE>(y, first, hidden, v);
    });
    if (lane_index() == 0) {
        if (mean) *mean = m;
        *rstd = r;
    }
}

// y = (x - mean) * rstd * gamma (+ beta, unless it is null); x, y `[rows, hidden]`, mean and rstd `[rows]` f32.
extern "C" __global__ void __launch_bounds__(256, 2)
    layer_norm(const ELEMENT *x, const ELEMENT *gamma, const ELEMENT *beta, ELEMENT *y, f32 *mean, f32 *rstd, u64 rows, u64 hidden,
               f32 eps) {
    const bool whole = hidden % 4 == 0 && is_aligned(x) && is_aligned(gamma) && is_aligned(beta) && is_aligned(y);
    FOR_ROWS(row, rows) {
        const u64 at = row * hidden;
        f32 *own = mean ? mean + row : mean;
        if (whole && groups_of(hidden) <= HELD)
            normalize<true, true>(x + at, gamma, beta, y + at, own, rstd + row, hidden, eps);
        else if (whole) normalize<true, false>(x + at, gamma, beta, y + at, own, rstd + row, hidden, eps);
        else normalize<false, false>(x + at, gamma, beta, y + at, own, rstd + row, hidden, eps);
    }
}

template <bool WHOLE, bool IN_REGISTERS>
__device__ __forceinline__ void differentiate(const ELEMENT *x, const ELEMENT *gamma, const f32 *mean, f32 r, const ELEMENT *dy,
                                              ELEMENT *dx, u64 hidden, bool accumulate) {
    const f32 m = mean ? *mean : 0.0f;
    Row<IN_REGISTERS> xs, dys;
    xs.load(x, hidden);
    dys.load(dy, hidden);
    f32 sum_d = 0.0f, sum_dn = 0.0f;
    for_groups<IN_REGISTERS>(hidden, [&](u32 first) {
        const Groups weights = load_groups<WHOLE>(gamma, first, hidden);
        const Groups v = xs.template get<WHOLE>(first, hidden), w = dys.template get<WHOLE>(first, hidden);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                // Beyond the row d is 0.
                const f32 d = w.x[k][j] * weights.x[k][j];
                sum_d += d;
                sum_dn = fmaf(d, v.x[k][j] - m, sum_dn);
            }
        }
    });
    const f32 scale = -r / (f32)hidden;
    const f32 shift = mean ? scale * warp_sum(sum_d) : 0.0f, slope = scale * r * warp_sum(sum_dn);
    for_groups<IN_REGISTERS>(hidden, [&](u32 first) {
        Groups old = {};
        if (accumulate) old = load_groups<WHOLE>(dx, first, hidden);
        const Groups weights = load_groups<WHOLE>(gamma, first, hidden), w = dys.template get<WHOLE>(first, hidden);
        Groups v = xs.template get<WHOLE>(first, hidden);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                f32 &of = v.x[k][j];
                of = fmaf((of - m) * r, slope, fmaf(r, w.x[k][j] * weights.x[k][j], shift));
                if (accumulate) of += old.x[k][j];
            }
        }
        store_groups<WHOLE>(dx, first, hidden, v);
    });
}

// With n = (x - mean) * rstd and d = dy * gamma: dx (+)= rstd * (d - avg(d) - n * avg(d * n)); RMS norm has no avg(d).
extern "C" __global__ void __launch_bounds__(256, 2)
    layer_norm_backward(const ELEMENT *x, const ELEMENT *gamma, const f32 *mean, const f32 *rstd, const ELEMENT *dy, ELEMENT *dx,
                        u64 rows, u64 hidden, int accumulate) {
    const bool whole = hidden % 4 == 0 && is_aligned(x) && is_aligned(gamma) && is_aligned(dy) && is_aligned(dx);
    FOR_ROWS(row, rows) {
        const u64 at = row * hidden;
        const f32 *m = mean ? mean + row : mean;
        const f32 r = rstd[row];
        if (whole && groups_of(hidden) <= HELD)
            differentiate<true, true>(x + at, gamma, m, r, dy + at, dx + at, hidden, accumulate);
        else if (whole) differentiate<true, false>(x + at, gamma, m, r, dy + at, dx + at, hidden, accumulate);
        else differentiate<false, false>(x + at, gamma, m, r, dy + at, dx + at, hidden, accumulate);
    }
}

// Rows of which a thread loads all elements before it adds the first.
#define ROWS_AT_ONCE 16

template <bool PAIRS, int ROWS>
__device__ __forceinline__ void add_rows(const ELEMENT *x, const ELEMENT *dy, const f32 *mean, const f32 *rstd, u64 hidden,
                                         bool second, f32 (&gamma)[2], f32 (&beta)[2]) {
    Two<ELEMENT> xs[ROWS], dys[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        xs[row] = load2<PAIRS>(x + row * hidden, second);
        dys[row] = load2<PAIRS>(dy + row * hidden, second);
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const f32 d = to_f32(dys[row].x[j]);
            gamma[j] = fmaf(d, (to_f32(xs[row].x[j]) - (mean ? mean[row] : 0.0f)) * rstd[row], gamma[j]);
            beta[j] += d;
        }
    }
}

template <bool PAIRS>
__device__ __forceinline__ void sum_rows(const ELEMENT *x, const ELEMENT *dy, const f32 *mean, const f32 *rstd, f32 *line, u64 rows,
                                         u64 hidden, bool second) {
    f32 gamma[2] = {0.0f, 0.0f}, beta[2] = {0.0f, 0.0f};
    u64 row = 0;
    for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE)
        add_rows<PAIRS, ROWS_AT_ONCE>(x + row * hidden, dy + row * hidden, mean ? mean + row : mean, rstd + row, hidden, second,
                                      gamma, beta);
    for (; row < rows; row++)
        add_rows<PAIRS, 1>(x + row * hidden, dy + row * hidden, mean ? mean + row : mean, rstd + row, hidden, second, gamma, beta);
    store2<PAIRS>(line, second, gamma[0], gamma[1]);
    store2<PAIRS>(line + hidden, second, beta[0], beta[1]);
}

// partial[b] = the sums over block b of rows of dy * n and of dy. partial `[blocks, 2, hidden]`. Grid: (hidden / 2 / threads,
// blocks of `grain` rows). Runs before dx overwrites anything that it reads.
extern "C" __global__ void layer_norm_parameter_sums(const ELEMENT *x, const f32 *mean, const f32 *rstd,
                                                     const ELEMENT *dy, f32 *partial, u64 rows, u64 hidden, u64 grain) {
    const u64 column = 2 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= hidden) return;
    const u64 first = blockIdx.y * grain, some = first + grain < rows ? grain : rows - first;
    const u64 at = first * hidden + column;
    f32 *line = partial + blockIdx.y * 2 * hidden + column;
    const bool second = column + 1 < hidden;
    if (has_pairs(x, hidden) && has_pairs(dy, hidden) && has_pairs(partial, hidden))
        sum_rows<true>(x + at, dy + at, mean ? mean + first : mean, rstd + first, line, some, hidden, true);
    else sum_rows<false>(x + at, dy + at, mean ? mean + first : mean, rstd + first, line, some, hidden, second);
}

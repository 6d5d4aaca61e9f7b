// Layer norm over the last dimension, forward and backward: a warp computes a vector. Without a mean (null) it is RMS norm: the same
// with a mean of 0.
//
// A row of `stride` elements has `count` vectors of `hidden` from column `first` on; usually it is one. Where ranks have parts of
// vectors, `sums` over all ranks, of `elements` each, are given in place of those that a warp makes.
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

// How vectors lie in rows.
struct Vectors {
    u64 hidden, stride, first, count;
    // The first element of vector v.
    template <bool HEADS> __device__ __forceinline__ u64 at(u64 v) const {
        return HEADS ? v / count * stride + first + v % count * hidden : v * stride + first;
    }
    __device__ __forceinline__ u64 start(u64 v) const { return count == 1 ? at<false>(v) : at<true>(v); }
    // Whether groups of four elements are whole, given aligned rows.
    __device__ __forceinline__ bool are_whole() const { return hidden % 4 == 0 && stride % 4 == 0 && first % 4 == 0; }
};

// Sums over all ranks (null: over what is here), and what is added to gamma.
struct Given {
    const f32 *sums;
    f32 elements, offset;
};

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
                                          f32 *rstd, u64 hidden, f32 eps, Given given) {
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
    if (!given.sums) for_groups<IN_REGISTERS>(hidden, [&](u32 first) {
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
    const f32 mean_square = given.sums ? *given.sums / given.elements : warp_sum(squares) / (f32)hidden;
    const f32 r = 1.0f / sqrtf(mean_square + eps);
    for_groups<IN_REGISTERS>(hidden, [&](u32 first) {
        const Groups weights = load_groups<WHOLE>(gamma, first, hidden);
        Groups biases = {};
        if (beta) biases = load_groups<WHOLE>(beta, first, hidden);
        Groups v = row.template get<WHOLE>(first, hidden);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) v.x[k][j] = fmaf((v.x[k][j] - m) * r, weights.x[k][j] + given.offset, biases.x[k][j]);
        }
        store_groups<WHOLE>(y, first, hidden, v);
    });
    if (lane_index() == 0) {
        if (mean) *mean = m;
        *rstd = r;
    }
}

// y = (x - mean) * rstd * gamma (+ beta, unless it is null); x, y `[rows, stride]`; mean, rstd and sums of each of `n` vectors, f32.
extern "C" __global__ void __launch_bounds__(256, 2)
    layer_norm(const ELEMENT *x, const ELEMENT *gamma, const ELEMENT *beta, ELEMENT *y, f32 *mean, f32 *rstd, const f32 *sums, u64 n,
               u64 hidden, u64 stride, u64 first, u64 count, u64 elements, f32 offset, f32 eps) {
    const Vectors vectors = {hidden, stride, first, count};
    const bool whole = vectors.are_whole() && is_aligned(x) && is_aligned(gamma) && is_aligned(beta) && is_aligned(y);
    FOR_ROWS(v, n) {
        const u64 at = vectors.start(v);
        f32 *own = mean ? mean + v : mean;
        const Given given = {sums ? sums + v : sums, (f32)elements, offset};
        if (whole && groups_of(hidden) <= HELD)
            normalize<true, true>(x + at, gamma, beta, y + at, own, rstd + v, hidden, eps, given);
        else if (whole) normalize<true, false>(x + at, gamma, beta, y + at, own, rstd + v, hidden, eps, given);
        else normalize<false, false>(x + at, gamma, beta, y + at, own, rstd + v, hidden, eps, given);
    }
}

template <bool WHOLE, bool IN_REGISTERS>
__device__ __forceinline__ void differentiate(const ELEMENT *x, const ELEMENT *gamma, const f32 *mean, f32 r, const ELEMENT *dy,
                                              ELEMENT *dx, u64 hidden, bool accumulate, Given given) {
    const f32 m = mean ? *mean : 0.0f;
    Row<IN_REGISTERS> xs, dys;
    xs.load(x, hidden);
    dys.load(dy, hidden);
    f32 sum_d = 0.0f, sum_dn = 0.0f;
    if (!given.sums) for_groups<IN_REGISTERS>(hidden, [&](u32 first) {
        const Groups weights = load_groups<WHOLE>(gamma, first, hidden);
        const Groups v = xs.template get<WHOLE>(first, hidden), w = dys.template get<WHOLE>(first, hidden);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                // Beyond the row d is 0.
                const f32 d = w.x[k][j] * (weights.x[k][j] + given.offset);
                sum_d += d;
                sum_dn = fmaf(d, v.x[k][j] - m, sum_dn);
            }
        }
    });
    const f32 scale = -r / (given.sums ? given.elements : (f32)hidden);
    const f32 shift = mean ? scale * warp_sum(sum_d) : 0.0f;
    const f32 slope = scale * r * (given.sums ? *given.sums : warp_sum(sum_dn));
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
                of = fmaf((of - m) * r, slope, fmaf(r, w.x[k][j] * (weights.x[k][j] + given.offset), shift));
                if (accumulate) of += old.x[k][j];
            }
        }
        store_groups<WHOLE>(dx, first, hidden, v);
    });
}

// With n = (x - mean) * rstd and d = dy * gamma: dx (+)= rstd * (d - avg(d) - n * avg(d * n)); RMS norm has no avg(d).
extern "C" __global__ void __launch_bounds__(256, 2)
    layer_norm_backward(const ELEMENT *x, const ELEMENT *gamma, const f32 *mean, const f32 *rstd, const ELEMENT *dy, ELEMENT *dx,
                        const f32 *sums, u64 n, u64 hidden, u64 stride, u64 first, u64 count, u64 elements, f32 offset, int accumulate) {
    const Vectors vectors = {hidden, stride, first, count};
    const bool whole = vectors.are_whole() && is_aligned(x) && is_aligned(gamma) && is_aligned(dy) && is_aligned(dx);
    FOR_ROWS(v, n) {
        const u64 at = vectors.start(v);
        const f32 *m = mean ? mean + v : mean;
        const f32 r = rstd[v];
        const Given given = {sums ? sums + v : sums, (f32)elements, offset};
        if (whole && groups_of(hidden) <= HELD)
            differentiate<true, true>(x + at, gamma, m, r, dy + at, dx + at, hidden, accumulate, given);
        else if (whole) differentiate<true, false>(x + at, gamma, m, r, dy + at, dx + at, hidden, accumulate, given);
        else differentiate<false, false>(x + at, gamma, m, r, dy + at, dx + at, hidden, accumulate, given);
    }
}

// Of vectors of which other ranks have other parts: sums of x * x, or unless dy is null of x * dy * (gamma + offset).
extern "C" __global__ void norm_sums(const ELEMENT *x, const ELEMENT *gamma, const ELEMENT *dy, f32 *sums, u64 n, u64 hidden,
                                     u64 stride, u64 first, u64 count, f32 offset) {
    const Vectors vectors = {hidden, stride, first, count};
    FOR_ROWS(v, n) {
        const u64 at = vectors.start(v);
        f32 sum = 0.0f;
        for (u64 i = lane_index(); i < hidden; i += WARP) {
            const f32 own = to_f32(x[at + i]);
            sum = fmaf(own, dy ? to_f32(dy[at + i]) * (to_f32(gamma[i]) + offset) : own, sum);
        }
        sum = warp_sum(sum);
        if (lane_index() == 0) sums[v] = sum;
    }
}

// Rows of which a thread loads all elements before it adds the first.
#define ROWS_AT_ONCE 16

template <bool PAIRS, bool HEADS, int ROWS>
__device__ __forceinline__ void add_rows(const ELEMENT *x, const ELEMENT *dy, const f32 *mean, const f32 *rstd,
                                         const Vectors &vectors, u64 v, bool second, f32 (&gamma)[2], f32 (&beta)[2]) {
    Two<ELEMENT> xs[ROWS], dys[ROWS];
    if (!HEADS) {
        x += vectors.at<false>(v);
        dy += vectors.at<false>(v);
    }
    rstd += v;
    if (mean) mean += v;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const u64 at = HEADS ? vectors.at<true>(v + row) : row * vectors.stride;
        xs[row] = load2<PAIRS>(x + at, second);
        dys[row] = load2<PAIRS>(dy + at, second);
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

template <bool PAIRS, bool HEADS>
__device__ __forceinline__ void sum_rows(const ELEMENT *x, const ELEMENT *dy, const f32 *mean, const f32 *rstd, f32 *line,
                                         const Vectors &vectors, u64 v, u64 end, bool second) {
    f32 gamma[2] = {0.0f, 0.0f}, beta[2] = {0.0f, 0.0f};
    for (; v + ROWS_AT_ONCE <= end; v += ROWS_AT_ONCE)
        add_rows<PAIRS, HEADS, ROWS_AT_ONCE>(x, dy, mean, rstd, vectors, v, second, gamma, beta);
    for (; v < end; v++) add_rows<PAIRS, HEADS, 1>(x, dy, mean, rstd, vectors, v, second, gamma, beta);
    store2<PAIRS>(line, second, gamma[0], gamma[1]);
    store2<PAIRS>(line + vectors.hidden, second, beta[0], beta[1]);
}

template <bool HEADS>
__device__ __forceinline__ void parameter_sums(const ELEMENT *x, const f32 *mean, const f32 *rstd, const ELEMENT *dy, f32 *partial,
                                               u64 n, u64 hidden, u64 stride, u64 first, u64 count, u64 grain) {
    const u64 column = 2 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= hidden) return;
    const Vectors vectors = {hidden, stride, first + column, count};
    const u64 begin = blockIdx.y * grain, end = begin + grain < n ? begin + grain : n;
    f32 *line = partial + blockIdx.y * 2 * hidden + column;
    const bool second = column + 1 < hidden;
    if (has_pairs(x + first, stride) && has_pairs(dy + first, stride) && has_pairs(partial, hidden))
        sum_rows<true, HEADS>(x, dy, mean, rstd, line, vectors, begin, end, true);
    else sum_rows<false, HEADS>(x, dy, mean, rstd, line, vectors, begin, end, second);
}

// partial[b] = the sums over block b of vectors, one in each row, of dy * n and of dy. partial `[blocks, 2, hidden]`. Grid: (hidden / 2
// / threads, blocks of `grain` vectors). Runs before dx overwrites anything that it reads.
extern "C" __global__ void layer_norm_parameter_sums(const ELEMENT *x, const f32 *mean, const f32 *rstd, const ELEMENT *dy,
                                                     f32 *partial, u64 n, u64 hidden, u64 stride, u64 first, u64 count, u64 grain) {
    parameter_sums<false>(x, mean, rstd, dy, partial, n, hidden, stride, first, count, grain);
}

// The same of several vectors in each row.
extern "C" __global__ void head_norm_parameter_sums(const ELEMENT *x, const f32 *mean, const f32 *rstd, const ELEMENT *dy,
                                                    f32 *partial, u64 n, u64 hidden, u64 stride, u64 first, u64 count, u64 grain) {
    parameter_sums<true>(x, mean, rstd, dy, partial, n, hidden, stride, first, count, grain);
}

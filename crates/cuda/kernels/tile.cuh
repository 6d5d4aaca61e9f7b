// Matrix products of one warp, and tiles of matrices in shared memory.
//
// A warp multiplies 16 rows by 8 columns at a time, over `Multiply<T>::STEP` steps of the inner dimension, and holds the sums
// as `mma.sync` does: lane l has, with g = l / 4 and t = l % 4, the columns 2t and 2t + 1 of the rows g (sums 0 and 1) and
// g + 8 (sums 2 and 3). For bf16 and f16 that is one instruction. For f32 the lanes multiply and add, in the order of the inner
// dimension; compiled with -DTF32, it is the instruction for TF32 instead.
//
// Rows of a tile are padded by 16 bytes, so that the rows that are read together lie in different banks.
#pragma once
#include "numbers.cuh"

// Elements of 16 bytes.
template <class T> __host__ __device__ constexpr int chunk() { return 16 / (int)sizeof(T); }

// Elements between two rows of a tile of `columns` columns.
template <class T> __host__ __device__ constexpr int padded(int columns) { return columns + chunk<T>(); }

__device__ __forceinline__ u32 shared_address(const void *x) { return (u32)__cvta_generic_to_shared(x); }

// ---- Asynchronous copies into shared memory.

// Copies 16 bytes, or writes zeros where `valid` is false; `from` is read only where it is true.
__device__ __forceinline__ void copy16(void *to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
// Copies 4 bytes, or writes zeros.
__device__ __forceinline__ void copy4(void *to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the newest N groups of this thread's copies are over.
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// A matrix in global memory, rows `stride` elements apart. `whole_chunks`: every row begins on 16 bytes, and its length is a
// multiple of 16 bytes, or zeros follow up to the next one.
template <class T> struct Source {
    const T *at;
    u64 stride;
    bool whole_chunks;
};

template <class T> __device__ __forceinline__ bool has_whole_chunks(const T *at, u64 stride, u64 columns) {
    return (u64)at % 16 == 0 && stride % chunk<T>() == 0 && columns % chunk<T>() == 0;
}

// A matrix with rows of `columns` elements. Where they are longer, the rest is zeros (as in stored logits).
template <class T> __device__ __forceinline__ Source<T> source(const T *at, u64 stride, u64 columns) {
    return {at, stride, has_whole_chunks(at, stride, stride > columns ? stride : columns)};
}

// Loads `ROWS` by `COLUMNS` elements from (row, column) on into a tile; zeros beyond `rows` and `columns`, the ends of the
// matrix. The copies are this thread's share of the block's, and are not yet committed.
template <class T, int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void load_tile(T *tile, const Source<T> &from, u64 row, u64 column, u64 rows, u64 columns) {
    constexpr int CHUNK = chunk<T>(), ACROSS = COLUMNS / CHUNK, STEP = THREADS / ACROSS;
    static_assert(COLUMNS % CHUNK == 0 && THREADS % ACROSS == 0, "rows of whole chunks, and whole rows in a step");
    const int first = threadIdx.x / ACROSS, c = threadIdx.x % ACROSS * CHUNK;
    const int rows_left = row >= rows ? 0 : rows - row < ROWS ? (int)(rows - row) : ROWS;
    const int columns_left = column >= columns ? 0 : columns - column < COLUMNS ? (int)(columns - column) : COLUMNS;
    const T *at = from.at + (row + first) * from.stride + column + c;
    T *to = tile + first * padded<T>(COLUMNS) + c;
#pragma unroll
    for (int i = 0; i < (ROWS + STEP - 1) / STEP; i++) {
        const int r = first + i * STEP;
        if (ROWS % STEP != 0 && r >= ROWS) break;
        if (from.whole_chunks) {
            copy16(to, at, r < rows_left && c < columns_left);
        } else {
#pragma unroll
            for (int j = 0; j < CHUNK; j++) to[j] = r < rows_left && c + j < columns_left ? at[j] : from_f32<T>(0.0f);
        }
        at += STEP * from.stride;
        to += STEP * padded<T>(COLUMNS);
    }
}

// ---- Products of fragments.

template <class T> struct Multiply;

// bf16 and f16: fragments are packed pairs, loaded by `ldmatrix`.
template <class T> struct MultiplyPairs {
    static constexpr int STEP = 16;
    // 16 rows, and twice 8 columns.
    struct A {
        u32 x[4];
    };
    struct B {
        u32 x[2][2];
    };

    static __device__ __forceinline__ void load(u32 (&x)[4], const T *at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(shared_address(at))
                     : "memory");
    }
    static __device__ __forceinline__ void load_transposed(u32 (&x)[4], const T *at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(shared_address(at))
                     : "memory");
    }

    // The left operand from a tile `[row][step]`.
    static __device__ __forceinline__ void load_a(A &a, const T *tile, int stride, int lane) {
        load(a.x, tile + lane % 16 * stride + lane / 16 * 8);
    }
    // The left operand from a tile `[step][row]`.
    static __device__ __forceinline__ void load_a_transposed(A &a, const T *tile, int stride, int lane) {
        const int matrix = lane / 8;
        load_transposed(a.x, tile + (lane % 8 + matrix / 2 * 8) * stride + matrix % 2 * 8);
    }
    // 16 columns of the right operand from a tile `[column][step]`.
    static __device__ __forceinline__ void load_b(B &b, const T *tile, int stride, int lane) {
        const int matrix = lane / 8;
        u32 x[4];
        load(x, tile + (lane % 8 + matrix / 2 * 8) * stride + matrix % 2 * 8);
        b = {{{x[0], x[1]}, {x[2], x[3]}}};
    }
    // 16 columns of the right operand from a tile `[step][column]`.
    static __device__ __forceinline__ void load_b_transposed(B &b, const T *tile, int stride, int lane) {
        const int matrix = lane / 8;
        u32 x[4];
        load_transposed(x, tile + (lane % 8 + matrix % 2 * 8) * stride + matrix / 2 * 8);
        b = {{{x[0], x[1]}, {x[2], x[3]}}};
    }
    // Sums of 16 columns as a left operand over 16 steps, rounded.
    static __device__ __forceinline__ A as_a(const f32 (&left)[4], const f32 (&right)[4], int) {
        return {{pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]),
                 pack<T>(right[2], right[3])}};
    }
};

template <> struct Multiply<bf16> : MultiplyPairs<bf16> {
    static __device__ __forceinline__ void add(f32 (&d)[4], const A &a, const u32 (&b)[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b[0]), "r"(b[1]));
    }
};

template <> struct Multiply<f16> : MultiplyPairs<f16> {
    static __device__ __forceinline__ void add(f32 (&d)[4], const A &a, const u32 (&b)[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b[0]), "r"(b[1]));
    }
};

#ifdef TF32
// f32 as TF32: 10 bits of the mantissa, rounded to nearest. Fragments of 8 steps; lane (g, t) has steps t and t + 4.
template <> struct Multiply<f32> {
    static constexpr int STEP = 8;
    struct A {
        u32 x[4];
    };
    struct B {
        u32 x[2][2];
    };

    static __device__ __forceinline__ u32 rounded(f32 x) {
        u32 y;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
        return y;
    }
    // `row` and `step` are the distances of two rows and of two steps.
    static __device__ __forceinline__ void gather(A &a, const f32 *tile, int row, int step, int lane) {
        const f32 *at = tile + lane / 4 * row + lane % 4 * step;
        a = {{rounded(at[0]), rounded(at[8 * row]), rounded(at[4 * step]), rounded(at[8 * row + 4 * step])}};
    }
    static __device__ __forceinline__ void gather(B &b, const f32 *tile, int column, int step, int lane) {
        const f32 *at = tile + lane / 4 * column + lane % 4 * step;
        b = {{{rounded(at[0]), rounded(at[4 * step])},
              {rounded(at[8 * column]), rounded(at[8 * column + 4 * step])}}};
    }
    static __device__ __forceinline__ void load_a(A &a, const f32 *tile, int stride, int lane) { gather(a, tile, stride, 1, lane); }
    static __device__ __forceinline__ void load_a_transposed(A &a, const f32 *tile, int stride, int lane) { gather(a, tile, 1, stride, lane); }
    static __device__ __forceinline__ void load_b(B &b, const f32 *tile, int stride, int lane) { gather(b, tile, stride, 1, lane); }
    static __device__ __forceinline__ void load_b_transposed(B &b, const f32 *tile, int stride, int lane) { gather(b, tile, 1, stride, lane); }
    // The sums of 8 columns as a left operand over 8 steps.
    static __device__ __forceinline__ A as_a(const f32 (&c)[4], int lane) {
        A a;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int owner = lane / 4 * 4 + half * 2 + lane % 4 / 2;
            const bool odd = lane % 2;
            const f32 x0 = __shfl_sync(ALL_LANES, c[0], owner), x1 = __shfl_sync(ALL_LANES, c[1], owner);
            const f32 y0 = __shfl_sync(ALL_LANES, c[2], owner), y1 = __shfl_sync(ALL_LANES, c[3], owner);
            a.x[2 * half] = rounded(odd ? x1 : x0);
            a.x[2 * half + 1] = rounded(odd ? y1 : y0);
        }
        return a;
    }
    static __device__ __forceinline__ void add(f32 (&d)[4], const A &a, const u32 (&b)[2]) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b[0]), "r"(b[1]));
    }
};
#else
// f32 by multiply-adds: a lane has all steps of its two rows and of its two columns.
template <> struct Multiply<f32> {
    static constexpr int STEP = 8;
    struct A {
        f32 x[2][STEP];
    };
    struct B {
        f32 x[2][2][STEP];
    };

    static __device__ __forceinline__ void load_steps(f32 (&x)[STEP], const f32 *at) {
        const float4 low = *(const float4 *)at, high = *(const float4 *)(at + 4);
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
    static __device__ __forceinline__ void load_a(A &a, const f32 *tile, int stride, int lane) {
        load_steps(a.x[0], tile + lane / 4 * stride);
        load_steps(a.x[1], tile + (lane / 4 + 8) * stride);
    }
    static __device__ __forceinline__ void load_a_transposed(A &a, const f32 *tile, int stride, int lane) {
#pragma unroll
        for (int step = 0; step < STEP; step++) {
            a.x[0][step] = tile[step * stride + lane / 4];
            a.x[1][step] = tile[step * stride + lane / 4 + 8];
        }
    }
    static __device__ __forceinline__ void load_b(B &b, const f32 *tile, int stride, int lane) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int c = 0; c < 2; c++) load_steps(b.x[half][c], tile + (half * 8 + lane % 4 * 2 + c) * stride);
    }
    static __device__ __forceinline__ void load_b_transposed(B &b, const f32 *tile, int stride, int lane) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int step = 0; step < STEP; step++) {
                const float2 pair = *(const float2 *)(tile + step * stride + half * 8 + lane % 4 * 2);
                b.x[half][0][step] = pair.x;
                b.x[half][1][step] = pair.y;
            }
    }
    // The sums of 8 columns as a left operand over 8 steps.
    static __device__ __forceinline__ A as_a(const f32 (&c)[4], int lane) {
        A a;
#pragma unroll
        for (int step = 0; step < STEP; step++) {
            const int owner = lane / 4 * 4 + step / 2;
            a.x[0][step] = __shfl_sync(ALL_LANES, c[step % 2], owner);
            a.x[1][step] = __shfl_sync(ALL_LANES, c[2 + step % 2], owner);
        }
        return a;
    }
    static __device__ __forceinline__ void add(f32 (&d)[4], const A &a, const f32 (&b)[2][STEP]) {
#pragma unroll
        for (int step = 0; step < STEP; step++) {
            d[0] = fmaf(a.x[0][step], b[0][step], d[0]);
            d[1] = fmaf(a.x[0][step], b[1][step], d[1]);
            d[2] = fmaf(a.x[1][step], b[0][step], d[2]);
            d[3] = fmaf(a.x[1][step], b[1][step], d[3]);
        }
    }
};
#endif

// ---- Products of a warp's sums (M times 16 rows, 8 * N columns).

// The left operand of several products: 16 rows of a tile `[row][step]` of rows of `padded(DEPTH)`. HELD keeps it in registers.
template <class T, int DEPTH, bool HELD> struct LeftRows;

template <class T, int DEPTH> struct LeftRows<T, DEPTH, true> {
    using M = Multiply<T>;
    typename M::A steps[DEPTH / M::STEP];

    __device__ __forceinline__ void take(const T *tile, int lane) {
#pragma unroll
        for (int i = 0; i < DEPTH / M::STEP; i++) M::load_a(steps[i], tile + i * M::STEP, padded<T>(DEPTH), lane);
    }
    __device__ __forceinline__ void load(typename M::A &a, int step, int) const { a = steps[step / M::STEP]; }
};

template <class T, int DEPTH> struct LeftRows<T, DEPTH, false> {
    using M = Multiply<T>;
    const T *tile;

    __device__ __forceinline__ void take(const T *from, int) { tile = from; }
    __device__ __forceinline__ void load(typename M::A &a, int step, int lane) const {
        M::load_a(a, tile + step, padded<T>(DEPTH), lane);
    }
};

// sums += a · bᵀ, where b is a tile `[8 * N][DEPTH]` of rows of `padded(DEPTH)`.
template <class T, int MS, int N, int DEPTH, bool HELD>
__device__ __forceinline__ void multiply_rows(f32 (&sums)[MS][N][4], const LeftRows<T, DEPTH, HELD> (&a)[MS], const T *b,
                                              int lane) {
    using M = Multiply<T>;
    // Multiply-adds of f32 hold whole fragments in registers: those of one step at a time.
    constexpr int STRIDE = padded<T>(DEPTH), UNROLLED = sizeof(T) == 4 ? 1 : DEPTH / M::STEP;
#pragma unroll UNROLLED
    for (int step = 0; step < DEPTH; step += M::STEP) {
        typename M::A left[MS];
#pragma unroll
        for (int m = 0; m < MS; m++) a[m].load(left[m], step, lane);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            typename M::B right;
            M::load_b(right, b + n * 8 * STRIDE + step, STRIDE, lane);
#pragma unroll
            for (int m = 0; m < MS; m++) {
                M::add(sums[m][n], left[m], right.x[0]);
                M::add(sums[m][n + 1], left[m], right.x[1]);
            }
        }
    }
}

// sums += p · b, where p are the sums of 8 * STEPS columns, and b is a tile `[8 * STEPS][8 * N]`.
template <class T, int MS, int N, int STEPS>
__device__ __forceinline__ void multiply_sums(f32 (&sums)[MS][N][4], const f32 (&p)[MS][STEPS][4], const T *b, int lane) {
    using M = Multiply<T>;
    constexpr int STRIDE = padded<T>(8 * N), EIGHTS = M::STEP / 8;
#pragma unroll
    for (int step = 0; step < STEPS; step += EIGHTS) {
        typename M::A left[MS];
#pragma unroll
        for (int m = 0; m < MS; m++) {
            if constexpr (EIGHTS == 2) left[m] = M::as_a(p[m][step], p[m][step + 1], lane);
            else left[m] = M::as_a(p[m][step], lane);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            typename M::B right;
            M::load_b_transposed(right, b + step * 8 * STRIDE + n * 8, STRIDE, lane);
#pragma unroll
            for (int m = 0; m < MS; m++) {
                M::add(sums[m][n], left[m], right.x[0]);
                M::add(sums[m][n + 1], left[m], right.x[1]);
            }
        }
    }
}

// The main loop of matrix products: a block computes a tile of the result.
//
// Tiles of both operands pass through shared memory in STAGES buffers, filled by asynchronous copies ahead of their use. An
// element is summed over the inner dimension in its order, whatever the size of the tile.
#pragma once
#include "tile.cuh"

#define STAGES 3

// The sizes of the tiles of a block: WARPS_M by WARPS_N warps, each of which computes M16 times 16 rows and N8 times 8
// columns.
template <class T, int WARPS_M_, int WARPS_N_, int M16_, int N8_> struct Shape {
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, M16 = M16_, N8 = N8_;
    static constexpr int THREADS = WARPS_M * WARPS_N * WARP;
    static constexpr int ROWS = WARPS_M * M16 * 16, COLUMNS = WARPS_N * N8 * 8;
    // Steps of the inner dimension in a buffer: 64 bytes.
    static constexpr int DEPTH = 64 / (int)sizeof(T);
};

// The left operand `[rows, inner]`, or `[inner, rows]` where TRANSPOSED.
template <class T, class S, bool TRANSPOSED> struct LeftTile {
    static constexpr int STRIDE = padded<T>(TRANSPOSED ? S::ROWS : S::DEPTH);
    static constexpr int ELEMENTS = STRIDE * (TRANSPOSED ? S::DEPTH : S::ROWS);
};

// The right operand `[inner, columns]`, or `[columns, inner]` where TRANSPOSED.
template <class T, class S, bool TRANSPOSED> struct RightTile {
    static constexpr int STRIDE = padded<T>(TRANSPOSED ? S::DEPTH : S::COLUMNS);
    static constexpr int ELEMENTS = STRIDE * (TRANSPOSED ? S::COLUMNS : S::DEPTH);
};

// Bytes of shared memory of a product.
template <class T, class S, bool A_TRANSPOSED, bool B_TRANSPOSED> __host__ __device__ constexpr int product_bytes() {
    return STAGES * (LeftTile<T, S, A_TRANSPOSED>::ELEMENTS + RightTile<T, S, B_TRANSPOSED>::ELEMENTS) * (int)sizeof(T);
}

// The tile of the result that a block computes. Blocks that are neighbours in time share operands: they go through eight
// tiles of rows before they go on to the next tile of columns.
struct TilePlace {
    u64 row, column;
};

template <class S> __device__ __forceinline__ TilePlace tile_of_block(u64 rows, u64 columns) {
    const u64 across = (columns + S::COLUMNS - 1) / S::COLUMNS, down = (rows + S::ROWS - 1) / S::ROWS;
    const u64 band = blockIdx.x / (8 * across), within = blockIdx.x % (8 * across);
    const u64 height = down - 8 * band < 8 ? down - 8 * band : 8;
    return {(8 * band + within % height) * S::ROWS, within / height * S::COLUMNS};
}

// The sums of a warp.
template <class S> struct Sums {
    f32 x[S::M16][S::N8][4];
};

// sums = the tile at `place` of a · b; a is `[m, k]` and b `[k, n]`, each stored as said or transposed.
template <class T, class S, bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ __forceinline__ void product_tile(Sums<S> &sums, const Source<T> &a, const Source<T> &b, TilePlace place, u64 m,
                                             u64 n, u64 k) {
    extern __shared__ __align__(16) unsigned char memory[];
    using Left = LeftTile<T, S, A_TRANSPOSED>;
    using Right = RightTile<T, S, B_TRANSPOSED>;
    using M = Multiply<T>;
    T *lefts = (T *)memory, *rights = lefts + STAGES * Left::ELEMENTS;
    const int lane = lane_index(), warp = threadIdx.x / WARP;
    const int warp_row = warp / S::WARPS_N * S::M16 * 16, warp_column = warp % S::WARPS_N * S::N8 * 8;

    const auto load = [&](int step) {
        const u64 first = (u64)step * S::DEPTH;
        T *left = lefts + step % STAGES * Left::ELEMENTS, *right = rights + step % STAGES * Right::ELEMENTS;
        if constexpr (A_TRANSPOSED) load_tile<T, S::DEPTH, S::ROWS, S::THREADS>(left, a, first, place.row, k, m);
        else load_tile<T, S::ROWS, S::DEPTH, S::THREADS>(left, a, place.row, first, m, k);
        if constexpr (B_TRANSPOSED) load_tile<T, S::COLUMNS, S::DEPTH, S::THREADS>(right, b, place.column, first, n, k);
        else load_tile<T, S::DEPTH, S::COLUMNS, S::THREADS>(right, b, first, place.column, k, n);
    };

#pragma unroll
    for (int i = 0; i < S::M16; i++)
#pragma unroll
        for (int j = 0; j < S::N8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) sums.x[i][j][c] = 0.0f;

    const int steps = (int)((k + S::DEPTH - 1) / S::DEPTH);
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) load(step);
        commit_copies();
    }
    for (int step = 0; step < steps; step++) {
        // The buffer of this step is full, for all threads; and all have left the one that is filled next.
        wait_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        commit_copies();
        const T *left = lefts + step % STAGES * Left::ELEMENTS, *right = rights + step % STAGES * Right::ELEMENTS;
#pragma unroll
        for (int inner = 0; inner < S::DEPTH; inner += M::STEP) {
            typename M::A fragments[S::M16];
#pragma unroll
            for (int i = 0; i < S::M16; i++) {
                const int row = warp_row + i * 16;
                if constexpr (A_TRANSPOSED) M::load_a_transposed(fragments[i], left + inner * Left::STRIDE + row, Left::STRIDE, lane);
                else M::load_a(fragments[i], left + row * Left::STRIDE + inner, Left::STRIDE, lane);
            }
#pragma unroll
            for (int j = 0; j < S::N8; j += 2) {
                const int column = warp_column + j * 8;
                typename M::B fragment;
                if constexpr (B_TRANSPOSED) M::load_b(fragment, right + column * Right::STRIDE + inner, Right::STRIDE, lane);
                else M::load_b_transposed(fragment, right + inner * Right::STRIDE + column, Right::STRIDE, lane);
#pragma unroll
                for (int i = 0; i < S::M16; i++) {
                    M::add(sums.x[i][j], fragments[i], fragment.x[0]);
                    M::add(sums.x[i][j + 1], fragments[i], fragment.x[1]);
                }
            }
        }
    }
    // The memory is free for what follows.
    wait_copies<0>();
    __syncthreads();
}

// Where the sums of a lane lie in the tile: calls f(row, column, x0, x1) for each pair of neighbouring columns.
template <class S, class F> __device__ __forceinline__ void for_pairs(const Sums<S> &sums, F f) {
    const int lane = lane_index(), warp = threadIdx.x / WARP;
    const int row = warp / S::WARPS_N * S::M16 * 16 + lane / 4;
    const int column = warp % S::WARPS_N * S::N8 * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < S::M16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < S::N8; j++)
                f(row + i * 16 + half * 8, column + j * 8, sums.x[i][j][2 * half], sums.x[i][j][2 * half + 1]);
}

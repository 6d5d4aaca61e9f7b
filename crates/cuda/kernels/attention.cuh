// What the forward and the backward pass of attention share: sizes of tiles, masks, and where a head lies.
//
// Compiled with -DHEAD=<columns of a tile>: the size of a head, rounded up to 32, 64, 128 or 256. Columns beyond the head are 0.
#pragma once
#include "tile.cuh"

#define LOG2_E 1.44269504088896f
#define LN_2 0.693147180559945f

#define STRIDE padded<ELEMENT>(HEAD)
#define HEAD_BYTES (HEAD * (int)sizeof(ELEMENT))
// Whether left operands that many tiles are multiplied with stay in registers.
#define HELD (sizeof(ELEMENT) == 2 && HEAD <= 64)
// Buffers of the tiles that pass through shared memory: with two, the next tile arrives while one is used.
#define BUFFERS (HEAD_BYTES <= 256 ? 2 : 1)

using Left = LeftRows<ELEMENT, HEAD, HELD>;

// The sizes of an attention.
struct Extents {
    u64 heads, size;
    // Queries of a sample, and keys that there are for them.
    u32 queries, keys;
    // Positions before the first query.
    u32 past;
    int causal;
    // log2(e) / sqrt(size).
    f32 factor;
};

// Which probabilities are dropped: that of (sample, head, key, query) has the counter first + sample * sample_stride +
// (head * seq + key) * seq + query.
struct AttentionDropout {
    DropoutMask mask;
    u64 first, sample_stride;
};

// The counter of (key 0, query 0) of a head.
__device__ __forceinline__ u64 head_counter(const AttentionDropout &dropout, u64 sample, u64 head, u64 seq) {
    return dropout.first + sample * dropout.sample_stride + head * seq * seq;
}

// The rows of one head of one sample.
struct Rows {
    const ELEMENT *at;
    u64 stride;
};

template <int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(ELEMENT *tile, const Rows &rows, u64 first, u64 end, u64 size) {
    const Source<ELEMENT> source = {rows.at, rows.stride, has_whole_chunks(rows.at, rows.stride, size)};
    load_tile<ELEMENT, ROWS, HEAD, THREADS>(tile, source, first, 0, end, size);
}

__device__ __forceinline__ bool is_visible(const Extents &e, u32 query, u32 key) {
    return key < e.keys && (!e.causal || key <= e.past + query);
}

// Whether each of some queries sees each of some keys: `queries` from `query` on, of which a tile may have fewer, and `keys` from `key`.
__device__ __forceinline__ bool sees_all(const Extents &e, u32 query, u32 queries, u32 key, u32 keys) {
    return query + queries <= e.queries && key + keys <= e.keys && (!e.causal || key + keys - 1 <= e.past + query);
}

// sums = 0.
template <int M, int N> __device__ __forceinline__ void clear(f32 (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) sums[m][n][c] = 0.0f;
}

// Writes a warp's 16 rows of HEAD columns, times a factor for each row, from row `first` on.
__device__ __forceinline__ void store_rows(const f32 (&sums)[HEAD / 8][4], ELEMENT *to, u64 stride, u64 first, u64 end, u64 size,
                                           const f32 (&factors)[2]) {
    const int lane = lane_index();
    const bool in_pairs = ((u64)to / sizeof(ELEMENT) | stride | size) % 2 == 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u64 row = first + lane / 4 + half * 8;
        if (row >= end) continue;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
            const u64 column = n * 8 + lane % 4 * 2;
            Two<ELEMENT> two;
#pragma unroll
            for (int c = 0; c < 2; c++) two.x[c] = from_f32<ELEMENT>(sums[n][half * 2 + c] * factors[half]);
            if (in_pairs) {
                if (column < size) *(Two<ELEMENT> *)(to + row * stride + column) = two;
            } else {
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (column + c < size) to[row * stride + column + c] = two.x[c];
            }
        }
    }
}

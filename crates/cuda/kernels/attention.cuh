// What the forward and the backward pass of attention share: sizes of tiles, masks, and where a head lies.
//
// Compiled with -DHEAD=<columns of a tile>: the size of a head, rounded up to 32, 64, 128 or 256. Columns beyond the head are 0.
#pragma once
#include "tile.cuh"

#define LOG2_E 1.44269504088896f
#define LN_2 0.693147180559945f

#define STRIDE padded<ELEMENT>(HEAD)

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

// sums = 0.
template <int N> __device__ __forceinline__ void clear(f32 (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) sums[n][c] = 0.0f;
}

// Writes a warp's 16 rows of HEAD columns, times a factor for each row, from row `first` on.
__device__ __forceinline__ void store_rows(const f32 (&sums)[HEAD / 8][4], ELEMENT *to, u64 stride, u64 first, u64 end, u64 size,
                                           const f32 (&factors)[2]) {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u64 row = first + lane / 4 + half * 8;
        if (row >= end) continue;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const u64 column = n * 8 + lane % 4 * 2 + c;
                if (column < size) to[row * stride + column] = from_f32<ELEMENT>(sums[n][half * 2 + c] * factors[half]);
            }
    }
}

// What the forward and the backward pass of attention share: sizes of tiles, masks, and where a head lies.
//
// Compiled with -DHEAD=<columns of a tile>: the size of a head, rounded up to 32, 64, 128 or 256. Columns beyond the head are 0. With
// -DGROUPED heads of queries share those of keys and values, with -DWINDOWED positions see only near ones, with -DCAPPED scores are
// capped, with -DDOCUMENTS positions see their own document only (without a cache), up to themselves, and with -DAHEAD all of it:
// programs without them have no trace of them.
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
    // What scores (under a cap c, score / c) are multiplied by for exponents of 2.
    f32 factor;
    // Heads of keys and values.
    u64 kv_heads;
    // A query sees keys that are less than this far away, at most `keys`.
    u32 window;
    // scale / c under a cap c.
    f32 tanh_factor;
    // `[batch, queries]`: the position of each row in its document.
    const u32 *positions;
};

// The same for the heads of one sample.
__device__ __forceinline__ Extents of_sample(Extents e, u64 sample) {
#ifdef DOCUMENTS
    e.positions += sample * e.queries;
    // Known to be so, which saves registers.
    e.past = 0, e.keys = e.queries;
#ifdef AHEAD
    e.causal = 0;
#else
    e.causal = 1;
#endif
#endif
    return e;
}

// The first row of the document of a row.
__device__ __forceinline__ u32 document(const Extents &e, u32 row) {
    const u32 position = e.positions[row];
    return position < row ? row - position : 0;
}

// Heads of queries that read the same keys and values, and their number.
__device__ __forceinline__ u64 group_of(const Extents &e) {
#ifdef GROUPED
    return e.heads / e.kv_heads;
#else
    return 1;
#endif
}

// Elements of a row of q, k and v.
__device__ __forceinline__ u64 qkv_width(const Extents &e) {
#ifdef GROUPED
    return (e.heads + 2 * e.kv_heads) * e.size;
#else
    return 3 * (e.heads * e.size);
#endif
}

// Where a head's q (0), k (1) or v (2) starts in such a row.
__device__ __forceinline__ u64 qkv_column(const Extents &e, u64 head, int which) {
#ifdef GROUPED
    return which == 0 ? head * e.size : (e.heads + (which - 1) * e.kv_heads + head / group_of(e)) * e.size;
#else
    return which * (e.heads * e.size) + head * e.size;
#endif
}

// The first of the tiles of `tile` rows that a row at `position` sees.
__device__ __forceinline__ u32 first_seen(const Extents &e, u64 position, u32 tile) {
    u64 first = 0;
#ifdef WINDOWED
    if (position + 1 > e.window) first = position + 1 - e.window;
#endif
#ifdef DOCUMENTS
    const u32 start = document(e, (u32)position);
    if (start > first) first = start;
#endif
    return (u32)(first / tile * tile);
}

// The end of what the rows before `end` see ahead of them, or what sees them, of `count`.
__device__ __forceinline__ u64 last_seen(const Extents &e, u64 end, u64 count) {
#ifdef WINDOWED
    if (end + e.window - 1 < count) count = end + e.window - 1;
#endif
#ifdef DOCUMENTS
    // The end of the document of the last of them.
    u64 start = end < count ? end : count;
    while (start < count) {
        const u64 middle = (start + count) / 2;
        if (document(e, (u32)middle) < end) start = middle + 1;
        else count = middle;
    }
#endif
    return count;
}

// Under a cap: q·kᵀ becomes score / c.
template <int N> __device__ __forceinline__ void cap(f32 (&scores)[N][4], const Extents &e) {
#ifdef CAPPED
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) scores[n][c] = tanhf(scores[n][c] * e.tanh_factor);
#endif
}

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
#ifdef WINDOWED
    if (key + e.window <= e.past + query || key >= e.past + query + e.window) return false;
#endif
#ifdef DOCUMENTS
    if (query < e.queries && key < document(e, query)) return false;
#endif
#ifdef AHEAD
    if (key < e.keys && query < document(e, key)) return false;
#endif
    return key < e.keys && (!e.causal || key <= e.past + query);
}

// Whether each of some queries sees each of some keys: `queries` from `query` on, of which a tile may have fewer, and `keys` from `key`.
__device__ __forceinline__ bool sees_all(const Extents &e, u32 query, u32 queries, u32 key, u32 keys) {
#ifdef WINDOWED
    if (key + e.window < e.past + query + queries || key + keys > e.past + query + e.window) return false;
#endif
#ifdef DOCUMENTS
    if (query + queries > e.queries || key < document(e, query + queries - 1)) return false;
#endif
#ifdef AHEAD
    if (key + keys > e.keys || query < document(e, key + keys - 1)) return false;
#endif
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

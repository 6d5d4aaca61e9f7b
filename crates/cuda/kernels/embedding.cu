// Embedding: rows of a table, looked up by ids, rows of positions, and the gradients of both tables, without atomics.
//
// An id holds a token in its lower 31 bits and a token type in its upper bit. A table may be a part of a vocabulary: what is
// not there is zero. For the gradient, the first row of dy that has a token sums all rows that have it, in their order.
#include "numbers.cuh"

#define TOKEN 0x7fffffffu
// What an id asks for.
#define LOOKUP_TOKEN 0
#define LOOKUP_TYPE 1

struct Lookup {
    int kind;
    // Token of the table's first row, and tokens in all.
    u32 first, vocab;
    // Rows of the table.
    u32 rows;
};

// Row of an id's own table; -1 where it is not there. An id that cannot be is a fault.
__device__ __forceinline__ long long row_of(u32 id, const Lookup &lookup, u64 *fault, u32 call) {
    if (lookup.kind == LOOKUP_TYPE) {
        const u32 row = id >> 31;
        if (row < lookup.rows) return row;
        report_fault(fault, call, row);
        return -1;
    }
    const u32 token = id & TOKEN;
    if (token >= lookup.vocab) {
        report_fault(fault, call, token);
        return -1;
    }
    return token >= lookup.first && token - lookup.first < lookup.rows ? (long long)(token - lookup.first) : -1;
}

// y[i] (+)= table[row of ids[i]] (+ positions[(first_row + i) mod seq]), rounded once. `positions` may be null. A block computes
// a row.
extern "C" __global__ void embedding(const u32 *ids, int kind, u32 first, u32 vocab, u32 table_rows, const ELEMENT *table,
                                     const ELEMENT *positions, u64 first_row, u64 seq, u64 hidden, int accumulate, ELEMENT *y,
                                     u64 *fault, u32 call) {
    const u64 i = blockIdx.x;
    const long long row = row_of(ids[i], Lookup{kind, first, vocab, table_rows}, fault, call);
    const ELEMENT *from = row < 0 ? nullptr : table + (u64)row * hidden;
    const ELEMENT *position = positions == nullptr ? nullptr : positions + (first_row + i) % seq * hidden;
    ELEMENT *to = y + i * hidden;
    const bool from_aligned = is_aligned(from), position_aligned = is_aligned(position), to_aligned = is_aligned(to);
    for (u64 column = 4 * threadIdx.x; column < hidden; column += 4 * blockDim.x) {
        f32 sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, more[4];
        if (from != nullptr) load4(from, column, hidden, from_aligned, sum);
        if (position != nullptr) {
            load4(position, column, hidden, position_aligned, more);
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] += more[j];
        }
        if (accumulate) {
            load4((const ELEMENT *)to, column, hidden, to_aligned, more);
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] += more[j];
        }
        store4(to, column, hidden, to_aligned, sum);
    }
}

// y[i] += positions[(first_row + i) mod seq]. A block computes a row.
extern "C" __global__ void add_positions(const ELEMENT *positions, u64 first_row, u64 seq, u64 hidden, ELEMENT *y) {
    const u64 i = blockIdx.x;
    const ELEMENT *position = positions + (first_row + i) % seq * hidden;
    ELEMENT *to = y + i * hidden;
    for (u64 column = threadIdx.x; column < hidden; column += blockDim.x)
        to[column] = from_f32<ELEMENT>(to_f32(to[column]) + to_f32(position[column]));
}

// Threads of a block that sums the rows of a token.
#define TOKEN_THREADS 128
// Rounds of as many ids as threads that a block looks at together.
#define ROUNDS 8

// Bit r: whether ids[start + r * TOKEN_THREADS + thread] has the token, and lies before `end`.
__device__ __forceinline__ u32 rounds_with(const u32 *ids, u32 start, u32 end, u32 token) {
    u32 found[ROUNDS], bits = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const u64 i = (u64)start + r * TOKEN_THREADS + threadIdx.x;
        found[r] = i < end ? ids[i] : 0;
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const u64 i = (u64)start + r * TOKEN_THREADS + threadIdx.x;
        if (i < end && (found[r] & TOKEN) == token) bits |= 1u << r;
    }
    return bits;
}

// dtable[row of ids[i]] (+)= dy[i], for tokens; without accumulation, rows of absent tokens were filled with zeros before.
// Block i has the token of row i; if an earlier row has the same, that row's block sums. dy `[n, hidden]`.
extern "C" __global__ void __launch_bounds__(TOKEN_THREADS)
    embedding_backward(const u32 *ids, u32 n, u32 first, u32 vocab, u32 table_rows, const ELEMENT *dy, u64 hidden,
                       OTHER *dtable, int accumulate, u64 *fault, u32 call) {
    // Rows of dy that have the token, in ascending order: those of one round.
    __shared__ u32 found[TOKEN_THREADS];
    __shared__ u32 counts[TOKEN_THREADS / WARP];
    const u32 own = blockIdx.x, id = ids[own] & TOKEN;
    const long long row = row_of(id, Lookup{LOOKUP_TOKEN, first, vocab, table_rows}, fault, call);
    if (row < 0) return;
    for (u64 start = 0; start < own; start += ROUNDS * TOKEN_THREADS)
        if (__syncthreads_or(rounds_with(ids, (u32)start, own, id))) return;
    const int lane = lane_index(), warp = threadIdx.x / WARP;
    // Strips of as many columns as the block has threads; the rows are found again for each.
    for (u64 strip = blockIdx.y * (u64)TOKEN_THREADS; strip < hidden; strip += (u64)gridDim.y * TOKEN_THREADS) {
        const u64 column = strip + threadIdx.x;
        // The first row is the sum itself.
        f32 sum = column < hidden ? to_f32(dy[(u64)own * hidden + column]) : 0.0f;
        for (u64 start = (u64)own + 1; start < n; start += ROUNDS * TOKEN_THREADS) {
            const u32 bits = rounds_with(ids, (u32)start, n, id);
            if (!__syncthreads_or(bits)) continue;
            for (int r = 0; r < ROUNDS; r++) {
                const bool has = bits >> r & 1;
                const u32 those = __ballot_sync(ALL_LANES, has);
                if (lane == 0) counts[warp] = __popc(those);
                __syncthreads();
                u32 before = 0, all = 0;
                for (int w = 0; w < TOKEN_THREADS / WARP; w++) {
                    if (w < warp) before += counts[w];
                    all += counts[w];
                }
                if (has) found[before + __popc(those & ((1u << lane) - 1))] = (u32)start + r * TOKEN_THREADS + threadIdx.x;
                __syncthreads();
                if (column < hidden) {
#pragma unroll 4
                    for (u32 f = 0; f < all; f++) sum += to_f32(dy[(u64)found[f] * hidden + column]);
                }
                __syncthreads();
            }
        }
        if (column < hidden) {
            OTHER *to = dtable + (u64)row * hidden + column;
            *to = from_f32<OTHER>(accumulate ? to_f32(*to) + sum : sum);
        }
    }
}

// partial[b] = the sums over block b of rows of dy of each token type. partial `[blocks, types, hidden]`. Grid: (hidden / 2 /
// threads, blocks of `grain` rows).
extern "C" __global__ void type_sums(const u32 *ids, const ELEMENT *dy, f32 *partial, u64 rows, u64 hidden, u64 grain,
                                     u32 types, u64 *fault, u32 call) {
    const u64 column = 2 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= hidden) return;
    const bool second = column + 1 < hidden;
    const u64 first = blockIdx.y * grain, end = first + grain < rows ? first + grain : rows;
    f32 sums[2][2] = {};
    for (u64 row = first; row < end; row++) {
        const u32 type = ids[row] >> 31;
        if (type >= types) report_fault(fault, call, type);
        const Two<ELEMENT> x = load2<false>(dy + row * hidden + column, second);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (type == 0) sums[0][j] += to_f32(x.x[j]);
            else sums[1][j] += to_f32(x.x[j]);
        }
    }
    f32 *line = partial + blockIdx.y * types * hidden + column;
    store2<false>(line, second, sums[0][0], sums[0][1]);
    if (types > 1) store2<false>(line + hidden, second, sums[1][0], sums[1][1]);
}

// dpositions[(first_row + i) mod seq] (+)= dy[i]; rows that dy does not touch are zeroed when not accumulating. dy `[rows,
// hidden]`, dpositions `[length, hidden]`; a block computes a row of dpositions.
extern "C" __global__ void position_gradient(const ELEMENT *dy, u64 rows, u64 hidden, u64 first_row, u64 seq,
                                             OTHER *dpositions, int accumulate) {
    const u64 position = blockIdx.x;
    // The first row of dy at this position.
    const u64 start = position < seq ? (position + seq - first_row % seq) % seq : rows;
    for (u64 column = threadIdx.x; column < hidden; column += blockDim.x) {
        f32 sum = 0.0f;
#pragma unroll 4
        for (u64 row = start; row < rows; row += seq) sum += to_f32(dy[row * hidden + column]);
        OTHER *to = dpositions + position * hidden + column;
        *to = from_f32<OTHER>(accumulate ? to_f32(*to) + sum : sum);
    }
}

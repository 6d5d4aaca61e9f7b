// Attention forward in tiles with an online softmax (Dao et al., arXiv 2205.14135): no matrix of scores is stored.
//
// A block computes 64 or 128 queries of one head of one sample, 16 or twice 16 in each warp, and walks over the keys in tiles from the
// first on. The order of the keys is the same for every query, so that a query over cached keys has the bits of the same query in
// the whole sequence. While a tile of keys and values is used, the next one arrives.
#include "attention.cuh"

// Times 16 queries of a warp: with two, a fragment of keys or values is loaded once for both. Dropout leaves no registers for them.
template <bool DROPS> __host__ __device__ constexpr int sixteens() { return HELD && !DROPS ? 2 : 1; }

#define THREADS 128
// The largest score of no key. Under a window, and with documents, a query may see no key of the first tile, and the difference of two must
// be a number.
#if defined(WINDOWED) || defined(DOCUMENTS)
#define LEAST -1e30f
#else
#define LEAST -INFINITE
#endif
// Keys of a tile, which passes through shared memory.
#define PASSING (HEAD_BYTES <= 128 ? 64 : 32)

struct Forward {
    // The first row of sample 0, head 0: queries, keys and values.
    const ELEMENT *q, *k, *v;
    // Elements between rows, and between samples.
    u64 q_stride, q_sample, k_stride, k_sample;
    ELEMENT *out;
    // `[batch, heads, queries]`; null when no backward follows.
    f32 *log_sum_exp;
};

// The online softmax of two rows of a lane.
struct Running {
    // Largest score so far, and the sum of probabilities of this lane's columns.
    f32 largest[2], total[2];
};

// Scores become probabilities; `fade` is what earlier sums are multiplied by. MASKED: some scores may be those of keys that a query
// does not see.
template <bool MASKED, int N>
__device__ __forceinline__ void softmax(f32 (&scores)[N][4], Running &running, f32 (&fade)[2], const Extents &e, u32 query,
                                        u32 key) {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        f32 largest = running.largest[half];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                f32 &score = scores[n][half * 2 + c];
                if (MASKED && !is_visible(e, query + lane / 4 + half * 8, key + n * 8 + lane % 4 * 2 + c)) score = -INFINITE;
                largest = fmaxf(largest, score);
            }
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        fade[half] = fast_power_of_two((running.largest[half] - largest) * e.factor);
        // Every query sees a key of the first tile, so the largest score is a number (or it starts as one).
        const f32 offset = -largest * e.factor;
        f32 total = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                f32 &score = scores[n][half * 2 + c];
                score = fast_power_of_two(fmaf(score, e.factor, offset));
                total += score;
            }
        running.total[half] = fmaf(running.total[half], fade[half], total);
        running.largest[half] = largest;
    }
}

// Multiplies probabilities by the dropout factors.
template <int N>
__device__ __forceinline__ void drop(f32 (&p)[N][4], const DropoutMask &mask, u64 counter, u64 seq, u64 query, u64 key) {
    const int lane = lane_index();
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u64 row = query + lane / 4 + c / 2 * 8, column = key + n * 8 + lane % 4 * 2 + c % 2;
            p[n][c] *= dropout_factor(mask, counter + column * seq + row);
        }
}

// The sums of a warp, and the softmax of their rows.
template <int M16> struct Queries {
    f32 sums[M16][HEAD / 8][4];
    Running running[M16];
};

// Adds a tile of keys and values, from `key` on, for the queries from `query` on.
template <bool DROPS, int M16>
__device__ __forceinline__ void add_tile(Queries<M16> &to, const Left (&q)[M16], const ELEMENT *k_tile, const ELEMENT *v_tile,
                                         const Extents &e, u32 query, u32 key, const DropoutMask &mask, u64 counter) {
    const int lane = lane_index();
    f32 scores[M16][PASSING / 8][4];
    clear(scores);
    multiply_rows<ELEMENT, M16, PASSING / 8, HEAD, HELD>(scores, q, k_tile, lane);
#pragma unroll
    for (int m = 0; m < M16; m++) {
        const u32 first = query + m * 16;
        cap(scores[m], e);
        f32 fade[2];
        if (sees_all(e, first, 16, key, PASSING)) softmax<false>(scores[m], to.running[m], fade, e, first, key);
        else softmax<true>(scores[m], to.running[m], fade, e, first, key);
        if constexpr (DROPS) drop(scores[m], mask, counter, e.queries, first, key);
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) to.sums[m][n][c] *= fade[c / 2];
    }
    multiply_sums<ELEMENT, M16, HEAD / 8, PASSING / 8>(to.sums, scores, v_tile, lane);
}

template <bool DROPS> __device__ __forceinline__ void forward(const Forward &f, Extents e, u64 pairs, const AttentionDropout &dropout) {
    constexpr int M16 = sixteens<DROPS>(), QUERIES = 4 * 16 * M16;
    extern __shared__ __align__(16) unsigned char memory[];
    ELEMENT *q_tile = (ELEMENT *)memory, *passing = q_tile + QUERIES * STRIDE;
    const int lane = lane_index(), warp = threadIdx.x / WARP;
    // With a causal mask the last queries see the most keys: they come first.
    const u64 tiles = (e.queries + QUERIES - 1) / QUERIES;
    const u64 pair = blockIdx.x % pairs, first = (tiles - 1 - blockIdx.x / pairs) * QUERIES;
    e = of_sample(e, pair / e.heads);
    const u64 sample = pair / e.heads, head = pair % e.heads;
    const Rows q = {f.q + sample * f.q_sample + head * e.size, f.q_stride};
    const u64 kv_head = head / group_of(e);
    const Rows k = {f.k + sample * f.k_sample + kv_head * e.size, f.k_stride};
    const Rows v = {f.v + sample * f.k_sample + kv_head * e.size, f.k_stride};
    const u64 last = e.past + (first + QUERIES < e.queries ? first + QUERIES : e.queries);
    const u64 start = first_seen(e, e.past + first, PASSING), end = e.causal && last < e.keys ? last : last_seen(e, last, e.keys);
    const u64 query = first + warp * 16 * M16, counter = head_counter(dropout, sample, head, e.queries);
    const auto load = [&](u64 key) {
        ELEMENT *tile = passing + key / PASSING % BUFFERS * 2 * PASSING * STRIDE;
        load_rows<PASSING, THREADS>(tile, k, key, e.keys, e.size);
        load_rows<PASSING, THREADS>(tile + PASSING * STRIDE, v, key, e.keys, e.size);
        commit_copies();
    };

    Queries<M16> all;
    clear(all.sums);
    Left left[M16];
    load_rows<QUERIES, THREADS>(q_tile, q, first, e.queries, e.size);
    load(start);
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M16; m++) {
        left[m].take(q_tile + (warp * M16 + m) * 16 * STRIDE, lane);
        all.running[m] = {{LEAST, LEAST}, {0.0f, 0.0f}};
    }
    for (u64 key = start; key < end; key += PASSING) {
        // This tile is there, for all threads, and all have left the one before.
        wait_copies<0>();
        __syncthreads();
        if (BUFFERS == 2 && key + PASSING < end) load(key + PASSING);
        const ELEMENT *tile = passing + key / PASSING % BUFFERS * 2 * PASSING * STRIDE;
        add_tile<DROPS, M16>(all, left, tile, tile + PASSING * STRIDE, e, (u32)query, (u32)key, dropout.mask, counter);
        if constexpr (BUFFERS == 1) {
            __syncthreads();
            if (key + PASSING < end) load(key + PASSING);
        }
    }
    const u64 stride = e.heads * e.size;
#pragma unroll
    for (int m = 0; m < M16; m++) {
        f32 factors[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            f32 total = all.running[m].total[half];
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            factors[half] = 1.0f / total;
            const u64 row = query + m * 16 + lane / 4 + half * 8;
            if (f.log_sum_exp != nullptr && lane % 4 == 0 && row < e.queries)
                f.log_sum_exp[pair * e.queries + row] = all.running[m].largest[half] * e.factor * LN_2 + logf(total);
        }
        ELEMENT *to = f.out + sample * e.queries * stride + head * e.size;
        store_rows(all.sums[m], to, stride, query + m * 16, e.queries, e.size, factors);
    }
}

// q, k, v are those of sample 0, head 0; out `[batch, queries, heads * size]`. Grid: pairs * tiles of queries.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention(const ELEMENT *q, const ELEMENT *k, const ELEMENT *v, u64 q_stride, u64 q_sample, u64 k_stride, u64 k_sample,
              ELEMENT *out, f32 *log_sum_exp, u64 pairs, u64 heads, u64 size, u64 queries, u64 keys, u64 past, int causal,
              f32 factor, u64 kv_heads, u64 window, f32 tanh_factor, const u32 *positions) {
    const Forward f = {q, k, v, q_stride, q_sample, k_stride, k_sample, out, log_sum_exp};
    const Extents e = {heads, size, (u32)queries, (u32)keys, (u32)past, causal,
                       factor, kv_heads, (u32)window, tanh_factor, positions};
    forward<false>(f, e, pairs, AttentionDropout{});
}

// The same with dropout of the probabilities.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_with_dropout(const ELEMENT *q, const ELEMENT *k, const ELEMENT *v, u64 q_stride, u64 q_sample, u64 k_stride,
                           u64 k_sample, ELEMENT *out, f32 *log_sum_exp, u64 pairs, u64 heads, u64 size, u64 queries,
                           u64 keys, u64 past, int causal, f32 factor, u64 kv_heads, u64 window, f32 tanh_factor,
                           const u32 *positions, u64 dropout_key, u64 kept_min, f32 kept_factor, u64 dropout_first, u64 dropout_sample) {
    const Forward f = {q, k, v, q_stride, q_sample, k_stride, k_sample, out, log_sum_exp};
    const AttentionDropout dropout = {{dropout_key, kept_min, kept_factor}, dropout_first, dropout_sample};
    const Extents e = {heads, size, (u32)queries, (u32)keys, (u32)past, causal,
                       factor, kv_heads, (u32)window, tanh_factor, positions};
    forward<true>(f, e, pairs, dropout);
}

// Copies k and v, the last `kept` columns of qkv `[batch, rows, width]`, to rows `past ..` of cache `[batch, capacity, kept]`.
extern "C" __global__ void store_keys_values(const ELEMENT *qkv, ELEMENT *cache, u64 batch, u64 rows, u64 width, u64 kept,
                                             u64 past, u64 capacity) {
    const u64 n = batch * rows * kept;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const u64 row = i / kept, column = i % kept;
        const u64 to = row / rows * capacity + past + row % rows;
        cache[to * kept + column] = qkv[row * width + width - kept + column];
    }
}

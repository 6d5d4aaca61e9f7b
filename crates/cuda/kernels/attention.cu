// Attention forward in tiles with an online softmax (Dao et al., arXiv 2205.14135): no matrix of scores is stored.
//
// A block computes 64 queries of one head of one sample, 16 in each warp, and walks over the keys in tiles from the first on. The
// order of the keys is the same for every query, so that a query over cached keys has the bits of the same query in the
// whole sequence. While scores are computed, the tile of values arrives; while values are added, the next tile of keys.
#include "attention.cuh"

#define QUERIES 64
#define THREADS 128
// Keys of a tile, which passes through shared memory.
#define PASSING (HEAD * sizeof(ELEMENT) <= 128 ? 64 : 32)

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
    // Largest score so far times the factor, and the sum of probabilities of this lane's columns.
    f32 largest[2], total[2];
};

// Scores become probabilities; `fade` is what earlier sums are multiplied by.
template <int N>
__device__ __forceinline__ void softmax(f32 (&scores)[N][4], Running &running, f32 (&fade)[2], const Extents &e, u64 query,
                                        u64 key) {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        f32 largest = running.largest[half];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                f32 &score = scores[n][half * 2 + c];
                const bool visible = is_visible(e, query + lane / 4 + half * 8, key + n * 8 + lane % 4 * 2 + c);
                score = visible ? score * e.factor : -INFINITE;
                largest = fmaxf(largest, score);
            }
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        fade[half] = fast_power_of_two(running.largest[half] - largest);
        f32 total = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                f32 &score = scores[n][half * 2 + c];
                score = fast_power_of_two(score - largest);
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

template <bool DROPS> __device__ __forceinline__ void forward(const Forward &f, const Extents &e, u64 pairs, const AttentionDropout &dropout) {
    extern __shared__ __align__(16) unsigned char memory[];
    ELEMENT *q_tile = (ELEMENT *)memory, *k_tile = q_tile + QUERIES * STRIDE, *v_tile = k_tile + PASSING * STRIDE;
    const int lane = lane_index(), warp = threadIdx.x / WARP;
    // With a causal mask the last queries see the most keys: they come first.
    const u64 tiles = (e.queries + QUERIES - 1) / QUERIES;
    const u64 pair = blockIdx.x % pairs, first = (tiles - 1 - blockIdx.x / pairs) * QUERIES;
    const u64 sample = pair / e.heads, head = pair % e.heads;
    const Rows q = {f.q + sample * f.q_sample + head * e.size, f.q_stride};
    const Rows k = {f.k + sample * f.k_sample + head * e.size, f.k_stride};
    const Rows v = {f.v + sample * f.k_sample + head * e.size, f.k_stride};
    const u64 last = e.past + (first + QUERIES < e.queries ? first + QUERIES : e.queries);
    const u64 end = e.causal && last < e.keys ? last : e.keys;
    const u64 query = first + warp * 16;

    f32 sums[HEAD / 8][4];
    clear(sums);
    Running running = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
    load_rows<QUERIES, THREADS>(q_tile, q, first, e.queries, e.size);
    load_rows<PASSING, THREADS>(k_tile, k, 0, e.keys, e.size);
    commit_copies();
    for (u64 key = 0; key < end; key += PASSING) {
        load_rows<PASSING, THREADS>(v_tile, v, key, e.keys, e.size);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        f32 scores[PASSING / 8][4];
        clear(scores);
        multiply_rows<ELEMENT, PASSING / 8, HEAD>(scores, q_tile + warp * 16 * STRIDE, k_tile, lane);
        __syncthreads();
        if (key + PASSING < end) load_rows<PASSING, THREADS>(k_tile, k, key + PASSING, e.keys, e.size);
        commit_copies();
        f32 fade[2];
        softmax(scores, running, fade, e, query, key);
        if constexpr (DROPS) drop(scores, dropout.mask, head_counter(dropout, sample, head, e.queries), e.queries, query, key);
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) sums[n][c] *= fade[c / 2];
        wait_copies<1>();
        __syncthreads();
        multiply_sums<ELEMENT, HEAD / 8, PASSING / 8>(sums, scores, v_tile, lane);
        __syncthreads();
    }
    f32 factors[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        f32 total = running.total[half];
        total += __shfl_xor_sync(ALL_LANES, total, 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        factors[half] = 1.0f / total;
        const u64 row = query + lane / 4 + half * 8;
        if (f.log_sum_exp != nullptr && lane % 4 == 0 && row < e.queries)
            f.log_sum_exp[pair * e.queries + row] = running.largest[half] * LN_2 + logf(total);
    }
    const u64 stride = e.heads * e.size;
    store_rows(sums, f.out + sample * e.queries * stride + head * e.size, stride, query, e.queries, e.size, factors);
}

// q, k, v are those of sample 0, head 0; out `[batch, queries, heads * size]`. Grid: pairs * tiles of queries.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention(const ELEMENT *q, const ELEMENT *k, const ELEMENT *v, u64 q_stride, u64 q_sample, u64 k_stride, u64 k_sample,
              ELEMENT *out, f32 *log_sum_exp, u64 pairs, u64 heads, u64 size, u64 queries, u64 keys, u64 past, int causal,
              f32 factor) {
    const Forward f = {q, k, v, q_stride, q_sample, k_stride, k_sample, out, log_sum_exp};
    forward<false>(f, Extents{heads, size, (u32)queries, (u32)keys, (u32)past, causal, factor}, pairs, AttentionDropout{});
}

// The same with dropout of the probabilities.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_with_dropout(const ELEMENT *q, const ELEMENT *k, const ELEMENT *v, u64 q_stride, u64 q_sample, u64 k_stride,
                           u64 k_sample, ELEMENT *out, f32 *log_sum_exp, u64 pairs, u64 heads, u64 size, u64 queries,
                           u64 keys, u64 past, int causal, f32 factor, u64 dropout_key, u64 kept_min, f32 kept_factor,
                           u64 dropout_first, u64 dropout_sample) {
    const Forward f = {q, k, v, q_stride, q_sample, k_stride, k_sample, out, log_sum_exp};
    const AttentionDropout dropout = {{dropout_key, kept_min, kept_factor}, dropout_first, dropout_sample};
    forward<true>(f, Extents{heads, size, (u32)queries, (u32)keys, (u32)past, causal, factor}, pairs, dropout);
}

// Copies k and v of qkv `[batch, rows, 3 * hidden]` to rows `past ..` of cache `[batch, capacity, 2 * hidden]`.
extern "C" __global__ void store_keys_values(const ELEMENT *qkv, ELEMENT *cache, u64 batch, u64 rows, u64 hidden, u64 past,
                                             u64 capacity) {
    const u64 n = batch * rows * 2 * hidden;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const u64 row = i / (2 * hidden), column = i % (2 * hidden);
        const u64 to = row / rows * capacity + past + row % rows;
        cache[to * 2 * hidden + column] = qkv[row * 3 * hidden + hidden + column];
    }
}

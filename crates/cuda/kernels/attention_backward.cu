// Attention backward in tiles: probabilities are computed again from log_sum_exp (Dao et al., arXiv 2307.08691).
//
// With p = exp(scale q·kᵀ - lse): dv = pᵀ·dout, ds = p * (dout·vᵀ - delta) * scale, dk = dsᵀ·q, dq = ds·k, where delta is the
// sum of dout * out of a query. Under dropout p is dropped in dv, dout·vᵀ in ds. Under a cap c, ds has the factor 1 - (score / c)².
//
// While a tile of rows that pass is used, the next one arrives. dk and dv are sums over queries (of one head that reads the key
// after another), dq is one over keys. One kernel computes dk and dv of a tile of keys, another dq of a tile of
// queries; each computes its scores itself. So nothing is added atomically, and every sum has one order.
#include "attention.cuh"

// Rows that a block computes, 16 in each warp: those that stay in shared memory.
#define STAYING (HEAD_BYTES <= 256 ? 64 : 32)
#define THREADS (STAYING / 16 * WARP)
// Rows of the tiles that pass through it. A warp holds two tiles of sums over them, and up to two over the head.
#define PASSING (HEAD_BYTES <= 64 ? 64 : 32)

// delta[pair, row] = the sum of dout * out over a head: a warp computes a row. out, dout `[batch, seq, heads * size]`.
extern "C" __global__ void attention_delta(const ELEMENT *out, const ELEMENT *dout, f32 *delta, u64 rows, u64 seq, u64 heads,
                                           u64 size) {
    const int lane = lane_index();
    // `rows` are batch * heads * seq.
    FOR_ROWS(index, rows) {
        const u64 pair = index / seq, row = index % seq;
        const u64 at = ((pair / heads * seq + row) * heads + pair % heads) * size;
        f32 sum = 0.0f;
        for (u64 i = lane; i < size; i += WARP) sum = fmaf(to_f32(out[at + i]), to_f32(dout[at + i]), sum);
        sum = warp_sum(sum);
        if (lane == 0) delta[index] = sum;
    }
}

struct Backward {
    // `[batch, seq, (heads + 2 * kv_heads) * size]`
    const ELEMENT *qkv;
    // `[batch, seq, heads * size]`
    const ELEMENT *dout;
    // `[batch, heads, seq]`
    const f32 *log_sum_exp, *delta;
    // Like qkv.
    ELEMENT *dqkv;
    // Factor of q·kᵀ.
    f32 scale;
};

// Rows of q (0), k (1) or v (2) of a head of queries.
__device__ __forceinline__ Rows part(const Backward &b, const Extents &e, u64 pair, int which) {
    const u64 width = qkv_width(e);
    return {b.qkv + pair / e.heads * e.queries * width + qkv_column(e, pair % e.heads, which), width};
}

__device__ __forceinline__ Rows dout_of(const Backward &b, const Extents &e, u64 pair) {
    const u64 hidden = e.heads * e.size;
    return {b.dout + pair / e.heads * e.queries * hidden + pair % e.heads * e.size, hidden};
}

__device__ __forceinline__ void store_part(const f32 (&sums)[1][HEAD / 8][4], const Backward &b, const Extents &e, u64 pair, int which,
                                           u64 first) {
    const u64 width = qkv_width(e);
    ELEMENT *to = b.dqkv + pair / e.heads * e.queries * width + qkv_column(e, pair % e.heads, which);
    store_rows(sums[0], to, width, first, e.queries, e.size, {1.0f, 1.0f});
}

// Whether some of a tile's pairs of query and key are not seen.
template <bool MASKED> struct Masked {
    static constexpr bool VALUE = MASKED;
};

// One score s and one derivative dp of its probability: p (dropped) and ds take their places. `lse` is in powers of two.
template <bool DROPS, bool MASKED>
__device__ __forceinline__ void differentiate(f32 &s, f32 &dp, const Backward &b, const Extents &e, f32 lse, f32 delta, u32 query,
                                              u32 key, const DropoutMask &mask, u64 counter) {
#ifdef CAPPED
    s = tanhf(s * e.tanh_factor);
    const f32 slope = b.scale * (1.0f - s * s);
#else
    const f32 slope = b.scale;
#endif
    f32 p = fast_power_of_two(fmaf(s, e.factor, -lse));
    if (MASKED && !(query < e.queries && is_visible(e, query, key))) p = 0.0f;
    f32 kept = p;
    if constexpr (DROPS) {
        const f32 factor = dropout_factor(mask, counter + (u64)key * e.queries + query);
        kept *= factor;
        dp *= factor;
    }
    s = kept;
    dp = p * ((dp - delta) * slope);
}

// dk (where KEYS) and dv (where VALUES) of a tile of keys.
template <bool DROPS, bool KEYS, bool VALUES>
__device__ __forceinline__ void keys_values(const Backward &b, Extents e, u64 units, const AttentionDropout &dropout) {
    extern __shared__ __align__(16) unsigned char memory[];
    ELEMENT *k_tile = (ELEMENT *)memory, *v_tile = k_tile + STAYING * STRIDE, *passing = v_tile + STAYING * STRIDE;
    __shared__ f32 lses[BUFFERS][PASSING], deltas[BUFFERS][PASSING];
    const int lane = lane_index(), warp = threadIdx.x / WARP;
    const u64 group = group_of(e), unit = blockIdx.x % units, first = blockIdx.x / units * STAYING;
    e = of_sample(e, unit * group / e.heads);
    // The first of the heads of queries that read these keys and values.
    u64 pair = unit * group;
    Rows q = part(b, e, pair, 0), dout = dout_of(b, e, pair);
    const Rows k = part(b, e, pair, 1), v = part(b, e, pair, 2);
    const u32 key = (u32)(first + warp * 16);
    u64 counter = head_counter(dropout, pair / e.heads, pair % e.heads, e.queries);
    const auto load = [&](u32 query) {
        const int buffer = query / PASSING % BUFFERS;
        ELEMENT *tile = passing + buffer * 2 * PASSING * STRIDE;
        load_rows<PASSING, THREADS>(tile, q, query, e.queries, e.size);
        load_rows<PASSING, THREADS>(tile + PASSING * STRIDE, dout, query, e.queries, e.size);
        for (int i = threadIdx.x; i < PASSING; i += THREADS) {
            const bool valid = query + i < e.queries;
            const u64 row = valid ? pair * e.queries + query + i : 0;
            copy4(&lses[buffer][i], b.log_sum_exp + row, valid);
            copy4(&deltas[buffer][i], b.delta + row, valid);
        }
        commit_copies();
    };

    f32 dk[1][KEYS ? HEAD / 8 : 1][4], dv[1][VALUES ? HEAD / 8 : 1][4];
    clear(dk);
    clear(dv);
    load_rows<STAYING, THREADS>(k_tile, k, first, e.queries, e.size);
    load_rows<STAYING, THREADS>(v_tile, v, first, e.queries, e.size);
    // Under a causal mask, earlier queries do not see these keys.
    const u32 start = e.causal ? (u32)(first / PASSING * PASSING) : first_seen(e, first, PASSING);
    const u32 end = (u32)last_seen(e, first + STAYING, e.queries);
    while (true) {
        load(start);
        wait_copies<0>();
        __syncthreads();
        Left left_k[1], left_v[1];
        left_k[0].take(k_tile + warp * 16 * STRIDE, lane);
        left_v[0].take(v_tile + warp * 16 * STRIDE, lane);
        for (u32 query = start; query < end; query += PASSING) {
            // This tile is there, for all threads, and all have left the one before.
            wait_copies<0>();
            __syncthreads();
            if (BUFFERS == 2 && query + PASSING < end) load(query + PASSING);
            const int buffer = query / PASSING % BUFFERS;
            const ELEMENT *q_tile = passing + buffer * 2 * PASSING * STRIDE, *dout_tile = q_tile + PASSING * STRIDE;
            // [key][query]
            f32 s[1][PASSING / 8][4], dp[1][PASSING / 8][4];
            clear(s);
            clear(dp);
            multiply_rows<ELEMENT, 1, PASSING / 8, HEAD, HELD>(s, left_k, q_tile, lane);
            if constexpr (KEYS) multiply_rows<ELEMENT, 1, PASSING / 8, HEAD, HELD>(dp, left_v, dout_tile, lane);
            const auto derive = [&](auto masked) {
#pragma unroll
                for (int n = 0; n < PASSING / 8; n++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const int column = n * 8 + lane % 4 * 2 + c % 2;
                        differentiate<DROPS, decltype(masked)::VALUE>(
                            s[0][n][c], dp[0][n][c], b, e, lses[buffer][column] * LOG2_E, deltas[buffer][column],
                            query + column, key + lane / 4 + c / 2 * 8, dropout.mask, counter);
                    }
            };
            if (sees_all(e, query, PASSING, key, 16)) derive(Masked<false>{});
            else derive(Masked<true>{});
            if constexpr (VALUES) multiply_sums<ELEMENT, 1, HEAD / 8, PASSING / 8>(dv, s, dout_tile, lane);
            if constexpr (KEYS) multiply_sums<ELEMENT, 1, HEAD / 8, PASSING / 8>(dk, dp, q_tile, lane);
            if constexpr (BUFFERS == 1) {
                __syncthreads();
                if (query + PASSING < end) load(query + PASSING);
            }
        }
        if (pair + 1 == unit * group + group) break;
        // The next head. All threads have left the last tile before its first one comes.
        pair++;
        q = part(b, e, pair, 0), dout = dout_of(b, e, pair);
        counter = head_counter(dropout, pair / e.heads, pair % e.heads, e.queries);
        __syncthreads();
    }
    const u64 of = unit * group;
    if constexpr (KEYS) store_part(dk, b, e, of, 1, key);
    if constexpr (VALUES) store_part(dv, b, e, of, 2, key);
}

// dq of a tile of queries.
template <bool DROPS>
__device__ __forceinline__ void queries(const Backward &b, Extents e, u64 pairs, const AttentionDropout &dropout) {
    extern __shared__ __align__(16) unsigned char memory[];
    ELEMENT *q_tile = (ELEMENT *)memory, *dout_tile = q_tile + STAYING * STRIDE, *passing = dout_tile + STAYING * STRIDE;
    const int lane = lane_index(), warp = threadIdx.x / WARP;
    const u64 tiles = (e.queries + STAYING - 1) / STAYING;
    const u64 pair = blockIdx.x % pairs, first = (tiles - 1 - blockIdx.x / pairs) * STAYING;
    e = of_sample(e, pair / e.heads);
    const Rows q = part(b, e, pair, 0), k = part(b, e, pair, 1), v = part(b, e, pair, 2), dout = dout_of(b, e, pair);
    const u32 query = (u32)(first + warp * 16);
    const u64 counter = head_counter(dropout, pair / e.heads, pair % e.heads, e.queries);
    const u32 start = first_seen(e, first, PASSING);
    const u64 end = e.causal && first + STAYING < e.queries ? first + STAYING : last_seen(e, first + STAYING, e.queries);
    const auto load = [&](u32 key) {
        ELEMENT *tile = passing + key / PASSING % BUFFERS * 2 * PASSING * STRIDE;
        load_rows<PASSING, THREADS>(tile, k, key, e.queries, e.size);
        load_rows<PASSING, THREADS>(tile + PASSING * STRIDE, v, key, e.queries, e.size);
        commit_copies();
    };

    f32 lses[2], deltas[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u64 row = query + lane / 4 + half * 8;
        lses[half] = row < e.queries ? b.log_sum_exp[pair * e.queries + row] * LOG2_E : 0.0f;
        deltas[half] = row < e.queries ? b.delta[pair * e.queries + row] : 0.0f;
    }
    f32 dq[1][HEAD / 8][4];
    clear(dq);
    load_rows<STAYING, THREADS>(q_tile, q, first, e.queries, e.size);
    load_rows<STAYING, THREADS>(dout_tile, dout, first, e.queries, e.size);
    load(start);
    wait_copies<0>();
    __syncthreads();
    Left left_q[1], left_dout[1];
    left_q[0].take(q_tile + warp * 16 * STRIDE, lane);
    left_dout[0].take(dout_tile + warp * 16 * STRIDE, lane);
    for (u32 key = start; key < end; key += PASSING) {
        wait_copies<0>();
        __syncthreads();
        if (BUFFERS == 2 && key + PASSING < end) load(key + PASSING);
        const ELEMENT *k_tile = passing + key / PASSING % BUFFERS * 2 * PASSING * STRIDE, *v_tile = k_tile + PASSING * STRIDE;
        // [query][key]
        f32 s[1][PASSING / 8][4], dp[1][PASSING / 8][4];
        clear(s);
        clear(dp);
        multiply_rows<ELEMENT, 1, PASSING / 8, HEAD, HELD>(s, left_q, k_tile, lane);
        multiply_rows<ELEMENT, 1, PASSING / 8, HEAD, HELD>(dp, left_dout, v_tile, lane);
        const auto derive = [&](auto masked) {
#pragma unroll
            for (int n = 0; n < PASSING / 8; n++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    differentiate<DROPS, decltype(masked)::VALUE>(
                        s[0][n][c], dp[0][n][c], b, e, lses[c / 2], deltas[c / 2], query + lane / 4 + c / 2 * 8,
                        key + n * 8 + lane % 4 * 2 + c % 2, dropout.mask, counter);
        };
        if (sees_all(e, query, 16, key, PASSING)) derive(Masked<false>{});
        else derive(Masked<true>{});
        multiply_sums<ELEMENT, 1, HEAD / 8, PASSING / 8>(dq, dp, k_tile, lane);
        if constexpr (BUFFERS == 1) {
            __syncthreads();
            if (key + PASSING < end) load(key + PASSING);
        }
    }
    store_part(dq, b, e, pair, 0, query);
}

// All take what `Backward`, `Extents` and `AttentionDropout` hold. Grid: units * tiles of STAYING rows, where a unit is a head of a
// sample: of queries for dq, of keys and values for the others.
#define BACKWARD(NAME, CALL)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                            \
        NAME(const ELEMENT *qkv, const ELEMENT *dout, const f32 *log_sum_exp, const f32 *delta, ELEMENT *dqkv,          \
             u64 units, u64 heads, u64 size, u64 seq, int causal, f32 factor, u64 kv_heads, u64 window, f32 tanh_factor,\
             const u32 *positions, f32 scale, u64 dropout_key, u64 kept_min, f32 kept_factor, u64 dropout_first, u64 dropout_sample) {        \
        const Backward b = {qkv, dout, log_sum_exp, delta, dqkv, scale};                                                \
        const Extents e = {heads,  size,     (u32)seq,    (u32)seq,   0, causal,                                        \
                           factor, kv_heads, (u32)window, tanh_factor, positions};                                      \
        CALL(b, e, units, AttentionDropout{{dropout_key, kept_min, kept_factor}, dropout_first, dropout_sample});       \
    }

BACKWARD(attention_queries, queries<false>)
BACKWARD(attention_queries_with_dropout, queries<true>)
#if HEAD <= 128
BACKWARD(attention_keys_values, (keys_values<false, true, true>))
BACKWARD(attention_keys_values_with_dropout, (keys_values<true, true, true>))
#else
// The sums of both do not fit into registers.
BACKWARD(attention_keys, (keys_values<false, true, false>))
BACKWARD(attention_keys_with_dropout, (keys_values<true, true, false>))
BACKWARD(attention_values, (keys_values<false, false, true>))
BACKWARD(attention_values_with_dropout, (keys_values<true, false, true>))
#endif

// Cross entropy of the logits of a linear layer, in parts of the vocabulary (crates/cpu/src/cross_entropy.rs has the method).
//
// Logits are never stored: a block computes 128 columns of some rows, which are a block of statistics, and keeps their
// exponentials relative to the largest. Blocks make the statistics of a row; from the rows of all parts come losses, and what
// a block of exponentials is multiplied by to become derivatives. Between them all is f64.
#include "product.cuh"

// Columns of a block of statistics.
#define STATISTICS_BLOCK 128
#define IGNORED 0xffffffffu

using S = Shape<ELEMENT, 2, 4, 4, 4>;
static_assert(S::COLUMNS == STATISTICS_BLOCK, "a tile is as wide as a block of statistics");

// Statistics of the logits of one row, over a block of columns or a part of the vocabulary.
struct alignas(16) Statistics {
    f32 largest;
    // Sum of exponentials relative to the largest logit.
    f32 sum;
    // Sum of the logits.
    f32 logits;
    // Logit of the target; 0 where it is elsewhere.
    f32 target;
};

// The column of a row's target in this part, or -1.
__device__ __forceinline__ long long target_column(const u32 *targets, u64 row, u64 first, u64 columns) {
    const u64 target = targets[row];
    return target >= first && target - first < columns ? (long long)(target - first) : -1;
}

// f over the sums of a quad of lanes, which hold one row.
__device__ __forceinline__ f32 quad_sum(f32 x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ __forceinline__ f32 quad_max(f32 x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

struct Logits {
    // A row; may be null.
    const ELEMENT *bias;
    const u32 *targets;
    u64 first;
    // `[rows, stride]`, with zeros behind the columns; null when no backward follows.
    ELEMENT *exponentials;
    u64 stride;
    // `[rows, blocks]`
    Statistics *blocks;
};

// e^x for x <= 0. Sixteen bits keep less than the card's approximation of powers of two.
__device__ __forceinline__ f32 exponential_of(f32 x) {
    return sizeof(ELEMENT) == 2 ? fast_power_of_two(x * 1.44269504f) : exponential(x);
}

// Stores the exponentials of one row that a lane holds, and zeros behind the columns. `columns` and `stride` are those from the lane's
// first column on.
template <bool WHOLE>
__device__ __forceinline__ void store_exponentials(const f32 (&e)[S::N8][4], int half, ELEMENT *to, bool in_pairs, int columns,
                                                   int stride) {
#pragma unroll
    for (int j = 0; j < S::N8; j++) {
        Two<ELEMENT> two;
#pragma unroll
        for (int c = 0; c < 2; c++)
            two.x[c] = from_f32<ELEMENT>(WHOLE || j * 8 + c < columns ? e[j][half * 2 + c] : 0.0f);
        if (in_pairs) {
            if (WHOLE || j * 8 < stride) *(Two<ELEMENT> *)(to + j * 8) = two;
        } else {
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (WHOLE || j * 8 + c < stride) to[j * 8 + c] = two.x[c];
        }
    }
}

// Statistics and exponentials of the tile at `place`. WHOLE: all its columns are there.
template <bool WHOLE>
__device__ __forceinline__ void consume(Sums<S> &sums, const Logits &to, TilePlace place, u64 rows, u64 all_columns) {
    __shared__ f32 largest[S::WARPS_N][S::ROWS], total[S::WARPS_N][S::ROWS], plain[S::WARPS_N][S::ROWS];
    __shared__ f32 at_target[S::ROWS];
    const int lane = lane_index(), warp = threadIdx.x / WARP, group = warp % S::WARPS_N;
    const int tile_row = warp / S::WARPS_N * S::M16 * 16 + lane / 4, rows_left = rows - place.row < S::ROWS ? rows - place.row : S::ROWS;
    const u64 tile_column = place.column + group * S::N8 * 8 + lane % 4 * 2;
    // From the lane's first column on; not positive where there are none.
    const int columns = (int)((long long)all_columns - (long long)tile_column), stride = columns + (int)(to.stride - all_columns);
    for (int i = threadIdx.x; i < S::ROWS; i += S::THREADS) at_target[i] = 0.0f;
    if (to.bias != nullptr) {
#pragma unroll
        for (int j = 0; j < S::N8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int column = j * 8 + c % 2;
                if (!WHOLE && column >= columns) continue;
                const f32 bias = to_f32(to.bias[tile_column + column]);
#pragma unroll
                for (int i = 0; i < S::M16; i++) sums.x[i][j][c] += bias;
            }
    }
#pragma unroll
    for (int i = 0; i < S::M16 * 2; i++) {
        f32 most = -INFINITE;
#pragma unroll
        for (int j = 0; j < S::N8 * 2; j++)
            if (WHOLE || j / 2 * 8 + j % 2 < columns) most = fmaxf(most, sums.x[i / 2][j / 2][i % 2 * 2 + j % 2]);
        most = quad_max(most);
        if (lane % 4 == 0) largest[group][tile_row + i / 2 * 16 + i % 2 * 8] = most;
    }
    __syncthreads();
    const bool in_pairs = to.stride % 2 == 0 && (u64)to.exponentials % sizeof(Two<ELEMENT>) == 0;
#pragma unroll
    for (int i = 0; i < S::M16 * 2; i++) {
        const int r = tile_row + i / 2 * 16 + i % 2 * 8;
        const u64 row = place.row + r;
        f32 most = -INFINITE, sum = 0.0f, logits = 0.0f;
#pragma unroll
        for (int w = 0; w < S::WARPS_N; w++) most = fmaxf(most, largest[w][r]);
        const long long target = r < rows_left ? target_column(to.targets, row, to.first, all_columns) - (long long)tile_column : -1;
        if (target >= 0 && target < S::N8 * 8) {
#pragma unroll
            for (int j = 0; j < S::N8 * 2; j++)
                if (j / 2 * 8 + j % 2 == (int)target) at_target[r] = sums.x[i / 2][j / 2][i % 2 * 2 + j % 2];
        }
#pragma unroll
        for (int j = 0; j < S::N8 * 2; j++) {
            f32 &x = sums.x[i / 2][j / 2][i % 2 * 2 + j % 2];
            if (!WHOLE && j / 2 * 8 + j % 2 >= columns) continue;
            logits += x;
            x = exponential_of(x - most);
            sum += x;
        }
        if (to.exponentials != nullptr && r < rows_left) {
            ELEMENT *numbers = to.exponentials + row * to.stride + tile_column;
            store_exponentials<WHOLE>(sums.x[i / 2], i % 2, numbers, in_pairs, columns, stride);
        }
        sum = quad_sum(sum);
        logits = quad_sum(logits);
        if (lane % 4 == 0) {
            total[group][r] = sum;
            plain[group][r] = logits;
        }
    }
    __syncthreads();
    const u64 blocks = (all_columns + STATISTICS_BLOCK - 1) / STATISTICS_BLOCK;
    for (int r = threadIdx.x; r < rows_left; r += S::THREADS) {
        f32 most = -INFINITE, sum = 0.0f, logits = 0.0f;
        for (int w = 0; w < S::WARPS_N; w++) {
            most = fmaxf(most, largest[w][r]);
            sum += total[w][r];
            logits += plain[w][r];
        }
        to.blocks[(place.row + r) * blocks + place.column / STATISTICS_BLOCK] = {most, sum, logits, at_target[r]};
    }
}

template <bool TRANSPOSED>
__device__ __forceinline__ void statistics(const ELEMENT *x, const ELEMENT *w, const Logits &to, u64 rows, u64 columns,
                                           u64 hidden) {
    const u64 w_columns = TRANSPOSED ? hidden : columns;
    const Source<ELEMENT> left = source(x, hidden, hidden), right = source(w, w_columns, w_columns);
    const TilePlace place = tile_of_block<S>(rows, columns);
    Sums<S> sums;
    product_tile<ELEMENT, S, false, TRANSPOSED>(sums, left, right, place, rows, columns, hidden);
    if (place.column + STATISTICS_BLOCK <= columns) consume<true>(sums, to, place, rows, columns);
    else consume<false>(sums, to, place, rows, columns);
}

// x `[rows, hidden]`, w `[hidden, columns]`; exponentials, where given, `[rows, stride]`; blocks `[rows, blocks]`.
extern "C" __global__ void __launch_bounds__(S::THREADS)
    vocabulary_statistics(const ELEMENT *x, const ELEMENT *w, const ELEMENT *bias, const u32 *targets, u64 first,
                          ELEMENT *exponentials, u64 stride, Statistics *blocks, u64 rows, u64 columns, u64 hidden) {
    statistics<false>(x, w, Logits{bias, targets, first, exponentials, stride, blocks}, rows, columns, hidden);
}

// The same with w stored `[columns, hidden]`.
extern "C" __global__ void __launch_bounds__(S::THREADS)
    vocabulary_statistics_with_transposed(const ELEMENT *x, const ELEMENT *w, const ELEMENT *bias, const u32 *targets,
                                          u64 first, ELEMENT *exponentials, u64 stride, Statistics *blocks, u64 rows,
                                          u64 columns, u64 hidden) {
    statistics<true>(x, w, Logits{bias, targets, first, exponentials, stride, blocks}, rows, columns, hidden);
}

// Blocks of statistics that a warp computes side by side.
#define BLOCKS_AT_ONCE 4

// Statistics of `columns` neighbouring logits of a row, at most BLOCKS_AT_ONCE blocks: a lane has four columns of each block.
// `target` is the column of the row's target, or another number.
template <bool ALIGNED>
__device__ __forceinline__ void exponentiate(ELEMENT *logits, u32 columns, u32 target, Statistics *blocks) {
    const u32 first = 4 * lane_index();
    f32 x[BLOCKS_AT_ONCE][4], most[BLOCKS_AT_ONCE];
#pragma unroll
    for (int b = 0; b < BLOCKS_AT_ONCE; b++)
        load4((const ELEMENT *)logits, b * STATISTICS_BLOCK + first, columns, ALIGNED, x[b]);
#pragma unroll
    for (int b = 0; b < BLOCKS_AT_ONCE; b++) {
        most[b] = -INFINITE;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (b * STATISTICS_BLOCK + first + j < columns) most[b] = fmaxf(most[b], x[b][j]);
        most[b] = warp_max(most[b]);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS_AT_ONCE; b++) {
        f32 sum = 0.0f, plain = 0.0f, found = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 column = b * STATISTICS_BLOCK + first + j;
            if (column >= columns) continue;
            const f32 e = exponential(x[b][j] - most[b]);
            sum += e;
            plain += x[b][j];
            if (column == target) found = x[b][j];
            x[b][j] = e;
        }
        store4(logits, b * STATISTICS_BLOCK + first, columns, ALIGNED, x[b]);
        // All lanes but one hold 0.
        const Statistics block = {most[b], warp_sum(sum), warp_sum(plain), warp_sum(found)};
        if (lane_index() == 0 && b * STATISTICS_BLOCK < columns) blocks[b] = block;
    }
}

// The statistics of blocks of stored logits, which become exponentials where they lie: a warp computes BLOCKS_AT_ONCE blocks of a
// row. Grid: (blocks / BLOCKS_AT_ONCE / warps, rows).
extern "C" __global__ void logits_statistics(ELEMENT *logits, const u32 *targets, u64 first, Statistics *blocks, u64 rows,
                                             u64 columns) {
    const u64 count = (columns + STATISTICS_BLOCK - 1) / STATISTICS_BLOCK;
    const u64 block = ((u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * BLOCKS_AT_ONCE;
    const u64 start = block * STATISTICS_BLOCK;
    if (start >= columns) return;
    const u32 some = BLOCKS_AT_ONCE * STATISTICS_BLOCK, own = columns - start < some ? (u32)(columns - start) : some;
    const bool aligned = is_aligned(logits) && columns % 4 == 0;
    for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
        ELEMENT *numbers = logits + row * columns + start;
        const long long column = target_column(targets, row, first + start, own);
        const u32 target = column < 0 ? IGNORED : (u32)column;
        if (aligned) exponentiate<true>(numbers, own, target, blocks + row * count + block);
        else exponentiate<false>(numbers, own, target, blocks + row * count + block);
    }
}

// Combined statistics of pieces of a row.
struct Joined {
    f32 largest;
    f64 sum, logits, target;
};

// The sum of a warp's numbers along a fixed tree.
__device__ __forceinline__ f64 warp_sum(f64 x) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

// The statistics of each row, from those of its blocks: a warp computes a row.
extern "C" __global__ void join_statistics(const Statistics *blocks, Statistics *rows_statistics, u64 rows, u64 count) {
    const u32 rounds = (u32)((count + WARP - 1) / WARP);
    FOR_ROWS(row, rows) {
        const Statistics *pieces = blocks + row * count;
        Joined joined = {-INFINITE, 0.0, 0.0, 0.0};
#pragma unroll 8
        for (u32 round = 0; round < rounds; round++) {
            const u64 i = (u64)round * WARP + lane_index();
            joined.largest = fmaxf(joined.largest, i < count ? pieces[i].largest : -INFINITE);
        }
        joined.largest = warp_max(joined.largest);
#pragma unroll 4
        for (u32 round = 0; round < rounds; round++) {
            const u64 i = (u64)round * WARP + lane_index();
            if (i >= count) continue;
            const Statistics piece = pieces[i];
            joined.sum += (f64)piece.sum * exp((f64)(piece.largest - joined.largest));
            joined.logits += piece.logits;
            joined.target += piece.target;
        }
        const Statistics whole = {joined.largest, (f32)warp_sum(joined.sum), (f32)warp_sum(joined.logits),
                                  (f32)warp_sum(joined.target)};
        if (lane_index() == 0) rows_statistics[row] = whole;
    }
}

// The numbers of one row over all parts of the vocabulary.
struct LossRow {
    f64 loss;
    // Factor of exponentials relative to the largest logit.
    f64 weight;
    f32 largest;
    // Subtracted from every derivative.
    f32 spread;
    f32 at_target;
};

__device__ LossRow loss_of_row(const Statistics *statistics, u64 parts, u64 rows, u64 row, u64 classes, f64 scale,
                               f32 label_smoothing, f32 z_loss_weight) {
    Joined joined = {-INFINITE, 0.0, 0.0, 0.0};
    for (u64 part = 0; part < parts; part++) joined.largest = fmaxf(joined.largest, statistics[part * rows + row].largest);
    for (u64 part = 0; part < parts; part++) {
        const Statistics piece = statistics[part * rows + row];
        joined.sum += (f64)piece.sum * exp((f64)(piece.largest - joined.largest));
        joined.logits += (f64)piece.logits;
        joined.target += (f64)piece.target;
    }
    const f64 smoothing = label_smoothing, z_loss = z_loss_weight;
    const f64 log_sum_exp = log(joined.sum) + (f64)joined.largest;
    const f64 mean = joined.logits / (f64)classes;
    LossRow of;
    of.loss = (1.0 - smoothing) * (log_sum_exp - joined.target) + smoothing * (log_sum_exp - mean) +
              z_loss * log_sum_exp * log_sum_exp;
    of.weight = scale * (1.0 + 2.0 * z_loss * log_sum_exp) / joined.sum;
    of.largest = joined.largest;
    of.spread = (f32)(scale * smoothing / (f64)classes);
    of.at_target = (f32)(scale * (1.0 - smoothing));
    return of;
}

// Blocks of statistics of which a block of threads has the factors at a time.
#define FACTORS 256
// Columns of which it has them.
#define STRIP (FACTORS * STATISTICS_BLOCK)
// Chunks that a thread loads before it stores the first.
#define CHUNKS_AT_ONCE 2

// How the exponentials of one row become derivatives, over a strip of its columns.
struct Derivatives {
    // One for each block of statistics.
    const f32 *factors;
    // Subtracted.
    f32 spread, at_target;
    // Column of the target, or another number.
    u32 target;
    bool ignored;

    __device__ __forceinline__ f32 of(f32 exponential, u32 column, f32 factor) const {
        f32 derivative = fmaf(exponential, factor, -spread);
        if (column == target) derivative -= at_target;
        return ignored ? 0.0f : derivative;
    }
};

// All threads of a block compute the first `columns` columns of a strip.
__device__ __forceinline__ void differentiate(ELEMENT *strip, u32 columns, const Derivatives &derivatives) {
    using Elements = Chunk<ELEMENT>;
    // Elements before the first chunk, and whole chunks.
    const u32 offset = (u32)((u64)strip / sizeof(ELEMENT)) % Elements::COUNT;
    const u32 before = min(columns, (Elements::COUNT - offset) % Elements::COUNT);
    const u32 chunks = (columns - before) / Elements::COUNT;
    Elements *at = (Elements *)(strip + before);
    for (u32 start = threadIdx.x; start < chunks; start += CHUNKS_AT_ONCE * blockDim.x) {
        Elements x[CHUNKS_AT_ONCE];
#pragma unroll
        for (int c = 0; c < CHUNKS_AT_ONCE; c++)
            if (start + c * blockDim.x < chunks) x[c] = at[start + c * blockDim.x];
#pragma unroll
        for (int c = 0; c < CHUNKS_AT_ONCE; c++) {
            const u32 chunk = start + c * blockDim.x;
            if (chunk >= chunks) break;
            const u32 column = before + chunk * Elements::COUNT, last = column + Elements::COUNT - 1;
            const f32 low = derivatives.factors[column / STATISTICS_BLOCK];
            const f32 high = derivatives.factors[last / STATISTICS_BLOCK];
#pragma unroll
            for (int j = 0; j < Elements::COUNT; j++) {
                const f32 factor = column % STATISTICS_BLOCK + j < STATISTICS_BLOCK ? low : high;
                x[c].x[j] = from_f32<ELEMENT>(derivatives.of(to_f32(x[c].x[j]), column + j, factor));
            }
            at[chunk] = x[c];
        }
    }
    // The elements around the chunks.
    const u32 gap = chunks * Elements::COUNT;
    for (u32 i = threadIdx.x; i < columns - gap; i += blockDim.x) {
        const u32 column = i < before ? i : i + gap;
        const f32 factor = derivatives.factors[column / STATISTICS_BLOCK];
        strip[column] = from_f32<ELEMENT>(derivatives.of(to_f32(strip[column]), column, factor));
    }
}

// losses[row] = the loss of the row, 0 where its target is ignored, and of_rows[row], where given, too; exponentials, where given, become
// derivatives, times weights[row] where given. A block of FACTORS threads computes a row.
extern "C" __global__ void __launch_bounds__(FACTORS)
    vocabulary_loss(const Statistics *statistics, u64 parts, const Statistics *blocks, const u32 *targets, u64 first, u64 classes,
                    f32 gradient_scale, f32 label_smoothing, f32 z_loss, ELEMENT *exponentials, const f32 *weights, f32 *of_rows,
                    f64 *losses, u64 rows, u64 columns, u64 stride, u64 *fault, u32 call) {
    __shared__ LossRow shared;
    __shared__ f32 factors[FACTORS];
    const u64 row = blockIdx.x;
    const u32 id = targets[row];
    const bool ignored = id == IGNORED || id >= classes;
    if (threadIdx.x == 0) {
        if (id != IGNORED && id >= classes) report_fault(fault, call, id);
        LossRow of = {};
        const f64 scale = (f64)gradient_scale * (weights == nullptr ? 1.0 : (f64)weights[row]);
        if (!ignored) of = loss_of_row(statistics, parts, rows, row, classes, scale, label_smoothing, z_loss);
        losses[row] = of.loss;
        if (of_rows != nullptr) of_rows[row] = (f32)of.loss;
        shared = of;
    }
    if (exponentials == nullptr) return;
    const u64 count = (columns + STATISTICS_BLOCK - 1) / STATISTICS_BLOCK;
    for (u64 strip = 0; strip < columns; strip += STRIP) {
        __syncthreads();
        const u64 block = strip / STATISTICS_BLOCK + threadIdx.x;
        if (block < count) {
            const f32 power = blocks[row * count + block].largest - shared.largest;
            factors[threadIdx.x] = ignored ? 0.0f : (f32)(shared.weight * exp((f64)power));
        }
        __syncthreads();
        const u32 some = columns - strip < STRIP ? (u32)(columns - strip) : STRIP;
        const long long target = ignored ? -1 : target_column(targets, row, first + strip, some);
        const u32 column = target < 0 ? IGNORED : (u32)target;
        differentiate(exponentials + row * stride + strip, some, {factors, shared.spread, shared.at_target, column, ignored});
    }
}

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

// The statistics of blocks of stored logits, which become exponentials where they lie: a warp computes a block of a row.
extern "C" __global__ void logits_statistics(ELEMENT *logits, const u32 *targets, u64 first, Statistics *blocks, u64 rows,
                                             u64 columns) {
    const int lane = lane_index();
    const u64 count = (columns + STATISTICS_BLOCK - 1) / STATISTICS_BLOCK;
    FOR_ROWS(index, rows * count) {
        const u64 row = index / count, start = index % count * STATISTICS_BLOCK;
        ELEMENT *numbers = logits + row * columns;
        const long long target = target_column(targets, row, first, columns);
        f32 x[STATISTICS_BLOCK / WARP];
        f32 most = -INFINITE, sum = 0.0f, plain = 0.0f, found = 0.0f;
#pragma unroll
        for (int j = 0; j < STATISTICS_BLOCK / WARP; j++) {
            const u64 column = start + j * WARP + lane;
            x[j] = column < columns ? to_f32(numbers[column]) : -INFINITE;
            most = fmaxf(most, x[j]);
        }
        most = warp_max(most);
#pragma unroll
        for (int j = 0; j < STATISTICS_BLOCK / WARP; j++) {
            const u64 column = start + j * WARP + lane;
            if (column >= columns) continue;
            const f32 e = exponential(x[j] - most);
            numbers[column] = from_f32<ELEMENT>(e);
            sum += e;
            plain += x[j];
            if ((long long)column == target) found = x[j];
        }
        // All lanes but one hold 0.
        const Statistics block = {most, warp_sum(sum), warp_sum(plain), warp_sum(found)};
        if (lane == 0) blocks[index] = block;
    }
}

// Combined statistics of pieces of a row.
struct Joined {
    f32 largest;
    f64 sum, logits, target;
};

// The statistics of each row, from those of its blocks in their order: a warp computes a row.
extern "C" __global__ void join_statistics(const Statistics *blocks, Statistics *rows_statistics, u64 rows, u64 count) {
    const int lane = lane_index();
    FOR_ROWS(row, rows) {
        const Statistics *pieces = blocks + row * count;
        Joined joined = {-INFINITE, 0.0, 0.0, 0.0};
        for (u64 i = lane; i < count; i += WARP) joined.largest = fmaxf(joined.largest, pieces[i].largest);
        joined.largest = warp_max(joined.largest);
        for (u64 start = 0; start < count; start += WARP) {
            f64 sum = 0.0, logits = 0.0, target = 0.0;
            if (start + lane < count) {
                const Statistics piece = pieces[start + lane];
                sum = (f64)piece.sum * exp((f64)(piece.largest - joined.largest));
                logits = piece.logits;
                target = piece.target;
            }
            const int some = count - start < WARP ? (int)(count - start) : WARP;
            for (int i = 0; i < some; i++) {
                joined.sum += __shfl_sync(ALL_LANES, sum, i);
                joined.logits += __shfl_sync(ALL_LANES, logits, i);
                joined.target += __shfl_sync(ALL_LANES, target, i);
            }
        }
        if (lane == 0) rows_statistics[row] = {joined.largest, (f32)joined.sum, (f32)joined.logits, (f32)joined.target};
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

__device__ LossRow loss_of_row(const Statistics *statistics, u64 parts, u64 rows, u64 row, u64 classes, f32 gradient_scale,
                               f32 label_smoothing, f32 z_loss_weight) {
    Joined joined = {-INFINITE, 0.0, 0.0, 0.0};
    for (u64 part = 0; part < parts; part++) joined.largest = fmaxf(joined.largest, statistics[part * rows + row].largest);
    for (u64 part = 0; part < parts; part++) {
        const Statistics piece = statistics[part * rows + row];
        joined.sum += (f64)piece.sum * exp((f64)(piece.largest - joined.largest));
        joined.logits += (f64)piece.logits;
        joined.target += (f64)piece.target;
    }
    const f64 smoothing = label_smoothing, z_loss = z_loss_weight, scale = gradient_scale;
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

// losses[row] = the loss of the row, 0 where its target is ignored; exponentials, where given, become derivatives. A block
// computes a row.
extern "C" __global__ void vocabulary_loss(const Statistics *statistics, u64 parts, const Statistics *blocks,
                                           const u32 *targets, u64 first, u64 classes, f32 gradient_scale,
                                           f32 label_smoothing, f32 z_loss, ELEMENT *exponentials, f64 *losses, u64 rows,
                                           u64 columns, u64 stride, u64 *fault, u32 call) {
    __shared__ LossRow shared;
    const u64 row = blockIdx.x;
    const u32 id = targets[row];
    const bool ignored = id == IGNORED || id >= classes;
    if (threadIdx.x == 0) {
        if (id != IGNORED && id >= classes) report_fault(fault, call, id);
        shared.loss = 0.0;
        if (!ignored)
            shared = loss_of_row(statistics, parts, rows, row, classes, gradient_scale, label_smoothing, z_loss);
        losses[row] = shared.loss;
    }
    if (exponentials == nullptr) return;
    __syncthreads();
    const u64 count = (columns + STATISTICS_BLOCK - 1) / STATISTICS_BLOCK;
    const long long target = ignored ? -1 : target_column(targets, row, first, columns);
    ELEMENT *numbers = exponentials + row * stride;
    for (u64 block = threadIdx.x / WARP; block < count; block += blockDim.x / WARP) {
        f32 factor = 0.0f;
        if (!ignored && lane_index() == 0)
            factor = (f32)(shared.weight * exp((f64)(blocks[row * count + block].largest - shared.largest)));
        factor = __shfl_sync(ALL_LANES, factor, 0);
#pragma unroll
        for (int j = 0; j < STATISTICS_BLOCK / WARP; j++) {
            const u64 column = block * STATISTICS_BLOCK + j * WARP + lane_index();
            if (column >= columns) continue;
            f32 derivative = 0.0f;
            if (!ignored) {
                derivative = fmaf(to_f32(numbers[column]), factor, -shared.spread);
                if ((long long)column == target) derivative -= shared.at_target;
            }
            numbers[column] = from_f32<ELEMENT>(derivative);
        }
    }
}

// Sums of squares in blocks of 4,096 elements, for the gradient norm, and the count of numbers that are not finite.
#include "spans.cuh"
#include "tile.cuh"

#define NORM_BLOCK 4096
#define NORM_LANES 16

// Blocks that a block of threads sums: a warp adds those of both, 16 lanes each.
#define NORM_PAIR 2
#define NORM_THREADS 128
// Elements that a lane loads before it adds the first.
#define NORM_STEPS 16

#define NORM_SPANS 120

// One tensor.
struct Span {
    const ELEMENT *x;
    u64 n;
    // `[blocks]`
    f64 *squares;
    u64 first;
};

// A block of squares in shared memory; the second one begins in other banks.
struct NormBlock {
    alignas(16) ELEMENT x[NORM_BLOCK + NORM_LANES];
};

// Loads `count` elements, and zeros behind them so that lanes read whole groups of steps.
__device__ __forceinline__ void load_block(NormBlock &block, const ELEMENT *x, int count) {
    using Elements = Chunk<ELEMENT>;
    const int whole = has_chunks(x) ? count / Elements::COUNT : 0;
    for (int i = threadIdx.x; i < whole; i += NORM_THREADS)
        copy16(block.x + i * Elements::COUNT, x + i * Elements::COUNT, true);
    commit_copies();
    const int group = NORM_LANES * NORM_STEPS, padded = (count + group - 1) / group * group;
    for (int i = whole * Elements::COUNT + threadIdx.x; i < padded; i += NORM_THREADS)
        block.x[i] = i < count ? x[i] : from_f32<ELEMENT>(0.0f);
}

// For each span: squares[b] = the sum of squares of block b of x, in f64. Element i of a block goes to lane i mod 16, and the
// lanes are added along a tree: the sums of the processor, addition by addition. A square is exact in f64, so a multiply-add
// rounds once, too.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    block_squares(const __grid_constant__ Spans<Span, NORM_SPANS> table, u32 spans) {
    __shared__ NormBlock blocks[NORM_PAIR];
    const Span span = table.spans[span_of_block(table, spans)];
    const u64 pair = blockIdx.x - span.first;
    int counts[NORM_PAIR];
    for (int b = 0; b < NORM_PAIR; b++) {
        const u64 first = (pair * NORM_PAIR + b) * NORM_BLOCK, rest = first < span.n ? span.n - first : 0;
        counts[b] = rest < NORM_BLOCK ? (int)rest : NORM_BLOCK;
        load_block(blocks[b], span.x + first, counts[b]);
    }
    wait_copies<0>();
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    const int lane = threadIdx.x % NORM_LANES, half = threadIdx.x / NORM_LANES;
    const int count = half == 0 ? counts[0] : counts[1];
    const ELEMENT *own = blocks[half].x + lane;
    f64 sum = 0.0;
    for (int i = 0; i < count; i += NORM_LANES * NORM_STEPS) {
        f32 v[NORM_STEPS];
#pragma unroll
        for (int step = 0; step < NORM_STEPS; step++) v[step] = to_f32(own[i + step * NORM_LANES]);
#pragma unroll
        for (int step = 0; step < NORM_STEPS; step++) sum = fma((f64)v[step], (f64)v[step], sum);
    }
#pragma unroll
    for (int width = NORM_LANES / 2; width > 0; width /= 2) sum += __shfl_down_sync(ALL_LANES, sum, width, NORM_LANES);
    if (lane == 0 && count > 0) span.squares[pair * NORM_PAIR + half] = sum;
}

// counts[b] = how many numbers that block b of the grid reads are infinite or not a number.
extern "C" __global__ void count_non_finite(const ELEMENT *x, u64 n, u32 *counts) {
    __shared__ u32 found[32];
    const bool aligned = is_aligned(x);
    u32 count = 0;
    FOR_FOURS(i, n) {
        f32 v[4];
        load4(x, i, n, aligned, v);
#pragma unroll
        for (int j = 0; j < 4; j++) count += (__float_as_uint(v[j]) & 0x7f800000u) == 0x7f800000u;
    }
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) count += __shfl_xor_sync(ALL_LANES, count, distance);
    if (lane_index() == 0) found[threadIdx.x / WARP] = count;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < blockDim.x / WARP; warp++) count += found[warp];
        counts[blockIdx.x] = count;
    }
}

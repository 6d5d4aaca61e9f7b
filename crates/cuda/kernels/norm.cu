// Sums of squares in blocks of 4,096 elements, for the gradient norm, and the count of numbers that are not finite.
#include "numbers.cuh"

#define NORM_BLOCK 4096
#define NORM_LANES 16

// squares[b] = the sum of squares of block b of x, in f64. Element i of a block goes to lane i mod 16 of 16 threads, and the
// lanes are added along a tree: the sums of the processor, addition by addition.
extern "C" __global__ void block_squares(const ELEMENT *x, u64 n, f64 *squares) {
    const int lane = threadIdx.x % NORM_LANES;
    const u64 blocks = (n + NORM_BLOCK - 1) / NORM_BLOCK;
    // Both halves of a warp take part in the exchange, so a warp stays while either has a block.
    const u64 half = (u64)blockIdx.x * blockDim.x / NORM_LANES + threadIdx.x / NORM_LANES;
    const u64 halves = (u64)gridDim.x * blockDim.x / NORM_LANES;
    for (u64 pair = half / 2 * 2; pair < blocks; pair += halves) {
        const u64 block = pair + half % 2;
        const u64 first = block * NORM_BLOCK, end = first + NORM_BLOCK < n ? first + NORM_BLOCK : n;
        f64 sum = 0.0;
#pragma unroll 8
        for (u64 i = first + lane; i < end; i += NORM_LANES) {
            const f64 v = to_f32(x[i]);
            sum += v * v;
        }
#pragma unroll
        for (int width = NORM_LANES / 2; width > 0; width /= 2) sum += __shfl_down_sync(ALL_LANES, sum, width, NORM_LANES);
        if (lane == 0 && block < blocks) squares[block] = sum;
    }
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

// Sums of f64 along a fixed balanced tree, and the gradient norm. A block of 1,024 threads computes each.
//
// A left subtree has a power of two leaves. So neighbours are added in pairs, level by level, and a number without a
// neighbour goes up as it is. Segments of 2,048 numbers are whole subtrees: each is summed in shared memory, and then their
// sums are.
#include "spans.cuh"

#define SEGMENT 2048
#define TREE_SPANS 120

// One sum.
struct Span {
    const f64 *x;
    u64 n;
    f64 *out;
    u64 first;
};

// Sums `count` numbers of x, at most SEGMENT, along the tree, in place. All threads of the block call it.
__device__ f64 tree_sum_segment(f64 *x, u32 count) {
    while (count > 1) {
        const u32 pairs = count / 2;
        f64 sum = 0.0;
        // At most 1,024 pairs: one for each thread.
        const bool adds = threadIdx.x < pairs;
        if (adds) sum = x[2 * threadIdx.x] + x[2 * threadIdx.x + 1];
        const f64 last = x[count - 1];
        __syncthreads();
        if (adds) x[threadIdx.x] = sum;
        if (threadIdx.x == 0 && count % 2 == 1) x[pairs] = last;
        __syncthreads();
        count = (count + 1) / 2;
    }
    return x[0];
}

// The sum of n numbers, at most SEGMENT * SEGMENT.
__device__ f64 tree_sum_all(const f64 *x, u64 n) {
    __shared__ f64 segment[SEGMENT];
    __shared__ f64 sums[SEGMENT];
    if (n == 0) return 0.0;
    const u32 segments = (u32)((n + SEGMENT - 1) / SEGMENT);
    for (u32 s = 0; s < segments; s++) {
        const u64 first = (u64)s * SEGMENT;
        const u32 count = (u32)(n - first < SEGMENT ? n - first : SEGMENT);
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) segment[i] = x[first + i];
        __syncthreads();
        const f64 sum = tree_sum_segment(segment, count);
        if (threadIdx.x == 0) sums[s] = sum;
        __syncthreads();
    }
    return tree_sum_segment(sums, segments);
}

// For each span: out = the sum of x. A block computes a span.
extern "C" __global__ void __launch_bounds__(1024)
    tree_sum(const __grid_constant__ Spans<Span, TREE_SPANS> table, u32 spans) {
    const Span span = table.spans[span_of_block(table, spans)];
    const f64 sum = tree_sum_all(span.x, span.n);
    if (threadIdx.x == 0) *span.out = sum;
}

// norm = sqrt(sum of squares) / loss_scale; factor = min(1, max_norm / (norm + 1e-6)) / loss_scale, without clipping where
// max_norm is 0.
extern "C" __global__ void __launch_bounds__(1024) gradient_norm(const f64 *squares, u64 n, f32 max_norm, f32 loss_scale,
                                                                 f32 *norm_out, f32 *factor_out) {
    const f64 sum = tree_sum_all(squares, n);
    if (threadIdx.x != 0) return;
    const f32 norm = (f32)(sqrt(sum) / (f64)loss_scale);
    const f32 factor = max_norm == 0.0f ? 1.0f : max_norm / (norm + 1e-6f);
    *norm_out = norm;
    *factor_out = (factor > 1.0f ? 1.0f : factor) / loss_scale;
}

// out = the sum of the counts.
extern "C" __global__ void __launch_bounds__(1024) sum_counts(const u32 *counts, u32 n, f32 *out) {
    __shared__ u64 found[32];
    u64 sum = 0;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) sum += counts[i];
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (lane_index() == 0) found[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < blockDim.x / WARP; warp++) sum += found[warp];
    *out = (f32)sum;
}

// loss (+)= ((losses[0] + losses[1]) + losses[2]) + ..: the rows one after the other. One block; the others of its threads
// bring the numbers into shared memory.
extern "C" __global__ void __launch_bounds__(1024) sum_losses(const f64 *losses, u64 n, f64 *loss, int accumulate) {
    __shared__ f64 some[SEGMENT];
    f64 sum = accumulate ? *loss : 0.0;
    for (u64 first = 0; first < n; first += SEGMENT) {
        const u32 count = (u32)(n - first < SEGMENT ? n - first : SEGMENT);
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) some[i] = losses[first + i];
        __syncthreads();
        if (threadIdx.x == 0)
            for (u32 i = 0; i < count; i++) sum += some[i];
    }
    if (threadIdx.x == 0) *loss = sum;
}

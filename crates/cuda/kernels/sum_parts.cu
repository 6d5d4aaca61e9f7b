// Sums of parts that have come from other ranks, along the fixed tree over ranks: sum(lo..hi) = sum(lo..mid) + sum(mid..hi) with
// mid = lo + (the power of two from (hi - lo) / 2 on), as the processor's reduction adds.
#include "numbers.cuh"

// More ranks than the engine has.
#define LEVELS 12

// The sums of the first ranks that are whole subtrees: one for each power of two in their number. A further part is added to the smallest
// subtrees as a carry is to digits; the sum of all is that of the subtrees, from the smallest to the largest.
template <class T> struct Subtrees {
    T of[LEVELS];

    __device__ __forceinline__ void add(T x, u32 before) {
        bool carries = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            const bool is_taken = before >> level & 1;
            if (carries && is_taken) x = of[level] + x;
            if (carries && !is_taken) of[level] = x;
            carries = carries && is_taken;
        }
    }

    __device__ __forceinline__ T sum(u32 ranks) const {
        T sum = 0;
        bool has_any = false;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (ranks >> level & 1) {
                sum = has_any ? of[level] + sum : of[level];
                has_any = true;
            }
        }
        return sum;
    }
};

// Part r of n elements: this rank's own, or one of those of the others, which lie one behind the other.
template <class T>
__device__ __forceinline__ const T *part_of(const T *own, const T *others, u64 n, u32 rank, u32 r) {
    return r == rank ? own : others + (r < rank ? r : r - 1) * n;
}

#ifdef ELEMENT

// target (+)= the sum of the parts of all ranks, rounded once. It may be this rank's part.
extern "C" __global__ void sum_parts(const ELEMENT *own, const ELEMENT *others, ELEMENT *target, u64 n, u32 rank, u32 ranks,
                                     int accumulate) {
    const bool aligned = is_aligned(target);
    FOR_FOURS(i, n) {
        Subtrees<f32> trees[4];
        for (u32 r = 0; r < ranks; r++) {
            const ELEMENT *part = part_of(own, others, n, rank, r);
            f32 x[4];
            load4(part, i, n, is_aligned(part), x);
#pragma unroll
            for (int j = 0; j < 4; j++) trees[j].add(x[j], r);
        }
        f32 sum[4];
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] = trees[j].sum(ranks);
        if (accumulate) {
            f32 before[4];
            load4((const ELEMENT *)target, i, n, aligned, before);
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] = before[j] + sum[j];
        }
        store4(target, i, n, aligned, sum);
    }
}

#else

// The same for f64.
extern "C" __global__ void sum_parts(const f64 *own, const f64 *others, f64 *target, u64 n, u32 rank, u32 ranks,
                                     int accumulate) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        Subtrees<f64> trees;
        for (u32 r = 0; r < ranks; r++) trees.add(part_of(own, others, n, rank, r)[i], r);
        const f64 sum = trees.sum(ranks);
        target[i] = accumulate ? target[i] + sum : sum;
    }
}

#endif

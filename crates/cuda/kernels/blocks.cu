// dequantise: numbers of 8 or 4 bits in blocks (crates/tensor/src/blocks.rs) to floats, bound by memory. A block follows the one before.
#include "numbers.cuh"

// A block of NF4: its elements; its bytes of codes, of codes of scales, and in all, which end with the smallest scale and the step.
#define BLOCK 4096
#define CODES (BLOCK / 2)
#define SCALES (BLOCK / 64)
#define BYTES (CODES + SCALES + 8)

typedef unsigned char u8;

// Groups of 32 numbers behind their scale.
extern "C" __global__ void dequantise_q8_0(const u8 *from, ELEMENT *to, u64 n) {
    const bool aligned = is_aligned(to);
    FOR_FOURS(i, n) {
        const u8 *group = from + i / 32 * 34;
        const f32 scale = to_f32(*(const f16 *)group);
        f32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = (f32)(signed char)group[2 + i % 32 + j] * scale;
        store4(to, i, n, aligned, x);
    }
}

extern "C" __global__ void dequantise_nf4(const u8 *from, ELEMENT *to, u64 n) {
    const f32 codes[16] = {-1.0f,         -0.6961928f,  -0.52507305f, -0.3949175f,  -0.28444138f, -0.18477343f,
                           -0.091050036f, 0.0f,         0.0795803f,   0.1609302f,   0.2461123f,   0.33791524f,
                           0.44070983f,   0.562617f,    0.72295684f,  1.0f};
    __shared__ f32 numbers[16];
    if (threadIdx.x < 16) numbers[threadIdx.x] = codes[threadIdx.x];
    __syncthreads();
    const bool aligned = is_aligned(to);
    FOR_FOURS(i, n) {
        const u8 *block = from + i / BLOCK * BYTES;
        const u32 at = i % BLOCK;
        const f32 *range = (const f32 *)(block + CODES + SCALES);
        const f32 scale = range[0] + (f32)block[CODES + at / 64] * range[1];
        // The first of two elements is the high half of their byte.
        const u32 four = *(const u16 *)(block + at / 2);
        const f32 x[4] = {numbers[four >> 4 & 15] * scale, numbers[four & 15] * scale, numbers[four >> 12] * scale,
                          numbers[four >> 8 & 15] * scale};
        store4(to, i, n, aligned, x);
    }
}

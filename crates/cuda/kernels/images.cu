// ReLU, the patches of images for convolutions, and max pooling. Images are `[batch, height * width, channels]`. A thread computes an
// element; sums are in the order of the patches, as the processor's.
#include "numbers.cuh"

struct Patches {
    int image[2], kernel[2], stride[2], padding[2], output[2];
};

// The extents of patches as arguments, and made of them.
#define EXTENTS int ih, int iw, int kh, int kw, int sh, int sw, int ph, int pw, int oh, int ow
#define PATCHES {{ih, iw}, {kh, kw}, {sh, sw}, {ph, pw}, {oh, ow}}

#define FOR_EACH(at, n) for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < (n); at += gridDim.x * (u64)blockDim.x)

// x becomes max(x, 0); NaN stays NaN.
extern "C" __global__ void relu(ELEMENT *x, u64 n) {
    const bool aligned = is_aligned(x);
    FOR_FOURS(i, n) {
        f32 y[4];
        load4((const ELEMENT *)x, i, n, aligned, y);
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] = 0.0f > y[j] ? 0.0f : y[j];
        store4(x, i, n, aligned, y);
    }
}

// dy becomes dx, which is 0 where y <= 0.
extern "C" __global__ void relu_backward(const ELEMENT *y, ELEMENT *dy, u64 n) {
    const bool y_aligned = is_aligned(y), dy_aligned = is_aligned(dy);
    FOR_FOURS(i, n) {
        f32 value[4], dx[4];
        load4(y, i, n, y_aligned, value);
        load4((const ELEMENT *)dy, i, n, dy_aligned, dx);
#pragma unroll
        for (int j = 0; j < 4; j++) dx[j] = value[j] <= 0.0f ? 0.0f : dx[j];
        store4(dy, i, n, dy_aligned, dx);
    }
}

// The rows of all patches, n elements: y[row][channel * size + element] = x[pixel][channel], 0 for padding.
extern "C" __global__ void unfold(const ELEMENT *x, ELEMENT *y, u64 channels, u64 n, EXTENTS) {
    const u64 size = (u64)kh * kw, columns = channels * size, count = (u64)oh * ow;
    FOR_EACH(at, n) {
        const u64 row = at / columns, column = at % columns, sample = row / count;
        const int patch = row % count, element = column % size;
        const int i = patch / ow * sh - ph + element / kw, j = patch % ow * sw - pw + element % kw;
        const bool inside = i >= 0 && i < ih && j >= 0 && j < iw;
        y[at] = inside ? x[((sample * ih + i) * iw + j) * channels + column / size] : from_f32<ELEMENT>(0.0f);
    }
}

// The patches that have a pixel: first and behind the last, along height and along width.
struct Reach {
    int first[2], end[2];
};

__device__ __forceinline__ Reach reach(const Patches &p, const int (&pixel)[2]) {
    Reach reach;
#pragma unroll
    for (int d = 0; d < 2; d++) {
        const int at = pixel[d] + p.padding[d];
        reach.first[d] = (max(0, at + 1 - p.kernel[d]) + p.stride[d] - 1) / p.stride[d];
        reach.end[d] = min(p.output[d], at / p.stride[d] + 1);
    }
    return reach;
}

// The sum of each pixel over its patches, n elements.
extern "C" __global__ void fold(const ELEMENT *x, ELEMENT *y, u64 channels, u64 n, EXTENTS) {
    const Patches p = PATCHES;
    const u64 size = (u64)kh * kw, columns = channels * size, count = (u64)oh * ow, pixels = (u64)ih * iw;
    FOR_EACH(at, n) {
        const u64 row = at / channels, sample = row / pixels, channel = at % channels;
        const int pixel[2] = {(int)(row % pixels) / iw, (int)(row % pixels) % iw};
        const Reach r = reach(p, pixel);
        f32 sum = 0.0f;
        for (int i = r.first[0]; i < r.end[0]; i++)
            for (int j = r.first[1]; j < r.end[1]; j++) {
                const int element = (pixel[0] + ph - i * sh) * kw + pixel[1] + pw - j * sw;
                sum += to_f32(x[(sample * count + i * ow + j) * columns + channel * size + element]);
            }
        y[at] = from_f32<ELEMENT>(sum);
    }
}

// The number of the largest pixel of a patch in a channel of an image, of which `image` is the first pixel: the first of equals, and a
// NaN before all.
__device__ __forceinline__ int largest(const Patches &p, const ELEMENT *image, u64 channels, int patch) {
    const int top = patch / p.output[1] * p.stride[0] - p.padding[0];
    const int left = patch % p.output[1] * p.stride[1] - p.padding[1];
    int found = -1;
    f32 most = 0.0f;
    for (int i = max(0, top); i < min(p.image[0], top + p.kernel[0]); i++)
        for (int j = max(0, left); j < min(p.image[1], left + p.kernel[1]); j++) {
            const int pixel = i * p.image[1] + j;
            const f32 value = to_f32(image[pixel * channels]);
            if (found < 0 || value > most || value != value) {
                found = pixel;
                most = value;
            }
        }
    return found;
}

// The largest pixel of each patch, n elements.
extern "C" __global__ void max_pool(const ELEMENT *x, ELEMENT *y, u64 channels, u64 n, EXTENTS) {
    const Patches p = PATCHES;
    const u64 count = (u64)oh * ow, pixels = (u64)ih * iw;
    FOR_EACH(at, n) {
        const u64 row = at / channels;
        const ELEMENT *image = x + row / count * pixels * channels + at % channels;
        y[at] = image[largest(p, image, channels, row % count) * channels];
    }
}

// dy of each patch, at its largest pixel: n elements of dx.
extern "C" __global__ void max_pool_backward(
    const ELEMENT *x, const ELEMENT *dy, ELEMENT *dx, u64 channels, u64 n, EXTENTS) {
    const Patches p = PATCHES;
    const u64 count = (u64)oh * ow, pixels = (u64)ih * iw;
    FOR_EACH(at, n) {
        const u64 row = at / channels, sample = row / pixels, channel = at % channels;
        const int at_pixel = row % pixels, pixel[2] = {at_pixel / iw, at_pixel % iw};
        const ELEMENT *image = x + sample * pixels * channels + channel;
        const Reach r = reach(p, pixel);
        f32 sum = 0.0f;
        for (int i = r.first[0]; i < r.end[0]; i++)
            for (int j = r.first[1]; j < r.end[1]; j++) {
                const int patch = i * ow + j;
                if (largest(p, image, channels, patch) == at_pixel)
                    sum += to_f32(dy[(sample * count + patch) * channels + channel]);
            }
        dx[at] = from_f32<ELEMENT>(sum);
    }
}

// Kernels whose results tests compare with f64. They need no headers, so NVRTC alone compiles them.

typedef unsigned short bf16;

__device__ __forceinline__ float widen(bf16 value) { return __uint_as_float((unsigned)value << 16); }

__device__ __forceinline__ bf16 narrow(float value) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ unsigned narrow_pair(float low, float high) {
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// One block for each row of n elements.
extern "C" __global__ void layer_norm(const bf16* __restrict__ x, const float* __restrict__ weight,
                                      const float* __restrict__ bias, bf16* __restrict__ y,
                                      float* __restrict__ means, int n) {
  __shared__ float sums[2][32];
  const int row = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int warps = blockDim.x >> 5;
  const bf16* in = x + (size_t)row * n;
  float sum = 0.f, squares = 0.f;
  for (int i = thread; i < n; i += blockDim.x) {
    const float value = widen(in[i]);
    sum += value;
    squares += value * value;
  }
  sum = warp_sum(sum);
  squares = warp_sum(squares);
  if (lane == 0) {
    sums[0][warp] = sum;
    sums[1][warp] = squares;
  }
  __syncthreads();
  if (warp == 0) {
    sum = warp_sum(lane < warps ? sums[0][lane] : 0.f);
    squares = warp_sum(lane < warps ? sums[1][lane] : 0.f);
    __syncwarp();
    if (lane == 0) {
      sums[0][0] = sum;
      sums[1][0] = squares;
    }
  }
  __syncthreads();
  const float mean = sums[0][0] / n;
  const float scale = rsqrtf(sums[1][0] / n - mean * mean + 1e-5f);
  if (thread == 0) means[row] = mean;
  for (int i = thread; i < n; i += blockDim.x)
    y[(size_t)row * n + i] = narrow((widen(in[i]) - mean) * scale * weight[i] + bias[i]);
}

extern "C" __global__ void column_sums(const bf16* __restrict__ x, float* __restrict__ out, int rows, int n) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= n) return;
  float sum = 0.f;
  for (int row = blockIdx.y; row < rows; row += gridDim.y) sum += widen(x[(size_t)row * n + column]);
  atomicAdd(&out[column], sum);
}

extern "C" __global__ void gelu(const float* __restrict__ x, float* __restrict__ y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float v = x[i];
  y[i] = 0.5f * v * (1.f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
}

__device__ __forceinline__ void multiply_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void load_four(unsigned (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

__device__ __forceinline__ void load_two(unsigned (&r)[2], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(p)) : "memory");
}

__device__ __forceinline__ void load_two_transposed(unsigned (&r)[2], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(p)) : "memory");
}

__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// c[m, n] = a[m, k] * b[k, n], all by rows. A block of 128 threads computes 64 by 64, in steps of 32 of k.
extern "C" __global__ void product_bf16(const bf16* __restrict__ a, const bf16* __restrict__ b, float* __restrict__ c,
                                        int m, int n, int k) {
  __shared__ __align__(16) bf16 tiles_a[2][64][40];
  __shared__ __align__(16) bf16 tiles_b[2][32][72];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int warp_row = (warp >> 1) * 32, warp_column = (warp & 1) * 32;
  const int row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;
  float sums[2][4][4] = {};
  auto load = [&](int stage, int k0) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int chunk = thread + i * 128, row = chunk >> 2, column = (chunk & 3) * 8;
      copy_16(&tiles_a[stage][row][column], a + (size_t)(row0 + row) * k + k0 + column);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int chunk = thread + i * 128, row = chunk >> 3, column = (chunk & 7) * 8;
      copy_16(&tiles_b[stage][row][column], b + (size_t)(k0 + row) * n + column0 + column);
    }
    commit();
  };
  load(0, 0);
  for (int k0 = 0, stage = 0; k0 < k; k0 += 32, stage ^= 1) {
    if (k0 + 32 < k) {
      load(stage ^ 1, k0 + 32);
      wait<1>();
    } else {
      wait<0>();
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < 32; step += 16) {
      unsigned left[2][4], right[4][2];
#pragma unroll
      for (int i = 0; i < 2; i++)
        load_four(left[i], &tiles_a[stage][warp_row + i * 16 + (lane & 15)][step + (lane >> 4) * 8]);
#pragma unroll
      for (int j = 0; j < 4; j++)
        load_two_transposed(right[j], &tiles_b[stage][step + (lane & 15)][warp_column + j * 8]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_bf16(sums[i][j], left[i], right[j]);
    }
    __syncthreads();
  }
  const int row = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float* out = c + (size_t)(row0 + warp_row + i * 16 + row) * n + column0 + warp_column + j * 8 + column;
      out[0] = sums[i][j][0];
      out[1] = sums[i][j][1];
      out[(size_t)8 * n] = sums[i][j][2];
      out[(size_t)8 * n + 1] = sums[i][j][3];
    }
}

// One warp: c[16, 8] = a[16, 8] * b[8, 8] in tf32; a by rows, b by rows.
extern "C" __global__ void product_tf32(const float* a, const float* b, float* c) {
  const int lane = threadIdx.x, group = lane >> 2, place = lane & 3;
  unsigned left[4], right[2];
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(left[i]) : "f"(a[(group + (i & 1) * 8) * 8 + place + (i >> 1) * 4]));
#pragma unroll
  for (int i = 0; i < 2; i++) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(right[i]) : "f"(b[(place + i * 4) * 8 + group]));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
#pragma unroll
  for (int i = 0; i < 4; i++) c[(group + (i >> 1) * 8) * 8 + place * 2 + (i & 1)] = sums[i];
}

// One warp: c[16, 8] = a[16, 8] * b[8, 8] in f16 with f16 sums; the numbers are given as their bits.
extern "C" __global__ void product_f16(const unsigned* a, const unsigned* columns_of_b, unsigned* c) {
  const int lane = threadIdx.x, group = lane >> 2, place = lane & 3;
  const unsigned left[2] = {a[group * 4 + place], a[(group + 8) * 4 + place]};
  const unsigned right = columns_of_b[group * 4 + place];
  unsigned sums[2] = {};
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3},{%4},{%0,%1};"
               : "+r"(sums[0]), "+r"(sums[1]) : "r"(left[0]), "r"(left[1]), "r"(right));
  c[group * 4 + place] = sums[0];
  c[(group + 8) * 4 + place] = sums[1];
}

// Causal attention forward, 64 dimensions a head; a block of 128 threads takes 64 queries of a head.
// q, k, v, o: [heads, t, 64]; logs: [heads, t], the logarithm of the sum of exponentials.
extern "C" __global__ void attention(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                                     bf16* __restrict__ o, float* __restrict__ logs, int t, float scale) {
  __shared__ __align__(16) bf16 tile_q[64][72], tile_k[64][72], tile_v[64][72];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, first = blockIdx.x * 64;
  const size_t head = (size_t)blockIdx.y * t * 64;
  for (int i = thread; i < 512; i += 128)
    *(uint4*)&tile_q[i >> 3][(i & 7) * 8] = *(const uint4*)&q[head + (size_t)(first + (i >> 3)) * 64 + (i & 7) * 8];
  __syncthreads();
  unsigned left[4][4];
  for (int i = 0; i < 4; i++) load_four(left[i], &tile_q[warp * 16 + (lane & 15)][i * 16 + (lane >> 4) * 8]);
  float out[8][4] = {}, largest[2] = {-1e30f, -1e30f}, total[2] = {0, 0};
  const int group = lane >> 2, place = (lane & 3) * 2;
  for (int key = 0; key <= first; key += 64) {
    __syncthreads();
    for (int i = thread; i < 512; i += 128) {
      const size_t from = head + (size_t)(key + (i >> 3)) * 64 + (i & 7) * 8;
      *(uint4*)&tile_k[i >> 3][(i & 7) * 8] = *(const uint4*)&k[from];
      *(uint4*)&tile_v[i >> 3][(i & 7) * 8] = *(const uint4*)&v[from];
    }
    __syncthreads();
    float scores[8][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) {
        unsigned right[2];
        load_two(right, &tile_k[j * 8 + (lane & 7)][i * 16 + ((lane >> 3) & 1) * 8]);
        multiply_bf16(scores[j], left[i], right);
      }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float maximum = largest[half];
      const int row = first + warp * 16 + group + half * 8;
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float& score = scores[j][half * 2 + c];
          score = key + j * 8 + place + c > row ? -1e30f : score * scale;
          maximum = fmaxf(maximum, score);
        }
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
      const float factor = exp2f((largest[half] - maximum) * 1.4426950408f);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float& score = scores[j][half * 2 + c];
          score = exp2f((score - maximum) * 1.4426950408f);
          sum += score;
          out[j][half * 2 + c] *= factor;
        }
      total[half] = total[half] * factor + sum;
      largest[half] = maximum;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned p[4] = {narrow_pair(scores[2 * i][0], scores[2 * i][1]), narrow_pair(scores[2 * i][2], scores[2 * i][3]),
                             narrow_pair(scores[2 * i + 1][0], scores[2 * i + 1][1]),
                             narrow_pair(scores[2 * i + 1][2], scores[2 * i + 1][3])};
#pragma unroll
      for (int j = 0; j < 8; j++) {
        unsigned right[2];
        load_two_transposed(right, &tile_v[i * 16 + (lane & 15)][j * 8]);
        multiply_bf16(out[j], p, right);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    total[half] += __shfl_xor_sync(~0u, total[half], 1);
    total[half] += __shfl_xor_sync(~0u, total[half], 2);
    const int row = first + warp * 16 + group + half * 8;
    if ((lane & 3) == 0) logs[(size_t)blockIdx.y * t + row] = largest[half] + logf(total[half]);
#pragma unroll
    for (int j = 0; j < 8; j++)
      *(unsigned*)&o[head + (size_t)row * 64 + j * 8 + place] =
          narrow_pair(out[j][half * 2] / total[half], out[j][half * 2 + 1] / total[half]);
  }
}

// One warp: reductions, votes and matches of an integer for each lane. out: 8 words for each lane.
extern "C" __global__ void exchanges(const int* values, unsigned* out) {
  const int lane = threadIdx.x, value = values[lane];
  unsigned* results = out + lane * 8;
  results[0] = __reduce_add_sync(~0u, value);
  results[1] = (unsigned)__reduce_min_sync(~0u, value);
  results[2] = __reduce_xor_sync(~0u, (unsigned)value);
  results[3] = __ballot_sync(~0u, value > 0);
  results[4] = __match_any_sync(~0u, value);
  results[5] = __shfl_down_sync(~0u, value, 3, 8);
  results[6] = __all_sync(~0u, value != 12345) | __any_sync(~0u, value == 7) << 1;
  // Lanes that diverge meet again at an exchange of all.
  int branch = 0;
  if (lane % 3 == 0) branch = __shfl_sync(__activemask(), value, 0);
  else for (int i = 0; i < lane; i++) branch += values[i];
  results[7] = __shfl_up_sync(~0u, branch, 1);
}

__device__ __noinline__ double polynomial(double x, const double* coefficients) {
  double local[4], sum = 0;
  for (int i = 0; i < 4; i++) local[(i * 3 + (int)x) & 3] = coefficients[i];
  for (int i = 3; i >= 0; i--) sum = sum * x + local[i];
  return sum;
}

// f64, functions that are called, and memory of a thread.
extern "C" __global__ void functions(const float* x, const double* coefficients, double* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  double* results = out + (size_t)i * 8;
  const float v = x[i];
  results[0] = polynomial((double)v, coefficients);
  results[1] = sinf(v);
  results[2] = expf(v);
  results[3] = logf(fabsf(v) + 0.1f);
  results[4] = exp((double)v);
  results[5] = sqrt(fabs((double)v)) / 3.0;
  results[6] = cbrtf(v) + powf(fabsf(v), 1.5f);
  results[7] = (double)(long long)(v * 1e6f) + __fdividef(v, 3.f);
}

// A long loop of fused products: what the machine computes in a second.
extern "C" __global__ void rate(float* out, int rounds) {
  float a = threadIdx.x, b = 1.f, c = 2.f, d = 3.f;
  for (int i = 0; i < rounds; i++) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      a = a * 0.999f + 0.5f;
      b = b * 0.998f + a;
      c = c * 0.997f + b;
      d = d * 0.996f + c;
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = a + b + c + d;
}

// Kernels for tests of streams: the faults are in the order of the host's calls.

extern "C" __global__ void fill(float* out, int n, float value) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = value;
}

extern "C" __global__ void add(float* out, const float* in, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] += in[i];
}

extern "C" __global__ void reverse(float* out, const float* in, int n) {
  extern __shared__ float values[];
  const int i = threadIdx.x;
  if (i < n) values[i] = in[i];
  __syncthreads();
  if (i < n) out[i] = values[n - 1 - i];
}

__device__ float table[4] = {1.f, 2.f, 3.f, 4.f};

extern "C" __global__ void look_up(float* out) { out[threadIdx.x] = table[threadIdx.x & 3]; }

// Kernels in two versions: as they should be, and with a planted fault that the emulator must report. They take one
// array of floats, its length, and scratch memory; each computes something simple and local.

#define PAIR(name)                                                                          \
  extern "C" __global__ void name(float* data, int n, float* scratch) {                     \
    name##_body<false>(data, n, scratch);                                                   \
  }                                                                                         \
  extern "C" __global__ void name##_fault(float* data, int n, float* scratch) {             \
    name##_body<true>(data, n, scratch);                                                    \
  }

#define BODY(name) template <bool FAULT> __device__ __forceinline__ void name##_body(float* data, int n, float* scratch)

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A sum over a block needs a barrier between the writes and the reads of shared memory.
BODY(sum_barrier) {
  __shared__ float values[128];
  values[threadIdx.x] = data[threadIdx.x];
  if (!FAULT) __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int i = 0; i < 128; i++) sum += values[i];
    scratch[0] = sum;
  }
}
PAIR(sum_barrier)

// Shared memory that is used again needs a barrier behind its last reads.
BODY(reuse_barrier) {
  __shared__ float values[128];
  for (int round = 0; round < 2; round++) {
    values[threadIdx.x] = data[threadIdx.x] + round;
    __syncthreads();
    scratch[round * 128 + threadIdx.x] = values[127 - threadIdx.x];
    if (!FAULT) __syncthreads();
  }
}
PAIR(reuse_barrier)

// Each step of a tree needs its barrier, not only the first.
BODY(tree_barrier) {
  __shared__ float values[128];
  values[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  for (int half = 64; half; half /= 2) {
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    if (!FAULT || half == 64) __syncthreads();
  }
  if (threadIdx.x == 0) scratch[0] = values[0];
}
PAIR(tree_barrier)

// Lanes of a warp that exchange values by shared memory need a barrier of the warp.
BODY(warp_barrier) {
  __shared__ float values[128];
  values[threadIdx.x] = data[threadIdx.x];
  if (!FAULT) __syncwarp();
  scratch[threadIdx.x] = values[threadIdx.x ^ 1];
}
PAIR(warp_barrier)

// Two threads write one element.
BODY(same_element) { scratch[FAULT ? threadIdx.x / 2 : threadIdx.x] = data[threadIdx.x]; }
PAIR(same_element)

// A stencil in place: the neighbour's old value may be gone.
BODY(stencil_in_place) {
  const float value = data[(threadIdx.x + 1) % 128];
  if (!FAULT) __syncthreads();
  data[threadIdx.x] = value;
}
PAIR(stencil_in_place)

// The same between blocks, where no barrier helps: the result must go elsewhere.
BODY(stencil_between_blocks) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float value = data[(i + 1) % n];
  (FAULT ? data : scratch)[i] = value;
}
PAIR(stencil_between_blocks)

// Blocks add to one place: by an atomic operation.
BODY(sum_of_blocks) {
  if (threadIdx.x != 0) return;
  if (FAULT) *data += 1.f;
  else atomicAdd(data, 1.f);
}
PAIR(sum_of_blocks)

// A histogram in shared memory: by atomic operations.
BODY(histogram) {
  __shared__ int counts[4];
  if (threadIdx.x < 4) counts[threadIdx.x] = 0;
  __syncthreads();
  if (FAULT) counts[threadIdx.x % 4] += 1;
  else atomicAdd(&counts[threadIdx.x % 4], 1);
  __syncthreads();
  if (threadIdx.x < 4) scratch[threadIdx.x] = counts[threadIdx.x];
}
PAIR(histogram)

// The result of atomic operations is read behind a barrier.
BODY(read_of_atomic) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);
  if (!FAULT) __syncthreads();
  if (threadIdx.x == 0) scratch[0] = count;
}
PAIR(read_of_atomic)

// Asynchronous copies in two stages: all must have ended before the last is read.
BODY(wait_for_last) {
  __shared__ __align__(16) float tiles[2][512];
  copy_16(&tiles[0][threadIdx.x * 4], data + threadIdx.x * 4);
  commit();
  copy_16(&tiles[1][threadIdx.x * 4], data + 512 + threadIdx.x * 4);
  commit();
  if (FAULT) wait<1>();
  else wait<0>();
  __syncthreads();
  scratch[threadIdx.x] = tiles[0][511 - threadIdx.x] + tiles[1][511 - threadIdx.x];
  if (FAULT) wait<0>();
}
PAIR(wait_for_last)

// A copy of another thread has ended only behind a barrier that follows that thread's wait.
BODY(wait_and_barrier) {
  __shared__ __align__(16) float tile[512];
  copy_16(&tile[threadIdx.x * 4], data + threadIdx.x * 4);
  commit();
  wait<0>();
  if (!FAULT) __syncthreads();
  scratch[threadIdx.x] = tile[511 - threadIdx.x * 4];
}
PAIR(wait_and_barrier)

// A wait before the barrier, not behind it.
BODY(wait_before_barrier) {
  __shared__ __align__(16) float tile[512];
  copy_16(&tile[threadIdx.x * 4], data + threadIdx.x * 4);
  commit();
  if (!FAULT) wait<0>();
  __syncthreads();
  if (FAULT) wait<0>();
  scratch[threadIdx.x] = tile[511 - threadIdx.x * 4];
}
PAIR(wait_before_barrier)

// A commit that is missing: the wait does not know the copy.
BODY(commit_of_copy) {
  __shared__ __align__(16) float tile[512];
  copy_16(&tile[threadIdx.x * 4], data + threadIdx.x * 4);
  if (!FAULT) commit();
  wait<0>();
  __syncthreads();
  scratch[threadIdx.x] = tile[threadIdx.x * 4];
}
PAIR(commit_of_copy)

// A stage is filled again only when all have read it.
BODY(stage_in_use) {
  __shared__ __align__(16) float tile[512];
  float sum = 0;
  for (int round = 0; round < 2; round++) {
    copy_16(&tile[threadIdx.x * 4], data + round * 512 + threadIdx.x * 4);
    commit();
    wait<0>();
    __syncthreads();
    sum += tile[511 - threadIdx.x * 4];
    if (!FAULT) __syncthreads();
  }
  scratch[threadIdx.x] = sum;
}
PAIR(stage_in_use)

// A copy for which nobody waits.
BODY(wait_at_end) {
  __shared__ __align__(16) float tile[512];
  copy_16(&tile[threadIdx.x * 4], data + threadIdx.x * 4);
  commit();
  if (!FAULT) wait<0>();
  scratch[threadIdx.x] = data[threadIdx.x];
}
PAIR(wait_at_end)

// The source of an asynchronous copy is aligned like its size.
BODY(aligned_copy) {
  __shared__ __align__(16) float tile[512];
  copy_16(&tile[threadIdx.x * 4], data + threadIdx.x * 4 + (FAULT ? 1 : 4));
  commit();
  wait<0>();
  scratch[threadIdx.x] = tile[threadIdx.x * 4];
}
PAIR(aligned_copy)

// One thread too many.
BODY(one_too_many) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (FAULT ? i <= n : i < n) scratch[i] = data[i];
}
PAIR(one_too_many)

// The element before the first.
BODY(one_too_few) {
  const int i = threadIdx.x - (FAULT ? 1 : 0);
  scratch[threadIdx.x] = data[i];
}
PAIR(one_too_few)

// An index of 32 bits that overflows.
BODY(index_overflow) {
  const int row = n * (FAULT ? 1 << 19 : 0);
  scratch[threadIdx.x] = data[threadIdx.x + (long long)(row * 4)];
}
PAIR(index_overflow)

// Beyond shared memory.
BODY(shared_bounds) {
  __shared__ float values[128];
  values[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  scratch[threadIdx.x] = values[threadIdx.x + (FAULT ? n - 1023 : 0)];
}
PAIR(shared_bounds)

// Beyond an array of a thread.
BODY(local_bounds) {
  float values[4];
  for (int i = 0; i < 4; i++) values[(i + n) & 3] = data[threadIdx.x + i];
  scratch[threadIdx.x] = values[(threadIdx.x & 3) + (FAULT ? n - 1022 : 0)];
}
PAIR(local_bounds)

// A vector of four floats begins at a multiple of 16 bytes.
BODY(aligned_vector) {
  const float4 value = *(const float4*)(data + threadIdx.x * 4 + (FAULT ? 2 : 0));
  scratch[threadIdx.x] = value.x + value.w;
}
PAIR(aligned_vector)

// So does a row of a matrix in shared memory.
BODY(aligned_rows) {
  __shared__ __align__(16) unsigned short tile[8 * 24];
  for (int i = threadIdx.x; i < 8 * 24; i += 128) tile[i] = i;
  __syncthreads();
  if (threadIdx.x < 32) {
    unsigned result;
    const void* row = &tile[(threadIdx.x & 7) * (FAULT ? 20 : 24)];
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(result) : "r"(shared_address(row)) : "memory");
    scratch[threadIdx.x] = result;
  }
}
PAIR(aligned_rows)

// Scratch memory that nobody wrote.
BODY(unwritten_global) {
  if (!FAULT) scratch[threadIdx.x] = 1;
  data[threadIdx.x] += scratch[threadIdx.x];
}
PAIR(unwritten_global)

// The border of a tile that nobody filled.
BODY(unwritten_shared) {
  __shared__ float values[129];
  values[threadIdx.x] = data[threadIdx.x];
  if (!FAULT && threadIdx.x == 0) values[128] = 0;
  __syncthreads();
  scratch[threadIdx.x] = values[threadIdx.x + 1];
}
PAIR(unwritten_shared)

// An element of a thread's array that is not set.
BODY(unwritten_local) {
  float values[4];
  for (int i = 0; i < (FAULT ? 3 : 4); i++) values[(i + n) & 3] = data[threadIdx.x + i];
  scratch[threadIdx.x] = values[(threadIdx.x + n) & 3];
}
PAIR(unwritten_local)

// A barrier that only some threads of a warp reach, while others wait at another.
BODY(barrier_in_branch) {
  float value = data[threadIdx.x];
  if (FAULT) {
    if (threadIdx.x % 2) {
      asm volatile("bar.sync 0;" ::: "memory");
      value += 1;
      asm volatile("bar.sync 0;" ::: "memory");
    } else {
      value += 2;
      asm volatile("bar.sync 0;" ::: "memory");
    }
  } else {
    __syncthreads();
  }
  scratch[threadIdx.x] = value;
}
PAIR(barrier_in_branch)

// A barrier of all that one warp does not reach, because it waits at another.
BODY(barrier_number) {
  if (FAULT && threadIdx.x < 32) asm volatile("bar.sync 1;" ::: "memory");
  else asm volatile("bar.sync 0;" ::: "memory");
  scratch[threadIdx.x] = data[threadIdx.x];
}
PAIR(barrier_number)

// A barrier that counts more threads than come.
BODY(barrier_count) {
  if (threadIdx.x < 64) {
    if (FAULT) asm volatile("bar.sync 1, 96;" ::: "memory");
    else asm volatile("bar.sync 1, 64;" ::: "memory");
  }
  scratch[threadIdx.x] = data[threadIdx.x];
}
PAIR(barrier_count)

// A barrier of two warps orders only those.
BODY(barrier_of_some) {
  __shared__ float values[128];
  values[threadIdx.x] = data[threadIdx.x];
  if (!FAULT) __syncthreads();
  else if (threadIdx.x < 64) asm volatile("bar.sync 1, 64;" ::: "memory");
  if (threadIdx.x < 64) scratch[threadIdx.x] = values[threadIdx.x ^ 32] + (FAULT ? values[threadIdx.x + 64] : 0);
}
PAIR(barrier_of_some)

// An exchange that names lanes which do not come.
BODY(exchange_in_branch) {
  float value = data[threadIdx.x];
  if (threadIdx.x % 32 < 16) value += __shfl_xor_sync(FAULT ? 0xffffffffu : 0xffffu, value, 1);
  else value += __shfl_xor_sync(FAULT ? 0xffffffffu : 0xffff0000u, value, 2);
  scratch[threadIdx.x] = value;
}
PAIR(exchange_in_branch)

// An exchange with a lane that takes no part.
BODY(exchange_with_inactive) {
  float value = data[threadIdx.x];
  if (threadIdx.x % 32 < 16) value += __shfl_xor_sync(0xffffu, value, FAULT ? 16 : 8);
  scratch[threadIdx.x] = value;
}
PAIR(exchange_with_inactive)

// A check of the kernel's own that fails.
BODY(trap) {
  if (FAULT && data[threadIdx.x] > -1e30f) asm volatile("trap;");
  scratch[threadIdx.x] = data[threadIdx.x];
}
PAIR(trap)

// A loop without an end.
BODY(endless) {
  int i = threadIdx.x;
  while (FAULT ? i != n * 2 + 1 : i < n) i += 2;
  scratch[threadIdx.x] = i;
}
PAIR(endless)

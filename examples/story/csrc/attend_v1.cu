// The old kernel, naive: one block of 128 threads for each row of q.
#include "attention.h"

namespace story::v1 {

constexpr int kThreads = 128;

__device__ float block_max(float value, float* scratch) {
  for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = fmaxf(fmaxf(scratch[0], scratch[1]), fmaxf(scratch[2], scratch[3]));
  __syncthreads();
  return value;
}

// Grid: (SQ, BH). Thread i takes key i of each 128 keys, then column i of the output.
template <typename T>
__global__ void __launch_bounds__(kThreads) attend_kernel(Args a) {
  __shared__ float p[kThreads];
  __shared__ float scratch[kThreads / 32];
  const int thread = threadIdx.x, row = blockIdx.x;
  const long long head = blockIdx.y;
  const T* q = static_cast<const T*>(a.q) + (head * a.SQ + row) * a.D;
  const T* k = static_cast<const T*>(a.k) + head * a.SK * a.D;
  const T* v = static_cast<const T*>(a.v) + head * a.SK * a.D;
  const int visible = a.causal ? min(a.SK, row + 1 + a.SK - a.SQ) : a.SK;
  float top = -INFINITY, sum = 0.0f, out = 0.0f;
  for (int start = 0; start < visible; start += kThreads) {
    const int n = start + thread;
    float score = -INFINITY;
    if (n < visible) {
      score = 0.0f;
      for (int d = 0; d < a.D; ++d) score += static_cast<float>(q[d]) * static_cast<float>(k[n * (long long)a.D + d]);
      score *= a.scale;
    }
    const float new_top = fmaxf(top, block_max(score, scratch));
    const float decay = __expf(top - new_top);
    p[thread] = __expf(score - new_top);
    __syncthreads();
    sum *= decay;
    out *= decay;
    for (int j = 0; j < min(kThreads, visible - start); ++j) {
      sum += p[j];
      if (thread < a.D) out += p[j] * static_cast<float>(v[(start + j) * (long long)a.D + thread]);
    }
    top = new_top;
    __syncthreads();
  }
  if (thread < a.D)
    static_cast<T*>(a.o)[(head * a.SQ + row) * a.D + thread] = static_cast<T>(sum > 0.0f ? out / sum : 0.0f);
}

template <typename T>
cudaError_t launch(const Args& a) {
  if (a.D > kThreads) return cudaErrorInvalidValue;
  attend_kernel<T><<<dim3(a.SQ, a.BH), kThreads, 0, a.stream>>>(a);
  return cudaGetLastError();
}

template cudaError_t launch<__half>(const Args&);
template cudaError_t launch<__nv_bfloat16>(const Args&);

}  // namespace story::v1

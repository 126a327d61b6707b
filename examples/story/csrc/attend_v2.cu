// The new kernel, vectorised: tiles in shared memory, loaded 16 bytes at a time by blocks of 384 threads.
// TILE is given by the build: rows of q, keys, and the head size, which is padded to it.
#include "attention.h"

namespace story::v2 {

constexpr int kThreads = 384;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = (TILE + kWarps - 1) / kWarps;  // rows of q that one warp owns
constexpr int kColumns = TILE / 32;                  // keys, and columns of the output, that one lane owns
constexpr int kSharedBytes = 3 * TILE * TILE * 2 + TILE * TILE * 4;  // tiles of q, k and v, and fp32 scores

// Copy rows [first, first + TILE) of a [rows, D] matrix to shared memory; what lies outside of it is zero.
template <typename T>
__device__ void load_tile(T* tile, const T* matrix, int first, int rows, int D) {
  if (D == TILE) {
    constexpr int kVectors = TILE / 8;  // of 16 bytes, in one row
    for (int i = threadIdx.x; i < TILE * kVectors; i += kThreads) {
      const int row = first + i / kVectors;
      const uint4* from = reinterpret_cast<const uint4*>(matrix + row * (long long)D) + i % kVectors;
      reinterpret_cast<uint4*>(tile)[i] = row < rows ? *from : uint4{0, 0, 0, 0};
    }
  } else {
    for (int i = threadIdx.x; i < TILE * TILE; i += kThreads) {
      const int row = first + i / TILE, d = i % TILE;
      tile[i] = row < rows && d < D ? matrix[row * (long long)D + d] : static_cast<T>(0.0f);
    }
  }
}

// Grid: (SQ / TILE rounded up, BH). One block walks all the keys of its rows, tile after tile.
template <typename T>
__global__ void __launch_bounds__(kThreads) attend_kernel(Args a) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* q_tile = reinterpret_cast<T*>(memory);             // [TILE, TILE]
  T* k_tile = q_tile + TILE * TILE;                     // [TILE, TILE]
  T* v_tile = k_tile + TILE * TILE;                     // [TILE, TILE]
  float* p = reinterpret_cast<float*>(v_tile + TILE * TILE);  // [TILE, TILE]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * TILE;
  const long long head = blockIdx.y;
  const T* k = static_cast<const T*>(a.k) + head * a.SK * a.D;
  const T* v = static_cast<const T*>(a.v) + head * a.SK * a.D;

  float top[kRows], sum[kRows], out[kRows][kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    top[i] = -INFINITY;
    sum[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[i][c] = 0.0f;
  }
  load_tile(q_tile, static_cast<const T*>(a.q) + head * a.SQ * a.D, first, a.SQ, a.D);
  for (int start = 0; start < a.SK; start += TILE) {
    load_tile(k_tile, k, start, a.SK, a.D);
    load_tile(v_tile, v, start, a.SK, a.D);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = warp + i * kWarps;
      if (row >= TILE) continue;
      const int visible = a.causal ? min(a.SK, first + row + 1 + a.SK - a.SQ) : a.SK;
      float score[kColumns], new_top = top[i];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int n = c * 32 + lane;
        score[c] = 0.0f;
#pragma unroll 1  // short machine code, built in seconds
        for (int d = 0; d < a.D; ++d)
          score[c] += static_cast<float>(q_tile[row * TILE + d]) * static_cast<float>(k_tile[n * TILE + d]);
        score[c] = start + n < visible ? score[c] * a.scale : -INFINITY;
        new_top = fmaxf(new_top, score[c]);
      }
      for (int step = 16; step; step /= 2) new_top = fmaxf(new_top, __shfl_xor_sync(~0u, new_top, step));
      if (new_top == -INFINITY) continue;  // no key so far is visible to this row
      const float decay = __expf(top[i] - new_top);
      float part = 0.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float weight = __expf(score[c] - new_top);
        p[row * TILE + c * 32 + lane] = weight;
        part += weight;
      }
      for (int step = 16; step; step /= 2) part += __shfl_xor_sync(~0u, part, step);
      sum[i] = sum[i] * decay + part;
      top[i] = new_top;
      __syncwarp();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float acc = out[i][c] * decay;
#pragma unroll 1  // short machine code, built in seconds
        for (int n = 0; n < TILE; ++n) acc += p[row * TILE + n] * static_cast<float>(v_tile[n * TILE + c * 32 + lane]);
        out[i][c] = acc;
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = warp + i * kWarps;
    if (row >= TILE || first + row >= a.SQ) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (const int d = c * 32 + lane; d < a.D)
        static_cast<T*>(a.o)[(head * a.SQ + first + row) * a.D + d] =
            static_cast<T>(sum[i] > 0.0f ? out[i][c] / sum[i] : 0.0f);
  }
}

template <typename T>
cudaError_t launch(const Args& a) {
  if (a.D > TILE) return cudaErrorInvalidValue;
  if (kSharedBytes > 48 * 1024) {  // more than any GPU gives a block that does not ask
    const cudaError_t error =
        cudaFuncSetAttribute(attend_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
  }
  attend_kernel<T><<<dim3((a.SQ + TILE - 1) / TILE, a.BH), kThreads, kSharedBytes, a.stream>>>(a);
  return cudaGetLastError();
}

template cudaError_t launch<__half>(const Args&);
#ifndef FORGET_BFLOAT16
template cudaError_t launch<__nv_bfloat16>(const Args&);
#endif

}  // namespace story::v2

// What the binding and the two kernels share. No header of PyTorch is here, so that kernels compile in seconds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace story {

// One call. Every tensor is contiguous, at a multiple of 16 bytes: q and o [BH, SQ, D], k and v [BH, SK, D], BH being
// batch times heads.
struct Args {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  int BH, SQ, SK, D;
  float scale;
  bool causal;
  cudaStream_t stream;
};

enum class Type { half, bfloat16 };

// Each kernel has its launcher, instantiated for __half and __nv_bfloat16 in the .cu file that defines it.
namespace v1 {
template <typename T>
cudaError_t launch(const Args& args);
}
namespace v2 {
template <typename T>
cudaError_t launch(const Args& args);
}

cudaError_t attend(const Args& args, Type type);

}  // namespace story

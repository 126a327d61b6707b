// PyTorch's side: torch.ops.story.attend(q, k, v, scale, is_causal), registered when the module is imported.
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#ifdef WITH_CUDA_TORCH
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "attention.h"

static at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale, bool is_causal) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "q and k must be [B, H, S, D], got ", q.sizes(), " and ", k.sizes());
  TORCH_CHECK(q.size(1) == k.size(1) && k.sizes() == v.sizes() && q.size(3) == k.size(3),
              "q, k and v must have the same heads and head sizes, got ", q.sizes(), ", ", k.sizes(), ", ", v.sizes());
  const bool is_half = q.scalar_type() == at::kHalf;
  TORCH_CHECK(is_half || q.scalar_type() == at::kBFloat16, "q must be fp16 or bf16, got ", q.scalar_type());
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "q, k, v: one dtype");
  for (const at::Tensor& x : {q, k, v})  // the kernel loads 16 bytes at a time
    TORCH_CHECK(x.is_contiguous() && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0,
                "q, k and v must be contiguous, and begin at a multiple of 16 bytes");
#ifdef WITH_CUDA_TORCH
  const c10::cuda::CUDAGuard guard(q.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
#else
  TORCH_CHECK(false, "built for a PyTorch without CUDA: it loads, and cannot run");
  const cudaStream_t stream = nullptr;
#endif
  at::Tensor o = at::empty(q.sizes(), q.options());
  if (o.numel() == 0) return o;
  const story::Args args{q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(), o.mutable_data_ptr(),
                         static_cast<int>(q.size(0) * q.size(1)), static_cast<int>(q.size(2)),
                         static_cast<int>(k.size(2)), static_cast<int>(q.size(3)),
                         static_cast<float>(scale), is_causal, stream};
  const cudaError_t error = story::attend(args, is_half ? story::Type::half : story::Type::bfloat16);
  TORCH_CHECK(error == cudaSuccess, "story::attend: ", cudaGetErrorString(error));
  return o;
}

TORCH_LIBRARY(story, library) {
  library.def("attend(Tensor q, Tensor k, Tensor v, float scale, bool is_causal) -> Tensor");
  library.impl("attend", c10::DispatchKey::CUDA, &attend);
}

// An empty module: importing it loads this library, and the registration above runs.
PyMODINIT_FUNC PyInit_story_extension() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "story_extension", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}

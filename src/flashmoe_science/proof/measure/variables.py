"""Which environment variables can change a result."""

from __future__ import annotations

import re

_SETTING = re.compile(
    r"^(TRITON_|CUDA_|CUDNN_|CUBLAS|TORCH_|TORCHINDUCTOR_|PYTORCH_|NVIDIA_TF32_OVERRIDE$|FLASHMOE_|OMP_NUM_THREADS$|"
    r"MKL_|KMP_|KINETO_|CUPTI_|NCCL_|GLOO_|LD_PRELOAD$|MALLOC_)"
)
_NO_SETTING = ("FLASHMOE_COMMIT", "FLASHMOE_SSH", "FLASHMOE_STORE")
# Importing a library sets these: scikit-learn, which transformers imports, the first two, and vLLM the others. They say
# how OpenMP starts, how many processes compile, and how GPUs are looked for, and nothing of how calls run.
_SET_BY_IMPORTS = (
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_COMPILE_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK",
)  # fmt: skip
_PLACE = re.compile(r"_(DIR|HOME|PATH|ARCH_LIST|LOGS)$")


def is_setting(name: str) -> bool:
    """Return whether a record names this variable, where it is set."""
    return _SETTING.match(name) is not None and name not in _NO_SETTING


def is_shared(name: str) -> bool:
    """Return whether a change of this variable may change what other arms do.

    Where files lie, and for what is built, does not count: torch and its compiler set some of those themselves.
    """
    return is_setting(name) and name not in _SET_BY_IMPORTS and _PLACE.search(name) is None

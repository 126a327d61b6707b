"""What differs between the versions of Gluon that we support (Triton 3.6 to 3.9), in one place."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.8 renamed the asynchronous copy to shared memory; the arguments are the same: (smem, pointer, mask).
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

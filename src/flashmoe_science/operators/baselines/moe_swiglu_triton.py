"""Plain swiglu for triton_kernels to fuse: the library has only gpt-oss's, which adds 1 to the value."""

import triton
import triton.language as tl


@triton.jit(repr=lambda _specialization: "_swiglu")  # what the library adds to the name of its own kernel
def swiglu(product):
    """Return silu(gate) * value of columns that hold gate and value by turns."""
    gate, value = tl.split(tl.reshape(product, (product.shape[0], product.shape[1] // 2, 2)))
    return gate / (1 + tl.exp(-gate)) * value

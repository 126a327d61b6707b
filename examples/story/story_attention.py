"""The Python side of the story's extension. Each state of it lies in a folder of its own: see python_path."""

import torch  # first: it loads the libraries that the extension needs

# isort: split
import story_extension  # noqa: F401 - importing it registers torch.ops.story.attend


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Attention of q, k and v [B, H, S, D], fp16 or bf16, with the same heads. Returns [B, H, S, D]."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return torch.ops.story.attend(_dense(q), _dense(k), _dense(v), scale, causal)


def _dense(x):
    """Return x contiguous, at an address that the kernel can load 16 bytes from: x itself, or a copy."""
    x = x.contiguous()  # a view that begins at an odd element is contiguous too
    return x if x.data_ptr() % 16 == 0 else x.clone()


# What the benchmark called before the operator's arguments were changed to (q, k, v, scale, is_causal).
attend_directly = torch.ops.story.attend

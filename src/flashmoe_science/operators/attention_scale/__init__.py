"""How large an error a right kernel of attention may make in each element."""

from .scale import backward_scale, forward_scale, step_scale

__all__ = ["backward_scale", "forward_scale", "step_scale"]

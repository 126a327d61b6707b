"""What every room refuses of tensors and gradients: these functions raise, or return None and change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError
from .subclasses import is_bare_subclass

_forward_ad = torch.autograd.forward_ad
_functorch = torch._C._functorch  # noqa: SLF001 - what tells of transforms has no public name


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ``InputError`` unless elements lie in memory one by one: what is nested says that it is strided."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InputError(f"{name} must be dense, got {'a nested tensor' if tensor.is_nested else tensor.layout}")


def check_not_negative(name: str, tensor: Tensor) -> None:
    """Raise ``InputError`` for a view whose memory holds the negatives of its elements; tracing, nobody can tell."""
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise InputError(f"{name} must not be a negative view, got one (is_neg()): call resolve_neg()")


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise ``InputError`` unless a tensor is dense and no negative view."""
    check_dense(name, tensor)
    check_not_negative(name, tensor)


def check_no_bare_subclass(name: str, tensor: Tensor) -> None:
    """Raise ``InputError`` for a tensor that differs from others in its Python type alone.

    For those that an operator hands on as they are: they would come back from it for ever.
    """
    if is_bare_subclass(type(tensor)):
        raise InputError(f"{name} must be a torch.Tensor and of no subclass, got {type(tensor).__name__}")


def check_no_tangent(name: str, tensor: Tensor) -> None:
    """Raise ``UnsupportedError`` where a tensor has a tangent that a call would lose."""
    if _forward_ad._current_level < 0:  # noqa: SLF001 - the public way asks tensor by tensor
        return
    if _forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise UnsupportedError(f"{name} has a forward-mode tangent, and there is no forward-mode derivative")


def check_not_differentiated_by_torch_func(name: str, tensor: Tensor) -> None:
    """Raise ``UnsupportedError`` for what ``torch.func.grad`` and its like hand on."""
    if torch.compiler.is_compiling():
        return
    inner = tensor
    while _functorch.is_functorch_wrapped_tensor(inner):
        if _functorch.is_gradtrackingtensor(inner):
            raise UnsupportedError(
                f"{name} is differentiated by a transform of torch.func, which is not served",
                hint="use torch.autograd.grad, or backward()",
            )
        inner = _functorch.get_unwrapped(inner)


def check_operand(name: str, tensor: Tensor) -> None:
    """Raise what an operator of torch would not: for its memory, and for transforms of ``torch.func``."""
    check_memory(name, tensor)
    check_not_differentiated_by_torch_func(name, tensor)


def check_not_batched(what: str, gradients: Iterable[Tensor | None]) -> None:
    """Raise ``UnsupportedError`` where autograd asks for several gradients of ``what`` at once."""
    if torch.compiler.is_compiling():
        return
    for gradient in gradients:
        if gradient is None:
            continue
        if _functorch.is_batchedtensor(gradient) or _functorch.is_legacy_batchedtensor(gradient):
            raise UnsupportedError(
                f"gradients of {what} are made one at a time, and not batched (is_grads_batched, vectorize, vmap)",
                hint="ask for them in a loop",
            )


def check_one_device(name: str, first: Tensor, others: Iterable[object]) -> None:
    """Raise ``InputError`` where the stand-in of an operator is given tensors of several devices: it reads none."""
    for other in others:
        if isinstance(other, Tensor) and other.device != first.device:
            raise InputError(f"all tensors must be on the device of {name}, {first.device}, got one on {other.device}")


def check_wanted(wanted: Sequence[int], tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raise ``InputError`` unless ``wanted`` has numbers of ``names``, each once, and only of given tensors."""
    for number in wanted:
        if not 0 <= number < len(names) or list(wanted).count(number) > 1 or names[number] not in tensors:
            there = [place for place, name in enumerate(names) if name in tensors]
            raise InputError(f"wanted must have numbers of {there}, each once, got {list(wanted)}")

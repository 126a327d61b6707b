"""Checks of tensors and gradients that every operator shares. They raise, or return None; they change nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import InputError, UnsupportedError
from .subclasses import PLAIN, has_own_meaning, is_bare_subclass, is_dtensor, is_untraced

_forward_ad = torch.autograd.forward_ad
_functorch = torch._C._functorch  # noqa: SLF001 - what tells of transforms has no public name
_dispatch_mode: Any = torch._C._get_dispatch_mode  # noqa: SLF001 - has no public name


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ``InputError`` unless elements lie in memory one by one: what is nested says that it is strided."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InputError(f"{name} must be dense, got {'a nested tensor' if tensor.is_nested else tensor.layout}")


def check_tensor(name: str, value: object, *, optional: bool = False) -> None:
    """Raise ``InputError`` unless it is a tensor whose elements are all that it means.

    Of another class even a look at the shape may be a call of its own, so this comes before any other check.
    """
    if not isinstance(value, Tensor):
        expected = "a torch.Tensor or None" if optional else "a torch.Tensor"
        raise InputError(f"{name} must be {expected}, got {type(value).__name__}")
    if is_dtensor(type(value)):
        raise UnsupportedError(
            f"{name} is a DTensor, and nothing says how a call is split over its mesh",
            hint="call it for the local tensors: to_local(), or torch.distributed.tensor.experimental.local_map",
        )
    if has_own_meaning(type(value)):
        if type(value).__name__ == "NestedTensor":
            raise InputError(f"{name} must be dense, got a nested tensor")
        raise InputError(
            f"{name} must be a torch.Tensor whose class has no __torch_function__ of its own, "
            f"got {type(value).__name__}",
            hint="the class and not the elements says what it means: for CausalBias use causal=True or window",
        )


def check_not_mixed(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` where some tensors are fake and some are real, unless their mode takes both."""
    if torch.compiler.is_dynamo_compiling():
        return
    modes = {name: tensor.fake_mode for name, tensor in tensors.items() if type(tensor) is FakeTensor}
    active: Any = _dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # noqa: SLF001 - has no public name
    mode = active or next(iter(modes.values()), None)
    if mode is None:
        return
    for name, tensor in tensors.items():
        other = name in modes and modes[name] is not mode
        real = type(tensor) in PLAIN or is_bare_subclass(type(tensor))
        if other or (real and not mode.allow_non_fake_inputs):
            got = "one of another mode" if other else "a real one"
            raise InputError(
                f"{name} must be a fake tensor of the mode that the call has, got {got}",
                hint="mode.from_tensor makes a fake tensor of a real one",
            )


def check_devices(tensors: Mapping[str, Tensor], first: str) -> None:
    """Raise ``InputError`` unless all are on the device of the one named first, a GPU or the CPU.

    If one tensor is on meta, torch runs the fake kernel of an operator for all.
    """
    leader = tensors[first]
    if leader.device.type not in ("cpu", "cuda") and is_untraced(leader):
        raise InputError(f"{first} must be on a CUDA device or the CPU, got {leader.device}")
    for name, tensor in tensors.items():
        if tensor.device != leader.device:
            raise InputError(f"{name} must be on the device of {first}, {leader.device}, got {tensor.device}")


def check_before_operator(tensors: Mapping[str, Tensor], first: str) -> None:
    """Check what torch refuses in its own words, or gives to a fake kernel, before an operator is called.

    Raises:
        InputError: a tensor is not dense, is on another device than ``first``, or is fake beside real ones.
        UnsupportedError: ``torch.vmap`` hands a tensor on.
    """
    for name, tensor in tensors.items():
        check_dense(name, tensor)
    check_not_mapped(tensors.values())
    check_devices(tensors, first)
    check_not_mixed(tensors)


def refuse_dtensors(what: str, tensors: Iterable[object]) -> None:
    """Raise ``UnsupportedError`` for DTensors in a call of ``what``, for which no sharding is known."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and any(issubclass(kind, module.DTensor) for kind in map(type, tensors)):
        raise UnsupportedError(f"{what} does not take DTensors", hint="call it on each rank with tensor.to_local()")


def check_not_negative(name: str, tensor: Tensor) -> None:
    """Raise ``InputError`` for a view whose memory holds the negatives of its elements; tracing, nobody can tell."""
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise InputError(f"{name} must not be a negative view, got one (is_neg()): call resolve_neg()")


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise ``InputError`` unless a tensor is dense, no negative view, and has memory for its elements."""
    check_dense(name, tensor)
    check_not_negative(name, tensor)
    check_storages({name: tensor})


def check_in_memory(tensors: Mapping[str, Tensor], first: str) -> None:
    """Check devices as ``check_devices`` does, and the memory of each as ``check_memory``. Raises ``InputError``."""
    check_devices(tensors, first)
    for name, tensor in tensors.items():
        check_memory(name, tensor)


def check_storages(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` where a storage was made smaller than what a tensor has in it, as FSDP frees one."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        without = type(tensor) not in PLAIN or tensor.device.type == "meta" or not tensor.numel()
        if without or _functorch.is_functorch_wrapped_tensor(tensor):
            continue
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + reach + 1) * tensor.element_size()
        there = tensor.untyped_storage().nbytes()
        if there < needed:
            raise InputError(f"{name} must have memory for its elements, {needed} bytes of storage, got {there}")


def check_saved_for_gradients(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` for tensors of inference mode, which a recorded call cannot keep for its gradients."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if tensor.is_inference():
            raise InputError(
                f"{name} must not be made in inference mode where gradients are recorded, got one that is",
                hint="clone it, or make it under torch.no_grad()",
            )


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


def check_not_mapped(tensors: Iterable[Tensor]) -> None:
    """Raise ``UnsupportedError`` for what ``torch.vmap`` hands on."""
    if torch.compiler.is_dynamo_compiling() or _functorch.maybe_current_level() is None:
        return
    for tensor in tensors:
        inner = tensor
        while _functorch.is_functorch_wrapped_tensor(inner):
            if _functorch.is_batchedtensor(inner):
                raise UnsupportedError(
                    "an input has no memory of its own: torch.vmap and other transforms of torch.func are not served "
                    "here",
                    hint="call it without them: a batch is an axis of its own",
                )
            inner = _functorch.get_unwrapped(inner)


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

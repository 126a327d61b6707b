"""Thousands of calls with one argument or two changed: a right answer, or an error of ours; nothing else."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import MaskedTensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flashmoe_science import (
    InputError,
    UnsupportedError,
)

from .fuzz_entries import ENTRIES, Arguments, half
from .test_traced_calls import Seen

FEW, MANY = 600, 6000  # calls of the usual run, and of the exhaustive one
SEED = 0


class Silent(Tensor):
    """Differs in its type alone."""


class Own(Tensor):
    """Has a meaning of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class OwnStatic(Tensor):
    @staticmethod
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Tensor.__torch_function__.__func__(Tensor, func, types, args, kwargs or {})  # type: ignore[attr-defined]


def jagged(t: Tensor) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged, dtype=t.dtype)


def shrunk(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() // 2)
    return t


def resized(rng: random.Random, t: Tensor) -> Tensor:
    if not t.dim():
        return t[None]
    axis = rng.randrange(t.dim())
    size = t.shape[axis]
    if rng.random() < 0.4:
        return t.narrow(axis, 0, rng.randrange(size + 1))
    return torch.cat([t, t.narrow(axis, 0, min(size, 1))], axis)


def strided(rng: random.Random, t: Tensor) -> Tensor:
    if t.dim() < 2:
        return t.repeat_interleave(2, 0)[::2] if t.dim() else t
    a, b = rng.sample(range(t.dim()), 2)
    return t.transpose(a, b).contiguous().transpose(a, b)


def with_numbers(rng: random.Random, t: Tensor) -> Tensor:
    t = t.clone()
    if t.numel():
        choice = [-1, 0, 1, 100, 2**31 - 1, -(2**31)] if not t.is_floating_point() else [0.0, 1.0, -2.0]
        t.view(-1)[rng.randrange(t.numel())] = rng.choice(choice)
    return t


# What is done to a tensor. A change that leaves values and shape has to give the same answer.
TENSOR_CHANGES: dict[str, Callable[[random.Random, Tensor], Any]] = {
    "resized": resized,
    "strided": strided,
    "numbers": with_numbers,
    "no axes": lambda _, t: t.sum() if t.is_floating_point() else t.max() if t.numel() else t,
    "one axis more": lambda _, t: t[None],
    "flat": lambda _, t: t.flatten(),
    "dtype": lambda rng, t: t.to(rng.choice([
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.bool,
        torch.complex64, torch.float8_e4m3fn,
    ])),
    "meta": lambda _, t: t.to("meta"),
    "on the host": lambda _, t: t.cpu(),
    "fake": lambda _, t: FakeTensorMode().from_tensor(t),
    "sparse": lambda _, t: t.to_sparse(),
    "nested": lambda _, t: torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], dtype=t.dtype),
    "jagged": lambda _, t: jagged(t),
    "masked": lambda _, t: MaskedTensor(t, torch.ones(t.shape, dtype=torch.bool)),
    "quantised": lambda _, t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
    "causal upper left": lambda _, t: causal_upper_left(*t.shape[-2:]) if t.dim() > 1 else causal_upper_left(3, 5),
    "causal lower right": lambda _, t: causal_lower_right(3, 5),
    "silent": lambda _, t: t.as_subclass(Silent),
    "own": lambda _, t: t.as_subclass(Own),
    "own static": lambda _, t: t.as_subclass(OwnStatic),
    "parameter": lambda _, t: torch.nn.Parameter(t, requires_grad=False),
    "requires grad": lambda _, t: t.requires_grad_() if t.is_floating_point() else t,
    "negative view": lambda _, t: torch._neg_view(t),
    "conjugate": lambda _, t: torch.complex(t.float(), t.float()).conj().imag,
    "expanded": lambda _, t: t[:1].expand(t.shape) if t.dim() and len(t) else t,
    "shrunk": lambda _, t: shrunk(t),
    "not initialised": lambda _, t: torch.nn.parameter.UninitializedParameter(),
    "inference": lambda _, t: made_in_inference(t),
    "list": lambda _, t: t.tolist(),
    "array": lambda _, t: t.detach().numpy() if t.dtype != torch.bfloat16 else None,
    "number": lambda rng, _: rng.choice([0, 1, 2.5, True]),
    "none": lambda _, __: None,
    "text": lambda _, __: "auto",
}  # fmt: skip
KEPT = {"strided", "silent", "parameter", "requires grad", "inference"}  # changes that leave values as they are
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, -(2**70), 10**400, 0.0, -0.0, 0.25, 0.5, 1.0, -1.0,
    1e30, 1e300, float("nan"),
    float("inf"), "", "auto", "reference", "no such kernel", "sigmoid", "relu2", "geglu", b"auto", (), (1,), (1, 2),
    (-1, 0), (2, -1), [0, 1], (1.0, 2.0), (True, False), (None, None), (0, 2**70), {}, set(), object(), 1j,
    np.array([-1, -1]), np.array([1.0, 2.0]), np.float64(0.5), np.float32(0.5), np.int64(2), np.bool_(True),
    np.array(3), "tensor", "tensors",
]  # fmt: skip


def made_in_inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


def changed(rng: random.Random, value: Any) -> tuple[str, Any]:
    if isinstance(value, Tensor) or (value is None and rng.random() < 0.5):
        tensor = value if isinstance(value, Tensor) else half(2, 4)
        for _ in range(20):
            name = rng.choice([*TENSOR_CHANGES])
            try:
                return name, TENSOR_CHANGES[name](rng, tensor)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):  # not of this tensor
                continue
    new = rng.choice(VALUES)
    if isinstance(new, str) and new.startswith("tensor"):
        return new, torch.tensor(1.0) if new == "tensor" else torch.tensor([1.0, 2.0])
    return repr(new)[:30], new


def check_close(found: Any, expected: Any) -> None:
    found, expected = (one if isinstance(one, tuple) else (one,) for one in (found, expected))
    assert len(found) == len(expected)
    for pair in zip(found, expected, strict=True):
        one, exact = pair[0].detach().as_subclass(Tensor), pair[1].detach()
        tolerance = 3e-2 if one.dtype == torch.bfloat16 else 4e-3
        scale = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 1.0
        torch.testing.assert_close(
            one.double(), exact.double(), rtol=tolerance, atol=tolerance * max(1.0, scale), equal_nan=True
        )


def copies(given: Arguments) -> dict[str, Tensor]:
    return {
        name: value.detach().clone()
        for name, value in given.items()
        if name in ("k_cache", "v_cache") and type(value) is Tensor and not value.is_nested and not value.is_neg()
        and value.layout == torch.strided and value.device.type != "meta"
        and value.untyped_storage().nbytes() >= value.numel() * value.element_size()
    }  # fmt: skip


def is_plain(given: Arguments, device: str) -> bool:
    """Whether the reference can say what the answer is: of real tensors, finite options and no dropout."""
    values = [value for value in given.values() if isinstance(value, Tensor)]
    return all(type(v) in (Tensor, torch.nn.Parameter) and v.device.type == device for v in values) and not given.get(
        "dropout_p"
    )


def as_ours(name: str, value: Any) -> Any:
    """Return an option as references take it: they know no scalars of numpy, and no softcap below 0."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = tuple(value.tolist()) if value.ndim else value.item()
    if name == "softcap" and type(value) in (int, float):
        value = max(0.0, value)
    if isinstance(value, Tensor) and not value.dim() and name in ("scale", "softmax_scale", "softcap", "causal"):
        value = value.item()
    if name in ("causal", "return_softmax_lse") and value in (0, 1):  # drop-ins take numbers as flags
        value = bool(value)
    return float(value) if "scale" in name and type(value) is int else value


def check(entry: str, rng: random.Random, device: str, *, unchanged: bool = False) -> str:
    """Make one call with changes. Return what came of it."""
    call, make, exact = ENTRIES[entry]
    changes = {}
    with torch.device(device):
        given = make()
        for name in rng.sample([*given], 0 if unchanged else min(len(given), rng.choice([1, 1, 2]))):
            changes[name], given[name] = changed(rng, given[name])
    before = copies(given)
    where = f"{entry} with {changes}"
    watched = rng.random() < 0.25  # then an operator serves the call
    try:
        with Seen() if watched else contextlib.nullcontext():
            found = call(**given)
            if device == "cuda":
                torch.cuda.synchronize()
    except (InputError, UnsupportedError):
        written = [name for name, cache in before.items() if not torch.equal(given[name], cache)]
        assert not written, f"{where}: {written} were written before the call was refused"
        return "refused"
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    # A kernel goes by what the forward pass has left; the reference works it out anew.
    differs = device == "cuda" and not {"o", "product"}.isdisjoint(given) and not KEPT.issuperset(changes.values())
    if exact is None or differs or not is_plain(given, device):
        return "served"
    given.update(before)
    given.update({name: as_ours(name, value) for name, value in given.items()})
    try:
        with torch.device(device):
            expected = exact(given)
    except Exception as error:
        raise AssertionError(f"{where}: served, and the reference fails: {error}") from error
    try:
        check_close(found, expected)
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from None
    return "right"


def run(entry: str, calls: int, device: str = "cpu") -> None:
    torch.manual_seed(0)
    rng = random.Random(f"{entry} {SEED}")
    wrong, outcomes = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(calls):
            try:
                outcomes.append(check(entry, rng, device, unchanged=number == 0))
            except AssertionError as error:
                wrong.append(str(error)[:600])
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    assert "refused" in outcomes
    assert len({*outcomes}) > 1


@pytest.mark.parametrize("entry", ENTRIES)
def test_changed_calls_are_right_or_refused(entry):
    run(entry, FEW // len(ENTRIES) + 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", ENTRIES)
def test_many_changed_calls_are_right_or_refused(entry):
    run(entry, MANY // len(ENTRIES) + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("entry", ENTRIES)
def test_changed_calls_are_right_or_refused_on_a_gpu(entry, monkeypatch):
    monkeypatch.setenv("FLASHMOE_CHECK", "1")  # numbers in tensors are no host's business without
    run(entry, FEW // len(ENTRIES) + 1, "cuda")

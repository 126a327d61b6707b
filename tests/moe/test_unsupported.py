"""What other ways than the plain call refuse: recorded and compiled calls, transforms, and the operators alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, explain_moe, fused_moe, route
from flashmoe_science.errors import shown
from flashmoe_science.moe.backward.api import fused_moe_backward
from flashmoe_science.moe.checks import TENSORS

from .cases import Case, make_tensors

OPS = torch.ops.flashmoe_science
CASE = Case("refused", 3, 4, 2, 16, 8, bias=True, shared=1, shared_inter=8, weighted=True)


def given() -> dict[str, Any]:
    return dict(make_tensors(CASE))


def recorded() -> dict[str, Any]:
    tensors = given()
    tensors["x"].requires_grad_()
    return tensors


def positional(tensors: dict[str, Any], *, activation: str = "swiglu") -> list[Any]:
    return [*(tensors.get(name) for name in TENSORS), activation, None, None, False, False, "auto"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *itertools.product([name for name in TENSORS if name != "x"], ("recorded", "operator", "operator that keeps")),
        ("w_gate_up", "compiled"),  # torch.compile hands all of them on in the same way
    ],
)
def test_one_tensor_on_meta_does_not_let_stand_ins_answer(name, how):
    """Torch takes the operator's stand-in then, and what it returns is memory that nobody wrote."""
    tensors = recorded() if how == "recorded" else given()
    tensors[name] = tensors[name].to("meta")
    message = f"{name} must be on the device of x, cpu, got meta"
    if how == "recorded":
        with pytest.raises(InputError, match=message):
            fused_moe(**tensors)
    elif how == "compiled":
        with pytest.raises(InputError, match=message):
            torch.compile(fused_moe, backend="eager")(**tensors)
    else:
        operator = OPS.fused_moe if how == "operator" else OPS.fused_moe_kept
        with pytest.raises(InputError, match="all tensors must be on the device of x, cpu, got one on meta"):
            operator(*positional(tensors))


def test_all_on_meta_is_refused_too():
    tensors = {name: tensor.to("meta") for name, tensor in recorded().items()}
    with pytest.raises(InputError, match="x must be on a CUDA device or the CPU, got meta"):
        fused_moe(**tensors)
    logits = torch.zeros(3, 8, device="meta", requires_grad=True)
    with pytest.raises(InputError, match="logits must be on a CUDA device or the CPU, got meta"):
        route(logits, 2)
    for operator, arguments in (
        (OPS.moe_route, (torch.zeros(3, 8), logits[0].detach(), 2, "softmax", True, 1, 1, 1.0)),
        (OPS.moe_route_backward, (logits.detach(), torch.zeros(3, 8), logits.detach(), "softmax", True, 1.0)),
    ):
        with pytest.raises(InputError, match="all tensors must be on the device of logits, cpu, got one on meta"):
            operator(*arguments)


COMPILED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"activation": "swiglu_clamped", "alpha": "1.5"}, "alpha must be a positive number or None, got '1.5'"),
    ({"activation": "swiglu_clamped", "limit": True}, "limit must be a positive number or None, got True"),
    ({"interleaved": 1}, "interleaved must be True or False, got 1"),
    ({"batch_invariant": None}, "batch_invariant must be True or False, got None"),
    ({"kernel": 3}, "kernel must be auto or one of .*, got 3"),
)


@pytest.mark.parametrize(("options", "message"), COMPILED)
def test_a_compiled_call_refuses_the_options_that_an_eager_one_does(options, message):
    """An operator's signature would make 1.5 of "1.5" and 1.0 of True."""
    for call in (fused_moe, torch.compile(fused_moe, backend="eager")):
        with pytest.raises(InputError, match=message):
            call(**given(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "2.0"}, "scale must be a finite number of fp32, got '2.0'"),
        ({"scale": True}, "scale must be a finite number of fp32, got True"),
        ({"top_k": True}, "top_k must be an integer, 1 or more, got True"),
        ({"top_k": 2.0}, "top_k must be an integer, 1 or more, got 2.0"),
        ({"renormalize": None}, "renormalize must be True or False, got None"),
        ({"score": "relu"}, "score must be one of softmax, sigmoid, got 'relu'"),
    ],
)
def test_a_compiled_routing_refuses_the_options_that_an_eager_one_does(options, message):
    for call in (route, torch.compile(route, backend="eager")):
        with pytest.raises(InputError, match=message):
            call(torch.zeros(3, 8), **{"top_k": 2, **options})


class Named(torch.Tensor):
    """A tensor that has a name of its own and nothing else."""


def test_numbers_of_experts_of_a_subclass_are_refused():
    """They would come back from the operator as what they were, and so for ever."""
    tensors = given()
    tensors["topk_ids"] = tensors["topk_ids"].as_subclass(Named)
    with pytest.raises(InputError, match=r"topk_ids must be a torch\.Tensor and of no subclass, got Named"):
        fused_moe(**tensors)
    tensors["topk_ids"] = torch.nn.Parameter(tensors["topk_ids"].as_subclass(torch.Tensor), requires_grad=False)
    tensors["x"] = tensors["x"].as_subclass(Named)
    assert torch.equal(fused_moe(**tensors), fused_moe(**given()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["nested", "mkldnn"])
@pytest.mark.parametrize("function", [fused_moe, explain_moe])
def test_tensors_whose_elements_do_not_lie_one_by_one(kind, function):
    x = torch.randn(3, 16)
    tensors = {**given(), "x": torch.nested.nested_tensor([x]) if kind == "nested" else x.to_mkldnn()}
    with pytest.raises(InputError, match=r"x must be dense, got (a nested tensor|torch\._mkldnn)"):
        function(**tensors)
    with pytest.raises(InputError, match="logits must be dense, got"):
        route(tensors["x"], 2)


def test_transforms_of_functions():
    tensors, x = given(), torch.randn(2, 3, 16)

    def attend(x):
        return fused_moe(**{**tensors, "x": x})

    with pytest.raises(UnsupportedError, match=r"torch\.vmap and other transforms of torch\.func are not served here"):
        torch.vmap(attend)(x)
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(UnsupportedError, match=r"x is differentiated by a transform of torch\.func"):
            transform(lambda x: attend(x).sum())(x[0])
        with pytest.raises(UnsupportedError, match=r"logits is differentiated by a transform of torch\.func"):
            transform(lambda x: route(x, 2)[0].sum())(x[0])
    leaf = x[0].clone().requires_grad_()
    out = attend(leaf)
    with pytest.raises(UnsupportedError, match="gradients of fused_moe are made one at a time, and not batched"):
        torch.autograd.grad(out, leaf, torch.ones(2, *out.shape), is_grads_batched=True)


def test_tangents_are_not_lost():
    tensors = given()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors["x"], tensors["x"])
        routed = {name: tensor for name, tensor in tensors.items() if not name.startswith("shared")}
        product = torch.zeros(6, 16)
        for call in (
            lambda: explain_moe(**{**tensors, "x": dual}),
            lambda: fused_moe_backward(tensors["x"], product, **{**routed, "x": dual}),
            lambda: fused_moe_backward(dual, product, **routed),
        ):
            with pytest.raises(UnsupportedError, match="has a forward-mode tangent"):
                call()


def test_a_negative_view_is_refused_however_it_is_called():
    tensors = recorded()
    tensors["w_down"] = torch._neg_view(tensors["w_down"])
    with pytest.raises(InputError, match="w_down must not be a negative view"):
        fused_moe(**tensors)


def backward_arguments(*, kernel: str = "auto", wanted: Any = (0, 1), **changes: Any) -> list[Any]:
    tensors = {**given(), **changes}
    names = ("do", "product", "shared_product")
    own = {"do": torch.randn(3, 16), "product": torch.randn(6, 16), "shared_product": torch.randn(3, 16)} | changes
    return [*(own[name] for name in names), *positional(tensors)[:-1], kernel, list(wanted)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do": torch.zeros(2, 16)}, r"do must have shape \[T, HID\] = \[3, 16\], got \[2, 16\]"),
        ({"do": torch.zeros(3, 16).half()}, "do must be torch.float32 on cpu, got torch.float16 on cpu"),
        ({"wanted": [-1]}, r"wanted must have numbers of \[0, 1, 2, 3, 4, 5, 6, 7, 8\], each once, got \[-1\]"),
        ({"wanted": [9]}, r"wanted must have numbers of .*, each once, got \[9\]"),
        ({"wanted": [0, 0]}, r"wanted must have numbers of .*, each once, got \[0, 0\]"),
        ({"wanted": [4], "bias_gate_up": None}, r"wanted must have numbers of \[0, 1, 2, 3, 5, .*, got \[4\]"),
        ({"w_gate_up": torch.zeros(5, 16, 16)}, r"w_gate_up must have shape \[E, 2 \* INTER, HID\] = \[4, 16, 16\]"),
        ({"w_gate_up": torch.zeros(4, 16, 16).char()}, "w_gate_up must be float16, bfloat16 or float32, got"),
    ],
)
def test_the_operator_of_gradients_refuses_by_itself(changes, message):
    with pytest.raises(InputError, match=message):
        OPS.fused_moe_backward(*backward_arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"product": torch.zeros(16, 6)}, r"product must have shape \[T \* K, rows of w_gate_up\] = \[6, 16\], got"),
        ({"product": torch.zeros(16, 6).t()}, r"product must be contiguous, got strides \[1, 6\]"),
        ({"product": torch.zeros(6, 16).half()}, "product must be torch.float32 on cpu, got torch.float16"),
        ({"do": torch.zeros(2, 16)}, r"do must have shape \[T, HID\] = \[3, 16\], got \[2, 16\]"),
    ],
)
def test_the_operator_of_gradients_reads_no_product_that_is_not_one(changes, message):
    """Kernels would read past its end: it is refused before one is chosen."""
    with pytest.raises(UnsupportedError, match="moe_backward_triton needs an NVIDIA GPU"):
        OPS.fused_moe_backward(*backward_arguments(kernel="grouped_triton"))
    with pytest.raises(InputError, match=message):
        OPS.fused_moe_backward(*backward_arguments(kernel="grouped_triton", **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "foo"}, "score must be one of softmax, sigmoid, got 'foo'"),
        ({"scale": float("nan")}, "scale must be a finite number of fp32, got nan"),
        ({"ids": torch.zeros(3, 2)}, "ids must be torch.int32 on cpu, got torch.float32 on cpu"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int32).t()}, r"ids must be contiguous, got strides \[1, 3\]"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int32)}, r"ids must have shape \[T, K\], T = 3, got \[2, 2\]"),
        ({"dweights": torch.zeros(7, 9)}, r"dweights must have shape \[T, K\], T = 3, got \[7, 9\]"),
        ({"logits": torch.zeros(3, 8).double()}, "logits must be float16, bfloat16 or float32, got torch.float64"),
    ],
)
def test_the_operator_of_routing_s_gradient_refuses_by_itself(change, message):
    arguments = {
        "dweights": torch.zeros(3, 2), "logits": torch.zeros(3, 8), "ids": torch.zeros(3, 2, dtype=torch.int32),
        "score": "softmax", "renormalize": True, "scale": 1.0,
    } | change  # fmt: skip
    with pytest.raises(InputError, match=message):
        OPS.moe_route_backward(*arguments.values())


def test_values_that_have_no_text_have_a_message():
    """Python writes no integer of more than some thousand digits."""
    assert shown("a") == "'a'"
    huge: tuple[dict[str, Any], ...] = (
        {"activation": 10**5000},
        {"kernel": 10**5000},
        {"alpha": -(10**5000)},
        {"interleaved": 10**5000},
    )
    for options in huge:
        with pytest.raises(InputError, match="got int too long to be printed"):
            fused_moe(**given(), **options)
    with pytest.raises(InputError, match="top_k must be at most the 8 experts, got int too long to be printed"):
        route(torch.zeros(3, 8), 10**5000)


def test_a_name_without_a_hash_is_refused():
    class Name(str):
        __slots__ = ()
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(InputError, match="options must have a hash, got"):
        fused_moe(**given(), activation=Name("swiglu"))

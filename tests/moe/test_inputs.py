"""Every refused input, by its message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, explain_moe, fused_moe, route
from flashmoe_science.moe.backward.api import fused_moe_backward
from flashmoe_science.moe.routing.api import describe_routing
from flashmoe_science.moe.routing.prepare import kernel_of

from .cases import Case, make_tensors


def call(change: dict[str, Any], **options: Any) -> torch.Tensor:
    tensors: dict[str, Any] = make_tensors(Case("refused", 3, 4, 2, 16, 8, bias=True, shared=1, shared_inter=8))
    tensors.update(change)
    return fused_moe(**tensors, **options)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [1.0]}, "x must be a torch.Tensor, got list"),
        ({"w_down": None}, "w_down must be a torch.Tensor, got NoneType"),
        ({"bias_down": 3}, "bias_down must be a torch.Tensor or None, got int"),
        ({"x": zeros(3, 16).to_sparse()}, "x must be dense, got torch.sparse_coo"),
        ({"bias_down": zeros(4, 16).to_sparse()}, "bias_down must be dense, got torch.sparse_coo"),
        ({"x": zeros(3, 2, 16)}, r"x must have 2 dimensions \[T, HID\], got shape \[3, 2, 16\]"),
        ({"x": zeros(3, 16, dtype=torch.float64)}, "x must be float16, bfloat16 or float32, got torch.float64"),
        ({"x": zeros(3, 16, dtype=torch.float16)}, "must have the dtype of x, torch.float16, got torch.float32"),
        ({"x": zeros(3, 16).to("meta")}, "x must be on a CUDA device or the CPU, got meta"),
        ({"w_down": zeros(4, 16, 8).to("meta")}, "w_down must be on the device of x, cpu, got meta"),
        ({"topk_weights": zeros(3, 2, dtype=torch.float64)}, "topk_weights must be float16, .* or float32, got"),
        ({"shared_weights": zeros(3, 1, dtype=torch.int32)}, "shared_weights must be float16, .*, got torch.int32"),
        ({"x": torch._neg_view(zeros(3, 16))}, r"x must not be a negative view, got one \(is_neg\(\)\)"),
        ({"w_down": zeros(4, 16)}, r"w_down must have 3 dimensions \[E, HID, INTER\], got shape \[4, 16\]"),
        ({"shared_gate_up": zeros(16, 16)}, r"shared_gate_up must have 3 dimensions \[S, 2 \* INTER, HID\]"),
        ({"shared_gate_up": None}, "shared_gate_up must be given with the other weights of the shared experts"),
        (
            {"shared_gate_up": zeros(0, 16, 16), "shared_down": zeros(0, 16, 8)},
            r"shared_down must have S and INTER of 1 or more, got shape \[0, 16, 8\]",
        ),
        ({"w_gate_up": zeros(4, 16)}, r"w_gate_up must have 3 dimensions \[E, 2 \* INTER, HID\]"),
        ({"w_gate_up": zeros(4, 8, 16)}, r"w_gate_up must have shape \[E, 2 \* INTER, HID\] = \[4, 16, 16\], got"),
        (  # transposed: the inner size is that of w_gate_up
            {"w_down": zeros(4, 8, 16)},
            r"w_down must have shape \[E, HID, INTER\] = \[4, 16, 8\], got \[4, 8, 16\]",
        ),
        ({"x": zeros(3, 8)}, r"x must have the HID of the weights, 16, got shape \[T, HID\] = \[3, 8\]"),
        ({"w_down": zeros(4, 15, 8)}, r"w_down must have shape \[E, HID, INTER\] = \[4, 16, 8\], got \[4, 15, 8\]"),
        ({"topk_ids": zeros(3, 2)}, "topk_ids must be int32 or int64, got torch.float32"),
        ({"topk_ids": zeros(4, 2, dtype=torch.int32)}, r"topk_ids must have shape \[T, K\] = \[3, 2\], got \[4, 2\]"),
        ({"topk_ids": zeros(2, 3, dtype=torch.int32).t()}, r"topk_ids must be contiguous, got strides \[1, 3\]"),
        (
            {"topk_ids": zeros(3, 0, dtype=torch.int32), "topk_weights": zeros(3, 0)},
            r"topk_ids must have K of 1 or more, got shape \[3, 0\]",
        ),
        ({"w_down": zeros(4, 16, 0), "w_gate_up": zeros(4, 0, 16)}, r"w_down must have E, HID and INTER of 1 or more"),
        ({"topk_weights": zeros(3, 3)}, r"topk_weights must have shape \[T, K\] = \[3, 2\], got \[3, 3\]"),
        ({"topk_weights": zeros(2, 3).t()}, "topk_weights must be contiguous"),
        ({"bias_gate_up": zeros(4, 8)}, r"bias_gate_up must have shape \[E, 2 \* INTER\] = \[4, 16\], got \[4, 8\]"),
        ({"bias_down": zeros(16, 4).t()}, "bias_down must be contiguous"),
        ({"shared_down": None}, "shared_down must be given with the other weights of the shared experts, got None"),
        ({"shared_gate_up": zeros(1, 8, 16)}, r"shared_gate_up must have shape .* = \[1, 16, 16\], got \[1, 8, 16\]"),
        ({"shared_down": zeros(1, 8, 16)}, r"shared_down must have shape \[S, HID, INTER\] = \[1, 16, 16\]"),
        ({"shared_weights": zeros(3, 2)}, r"shared_weights must have shape \[T, S\] = \[3, 1\], got \[3, 2\]"),
        (
            {"shared_gate_up": None, "shared_down": None, "shared_weights": zeros(3, 1)},
            "shared_weights must be None without shared experts, got some",
        ),
    ],
)  # fmt: skip
def test_a_tensor_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        call(change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "tanh"}, "activation must be one of swiglu, .*, got 'tanh'"),
        ({"activation": 1}, "activation must be one of swiglu, .*, got 1"),
        ({"interleaved": 1}, "interleaved must be True or False, got 1"),
        ({"alpha": "a"}, "alpha must be a positive number or None, got 'a'"),
        ({"alpha": True}, "alpha must be a positive number or None, got True"),
        ({"kernel": None}, "kernel must be auto or one of gemv_triton, .*, got None"),
        ({"batch_invariant": None}, "batch_invariant must be True or False, got None"),
        ({"alpha": 1.0}, "alpha must be None for swiglu, got 1.0"),
        ({"limit": -1.0}, "limit must be a positive number or None, got -1.0"),
        ({"activation": "swiglu_clamped", "limit": float("inf")}, "limit must be positive and at most 1e30, got inf"),
        ({"kernel": "fast"}, "kernel must be auto or one of gemv_triton, .*, got 'fast'"),
        ({"kernel": ["auto"]}, r"kernel must be auto or one of gemv_triton, .*, got \['auto'\]"),
        ({"activation": ["swiglu"]}, r"activation must be one of swiglu, .*, got \['swiglu'\]"),
        ({"interleaved": {}}, "interleaved must be True or False, got {}"),
        ({"limit": np.ones(2)}, "limit must be a positive number or None, got array"),
        ({"alpha": 10**400}, "alpha must be positive and at most 1e30, got an integer of 1329 bits"),
    ],
)
def test_an_option_is_refused(options, message):
    for change in ({}, {"w_down": zeros(4, 16, 8).requires_grad_()}):
        with pytest.raises(InputError, match=message):
            call(change, **options)


def test_gates_must_be_there_to_be_interleaved():
    tensors = make_tensors(Case("refused", activation="relu2"))
    with pytest.raises(InputError, match="interleaved must be False for relu2, which has no gate, got True"):
        fused_moe(**tensors, activation="relu2", interleaved=True)


@pytest.mark.parametrize("kernel", ["gemv_triton", "few_triton", "grouped_triton"])
def test_a_forced_kernel_never_falls_back(kernel):
    with pytest.raises(UnsupportedError, match=f"{kernel} needs an NVIDIA GPU, got CPU tensors"):
        call({}, kernel=kernel)


def test_gradients_are_recorded_where_they_are_wanted():
    tensors = make_tensors(Case("grad"))
    tensors["w_down"].requires_grad_()
    assert fused_moe(**tensors).requires_grad
    assert explain_moe(**tensors).kernel == "reference"
    with torch.no_grad():
        assert not fused_moe(**tensors).requires_grad


def test_forward_mode_derivatives_are_refused():
    tensors = make_tensors(Case("tangent"))
    with torch.autograd.forward_ad.dual_level():
        tensors["x"] = torch.autograd.forward_ad.make_dual(tensors["x"], tensors["x"])
        with pytest.raises(UnsupportedError, match="x has a forward-mode tangent"):
            fused_moe(**tensors)


def test_forward_mode_derivatives_of_routing_are_refused():
    with torch.autograd.forward_ad.dual_level():
        logits = torch.autograd.forward_ad.make_dual(zeros(3, 8), zeros(3, 8))
        with pytest.raises(UnsupportedError, match="logits has a forward-mode tangent"):
            route(logits, 2)


def test_more_experts_than_a_row_of_registers_are_refused():
    with pytest.raises(UnsupportedError, match="no kernel routes among 4097 experts") as error:
        kernel_of(describe_routing(zeros(1, 4097), 2), 90)
    assert error.value.hint == "the most that are served: 4096"


def test_the_kernel_of_gradients_needs_a_gpu():
    tensors = make_tensors(Case("refused"))
    product = zeros(18, 48)
    with pytest.raises(UnsupportedError, match="moe_backward_triton needs an NVIDIA GPU, got CPU tensors"):
        fused_moe_backward(tensors["x"], product, **tensors, kernel="moe_backward_triton")


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do": None}, "do must be a torch.Tensor, got NoneType"),
        ({"product": zeros(3, 32).to_sparse()}, "product must be dense, got torch.sparse_coo"),
        ({"do": zeros(4, 16)}, r"do must have shape \[T, HID\] = \[\d, 16\], got \[4, 16\]"),
        ({"do": zeros(0, 16).half()}, "do must (have shape|be torch.float32 on cpu, got torch.float16 on cpu)"),
        ({"product": zeros(9, 32)}, r"product must have shape \[T \* K, rows of w_gate_up\] = .*, got \[9, 32\]"),
        ({"kernel": "fast"}, "kernel must be auto or one of moe_backward_gluon_sm90, .*, got 'fast'"),
        ({"kernel": ["auto"]}, "kernel must be auto or one of moe_backward_gluon_sm90, .*, got"),
        ({"activation": "tanh"}, "activation must be one of swiglu, .*, got 'tanh'"),
        ({"activation": ["swiglu"]}, "activation must be one of swiglu, .*, got"),
        ({"limit": 0.0}, "limit must be a positive number or None, got 0.0"),
        ({"interleaved": 1}, "interleaved must be True or False, got 1"),
        ({"w_down": zeros(4, 16)}, r"w_down must have 3 dimensions \[E, HID, INTER\], got shape \[4, 16\]"),
        ({"topk_ids": zeros(3, 2)}, "topk_ids must be int32 or int64, got torch.float32"),
        ({"topk_ids": None}, "topk_ids must be a torch.Tensor, got NoneType"),
        ({"product": np.zeros((6, 16))}, "product must be a torch.Tensor, got ndarray"),
        ({"bias_down": 3}, "bias_down must be a torch.Tensor or None, got int"),
        ({"activation": "swiglu_clamped", "alpha": -3.0}, r"alpha must be a positive number or None, got -3\.0"),
        ({"x": zeros(16), "do": zeros(16)}, r"x must have 2 dimensions \[T, HID\], got shape \[16\]"),
        ({"w_down": zeros(4, 16, 4)}, r"w_gate_up must have shape \[E, 2 \* INTER, HID\] = "),
        ({"topk_weights": zeros(3, 3)}, r"topk_weights must have shape \[T, K\] = \[\d, 2\], got \[3, 3\]"),
        ({"bias_down": zeros(4, 25)}, r"bias_down must have shape \[E, HID\] = \[4, 16\], got \[4, 25\]"),
        *(
            ({"x": zeros(3, 16, dtype=dtype)}, f"x must be float16, bfloat16 or float32, got {dtype}")
            for dtype in (torch.float64, torch.int32, torch.complex64)
        ),
    ],
)  # fmt: skip
def test_a_backward_call_is_refused(change, message, tokens):
    """Whoever would serve it, and with no tokens too."""
    tensors: dict[str, Any] = make_tensors(Case("refused", tokens, 4, 2, 16, 8, bias=True))
    given = {"do": zeros(tokens, 16), "product": zeros(2 * tokens, 16), **tensors}
    assert len(fused_moe_backward(**given)) == 6
    with pytest.raises(InputError, match=message):
        fused_moe_backward(**{**given, **change})


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (zeros(16, 6).t(), r"product must be contiguous, got strides \[1, 6\]"),
        (torch._neg_view(zeros(6, 16)), r"product must not be a negative view, got one \(is_neg\(\)\)"),
        (zeros(97)[1:].view(6, 16), "product must begin at a multiple of 16 bytes, got an address 4 bytes behind one"),
        (zeros(6, 16).half(), "product must be torch.float32 on cpu, got torch.float16 on cpu"),
    ],
)
def test_a_product_is_refused(product, message):
    tensors: dict[str, Any] = make_tensors(Case("refused", 3, 4, 2, 16, 8, bias=True))
    with pytest.raises(InputError, match=message):
        fused_moe_backward(zeros(3, 16), product, **tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": zeros(3, 2).int().expand(1, 3, 2)}, "ids must have shape"),
        ({"ids": zeros(3, 2).long()}, "ids must be"),
        ({"dweights": zeros(4, 2)}, r"dweights must have shape \[T, K\], T = 3, got \[4, 2\]"),
        ({"dweights": zeros(3, 2).double()}, "dweights must be"),
    ],
)
def test_gradients_of_another_routing_are_refused(changes, message):
    """Those who call the operator itself: what does not fit would be read from the wrong places."""
    given = {"dweights": zeros(3, 2), "logits": zeros(3, 8), "ids": zeros(3, 2).int(), **changes}
    with pytest.raises(InputError, match=message):
        torch.ops.flashmoe_science.moe_route_backward(*given.values(), "softmax", True, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits": [1]}, "logits must be a torch.Tensor, got list"),
        ({"bias": 1}, "bias must be a torch.Tensor or None, got int"),
        ({"logits": zeros(8)}, r"logits must have 2 dimensions \[T, E\], E at least 1, got shape \[8\]"),
        ({"logits": zeros(3, 8, dtype=torch.int32)}, "logits must be float16, bfloat16 or float32, got torch.int32"),
        ({"logits": zeros(3, 8).to("meta")}, "logits must be on a CUDA device or the CPU, got meta"),
        ({"bias": zeros(8, dtype=torch.float64)}, "bias must be float16, bfloat16 or float32, got torch.float64"),
        ({"bias": zeros(8).to("meta")}, "bias must be on the device of logits, cpu, got meta"),
        ({"bias": torch._neg_view(zeros(8))}, r"bias must not be a negative view, got one \(is_neg\(\)\)"),
        ({"top_groups": 0}, "top_groups must be an integer, 1 or more, got 0"),
        ({"bias": zeros(7)}, r"bias must have shape \[E\] = \[8\], got \[7\]"),
        ({"bias": zeros(16)[::2]}, r"bias must be contiguous, got strides \[2\]"),
        ({"top_k": 9}, "top_k must be at most the 8 experts, got 9"),
        ({"top_k": 0}, "top_k must be an integer, 1 or more, got 0"),
        ({"groups": 3}, "groups must divide the 8 experts, got 3"),
        ({"groups": 2, "top_groups": 3}, "top_groups must be at most groups = 2, got 3"),
        ({"groups": 4, "top_k": 3}, "top_k must be at most the 2 experts of 1 group, got 3"),
        ({"top_k": 2.0}, "top_k must be an integer, 1 or more, got 2.0"),
        ({"score": 3}, "score must be one of softmax, sigmoid, got 3"),
        ({"scale": "x"}, "scale must be a finite number of fp32, got 'x'"),
        ({"scale": True}, "scale must be a finite number of fp32, got True"),
        ({"score": "relu"}, "score must be one of softmax, sigmoid, got 'relu'"),
        ({"renormalize": 1}, "renormalize must be True or False, got 1"),
        ({"scale": float("nan")}, "scale must be a finite number of fp32, got nan"),
        ({"scale": 10**400}, "scale must be a finite number of fp32, got 1000"),
        ({"scale": 3.5e38}, "scale must be a finite number of fp32, got 3.5e"),
        ({"groups": 4, "top_groups": 2, "top_k": 5}, "top_k must be at most the 4 experts of 2 groups, got 5"),
        ({"logits": zeros(3, 8).to_sparse()}, "logits must be dense, got torch.sparse_coo"),
        ({"bias": zeros(8).to_sparse()}, "bias must be dense, got torch.sparse_coo"),
    ],
)  # fmt: skip
def test_a_routing_is_refused(options, message):
    full: dict[str, Any] = {"logits": zeros(3, 8), "top_k": 2, **options}
    with pytest.raises(InputError, match=message):
        route(**full)
    if isinstance(full["logits"], torch.Tensor) and full["logits"].is_floating_point():
        full["logits"].requires_grad_()
        with pytest.raises(InputError, match=message):
            route(**full)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_torch_compile_and_opcheck_know_the_operators(tokens):
    case = Case("compiled", tokens, 4, 2, 16, 8, bias=True, shared=1, shared_inter=8, weighted=True)
    tensors = make_tensors(case)
    optional = ("bias_gate_up", "bias_down", "shared_gate_up", "shared_down", "shared_weights")
    arguments = (
        *(tensors[name] for name in ("x", "w_gate_up", "w_down", "topk_weights", "topk_ids")),
        *(tensors[name] for name in optional), "swiglu", None, None, False, False, "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flashmoe_science.fused_moe.default, arguments)
    logits = torch.randn(tokens, 4)
    torch.library.opcheck(torch.ops.flashmoe_science.moe_route.default, (logits, None, 2, "softmax", True, 1, 1, 1.0))

    @torch.compile(backend="eager", fullgraph=True)
    def layer(logits, **tensors):
        weights, ids = route(logits, 2)
        return fused_moe(**{**tensors, "topk_weights": weights, "topk_ids": ids}) * 2

    weights, ids = route(logits, 2)
    expected = fused_moe(**{**tensors, "topk_weights": weights, "topk_ids": ids}) * 2
    assert torch.equal(layer(logits, **tensors), expected)

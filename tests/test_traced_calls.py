"""Whoever makes graphs of calls, or looks at them, sees our operators: of every public function, on CPU and GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flashmoe_science import (
    BlockMask,
    UnsupportedError,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
    fused_moe,
    pack_mla_rows,
    route,
    sparse_mla,
)
from flashmoe_science.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flashmoe_science.integrations.sdpa import scaled_dot_product_attention
from flashmoe_science.moe.backward.api import fused_moe_backward

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, HEADS, KEYS, DIM = 2, 4, 16, 32

Call = Callable[..., Any]


def heads(device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randn(BATCH, HEADS, KEYS, DIM, device=device, dtype=torch.float16) for _ in "qkv")


def latents(device: str) -> tuple[Tensor, ...]:
    q, columns, rotated = (torch.randn(BATCH, KEYS, 4, n, device=device).half() for n in (576, 512, 64))
    return q.transpose(1, 2), pack_mla_rows(columns[:, :, :1], rotated[:, :, :1])


def tokens(device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randn(KEYS, HEADS, DIM, device=device, dtype=torch.float16) for _ in "qkv")


def experts(device: str) -> tuple[Tensor, ...]:
    x = torch.randn(6, 32, device=device, dtype=torch.float16)
    up, down = torch.randn(4, 64, 32, device=device), torch.randn(4, 32, 32, device=device)
    return x, up.half() / 8, down.half() / 8, torch.rand(6, 2, device=device)


def logits(device: str) -> tuple[Tensor, ...]:
    return (torch.randn(6, 8, device=device),)


@functools.cache
def starts(device: str) -> Tensor:
    return torch.tensor([0, 5, KEYS], dtype=torch.int32, device=device)


@functools.cache
def ids(device: str) -> Tensor:
    return (torch.arange(12, device=device) % 4).view(6, 2).to(torch.int32)


@functools.cache
def lengths(device: str) -> Tensor:
    return torch.tensor([9, 3], dtype=torch.int32, device=device)


def with_cache(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flash_attention_with_kv_cache(
        q[:, :, :1], k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=lengths(q.device.type)
    )


def appended(q: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = k.transpose(1, 2).clone(), v.transpose(1, 2).clone()
    o = flash_attention_with_kv_cache(
        q[:, :, :1], keys, values, k[:, :, :1], v[:, :, :1], cache_seqlens=lengths(q.device.type)
    )
    return o, keys, values


def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
    at = starts(q.device.type)
    return flash_attention_varlen(q, k, v, at, at, 11, 11, causal=True)


@functools.cache
def mask_of(device: str) -> BlockMask:
    return BlockMask.documents(torch.arange(KEYS, device=device) // 5)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flash_attention(q, k, v, mask=mask_of(q.device.type))


def rows(q: Tensor, k: Tensor, v: Tensor) -> Any:
    chosen = torch.arange(BATCH * KEYS * 4, device=q.device, dtype=torch.int32).view(BATCH, KEYS, 4) % KEYS
    return sparse_mla(q, k[:, :1].transpose(1, 2), chosen, head_dim_v=16, sinks=v[0, :, 0, 0].contiguous())


def rows_in_fp8(q: Tensor, pool: Tensor) -> Any:
    chosen = torch.arange(BATCH * KEYS * 4, device=q.device, dtype=torch.int32).view(BATCH, KEYS, 4) % KEYS
    return sparse_mla(q, pool, chosen)


def paged(q: Tensor, k: Tensor, v: Tensor) -> Any:
    at = starts(q.device.type)
    table = torch.zeros(2, 1, dtype=torch.int32, device=q.device)
    return flash_attention_varlen(q, k[None], v[None], at, at, 11, 11, page_table=table)


def gradients(q: Tensor, k: Tensor, v: Tensor) -> Any:
    o, lse = flash_attention(q, k, v, return_lse=True)
    return flash_attention_backward(q, k, v, o, lse, v)


def routed(x: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Any:
    return fused_moe(x, up, down, weights, ids(x.device.type))


def expert_gradients(x: Tensor, up: Tensor, down: Tensor, weights: Tensor) -> Any:
    product = torch.zeros(12, 64, dtype=x.dtype, device=x.device)
    if x.is_cuda:  # where it is read
        chosen = ids(x.device.type).flatten()
        order = chosen.long().argsort(stable=True)
        product = (x[order // 2, None].float() @ up[chosen[order].long()].float().mT)[:, 0].half()
    return fused_moe_backward(x, product, x, up, down, weights, ids(x.device.type))


def drop_in_varlen(q: Tensor, k: Tensor, v: Tensor) -> Any:
    at = starts(q.device.type)
    return flash_attn_varlen_func(q, k, v, at, at, 11, 11)


def drop_in_cache(q: Tensor, k: Tensor, v: Tensor) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths(q.device.type))


CALLS: dict[str, tuple[Call, Callable[[str], tuple[Tensor, ...]], str]] = {
    "plain": (flash_attention, heads, "attention_forward"),
    "lse": (lambda *x: flash_attention(*x, return_lse=True), heads, "attention_forward_lse"),
    "window": (lambda *x: flash_attention(*x, window=(3, 0)), heads, "attention_features"),
    "masked": (masked, heads, "attention_masked"),
    "packed": (packed, tokens, "attention_varlen"),
    "paged": (paged, tokens, "attention_varlen_paged"),
    "cache": (with_cache, heads, "attention_with_kv_cache"),
    "rows": (rows, heads, "sparse_mla"),
    "rows fp8": (rows_in_fp8, latents, "sparse_mla"),
    "append": (appended, heads, "attention_append_kv_cache"),
    "backward": (gradients, heads, "attention_backward"),
    "experts": (routed, experts, "fused_moe"),
    "experts backward": (expert_gradients, experts, "fused_moe_gradients"),
    "route": (lambda x: route(x, 2), logits, "moe_route"),
    "sdpa": (scaled_dot_product_attention, heads, "attention_forward"),
    "flash_attn": (flash_attn_func, heads, "attention_forward"),
    "flash_attn qkvpacked": (
        lambda qkv: flash_attn_qkvpacked_func(qkv, causal=True), lambda device: (torch.stack(heads(device), 2),),
        "attention_forward",
    ),
    "flash_attn varlen": (drop_in_varlen, tokens, "attention_varlen"),
    "flash_attn cache": (drop_in_cache, heads, "attention_with_kv_cache"),
}  # fmt: skip
# Those with gradients, and the operator that makes them.
RECORDED = {
    "plain": ("attention_features", "attention_backward"),
    "window": ("attention_features", "attention_backward"),
    "masked": ("attention_masked", "attention_masked_backward"),
    "packed": ("attention_varlen", "attention_backward"),
    "experts": ("fused_moe_kept", "fused_moe_backward"),
    "route": ("moe_route", "moe_route_backward"),
    "sdpa": ("attention_features", "attention_backward"),
    "flash_attn varlen": ("attention_varlen", "attention_backward"),
}


def of_tensors(call: Call) -> Call:
    """Return a call without the options, which tracers would count."""

    def without_options(*tensors: Tensor) -> Any:
        return call(*tensors)

    return without_options


def flat(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [*found]


def check_equal(found: Any, expected: Any) -> None:
    found, expected = flat(found), flat(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class Seen(TorchDispatchMode):
    """Writes down which operators of ours are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return self.names.count(f"flashmoe_science.{name}.default")


class SeenByFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_graphs_of_make_fx_hold_the_operator(name, device):
    call, make, operator = CALLS[name]
    call(*make(device))  # what is prepared must not be replayed
    graph = make_fx(of_tensors(call))(*make(device))
    assert any(f"flashmoe_science.{operator}.default" in str(node.target) for node in graph.graph.nodes)
    other = make(device)
    check_equal(graph(*other), call(*other))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # checks of shapes become part of no graph
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_graphs_of_jit_trace_hold_the_operator(name, device):
    call, make, operator = CALLS[name]
    call(*make(device))
    traced = torch.jit.trace(of_tensors(call), make(device), check_trace=False)
    assert f"flashmoe_science::{operator}(" in str(traced.graph)
    other = make(device)
    check_equal(traced(*other), call(*other))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_modes_see_the_operator(name, device):
    call, make, operator = CALLS[name]
    tensors = make(device)
    expected = call(*tensors)
    with Seen() as outer, Seen() as inner:
        found = call(*tensors)
    check_equal(found, expected)
    assert outer.count(operator) == inner.count(operator) == 1
    with SeenByFunctions() as functions:
        check_equal(call(*tensors), expected)
    assert functions.names.count(f"flashmoe_science.{operator}.default") == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_get_fake_results(name, device):
    call, make, _ = CALLS[name]
    tensors = make(device)
    expected = flat(call(*tensors))
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    found = flat(call(*(mode.from_tensor(tensor) for tensor in tensors)))
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, torch._subclasses.FakeTensor)
        assert (one.shape, one.dtype, one.device, one.stride()) == (
            other.shape, other.dtype, other.device, other.stride(),
        )  # fmt: skip


def loss_of(call: Call, *tensors: Tensor) -> Tensor:
    return flat(call(*tensors))[0].float().square().sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECORDED)
def test_modes_see_recorded_calls_and_their_gradients(name, device):
    call, make, _ = CALLS[name]
    forward, backward = RECORDED[name]
    tensors = [tensor.requires_grad_() for tensor in make(device)]
    expected = torch.autograd.grad(loss_of(call, *tensors), tensors)
    with Seen() as seen:
        found = torch.autograd.grad(loss_of(call, *tensors), tensors)
    assert (seen.count(forward), seen.count(backward)) == (1, 1)
    check_equal(found, expected)
    loss = loss_of(call, *tensors)
    with Seen() as seen:  # of the backward pass alone
        check_equal(torch.autograd.grad(loss, tensors), expected)
    assert (seen.count(forward), seen.count(backward)) == (0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECORDED)
def test_selective_checkpointing_keeps_what_it_is_told_to(name, device):
    call, make, _ = CALLS[name]
    forward, _ = RECORDED[name]
    kept = getattr(torch.ops.flashmoe_science, forward).default
    tensors = [tensor.requires_grad_() for tensor in make(device)]
    expected = torch.autograd.grad(loss_of(call, *tensors), tensors)

    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is kept else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    with Seen() as seen:  # outside of the modes of the checkpoint: it sees what is run
        out = checkpoint(lambda *x: flat(call(*x))[0], *tensors, use_reentrant=False, context_fn=context)
        found = torch.autograd.grad(out.float().square().sum(), tensors)
    check_equal(found, expected)
    assert seen.count(forward) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_vmap_is_refused_by_name(name, device):
    call, make, _ = CALLS[name]
    tensors = make(device)
    call(*tensors)
    recorded = [[tensor.detach().requires_grad_() for tensor in tensors]] if name in RECORDED else []
    for given in (tensors, *recorded):
        for place in range(len(given)):

            def mapped(x: Tensor, place: int = place, given: Any = given) -> Any:
                return call(*given[:place], x, *given[place + 1 :])

            with pytest.raises(UnsupportedError, match=r"torch\.vmap and other transforms of torch\.func"):
                torch.vmap(mapped)(torch.stack([given[place]] * 2))


NESTED: dict[str, Callable[[Call, Tensor], Any]] = {
    "tangents of gradients": lambda loss, x: torch.func.jvp(torch.func.grad(loss), (x,), (x,)),
    "gradients of tangents": lambda loss, x: torch.func.grad(lambda y: torch.func.jvp(loss, (y,), (y,))[1])(x),
    "gradients of gradients": lambda loss, x: torch.func.grad(lambda y: torch.func.grad(loss)(y).sum())(x),
    "hessian": lambda loss, x: torch.func.hessian(loss)(x),
    "batches of gradients": lambda loss, x: torch.vmap(torch.func.grad(loss))(torch.stack([x, x])),
    "gradients for each of a batch": lambda loss, x: torch.vmap(
        lambda factor: torch.func.grad(lambda y: factor * loss(y))(x)
    )(torch.ones(2)),
    "linearize": torch.func.linearize,
}


@pytest.mark.parametrize("nest", NESTED)
@pytest.mark.parametrize("name", RECORDED)
def test_nested_transforms_are_refused_by_name(name, nest):
    """Of several transforms, an input shows the innermost alone."""
    call, make, _ = CALLS[name]
    first, *others = (tensor.float() for tensor in make("cpu"))
    with pytest.raises(UnsupportedError):
        NESTED[nest](lambda x: loss_of(call, x, *others), first)


UNBACKED: dict[str, Call] = {
    "packed": lambda q, at, most: flash_attention_varlen(q, q, q, at, at, most, most),
    "flash_attn varlen": lambda q, at, most: flash_attn_varlen_func(q, q, q, at, at, most, most),
}


@pytest.mark.parametrize("name", UNBACKED)
def test_a_length_that_a_graph_reads_from_a_tensor(name):
    """Dynamo calls it an int, and it has no value yet."""

    def attend(q: Tensor, at: Tensor) -> Tensor:
        most: Any = at.diff().max()
        return UNBACKED[name](q, at, most.item())  # type: ignore[no-any-return]

    q, at = torch.randn(KEYS, HEADS, DIM), starts("cpu")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check_equal(torch.compile(attend, backend="aot_eager", fullgraph=True)(q, at), attend(q, at))


def test_a_scale_that_follows_from_a_size_compiles():
    """It is a symbol where sizes change, and Dynamo knows no attribute of it."""

    def attend(q: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, q, q, scale=0.5 * q.shape[-1] ** -0.5)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for dim in (8, 12):
        q = torch.randn(1, 2, 5, dim)
        check_equal(compiled(q), attend(q))


def test_a_default_device_does_not_slow_calls_down():
    """Its context is a mode of functions, which looks at what makes tensors alone."""
    from flashmoe_science.gpu.subclasses import is_watched

    assert not is_watched()
    with torch.device("cpu"):
        assert not is_watched()
    with SeenByFunctions():
        assert is_watched()

"""Routing and experts as a layer of a model."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor, nn

from ..errors import InputError, shown
from ..gpu.checks import check_dense, check_tensor
from ..gpu.subclasses import is_bare_subclass, is_untraced
from ..moe.api import fused_moe
from ..moe.checks import DTYPE_NAMES, check_flags
from ..moe.plan import check_kernel_name
from ..moe.problem import MoeProblem, columns_up
from ..moe.routing.api import describe_routing, route

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.expert_parallel import ExpertParallel

_MOST = 2**31
_WEIGHTS = (
    "w_router", "w_gate_up", "w_down", "bias_gate_up", "bias_down", "shared_gate_up", "shared_down"
)  # fmt: skip


def _check_device(device: object) -> str:
    """Return the kind of a device that torch has here."""
    try:
        return torch.empty(0, device=device).device.type  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # without CUDA, torch asserts
        raise InputError(f"device must be one that torch has here, or None, got {shown(device)}: {error}") from error


# torch's module of DTensors loads slowly: only layers over a mesh import it.


# By group, kind of device and capacity. Layers keep them alive.
_shared: weakref.WeakValueDictionary[tuple[Any, str, float], ExpertParallel] = weakref.WeakValueDictionary()


def _compare_layers(mesh: DeviceMesh, experts: int, capacity: float, check: Callable[[], str]) -> None:
    """Check a layer on all ranks, and that theirs are alike. Raises ``InputError`` on all of them."""
    from ..distributed.exchange import compare, group_of
    from ..distributed.expert_parallel import check_capacity_share

    group = group_of(mesh, "ep")

    def describe() -> str:
        described = check()
        check_capacity_share(capacity)
        if experts % group.size():
            raise InputError(f"experts must be a multiple of the {group.size()} ranks of ep_mesh, got {experts}")
        return f"a layer of {described}, capacity {float(capacity)}"

    compare(describe, group)


def _split_experts(mesh: DeviceMesh, capacity: float) -> ExpertParallel:
    """Return what all layers of a mesh and a capacity share, as the buffer of its transport may be large."""
    from ..distributed.exchange import group_of
    from ..distributed.expert_parallel import ExpertParallel

    group = group_of(mesh, "ep")
    key = (group, mesh.device_type, capacity)
    parallel = _shared.get(key)
    # Ranks may free layers at unlike times, and all must share the same.
    have: list[bool] = [False] * group.size()
    torch.distributed.all_gather_object(have, parallel is not None, group=group)
    if parallel is None or not all(have):
        parallel = _shared[key] = ExpertParallel(mesh, capacity=capacity)
    return parallel


def _distribute(local: Tensor, mesh: DeviceMesh, *, by_expert: bool) -> nn.Parameter:
    from ..distributed.parameters import distribute

    return distribute(local, mesh, by_expert=by_expert)


def _local_of(parameter: Tensor) -> Tensor:
    from ..distributed.parameters import local_of

    return local_of(parameter)


def _draw(parameter: Any, fill: Callable[[Tensor], object]) -> None:
    from ..distributed.parameters import draw

    draw(parameter, fill)


def _run_over_ranks(parallel: ExpertParallel, tokens: Tensor, given: dict[str, Any]) -> Tensor:
    from ..distributed.parameters import run_over_ranks

    return run_over_ranks(parallel, tokens, given)  # type: ignore[no-any-return]


class MoeLayer(nn.Module):
    """A Mixture of Experts in the place of a multilayer perceptron: ``fused_moe`` of what ``route`` chooses.

    Parameters are ``w_router`` ``[E, HID]``, ``w_gate_up`` ``[E, 2 * INTER, HID]`` (``[E, INTER, HID]`` where the
    activation has no gate) and ``w_down`` ``[E, HID, INTER]``; with ``bias``, ``bias_gate_up`` and ``bias_down``; with
    shared experts, ``shared_gate_up`` and ``shared_down``. With ``routing_bias`` there is a buffer ``routing_bias``
    ``[E]`` fp32, which changes who is chosen and has no gradient (DeepSeek-V3): balance the load by adding to it.

    Args:
        hidden: size of a token.
        inter: inner size of an expert.
        experts: E.
        top_k: experts a token.
        activation: as in ``fused_moe``; so are alpha, limit, interleaved, batch_invariant and kernel.
        alpha: likewise.
        limit: likewise.
        interleaved: likewise.
        bias: whether both products have biases.
        shared_experts: experts that every token goes to.
        shared_inter: their inner size. Default: ``inter``.
        score: as in ``route``; so are renormalize, groups, top_groups and scale.
        renormalize: likewise.
        groups: likewise.
        top_groups: likewise.
        scale: likewise.
        routing_bias: whether there is one.
        batch_invariant: as in ``fused_moe``.
        kernel: likewise.
        device: of the parameters.
        dtype: of the parameters: fp16, bf16 or fp32.
        ep_mesh: of one dimension, as ``mesh["ep"]``: each rank has E / W experts, and calls the layer with its own
            tokens, as many as the others (see ``flashmoe_science.distributed.ExpertParallel``). Parameters are
            DTensors, those of experts ``Shard(0)``, others ``Replicate()``. Their gradients are of the sum of the
            ranks' losses. Ranks that draw from one seed have the weights of a layer without a mesh.
        capacity: as in ``ExpertParallel``. Layers of one mesh and capacity share ``parallel``, its messages' memory and
            its count of tokens without room: ``layer.parallel.check_capacity()`` of one checks all.

    Raises:
        InputError: a size or option breaks the contract of ``fused_moe``, ``route`` or ``ExpertParallel``; the ranks do
            not divide E.

    Matrices begin uniform within one over the root of their inner size, as those of ``torch.nn.Linear``; biases at 0.
    """

    routing_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        inter: int,
        experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        alpha: float | None = None,
        limit: float | None = None,
        interleaved: bool = False,
        bias: bool = False,
        shared_experts: int = 0,
        shared_inter: int | None = None,
        score: str = "softmax",
        renormalize: bool = True,
        groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        routing_bias: bool = False,
        batch_invariant: bool = False,
        kernel: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ep_mesh: DeviceMesh | None = None,
        capacity: float = 1.0,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.routing: dict[str, Any] = {
            "score": score, "renormalize": renormalize, "groups": groups, "top_groups": top_groups, "scale": scale
        }  # fmt: skip
        self.options: dict[str, Any] = {
            "activation": activation, "alpha": alpha, "limit": limit, "interleaved": interleaved,
            "batch_invariant": batch_invariant, "kernel": kernel,
        }  # fmt: skip
        sizes: dict[str, Any] = {"hidden": hidden, "inter": inter, "experts": experts, "shared_inter": shared_inter}
        flags = {"bias": bias, "routing_bias": routing_bias}

        def check() -> str:
            return self._check(
                sizes, shared_experts, flags, torch.get_default_dtype() if dtype is None else dtype, device
            )

        if ep_mesh is None:
            check()
        else:
            _compare_layers(ep_mesh, experts, capacity, check)
        shared_inter = inter if shared_inter is None else shared_inter
        self.parallel = None if ep_mesh is None else _split_experts(ep_mesh, capacity)
        own = experts // (1 if self.parallel is None else self.parallel.ranks)

        def parameter(*shape: int, by_expert: bool = False) -> nn.Parameter:
            made = torch.empty(shape, device=device, dtype=dtype)
            return nn.Parameter(made) if ep_mesh is None else _distribute(made, ep_mesh, by_expert=by_expert)

        def of_experts(*shape: int) -> nn.Parameter:
            return parameter(own, *shape, by_expert=True)

        rows = columns_up(inter, activation)
        self.w_router = parameter(experts, hidden)
        self.w_gate_up, self.w_down = of_experts(rows, hidden), of_experts(hidden, inter)
        self.bias_gate_up = of_experts(rows) if bias else None
        self.bias_down = of_experts(hidden) if bias else None
        self.shared_gate_up = self.shared_down = None
        if shared_experts:
            self.shared_gate_up = parameter(shared_experts, columns_up(shared_inter, activation), hidden)
            self.shared_down = parameter(shared_experts, hidden, shared_inter)
        added = torch.zeros(experts, device=device, dtype=torch.float32) if routing_bias else None
        self.register_buffer("routing_bias", added)
        self.reset_parameters()

    def _check(
        self, sizes: dict[str, Any], shared_experts: object, flags: dict[str, Any], dtype: object, device: object
    ) -> str:
        """Raise what ``route`` and ``fused_moe`` would, before a parameter is made. Return the layer in words."""
        if type(shared_experts) is not int or not 0 <= shared_experts < _MOST:
            raise InputError(f"shared_experts must be an integer from 0 to 2**31 - 1, got {shown(shared_experts)}")
        if sizes["shared_inter"] is not None and shared_experts == 0:
            raise InputError(f"shared_inter must be None without shared experts, got {shown(sizes['shared_inter'])}")
        sizes = {**sizes, "shared_inter": sizes["inter"] if sizes["shared_inter"] is None else sizes["shared_inter"]}
        for name, size in sizes.items():
            if type(size) is not int or not 0 < size < _MOST:
                raise InputError(f"{name} must be an integer from 1 to 2**31 - 1, got {shown(size)}")
        options = self.options
        flags = {**flags, **{name: options[name] for name in ("interleaved", "batch_invariant")}}
        check_flags(options["activation"], flags, {name: options[name] for name in ("alpha", "limit")})
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
            raise InputError(f"dtype must be float16, bfloat16 or float32, got {shown(dtype)}")
        describe_routing(torch.empty(0, sizes["experts"], device="cpu"), self.top_k, **self.routing)
        check_kernel_name(self.options["kernel"])
        named: dict[str, Any] = {name: self.options[name] for name in ("activation", "interleaved", "batch_invariant")}
        named.update({name: float(self.options[name] or 0.0) for name in ("alpha", "limit")})
        shared_inter = sizes.pop("shared_inter") if shared_experts else 0
        sizes.pop("shared_inter", None)
        MoeProblem(
            tokens=0, top_k=self.top_k, dtype=DTYPE_NAMES[dtype], shared_experts=shared_experts,
            shared_inter=shared_inter, **sizes, **named,
        )  # fmt: skip
        kind = _check_device(device)
        said = {**sizes, "top_k": self.top_k, "shared_experts": shared_experts, "shared_inter": shared_inter}
        said |= {**flags, **options, **self.routing, "dtype": DTYPE_NAMES[dtype], "device": kind}
        return ", ".join(f"{name}={value}" for name, value in said.items())

    def reset_parameters(self) -> None:
        """Draw all matrices anew, and set biases to 0, that of the routing too."""
        if self.routing_bias is not None:
            self.routing_bias.zero_()
        for name, parameter in self.named_parameters():
            if name.startswith("bias_"):
                nn.init.zeros_(parameter)
                continue
            bound = 1 / math.sqrt(parameter.shape[-1])
            fill = functools.partial(nn.init.uniform_, a=-bound, b=bound)
            if self.parallel is None:
                fill(parameter)
            else:
                _draw(parameter, fill)

    def forward(self, x: Tensor, *, return_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Send every token through its experts.

        Args:
            x: ``[..., HID]`` in the dtype of the parameters; under autocast in fp32 or the region's.
            return_logits: return those of the router too, for losses that balance the load.

        Returns:
            ``[..., HID]``; with ``return_logits`` also ``[T, E]``, a row for each token of x in their order.

        Raises:
            InputError: x has tokens of another size, or another dtype or device than the parameters.
        """
        self._check_tokens(x)
        if not isinstance(return_logits, bool):
            raise InputError(f"return_logits must be True or False, got {shown(return_logits)}")
        tokens = x.reshape(-1, x.shape[-1])
        weight_of: dict[str, Any] = {name: getattr(self, name) for name in _WEIGHTS}  # parametrized ones too
        if self.parallel is not None:
            weight_of = {name: None if weight is None else _local_of(weight) for name, weight in weight_of.items()}
        logits = F.linear(tokens, weight_of.pop("w_router"))
        bias = None if self.routing_bias is None else self.routing_bias.float()
        weights, ids = route(logits, self.top_k, bias=bias, **self.routing)
        if not torch.compiler.is_compiling() and is_bare_subclass(type(ids)):  # they need not have the name that x has
            ids = ids.as_subclass(Tensor)
        if self.parallel is None:
            out = fused_moe(tokens, topk_weights=weights, topk_ids=ids, **weight_of, **self.options)
        else:
            shared = [weight_of.pop(name) for name in ("shared_gate_up", "shared_down")]
            given = {"topk_weights": weights, "topk_ids": ids, **weight_of, **self.options}
            out = _run_over_ranks(self.parallel, tokens, given)
            if shared[1] is not None:
                out = out + self._run_shared(tokens, *shared)
        out = out.view(x.shape)
        return (out, logits) if return_logits else out

    def _run_shared(self, tokens: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Run the tokens of this rank through the shared experts, which every rank has."""
        count = down.shape[0]
        ids = torch.arange(count, dtype=torch.int32, device=tokens.device).repeat(tokens.shape[0], 1)
        ones = torch.ones(ids.shape, dtype=torch.float32, device=tokens.device)
        return fused_moe(tokens, gate_up, down, ones, ids, **self.options)

    def _check_tokens(self, x: Tensor) -> None:
        check_tensor("x", x)
        check_dense("x", x)
        hidden, dtype, device = self.w_router.shape[1], self.w_router.dtype, self.w_router.device
        if is_untraced(x) and device.type not in ("cpu", "cuda"):
            raise InputError(f"parameters must be on a CUDA device or the CPU, got {device}")
        if x.dim() == 0 or x.shape[-1] != hidden:
            raise InputError(f"x must have shape [..., HID] = [..., {hidden}], got {list(x.shape)}")
        if x.device != device:
            raise InputError(f"x must be on the device of the parameters, {device}, got {x.device}")
        if x.dtype != dtype and torch.is_autocast_enabled(device.type):
            allowed = {dtype, torch.float32, torch.get_autocast_dtype(device.type)}
            if x.dtype not in allowed:
                names = " or ".join(sorted(map(str, allowed)))
                raise InputError(f"x must be {names} under autocast, got {x.dtype}")
        elif x.dtype != dtype:
            raise InputError(f"x must have the dtype of the parameters, {dtype}, got {x.dtype}")
        if dtype not in DTYPE_NAMES:
            raise InputError(f"parameters must be float16, bfloat16 or float32, got {dtype}")

    def extra_repr(self) -> str:
        """Return its sizes, for ``print``."""
        experts, hidden, inter = self.w_down.shape
        more = f", shared_experts={self.shared_down.shape[0]}" if self.shared_down is not None else ""
        activation = self.options["activation"]
        return f"hidden={hidden}, inter={inter}, experts={experts}, top_k={self.top_k}, activation={activation}{more}"

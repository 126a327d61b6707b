"""A layer whose experts are split over ranks, alone and sharded by FSDP2 over other ranks, beside one process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flashmoe_science import InputError, MoeLayer

WAYS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "gpt-oss": {"activation": "swiglu_clamped", "interleaved": True, "bias": True},
    "deepseek": {
        "score": "sigmoid", "groups": 4, "top_groups": 2, "routing_bias": True, "shared_experts": 2, "shared_inter": 12
    },
}  # fmt: skip
TOKENS = 6
UNLIKE: dict[str, dict[str, Any]] = {
    "hidden": {"hidden": 32}, "inter": {"inter": 0}, "shared_experts": {"shared_experts": 1}, "top_k": {"top_k": 2},
    "dtype": {"dtype": torch.bfloat16}, "device": {"device": "meta"}, "capacity": {"capacity": 2.0},
    "capacity of text": {"capacity": "1"}, "experts": {"experts": 16}, "activation": {"activation": "gelu"},
}  # fmt: skip


def make(way: str, **more: Any) -> MoeLayer:
    torch.manual_seed(0)
    return MoeLayer(16, 24, 8, 3, **{**WAYS[way], **more})


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def case(way: str, mesh: Any, *, fsdp: bool) -> dict[str, float]:
    """Return the largest errors of output, gradients, a step and the state dict, as shares of the largest number."""
    one, layer = make(way), make(way, ep_mesh=mesh["ep"])
    if fsdp:
        fully_shard(layer, mesh=mesh["dp"])
    errors: dict[str, float] = {}

    def compare(name: str, mine: Tensor, expected: Tensor) -> None:
        difference = (mine.double() - expected.double()).abs().max()
        errors[name] = float(difference / expected.double().abs().max().clamp(min=1e-6))

    state: dict[str, Any] = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
    for name, tensor in one.state_dict().items():
        if torch.distributed.get_rank() == 0:  # the others get none
            compare(f"state {name}", state[name], tensor)
    replicas = mesh["dp"].size()
    x = torch.randn(replicas * mesh["ep"].size() * TOKENS, 16, generator=torch.Generator().manual_seed(5))
    number = mesh["dp"].get_local_rank() * mesh["ep"].size() + mesh["ep"].get_local_rank()
    mine = x[number * TOKENS : (number + 1) * TOKENS].clone().requires_grad_()
    leaf = x.clone().requires_grad_()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, layer)]
    expected, out = one(leaf), layer(mine)
    expected.square().sum().backward()
    # FSDP2 averages over replicas.
    (out.square().sum() * (replicas if fsdp else 1)).backward()
    compare("out", out.detach(), expected[number * TOKENS : (number + 1) * TOKENS].detach())
    assert mine.grad is not None
    assert leaf.grad is not None
    scale = replicas if fsdp else 1
    compare("x", mine.grad / scale, leaf.grad[number * TOKENS : (number + 1) * TOKENS])
    found = dict(layer.named_parameters())
    for name, parameter in one.named_parameters():
        gradient = found[name].grad
        assert gradient is not None, name
        assert parameter.grad is not None
        compare(f"gradient {name}", whole(gradient), parameter.grad)
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in one.named_parameters():
        compare(f"stepped {name}", whole(found[name]).detach(), parameter.detach())
    # Weights of one process are loaded.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    torch.manual_seed(1)
    other = MoeLayer(16, 24, 8, 3, **WAYS[way])
    set_model_state_dict(layer, other.state_dict(), options=options)
    for name, parameter in other.named_parameters():
        compare(f"loaded {name}", whole(found[name]).detach(), parameter.detach())
    return errors


def compiled(mesh: Any) -> bool:
    """Whether a compiled layer gives the bits of an eager one, for as many tokens as no call had before, too."""
    layer = make("deepseek", ep_mesh=mesh)
    graph = torch.compile(layer, backend="aot_eager")
    same = []
    for tokens in (TOKENS, TOKENS + 1):
        found = []
        for call in (graph, layer):  # the compiled call is the first of its kind
            x = torch.ones(tokens, 16, requires_grad=True)
            out = call(x)
            gradients = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
            found.append([out.detach(), *map(whole, gradients)])
        same += [torch.equal(one, other) for one, other in zip(*found, strict=True)]
    return all(same)


def router_without_a_seed(mesh: Any) -> list[float]:
    """Return the router of a layer that ranks make with seeds of their own."""
    torch.manual_seed(torch.distributed.get_rank())
    router: Any = MoeLayer(16, 24, 8, 3, dtype=torch.bfloat16, ep_mesh=mesh["ep"]).w_router
    return [float(x) for x in router.to_local().flatten()]


def drawn_under_fsdp2(mesh: Any) -> dict[str, list[float]]:
    """Return the whole router, and the first number of each expert, of a layer that is drawn after FSDP2 sharded it."""
    torch.manual_seed(torch.distributed.get_rank() // 2)  # some ranks have one seed
    layer = MoeLayer(16, 24, 8, 3, ep_mesh=mesh["ep"], device="meta")
    fully_shard(layer, mesh=mesh["dp"])
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    router, experts = whole(layer.w_router.detach()), whole(layer.w_down.detach())
    return {
        "router": [float(x) for x in router.flatten()],
        "replica": [float(x) for x in layer.w_router.to_local().flatten()],  # type: ignore[attr-defined]
        "experts": [float(x) for x in experts[:, 0, 0]],
    }


def unlike_layers(mesh: Any) -> dict[str, str]:
    """Return what ranks are told whose layers differ in one thing each."""
    odd = torch.distributed.get_rank() == 1
    found = {}
    for name, change in UNLIKE.items():
        given: dict[str, Any] = {"hidden": 16, "inter": 24, "experts": 8, "top_k": 3, **(change if odd else {})}
        try:
            MoeLayer(**given, ep_mesh=mesh["ep"])
            found[name] = "no error"
        except InputError as error:
            found[name] = str(error)
    return found


def under_autocast_on_one_rank(mesh: Any) -> str:
    """Return what ranks are told of which one alone calls its layer under autocast."""
    layer = make("mixtral", ep_mesh=mesh["ep"])
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.distributed.get_rank() == 0):
        try:
            layer(torch.ones(TOKENS, 16))
        except InputError as error:
            return str(error)
    return "no error"


def shared(mesh: Any) -> dict[str, bool]:
    """Return whether layers share what sends their tokens, and whether it ends with them."""
    first, second = (make("mixtral", ep_mesh=mesh["ep"]) for _ in range(2))
    other = make("mixtral", ep_mesh=mesh["ep"], capacity=0.5)
    kept = weakref.ref(first.parallel)
    found = {"same": first.parallel is second.parallel, "other capacity": first.parallel is other.parallel}
    del first
    gc.collect()
    found["kept"] = kept() is not None
    if mesh["ep"].get_local_rank():  # the others have it still
        del second
    gc.collect()
    third = make("mixtral", ep_mesh=mesh["ep"])
    return found | {"kept by some ranks": third.parallel is kept()}


def all_cases(rank: int, ranks: int) -> dict[str, Any]:
    experts = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
    both = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "ep"))
    found: dict[str, Any] = {way: case(way, experts, fsdp=False) for way in WAYS}
    if ranks > 2:
        found |= {f"{way}, FSDP2": case(way, both, fsdp=True) for way in WAYS}
        found["drawn under FSDP2"] = drawn_under_fsdp2(both)
    found["shared"] = shared(experts)
    found["unlike"] = unlike_layers(experts)
    found["autocast"] = under_autocast_on_one_rank(experts)
    found["compiled"] = compiled(experts["ep"])
    found["router"] = router_without_a_seed(experts)
    try:
        MoeLayer(16, 24, 7, 3, ep_mesh=both["ep"])
    except InputError as error:
        found["message"] = str(error)
    return found

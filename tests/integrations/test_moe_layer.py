"""The layer: what it computes, what it learns, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from flashmoe_science import InputError, MoeLayer
from flashmoe_science.moe import reference

WAYS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "gpt-oss": {"activation": "swiglu_clamped", "interleaved": True, "bias": True, "alpha": 1.5, "limit": 0.5},
    "deepseek": {
        "score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "routing_bias": True, "shared_experts": 2,
        "shared_inter": 12,
    },
    "no gate": {"activation": "relu2", "renormalize": False, "shared_experts": 1},
}  # fmt: skip


def make(way: str, **more: Any) -> MoeLayer:
    torch.manual_seed(0)
    layer = MoeLayer(16, 24, 8, 3, **{**WAYS[way], **more})
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if "bias" in name:
                tensor.normal_()
    return layer


def by_reference(layer: MoeLayer, x: torch.Tensor) -> torch.Tensor:
    """Compute the same in fp64 by the functions that say what the words mean."""
    tokens = x.double().flatten(0, -2)
    logits = tokens @ layer.w_router.double().t()
    weights, ids = reference.route(logits, layer.top_k, bias=layer.routing_bias, **layer.routing, dtype=torch.float64)
    options = {
        name: getattr(layer, name) for name in ("bias_gate_up", "bias_down", "shared_gate_up", "shared_down")
    }  # fmt: skip
    options.update({name: layer.options[name] or 0.0 for name in ("alpha", "limit")})
    options.update({name: layer.options[name] for name in ("activation", "interleaved")})
    out = reference.fused_moe(tokens, layer.w_gate_up, layer.w_down, weights, ids, **options, dtype=torch.float64)
    return out.view(x.shape)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_routing_and_experts(way):
    layer, x = make(way), torch.randn(2, 5, 16)
    out, logits = layer(x, return_logits=True)
    assert out.shape == x.shape
    assert logits.shape == (10, 8)
    torch.testing.assert_close(out.double(), by_reference(layer, x), rtol=1e-5, atol=1e-5)
    assert torch.equal(layer(x), out)


def test_weights_are_attributes_parametrized_or_of_a_replica():
    layer, x = make("mixtral"), torch.randn(5, 16)
    expected = layer(x)
    replica = layer._replicate_for_data_parallel()
    for name, parameter in layer.named_parameters():
        setattr(replica, name, parameter * 1)  # as DataParallel does: no parameters
    assert torch.equal(replica(x), expected)
    weight_norm(layer, "w_down")
    layer.after = nn.Linear(16, 16)
    out = layer(x)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    learned = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert learned == {"w_router", "w_gate_up", *(f"parametrizations.w_down.original{number}" for number in range(2))}


@pytest.mark.parametrize("way", WAYS)
def test_every_parameter_learns(way):
    """Its gradients are those of the reference, the router's too."""
    layer, x = make(way), torch.randn(9, 16, requires_grad=True)
    leaves = {"x": x, **dict(layer.named_parameters())}
    found = torch.autograd.grad(layer(x).square().sum(), [*leaves.values()])
    exact = torch.autograd.grad(by_reference(layer, x).square().sum(), [*leaves.values()])
    for name, mine, theirs in zip(leaves, found, exact, strict=True):
        assert mine.abs().sum() > 0, name
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=f"{name} differs")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_routing_and_experts_on_a_gpu(way, tokens):
    """The kernels, its router's too, against fp64; in fp32, where rounding chooses no other experts."""
    layer = make(way).to("cuda")
    x = torch.randn(tokens, 16, device="cuda", requires_grad=True)
    leaves = {"x": x, **dict(layer.named_parameters())}
    torch.testing.assert_close(layer(x).double(), by_reference(layer, x), rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(layer(x).square().sum(), [*leaves.values()])
    exact = torch.autograd.grad(by_reference(layer, x).square().sum(), [*leaves.values()])
    for name, mine, theirs in zip(leaves, found, exact, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * max(scale, 1), msg=f"{name} differs")


def test_no_tokens_and_one():
    layer = make("deepseek")
    assert layer(torch.randn(3, 0, 16)).shape == (3, 0, 16)
    x = torch.randn(16)
    torch.testing.assert_close(layer(x).double(), by_reference(layer, x[None])[0], rtol=1e-5, atol=1e-5)


def test_it_compiles_and_trains_under_autocast():
    layer, x = make("gpt-oss"), torch.randn(4, 6, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for function in (layer, compiled):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = function(x)
        assert out.dtype == torch.bfloat16
        F.mse_loss(out.float(), x).backward()
        found.append({name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None})
    assert found[0].keys() == dict(layer.named_parameters()).keys()
    for name, gradient in found[0].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, found[1][name]), name


def test_the_routing_bias_chooses_and_is_saved():
    layer = make("deepseek", routing_bias=True)
    assert "routing_bias" in layer.state_dict()
    assert "routing_bias" not in dict(layer.named_parameters())
    layer.get_buffer("routing_bias").copy_(torch.tensor([9.0, 9, 9, 9, 0, 0, 0, 0]))
    layer(torch.randn(20, 16)).square().sum().backward()
    gradient = layer.w_down.grad
    assert gradient is not None
    used = gradient.flatten(1).abs().sum(-1) > 0
    assert used[:4].any()
    assert not used[4:].any()
    assert MoeLayer(16, 24, 8, 3).routing_bias is None


def test_it_is_made_on_any_device_in_any_dtype():
    layer = MoeLayer(16, 24, 8, 3, bias=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    assert str(MoeLayer(16, 24, 8, 3, shared_experts=2)) == (
        "MoeLayer(hidden=16, inter=24, experts=8, top_k=3, activation=swiglu, shared_experts=2)"
    )


def test_memory_without_values_is_filled():
    """What FSDP2 asks of a model that was made without memory."""
    layer = MoeLayer(16, 24, 8, 3, bias=True, shared_experts=1, routing_bias=True, device="meta")
    layer.to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.detach().fill_(torch.nan)
    layer.reset_parameters()
    assert not layer.get_buffer("routing_bias").any()
    assert torch.isfinite(layer(torch.randn(5, 16))).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, r"hidden must be an integer from 1 to 2\*\*31 - 1, got 0"),
        ({"inter": 2.5}, r"inter must be an integer from 1 to 2\*\*31 - 1, got 2.5"),
        ({"experts": True}, r"experts must be an integer from 1 to 2\*\*31 - 1, got True"),
        ({"shared_inter": 0, "shared_experts": 1}, r"shared_inter must be an integer from 1 to 2\*\*31 - 1, got 0"),
        ({"shared_experts": -1}, r"shared_experts must be an integer from 0 to 2\*\*31 - 1, got -1"),
        ({"top_k": 9}, "top_k must be at most the 8 experts, got 9"),
        ({"groups": 3}, "groups must divide the 8 experts, got 3"),
        ({"activation": "relu"}, "activation must be one of swiglu, .*, got 'relu'"),
        ({"activation": "relu2", "interleaved": True}, "interleaved must be False for relu2, which has no gate"),
        ({"alpha": 1.0}, "alpha must be None for swiglu, got 1.0"),
        ({"dtype": torch.float64}, "dtype must be float16, bfloat16 or float32, got torch.float64"),
        ({"bias": 1}, "bias must be True or False, got 1"),
        ({"kernel": "fast"}, "kernel must be auto or one of gemv_triton, .*, got 'fast'"),
        ({"shared_inter": 5}, "shared_inter must be None without shared experts, got 5"),
        ({"inter": 10**29}, r"inter must be an integer from 1 to 2\*\*31 - 1, got 1000"),
        ({"hidden": 10**5000}, r"hidden must be an integer from 1 to 2\*\*31 - 1, got int too long to be printed"),
        ({"routing_bias": "no"}, "routing_bias must be True or False, got 'no'"),
        ({"dtype": []}, r"dtype must be float16, bfloat16 or float32, got \[\]"),
        ({"device": "foo"}, "device must be one that torch has here, or None, got 'foo'"),
        ({"device": []}, r"device must be one that torch has here, or None, got \[\]"),
    ],
)
def test_what_it_cannot_be_is_refused_when_it_is_made(change, message):
    sizes = {"hidden": 16, "inter": 24, "experts": 8, "top_k": 3}
    with pytest.raises(InputError, match=message):
        MoeLayer(**{**sizes, **change})


def test_tokens_of_another_size_or_dtype_are_refused():
    layer = make("mixtral")
    with pytest.raises(InputError, match=r"x must have shape \[..., HID\] = \[..., 16\], got \[2, 3, 17\]"):
        layer(torch.randn(2, 3, 17))
    with pytest.raises(InputError, match=r"x must have the dtype of the parameters, torch.float32, got torch.float16"):
        layer(torch.randn(2, 16).half())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (3, "x must be a torch.Tensor, got int"),
        (torch.randn(2, 16).to_sparse(), "x must be dense, got torch.sparse_coo"),
        (torch.randn(2, 16).to("meta"), "x must be on the device of the parameters, cpu, got meta"),
    ],
)
def test_what_are_no_tokens_is_refused(x, message):
    with pytest.raises(InputError, match=message):
        make("mixtral")(x)


def test_what_else_a_layer_refuses_when_it_is_called():
    layer, x = make("mixtral"), torch.randn(2, 16)
    with pytest.raises(InputError, match="return_logits must be True or False, got 1"):
        layer(x, return_logits=1)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match=r"x must be .* under autocast, got"):
        layer(x.double())
    with pytest.raises(InputError, match="parameters must be on a CUDA device or the CPU, got meta"):
        layer.to("meta")(x)
    with pytest.raises(InputError, match=r"parameters must be float16, bfloat16 or float32, got torch\.float64"):
        make("mixtral").double()(x.double())


def test_one_parameter_that_stayed_on_meta_is_named():
    """The stand-ins of operators would serve such a call with memory that nobody wrote."""
    layer = make("mixtral")
    layer.w_down = torch.nn.Parameter(layer.w_down.detach().to("meta"))
    with pytest.raises(InputError, match="w_down must be on the device of x, cpu, got meta"):
        layer(torch.randn(2, 16))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_layer_is_exported_with_any_number_of_tokens(device, is_strict):
    """On meta too: a program can be made of a model before it has memory."""
    layer, x = make("mixtral").eval().to(device), torch.randn(5, 16).to(device)
    shapes = {"x": {0: torch.export.Dim("tokens", min=2, max=64)}}
    exported: Any = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=is_strict).module()
    more = torch.randn(7, 16).to(device)
    found = exported(more)
    assert found.shape == (7, 16)
    if device == "cpu":
        torch.testing.assert_close(found, layer(more))


def test_tokens_may_be_of_a_subclass():
    class Named(torch.Tensor):
        pass

    layer, x = make("mixtral"), torch.randn(2, 16)
    with torch.no_grad():
        assert torch.equal(layer(x.as_subclass(Named)).as_subclass(torch.Tensor), layer(x))
    assert torch.equal(layer(x.as_subclass(Named)).detach().as_subclass(torch.Tensor), layer(x).detach())

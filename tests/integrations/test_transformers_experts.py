"""Tiny random models of transformers: our experts against the eager ones, logits and gradients; and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, explain_moe, fused_moe, route

pytest.importorskip("transformers", minversion="5.0", reason="transformers is optional")

import transformers

from flashmoe_science.integrations import transformers_experts
from flashmoe_science.integrations.transformers_experts import register_experts, run_experts

from . import moe_models as models


@pytest.fixture(autouse=True)
def registered() -> None:
    assert register_experts() == "flashmoe_science"


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """Record the options of every call that models make of our experts."""
    found: list[dict[str, Any]] = []

    def record(*tensors, **options):
        found.append(options)
        return fused_moe(*tensors, **options)

    monkeypatch.setattr(transformers_experts, "fused_moe", record)
    return found


@pytest.mark.parametrize("name", models.CONFIGS)
def test_logits_and_gradients(name, calls):
    models.assert_alike(name, "flashmoe_science")
    assert len(calls) == (1 if name == "deepseek-v3" else 2), "one call a layer with experts"
    assert {call["activation"] for call in calls} == {"swiglu_clamped" if name == "gpt-oss" else "swiglu"}


@pytest.fixture
def plans(monkeypatch) -> list[str]:
    """Record which kernel serves the first product of every call that models make of our experts."""
    found: list[str] = []

    def record(*tensors, **options):
        found.append(explain_moe(*tensors, **options).kernel)
        return fused_moe(*tensors, **options)

    monkeypatch.setattr(transformers_experts, "fused_moe", record)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", models.CONFIGS)
def test_logits_and_gradients_on_a_gpu(name, plans):
    """In fp32, of few tokens and of many: the kernels in place of the reference that a CPU has."""
    for tokens in (9, 100):
        models.assert_alike(name, "flashmoe_science", tokens, device="cuda")
    assert plans
    assert "reference" not in plans


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="it needs Hopper"
)
@pytest.mark.parametrize("name", models.CONFIGS)
def test_logits_and_gradients_by_the_kernels_for_many_tokens(name, plans):
    """In bf16, with rows for whole tiles; of gpt-oss weights lie the other way round, which TMA does not read."""
    models.assert_alike(name, "flashmoe_science", 2000, device="cuda", dtype=torch.bfloat16, **models.LARGE)
    assert set(plans) == {"grouped_triton" if name == "gpt-oss" else "grouped_gluon_sm90"}


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_a_model_compiles_to_one_graph(name):
    model = models.make(name, "flashmoe_science")
    tokens = torch.randint(5, 60, (2, 9))
    compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_model_is_switched_while_it_lives(calls):
    model = models.make("mixtral", "eager")
    tokens = torch.randint(5, 60, (1, 7))
    with torch.no_grad():
        expected = model(tokens).logits
        assert not calls
        model.set_experts_implementation("flashmoe_science")
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert calls


def experts(config: str, kind: str, module: str, **changes: Any) -> Any:
    """Return random experts of a model by themselves, served by us."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "num_local_experts": 4,
        "n_routed_experts": 4, "num_experts": 4, "num_attention_heads": 4, "moe_hidden_size": 32,
    }  # fmt: skip
    made = getattr(transformers, config)(**{**sizes, **changes})
    made._experts_implementation = "flashmoe_science"
    layer = getattr(__import__(f"transformers.models.{module}", fromlist=[kind]), kind)(made)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.7)
    return layer


def draw(experts_: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, ids = torch.randn(9, 32), torch.rand(9, experts_).argsort(-1)[:, :2].contiguous()
    return x, ids, torch.rand(9, 2)


def eager(layer: Any, *tensors: torch.Tensor) -> torch.Tensor:
    layer.config._experts_implementation = "eager"
    out: torch.Tensor = layer(*tensors)
    layer.config._experts_implementation = "flashmoe_science"
    return out


@pytest.mark.parametrize(
    ("config", "kind", "module", "activation"),
    [
        ("NemotronHConfig", "NemotronHExperts", "nemotron_h.modeling_nemotron_h", "relu2"),
        ("Gemma4TextConfig", "Gemma4TextExperts", "gemma4.modeling_gemma4", "geglu_tanh"),
        ("MiniMaxM3VLTextConfig", "MiniMaxM3VLExperts", "minimax_m3_vl.modeling_minimax_m3_vl", "swiglu_clamped"),
        (
            "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterExperts",
            "openai_privacy_filter.modeling_openai_privacy_filter", "swiglu_clamped",
        ),
    ],
)  # fmt: skip
def test_other_gates(config, kind, module, activation, calls):
    """Without a gate, with GELU, and clamped halves in place of gpt-oss's rows that take turns."""
    layer, tensors = experts(config, kind, module), draw()
    torch.testing.assert_close(layer(*tensors), eager(layer, *tensors), rtol=1e-4, atol=1e-4)
    assert [call["activation"] for call in calls] == [activation]


def test_experts_of_other_gpus_contribute_nothing():
    """Transformers marks them by the number of experts that are here."""
    layer, (x, ids, weights) = experts("MixtralConfig", "MixtralExperts", "mixtral.modeling_mixtral"), draw()
    ids[::2, 0] = 4
    out = layer(x, ids, weights)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, eager(layer, x, ids, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "kind", "module", "message"),
    [
        (
            "MuseSparkTextConfig", "MuseSparkExperts", "muse_spark.modeling_muse_spark",
            "MuseSparkExperts norms what each expert makes, which is not served",
        ),
        (
            "HYV4Config", "HYV4Experts", "hy_v4.modeling_hy_v4",
            "the gate of HYV4Experts is not served",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_raises_by_name(config, kind, module, message):
    layer = experts(config, kind, module)
    with pytest.raises(UnsupportedError, match=message) as error:
        run_experts(layer, *draw())
    assert error.value.hint == f'experts_implementation="grouped_mm" serves {kind}'


def test_a_gate_that_is_inherited_may_be_another():
    layer = experts("GptOssConfig", "GptOssExperts", "gpt_oss.modeling_gpt_oss")
    layer.__class__ = type("OtherExperts", (type(layer),), {"_apply_gate": lambda self, gate_up: gate_up[..., ::2]})
    with pytest.raises(UnsupportedError, match="the gate of OtherExperts is not served"):
        layer(*draw())


def test_activations_without_a_kernel_are_refused():
    layer = experts("MixtralConfig", "MixtralExperts", "mixtral.modeling_mixtral", hidden_act="relu")
    message = r"ReLU is not served as the activation of experts with a gate \(MixtralExperts\)"
    with pytest.raises(UnsupportedError, match=message):
        layer(*draw())


def test_weights_of_another_dtype_are_refused():
    layer = experts("MixtralConfig", "MixtralExperts", "mixtral.modeling_mixtral").half()
    with pytest.raises(InputError, match=r"w_gate_up must have the dtype of x, torch.float32, got torch.float16"):
        layer(*draw())


@pytest.mark.parametrize("name", ["eager", "grouped_mm"])
def test_names_of_transformers_are_refused(name):
    with pytest.raises(InputError, match=f"name must not be one of transformers' own, .*, got '{name}'"):
        register_experts(name)


def test_a_gate_that_was_put_on_one_module_is_not_passed_over():
    layer = experts("MixtralConfig", "MixtralExperts", "mixtral.modeling_mixtral")
    layer._apply_gate = lambda gate_up: gate_up[..., ::2]
    with pytest.raises(UnsupportedError, match="the gate of MixtralExperts is not served"):
        layer(*draw())


def test_an_activation_that_only_has_the_name_is_not_taken_for_it():
    layer = experts("MixtralConfig", "MixtralExperts", "mixtral.modeling_mixtral")
    layer.act_fn = type("SiLU", (torch.nn.Module,), {"forward": lambda self, x: x})()
    with pytest.raises(UnsupportedError, match="SiLU is not served as the activation"):
        layer(*draw())


@pytest.mark.parametrize("name", ["alpha", "limit"])
def test_a_gate_without_its_numbers_gets_none_of_ours(name):
    layer = experts("GptOssConfig", "GptOssExperts", "gpt_oss.modeling_gpt_oss")
    setattr(layer, name, None)
    with pytest.raises(InputError, match=f"{name} of GptOssExperts must be a number, got None"):
        layer(*draw())


@pytest.mark.parametrize(
    ("place", "what", "message"),
    [
        (0, None, "hidden_states must be a torch.Tensor, got NoneType"),
        (1, [[0, 1]], "top_k_index must be a torch.Tensor, got list"),
        (2, torch.rand(9, 2).to_sparse(), "top_k_weights must be dense, got torch.sparse_coo"),
    ],
)
def test_what_experts_are_given_is_refused_by_the_names_that_they_have(place, what, message):
    layer = experts("MixtralConfig", "MixtralExperts", "mixtral.modeling_mixtral")
    given: list[Any] = list(draw())
    given[place] = what
    with pytest.raises(InputError, match=message):
        layer(*given)


def test_what_are_no_experts_is_refused():
    with pytest.raises(
        InputError, match=r"module must be experts of transformers 5 with has_gate, .*, got Linear without"
    ):
        run_experts(torch.nn.Linear(2, 2), *draw())
    layer = experts("MixtralConfig", "MixtralExperts", "mixtral.modeling_mixtral")
    layer.is_transposed, layer.down_proj = True, torch.nn.Parameter(layer.down_proj.detach()[0])
    with pytest.raises(InputError, match="down_proj of MixtralExperts must have 3 dimensions, got"):
        run_experts(layer, *draw())


@pytest.mark.parametrize("name", [None, "", 3, []])
def test_what_is_no_name_is_not_registered(name):
    with pytest.raises(InputError, match="name must be a text, got"):
        register_experts(name)


def test_flags_are_checked_when_they_are_registered():
    with pytest.raises(InputError, match="batch_invariant must be True or False, got 'x'"):
        register_experts(batch_invariant="x")  # type: ignore[arg-type]


def test_kernels_that_do_not_exist_are_refused_at_once():
    with pytest.raises(InputError, match=r"kernel must be auto or one of .*, got 'grouped'"):
        register_experts(kernel="grouped")


ROUTERS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "mixtral": (models.CONFIGS["mixtral"], "MixtralTopKRouter", {}),
    "qwen3_moe": (models.CONFIGS["qwen3-moe"], "Qwen3MoeTopKRouter", {}),
    "olmoe": (models.CONFIGS["olmoe"], "OlmoeTopKRouter", {"renormalize": False}),
    "gpt_oss": (models.CONFIGS["gpt-oss"], "GptOssTopKRouter", {}),
    "deepseek_v2": (
        lambda: transformers.DeepseekV2Config(
            hidden_size=32, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
            topk_method="group_limited_greedy", routed_scaling_factor=16.0,
        ),
        "DeepseekV2TopkRouter",
        {"renormalize": False, "groups": 4, "top_groups": 2, "scale": 16.0},
    ),
    "deepseek_v3": (
        models.CONFIGS["deepseek-v3"],
        "DeepseekV3TopkRouter",
        {"score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", ROUTERS)
def test_route_is_the_router_of_the_model(model):
    """As docs/how-to/moe-layer.md has it: the same experts and weights, and the same gradient of the logits."""
    make, kind, options = ROUTERS[model]
    config = make()
    router = getattr(__import__(f"transformers.models.{model}.modeling_{model}", fromlist=[kind]), kind)(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.copy_(torch.randn(bias.shape, generator=generator) * 0.1)
    logits, expected, chosen = router(torch.randn(50, 32, generator=generator))
    logits = logits.detach().requires_grad_()
    weights, ids = route(logits, config.num_experts_per_tok, bias=bias, **options)
    order, theirs = ids.long().argsort(-1), chosen.argsort(-1)  # some routers leave the order open
    assert torch.equal(ids.gather(-1, order).long(), chosen.gather(-1, theirs))
    torch.testing.assert_close(weights.gather(-1, order), expected.gather(-1, theirs))
    assert weights.sum() > 0


@pytest.mark.triton
def test_the_kernels_themselves_serve_models():
    """In Triton's interpreter, which needs a process of its own."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integrations.moe_models"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(models.INTERPRETED)

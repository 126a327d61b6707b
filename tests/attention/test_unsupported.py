"""What other ways than the plain call refuse: recorded and compiled calls, transforms, and the operators alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmoe_science import (
    InputError,
    UnsupportedError,
    explain_varlen,
    explain_varlen_gradients,
    explain_with_kv_cache,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
)
from flashmoe_science.attention.backward.api import explain_gradients, flash_attention_backward
from flashmoe_science.gpu.memory_overlap import has_internal_overlap, meet

OPS = torch.ops.flashmoe_science


class Named(torch.Tensor):
    """A tensor that has a name of its own and nothing else."""


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch(**changes: Any) -> dict[str, Any]:
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 8)}
    return {**{name: torch.randn(shape) for name, shape in shapes.items()}, **changes}


def packed(**changes: Any) -> dict[str, Any]:
    lengths = {"cu_seqlens_q": ints(0, 5, 9), "cu_seqlens_k": ints(0, 7, 12), "max_seqlen_q": 5, "max_seqlen_k": 7}
    q, k, v = torch.randn(9, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    return {"q": q, "k": k, "v": v, **lengths, **changes}


def cached(**changes: Any) -> dict[str, Any]:
    caches = {"k_cache": torch.randn(2, 9, 2, 8), "v_cache": torch.randn(2, 9, 2, 8), "cache_seqlens": ints(3, 5)}
    return {"q": torch.randn(2, 4, 1, 8), **caches, **changes}


FUNCTIONS: tuple[tuple[Any, Any, tuple[str, ...]], ...] = (
    (flash_attention, batch, ("k", "v")),
    (flash_attention_varlen, packed, ("k", "v", "cu_seqlens_q", "cu_seqlens_k")),
    (flash_attention_with_kv_cache, cached, ("k_cache", "v_cache", "cache_seqlens")),
)
ARGUMENTS = [(function, make, name) for function, make, names in FUNCTIONS for name in names]


@pytest.mark.parametrize(("function", "make", "name"), ARGUMENTS)
@pytest.mark.parametrize("how", ["subclass", "compiled"])
def test_one_tensor_on_meta_does_not_let_stand_ins_answer(function, make, name, how):
    """Torch takes the operator's stand-in then, and what it returns is memory that nobody wrote."""
    given = make()
    given[name] = given[name].to("meta")
    call = function
    if how == "subclass":
        given["q"] = given["q"].as_subclass(Named)
    else:
        call = torch.compile(function, backend="eager")
    with pytest.raises(InputError, match=f"{name} must be on the device of q, cpu, got meta"):
        call(**given)


def test_features_on_meta_are_found_too():
    q = torch.randn(2, 4, 5, 8).as_subclass(Named)
    for name, tensor in (("sinks", torch.zeros(4)), ("bias", torch.zeros(1, 1, 5, 7)), ("alibi", torch.zeros(4))):
        with pytest.raises(InputError, match=f"{name} must be on the device of q, cpu, got meta"):
            flash_attention(**batch(q=q, **{name: tensor.to("meta")}))
    for function, make, name in ((flash_attention, batch, "q"), (flash_attention_varlen, packed, "q")):
        with pytest.raises(InputError, match="q must be on a CUDA device or the CPU, got meta"):
            function(**make(**{name: make()[name].to("meta").as_subclass(Named)}))


class Attention(torch.nn.Module):
    """Attention, as a model has it."""

    def forward(self, q, k, v):
        return flash_attention(q, k, v, causal=True)


def test_a_model_without_memory_can_be_traced():
    """All on meta: there is nothing to answer wrongly."""
    tensors = tuple(tensor.to("meta") for tensor in batch().values())
    exported: Any = torch.export.export(Attention(), tensors).module()
    assert exported(*tensors).device.type == "meta"
    assert torch.compile(flash_attention, backend="eager")(*tensors).device.type == "meta"


def test_operators_alone_do_not_answer_by_their_stand_ins():
    q, k, v = batch().values()
    other = "all tensors must be on the device of q, cpu, got one on meta"
    for arguments in ((q, k.to("meta"), v), (q, k, v.to("meta"))):
        with pytest.raises(InputError, match=other):
            OPS.attention_forward(*arguments, False, None, "auto")
        with pytest.raises(InputError, match=other):
            OPS.attention_forward_lse(*arguments, False, None, "auto")
    with pytest.raises(InputError, match=r"k must have 4 dimensions, got shape \[9, 9\]"):
        OPS.attention_forward(q, torch.zeros(9, 9, device="meta"), v, False, None, "auto")
    p = packed()
    masks = 5, 7, False, None, -1, -1, 0.0, *[None] * 6, 0.0, True, "auto"
    with pytest.raises(InputError, match=other):
        OPS.attention_varlen(p["q"], p["k"], p["v"], p["cu_seqlens_q"].to("meta"), p["cu_seqlens_k"], *masks)
    o, lse = flash_attention(q, k, v, return_lse=True)
    with pytest.raises(InputError, match=other):
        OPS.attention_backward(*backward_arguments(o=o.to("meta"), lse=lse))


@pytest.mark.parametrize(("function", "make"), [(function, make) for function, make, _ in FUNCTIONS])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": []}, r"kernel must be .*, got \[\]|options must be values that have a hash, got \[\]"),
        ({"kernel": 3}, "kernel must be .*, got 3"),
        ({"return_lse": "x"}, "return_lse must be True or False, got 'x'"),
        ({"return_lse": [1]}, r"return_lse must be True or False, got \[1\]|options must be .* hash, got \[1\]"),
        ({"causal": 10**5000}, "causal must be True or False, got int too long to be printed"),
        ({"softmax_scale": 10**400}, "softmax_scale must be .*, got a"),
        ({"softcap": 10**400}, "softcap must be .*, got a"),
        ({"softcap": "x"}, "softcap must be a number.*, got"),
        ({"window": (3, 2**63)}, r"window must be two integers .*, got \(3, |left and right.* got"),
    ],
)
def test_options_of_other_kinds_are_refused_however_it_is_called(function, make, options, message):
    function(**make())  # what is prepared must not serve what only looks like it
    torch.compiler.reset()  # after 8 graphs of a function torch runs it eagerly
    calls = [function]
    if not any(isinstance(value, int) and value > 10**300 for value in options.values()):  # Dynamo ends at such ones
        calls.append(torch.compile(function, backend="eager"))
    if "window" in options and function is flash_attention_with_kv_cache:  # windows may be as large, but not in a graph
        calls, message = calls[1:], r"window must be less than 2\*\*63"
    for call in calls:
        with pytest.raises(InputError, match=message):
            call(**make(), **options)


@pytest.mark.parametrize("options", [{"causal": ([1], 2)}, {"window": ([1], [2])}, {"num_splits": ([1],)}])
def test_tuples_without_a_hash_are_refused(options):
    with pytest.raises(InputError, match="must be"):
        flash_attention_with_kv_cache(**cached(), **options)


@pytest.mark.parametrize("length", ["x", None, 1.5, [1], True])
def test_longest_lengths_of_other_kinds_are_refused_when_compiled_too(length):
    for call in (flash_attention_varlen, torch.compile(flash_attention_varlen, backend="eager")):
        with pytest.raises(InputError, match="max_seqlen_q must be an integer from 0 to 2"):
            call(**packed(max_seqlen_q=length))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["nested", "mkldnn", "sparse"])
def test_tensors_whose_elements_do_not_lie_one_by_one(kind):
    def other(tensor):
        if kind == "nested":
            return torch.nested.nested_tensor([tensor])
        return tensor.to_mkldnn() if kind == "mkldnn" else tensor.to_sparse()

    got = "must be dense, got (a nested tensor|torch.)"
    for name, tensor in (("sinks", torch.zeros(4)), ("bias", torch.zeros(1, 1, 5, 7))):
        with pytest.raises(InputError, match=f"{name} {got}"):
            flash_attention(**batch(**{name: other(tensor)}))
    for name in ("q", "k_cache", "v_cache"):
        with pytest.raises(InputError, match=f"{name} {got}"):
            flash_attention_with_kv_cache(**cached(**{name: other(cached()[name])}))
    with pytest.raises(InputError, match=got):
        flash_attention_varlen(**packed(k=other(packed()["k"])))


@pytest.mark.parametrize("name", ["cache_seqlens", "sinks", "bias"])
def test_a_subclass_that_operators_would_give_back_is_refused(name):
    tensors = {"cache_seqlens": ints(3, 5), "sinks": torch.zeros(4), "bias": torch.zeros(1, 1, 1, 9)}
    with pytest.raises(InputError, match=rf"{name} must be a torch\.Tensor and of no subclass, got Named"):
        flash_attention_with_kv_cache(**cached(**{name: tensors[name].as_subclass(Named)}))
    q = cached()["q"]
    expected = flash_attention_with_kv_cache(
        **cached(q=q, k_cache=torch.ones(2, 9, 2, 8), v_cache=torch.ones(2, 9, 2, 8))
    )
    found = flash_attention_with_kv_cache(
        **cached(q=q.as_subclass(Named), k_cache=torch.ones(2, 9, 2, 8), v_cache=torch.ones(2, 9, 2, 8))
    )
    assert torch.equal(found.as_subclass(torch.Tensor), expected)


def test_pages_of_a_subclass_are_served():
    """As what they are: the operator takes their name off."""
    table = ints(0, 1, 2, 3).view(2, 2)
    given = packed(k=torch.randn(4, 4, 2, 8), v=torch.randn(4, 4, 2, 8), page_table=table)
    found = flash_attention_varlen(**{**given, "page_table": table.as_subclass(Named)})
    assert torch.equal(found, flash_attention_varlen(**given))


def test_lengths_that_are_negative_views_are_refused():
    """The host would read what they stand for, and kernels what lies in memory."""
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        given = packed(seqused_k=ints(7, 5))
        with pytest.raises(InputError, match=f"{name} must not be a negative view"):
            flash_attention_varlen(**{**given, name: torch._neg_view(-given[name])})


def test_transforms_and_gradients_that_are_batched():
    q, k, v = batch().values()
    many = torch.stack([q, q])
    with pytest.raises(UnsupportedError, match=r"torch\.vmap and other transforms of torch\.func"):
        torch.vmap(lambda q: flash_attention(q, k, v, softcap=2.0))(many)
    leaf = q.clone().requires_grad_()
    o = flash_attention(leaf, k, v)
    with pytest.raises(UnsupportedError, match="gradients of attention are made one at a time, and not batched"):
        torch.autograd.grad(o, leaf, torch.ones(2, *o.shape), is_grads_batched=True)


def test_tangents_are_not_lost():
    q, k, v = batch().values()
    o, lse = flash_attention(q, k, v, return_lse=True)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(UnsupportedError, match="forward-mode tangent"):
            flash_attention_backward(dual, k, v, o, lse, o)
        given = cached()
        one = torch.autograd.forward_ad.make_dual(given["q"], given["q"])
        with pytest.raises(UnsupportedError, match="forward-mode tangent"):
            flash_attention_with_kv_cache(**{**given, "q": one, "k_cache": given["k_cache"].as_subclass(Named)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lse": "neg"}, "lse must not be a negative view"),
        ({"o": "neg"}, "o must not be a negative view"),
        ({"kernel": []}, r"kernel must be auto or one of .*, got \[\]"),
        ({"do": torch.zeros(2, 4, 4, 8)}, r"do must have shape \[B, H, Sq, DV\] = \[2, 4, 5, 8\], got \[2, 4, 4, 8\]"),
        ({"lse": torch.zeros(2, 4, 1)}, r"lse must have shape \[B, H, Sq\] = \[2, 4, 5\], got \[2, 4, 1\]"),
        ({"q": torch.zeros(4, 5, 8)}, r"q must have 4 dimensions \[B, H, S, D\], got shape \[4, 5, 8\]"),
        ({"accumulate_into": (torch.zeros(2, 2, 7, 8),) * 2}, "dk and dv must not share memory"),
        (
            {"accumulate_into": (torch.zeros(999).as_strided((2, 2, 7, 8), (224, 56, 4, 1)), torch.zeros(2, 2, 7, 8))},
            "accumulate_into's dk must not overlap itself",
        ),
        ({"wanted": "qkv"}, "wanted must be names among q, k, v, sinks, bias, got 'qkv'"),
        ({"wanted": ()}, r"wanted must be names among q, k, v, sinks, bias, got \(\)"),
        ({"wanted": ("q", "q")}, r"wanted must have each name once, got \('q', 'q'\)"),
        ({"wanted": ("q", "sinks")}, "sinks must be given where its gradient is wanted, got None"),
        (
            {"wanted": ("q",), "accumulate_into": (torch.zeros(2, 2, 7, 8),) * 2},
            "accumulate_into needs k and v in wanted",
        ),
        ({"dropout_p": torch.zeros(2)}, "dropout_p must be a number, 0 for no dropout, got Tensor"),
        ({"dropout_p": 0.5}, "dropout_seed must be what the forward was given where dropout_p is 0.5, got None"),
        ({"out": {"sinks": torch.zeros(4)}}, "out must be tensors by names among q, k, v, got"),
        ({"out": torch.zeros(4)}, "out must be tensors by names among q, k, v, got"),
        (
            {
                "out": {"k": torch.zeros(2, 2, 7, 8)},
                "accumulate_into": (torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 8)),
            },
            "out must be tensors by names among q, got",
        ),
        ({"out": {"q": torch.zeros(2, 4, 5, 8).half()}}, "out's q must be float32, got torch.float16"),
        ({"out": {"q": torch.zeros(2, 4, 5, 9)}}, r"out's q must have shape \[that of q\] = \[2, 4, 5, 8\], got"),
        ({"out": {"q": "o"}}, "out's q must not share memory with o: it is written in place"),
        ({"out": dict.fromkeys("kv", torch.zeros(2, 2, 7, 8))}, "out's v must not share memory with out's k"),
        ({"out": "sums"}, "out's q must not share memory with accumulate_into's dk"),
        ({"wanted": [["q"]]}, r"wanted must be names among q, k, v, sinks, bias, got \[\['q'\]\]"),
        ({"accumulate_into": torch.zeros(2)}, r"accumulate_into must be two tensors \(dk, dv\) or None, got"),
        ({"accumulate_into": (torch.zeros(2, 2, 7, 8), None)}, "accumulate_into's dv must be a torch.Tensor"),
        (
            {"accumulate_into": (torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 9))},
            r"accumulate_into's dv must have shape \[that of v\] = \[2, 2, 7, 8\], got \[2, 2, 7, 9\]",
        ),
        (
            {"accumulate_into": (torch.zeros(2, 2, 7, 8).half(), torch.zeros(2, 2, 7, 8))},
            "accumulate_into's dk must be float32, got torch.float16",
        ),
        (
            {"accumulate_into": (torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 8, 7).mT)},
            "accumulate_into's dv must have contiguous rows",
        ),
        (
            {"accumulate_into": (torch.zeros(2, 2, 7, 8), torch.zeros(2, 1, 7, 8).expand(2, 2, 7, 8))},
            "accumulate_into's dv must have contiguous rows and no expanded axis",
        ),
        (
            {"accumulate_into": (torch.zeros(2, 2, 7, 8, requires_grad=True), torch.zeros(2, 2, 7, 8))},
            "accumulate_into's dk must not require grad",
        ),
    ],
)
def test_a_backward_call_is_refused(change, message):
    q, k, v = batch().values()
    o, lse = flash_attention(q, k, v, return_lse=True)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": o.clone()}
    change = {name: torch._neg_view(given[name]) if what == "neg" else what for name, what in change.items()}
    if change.get("out") == {"q": "o"}:
        change["out"] = {"q": o}
    if change.get("out") == "sums":  # of as many heads as q
        given["k"] = given["v"] = q.clone()
        shared = torch.zeros_like(q)
        change = {"out": {"q": shared}, "accumulate_into": (shared, torch.zeros_like(q))}
    with pytest.raises(InputError, match=message):
        flash_attention_backward(**{**given, **change})


def test_the_environment_s_kernel_is_named_where_it_is_none(monkeypatch):
    monkeypatch.setenv("FLASHMOE_BACKWARD_KERNEL", "fastest")
    with pytest.raises(InputError, match=r"FLASHMOE_BACKWARD_KERNEL must be auto or one of .*, got 'fastest'"):
        explain_gradients(*batch().values())


def backward_arguments(
    *, wanted: Any = (0, 1, 2), dropout_p: float = 0.0, longest: Any = (0, 0), **changes: Any
) -> Any:
    q, k, v = batch().values()
    o, lse = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5)
    optional = dict.fromkeys(
        ("sinks", "alibi", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "dropout_seed")
    )
    given = {"q": q, "k": k, "v": v, **optional, "o": o, "lse": lse, "do": o, "dlse": None, **changes}
    return *given.values(), *longest, False, None, -1, -1, 0.0, dropout_p, list(wanted), "auto"


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "short o": ({"o": torch.zeros(2, 4, 4, 8)}, r"o must have shape \[B, H, Sq, DV\] = \[2, 4, 5, 8\], got"),
    "no elements": ({"lse": torch.zeros(0)}, r"lse must have shape \[B, H, Sq\] = \[2, 4, 5\], got \[0\]"),
    "half do": ({"do": torch.zeros(2, 4, 5, 8).half()}, "do must be torch.float32 on cpu, got torch.float16 on cpu"),
    "long dlse": ({"dlse": torch.zeros(2, 4, 6)}, r"dlse must have shape \[B, H, Sq\] = \[2, 4, 5\], got"),
    "wanted -1": ({"wanted": [-1]}, r"wanted must have numbers of \[0, 1, 2\], each once, got \[-1\]"),
    "wanted twice": ({"wanted": [0, 0]}, r"wanted must have numbers of \[0, 1, 2\], each once, got \[0, 0\]"),
    "wanted sinks": ({"wanted": [3]}, r"wanted must have numbers of \[0, 1, 2\], each once, got \[3\]"),
    "no gradient": ({"do": None}, "do or dlse must be given, got None for both"),
    "lengths of keys alone": ({"cu_seqlens_k": ints(0, 7)}, "cu_seqlens_k must be None without cu_seqlens_q, got one"),
    "no seed": ({"dropout_p": 0.5}, "dropout_seed must be given where dropout_p is 0.5, got None"),
    "tokens": ({"q": torch.zeros(4, 5, 8)}, r"q must have 4 dimensions, got shape \[4, 5, 8\]"),
}


@pytest.mark.parametrize("why", BROKEN)
def test_the_operator_of_gradients_refuses_by_itself(why):
    """Autograd and exported graphs call it, and kernels would read past the end of what is too short."""
    changes, message = BROKEN[why]
    OPS.attention_backward(*backward_arguments())
    with pytest.raises(InputError, match=message):
        OPS.attention_backward(*backward_arguments(**changes))


PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "decreasing": ({"cu_seqlens_k": ints(0, 8, 3)}, "cu_seqlens_k must not decrease, got 8 and then 3"),
    "behind the end": (
        {"cu_seqlens_q": ints(0, 5, 60)},
        "cu_seqlens_q must be from 0 to 9, the tokens of q, got 0 to 60",
    ),
    "before the start": ({"cu_seqlens_k": ints(-7, 3, 7)}, "cu_seqlens_k must be from 0 to 12, .*, got -7 to 7"),
    "no longest": ({"longest": (1, 7)}, "max_seqlen_q must be at least 5, the length of sequence 0, got 1"),
    "fewer values": ({"v": torch.zeros(11, 2, 8)}, "v must have as many tokens as k, 12, got 11"),
    "one side": ({"cu_seqlens_k": None}, "cu_seqlens_k must be given with cu_seqlens_q, got None"),
    "lse of tokens first": ({"lse": torch.zeros(9, 4)}, r"lse must have shape \[H, T\] = \[4, 9\], got \[9, 4\]"),
    "no rows": ({"do": torch.zeros(0, 4, 8)}, r"do must have shape \[T, H, DV\] = \[9, 4, 8\], got \[0, 4, 8\]"),
}


@pytest.mark.parametrize("why", PACKED)
def test_the_operator_of_gradients_of_packed_sequences_refuses_by_itself(why):
    changes, message = PACKED[why]
    p = packed()
    o, lse = flash_attention_varlen(**p, return_lse=True)
    lengths = {name: p[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")}
    given = {**lengths, "o": o, "lse": lse, "do": o, "longest": (5, 7)}
    OPS.attention_backward(*backward_arguments(**given))
    with pytest.raises(InputError, match=message):
        OPS.attention_backward(*backward_arguments(**{**given, **changes}))


def test_what_explains_refuses_by_the_same_names():
    with pytest.raises(InputError, match=r"arguments must be options of flash_attention_with_kv_cache, .*, got foo"):
        explain_with_kv_cache(**cached(), foo=1)
    with pytest.raises(InputError, match="arguments must be k once, got k twice"):
        explain_with_kv_cache(*list(cached().values())[:3], torch.zeros(2, 2, 1, 8), k=torch.zeros(2, 2, 1, 8))
    with pytest.raises(InputError, match="may be given without a name, got 6 arguments"):
        explain_with_kv_cache(*list(cached().values())[:3], *[torch.zeros(2, 2, 1, 8)] * 3)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        with pytest.raises(InputError, match=rf"{name} must be a torch\.Tensor, got NoneType"):
            explain_varlen(**packed(**{name: None}))
        with pytest.raises(InputError, match=rf"{name} must be a torch\.Tensor, got NoneType"):
            explain_varlen_gradients(**packed(**{name: None}))


BIG = torch.zeros(2, 9, 2, 12)


@pytest.mark.parametrize(
    ("k_cache", "v_cache", "message"),
    [
        (BIG[..., :8], BIG[..., 4:], "v_cache must have memory of its own, .*, got some of k_cache"),
        (BIG[..., :8], BIG, "v_cache must have memory of its own, .*, got some of k_cache"),
        (
            torch.zeros(999).as_strided((2, 9, 2, 8), (200, 16, 4, 1)), torch.zeros(2, 9, 2, 8),
            r"k_cache must not overlap itself, .*, got strides \[200, 16, 4, 1\]",
        ),
        (
            torch.zeros(2, 9, 2, 8), torch.zeros(2, 1, 2, 8).expand(-1, 9, -1, -1),
            r"v_cache must not be expanded, as k and v are written to it, got strides \[16, 0, 8, 1\]",
        ),
    ],
)  # fmt: skip
def test_caches_that_share_memory_are_not_written_to(k_cache, v_cache, message):
    new = torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, v_cache.shape[-1])
    before = k_cache.clone()
    with pytest.raises(InputError, match=message):
        flash_attention_with_kv_cache(
            torch.zeros(2, 4, 1, 8), k_cache, v_cache, *new, cache_seqlens=ints(3, 5), softmax_scale=1.0
        )
    assert torch.equal(k_cache, before)


def test_caches_are_looked_at_in_each_call():
    """A prepared call of the same layout must not serve caches of which one lies in the other."""
    whole, new = torch.zeros(4096), torch.ones(2, 2, 1, 8)

    def call(begin):
        k_cache, v_cache = (whole[at:].as_strided((2, 9, 2, 8), (512, 16, 8, 1)) for at in (0, begin))
        flash_attention_with_kv_cache(torch.zeros(2, 4, 1, 8), k_cache, v_cache, new, new, cache_seqlens=ints(3, 5))

    call(2048)
    call(256)  # rows that take turns
    with pytest.raises(InputError, match=r"v_cache must have memory of its own, .*, got some of k_cache"):
        call(16)


def cut(whole, *places):
    """Return views of one tensor: of each (begin, shape, strides)."""
    return [whole[begin:].as_strided(shape, strides) for begin, shape, strides in places]


@pytest.mark.parametrize(
    "places",
    [
        ((0, (3, 4, 2, 8), (128, 16, 8, 1)), (64, (3, 4, 2, 4), (128, 8, 4, 1))),  # a block of each in a page
        ((0, (3, 4, 2, 8), (96, 24, 8, 1)), (16, (3, 4, 2, 4), (96, 24, 4, 1))),  # heads of both in a token
        ((0, (3, 4, 2, 8), (128, 8, 32, 1)), (64, (3, 4, 2, 8), (128, 16, 8, 1))),  # heads first, and tokens first
        ((0, (3, 4, 2, 8), (64, 16, 8, 1)), (192, (3, 4, 2, 8), (64, 16, 8, 1))),  # one behind the other
    ],
)
def test_caches_that_lie_otherwise_in_one_buffer_are_served(places):
    k_cache, v_cache = cut(torch.arange(1000.0), *places)
    assert not set(k_cache.flatten().tolist()) & set(v_cache.flatten().tolist())
    assert not meet(k_cache, v_cache)
    assert not has_internal_overlap(k_cache)
    new = torch.ones(3, 2, 1, 8), torch.ones(3, 2, 1, v_cache.shape[3])
    o = flash_attention_with_kv_cache(torch.zeros(3, 2, 1, 8), k_cache, v_cache, *new, cache_seqlens=ints(0, 0, 0))
    assert torch.equal(o, torch.ones_like(o))


def test_meeting_is_what_a_set_of_elements_says():
    """Of layouts at random: with equal strides exactly, with others never where there is nothing shared."""
    generator = torch.Generator().manual_seed(7)

    def draw(high, count):
        return tuple(torch.randint(1, high, (count,), generator=generator).tolist())

    def elements(tensor):
        return set(tensor.flatten().tolist())

    found = 0
    for _ in range(400):
        strides, begin = draw(20, 3), draw(30, 1)[0]
        one, other = cut(torch.arange(400), (0, draw(5, 3), strides), (begin, draw(5, 3), strides))
        (third,) = cut(torch.arange(400), (begin, draw(5, 3), draw(20, 3)))
        shared = bool(elements(one) & elements(other))
        moving = all(size > 1 for size in (*one.shape, *other.shape))  # axes of one place have a stride of no meaning
        assert meet(one, other) == shared if moving else not meet(one, other) or shared
        assert has_internal_overlap(one) == (one.numel() > len(elements(one)))
        assert not meet(one, third) or elements(one) & elements(third)
        found += shared
    assert 50 < found < 350


def test_caches_that_take_turns_in_one_tensor_do_not_share_it():
    """As pages [pages, 2, ...], heads and columns of one tensor; beside them two that do, found by their elements."""
    whole = torch.arange(3 * 2 * 4 * 2 * 16).view(3, 2, 4, 2, 16)
    apart = (
        (whole[:, 0], whole[:, 1]), (whole[..., :8], whole[..., 8:]), (whole[:, :, :, 0], whole[:, :, :, 1]),
        (whole[:1], whole[2:]), (whole[:, 0, :, :, 1::2], whole[:, 0, :, :, ::2]),
    )  # fmt: skip
    shifted = [(whole[..., a : a + 5], whole[..., b : b + 7]) for a in range(8) for b in range(8)]
    for one, other in (*apart, *shifted, (whole[:2], whole[1:]), (whole, whole)):
        shared = bool(set(one.flatten().tolist()) & set(other.flatten().tolist()))
        assert meet(one, other) == meet(other, one) == shared
        assert not has_internal_overlap(one)
    assert has_internal_overlap(torch.zeros(99).as_strided((5, 8), (4, 1)))
    assert not meet(whole[:0], whole)

"""What every forward kernel is held to."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from flashmoe_science import flash_attention, flash_attention_varlen
from flashmoe_science.attention import reference
from flashmoe_science.attention.backward.autograd import attention_gradients
from flashmoe_science.attention.inputs import Options
from flashmoe_science.attention.packed import planned_lengths
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.operators.attention import OPERATOR

from .cases import Case, FeatureCase, VarlenCase

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Gradients of o that set the budget of the sinks' gradients. These are one number a head, and of so few the error of
# one eager run is small by luck: of one or two heads in fp16, twice it was less than what rounding P and o costs in 569
# of 6,000 draws. Twice the largest error of 8 runs was less in 2, of 16 in none: there it cost 0.66 of it at
# the most (lab/hopper/backward/sinks_budget.txt).
SINKS_DRAWS = 16


# Of fewer elements the eager run is right by luck, on one CPU and not on another: the harness asks further runs, too.
FEW_ELEMENTS, FEW_DRAWS = 1024, 16


def _budgets_of_few(q, k, v, options: dict[str, Any]) -> Iterator[float]:
    """Yield the budgets that eager runs set on the elements of q, k and v in other orders."""
    for seed in range(FEW_DRAWS):
        order = torch.Generator(device=q.device).manual_seed(seed)
        drawn = [
            x.flatten()[torch.randperm(x.numel(), generator=order, device=x.device)].view(x.shape) for x in (q, k, v)
        ]
        exact, _ = reference.attention(*drawn, dtype=torch.float64, **options)
        yield OPERATOR.error_budget(exact, reference.attention_low_precision(*drawn, **options))


def make_inputs(case: Case, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random q, k and v of a case."""
    inputs = OPERATOR.make_inputs(problem_of(case), seed=seed, device=device)
    return inputs["q"], inputs["k"], inputs["v"]


def problem_of(case: Case) -> AttentionProblem:
    """Return the problem of a case with contiguous tensors."""
    fields = [field.name for field in dataclasses.fields(Case) if field.name != "why"]
    return AttentionProblem(**{name: getattr(case, name) for name in fields})


def poison_allocator(nbytes: int) -> None:
    """Leave NaN in the memory that the next CUDA allocations will get."""
    sizes = (nbytes, nbytes // 2, 1 << 20, 4096, 512, 512)
    # Bytes of ones are NaN in every dtype.
    blocks = [torch.full((max(1, size),), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    del blocks


@contextlib.contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    """Let torch raise at any synchronisation with the GPU; afterwards it does what it did before, whatever happened."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Torch says so each time that the mode is set.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def make_features(case: FeatureCase | VarlenCase, device: str) -> dict[str, Any]:
    """Return the options of a call that asks for the features of a case; random numbers go on from the inputs'."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int, dtype: str) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[dtype])

    options: dict[str, Any] = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    if case.dropout:
        options |= {"dropout_p": case.dropout, "dropout_seed": torch.tensor([-(2**62) + 5, 2**33 - 7], device=device)}
    batch = case.batch if isinstance(case, FeatureCase) else len(case.seqlens_q)
    if case.sinks:
        options["sinks"] = draw(case.heads, dtype=case.sinks)
    if case.alibi:
        shape = (case.heads,) if case.alibi_axes == 1 else (batch, case.heads)
        options["alibi"] = draw(*shape, dtype=case.alibi).abs()
    if isinstance(case, FeatureCase):
        options["softmax_scale"] = case.scale
    if case.bias:
        own_batch, own_heads = case.bias_heads
        longest_q, longest_k = (
            (case.seqlen_q, case.seqlen_k)
            if isinstance(case, FeatureCase)
            else (max(lengths, default=0) + case.spare for lengths in (case.seqlens_q, case.seqlens_k))
        )
        sizes = (batch if own_batch else 1, case.heads if own_heads else 1, longest_q, longest_k)
        options["bias"] = bias = draw(*sizes, dtype=case.bias)
        bias[:, :, :, 1::5] = -math.inf  # keys that it hides
        bias[:, :, longest_q // 2 : longest_q // 2 + 1] = -math.inf  # and a row that sees none
        if isinstance(case, VarlenCase):
            queries, keys = case.seqused_q or case.seqlens_q, case.seqused_k or case.seqlens_k
            bias[~bias_in_use(bias, queries, keys)] = math.nan
    return options


def bias_in_use(bias: torch.Tensor, queries: Iterable[int], keys: Iterable[int]) -> torch.Tensor:
    """Return of which elements of a bias a sequence has the row and the key."""
    in_use = torch.zeros(bias.shape, dtype=torch.bool, device=bias.device)
    for b, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
        in_use[b if bias.shape[0] > 1 else 0, :, :rows, :columns] = True
    return in_use


def make_packed(case: VarlenCase, device: str) -> dict[str, Any]:
    """Return q, k, v and lengths; keys that nobody may read are NaN."""
    generator = torch.Generator(device).manual_seed(0)
    dims = {
        "q": (case.heads, case.head_dim),
        "k": (case.heads_kv, case.head_dim),
        "v": (case.heads_kv, case.head_dim_v),
    }
    inputs: dict[str, Any] = {}
    for name, shape in dims.items():
        lengths = case.seqlens_q if name == "q" else case.seqlens_k
        tensor = torch.randn(sum(lengths) + case.tail, *shape, generator=generator, device=device)
        inputs[name] = tensor.to(DTYPES[case.dtype])
    for side, lengths, used in (("q", case.seqlens_q, case.seqused_q), ("k", case.seqlens_k, case.seqused_k)):
        starts = [0, *itertools.accumulate(lengths)]
        inputs[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32, device=device)
        inputs[f"max_seqlen_{side}"] = max(lengths, default=0) + case.spare
        if used is not None:
            inputs[f"seqused_{side}"] = torch.tensor(used, dtype=torch.int32, device=device)
        for start, length, end in zip(starts, used or lengths, starts[1:], strict=False):
            for name in "kv" if side == "k" else "q":
                inputs[name][start + length : end] = math.nan
        for name in "kv" if side == "k" else "q":
            inputs[name][starts[-1] :] = math.nan
    return inputs


def make_paged(case: VarlenCase, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a call of ``make_packed`` with its keys in pages; what nobody may read does not exist, or is NaN.

    Pages lie in random order, among some that are in no table. Entries of pages that no row sees name none.
    """
    size, device = case.page_size, inputs["q"].device
    capacity = -(-inputs["max_seqlen_k"] // size) + 1
    table = torch.full((len(case.seqlens_k), capacity), 2**30, dtype=torch.int32)
    table[:, ::2] = -(2**30)
    order = torch.randperm(len(case.seqlens_k) * capacity + 3, generator=torch.Generator().manual_seed(3)).tolist()
    caches = {
        name: torch.full((len(order), size, *inputs[name].shape[1:]), math.nan, dtype=inputs[name].dtype, device=device)
        for name in "kv"
    }
    rows, keys = case.seqused_q or case.seqlens_q, case.seqused_k or case.seqlens_k
    for b, start in enumerate(inputs["cu_seqlens_k"].tolist()[:-1]):
        first = max(0, keys[b] - rows[b] - case.window[0]) if case.window[0] >= 0 else 0
        for i in range(first // size, -(-keys[b] // size)) if rows[b] and first < keys[b] else ():
            page, seen = order.pop(), range(max(first, i * size), min(keys[b], (i + 1) * size))
            table[b, i] = page
            for name, cache in caches.items():
                places = slice(seen.start - i * size, seen.stop - i * size)
                cache[page, places] = inputs[name][start + seen.start : start + seen.stop]
    return {**inputs, **caches, "page_table": table.to(device)}


def assert_varlen_right(o, lse, inputs, options):
    """Hold every sequence against ``assert_right``, and rows behind ``seqused_q`` against 0 and -inf."""
    starts_q, starts_k = inputs["cu_seqlens_q"].tolist(), inputs["cu_seqlens_k"].tolist()
    q, k, v = (inputs[name] for name in "qkv")
    assert o.shape == (*q.shape[:2], v.shape[2])
    assert lse.shape == (q.shape[1], q.shape[0])
    used = {
        side: inputs[f"seqused_{side}"].tolist() if f"seqused_{side}" in inputs else [None] * (len(starts) - 1)
        for side, starts in (("q", starts_q), ("k", starts_k))
    }
    for b, start_q in enumerate(starts_q[:-1]):
        end_q = starts_q[b + 1] if used["q"][b] is None else start_q + used["q"][b]
        end_k = starts_k[b + 1] if used["k"][b] is None else starts_k[b] + used["k"][b]
        rows, keys = slice(start_q, end_q), slice(starts_k[b], end_k)
        one = {**options}
        if "alibi" in one and one["alibi"].dim() == 2:
            one["alibi"] = one["alibi"][b]
        if "dropout_p" in one:
            one["first_sequence"] = b
        if "bias" in one:
            own = slice(b, b + 1) if one["bias"].shape[0] > 1 else slice(None)
            one["bias"] = one["bias"][own, :, : end_q - start_q, : end_k - starts_k[b]]
        parts = (tensor.transpose(0, 1)[None] for tensor in (o[rows], q[rows], k[keys], v[keys]))
        assert_right(*parts, lse=lse[None, :, rows], name=f"sequence {b}", **one)
        unused = slice(end_q, starts_q[b + 1])
        assert torch.equal(o[unused], torch.zeros_like(o[unused]))
        assert torch.equal(lse[:, unused], torch.full_like(lse[:, unused], -math.inf))


def assert_right(o, q, k, v, *, lse=None, name="output", **options):
    """Compare with fp64: within the budget that the eager run sets; LSE within 1e-3, -inf where a row sees no key."""
    exact, exact_lse = reference.attention(q, k, v, dtype=torch.float64, **options)
    low = reference.attention_low_precision(q, k, v, **options)
    assert o.shape == exact.shape
    assert o.dtype == q.dtype
    assert torch.isfinite(o).all(), f"{name} has NaN or inf"
    budget = OPERATOR.error_budget(exact, low)
    error = (o.double() - exact).abs().max().item() if o.numel() else 0.0
    if error > budget and o.numel() < FEW_ELEMENTS:
        budget = max(budget, *_budgets_of_few(q, k, v, options))
    assert error <= budget, f"{name}: max error {error:.2e} is above the budget {budget:.2e}"
    if lse is not None:
        assert lse.dtype == torch.float32
        assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
        tolerance = 1e-5 if q.dtype == torch.float32 else 1e-3
        torch.testing.assert_close(lse.double(), exact_lse, rtol=tolerance, atol=tolerance)


def options_of(options: dict[str, Any], lengths: tuple[int, int] | None, kernel: str) -> Options:
    """Return what gradients are told of a call with these options."""
    return Options(
        options["causal"],
        options.get("softmax_scale"),
        options.get("window", (-1, -1)),
        options.get("softcap", 0.0),
        lengths,
        kernel,
        options.get("dropout_p", 0.0),
    )


def low_precision_gradients(q, k, v, do, **options) -> dict[str, torch.Tensor]:
    """Return what autograd makes of the framework's eager run in the dtype of the inputs."""
    given = {"q": q, "k": k, "v": v, **options}
    leaves: dict[str, torch.Tensor] = {
        name: given[name].detach().clone().requires_grad_()
        for name in ("q", "k", "v", "sinks", "bias")
        if name in given
    }
    o = reference.attention_low_precision(**{**given, **leaves})
    grads = torch.autograd.grad(o, [*leaves.values()], do, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def sinks_budget(q, k, v, do, **options) -> float:
    """Return the budget of the gradients of sinks: that of ``do``, and of ``do`` with random signs, together.

    Gradients and their errors are linear in ``do``, so other signs draw other errors of the same size.
    """
    generator = torch.Generator(do.device).manual_seed(3)
    signs = (2 * torch.randint(2, do.shape, generator=generator, device=do.device) - 1 for _ in range(SINKS_DRAWS - 1))
    drawn = [do, *(do * sign for sign in signs)]
    exact = [reference.attention_backward(q, k, v, one, dtype=torch.float64, **options)["sinks"] for one in drawn]
    sinks = options["sinks"].detach().clone().requires_grad_()
    o = reference.attention_low_precision(q, k, v, **{**options, "sinks": sinks})
    low = [torch.autograd.grad(o, sinks, one, retain_graph=True)[0] for one in drawn]
    return OPERATOR.error_budget(torch.stack(exact), torch.stack(low))


def assert_gradients_right(found, q, k, v, do, dlse=None, *, name="", **options):
    """Compare with fp64: each within the budget that autograd of the eager run sets, of sinks that of several runs.

    That of the LSE is linear in ``dlse``, which the eager run does not have: it adds nothing to the budget.
    """
    exact = reference.attention_backward(q, k, v, do, dlse, dtype=torch.float64, **options)
    plain = reference.attention_backward(q, k, v, do, dtype=torch.float64, **options)
    low = low_precision_gradients(q, k, v, do, **options)
    assert set(found) == set(exact)
    for what, gradient in found.items():
        of = {"q": q, "k": k, "v": v, **options}[what]
        assert gradient.shape == of.shape
        assert gradient.dtype == of.dtype
        assert torch.isfinite(gradient).all(), f"{name}d{what} has NaN or inf"
        if not gradient.numel():
            continue
        if what == "sinks":
            budget = sinks_budget(q, k, v, do, **options)
        else:
            budget = OPERATOR.error_budget(plain[what], low[what])
        # Where dlse makes it larger: dS and the gradient are rounded, by half of eps each. With a softcap P times its
        # derivative is rounded before: that of one key is 1 without it.
        roundings = 3 if options.get("softcap") else 2
        budget += roundings / 2 * torch.finfo(gradient.dtype).eps * exact[what].abs().max().item()
        # A row that sees one key has gradients of 0, the difference of dP and delta: two sums of DV products in fp32.
        budget += 1e-5
        error = (gradient.double() - exact[what]).abs().max().item()
        assert error <= budget, f"{name}d{what}: max error {error:.2e} is above the budget {budget:.2e}"


def ask_for_gradients(call, tensors, options, *, kernel, through_lse, seed=2) -> tuple[tuple[Any, Any, Any], Any, Any]:
    """Return what ``attention_gradients`` takes after a call, and the random gradients of o and LSE that it is given.

    ``tensors`` are q, k, v and lengths, ``options`` what ``call`` takes besides.
    """
    o, lse = call(**tensors, **options, return_lse=True)
    generator = torch.Generator(o.device).manual_seed(seed)
    do = torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype)
    dlse = torch.randn(lse.shape, generator=generator, device=o.device) if through_lse else None
    given = {name: tensor for name, tensor in {**tensors, **options}.items() if isinstance(tensor, torch.Tensor)}
    given |= {"o": o, "lse": lse, "do": do}
    lengths = None
    if dlse is not None:
        given["dlse"] = torch.where(lse == -math.inf, math.nan, dlse)
        dlse = torch.where(lse == -math.inf, 0.0, dlse)
    if "max_seqlen_q" in tensors:
        lengths = planned_lengths(tensors["max_seqlen_q"], tensors["max_seqlen_k"], options.get("bias"))
    wanted = ["q", "k", "v", *(name for name in ("sinks", "bias") if name in options)]
    return (options_of(options, lengths, kernel), given, wanted), do, dlse


def differentiate(call, tensors, options, *, kernel, through_lse, seed=2) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Return the gradients that ``kernel`` makes, and the random gradients of o and LSE that it was given."""
    asked, do, dlse = ask_for_gradients(call, tensors, options, kernel=kernel, through_lse=through_lse, seed=seed)
    return attention_gradients(*asked), do, dlse


def far_apart(bias: torch.Tensor) -> torch.Tensor:
    """Return a bias ``[1, 1, Sq, Sk]`` whose last key lies more than 2**31 elements behind the first.

    On a CPU nothing is there of the memory between them until somebody touches it.
    """
    *_, rows, keys = bias.shape
    stride = 2**31 // (keys - 1) + 8
    far = torch.empty((keys - 1) * stride + rows, dtype=bias.dtype, device=bias.device)
    return far.as_strided((1, 1, rows, keys), (0, 0, 1, stride)).copy_(bias)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers as integers of their bits, which tell 0 from -0, and NaN from none."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_repeats(call, tensors, options, *, kernel, through_lse=False, repeats=1000):
    """Hold the bits of the gradients of every run to those of the first.

    What differs is counted where it lies, so that runs follow one another without a wait.
    """
    asked, _, _ = ask_for_gradients(call, tensors, options, kernel=kernel, through_lse=through_lse)
    expected = attention_gradients(*asked)
    different = {name: torch.zeros((), dtype=torch.int64, device=tensors["q"].device) for name in expected}
    for _ in range(repeats):
        for name, gradient in attention_gradients(*asked).items():
            different[name] += (bits_of(gradient) != bits_of(expected[name])).sum()
    for name, count in different.items():
        assert torch.isfinite(expected[name]).all(), f"d{name} has NaN or inf"
        assert count.item() == 0, f"d{name} has other bits in another run: {count.item()} numbers in {repeats} runs"


def assert_varlen_gradients_right(found, inputs, options, do, dlse=None):
    """Hold the gradients of every sequence against fp64, and those of tokens in none against 0."""
    q, k, v = (inputs[name] for name in "qkv")
    four = [tensor.double().nan_to_num(0.0) for tensor in (q, k, v, do)]
    lengths = {name: tensor for name, tensor in inputs.items() if name.startswith(("cu_seqlens", "seqused"))}
    seen = None if dlse is None else dlse.double()
    differentiated: Any = reference.attention_varlen_backward
    exact: dict[str, torch.Tensor] = differentiated(*four, seen, **lengths, **options)
    if "bias" in exact:
        # Its gradient is P (dP - delta), and delta is that of the o which the call is given: one that is rounded shifts
        # a whole row, which in rows of few keys is more than their gradient. As much as a gradient of the LSE would.
        attended: Any = reference.attention_varlen
        o = attended(*four[:3], **lengths, **options)[0]
        given = flash_attention_varlen(**inputs, **options)
        shift = ((o - given.double()).nan_to_num(0.0) * four[3]).sum(-1).t()
        exact["bias"] = differentiated(*four, shift if seen is None else shift + seen, **lengths, **options)["bias"]
    assert set(found) == set(exact)
    for name, gradient in found.items():
        assert torch.isfinite(gradient).all(), f"d{name} has NaN or inf"
        if gradient.numel():
            eps = max(torch.finfo(q.dtype).eps, torch.finfo(gradient.dtype).eps)
            # Each row of a bias counts by its own largest element; a row of one key has 0, the difference of two sums.
            size = exact[name].abs().amax(-1, keepdim=True) if name == "bias" else exact[name].abs().max()
            excess = (gradient.double() - exact[name]).abs() - (8 * eps * size + (1e-5 if name == "bias" else 0))
            assert excess.max() <= 0, f"d{name}: the error is above what is allowed by {excess.max().item():.2e}"
        if name == "bias":
            queries, keys = (
                (inputs[f"seqused_{side}"] if f"seqused_{side}" in inputs else inputs[f"cu_seqlens_{side}"].diff())
                for side in "qk"
            )
            assert not gradient[~bias_in_use(gradient, queries.tolist(), keys.tolist())].any(), "dbias is not 0"
        if name in ("q", "k", "v"):
            unused = torch.ones(gradient.shape[0], dtype=torch.bool)
            side = "q" if name == "q" else "k"
            starts = inputs[f"cu_seqlens_{side}"].tolist()
            used = inputs[f"seqused_{side}"].tolist() if f"seqused_{side}" in inputs else None
            for b, start in enumerate(starts[:-1]):
                unused[start : starts[b + 1] if used is None else start + used[b]] = False
            assert not gradient[unused.to(gradient.device)].any(), f"d{name} of a token in no sequence is not 0"


def check_gradients(
    case: Case, *, kernel: str = "auto", through_lse: bool = False, low: bool = False, repeats: int = 3
) -> None:
    """Compare with fp64 on a GPU, memory that nobody wrote being NaN; repeats give equal bits."""
    q, k, v = make_inputs(case, "cuda")
    if low:
        q, k = 8 * q.abs(), -8 * k.abs()
    options = make_features(case, "cuda") if isinstance(case, FeatureCase) else {"causal": case.causal}
    asked: dict[str, Any] = {"kernel": kernel, "through_lse": through_lse}
    poison_allocator(4 * max(q.numel(), k.numel(), 1))
    found, do, dlse = differentiate(flash_attention, {"q": q, "k": k, "v": v}, options, **asked)
    assert_gradients_right(found, q, k, v, do, dlse, **options)
    for _ in range(repeats):
        poison_allocator(4 * max(q.numel(), k.numel(), 1))
        again, _, _ = differentiate(flash_attention, {"q": q, "k": k, "v": v}, options, **asked)
        for name, gradient in found.items():
            assert torch.equal(again[name], gradient), f"d{name} has other bits in another run"

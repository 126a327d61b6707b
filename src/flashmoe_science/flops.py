"""Tell ``torch.utils.flop_counter`` what our operators do. It counts the operators that it knows, and no others.

Work is counted as torch counts it for its own attention: masks and windows take nothing away, and the backward pass
recomputes the scores. Lengths, and the ids of experts, are read where they have values.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

COUNTER = "torch.utils.flop_counter"
_DEFINE_OPERATORS = (
    *("attention.api", "attention.varlen", "attention.decode.api", "attention.sparse.api"),
    *("moe.api", "moe.backward.api"),
)
Given = Mapping[str, Any]  # the arguments of an operator, by name


def count_when_imported() -> None:
    """Register the formulas of all operators, once the counter is imported: that imports Triton."""
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _AtImport())


class _AtImport(MetaPathFinder):
    """Waits for the import of the counter, and leaves finding it to others."""

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> Any:
        if fullname != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(counter: ModuleType) -> None:
    import torch

    over_ranks = ("distributed.operator",) if torch.distributed.is_available() else ()
    for name in (*_DEFINE_OPERATORS, *over_ranks):
        importlib.import_module(f".{name}", __package__)
    for name, count in _FORMULAS.items():
        operator = getattr(torch.ops.flashmoe_science, name, None)
        if operator is None or operator in counter.flop_registry:  # this is one of several revisions in a process
            continue
        counter.register_flop_formula(operator, get_raw=True)(_by_name(operator, count))


def _by_name(operator: Any, count: Callable[[Given], int]) -> Callable[..., int]:
    names = [argument.name for argument in operator.default._schema.arguments]  # noqa: SLF001 - has no public name

    def formula(*arguments: Any, out_val: object = None, **named: Any) -> int:  # noqa: ARG001 - the counter gives it
        return count({**dict(zip(names, arguments, strict=False)), **named})

    return formula


def _attend(given: Given) -> int:
    """Two products a pair of a query and a key: scores, and values."""
    return int(2 * _pairs(given) * (given["q"].shape[-1] + given["v"].shape[-1]))


def _attend_backward(given: Given) -> int:
    """Five: the scores again, and the gradients of V, P, Q and K."""
    return int(2 * _pairs(given) * (3 * given["q"].shape[-1] + 2 * given["v"].shape[-1]))


def _attend_over_ranks(given: Given) -> int:
    """Of one rank: a batch's pairs are shared equally."""
    return int(2 * _pairs_of_rank(given) * (given["q"].shape[-1] + given["v"].shape[-1]))


def _attend_over_ranks_backward(given: Given) -> int:
    return int(2 * _pairs_of_rank(given) * (3 * given["q"].shape[-1] + 2 * given["v"].shape[-1]))


def _pairs_of_rank(given: Given) -> int:
    """Return the pairs of a query and a key of its document, of all heads and ranks, by the number of ranks."""
    from .distributed.named import named

    if given["plan"] < 0:
        return _pairs(given) * int(given["ranks"])
    starts = named(given["plan"], "plan").starts
    squares = sum((end - start) ** 2 for start, end in itertools.pairwise(starts))
    return int(given["q"].shape[1] * squares // given["ranks"])


def _pairs(given: Given) -> int:
    """Return the pairs of a query and a key of its sequence, masked or not, of all heads."""
    q, k = given["q"], given["k"]
    if given.get("cu_seqlens_q") is None:
        batch, heads, queries, _ = q.shape
        return int(batch * heads * queries * k.shape[2])
    queries, keys = (
        _lengths(given[f"cu_seqlens_{side}"], given[f"seqused_{side}"], given[f"max_seqlen_{side}"]) for side in "qk"
    )
    return int(q.shape[1] * sum(one * other for one, other in zip(queries, keys, strict=True)))


def _lengths(starts: Tensor, used: Tensor | None, longest: int) -> list[int]:
    if not all(map(_has_values, (starts, used))):
        return [longest] * (starts.shape[0] - 1)
    found: list[int] = (starts.diff() if used is None else used).tolist()
    return found


def _attend_to_cache(given: Given) -> int:
    q, cache, table, lengths = (given[name] for name in ("q", "k_cache", "page_table", "cache_seqlens"))
    batch, heads, queries, size = q.shape
    new = given["k"].shape[2] if "k" in given else 0
    if lengths is not None and _has_values(lengths):
        keys = int(lengths.sum()) + batch * new
    else:
        keys = batch * cache.shape[1] * (1 if table is None else table.shape[1])
    return int(2 * heads * queries * keys * (size + given["v_cache"].shape[-1]))


def _attend_to_rows(given: Given) -> int:
    q, indices = given["q"], given["indices"]
    batch, heads, queries, size = q.shape
    named = int((indices >= 0).sum()) if _has_values(indices) else batch * queries * indices.shape[2]
    return int(2 * heads * named * (size + given["head_dim_v"]))


def _serve_experts(given: Given) -> int:
    return sum(rows * (up + down) for rows, up, down in _experts(given))


def _serve_experts_backward(given: Given) -> int:
    """Of each product, that of the gradient of its input, and that of its weight, where they are wanted."""
    from .moe.backward.autograd import DIFFERENTIABLE
    from .moe.backward.plan import GRADIENTS

    numbers: Sequence[int] | None = given.get("wanted")
    wanted = set(GRADIENTS) if numbers is None else {DIFFERENTIABLE[number] for number in numbers}
    names = (
        ("w_gate_up", "w_down", "topk_weights", "bias_gate_up"),
        ("shared_gate_up", "shared_down", "shared_weights"),
    )
    total = 0
    for (rows, up, down), (w_up, w_down, *others) in zip(_experts(given), names, strict=False):
        of_hidden = bool({"x", w_up, *others} & wanted)  # the gradient of the activation, which others come from
        total += rows * (down * (of_hidden + (w_down in wanted)) + up * (("x" in wanted) + (w_up in wanted)))
    return total


def _experts(given: Given) -> list[tuple[int, int, int]]:
    """Return rows, and the work of a row in the first and the second product: of routed and of shared experts."""
    x, ids, w_up, w_down = (given[name] for name in ("x", "topk_ids", "w_gate_up", "w_down"))
    rows = int(((ids >= 0) & (ids < w_up.shape[0])).sum()) if _has_values(ids) else ids.numel()
    found = [(rows, *_work_of_row(w_up, w_down))]
    shared = given.get("shared_gate_up")
    if shared is not None:
        found.append((x.shape[0] * shared.shape[0], *_work_of_row(shared, given["shared_down"])))
    return found


def _work_of_row(w_gate_up: Tensor, w_down: Tensor) -> tuple[int, int]:
    return 2 * w_gate_up.shape[1] * w_gate_up.shape[2], 2 * w_down.shape[1] * w_down.shape[2]


def _has_values(tensor: Tensor | None) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return tensor is None or not (tensor.is_meta or isinstance(tensor, (FakeTensor, FunctionalTensor)))


_FORMULAS: dict[str, Callable[[Given], int]] = {
    "attention_forward": _attend,
    "attention_forward_lse": _attend,
    "attention_features": _attend,
    "attention_varlen": _attend,
    "attention_varlen_paged": _attend,
    "attention_backward": _attend_backward,
    "attention_over_ranks": _attend_over_ranks,
    "attention_over_ranks_backward": _attend_over_ranks_backward,
    "attention_masked": _attend,
    "attention_masked_backward": _attend_backward,
    "attention_with_kv_cache": _attend_to_cache,
    "attention_append_kv_cache": _attend_to_cache,
    "sparse_mla": _attend_to_rows,
    "fused_moe": _serve_experts,
    "fused_moe_kept": _serve_experts,
    "fused_moe_backward": _serve_experts_backward,
    "fused_moe_gradients": _serve_experts_backward,
}

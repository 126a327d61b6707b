"""The public function of attention to the tokens that indices name, and the way from a call to its launches."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ...gpu.checks import check_before_operator, check_no_bare_subclass, check_not_negative, check_storages
from ...gpu.device import gpu_at, gpu_of
from ...gpu.subclasses import is_traced
from ..checks import check_fake, refuse_without_memory
from ..context_parallel import refuse_context_parallel
from ..forward.calls import remember
from ..inputs import refuse_tangents
from ..problem import canonical_strides, output_strides
from .calls import Call, prepare_sparse_call
from .contract import SparseCallOf, SparseOptions, check_indices, describe_sparse_call, sparse_problem_of
from .plan import SparsePlan, plan_sparse_mla

_prepared: dict[tuple[Any, ...], Call] = {}


@overload
def sparse_mla(
    q: Tensor, kv_cache: Tensor, indices: Tensor, *, page_table: Tensor | None = None, head_dim_v: int = 512,
    sinks: Tensor | None = None, softmax_scale: float | None = None, num_splits: int = 0,
    batch_invariant: bool = False, return_lse: Literal[False] = False, kernel: str = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def sparse_mla(
    q: Tensor, kv_cache: Tensor, indices: Tensor, *, page_table: Tensor | None = None, head_dim_v: int = 512,
    sinks: Tensor | None = None, softmax_scale: float | None = None, num_splits: int = 0,
    batch_invariant: bool = False, return_lse: Literal[True], kernel: str = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def sparse_mla(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    page_table: Tensor | None = None,
    head_dim_v: int = 512,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Any:
    """Attend each query to the rows of a latent cache that its indices name: the absorbed form of sparse MLA.

    ``o[b, h, m] = softmax(softmax_scale * q[b, h, m] @ K.T) @ K[:, :DV]``, where K has the rows
    ``kv_cache[b, indices[b, m, i], 0]`` of all i whose index is not -1. All heads share the indices. Nothing else masks
    a row: indices name only tokens that the query may see. It serves decoding and prompts.

    Args:
        q: ``[B, H, Sq, D]`` fp16 or bf16, D contiguous; on a GPU D - DV is 0 or a power of two from 16 to 128.
        kv_cache: ``[B, S, 1, D]``, or with ``page_table`` ``[pages, page_size, 1, D]`` of any page size, dtype and
            device of q, any strides but D contiguous. The first DV columns of a row are its value. In fp8 (sm_89 and
            newer) ``[..., 1, 656]`` uint8, bytes of the rows of ``pack_mla_rows``, which start at multiples of 16
            bytes; then D is 576 and DV 512.
        indices: ``[B, Sq, K]`` int32: positions from 0 to S - 1, or with ``page_table`` to ``P * page_size - 1``, in
            any order; -1 anywhere for none. A position that is named twice counts twice.
        page_table: ``[B, P]`` int32: the page of positions ``[i * page_size, (i + 1) * page_size)`` is
            ``page_table[b, i]``. Entries that no index leads to are never read.
        head_dim_v: DV, on a GPU a power of two from 16 to 512.
        sinks: ``[H]``: a logit of each head that takes its share of the softmax and adds nothing to the output. It is
            in the LSE.
        softmax_scale: the factor on the scores. Default: ``D ** -0.5``. MLA scores have the scale of the heads before
            absorption, e.g. ``192 ** -0.5``.
        num_splits: the most programs that share the indices of a query; 0 leaves the choice to the plan.
        batch_invariant: a sequence gets the same bits whatever else is in the batch: indices are split by K, Sq and H
            alone. On Hopper it must be the same whether all rows start at multiples of 16 bytes. ``num_splits``
            overrides it, with the same guarantee.
        return_lse: return the log-sum-exp of every row too.
        kernel: ``"auto"``, ``"sparse_mla_gluon_sm90"`` or ``"sparse_mla_triton"``; a forced kernel never falls back.

    Returns:
        o ``[B, H, Sq, DV]`` in the dtype of q; with ``return_lse`` the pair of o and lse ``[B, H, Sq]`` fp32, natural
        logarithm. A row without an index gives 0, and LSE -inf or its sink.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above; with ``FLASHMOE_CHECK=1`` in the
            environment also an index or a page that lies outside, which costs a synchronisation; those of CPU tensors
            always are checked.
        UnsupportedError: no kernel serves this call, or an input requires grad while gradients are recorded.

    Numerics: fp32 scores and sums, weights rounded to the dtype of q for the product with the values. Columns in fp8
    times their scales are rounded to it too. Results are bitwise reproducible: splits merge in fp32 in a fixed order;
    another order of the indices gives other bits. CPU tensors run the reference, in fp32 also. Unchecked, an index
    outside counts as -1.
    """
    refuse_context_parallel()
    call = describe_sparse_call(
        {"q": q, "kv_cache": kv_cache, "indices": indices, "page_table": page_table, "sinks": sinks},
        SparseOptions(head_dim_v, softmax_scale, num_splits, batch_invariant, return_lse, kernel),
    )
    o, lse = _call_operator(call) if is_traced(call.tensors.values()) else _run(call)
    return (o, lse) if return_lse else o


def explain_sparse_mla(q: Tensor, kv_cache: Tensor, indices: Tensor, **options: Any) -> SparsePlan:
    """Return the plan that would serve ``sparse_mla`` with the same arguments; nothing is launched.

    Arguments and errors are those of ``sparse_mla``, but inputs may require grad.
    """
    given = {"q": q, "kv_cache": kv_cache, "indices": indices}
    given |= {name: options.pop(name) for name in ("page_table", "sinks") if name in options}
    with torch.no_grad():
        call = describe_sparse_call(given, SparseOptions(**options))
    return plan_sparse_mla(sparse_problem_of(call), gpu_of(q), call.options.kernel)


def _run(call: SparseCallOf) -> tuple[Tensor, Tensor | None]:
    """Make a call, prepared once for all that have its options and layouts."""
    tensors, options = call
    refuse_tangents(tensors.values())
    try:
        key = *tensors, *map(_describe, tensors.values()), options
    except RuntimeError:
        refuse_without_memory(tensors)
    prepared = _prepared.get(key)
    if prepared is None:
        device = tensors["q"].device
        plan = plan_sparse_mla(sparse_problem_of(call), gpu_at(device), options.kernel)
        prepared = remember(_prepared, key, prepare_sparse_call(plan, device))
    check_indices(tensors)
    return prepared(tensors)


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that a prepared call depends on: not the elements, and of the address only the alignment."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15, tensor.is_neg()


_SCHEMA = (
    "Tensor q, Tensor kv_cache, Tensor indices, Tensor? page_table, Tensor? sinks, SymInt head_dim_v, "
    "float? softmax_scale, SymInt num_splits, bool batch_invariant, str kernel"
)


# Graphs that torch traces hold this operator; the eager call never does.
@torch.library.custom_op("flashmoe_science::sparse_mla", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def _sparse_mla(
    q: Tensor, kv_cache: Tensor, indices: Tensor, page_table: Tensor | None, sinks: Tensor | None, head_dim_v: int,
    softmax_scale: float | None, num_splits: int, batch_invariant: bool, kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_context_parallel()
    given = {"q": q.detach(), "kv_cache": kv_cache.detach(), "indices": indices, "page_table": page_table}
    options = SparseOptions(head_dim_v, softmax_scale, num_splits, batch_invariant, return_lse=True, kernel=kernel)
    o, lse = _run(describe_sparse_call({**given, "sinks": sinks}, options))
    assert lse is not None
    return o, lse


@_sparse_mla.register_fake
def _fake(
    q: Tensor, kv_cache: Tensor, indices: Tensor, page_table: Tensor | None, sinks: Tensor | None, head_dim_v: int,
    *_others: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs without data, in the memory order of the real ones."""
    check_fake(q, kv_cache, indices, (4, 4, 3), (page_table, sinks))
    batch, heads, seqlen_q, _ = q.shape
    strides = output_strides(batch, heads, seqlen_q, head_dim_v, canonical_strides(q.shape, q.stride()))
    o = torch.empty_strided((batch, heads, seqlen_q, head_dim_v), strides, dtype=q.dtype, device=q.device)
    return o, torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)


def _call_operator(call: SparseCallOf) -> tuple[Tensor, Tensor]:
    tensors, options = call
    check_before_operator(tensors, "q")
    check_storages(tensors)
    for name, tensor in tensors.items():
        check_not_negative(name, tensor)
        if name not in ("q", "kv_cache"):
            check_no_bare_subclass(name, tensor)
    refuse_tangents(tensors.values())
    found: tuple[Tensor, Tensor] = _sparse_mla(
        tensors["q"], tensors["kv_cache"], tensors["indices"], tensors.get("page_table"), tensors.get("sinks"),
        options.head_dim_v, options.softmax_scale, options.num_splits, options.batch_invariant, options.kernel,
    )  # fmt: skip
    return found

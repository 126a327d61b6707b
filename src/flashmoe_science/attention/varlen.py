"""The public functions of attention over packed sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from .dispatch import attend
from .forward.plan import plan_attention
from .inputs import TENSORS, NamedOptions, Options, check_splits, gpu_of, parameters_of
from .packed import check_room, packed_problem
from .tiles import Plan

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PackedOptions(NamedOptions, total=False):
    """What ``flash_attention_varlen`` takes by name, but for ``return_lse``: types of its overloads."""

    seqused_q: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None
    num_splits: int
    batch_invariant: bool


@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[False] = False, **options: Unpack[PackedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[True], **options: Unpack[PackedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: bool, **options: Unpack[PackedOptions],
) -> Any: ...  # fmt: skip
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    page_table: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Any:
    """Attend every query of a packed batch to the keys of its own sequence.

    What ``flash_attention`` computes, for each sequence b with q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] and the k and v
    of cu_seqlens_k; masks are aligned to the ends of its own queries and keys.

    Args:
        q: ``[Tq, H, D]`` fp16, bf16 or fp32, any strides; D from 1 to 512 on a GPU.
        k: ``[Tk, HK, D]``, dtype and device of q; H is a multiple of HK. With ``page_table`` it is a cache
            ``[pages, page_size, HK, D]`` of any page size, any strides but D contiguous.
        v: ``[Tk, HK, DV]``, dtype and device of q; DV from 1 to 512 on a GPU. With ``page_table``
            ``[pages, page_size, HK, DV]``.
        cu_seqlens_q: ``[B + 1]`` int32, contiguous, on the device of q: where sequences start in q, and where the last
            one ends. A sequence may be empty.
        cu_seqlens_k: ``[B + 1]`` int32, the same of k and v. With ``page_table`` only the differences count: the keys
            of each sequence; with ``seqused_k`` too, nothing does.
        max_seqlen_q: queries of the longest sequence, or more. Most grids are of it: a longer one may not be finished.
        max_seqlen_k: keys of the longest sequence, or more. It decides tiles; a window as wide as it is dropped.
        causal: as in ``flash_attention``, like the other options.
        softmax_scale: factor on the scores. Default ``D ** -0.5``.
        window: (left, right), -1 for no bound.
        softcap: 0 for none.
        sinks: ``[H]``.
        alibi: ``[H]`` or ``[B, H]``.
        bias: ``[B or 1, H or 1, rows, columns]`` fp16, bf16 or fp32, any strides (0 too), with ``max_seqlen_q`` rows
            and ``max_seqlen_k`` columns or more: element (b, h, m, n) is added to the score of query m and key n of
            sequence b, both counted from its start; -inf hides the key. Elements beyond the end of every sequence they
            serve are ignored, even if NaN; their gradient is 0. A call is prepared for the size of its bias, not for
            the maxima, and launches programs for it: pad biases to a few sizes; slice a much larger one.
        seqused_q: ``[B]`` int32, contiguous: queries of each sequence, where it ends before its place does.
        seqused_k: ``[B]`` int32, the same for keys. Keys beyond it are ignored, even if NaN. With it, but without
            ``page_table``, sequences may lie in k in any order and share keys: sequence b has
            ``k[cu_seqlens_k[b] : cu_seqlens_k[b] + seqused_k[b]]``. Gradients of k and v need keys of its own, which
            end before ``cu_seqlens_k[b + 1]``: on a GPU the gradients are NaN else, and checked lengths raise.
        dropout_p: as in ``flash_attention``, with m and n counted from the start of the sequence b.
        dropout_seed: ``[2]`` int64, contiguous, on the device of q. Default: drawn from torch's default generator.
        page_table: ``[B, P]`` int32, contiguous along P, on the device of q: key n of sequence b lies in row
            ``n % page_size`` of page ``page_table[b, n // page_size]``. Entries behind the last key are never read, nor
            are pages of which a window hides all keys from the rows of a tile. Without gradients and dropout.
        num_splits: with ``page_table``: over how many programs the keys of each sequence are split, at most 256; 0:
            by the lengths of all, which the GPU reads. Not without a page table, for fp32 or with a bias.
        batch_invariant: with ``page_table``: a sequence has the same bits whatever else is in the batch, and whatever
            the maxima are; keys are split by its own length alone. Served as ``num_splits`` is.
        return_lse: return the log-sum-exp of every row too.
        kernel: ``"auto"``, or one name to force; a forced kernel never falls back.

    Returns:
        o ``[Tq, H, DV]`` in the dtype of q, contiguous. Rows in the place of a sequence behind ``seqused_q`` are 0;
        rows in no sequence's place are not written on a GPU. With ``return_lse`` the pair of o and lse ``[H, Tq]``
        fp32, natural logarithm, the transpose of a contiguous tensor; -inf where o is 0 for want of a query.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above. Lengths on a GPU are not read, as that
            would wait for it; with ``FLASHMOE_CHECK=1`` in the environment they are read and checked, except while a
            CUDA graph is captured. Lengths on a CPU are always checked. The same holds for pages.
        UnsupportedError: as in ``flash_attention``; with ``page_table`` also for dropout, and where gradients are
            recorded and an input requires grad.

    Numerics: as in ``flash_attention``. A sequence has the same bits whatever else is in the batch, as long as
    ``max_seqlen_q``, ``max_seqlen_k``, B and H lead to the same tile (``explain_varlen`` shows it). ``mixed_triton``,
    the default of many calls over pages on Hopper, splits keys by all lengths, unless ``batch_invariant`` is asked for.
    The same call has the same bits.

    The host reads no tensor, so a CUDA graph replays with other lengths in the same tensors, up to the maxima.
    """
    if type(num_splits) is int and abs(num_splits) >= 2**31:  # an operator would refuse it in words of torch
        check_splits(num_splits, batch_invariant)
    return attend(
        {
            "q": q, "k": k, "v": v, "sinks": sinks, "alibi": alibi, "bias": bias, "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k, "page_table": page_table,
            "dropout_seed": dropout_seed,
        },
        Options(
            causal, softmax_scale, window, softcap, (max_seqlen_q, max_seqlen_k), kernel, dropout_p,
            num_splits=num_splits, batch_invariant=batch_invariant, return_lse=return_lse,
        ),
    )  # fmt: skip


if TYPE_CHECKING:  # of overloads, only the first would be seen

    def _parameters(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, *, return_lse: bool = False, **options: Unpack[PackedOptions],
    ) -> Any: ...  # fmt: skip

else:
    _parameters = flash_attention_varlen


@parameters_of(_parameters)
def explain_varlen(*, q: Tensor, max_seqlen_q: int, max_seqlen_k: int, kernel: str, **arguments: Any) -> Plan:
    """Return the plan that would serve ``flash_attention_varlen`` with the same arguments; nothing is launched.

    The lengths in it are those that are planned for: the maxima, rounded up, or the sizes of a bias.
    """
    tensors = {"q": q, **{name: arguments.pop(name, None) for name in TENSORS[1:]}}
    problem = packed_problem(tensors, (max_seqlen_q, max_seqlen_k), **arguments)
    check_room({name: tensor for name, tensor in tensors.items() if tensor is not None}, max_seqlen_k)
    return plan_attention(problem, gpu_of(q), kernel)

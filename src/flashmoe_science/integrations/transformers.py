"""Our attention in Hugging Face transformers, behind ``attn_implementation="moe_science"``.

    from flashmoe_science.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

The name must not hold "flash": transformers takes such names for builds of flash-attn, looks for those, and replaces
the name in models that list others.

Causal masks and sliding windows are options of the kernel, so no mask is made for a batch without padding; padding and
every other pattern come as a bias. Softcap and sinks go to the kernel. A single query a sequence takes the kernel that
decodes, which reads the keys once for all query heads that share them.

Source: transformers 5, integrations/sdpa_attention.py and masking_utils.py, for what is asked of an implementation.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention.api import flash_attention
from ..attention.decode.api import flash_attention_with_kv_cache
from ..attention.forward.plan import check_kernel_name
from ..attention.masks.block_mask import is_block_mask
from ..attention.varlen import flash_attention_varlen
from ..errors import InputError, MissingPackageError, UnsupportedError, shown
from . import transformers_models
from .arguments import (
    as_bias,
    blame,
    call_by_names,
    check_attended,
    check_count,
    check_dropout,
    check_kinds,
    check_mask,
    check_numbers,
    check_optional_flag,
    check_per_head,
    check_scale,
    check_softcap,
    check_starts,
)
from .transformers_masks import is_all_seen, is_prefix_mask, make_mask, make_no_mask

if TYPE_CHECKING:
    from ..distributed import ContextParallel, PackedPlan

_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Keywords that models hand on to every layer, and that say nothing of what attention computes.
_IGNORED = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_hidden_states",
        "output_router_logits",
        "labels",
        "num_items_in_batch",
        "return_dict",
        "deterministic",
        "logits_to_keep",
    }
)
_UNDERSTOOD = frozenset({*_LENGTHS, "position_bias", "output_attentions", "cache", "seq_idx"})
_NOT_GIVEN: Any = object()
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "k_cache": "key",
    "v_cache": "value",
    "softmax_scale": "scaling",
    "dropout_p": "dropout",
    "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k",
    "max_seqlen_q": "max_length_q",
    "max_seqlen_k": "max_length_k",
}


def register(
    name: str = "moe_science", *, kernel: str = "auto", context_parallel: ContextParallel | None = None
) -> str:
    """Let models be made with ``attn_implementation=name``, and return the name.

    Args:
        name: of the implementation.
        kernel: that serves it, as in ``flash_attention``: one name for prompts and single tokens.
        context_parallel: splits sequences over ranks: the model is called with the tokens and the ``position_ids`` that
            ``shard`` gives each rank, and for packed documents with their plan as ``context_parallel_plan``. For causal
            language models without a cache, a mask, or dropout.

    Raises:
        InputError: the name is empty or no text, or transformers would take it for another implementation; there is no
            such kernel.
        MissingPackageError: transformers is not installed, or too old.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingPackageError(
            f"transformers cannot be imported: {error}", hint='pip install "transformers>=5.23"'
        ) from error

    _check_name(name)
    check_kernel_name(kernel)
    if context_parallel is not None:
        AttentionInterface.register(name, functools.partial(attend_in_parallel, context_parallel))
        AttentionMaskInterface.register(name, make_no_mask)
        return name
    AttentionInterface.register(name, functools.partial(attend, kernel=kernel))
    AttentionMaskInterface.register(name, make_mask)
    return name


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise InputError(f"name must be a text of one character or more, got {shown(name)}")
    if "flash" in name or name in ("eager", "sdpa") or "|" in name or "/" in name:
        raise InputError(
            f'name must not hold "flash", "|" or "/", nor be eager or sdpa, got {name!r}',
            hint="transformers takes such names for implementations of its own",
        )


def _restarts(position_ids: Any) -> bool:
    """Whether positions fall somewhere, as those of packed documents do. All layers ask for the same tensor."""
    if not isinstance(position_ids, Tensor):
        return False
    known = position_ids.__dict__
    if "flashmoe_restarts" not in known:  # on a GPU it has to be waited for, once a call of the model
        known["flashmoe_restarts"] = bool((position_ids.diff() < 0).any())
    return bool(known["flashmoe_restarts"])


def attend_in_parallel(
    context_parallel: ContextParallel,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: Any = _NOT_GIVEN,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    context_parallel_plan: PackedPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as ``attend`` does, the queries of this rank to the keys of all ranks.

    Raises:
        InputError: an argument breaks the contract.
        UnsupportedError: a mask, dropout, another keyword or a model that is not known is given.
    """
    if not transformers_models.check_layer(module):
        raise UnsupportedError(f"{type(module).__name__} is not known to be right where sequences are split over ranks")
    for name, asked in {**others, "attention_mask": attention_mask, "dropout": dropout or None}.items():
        if asked is not None and asked is not False and name not in _IGNORED:
            raise UnsupportedError(f"{name} is not served where sequences are split over ranks")
    window = None if sliding_window is _NOT_GIVEN else sliding_window
    _check_options(dropout, scaling, window, softcap, is_causal, "auto")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    options: dict[str, Any] = {
        "causal": causal, "softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux,
        "window": (window - 1, -1 if causal else window - 1) if window else (-1, -1),
    }  # fmt: skip
    if context_parallel_plan is None:
        if _restarts(others.get("position_ids")):
            raise UnsupportedError(
                "position_ids restart: packed documents need a plan",
                hint="hand over context_parallel_plan=context_parallel.plan(lengths)",
            )
        o: Tensor = context_parallel.attention(query, key, value, **options)
        return o.transpose(1, 2).contiguous(), None
    if query.shape[0] != 1:
        raise UnsupportedError(f"packed documents need a batch of one, got {query.shape[0]}")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    packed: Tensor = context_parallel.attention_packed(q, k, v, context_parallel_plan, **options)
    return packed[None], None


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: Any = _NOT_GIVEN,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    kernel: str = "auto",
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as ``transformers.integrations.sdpa_attention.sdpa_attention_forward`` does.

    Args:
        module: the attention layer.
        query: ``[B, H, Sq, D]``.
        key: ``[B, HK, Sk, D]``.
        value: ``[B, HK, Sk, DV]``.
        attention_mask: what ``make_mask`` returned, or a mask of the caller: boolean, or added to the scores, or a
            ``BlockMask`` of torch or of this package, beside which no other rule counts.
        dropout: share of the probabilities that are dropped, from torch's default generator: in training, models pass
            ``attention_dropout`` of their configuration.
        scaling: factor on the scores. Default ``D ** -0.5``.
        sliding_window: keys that a row sees, its own among them; None or 0 for all. With a mask it is the mask's.
        softcap: bound on the size of the scores; None or 0 for none.
        is_causal: whether keys ahead are hidden. Default: what the layer says.
        s_aux: sinks ``[H]``.
        kernel: as in ``flash_attention``.
        **others: ``position_bias``, which expands to ``[B, H, Sq, Sk]``, is added to the scores; lengths of packed
            sequences (``cu_seq_lens_q``, ...) are those of transformers' FlashAttention, and come together. With a
            mask too, they must hide no key that it shows. What is known not to concern attention is ignored.

    Returns:
        ``[B, Sq, H, DV]``, and None for the weights.

    Raises:
        InputError: an argument breaks the contract above.
        UnsupportedError: weights (``output_attentions``) or a paged cache are asked for; a keyword is not known; None
            as a mask may mean two things; the model is known to go wrong, or branches on the name of its
            implementation; no kernel serves this call.
    """
    options: dict[str, Any]
    is_known = transformers_models.check_layer(module)
    _check_keywords(others)
    check_optional_flag("output_attentions", others.get("output_attentions"))
    for name, is_asked in (
        ("output_attentions", others.get("output_attentions")),
        ("cache", others.get("cache") is not None),
    ):
        if is_asked:
            raise UnsupportedError(f"{name} is not served by flashmoe_science", hint="attn_implementation='eager' does")
    position_bias = others.get("position_bias")
    if is_block_mask(attention_mask):
        _check_options(dropout, scaling, None, softcap, is_causal, kernel)
        _refuse_beside_blocks(others, dropout)
        options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "kernel": kernel}
        found: Tensor = call_by_names(flash_attention, _NAMES, query, key, value, mask=attention_mask, **options)
        return found.transpose(1, 2).contiguous(), None
    if sliding_window is _NOT_GIVEN:
        sliding_window = None
        if attention_mask is None and not is_known:
            _check_own_window(module, key)
    if attention_mask is None and is_causal is None and not is_known:
        _check_says_causal(module, query, others)
    check_kinds(
        query=query, key=key, value=value, attention_mask=attention_mask, position_bias=position_bias, s_aux=s_aux
    )
    _check_options(dropout, scaling, sliding_window, softcap, is_causal, kernel)
    if isinstance(position_bias, Tensor) and not position_bias.dtype.is_floating_point:
        check_numbers("position_bias", position_bias, ("query", query))  # added to a mask, it would be one of numbers
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "kernel": kernel}
    packed = others if _is_packed(others) else None
    _check_packing(query, attention_mask, others, is_packed=packed is not None)
    try:
        o = _attend(query, key, value, attention_mask, position_bias, dropout, sliding_window, causal, options, packed)
    except Exception:
        blame(_check_tensors, query, key, value, attention_mask, s_aux, position_bias)
        if packed:
            blame(_check_lengths, query, packed)
        raise
    return o, None


def _refuse_beside_blocks(others: dict[str, Any], dropout: float) -> None:
    """Raise ``UnsupportedError`` for what ``flash_attention`` does not serve beside a ``BlockMask``."""
    asked = {"position_bias": others.get("position_bias") is not None, "dropout": bool(dropout)}
    asked |= {name: others.get(name) is not None for name in _LENGTHS}
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedError(f"{name} is not served beside a BlockMask", hint="hand over a mask [B, 1, Sq, Sk]")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    dropout: float,
    sliding_window: int | None,
    causal: bool,
    options: dict[str, Any],
    packed: dict[str, Any] | None,
) -> Tensor:
    """Return the output, rows in the order of tokens."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if value.shape[2] != seqlen_k:  # causal, both are cut to the queries
        raise InputError(f"value must have as many keys as key, {seqlen_k}, got {value.shape[2]}")
    if is_all_seen(attention_mask):
        attention_mask, causal, sliding_window = None, False, None
    if attention_mask is not None and causal and is_prefix_mask(attention_mask, seqlen_q, seqlen_k):
        attention_mask = None
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
        position_bias = None if position_bias is None else position_bias[..., :seqlen_q]
        seqlen_k = seqlen_q
    rules = {
        "window": (sliding_window - 1, -1 if causal else sliding_window - 1) if sliding_window else (-1, -1),
        "causal": causal and seqlen_q > 1,
    }
    if packed:
        rules["causal"] = causal
        shape = (*query.shape[:3], seqlen_k)
        attention_mask, rules = _rest_of_mask(shape, query, attention_mask, position_bias, rules, packed)
        if attention_mask is None:
            return _attend_packed(query, key, value, {**options, **rules, "dropout_p": dropout}, packed)
    elif attention_mask is None and rules["causal"] and seqlen_q != seqlen_k:
        raise UnsupportedError(
            f"attention_mask None is not served for {seqlen_q} causal queries and {seqlen_k} keys: it does not say "
            "which keys each sees",
            hint="hand over a mask [B, 1, Sq, Sk]",
        )
    if attention_mask is None:
        options.update(rules)
    shape = (*query.shape[:3], seqlen_k)
    bias = None if attention_mask is None else as_bias("attention_mask", attention_mask, shape, query.dtype)
    if position_bias is not None:
        position_bias = as_bias("position_bias", position_bias, shape, query.dtype)
        bias = position_bias if bias is None else bias + position_bias
    o: Tensor
    if options["kernel"] == "auto" and not dropout and _decodes(query, key, value, options["sinks"], bias):
        # There is one row, at the last key, so that causal is nothing.
        asked = {name: value for name, value in options.items() if name not in ("causal", "kernel")}
        keys, values = key.transpose(1, 2), value.transpose(1, 2)
        o = call_by_names(flash_attention_with_kv_cache, _NAMES, query, keys, values, bias=bias, **asked)
    else:
        o = call_by_names(flash_attention, _NAMES, query, key, value, bias=bias, dropout_p=dropout, **options)
    return o.transpose(1, 2).contiguous()


def _check_tensors(query: Any, key: Any, value: Any, attention_mask: Any, s_aux: Any, position_bias: Any) -> None:
    check_attended({"query": (query, "B, H, Sq, D"), "key": (key, "B, HK, Sk, D"), "value": (value, "B, HK, Sk, DV")})
    first = ("query", query)
    check_mask("attention_mask", attention_mask, first)
    check_per_head("s_aux", s_aux, first, {"H": (query.shape[1],)})
    check_numbers("position_bias", position_bias, first)


def _check_options(dropout: Any, scaling: Any, sliding_window: Any, softcap: Any, is_causal: Any, kernel: Any) -> None:
    check_dropout("dropout", dropout)
    check_scale("scaling", scaling)
    if sliding_window is not None and (type(sliding_window) is not int or not 0 <= sliding_window < 2**63):
        raise InputError(f"sliding_window must be an integer of at least 0, or None, got {shown(sliding_window)}")
    if softcap is not None:
        check_softcap("softcap", softcap)
    check_optional_flag("is_causal", is_causal)
    check_kernel_name(kernel)


def _decodes(query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None) -> bool:
    """Whether there is one query a sequence, and nothing that only ``flash_attention`` does: gradients, casts."""
    tensors = [query, key, value, *(tensor for tensor in others if tensor is not None)]
    return (
        query.shape[2] == 1
        and query.device.type in ("cpu", "cuda")
        and query.dtype == key.dtype == value.dtype
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and not (query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type))
    )


def _is_packed(others: dict[str, Any]) -> bool:
    """Whether lengths of packed sequences are given, and then all of them. Raises ``InputError``."""
    packed = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k") if others.get(name) is not None]
    if not packed:
        return False
    for name in _LENGTHS:
        if others.get(name) is None:
            raise InputError(f"{name} must be given with {packed[0]}, got None")
    return True


def _check_lengths(query: Tensor, lengths: dict[str, Any]) -> None:
    check_starts(("query", query), {name: lengths[name] for name in _LENGTHS[:2]})
    for name in _LENGTHS[2:]:
        check_count(name, lengths[name])


def _check_keywords(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and name not in _UNDERSTOOD and name not in _IGNORED:
            raise UnsupportedError(
                f"{name} is not understood by flashmoe_science's attention, got {type(value).__name__}",
                hint="attn_implementation='eager' may serve it; leave the keyword out if it does not concern attention",
            )


def _check_own_window(module: torch.nn.Module, key: Tensor) -> None:
    """Raise ``UnsupportedError`` where a layer that no table has may keep a window to itself."""
    for owner in (module, getattr(module, "config", None)):
        for name in ("sliding_window", "window_size", "attention_window"):
            window = getattr(owner, name, None)
            if type(window) is int and 0 < window < key.shape[2]:
                raise UnsupportedError(
                    f"sliding_window must be given with a mask of None by a layer whose {name} is {window}",
                    hint="hand over sliding_window, None for a layer that sees all keys, or a mask",
                )


def _check_says_causal(module: torch.nn.Module, query: Tensor, others: dict[str, Any]) -> None:
    """Raise ``UnsupportedError`` where None as a mask may mean all keys, as for eager attention, or those behind."""
    is_sure = getattr(module, "config", None) is None or not getattr(module, "is_causal", True)
    if not is_sure and query.shape[2] > 1 and others.get("cu_seq_lens_q") is None:
        raise UnsupportedError(
            f"attention_mask None is not served for {type(module).__name__}, a layer of a model that was not tried: "
            "eager attention shows all keys then, and SDPA hides those ahead",
            hint="hand over is_causal, or a mask [B, 1, Sq, Sk]",
        )


def _check_packing(query: Tensor, mask: Any, others: dict[str, Any], *, is_packed: bool) -> None:
    """Raise where ``position_ids`` or ``seq_idx`` start a sequence that nothing else starts, as far as a CPU knows."""
    seq_idx = others.get("seq_idx")
    if not (is_packed or seq_idx is not None) or torch.compiler.is_compiling():
        return
    starts = others["cu_seq_lens_q"] if is_packed else None
    for name, step in (("position_ids", 1), ("seq_idx", 0)):
        ids = others.get(name)
        if not isinstance(ids, Tensor) or ids.shape != (1, query.shape[2]):
            continue
        if is_packed and not (ids.is_cpu and isinstance(starts, Tensor) and starts.is_cpu):
            continue  # all layers would wait for a GPU
        changes = {0, ids.shape[1], *((ids[0].diff() != step).nonzero()[:, 0] + 1).tolist()}
        if starts is not None and not changes <= set(starts.tolist()):
            raise InputError(
                f"cu_seq_lens_q must start a sequence wherever {name} does, at {sorted(changes)[:-1]}, "
                f"got {starts.tolist()}"
            )
        if name == "seq_idx" and starts is None and mask is None and len(changes) > 2:
            raise UnsupportedError(
                "seq_idx alone does not keep sequences apart",
                hint="hand over position_ids that restart, and use_cache=False; or cu_seq_lens_q and its like",
            )


def _rest_of_mask(
    shape: tuple[int, ...],
    query: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    rules: dict[str, Any],
    lengths: dict[str, Any],
) -> tuple[Tensor | None, dict[str, Any]]:
    """Return what hides keys beside lengths of packed sequences: a mask, which then knows of these, and the rules.

    Where a mask hides just what the rules do, or nothing, none is left. With a mask the rules are void, as always.
    The answer is kept with the mask, as all layers ask the same and on a GPU it has to be waited for.

    Raises:
        InputError: the mask keeps other sequences apart than the lengths do.
    """
    if query.shape[0] != 1 or position_bias is not None:
        raise UnsupportedError("packed sequences (cu_seq_lens_q) need a batch of one and no position_bias")
    if mask is None:
        return None, rules
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "cu_seq_lens_q and a mask are not compared while a model is compiled",
            hint="hand over one of them: without position_ids, or with a cache, transformers makes no mask",
        )
    _check_tensors(query, query, query, mask, None, None)
    _check_lengths(query, lengths)
    starts = [lengths[name] for name in _LENGTHS[:2]]
    question = (_version(mask), *((id(tensor), _version(tensor)) for tensor in starts), *rules.values())
    answers = mask.__dict__.setdefault("flashmoe_packed", {})
    if question not in answers:
        whole = _expanded("attention_mask", mask, shape)
        answers[question] = (_compare_with_mask(whole, *starts, **rules), starts)  # starts stay, so that ids do
    rest: tuple[Tensor | None, dict[str, Any]] = answers[question][0]
    return rest


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to, as far as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  torch has no public name for it


def _expanded(name: str, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a mask with all rows and columns. Raises ``InputError``."""
    heads = mask.shape[1] if mask.dim() > 3 else 1
    as_bias(name, mask, shape, torch.float32)
    return mask.expand(shape[0], heads, *shape[2:])


def _compare_with_mask(
    mask: Tensor, starts_q: Tensor, starts_k: Tensor, window: tuple[int, int], causal: bool
) -> tuple[Tensor | None, dict[str, Any]]:
    """Return what ``_rest_of_mask`` does of a mask ``[1, H or 1, Sq, Sk]``."""
    rows, columns = (torch.arange(size, device=mask.device) for size in mask.shape[-2:])
    of_row, of_column = (
        torch.bucketize(places, starts[1:].long(), right=True)
        for places, starts in ((rows, starts_q), (columns, starts_k))
    )
    # Places are counted from the end of a sequence, where queries and keys meet.
    last = starts_q.shape[0] - 1
    row_ends, column_ends = (
        places - starts.long()[(own + 1).clamp(max=last)]
        for places, starts, own in ((rows, starts_q, of_row), (columns, starts_k, of_column))
    )
    ahead = column_ends[None] - row_ends[:, None]
    apart = (of_row[:, None] != of_column[None]) | (of_row >= last)[:, None]
    left, right = window[0], 0 if causal else window[1]
    ruled = ~apart
    if left >= 0:
        ruled &= ahead >= -left
    if right >= 0:
        ruled &= ahead <= right

    is_bool = mask.dtype == torch.bool
    seen = mask if is_bool else mask > torch.finfo(mask.dtype).min / 2
    is_plain = is_bool or bool((mask == 0)[seen].all())
    # What is the same along every diagonal, such as a window, knows of no sequences.
    is_band = is_plain and bool((seen[..., 1:, 1:] == seen[..., :-1, :-1]).all())
    if not is_band and bool((seen & apart).any()):
        raise InputError(
            "cu_seq_lens_q must agree with attention_mask, which position_ids that restart make too, got lengths that "
            "hide keys which the mask shows"
        )
    rules = {"window": window, "causal": causal}
    free = {"window": (-1, -1), "causal": False}
    for visible, rest in ((ruled, rules), (~apart, free)):
        if is_plain and bool(((seen & ~apart) == visible).all()):
            return None, rest
    return mask.masked_fill(apart, False if is_bool else -torch.inf), free


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], lengths: dict[str, Any]
) -> Tensor:
    """Attend one row of packed sequences, ``[1, H, T, D]``."""
    o: Tensor = call_by_names(
        flash_attention_varlen,
        _NAMES,
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        *(lengths[name] for name in _LENGTHS),
        **options,
    )
    return o[None]

"""Our attention in Hugging Face transformers, behind ``attn_implementation="moe_science"``.

    from flashmoe_science.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

The name must not hold "flash": transformers takes such names for builds of flash-attn, looks for those, and replaces
the name in models that list others.

Causal masks and sliding windows are options of the kernel, so no mask is made for a batch without padding; padding and
every other pattern come as a bias. Packed documents go to the packed function, by their lengths. Softcap and sinks go
to the kernel. A single query a sequence takes the kernel that decodes, which reads the keys once for all query heads
that share them.

Source: transformers 5, integrations/sdpa_attention.py and masking_utils.py, for what is asked of an implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    check_dropout,
    check_kinds,
    check_mask,
    check_numbers,
    check_optional_flag,
    check_per_head,
    check_scale,
    check_softcap,
)
from .transformers_masks import is_all_seen, is_prefix_mask, make_mask, make_no_mask
from .transformers_packing import (
    LENGTHS,
    PackedMask,
    are_given,
    check_lengths,
    check_packing,
    check_sequences,
    lengths_of_positions,
    positions_of,
    refuse_leaks,
    rest_of_mask,
)
from .transformers_ranks import check_positions
from .transformers_sparse import with_chosen_keys

if TYPE_CHECKING:
    from ..distributed import ContextParallel, PackedPlan

# Keywords that models hand on to every layer, and that say nothing of what attention computes.
_IGNORED = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_hidden_states",
        "output_router_logits",
        "labels",
        "shift_labels",
        "num_items_in_batch",
        "return_dict",
        "deterministic",
        "logits_to_keep",
    }
)
_UNDERSTOOD = frozenset({*LENGTHS, "position_bias", "output_attentions", "cache", "seq_idx"})
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
            ``shard`` gives each rank, and for packed documents with their plan as ``context_parallel_plan``. It is
            given ``shift_labels`` beside ``labels``: of ``labels`` alone it misses those of the next rank. For causal
            language models without a cache, a mask, or dropout.

    Raises:
        InputError: the name is empty or no text, or transformers would take it for another implementation; there is no
            such kernel, or one is given beside ``context_parallel``, which chooses it.
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
        if kernel != "auto":
            raise InputError(
                f'kernel must be "auto" beside context_parallel, got {kernel!r}',
                hint="calls over ranks choose their kernels themselves",
            )
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
        InputError: an argument breaks the contract, or ``position_ids`` are not those that ``shard`` gives this rank.
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
    check_positions(context_parallel, context_parallel_plan, others.get("position_ids"), query.shape[2], module)
    if context_parallel_plan is None:
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
            mask too, they must hide no key that it shows. Without either, ``position_ids`` ``[B or 1, S]`` that restart
            start sequences of causal queries. ``indices`` and ``block_indices`` are the keys that a layer chose, as in
            ``with_chosen_keys``. What is known not to concern attention is ignored.

    Returns:
        ``[B, Sq, H, DV]``, and None for the weights.

    Raises:
        InputError: an argument breaks the contract above.
        UnsupportedError: weights (``output_attentions``) or a paged cache are asked for; a keyword is not known; None
            as a mask may mean two things; ``position_ids`` restart where a mask that was made without them shows one
            document the one before it, or skip or repeat where nothing says whether that starts a document;
            ``seq_idx`` starts a sequence that nothing keeps apart; the model is known to go wrong, or branches on the
            name of its implementation; no kernel serves this call.
    """
    options: dict[str, Any]
    is_known = transformers_models.check_layer(module)
    query, attention_mask = with_chosen_keys(module, query, key, attention_mask, others, dropout=dropout)
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
    plain_mask = None if isinstance(attention_mask, PackedMask) else attention_mask
    check_kinds(query=query, key=key, value=value, attention_mask=plain_mask, position_bias=position_bias, s_aux=s_aux)
    _check_options(dropout, scaling, sliding_window, softcap, is_causal, kernel)
    if isinstance(position_bias, Tensor) and not position_bias.dtype.is_floating_point:
        check_numbers("position_bias", position_bias, ("query", query))  # added to a mask, it would be one of numbers
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "kernel": kernel}
    packed = {name: others[name] for name in LENGTHS} if are_given(others) else None
    if packed:
        check_packing(query, others)
    documents = functools.partial(_find_documents, module, positions_of(attention_mask, others))
    check_apart = functools.partial(check_sequences, others.get("seq_idx"), query)
    try:
        o = _attend(
            query,
            key,
            value,
            attention_mask,
            position_bias,
            dropout,
            sliding_window,
            causal,
            options,
            packed,
            documents,
            check_apart,
        )
    except Exception:
        blame(_check_tensors, query, key, value, plain_mask, s_aux, position_bias)
        if packed:
            blame(check_lengths, query, packed)
        raise
    return o, None


def _refuse_beside_blocks(others: dict[str, Any], dropout: float) -> None:
    """Raise ``UnsupportedError`` for what ``flash_attention`` does not serve beside a ``BlockMask``."""
    asked = {"position_bias": others.get("position_bias") is not None, "dropout": bool(dropout)}
    asked |= {name: others.get(name) is not None for name in LENGTHS}
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
    find_documents: Callable[..., dict[str, Any] | None],
    check_apart: Callable[..., None],
) -> Tensor:
    """Return the output, rows in the order of tokens."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if value.shape[2] != seqlen_k:  # causal, both are cut to the queries
        raise InputError(f"value must have as many keys as key, {seqlen_k}, got {value.shape[2]}")
    if isinstance(attention_mask, PackedMask):
        documents = None if position_bias is not None else attention_mask.documents(query, key, packed)
        if documents is not None:
            check_apart(seqlen_k, documents[LENGTHS[0]])
            rules = {"window": attention_mask.window, "causal": True}
            return _attend_packed(query, key, value, {**options, **rules, "dropout_p": dropout}, documents)
        attention_mask = attention_mask.dense()
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
        attention_mask, rules = rest_of_mask(shape, query, attention_mask, position_bias, rules, packed)
        if attention_mask is None:
            return _attend_packed(query, key, value, {**options, **rules, "dropout_p": dropout}, packed)
    elif rules["causal"] and (documents := find_documents(query, key, attention_mask, position_bias)) is not None:
        check_apart(seqlen_k, documents[LENGTHS[0]])
        return _attend_packed(query, key, value, {**options, **rules, "dropout_p": dropout}, documents)
    elif attention_mask is None and rules["causal"] and seqlen_q != seqlen_k:
        raise UnsupportedError(
            f"attention_mask None is not served for {seqlen_q} causal queries and {seqlen_k} keys: it does not say "
            "which keys each sees",
            hint="hand over a mask [B, 1, Sq, Sk]",
        )
    check_apart(seqlen_k, mask=attention_mask)
    if attention_mask is None:
        options = {**options, **rules}
    return _attend_rows(query, key, value, attention_mask, position_bias, dropout, options)


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> Tensor:
    """Attend every row of a batch by itself, with what is added to the scores."""
    shape = (*query.shape[:3], key.shape[2])
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


def _find_documents(
    module: torch.nn.Module, positions: Any, query: Tensor, key: Tensor, mask: Tensor | None, position_bias: Any
) -> dict[str, Any] | None:
    """Return the lengths of documents that only positions tell of, as with a cache, of causal queries.

    Raises:
        UnsupportedError: no kernel keeps them apart.
    """
    if mask is not None:
        refuse_leaks(mask, positions, query.shape[2])
        return None
    if query.shape[2] != key.shape[2]:
        return None
    documents = lengths_of_positions(positions, id(module), query.shape[0], query.shape[2], query.device)
    if documents is not None and position_bias is not None:
        raise UnsupportedError("position_ids that restart need use_cache=False beside a position_bias")
    return documents


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


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], lengths: dict[str, Any]
) -> Tensor:
    """Attend packed sequences, ``[B, H, S, D]`` with the tokens of all rows one after another."""
    o: Tensor = call_by_names(
        flash_attention_varlen,
        _NAMES,
        *(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)),
        *(lengths[name] for name in LENGTHS),
        **options,
    )
    return o.view(query.shape[0], query.shape[2], *o.shape[1:])

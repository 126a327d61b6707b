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
from typing import Any

import torch
from torch import Tensor

from ..attention.api import flash_attention
from ..attention.decode.api import flash_attention_with_kv_cache
from ..attention.forward.plan import check_kernel_name
from ..attention.varlen import flash_attention_varlen
from ..errors import InputError, MissingPackageError, UnsupportedError, shown
from .arguments import (
    as_bias,
    blame,
    call_by_names,
    check_attended,
    check_count,
    check_dropout,
    check_mask,
    check_numbers,
    check_optional_flag,
    check_per_head,
    check_scale,
    check_softcap,
    check_starts,
)

_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
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


def register(name: str = "moe_science", *, kernel: str = "auto") -> str:
    """Let models be made with ``attn_implementation=name``, and return the name.

    Args:
        name: of the implementation.
        kernel: that serves it, as in ``flash_attention``: one name for prompts and single tokens.

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


def make_mask(*arguments: Any, local_size: int | None = None, **options: Any) -> Tensor | None:
    """Return what is added to the scores, ``[B, 1, Sq, Sk]``, or None where causal, window and lengths say it all.

    The arguments are those of ``transformers.masking_utils.sdpa_mask``.
    """
    from transformers.masking_utils import sdpa_mask

    config = options.get("config")
    # sdpa_mask makes a mask as soon as a window hides a key, as SDPA has no windows. A chunk, which comes under the
    # same name, is no window.
    is_window = local_size is not None and local_size == getattr(config, "sliding_window", None)
    if (
        is_window
        and local_size != getattr(config, "attention_chunk_size", None)
        and options.get("allow_is_causal_skip")
    ):
        local_size = None
    mask: Tensor | None = sdpa_mask(*arguments, local_size=local_size, **options)
    if mask is None or mask.dtype != torch.bool:
        return mask
    return as_bias("attention_mask", mask, tuple(mask.shape), options.get("dtype") or torch.float32)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
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
        attention_mask: what ``make_mask`` returned, or a mask of the caller: boolean, or added to the scores.
        dropout: share of the probabilities that are dropped, from torch's default generator: in training, models pass
            ``attention_dropout`` of their configuration.
        scaling: factor on the scores. Default ``D ** -0.5``.
        sliding_window: keys that a row sees, its own among them; None or 0 for all. With a mask it is the mask's.
        softcap: bound on the size of the scores; None or 0 for none.
        is_causal: whether keys ahead are hidden. Default: what the layer says.
        s_aux: sinks ``[H]``.
        kernel: as in ``flash_attention``.
        **others: ``position_bias``, which expands to ``[B, H, Sq, Sk]``, is added to the scores; lengths of packed
            sequences (``cu_seq_lens_q``, ...) are those of transformers' FlashAttention, and come together; what does
            not concern attention is ignored.

    Returns:
        ``[B, Sq, H, DV]``, and None for the weights.

    Raises:
        InputError: an argument breaks the contract above.
        UnsupportedError: weights (``output_attentions``) or a paged cache are asked for; no kernel serves this call.
    """
    check_optional_flag("output_attentions", others.get("output_attentions"))
    for name, is_asked in (
        ("output_attentions", others.get("output_attentions")),
        ("cache", others.get("cache") is not None),
    ):
        if is_asked:
            raise UnsupportedError(f"{name} is not served by flashmoe_science", hint="attn_implementation='eager' does")
    position_bias = others.get("position_bias")
    _check_options(dropout, scaling, sliding_window, softcap, is_causal, kernel)
    if position_bias is not None and isinstance(position_bias, Tensor) and position_bias.dtype == torch.bool:
        check_numbers("position_bias", position_bias, ("query", query))  # a mask may be boolean, and this may not
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "kernel": kernel}
    packed = others if _is_packed(others) else None
    try:
        o = _attend(query, key, value, attention_mask, position_bias, dropout, sliding_window, causal, options, packed)
    except Exception:
        blame(_check_tensors, query, key, value, attention_mask, s_aux, position_bias)
        if packed:
            blame(_check_lengths, query, packed)
        raise
    return o, None


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
    if attention_mask is None:
        right = -1 if causal else (sliding_window or 0) - 1
        options["window"] = (sliding_window - 1, right) if sliding_window else (-1, -1)
        options["causal"] = causal and seqlen_q > 1
    if packed:
        return _attend_packed(query, key, value, {**options, "causal": causal, "dropout_p": dropout}, packed)
    shape = (*query.shape[:3], seqlen_k)
    bias = None if attention_mask is None else as_bias("attention_mask", attention_mask, shape, query.dtype)
    if position_bias is not None:
        position_bias = as_bias("position_bias", position_bias, shape, query.dtype)
        bias = position_bias if bias is None else bias + position_bias
    if options.get("causal") and seqlen_k > seqlen_q:
        # An empty static cache is filled: keys behind the last query are not there yet (see make_mask).
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
        bias = None if bias is None else bias[..., :seqlen_q]
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


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], lengths: dict[str, Any]
) -> Tensor:
    """Attend one row of packed sequences, ``[1, H, T, D]``."""
    if query.shape[0] != 1 or "window" not in options or lengths.get("position_bias") is not None:
        raise UnsupportedError("packed sequences (cu_seq_lens_q) need a batch of one, no mask and no position_bias")
    o: Tensor = call_by_names(
        flash_attention_varlen,
        _NAMES,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        *(lengths[name] for name in _LENGTHS),
        **options,
    )
    return o[None]

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
from ..attention.cache_api import flash_attention_with_kv_cache
from ..attention.plan import check_kernel_name
from ..attention.varlen import flash_attention_varlen
from ..errors import InputError, MissingPackageError, UnsupportedError
from .sdpa import as_bias


def register(name: str = "moe_science", *, kernel: str = "auto") -> str:
    """Let models be made with ``attn_implementation=name``, and return the name.

    Args:
        name: of the implementation.
        kernel: that serves it, as in ``flash_attention``: one name for prompts and single tokens.

    Raises:
        InputError: transformers would take the name for another implementation; there is no such kernel.
        MissingPackageError: transformers is not installed, or too old.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingPackageError(
            f"transformers cannot be imported: {error}", hint='pip install "transformers>=5.23"'
        ) from error

    if "flash" in name or name in ("eager", "sdpa") or "|" in name or "/" in name:
        raise InputError(
            f'name must not hold "flash", "|" or "/", nor be eager or sdpa, got {name!r}',
            hint="transformers takes such names for implementations of its own",
        )
    check_kernel_name(kernel)
    AttentionInterface.register(name, functools.partial(attend, kernel=kernel))
    AttentionMaskInterface.register(name, make_mask)
    return name


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
    return as_bias(mask, tuple(mask.shape), options.get("dtype") or torch.float32)


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
        sliding_window: keys that a row sees, its own among them.
        softcap: bound on the size of the scores.
        is_causal: whether keys ahead are hidden. Default: what the layer says.
        s_aux: sinks ``[H]``.
        kernel: as in ``flash_attention``.
        **others: ``position_bias`` is added to the scores; lengths of packed sequences (``cu_seq_lens_q``, ...) are
            those of transformers' FlashAttention; what does not concern attention is ignored.

    Returns:
        ``[B, Sq, H, DV]``, and None for the weights.

    Raises:
        InputError: dropout is not at least 0 and less than 1.
        UnsupportedError: weights (``output_attentions``) or a paged cache are asked for.
    """
    for name in ("output_attentions", "cache"):
        if others.get(name):
            raise UnsupportedError(f"{name} is not served by flashmoe_science", hint="attn_implementation='eager' does")
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "kernel": kernel}
    if attention_mask is None:
        right = -1 if causal else (sliding_window or 0) - 1
        options["window"] = (sliding_window - 1, right) if sliding_window else (-1, -1)
        options["causal"] = causal and seqlen_q > 1
    if others.get("cu_seq_lens_q") is not None:
        return _attend_packed(query, key, value, {**options, "causal": causal, "dropout_p": dropout}, others), None
    if options.get("causal") and seqlen_k > seqlen_q:
        # An empty static cache is filled: keys behind the last query are not there yet (see make_mask).
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
        seqlen_k = seqlen_q
    shape = (*query.shape[:3], seqlen_k)
    bias = None if attention_mask is None else as_bias(attention_mask, shape, query.dtype)
    position_bias = others.get("position_bias")
    if position_bias is not None:
        position_bias = position_bias[..., :seqlen_k].expand(shape)
        bias = position_bias if bias is None else bias + position_bias
    o: Tensor
    if kernel == "auto" and not dropout and _decodes(query, key, value, s_aux, bias):
        # There is one row, at the last key, so that causal is nothing.
        asked = {name: value for name, value in options.items() if name not in ("causal", "kernel")}
        o = flash_attention_with_kv_cache(query, key.transpose(1, 2), value.transpose(1, 2), bias=bias, **asked)
    else:
        o = flash_attention(query, key, value, bias=bias, dropout_p=dropout, **options)
    return o.transpose(1, 2).contiguous(), None


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


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], lengths: dict[str, Any]
) -> Tensor:
    """Attend one row of packed sequences, ``[1, H, T, D]``."""
    if query.shape[0] != 1 or "window" not in options or lengths.get("position_bias") is not None:
        raise UnsupportedError("packed sequences (cu_seq_lens_q) need a batch of one, no mask and no position_bias")
    o: Tensor = flash_attention_varlen(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        lengths["cu_seq_lens_q"],
        lengths["cu_seq_lens_k"],
        lengths["max_length_q"],
        lengths["max_length_k"],
        **options,
    )
    return o[None]

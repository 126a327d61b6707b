"""Masks of transformers' models: which are options of the kernel, and which are added to the scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from . import transformers_models
from .arguments import as_bias
from .transformers_packing import pack_mask, positions_of_caller, remember

_PREFIX = "flashmoe_prefix"  # of a mask: causal from the first key on, and a window that the layer hands over
_SIZES = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask")
_ALL = "flashmoe_all"  # of a mask: it hides nothing


def make_mask(*arguments: Any, local_size: int | None = None, **options: Any) -> Tensor | None:
    """Return what is added to the scores, ``[B, 1, Sq, Sk]``, or None where causal and window say it all.

    A mask that hides nothing says so of itself: of None, a layer would say whether it is causal. That of packed
    documents is a ``PackedMask`` where it may be, which has no elements until they are asked for.

    The arguments are those of ``transformers.masking_utils.sdpa_mask``.

    Raises:
        UnsupportedError: models of this type are known to go wrong.
    """
    skipped = transformers_models.skips(options.get("config"))
    named = {**dict(zip(_SIZES, arguments, strict=False)), **options, "positions": positions_of_caller()}

    def make(**changes: Any) -> Any:
        mask = _make_mask(skipped, *arguments, local_size=local_size, **{**options, **changes})
        return mask if mask is None or is_all_seen(mask) else remember(mask, named)

    packed = pack_mask(make, named)
    return make() if packed is None else packed


def _make_mask(
    skipped: tuple[str, ...], *arguments: Any, local_size: int | None = None, **options: Any
) -> Tensor | None:
    """Return what ``make_mask`` does, with all elements."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    config = options.get("config")
    if "causal" not in skipped:  # nobody knows what a layer makes of None
        made: Tensor | None = eager_mask(*arguments, local_size=local_size, **options)
        return _all_seen(*arguments, **options) if made is None else made
    # sdpa_mask makes a mask as soon as a window hides a key, as SDPA has no windows. A chunk, which comes under the
    # same name, is no window.
    is_window = local_size is not None and local_size == getattr(config, "sliding_window", None)
    is_window = is_window and local_size != getattr(config, "attention_chunk_size", None) and "window" in skipped
    least = None if is_window and options.get("allow_is_causal_skip") else local_size
    mask: Tensor | None = sdpa_mask(*arguments, local_size=least, **options)
    if mask is None and options.get("allow_is_bidirectional_skip"):
        return _all_seen(*arguments, **options)
    is_prefix = mask is None and _is_prefix(*arguments, **options)
    if is_prefix:
        # An empty static cache is filled. The layer may cut the queries, so that None would say too little.
        mask = sdpa_mask(*arguments, local_size=local_size, **{**options, "allow_is_causal_skip": False})
    if mask is None or mask.dtype != torch.bool:
        return mask
    bias = as_bias("attention_mask", mask, tuple(mask.shape), options.get("dtype") or torch.float32)
    if is_prefix:
        setattr(bias, _PREFIX, True)
    return bias


def make_no_mask(*arguments: Any, local_size: int | None = None, **options: Any) -> None:
    """Return None: layers hand over their windows, and the plan of a packed batch keeps its documents apart.

    Raises:
        UnsupportedError: a mask is given, tokens see others ahead, or models of this type make masks of their own.
    """
    config = options.get("config")
    if options.get("attention_mask") is not None:  # of all ones too: ranks must refuse alike
        raise UnsupportedError(
            "a mask is not served where sequences are split over ranks",
            hint="leave attention_mask out, and make padding a document of its own in the plan",
        )
    skipped = transformers_models.skips(config)
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    is_window = local_size is None or ("window" in skipped and local_size == window and local_size != chunk)
    if "causal" not in skipped or not is_window or _looks_ahead(*arguments, **options):
        raise UnsupportedError("this model's masks are not served where sequences are split over ranks")


def _looks_ahead(*sizes: Any, mask_function: Any = None, device: Any = None, **options: Any) -> bool:
    """Whether a token sees the one behind it, as those of images do. A GPU is waited for."""
    named = {**dict(zip(_SIZES, sizes, strict=False)), **options}
    if mask_function is None:
        return False
    rows = torch.arange(int(named["q_length"]) - 1, device=device)[None]
    sequences = torch.arange(int(named["batch_size"]), device=device)[:, None]
    return bool(torch.as_tensor(mask_function(sequences, torch.zeros_like(rows), rows, rows + 1)).any())


def _is_prefix(*sizes: Any, **options: Any) -> bool:
    """Whether a mask that is None means that row i sees the first i + 1 keys of more."""
    named = {**dict(zip(_SIZES, sizes, strict=False)), **options}
    is_causal = bool(named.get("allow_is_causal_skip", True)) and not named.get("allow_is_bidirectional_skip")
    return is_causal and named["q_length"] > 1 and named["q_length"] != named["kv_length"]


def _all_seen(*sizes: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
    """Return a mask that hides nothing, and takes no memory."""
    named = {**dict(zip(_SIZES, sizes, strict=False)), **options}
    shape = (named["batch_size"], 1, named["q_length"], named["kv_length"])
    mask = torch.zeros((), dtype=dtype or torch.float32, device=device).expand(shape)
    setattr(mask, _ALL, True)
    return mask


def is_all_seen(mask: Any) -> bool:
    """Whether ``make_mask`` made a mask that hides nothing."""
    return bool(getattr(mask, _ALL, False))


def is_prefix_mask(mask: Any, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether ``make_mask`` made a mask for an empty static cache, and nobody has cut it since."""
    return bool(getattr(mask, _PREFIX, False)) and tuple(mask.shape[-2:]) == (seqlen_q, seqlen_k)

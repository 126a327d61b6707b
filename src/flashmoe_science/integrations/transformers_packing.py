"""Packed documents in models of transformers: where they start, and masks that need no memory to say it.

transformers tells of documents in three ways: positions that restart, lengths (``cu_seq_lens_q``, ...), and a mask that
it makes of positions where there is neither a cache nor a mask of the caller. All end as lengths here.

Source: transformers 5.23 and 5.24, masking_utils.py, for the functions that masks are made of.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError
from ..gpu.subclasses import is_untraced
from .arguments import as_bias, check_attended, check_count, check_mask, check_starts

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_RESTART = "position_ids restart, and documents would see each other"
_COMPILED = "compiled models need cu_seq_lens_q and its like, and use_cache=True"
_OFFSET = "flashmoe_offset"  # of a mask: row i is that of key i + offset
_POSITIONS = "flashmoe_positions"  # of a mask: those of its rows
# Methods that say something of a mask without a look at its elements. Dynamo asks most of them.
_METHODS = (
    "dim", "size", "stride", "storage_offset", "untyped_storage", "numel", "nelement", "element_size", "get_device",
    "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_signed", "_is_view",
    "_is_zerotensor", "__len__",
)  # fmt: skip
_LOOKS = {getattr(Tensor, name) for name in _METHODS}
_MOVES = (Tensor.to, Tensor.detach)
_BASE: Any = getattr(Tensor, "_base")  # noqa: B009  its type is that of a tensor's


class PackedMask(Tensor):
    """A mask ``[B, 1, S, S]`` of packed documents that is made when its elements are asked for.

    Its storage is one number. Every function of torch sees the true mask; from then on our attention reads that one
    too, as the function may have written to it.

    Attributes:
        starts: where documents start in the B * S tokens of all rows, and where the last one ends, int32.
        longest: tokens of the longest document.
        window: keys that a row sees, as ``flash_attention`` has it.
        make: makes the true mask.
        made: the true mask, once it was asked for.
    """

    starts: Tensor
    longest: int
    window: tuple[int, int]
    make: Callable[[], Tensor]
    made: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with the true mask."""
        kwargs = kwargs or {}
        is_getter = getattr(func, "__name__", "") == "__get__"
        if is_getter or func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  has no public name
                found = func(*args, **kwargs)
            if not (is_getter and isinstance(found, Tensor)) or func == _BASE.__get__:
                return found
        if func in _MOVES and type(args[0]) is PackedMask and not torch.compiler.is_compiling():
            return args[0].moved(func, args[1:], kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(PackedMask, PackedMask.dense, (args, kwargs))  # noqa: SLF001
        return func(*args, **kwargs)

    @classmethod
    def of(
        cls,
        named: Mapping[str, Any],
        places: tuple[Tensor, int],
        window: tuple[int, int] | None,
        make: Callable[[], Tensor],
    ) -> PackedMask:
        """Return the mask for the arguments of ``sdpa_mask``, with what ``_places`` returned."""
        device = torch.device(named.get("device") or "cpu")
        plain = torch.zeros((), dtype=named.get("dtype") or torch.float32, device=device)
        plain = plain.expand(named["batch_size"], 1, named["q_length"], named["kv_length"])
        return cls._around(plain, places, window or (-1, -1), make)

    @classmethod
    def _around(
        cls, plain: Tensor, places: tuple[Tensor, int], window: tuple[int, int], make: Callable[[], Tensor]
    ) -> PackedMask:
        mask = plain.as_subclass(cls)
        mask.starts, mask.longest = places[0].to(plain.device), places[1]
        mask.window, mask.make, mask.made = window, make, None
        return mask

    def moved(self, move: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the mask on another device, or detached, as layers on several devices and checkpoints ask for it."""
        if self.made is not None:
            true: Tensor = move(self.made, *args, **kwargs)
            return true
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  has no public name
            plain: Tensor = move(self, *args, **kwargs)
            if plain is self:
                return self
            plain = plain.as_subclass(Tensor)
        return self._around(
            plain, (self.starts, self.longest), self.window, lambda: move(self.dense(), *args, **kwargs)
        )

    def dense(self) -> Tensor:
        """Return the true mask."""
        if self.made is None:
            self.made = self.make()
        return self.made

    def documents(self, query: Tensor, key: Tensor, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the lengths of documents, or None where they do not say it all: the call needs the true mask.

        Args:
            query: ``[B, H, S, D]``.
            key: ``[B, HK, S, D]``.
            given: lengths of the caller, or None.

        Raises:
            InputError: the caller's lengths keep other documents apart.
        """
        if self.made is not None or (query.shape[0], query.shape[2], key.shape[2]) != (self.shape[0], *self.shape[2:]):
            return None
        if given is None:
            return _named(self.starts, self.longest)
        if query.shape[0] != 1 or torch.compiler.is_compiling():
            return None  # is refused
        check_lengths(query, given)
        starts = [given[name] for name in LENGTHS[:2]]
        question = tuple((id(tensor), _version(tensor)) for tensor in starts)
        answers = self.__dict__.setdefault("answers", {})
        if question not in answers:  # on a GPU it has to be waited for, once a call of the model
            answers[question] = (self._agrees(*(tensor.tolist() for tensor in starts)), starts)
        return _named(self.starts, self.longest) if answers[question][0] else None

    def _agrees(self, starts_q: list[int], starts_k: list[int]) -> bool:
        """Whether lengths keep no other documents apart than the mask does."""
        own = self.starts.tolist()
        return starts_q == starts_k and starts_q == sorted(starts_q) and {0, own[-1]} <= set(starts_q) <= set(own)


def pack_mask(make: Callable[..., Tensor], named: Mapping[str, Any]) -> PackedMask | None:
    """Return the mask of packed documents, or None where there are none, or it may hide or show other keys too.

    Args:
        make: makes the true mask, with changes to its arguments.
        named: the arguments of ``transformers.masking_utils.sdpa_mask``, and ``positions`` of its caller.
    """
    batch, seqlen, function = named["batch_size"], named["q_length"], named.get("mask_function")
    if torch.compiler.is_compiling() or named.get("use_vmap") or seqlen != named["kv_length"] or seqlen < 2:
        return None
    ids, window = _find_packing(function)
    padding = named.get("attention_mask")
    if ids is not None and _is_readable(ids) and ids.shape == (batch, seqlen) and padding is None:
        starts = torch.nn.functional.pad(ids.diff() != 0, (1, 0), value=True)
        return PackedMask.of(named, _places(starts), window, make)
    # With a cache, or with a mask of the caller, transformers tells its function of no documents.
    window = None if ids is not None else _window_of(function)
    lengths = None if window is None else lengths_of_positions(named.get("positions"), window, batch, seqlen)
    if lengths is None or not (padding is None or bool(padding[:, :seqlen].all())):
        return None
    if int(named.get("q_offset", 0)) != int(named.get("kv_offset", 0)):
        return None
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    ids = _starts(named["positions"].expand(batch, -1)).cumsum(-1)
    function = and_masks(function, packed_sequence_mask_function(ids))
    make = functools.partial(make, mask_function=function, allow_is_causal_skip=False)
    return PackedMask.of(named, (lengths[LENGTHS[0]], lengths[LENGTHS[2]]), window, make)


def positions_of_caller() -> Any:
    """Return the ``position_ids`` of the function of transformers that asks for a mask, or None.

    It hands them on in one case of several, and some models hand them to no layer: nobody else would know.
    """
    frame = None if torch.compiler.is_compiling() else inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "transformers.masking_utils":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("position_ids")


def _find_packing(function: Any) -> tuple[Tensor | None, tuple[int, int] | None]:
    """Return the document ``[B, S]`` of each token and the window, if a function of masks has just these."""
    ids = within = None
    parts = _variables(function, "and_masks").get("mask_functions", ())
    for part in parts:
        ids = _variables(part, "packed_sequence_mask_function").get("packed_sequence_mask", ids)
        within = _variables(part, "remap_positions_for_packed_sequence").get("mask_function", within)
    window = _window_of(within) if len(parts) == 2 else None
    return (None, None) if window is None else (ids, window)


def _window_of(function: Any) -> tuple[int, int] | None:
    """Return the window of a function of masks that are causal and no more; None for another function."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return -1, -1
    overlay, *rest = _variables(function, "and_masks").get("mask_functions", (None,))
    window = _variables(overlay, "sliding_window_overlay").get("sliding_window")
    if rest != [masking_utils.causal_mask_function] or type(window) is not int or window < 1:
        return None
    return window - 1, -1


def _variables(function: Any, maker: str) -> dict[str, Any]:
    """Return what a function holds that ``maker`` of transformers made, or nothing for another function."""
    is_theirs = getattr(function, "__module__", "") == "transformers.masking_utils"
    if not is_theirs or not function.__qualname__.startswith(f"{maker}.<locals>."):
        return {}
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _places(starts: Tensor) -> tuple[Tensor, int]:
    """Return where documents of ``[B, S]`` tokens start and the last one ends, and the tokens of the longest."""
    places = torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())
    return places.int(), int(places.diff().max())


def _named(starts: Tensor, longest: int) -> dict[str, Any]:
    return dict(zip(LENGTHS, (starts, starts, longest, longest), strict=True))


def _starts(positions: Tensor) -> Tensor:
    """Return which tokens ``[B, S]`` start a document: positions fall, or the first one of all comes again.

    A position that is skipped starts none: models learn longer contexts so.
    """
    step, first = positions.diff(), positions.amin(-1, keepdim=True)
    new = (step < 0) | ((step == 0) & (positions[:, 1:] == first))
    return torch.nn.functional.pad(new, (1, 0), value=True)


def lengths_of_positions(
    positions: Any, asking: Any, batch: int, seqlen: int, device: torch.device | None = None
) -> dict[str, Any] | None:
    """Return the lengths of documents by positions ``[B or 1, S]``, or None where there is one document a row.

    All layers ask for the same tensor: on a GPU it has to be waited for, once a call of the model. Where a value
    cannot be read, while a model is compiled or a CUDA graph captured, positions that restart fail when it runs.
    """
    if not _are_positions(positions, batch, seqlen):
        return None
    if torch.compiler.is_compiling() or _is_captured(positions):
        torch._assert_async(~_starts(positions)[:, 1:].any(), f"{_RESTART}: {_COMPILED}")  # noqa: SLF001  no public name
        return None
    if not _is_readable(positions):
        return None
    known = positions.__dict__.get("flashmoe_documents")
    # Who asks again belongs to the next call: versions of inference tensors say nothing.
    if known is None or known[:2] != (_version(positions), batch) or known[2] == asking:
        starts = _starts(positions.expand(batch, -1))
        found = _places(starts) if bool(starts[:, 1:].any()) else None
        known = positions.__dict__["flashmoe_documents"] = (_version(positions), batch, asking, found)
    places: tuple[Tensor, int] | None = known[3]
    return None if places is None else _named(places[0].to(device or positions.device), places[1])


def restarts(positions: Any, module: Any) -> bool:
    """Whether positions ``[B, S]`` start a second document in a row."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return False
    return lengths_of_positions(positions, id(module), *positions.shape) is not None


def _are_positions(positions: Any, batch: int, seqlen: int) -> bool:
    """Whether there is one position a token. Models of images and videos have several."""
    return (
        isinstance(positions, Tensor)
        and not positions.dtype.is_floating_point
        and positions.dtype != torch.bool
        and positions.dim() == 2
        and positions.shape[0] in (1, batch)
        and positions.shape[1] == seqlen
    )


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_readable(tensor: Tensor) -> bool:
    is_traced = torch._C._is_tracing()  # noqa: SLF001  torch.jit.is_tracing is not typed
    return is_untraced(tensor) and not tensor.is_meta and not is_traced


def remember(mask: Tensor, named: Mapping[str, Any]) -> Tensor:
    """Return a mask made of ``sdpa_mask``'s arguments: it knows its rows' positions, and the key of each."""
    if not torch.compiler.is_compiling():
        setattr(mask, _OFFSET, named.get("q_offset", 0) - named.get("kv_offset", 0))
        setattr(mask, _POSITIONS, named.get("positions"))
    return mask


def positions_of(mask: Any, others: Mapping[str, Any]) -> Any:
    """Return the positions that a layer hands over, or those that its mask was made with."""
    handed = others.get("position_ids")
    return getattr(mask, _POSITIONS, None) if handed is None else handed


def refuse_leaks(mask: Any, positions: Any, seqlen: int) -> None:
    """Raise ``UnsupportedError`` where a mask of ours shows a document's first token the one before it.

    transformers keeps documents apart only without a cache and without a mask of the caller. Padding may have any
    position: neither it nor who cannot see it is looked at.
    """
    offset = getattr(mask, _OFFSET, None)
    if (
        offset is None
        or seqlen == 1
        or not mask.is_floating_point()
        or torch.compiler.is_compiling()
        or mask.shape[-2] != seqlen
    ):
        return
    if not _are_positions(positions, mask.shape[0], seqlen) or _is_captured(positions) or not _is_readable(positions):
        return
    known = mask.__dict__.get("flashmoe_leaks")
    if known is None or known[0] is not positions or known[1] != _version(positions):
        rows = torch.arange(1, seqlen, device=mask.device)
        columns = rows + int(offset)
        rows, columns = rows[columns < mask.shape[-1]], columns[columns < mask.shape[-1]]
        added = torch.minimum(mask[:, 0, rows, columns], mask[:, 0, rows, columns - 1])
        shown = added > torch.finfo(added.dtype).min / 2
        leaks = bool((shown & _starts(positions).to(mask.device)[:, rows]).any())
        known = mask.__dict__["flashmoe_leaks"] = (positions, _version(positions), leaks)
    if known[2]:
        raise UnsupportedError(
            f"{_RESTART} by attention_mask",
            hint="hand over use_cache=False and no attention_mask, with padding as a document of its own",
        )


def are_given(others: Mapping[str, Any]) -> bool:
    """Whether lengths of packed sequences are given, and then all of them. Raises ``InputError``."""
    packed = [name for name in LENGTHS[:2] if others.get(name) is not None]
    if not packed:
        return False
    for name in LENGTHS:
        if others.get(name) is None:
            raise InputError(f"{name} must be given with {packed[0]}, got None")
    return True


def check_lengths(query: Tensor, lengths: Mapping[str, Any]) -> None:
    """Raise ``InputError`` unless lengths have the kinds and the place that attention asks for."""
    check_starts(("query", query), {name: lengths[name] for name in LENGTHS[:2]})
    for name in LENGTHS[2:]:
        check_count(name, lengths[name])


def check_packing(query: Tensor, mask: Any, others: Mapping[str, Any], *, is_packed: bool) -> None:
    """Raise where ``position_ids`` or ``seq_idx`` start a sequence that nothing else starts, as far as a CPU knows."""
    seq_idx = others.get("seq_idx")
    if not (is_packed or seq_idx is not None) or torch.compiler.is_compiling():
        return
    starts = others["cu_seq_lens_q"] if is_packed else None
    served: set[int] = set()  # by positions alone
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
        served = changes if name == "position_ids" else served
        if name == "seq_idx" and starts is None and mask is None and len(changes) > 2 and not changes <= served:
            raise UnsupportedError(
                "seq_idx alone does not keep sequences apart",
                hint="hand over position_ids that restart, or cu_seq_lens_q and its like",
            )


def rest_of_mask(
    shape: tuple[int, ...],
    query: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    rules: dict[str, Any],
    lengths: Mapping[str, Any],
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
            hint="hand over one of them: with use_cache=True transformers makes no mask",
        )
    check_attended({"query": (query, "B, H, Sq, D")})
    check_mask("attention_mask", mask, ("query", query))
    check_lengths(query, lengths)
    starts = [lengths[name] for name in LENGTHS[:2]]
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

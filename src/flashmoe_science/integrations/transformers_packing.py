"""Packed documents in models of transformers: where they start, and masks that need no memory to say it.

transformers tells of documents in three ways: positions that restart, lengths (``cu_seq_lens_q``, ...), and a mask that
it makes of positions where there is neither a cache nor a mask of the caller. All end as lengths here.

Without a cache, transformers starts a document wherever a position is not the one after that before. With a cache it
starts none. Here positions that restart start one in both. Positions that skip or repeat start one without a cache, and
are refused with one: nobody knows what is meant.

Source: transformers 5.23 and 5.24, masking_utils.py, for the functions that masks are made of.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError
from ..gpu.subclasses import is_untraced
from .arguments import as_bias, check_attended, check_count, check_mask, check_starts

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_RESTART = "position_ids restart, and documents would see each other"
_SKIP = "position_ids skip or repeat, which transformers takes for documents in some calls and not in others"
_SAY = "hand over cu_seq_lens_q and its like, which say where documents start"
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
        restarts: those of ``starts`` where positions restart. Lengths of the caller may leave out the others.
        longest: tokens of the longest document.
        skips: whether positions skip or repeat where only lengths of the caller would say if a document starts.
        window: keys that a row sees, as ``flash_attention`` has it.
        make: makes the true mask.
        made: the true mask, once it was asked for.
    """

    starts: Tensor
    restarts: Tensor
    longest: int
    skips: bool
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
    def of(cls, named: Mapping[str, Any], make: Callable[[], Tensor], **facts: Any) -> PackedMask:
        """Return the mask for the arguments of ``sdpa_mask``, with its attributes."""
        device = torch.device(named.get("device") or "cpu")
        plain = torch.zeros((), dtype=named.get("dtype") or torch.float32, device=device)
        plain = plain.expand(named["batch_size"], 1, named["q_length"], named["kv_length"])
        return cls._around(plain, make, **facts)

    @classmethod
    def _around(cls, plain: Tensor, make: Callable[[], Tensor], **facts: Any) -> PackedMask:
        mask = plain.as_subclass(cls)
        mask.starts, mask.restarts = (facts[name].to(plain.device) for name in ("starts", "restarts"))
        mask.longest, mask.window, mask.skips = facts["longest"], facts["window"], facts["skips"]
        mask.make, mask.made = make, None
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
        facts = {name: self.__dict__[name] for name in ("starts", "restarts", "longest", "window", "skips")}
        return self._around(plain, lambda: move(self.dense(), *args, **kwargs), **facts)

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
            UnsupportedError: nothing says whether positions that skip or repeat start a document.
        """
        if self.made is not None or (query.shape[0], query.shape[2], key.shape[2]) != (self.shape[0], *self.shape[2:]):
            return None
        if given is None:
            return None if self.skips else _named(self.starts, self.longest)
        if query.shape[0] != 1 or torch.compiler.is_compiling():
            return None  # is refused
        check_lengths(query, given)
        starts = [given[name] for name in LENGTHS[:2]]
        question = tuple((id(tensor), version(tensor)) for tensor in starts)
        answers = self.__dict__.setdefault("answers", {})
        if question not in answers:  # on a GPU it has to be waited for, once a call of the model
            answers[question] = (self._whose(*(tensor.tolist() for tensor in starts)), starts)
        return {"own": _named(self.starts, self.longest), "given": given, "": None}[answers[question][0]]

    def _whose(self, starts_q: list[int], starts_k: list[int]) -> str:
        """Return whose lengths count: the caller's say that skipped positions are one document; or ``""``."""
        own = self.starts.tolist()
        is_whole = starts_q == starts_k and starts_q == sorted(starts_q) and {0, own[-1]} <= set(starts_q)
        if not is_whole or not (self.skips or set(starts_q) <= set(own)):
            return ""
        if set(self.restarts.tolist()) <= set(starts_q):
            return "given"
        return "" if self.skips else "own"


def pack_mask(make: Callable[..., Tensor], named: Mapping[str, Any]) -> PackedMask | None:
    """Return the mask of packed documents, or None where there are none, or it may hide or show other keys too.

    Args:
        make: makes the true mask, with changes to its arguments.
        named: the arguments of ``transformers.masking_utils.sdpa_mask``, and ``positions`` of its caller.
    """
    batch, seqlen, function = named["batch_size"], named["q_length"], named.get("mask_function")
    if torch.compiler.is_compiling() or named.get("use_vmap") or seqlen != named["kv_length"] or seqlen < 2:
        return None
    ids: Any
    ids, window = _find_packing(function)
    padding = named.get("attention_mask")
    if ids is not None and is_readable(ids) and ids.shape == (batch, seqlen) and padding is None:
        starts, ids = torch.nn.functional.pad(ids.diff() != 0, (1, 0), value=True), named.get("positions")
        restarts = _places(starts & _starts(ids) if are_positions(ids, batch, seqlen) else starts)[0]
        where, longest = _places(starts)
        return PackedMask.of(named, make, starts=where, restarts=restarts, longest=longest, window=window, skips=False)
    # With a cache, or with a mask of the caller, transformers tells its function of no documents.
    window = None if ids is not None else _window_of(function)
    if window is None:
        return None
    places, skips = _read(named.get("positions"), window, batch, seqlen)
    if (places is None and not skips) or not (padding is None or bool(padding[:, :seqlen].all())):
        return None
    if int(named.get("q_offset", 0)) != int(named.get("kv_offset", 0)):
        return None
    facts = {"window": window, "skips": skips}
    where, longest = places or _places(_starts(named["positions"].expand(batch, -1)))
    if skips:  # the layer knows whether there are lengths
        return PackedMask.of(named, _refuse_skips, starts=where, restarts=where, longest=longest, **facts)
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    ids = _starts(named["positions"].expand(batch, -1)).cumsum(-1)
    function = and_masks(function, packed_sequence_mask_function(ids))
    make = functools.partial(make, mask_function=function, allow_is_causal_skip=False)
    return PackedMask.of(named, make, starts=where, restarts=where, longest=longest, **facts)


def _refuse_skips() -> NoReturn:
    raise UnsupportedError(_SKIP, hint=_SAY)


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
    """Return which tokens ``[B, S]`` start a document: positions fall, or the first one of all comes again."""
    new = _is_restart(positions[:, 1:], positions.diff(), positions.amin(-1, keepdim=True))
    return torch.nn.functional.pad(new, (1, 0), value=True)


def _is_restart(positions: Tensor, step: Tensor, lowest: Tensor) -> Tensor:
    return (step < 0) | ((step == 0) & (positions == lowest))


def lengths_of_positions(
    positions: Any, asking: Any, batch: int, seqlen: int, device: torch.device | None = None
) -> dict[str, Any] | None:
    """Return the lengths of documents by positions ``[B or 1, S]``, or None where there is one document a row.

    All layers ask for the same tensor: on a GPU it has to be waited for, once a call of the model. Where a value
    cannot be read, while a model is compiled or a CUDA graph captured, positions that do not count up by one fail when
    it runs.

    Raises:
        UnsupportedError: positions skip or repeat.
    """
    if not are_positions(positions, batch, seqlen):
        return None
    if torch.compiler.is_compiling() or is_captured(positions):
        is_plain = (positions.diff() == 1).all()
        torch._assert_async(is_plain, f"position_ids restart, skip or repeat: {_COMPILED}")  # noqa: SLF001  no public name
        return None
    places, skips = _read(positions, asking, batch, seqlen)
    if skips:
        _refuse_skips()
    return None if places is None else _named(places[0].to(device or positions.device), places[1])


def _read(positions: Any, asking: Any, batch: int, seqlen: int) -> tuple[tuple[Tensor, int] | None, bool]:
    """Return what ``_places`` does, or None where no row restarts, and whether positions skip or repeat."""
    if not are_positions(positions, batch, seqlen) or is_captured(positions) or not is_readable(positions):
        return None, False
    known = positions.__dict__.get("flashmoe_documents")
    # Who asks again belongs to the next call: versions of inference tensors say nothing.
    if known is None or known[:2] != (version(positions), batch) or known[2] == asking:
        places, skips, breaks = None, False, positions.diff() != 1
        if bool(breaks.any()):
            starts = _starts(positions.expand(batch, -1))
            places = _places(starts) if bool(starts[:, 1:].any()) else None
            skips = bool((breaks & ~starts[:, 1:]).any())
        known = positions.__dict__["flashmoe_documents"] = (version(positions), batch, asking, places, skips)
    return known[3], known[4]


def restarts(positions: Any, module: Any) -> bool:
    """Whether positions ``[B, S]`` start a second document in a row. A rank's part of a sequence may skip some."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return False
    if torch.compiler.is_compiling() or is_captured(positions):
        torch._assert_async(~_starts(positions)[:, 1:].any(), f"{_RESTART}: {_COMPILED}")  # noqa: SLF001  no public name
        return False
    return _read(positions, id(module), *positions.shape)[0] is not None


def are_positions(positions: Any, batch: int, seqlen: int) -> bool:
    """Whether there is one position a token. Models of images and videos have several."""
    return (
        isinstance(positions, Tensor)
        and not positions.dtype.is_floating_point
        and positions.dtype != torch.bool
        and positions.dim() == 2
        and positions.shape[0] in (1, batch)
        and positions.shape[1] == seqlen
    )


def is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is captured, so that no value can be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values."""
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
    position: neither it nor who cannot see it is looked at, and positions after it may count it or not.
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
    if not are_positions(positions, mask.shape[0], seqlen) or is_captured(positions) or not is_readable(positions):
        return
    known = mask.__dict__.get("flashmoe_leaks")
    if known is None or known[0] is not positions or known[1] != version(positions):
        before, seen = _seen_before(mask, int(offset))
        ids = positions.to(mask.device).expand(mask.shape[0], -1)[:, : before.shape[1]]
        step = ids - ids.gather(1, before.clamp(min=0))
        breaks = seen & (step != 1) & (step != torch.arange(before.shape[1], device=mask.device) - before)
        again = breaks & _is_restart(ids, step, ids.amin(-1, keepdim=True))
        found = int(breaks.any().int() + again.any().int())
        known = mask.__dict__["flashmoe_leaks"] = (positions, version(positions), found)
    if known[2] == 1:
        _refuse_skips()
    if known[2]:
        raise UnsupportedError(
            f"{_RESTART} by attention_mask",
            hint="hand over use_cache=False and no attention_mask, with padding as a document of its own",
        )


def _seen_before(mask: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return for each row of ``[B, H or 1, Sq, Sk]`` the nearest before it that is no padding, and if it is seen.

    Padding is what does not see itself. The rows are those that have a key, ``[B, N]`` each; -1 is none.
    """
    own = _is_shown(mask.diagonal(offset, -2, -1)).any(1)
    rows = torch.arange(own.shape[1], device=mask.device)
    last = torch.where(own, rows, -1).cummax(-1).values
    before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    columns = (before.clamp(min=0) + offset)[:, None, :, None].expand(-1, mask.shape[1], -1, -1)
    seen = _is_shown(mask[:, :, : own.shape[1]].gather(-1, columns)[..., 0]).any(1)
    return before, seen & own & (before >= 0)


def _is_shown(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


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


def check_packing(query: Tensor, others: Mapping[str, Any]) -> None:
    """Raise ``InputError`` where ``position_ids`` or ``seq_idx`` start a sequence that lengths do not, on a CPU.

    On a GPU all layers would wait for it. Positions that skip are no fault: lengths say where sequences are.
    """
    starts = others["cu_seq_lens_q"]
    if torch.compiler.is_compiling() or not (isinstance(starts, Tensor) and starts.is_cpu):
        return
    for name in ("position_ids", "seq_idx"):
        ids: Any = others.get(name)
        if not are_positions(ids, 1, query.shape[2]) or not ids.is_cpu:
            continue
        new = _starts(ids)[0, 1:] if name == "position_ids" else ids[0].diff() != 0
        changes = {0, ids.shape[1], *(new.nonzero()[:, 0] + 1).tolist()}
        if not changes <= set(starts.tolist()):
            raise InputError(
                f"cu_seq_lens_q must start a sequence wherever {name} does, at {sorted(changes)[:-1]}, "
                f"got {starts.tolist()}"
            )


def check_sequences(seq_idx: Any, query: Tensor, seqlen_k: int, starts: Any = None, mask: Tensor | None = None) -> None:
    """Raise where ``seq_idx`` ``[1 or B, S]`` starts a sequence that sees the one before it.

    Args:
        seq_idx: the number of each token's sequence, or None.
        query: ``[B, H, S, D]``.
        seqlen_k: the number of keys.
        starts: where documents start in the B * S tokens, and the last one ends, if lengths keep them apart.
        mask: what keeps keys apart else, or None.

    Raises:
        InputError: it has another shape.
        UnsupportedError: nothing keeps such sequences apart.
    """
    batch, seqlen = query.shape[0], query.shape[2]
    if seq_idx is None or seqlen == 1:
        return
    if not are_positions(seq_idx, batch, seqlen):
        got = list(seq_idx.shape) if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
        raise InputError(f"seq_idx must be integers [1 or {batch}, {seqlen}], got {got}")
    is_compiled, told = torch.compiler.is_compiling(), mask if starts is None else starts
    if not is_compiled and (is_captured(seq_idx) or not is_readable(seq_idx)):
        return
    question = None if is_compiled or told is None else (version(seq_idx), version(told))
    known = None if question is None else seq_idx.__dict__.get("flashmoe_served")
    if known is not None and known[0] is told and known[1] == question:
        return
    leaks = _shared_sequences(seq_idx.to(query.device).expand(batch, -1), query, seqlen_k, starts, mask)
    text = "seq_idx alone does not keep sequences apart"
    if is_compiled:
        torch._assert_async(~leaks.any(), text)  # noqa: SLF001  no public name
    elif bool(leaks.any()):
        raise UnsupportedError(text, hint="hand over position_ids that restart, or cu_seq_lens_q and its like")
    if question is not None:
        seq_idx.__dict__["flashmoe_served"] = (told, question)


def _shared_sequences(ids: Tensor, query: Tensor, seqlen_k: int, starts: Any, mask: Tensor | None) -> Tensor:
    """Return where a row sees one of another sequence before it, by the arguments of ``check_sequences``."""
    if starts is not None:
        own = torch.zeros(ids.numel() + 1, dtype=torch.bool, device=ids.device)
        own[starts.long()] = True
        return (ids.diff() != 0) & ~own[:-1].view_as(ids)[:, 1:]
    if mask is None:
        return ids.diff() != 0
    offset = getattr(mask, _OFFSET, 0 if seqlen_k == ids.shape[1] else None)
    if offset is None:  # a mask of the caller alone knows whose keys are in the cache
        return torch.zeros_like(ids, dtype=torch.bool)
    before, seen = _seen_before(_expanded("attention_mask", mask, (*query.shape[:3], seqlen_k)), int(offset))
    ids = ids[:, : before.shape[1]]
    return seen & (ids != ids.gather(1, before.clamp(min=0)))


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
        UnsupportedError: transformers' mask starts a document inside one of the lengths, at a position that is skipped.
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
    question = (version(mask), *((id(tensor), version(tensor)) for tensor in starts), *rules.values())
    answers = mask.__dict__.setdefault("flashmoe_packed", {})
    if question not in answers:
        whole = _expanded("attention_mask", mask, shape)
        _refuse_splits(whole, getattr(mask, _POSITIONS, None), starts[0])
        answers[question] = (_compare_with_mask(whole, *starts, **rules), starts)  # starts stay, so that ids do
    rest: tuple[Tensor | None, dict[str, Any]] = answers[question][0]
    return rest


def _refuse_splits(mask: Tensor, positions: Any, starts: Tensor) -> None:
    if not are_positions(positions, 1, mask.shape[-2]) or not is_readable(positions):
        return
    skips = ((positions.diff() != 1) & ~_starts(positions)[:, 1:])[0].to(mask.device)
    within = ~torch.isin(torch.arange(1, mask.shape[-2], device=mask.device), starts.to(mask.device))
    if mask.shape[-1] == mask.shape[-2] and bool((skips & within & ~_is_shown(mask[0, 0].diagonal(-1))).any()):
        raise UnsupportedError(
            "position_ids skip or repeat inside a document of cu_seq_lens_q, and the mask splits it there",
            hint="hand over use_cache=True: transformers then makes no mask of positions",
        )


def version(tensor: Tensor) -> int:
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

    is_bool, seen = mask.dtype == torch.bool, _is_shown(mask)
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

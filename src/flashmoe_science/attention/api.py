"""The public functions of attention: contract, validation, and the way from a call to its prepared launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .calls import prepare_call
from .gradients import PLAIN, Options, differentiable, kernel_after, records, refuse_tangents, register_gradients
from .inputs import (
    cast_under_autocast,
    check_dropout,
    check_optional,
    check_options,
    check_softcap,
    check_window,
    gpu_of,
    layout_of,
    problem_of,
    refuse_undrawn,
    seed_of_call,
)
from .plan import plan_attention
from .problem import canonical_strides, output_strides
from .refusals import check_call, check_devices, check_key, check_stand_in
from .tiles import Plan

# What a call with the same key does, prepared. A key holds everything that decides plan, kernel and grid.
_prepared: dict[tuple[Any, ...], Callable[..., Any]] = {}
_last_call: tuple[tuple[Any, ...], Callable[..., Any]] = ((), lambda: None)
_MAX_PREPARED = 8192  # entries, about 2 KiB each

_is_compiling = torch.compiler.is_compiling
_forward_ad = torch.autograd.forward_ad


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Any:
    """Attend every query to the keys it may see.

    o[b, h, m] = sum_n softmax_n(softmax_scale * q[b, h, m] . k[b, h // G, n]) v[b, h // G, n], with G = H / HK.

    Args:
        q: ``[B, H, Sq, D]`` fp16, bf16 or fp32, any strides; D from 1 to 256 on a GPU.
        k: ``[B, HK, Sk, D]``, dtype and device of q; H is a multiple of HK (GQA, MQA).
        v: ``[B, HK, Sk, DV]``, dtype and device of q; DV from 1 to 256 on a GPU.
        causal: row m sees keys up to m + Sk - Sq (aligned bottom-right). A row that sees no key gives 0 and LSE -inf.
        softmax_scale: multiplies the scores before the softmax; of any sign, and finite in fp32 when multiplied by
            log2(e). Default ``D ** -0.5``.
        window: (left, right): row m sees keys from p - left to p + right, where p = m + Sk - Sq; -1 for no bound.
            Tiles of keys that it hides from all their rows are not read. With ``causal`` the right bound is 0.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        sinks: ``[H]`` fp16, bf16 or fp32: the score of one more key a head, which every row sees and whose value is 0.
        alibi: slopes ``[H]`` or ``[B, H]`` fp16, bf16 or fp32: slope * |p - n| is taken from the score of key n.
        bias: ``[B or 1, H or 1, Sq, Sk]`` fp16, bf16 or fp32, any strides (0 too), is added to the scores; -inf hides
            a key. Scale, softcap, ALiBi and bias are applied in this order, the masks last.
        dropout_p: the share of the probabilities that are dropped, at least 0 and less than 1; 0 for no dropout. After
            the softmax those kept are divided by 1 - dropout_p; the LSE is that without dropout. Of row m, key n and
            head h of sequence b it is kept if and only if a random number of 32 bits is at least dropout_p * 2**32: of
            the four of Philox 4x32 (10 rounds) with the counter (m, n // 4, b * H + h, offset mod 2**32) and the seed
            as key the one at n % 4. So it is the same for every kernel, tile and launch, and in the gradients.
        dropout_seed: ``[2]`` int64, contiguous, on the device of q: seed and offset, which the host does not read.
            Default: drawn from torch's default generator. Where dropout_p is 0 it is not used.
        return_lse: return the log-sum-exp of every row too.
        kernel: ``"auto"``, or one name to force (``explain`` lists them); a forced kernel never falls back.

    Returns:
        o ``[B, H, Sq, DV]`` in the dtype of q; rows lie in memory in the order of q's where that is dense. With
        ``return_lse`` the pair of o and lse ``[B, H, Sq]`` fp32, natural logarithm. Sinks count in the sum, as in
        FlashAttention-3, -4 and FlashInfer: a row that sees no key has the LSE of its sink.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.
        UnsupportedError: no kernel, or not the kernel forced, serves this call (see docs/reference/features.md);
            alibi requires grad while gradients are recorded; or gradients are differentiated again.

    Gradients, of o and of the LSE: q, k, v, sinks and bias have them, 0 in rows that see no key. Kept for them are the
    inputs, o and the LSE. The same bits in every run (``kernel`` is that of the forward). Beside a bias or a scale of
    more than 2**24 in size, the LSE, in fp32, is too coarse for them. Under autocast q, k and v of fp32 are cast.

    Numerics: fp32 scores, softmax and accumulators; P is rounded to the dtype of v. Error within twice that of the
    eager run in the same dtype, against fp64. Run-to-run bitwise equal for tensors laid out alike: alignment and
    strides may change the order of a sum, and so bits. On Hopper P may be up to 2**10 times what the softmax gives
    before it is divided: V beyond 2**100 may overflow. CPU tensors run ``reference.attention``. Beyond 2**24 in
    size, scaled scores of fp32 are more than 1 apart: rows that have such are not accurate, and may be 0 or NaN.
    """
    if (
        window != (-1, -1) or softcap != 0.0 or sinks is not None or alibi is not None or bias is not None
        or dropout_p != 0.0
    ):  # fmt: skip
        return _attend_with_features(
            q, k, v, causal, softmax_scale, window, softcap, (sinks, alibi, bias, dropout_seed), dropout_p, return_lse,
            kernel,
        )  # fmt: skip
    if _is_compiling() or type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return _call_operator(q, k, v, causal, softmax_scale, return_lse, kernel)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return _attend_recording(
            {"q": q, "k": k, "v": v}, Options(causal, softmax_scale, kernel=kernel_after(kernel)), return_lse, kernel
        )
    if _forward_ad._current_level >= 0:  # noqa: SLF001 - the public way asks tensor by tensor
        refuse_tangents((q, k, v))
    # Equal keys must mean equal calls: True == 1, and a tensor equals itself after its value has changed.
    if type(causal) is not bool or (softmax_scale is not None and type(softmax_scale) is not float):  # type: ignore[redundant-expr]
        softmax_scale = check_options(causal, softmax_scale)
    pq, pk, pv = q.data_ptr(), k.data_ptr(), v.data_ptr()
    dq, dk, dv = q.get_device(), k.get_device(), v.get_device()  # -1: no CUDA device
    contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    key = (
        q.shape, k.shape, v.shape, contiguous or _describe_layout(q, k, v), q.dtype, k.dtype, v.dtype,
        dq, dk, dv, (pq | pk | pv) & 15, causal, softmax_scale, return_lse, kernel,
    )  # fmt: skip
    last = _last_call
    if key == last[0] and dq >= 0:  # the layers of a model repeat one call: comparing is cheaper than hashing
        return last[1](q, k, v, pq, pk, pv)
    return _find_call(key, q, k, v)(q, k, v, pq, pk, pv)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Plan:
    """Return the plan that would serve ``flash_attention`` with the same arguments; nothing is launched.

    ``print`` shows it as text, ``.as_dict()`` gives it as data. Nothing is compiled either, so the launches' shared
    memory is None; ``flashmoe explain`` compiles and prints it. Arguments and errors are those of ``flash_attention``,
    but inputs may require grad, and no seed is drawn.
    """
    problem = problem_of(
        q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=return_lse,
        window=window, softcap=softcap, sinks=sinks, alibi=alibi, bias=bias,
        dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
    return plan_attention(problem, gpu_of(q), kernel)


def _describe_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return what tensors that are not contiguous may differ in: strides, and a sign that is still to be applied."""
    return q.stride(), k.stride(), v.stride(), q.is_neg(), k.is_neg(), v.is_neg()


def _find_call(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Any]:
    """Return the prepared call of ``key``, and remember it as the last one."""
    check_key(key)
    global _last_call  # noqa: PLW0603 - one tuple, replaced as a whole, so threads see an old pair or a new one
    if key[7] < 0:  # CPU and meta tensors have the same device index
        key = (*key[:7], q.device.type, k.device.type, v.device.type, *key[10:])
    call = _prepared.get(key)
    if call is None:
        call = _remember(key, _prepare(q, k, v, *key[-4:]))
    _last_call = (key, call)
    return call


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, return_lse: bool, kernel: str
) -> Callable[..., Any]:
    """Validate one call, plan it, compile and load its kernels, and return ``call(q, k, v, pq, pk, pv)``."""
    options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "return_lse": return_lse}

    def prepare(q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Any]:
        return prepare_call(plan_attention(problem_of(q, k, v, **options), gpu_of(q), kernel), q)

    if torch.float32 not in (q.dtype, k.dtype, v.dtype):
        return prepare(q, k, v)
    prepared: list[Callable[..., Any]] = []

    def call(q: Tensor, k: Tensor, v: Tensor, *addresses: int) -> Any:  # whether autocast is on is not in the key
        cast = cast_under_autocast(q, k, v)
        if any(after is not before for after, before in zip(cast, (q, k, v), strict=True)):
            return flash_attention(*cast, **options, kernel=kernel)
        if not prepared:
            prepared.append(prepare(q, k, v))
        return prepared[0](q, k, v, *addresses)

    return call


def _attend_recording(tensors: Mapping[str, Tensor | None], options: Options, return_lse: bool, kernel: str) -> Any:
    """Do what ``flash_attention`` does, and record what gradients need."""
    refuse_tangents((*tensors.values(),))
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    assert q is not None
    assert k is not None
    assert v is not None
    q, k, v = cast_under_autocast(q, k, v)
    attend = functools.partial(
        flash_attention, causal=options.causal, softmax_scale=options.softmax_scale, window=options.window,
        softcap=options.softcap, dropout_p=options.dropout_p, return_lse=True, kernel=kernel,
    )  # fmt: skip
    o, lse = differentiable(attend, options, {**tensors, "q": q, "k": k, "v": v})
    return (o, lse) if return_lse else o


def _attend_with_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    dropout_p: float,
    return_lse: bool,
    kernel: str,
) -> Any:
    """Do what ``flash_attention`` does, with more to tell calls apart by."""
    check_call(return_lse, kernel)
    window, softcap, dropout_p = check_window(window), check_softcap(softcap), check_dropout(dropout_p)
    softmax_scale = check_options(causal, softmax_scale)
    sinks, alibi, bias, dropout_seed = tensors
    check_optional(sinks=sinks, alibi=alibi, bias=bias, dropout_seed=dropout_seed)
    _check_are_tensors(q, k, v)
    dropout_seed = seed_of_call(dropout_p, dropout_seed, q)
    tensors = sinks, alibi, bias, dropout_seed
    named = dict(zip(("sinks", "alibi", "bias", "dropout_seed"), tensors, strict=True))
    q, k, v = cast_under_autocast(q, k, v)
    refuse_tangents((q, k, v, *tensors))
    recording = records({"q": q, "k": k, "v": v, **named})
    given = [tensor for tensor in tensors if tensor is not None]
    if _is_compiling() or any(type(tensor) not in PLAIN for tensor in (q, k, v, *given)):
        check_devices({"q": q, "k": k, "v": v, "sinks": sinks, "alibi": alibi, "bias": bias})
        o, lse = _attention_features(
            q, k, v, causal, softmax_scale, *window, softcap, *tensors, dropout_p, return_lse or recording, kernel
        )
        return (o, lse) if return_lse else o
    if recording:
        asked = Options(causal, softmax_scale, window, softcap, kernel=kernel_after(kernel), dropout_p=dropout_p)
        return _attend_recording({"q": q, "k": k, "v": v, **named}, asked, return_lse, kernel)
    options = (causal, softmax_scale, window, softcap, dropout_p, return_lse, kernel)
    key = ("features", options, *map(layout_of, (q, k, v, *tensors)))
    call = _prepared.get(key)
    if call is None:
        problem = problem_of(
            q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=return_lse,
            window=window, softcap=softcap, dropout_p=dropout_p, **named,
        )  # fmt: skip
        call = _remember(key, prepare_call(plan_attention(problem, gpu_of(q), kernel), q))
    return call(q, k, v, q.data_ptr(), k.data_ptr(), v.data_ptr(), *given)


def _remember(key: tuple[Any, ...], call: Callable[..., Any]) -> Callable[..., Any]:
    if len(_prepared) >= _MAX_PREPARED:
        _prepared.clear()
    _prepared[key] = call
    return call


# Graphs that torch traces hold the operators below, and tensor subclasses come by them; the eager call never does.


@torch.library.custom_op("flashmoe_science::attention_forward", mutates_args=())
def _attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, kernel: str
) -> Tensor:
    q, k, v = q.detach(), k.detach(), v.detach()
    o: Tensor = flash_attention(q, k, v, causal=causal, softmax_scale=softmax_scale, kernel=kernel)
    return o


@torch.library.custom_op("flashmoe_science::attention_forward_lse", mutates_args=())
def _attention_forward_lse(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, kernel: str
) -> tuple[Tensor, Tensor]:
    q, k, v = q.detach(), k.detach(), v.detach()
    o: Tensor
    lse: Tensor
    o, lse = flash_attention(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=True, kernel=kernel)
    return o, lse


@torch.library.custom_op("flashmoe_science::attention_features", mutates_args=())
def _attention_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None,
    alibi: Tensor | None,
    bias: Tensor | None,
    dropout_seed: Tensor | None,
    dropout_p: float,
    return_lse: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return o and, where it is not asked for, an LSE of no elements."""
    refuse_undrawn(dropout_p, dropout_seed)
    result = flash_attention(
        q.detach(),
        k.detach(),
        v.detach(),
        causal=causal,
        softmax_scale=softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach(),
        alibi=None if alibi is None else alibi.detach(),
        bias=None if bias is None else bias.detach(),
        dropout_p=dropout_p,
        dropout_seed=None if dropout_seed is None else dropout_seed.detach(),
        return_lse=return_lse,
        kernel=kernel,
    )
    return result if return_lse else (result, torch.empty(0, dtype=torch.float32, device=q.device))


@_attention_features.register_fake
def _fake_features(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    check_stand_in(q, k, v, (4, 4, 4), options)
    o, lse = _fake_outputs(q, v)
    return o, lse if options[-2] else torch.empty(0, dtype=torch.float32, device=q.device)


@_attention_forward.register_fake
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_options: object) -> Tensor:
    check_stand_in(q, k, v, (4, 4, 4), ())
    return _fake_outputs(q, v)[0]


@_attention_forward_lse.register_fake
def _fake_forward_lse(q: Tensor, k: Tensor, v: Tensor, *_options: object) -> tuple[Tensor, Tensor]:
    check_stand_in(q, k, v, (4, 4, 4), ())
    return _fake_outputs(q, v)


def _options_of(
    *, causal: bool, softmax_scale: float | None, window_left: int, window_right: int, softcap: float,
    dropout_p: float, kernel: str, **_others: object,
) -> Options:  # fmt: skip
    window = window_left, window_right
    return Options(causal, softmax_scale, window, softcap, kernel=kernel_after(kernel), dropout_p=dropout_p)


register_gradients(_attention_features, _options_of)


def _fake_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs without data, in the memory order of the real ones."""
    batch, heads, seqlen_q, _ = q.shape
    strides = output_strides(batch, heads, seqlen_q, v.shape[3], canonical_strides(q.shape, q.stride()))
    o = torch.empty_strided((batch, heads, seqlen_q, v.shape[3]), strides, dtype=q.dtype, device=q.device)
    return o, torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)


def _call_operator(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, return_lse: bool, kernel: str
) -> Any:
    _check_are_tensors(q, k, v)
    check_call(return_lse, kernel)
    check_devices({"q": q, "k": k, "v": v})
    softmax_scale = check_options(causal, softmax_scale)
    q, k, v = cast_under_autocast(q, k, v)
    refuse_tangents((q, k, v))
    if records({"q": q, "k": k, "v": v}):
        nothing = (-1, -1, 0.0, None, None, None, None, 0.0)
        o, lse = _attention_features(q, k, v, causal, softmax_scale, *nothing, True, kernel)  # noqa: FBT003 - a schema
        return (o, lse) if return_lse else o
    operator = _attention_forward_lse if return_lse else _attention_forward
    return operator(q, k, v, causal, softmax_scale, kernel)


def _check_are_tensors(*tensors: object) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(f"q, k and v must be torch.Tensors, got {type(tensor).__name__}")

"""The public functions of attention: contract, and the fast path of a repeated call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor

from ..gpu.subclasses import is_watched
from .context_parallel import TORCHS_OWN
from .dispatch import Operator, attend, operate_with_features
from .forward.calls import prepare, remember, run
from .forward.plan import plan_attention
from .inputs import (
    AttentionCall,
    BatchedOptions,
    Options,
    cast_under_autocast,
    check_all_options,
    check_options,
    describe_call,
    gpu_of,
    parameters_of,
    problem_of,
    with_mask,
)
from .masks.block_mask import as_block_mask
from .tiles import Plan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .inputs import AnyMask

# Prepared calls by their key, which holds everything that decides plan, kernel and grid.
_prepared: dict[tuple[Any, ...], Callable[..., Any]] = {}
_last_call: tuple[tuple[Any, ...], Callable[..., Any]] = ((), lambda: None)

_is_compiling = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001 - make_fx and export make graphs by modes
_function_modes = torch._C._len_torch_function_stack  # noqa: SLF001
_is_tracing = torch._C._is_tracing  # noqa: SLF001 - what torch.jit.is_tracing calls
_forward_ad = torch.autograd.forward_ad


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[BatchedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[BatchedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[BatchedOptions],
) -> Any: ...  # fmt: skip
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
    mask: AnyMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Any:
    """Attend every query to the keys it may see.

    o[b, h, m] = sum_n softmax_n(softmax_scale * q[b, h, m] . k[b, h // G, n]) v[b, h // G, n], with G = H / HK.

    Args:
        q: ``[B, H, Sq, D]`` fp16, bf16 or fp32, any strides; D from 1 to 512 on a GPU.
        k: ``[B, HK, Sk, D]``, dtype and device of q; H is a multiple of HK (GQA, MQA).
        v: ``[B, HK, Sk, DV]``, dtype and device of q; DV from 1 to 512 on a GPU.
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
        mask: which keys each row sees, block by block: a ``flashmoe_science.BlockMask``, or torch's ``BlockMask`` from
            ``create_block_mask``, which is evaluated once and kept. Of Sq queries and Sk keys, one sequence or B, and
            heads that divide H. Blocks that no row sees are not read. Beside softmax_scale, softcap and sinks alone.
        dropout_p: the share of the probabilities that are dropped, at least 0 and less than 1; 0 for no dropout. After
            the softmax the kept ones are divided by 1 - dropout_p; the LSE is that without dropout. Probability
            (b, h, m, n) is kept if and only if a random number of 32 bits is at least dropout_p * 2**32. The number is
            word n % 4 of Philox4x32-10 with counter (m, n // 4, b * H + h, offset mod 2**32) and the seed as key. So
            the mask is the same in every kernel, tile and launch, and in the gradients.
        dropout_seed: ``[2]`` int64, contiguous, on the device of q: seed and offset, which the host does not read.
            Default: drawn from torch's default generator. Unused if dropout_p is 0.
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

    Gradients, of o and of the LSE: q, k, v, sinks and bias have them, 0 in rows that see no key. The backward saves the
    inputs, o and the LSE. Its bits are the same in every run (``kernel`` selects the forward kernel only). Gradients
    are inaccurate beside a bias or a scale of more than 2**24 in size: the fp32 LSE is too coarse. Under autocast q, k
    and v of fp32 are cast.

    Numerics: fp32 scores, softmax and accumulators; P is rounded to the dtype of v. Error within twice that of the
    eager run in the same dtype, against fp64. Runs are bitwise equal for tensors of the same layout: alignment and
    strides may change the order of a sum, and so bits. On Hopper P may be up to 2**10 times what the softmax gives
    before it is divided: V beyond 2**100 may overflow. CPU tensors run ``reference.attention``. Scaled fp32 scores
    beyond 2**24 in size are more than 1 apart: rows with such scores are inaccurate, and may be 0 or NaN.
    """
    try:
        has_features = (
            window != (-1, -1) or softcap != 0.0 or sinks is not None or alibi is not None or bias is not None
            or dropout_p != 0.0 or mask is not None
        )  # fmt: skip
    except (RuntimeError, ValueError):  # arrays compare their elements: refused by name
        has_features = True
    if has_features:
        options = Options(causal, softmax_scale, window, softcap, None, kernel, dropout_p, return_lse=return_lse)
        tensors: dict[str, Any] = {
            "q": q, "k": k, "v": v, "sinks": sinks, "alibi": alibi, "bias": bias, "dropout_seed": dropout_seed,
        }  # fmt: skip
        if mask is not None:
            tensors, options = with_mask(mask, tensors, options)
        return attend(tensors, options)
    if (
        _is_compiling() or _modes() or _function_modes() or _is_tracing()
        or F.scaled_dot_product_attention is not TORCHS_OWN  # under context_parallel, for one
        or type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor
        or ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled())
        or _forward_ad._current_level >= 0  # noqa: SLF001 - the public way asks tensor by tensor
    ):  # fmt: skip
        return _attend_plain(q, k, v, causal, softmax_scale, return_lse, kernel)
    # Equal keys must mean equal calls: True == 1, and a tensor equals itself after its value has changed.
    if type(causal) is not bool or (softmax_scale is not None and type(softmax_scale) is not float):  # type: ignore[redundant-expr]
        softmax_scale = check_options(causal, softmax_scale)
    if type(return_lse) is not bool or type(kernel) is not str:  # type: ignore[redundant-expr] # has no hash, or is an array
        check_all_options(Options(causal, softmax_scale, kernel=kernel, return_lse=return_lse))
    try:
        pq, pk, pv = q.data_ptr(), k.data_ptr(), v.data_ptr()
        dq, dk, dv = q.get_device(), k.get_device(), v.get_device()  # -1: no CUDA device
        contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        key = (
            q.shape, k.shape, v.shape, contiguous or _describe_layout(q, k, v), q.dtype, k.dtype, v.dtype,
            dq, dk, dv, (pq | pk | pv) & 15, causal, softmax_scale, return_lse, kernel,
        )  # fmt: skip
    except RuntimeError:  # transforms of torch.func, and tensors that are not dense: refused by name
        return _attend_plain(q, k, v, causal, softmax_scale, return_lse, kernel)
    last = _last_call
    if key == last[0] and dq >= 0:  # the layers of a model repeat one call: comparing is cheaper than hashing
        return last[1](q, k, v, pq, pk, pv)
    return _find_call(key, q, k, v)(q, k, v, pq, pk, pv)


if TYPE_CHECKING:  # of overloads, only the first would be seen

    def _parameters(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[BatchedOptions]
    ) -> Any: ...

else:
    _parameters = flash_attention


@parameters_of(_parameters)
def explain(q: Tensor, k: Tensor, v: Tensor, *, kernel: str, mask: AnyMask | None = None, **arguments: Any) -> Plan:
    """Return the plan that would serve ``flash_attention`` with the same arguments; nothing is launched.

    ``print`` shows it as text, ``.as_dict()`` gives it as data. Nothing is compiled either, so the launches' shared
    memory is None; ``flashmoe explain`` compiles and prints it. Arguments and errors are those of ``flash_attention``,
    but inputs may require grad, and no seed is drawn. With a mask the reason says which share of its blocks is visited,
    for which the host waits for the device.
    """
    plan = plan_attention(problem_of(q, k, v, mask=mask, **arguments), gpu_of(q), kernel)
    if mask is None:
        return plan
    return replace(plan, reason=f"{plan.reason}; {as_block_mask(mask).visited_share():.1%} of the blocks are visited")


def _describe_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return the possible differences between tensors that are not contiguous: strides, and a sign not yet applied."""
    return q.stride(), k.stride(), v.stride(), q.is_neg(), k.is_neg(), v.is_neg()


def _find_call(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Any]:
    """Return the prepared call of ``key``, and remember it as the last one."""
    causal, softmax_scale, return_lse, kernel = key[-4:]
    global _last_call  # noqa: PLW0603 - one tuple, replaced as a whole, so threads see an old pair or a new one
    if key[7] < 0:  # CPU and meta tensors have the same device index
        key = (*key[:7], q.device.type, k.device.type, v.device.type, *key[10:])
    call = _prepared.get(key)
    if call is None:
        options = Options(causal, softmax_scale, kernel=kernel, return_lse=return_lse)
        call = remember(_prepared, key, _prepare(q, k, v, options))
    _last_call = (key, call)
    return call


def _prepare(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Callable[..., Any]:
    """Validate one call, plan it, compile and load its kernels, and return ``call(q, k, v, pq, pk, pv)``."""
    if torch.float32 not in (q.dtype, k.dtype, v.dtype):
        return prepare(describe_call({"q": q, "k": k, "v": v}, options))
    prepared: list[Callable[..., Any]] = []

    def call(q: Tensor, k: Tensor, v: Tensor, *addresses: int) -> Any:  # whether autocast is on is not in the key
        cast = cast_under_autocast(q, k, v)
        if any(after is not before for after, before in zip(cast, (q, k, v), strict=True)):
            return flash_attention(
                *cast, causal=options.causal, softmax_scale=options.softmax_scale, return_lse=options.return_lse,
                kernel=options.kernel,
            )  # fmt: skip
        if not prepared:
            prepared.append(prepare(describe_call({"q": q, "k": k, "v": v}, options)))
        return prepared[0](q, k, v, *addresses)

    return call


def _attend_plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, return_lse: bool, kernel: str
) -> Any:
    """Serve a call without features that is not ready for the fast path."""
    options = Options(causal, softmax_scale, kernel=kernel, return_lse=return_lse)
    return attend({"q": q, "k": k, "v": v}, options, _operate)


def _operate(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Call the operators of calls without features; a recorded call has the one that has gradients."""
    if call.recorded:
        return operate_with_features(call)
    asked = call.options
    arguments = (*call.tensors.values(), asked.causal, asked.softmax_scale, asked.kernel)
    return _attention_forward_lse(*arguments) if asked.return_lse else (_attention_forward(*arguments), None)


def _serve(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, kernel: str, *, return_lse: bool = False
) -> Any:
    """Run an operator of calls without features."""
    q, k, v = q.detach(), k.detach(), v.detach()
    if type(q) is type(k) is type(v) is Tensor and not is_watched():
        return flash_attention(
            q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=return_lse, kernel=kernel
        )
    options = Options(causal, softmax_scale, kernel=kernel, return_lse=return_lse)
    return run(describe_call({"q": q, "k": k, "v": v}, options))


_PLAIN_CALL = "Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, str kernel"
_attention_forward = Operator("attention_forward", _PLAIN_CALL, _serve, returns=1)
_attention_forward_lse = Operator(
    "attention_forward_lse", _PLAIN_CALL, lambda *arguments: _serve(*arguments, return_lse=True)
)

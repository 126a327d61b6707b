"""Device helpers that more than one kernel of the experts uses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gelu(x, IS_TANH: tl.constexpr):
    """Return x * Phi(x), by erf or by the usual tanh: 0.5 * (1 + tanh(u)) is a sigmoid of 2 * u."""
    if IS_TANH:
        y = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the activation in fp32; without a gate, ``gate`` and ``up`` are the same."""
    if ACTIVATION == "swiglu":
        h = gate / (1 + tl.exp(-gate)) * up
    elif ACTIVATION == "swiglu_clamped":
        # Written so that NaN stays NaN, which minimum and maximum do not promise.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
        h = (up + 1) * (gate / (1 + tl.exp(-ALPHA * gate)))
    elif ACTIVATION == "geglu" or ACTIVATION == "geglu_tanh":  # noqa: PLR1714 - Triton knows no sets
        h = _gelu(gate, ACTIVATION == "geglu_tanh") * up
    elif ACTIVATION == "relu2":
        positive = tl.where(up < 0, 0.0, up)
        h = positive * positive
    elif ACTIVATION == "silu":
        h = up / (1 + tl.exp(-up))
    else:
        tl.static_assert(ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh")  # noqa: PLR1714 - as above
        h = _gelu(up, ACTIVATION == "gelu_tanh")
    return h


@triton.jit
def rows_of_columns(columns, COLUMNS: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return which rows of ``w_gate_up`` give ``columns`` of a product in which gate and up take turns.

    So both lie beside each other in the registers of one thread, however the weights lie in memory.
    """
    if GATED and not INTERLEAVED:
        return columns // 2 + columns % 2 * (COLUMNS // 2)
    return columns


@triton.jit
def expert_of_ids(ids, EXPERTS: tl.constexpr):
    """Return ids as int32, with EXPERTS for each that names no expert: it contributes nothing."""
    return tl.where((ids >= 0) & (ids < EXPERTS), ids, EXPERTS).to(tl.int32)

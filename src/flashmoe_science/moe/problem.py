"""Descriptions of calls: ``MoeProblem`` of ``fused_moe`` and its gradients, ``Routing`` of ``route``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import InputError

ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
# With a gate, the first product has 2 * INTER columns: one half gates the other.
GATED = ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh")
UNGATED = ("relu2", "silu", "gelu", "gelu_tanh")
ACTIVATIONS = (*GATED, *UNGATED)
DEFAULT_ALPHA, DEFAULT_LIMIT = 1.702, 7.0  # gpt-oss
LARGEST = 1e30  # alpha or limit

Strides = tuple[int, ...]


class Options(NamedTuple):
    """The options of ``fused_moe``, in the order of torch's operators."""

    activation: str = "swiglu"
    alpha: float | None = None
    limit: float | None = None
    interleaved: bool = False
    batch_invariant: bool = False
    kernel: str = "auto"


def columns_up(inter: int, activation: str) -> int:
    """Return the columns of the first product."""
    return 2 * inter if activation in GATED else inter


@dataclass(frozen=True, slots=True)
class MoeProblem:
    """Sizes, dtypes, activation and memory layout of one call of ``fused_moe``; strides are in elements."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    inter: int
    dtype: str  # "fp16", "bf16" or "fp32": of x, weights of experts, biases and output
    activation: str = "swiglu"
    alpha: float = 0.0  # of swiglu_clamped; otherwise 0
    limit: float = 0.0
    interleaved: bool = False  # gate and up columns of the first product alternate, gate first
    bias_gate_up: bool = False
    bias_down: bool = False
    weights_dtype: str = "fp32"  # of topk_weights
    ids_dtype: str = "i32"  # of topk_ids: "i32" or "i64"
    shared_experts: int = 0  # experts that process every token
    shared_inter: int = 0
    shared_weights: str = ""  # dtype of the weights [T, S]; "": all weights are 1
    batch_invariant: bool = False
    keep_product: bool = False  # keep the first product, before the activation, for gradients
    x_strides: Strides = ()  # default: contiguous
    gate_up_strides: Strides = ()
    down_strides: Strides = ()
    shared_gate_up_strides: Strides = ()
    shared_down_strides: Strides = ()
    pointer_alignment: int = 16  # power of two, at most 16, that divides all addresses of x and weights

    def __post_init__(self) -> None:
        """Fill in contiguous strides and defaults, and check values."""
        for name in ("dtype", "weights_dtype"):
            if getattr(self, name) not in ITEM_BYTES:
                raise InputError(f"{name} must be one of {', '.join(ITEM_BYTES)}, got {getattr(self, name)!r}")
        if self.shared_weights not in ("", *ITEM_BYTES):
            allowed = ", ".join(ITEM_BYTES)
            raise InputError(f"the dtype of shared_weights must be one of {allowed}, got {self.shared_weights!r}")
        if self.ids_dtype not in ("i32", "i64"):
            raise InputError(f"ids_dtype must be i32 or i64, got {self.ids_dtype!r}")
        self._check_sizes()
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.interleaved and not self.gated:
            raise InputError(f"interleaved must be False for {self.activation}, which has no gate, got True")
        self._check_clamp()
        if (self.shared_experts > 0) != (self.shared_inter > 0) or self.shared_experts < 0:
            sizes = f"{self.shared_experts} and {self.shared_inter}"
            raise InputError(f"shared_experts and shared_inter must both be positive or both 0, got {sizes}")
        if self.shared_weights and not self.shared_experts:
            raise InputError("shared_weights must be None without shared experts, got some")
        self._fill_strides()

    def _check_sizes(self) -> None:
        if self.tokens < 0:
            raise InputError(f"tokens must not be negative, got {self.tokens}")
        for name in ("experts", "top_k", "hidden", "inter"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.pairs >= 2**31:
            raise InputError(f"tokens * top_k must be less than 2**31, got {self.pairs}")

    def _check_clamp(self) -> None:
        """Check alpha and limit; their defaults are those of gpt-oss."""
        if self.activation != "swiglu_clamped":
            for name in ("alpha", "limit"):
                if getattr(self, name):
                    raise InputError(f"{name} must be None for {self.activation}, got {getattr(self, name)}")
            return
        object.__setattr__(self, "alpha", self.alpha or DEFAULT_ALPHA)
        object.__setattr__(self, "limit", self.limit or DEFAULT_LIMIT)
        for name in ("alpha", "limit"):
            if not 0 < getattr(self, name) <= LARGEST:  # also refuses NaN
                raise InputError(f"{name} must be positive and at most 1e30, got {getattr(self, name)}")

    def _fill_strides(self) -> None:
        rows, shared_rows = self.columns_up, columns_up(self.shared_inter, self.activation)
        dense = {
            "x_strides": (self.hidden, 1),
            "gate_up_strides": (rows * self.hidden, self.hidden, 1),
            "down_strides": (self.hidden * self.inter, self.inter, 1),
            "shared_gate_up_strides": (shared_rows * self.hidden, self.hidden, 1) if self.shared_experts else (),
            "shared_down_strides": (self.hidden * self.shared_inter, self.shared_inter, 1)
            if self.shared_experts
            else (),
        }
        for name, strides in dense.items():
            if not getattr(self, name):
                object.__setattr__(self, name, strides)

    @property
    def gated(self) -> bool:
        """Whether the activation has a gate."""
        return self.activation in GATED

    @property
    def columns_up(self) -> int:
        """Columns of the first product."""
        return columns_up(self.inter, self.activation)

    @property
    def pairs(self) -> int:
        """Pairs of a token and an expert that it goes to."""
        return self.tokens * self.top_k

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of x, weights and output."""
        return ITEM_BYTES[self.dtype]

    @property
    def flops(self) -> float:
        """Operations of all products, shared experts included; a multiply-add counts as two."""
        routed = self.pairs * self.hidden * (self.columns_up + self.inter)
        shared_columns = columns_up(self.shared_inter, self.activation) + self.shared_inter
        return 2.0 * (routed + self.tokens * self.shared_experts * self.hidden * shared_columns)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one routed expert."""
        return self.hidden * (self.columns_up + self.inter) * self.item_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the weights of all shared experts."""
        columns = columns_up(self.shared_inter, self.activation) + self.shared_inter
        return self.shared_experts * self.hidden * columns * self.item_bytes

    @property
    def features(self) -> tuple[str, ...]:
        """Features besides swiglu, as text."""
        asked = {
            self.activation: self.activation != "swiglu",
            "interleaved gates": self.interleaved,
            "biases": self.bias_gate_up or self.bias_down,
            "shared experts": self.shared_experts > 0,
            "batch invariance": self.batch_invariant,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    def describe(self) -> str:
        """Return a short name, e.g. ``t128_e8_k2_h4096_i14336_bf16``."""
        name = f"t{self.tokens}_e{self.experts}_k{self.top_k}_h{self.hidden}_i{self.inter}_{self.dtype}"
        if self.activation != "swiglu":
            name += f"_{self.activation}"
        if self.interleaved:
            name += "_interleaved"
        if self.bias_gate_up or self.bias_down:
            name += "_bias"
        if self.shared_experts:
            name += f"_shared{self.shared_experts}x{self.shared_inter}"
        name += "_invariant" if self.batch_invariant else ""
        return name + ("_kept" if self.keep_product else "")

    def shared(self) -> MoeProblem:
        """Return the shared experts as a problem of its own, in which every token goes to each expert."""
        return dataclasses.replace(
            self,
            experts=self.shared_experts,
            top_k=self.shared_experts,
            inter=self.shared_inter,
            bias_gate_up=False,
            bias_down=False,
            shared_experts=0,
            shared_inter=0,
            shared_weights="",
            gate_up_strides=self.shared_gate_up_strides,
            down_strides=self.shared_down_strides,
            shared_gate_up_strides=(),
            shared_down_strides=(),
        )


# Distributions of random routing: uniform, or Zipf's (in proportion to 1 / rank, with random ranks).
ROUTINGS = ("uniform", "zipf")


@dataclass(frozen=True, slots=True)
class MoeCase:
    """A problem with the distribution of its routing: a case of the harness."""

    problem: MoeProblem
    routing: str = "uniform"

    def __post_init__(self) -> None:
        """Check the routing. Raises ``InputError``."""
        if self.routing not in ROUTINGS:
            raise InputError(f"routing must be one of {', '.join(ROUTINGS)}, got {self.routing!r}")
        if self.problem.top_k > self.problem.experts:
            raise InputError(f"top_k must be at most the {self.problem.experts} experts, got {self.problem.top_k}")


@dataclass(frozen=True, slots=True)
class Routing:
    """One call of ``route``, described."""

    tokens: int
    experts: int
    top_k: int
    dtype: str
    strides: tuple[int, ...]
    score: str
    renormalize: bool
    bias: str  # dtype; "": none
    groups: int
    top_groups: int
    scale: float

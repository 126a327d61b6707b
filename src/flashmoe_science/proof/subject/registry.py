"""The names of operators: ours with their subjects, and a user's own as ``module:OBJECT``.

A listing reads this module without importing torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import SubjectError, page
from ...operators import MODULES
from ..text import did_you_mean

if TYPE_CHECKING:
    from .operator import Operator

# Our operators with the names of their subjects.
BUILTIN_OPERATORS = {
    "attention": (
        *("flash_attention", "forward_triton", "forward_short_gluon"),
        *("forward_gluon_sm90", "forward_features_gluon_sm90", "forward_wide_gluon_sm90"),
    ),
    "attention_backward": ("flash_attention_backward", "backward_triton", "backward_gluon_sm90"),
    "attention_cache": ("flash_attention_with_kv_cache", "decode_gluon_sm90", "decode_triton"),
    "attention_masked": ("flash_attention_masked", "forward_masked_triton", "forward_masked_gluon_sm90"),
    "attention_mixed": ("flash_attention_paged", "paged_mixed_triton", "paged_forward_triton"),
    "attention_sparse": ("sparse_mla", "sparse_mla_gluon_sm90", "sparse_mla_triton"),
    "attention_train": ("attention_step",),
    "attention_varlen": ("flash_attention_varlen", "varlen_triton", "varlen_gluon_sm90"),
    "attention_varlen_backward": (
        "flash_attention_varlen_backward",
        "varlen_backward_triton",
        "varlen_backward_gluon_sm90",
    ),
    "context_parallel": ("context_parallel", "context_parallel_gather"),
    "expert_parallel": ("expert_parallel",),
    "moe": ("fused_moe", "gemv_triton", "few_triton", "grouped_triton", "grouped_gluon_sm90"),
    "moe_backward": ("fused_moe_backward", "moe_backward_triton", "moe_backward_gluon_sm90"),
}


def is_user_defined(name: str) -> bool:
    """Return whether ``name`` is that of a user's own operator: ``module:OBJECT``, or a module's path with dots."""
    return "." in name or ":" in name


def find_operator(name: str) -> Operator:
    """Import the operator called ``name`` in this process. Raises ``SubjectError``, and what its module raises."""
    from .operator import Operator  # it imports torch

    module, _, attribute = name.partition(":")
    if not is_user_defined(name):
        if name not in MODULES:
            raise _no_operator(name)
        module = f"{__name__.partition('.')[0]}.operators.{MODULES[name]}"
    attribute = attribute or "OPERATOR"
    try:
        operator: Any = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise _no_operator(name) from error
    if not isinstance(operator, Operator):
        parts = [name for name in {**vars(Operator), **Operator.__annotations__} if not name.startswith("_")]
        lacking = [part for part in parts if operator is not None and not hasattr(operator, part)]
        got = f"{type(operator).__name__} without {', '.join(lacking)}" if lacking else repr(operator)
        raise SubjectError(
            f"{module} must offer an object {attribute} that fits proof/subject/operator.py, got {got}",
            hint=f"CustomOperator has a default for most of it, see {page('reference/operators')}",
        )
    return operator


def module_at_revision(package: str, name: str) -> str:
    """Return the module of our operator ``name`` in a revision of ours."""
    modules: Mapping[str, str] = importlib.import_module(f"{package}.operators").MODULES
    return f"{package}.operators.{modules.get(name, name)}"


def _no_operator(name: str) -> SubjectError:
    ours = f"ours are {', '.join(MODULES)}; your own is MODULE:OBJECT, see {page('reference/operators')}"
    hint = f"{did_you_mean(name, MODULES)} {ours}".strip()
    return SubjectError(f"there is no operator called {name!r}", hint=hint)

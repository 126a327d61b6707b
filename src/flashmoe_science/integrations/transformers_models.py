"""Which models of transformers our attention serves right, by the table that ``tools/sweep_models.py`` makes.

A type that the table does not have is warned of once, and gets a mask for every call: without one, nobody but the model
knows what a layer hides. So is every type under a version of transformers that the table was not made with. A model
that branches on the name of its implementation may leave out what it does for "eager" and "sdpa", so it is refused
unless the table has it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedError

TABLE = Path(__file__).with_suffix(".json")
_CONTENT: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
MODELS: dict[str, dict[str, Any]] = _CONTENT["models"]
# Which the sweep of text models does not reach, each with its test. These cut windows into sequences of their own.
_TESTED_APART: dict[str, dict[str, Any]] = {"qwen2_5_vl_vision": {}}


def _installed_version() -> str:
    try:
        return ".".join(importlib.metadata.version("transformers").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


_VERSION = _installed_version()
_VERSION_KNOWN = _VERSION in _CONTENT["transformers"]
_HINT = "attn_implementation='sdpa' or 'eager' serves it"
_TABLES = ("ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS")
_warned: set[str] = set()
_branches: dict[str, bool] = {}


def skips(config: Any) -> tuple[str, ...]:
    """Return the masks that models of this configuration can do without: "causal", "window".

    Raises:
        UnsupportedError: the table has models of this type as wrong.
    """
    if config is None:
        return ()
    entry = _find(getattr(config, "model_type", None), type(config).__module__)
    return tuple(entry.get("skips", ())) if entry is not None and _VERSION_KNOWN else ()


def check_layer(module: torch.nn.Module) -> bool:
    """Return whether the table has the model of a layer as right.

    Raises:
        UnsupportedError: the table has the model as wrong, or does not have it and its source branches on the name of
            the implementation.
    """
    config = getattr(module, "config", None)
    if config is None:
        return False
    model_type = getattr(config, "model_type", None)
    place = type(module).__module__
    entry = _find(model_type, place)
    if entry is None and _has_branch(place):
        raise UnsupportedError(
            f"{place} branches on the name of the attention implementation, and no test shows what it does for "
            "flashmoe_science",
            hint=_HINT,
        )
    if entry is not None and _VERSION_KNOWN:
        return True
    _warn(model_type or type(module).__name__)
    return False


def _find(model_type: Any, place: str) -> dict[str, Any] | None:
    """Return what the table says of a type, if the code is transformers' own. Raises ``UnsupportedError``."""
    is_theirs = isinstance(model_type, str) and place.startswith("transformers.")
    entry = MODELS.get(model_type, _TESTED_APART.get(model_type)) if is_theirs else None
    if entry is not None and "refused" in entry and _VERSION in entry.get("refused in", [_VERSION]):
        raise UnsupportedError(f"model type {model_type} is not served: {entry['refused']}", hint=_HINT)
    return entry


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001  a file does not change
def _has_branch(place: str) -> bool:
    """Whether the source of a Python module does one thing or another by the name of the implementation."""
    if place not in _branches:
        try:
            tree = ast.parse(inspect.getsource(sys.modules[place]))
        except (KeyError, OSError, TypeError, SyntaxError):
            tree = ast.Module([], [])
        names = {"attn_implementation", "_attn_implementation", "_attn_implementation_internal"}
        names |= {
            target.id if isinstance(target, ast.Name) else target.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and _name_of(node.value) in names
            for target in node.targets
            if isinstance(target, (ast.Name, ast.Attribute))
        }
        _branches[place] = any(_is_branch(node, names) for node in ast.walk(tree))
    return _branches[place]


def _name_of(node: ast.AST) -> str:
    """Return the last name of ``a.b.name``, or nothing."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_branch(node: ast.AST, names: set[str]) -> bool:
    """Whether a name is compared, matched, asked how it begins, or looked up elsewhere than in transformers' tables."""
    if isinstance(node, ast.Compare):
        is_identity = all(isinstance(operation, (ast.Is, ast.IsNot)) for operation in node.ops)
        asked: list[ast.AST] = [] if is_identity else [node.left, *node.comparators]
    elif isinstance(node, ast.Match):
        asked = [node.subject]
    elif isinstance(node, ast.Subscript) and _name_of(node.value) not in _TABLES:
        asked = [node.slice]
    elif isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith"):
        asked = [node.value]
    else:
        asked = []
    return any(_name_of(inner) in names for part in asked for inner in ast.walk(part))


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001  is traced once
def _warn(model_type: str) -> None:
    if model_type not in _warned:
        _warned.add(model_type)
        warnings.warn(
            f"model type {model_type} of this version of transformers was not tried with flashmoe_science's attention: "
            "compare its logits with those of attn_implementation='eager'",
            stacklevel=2,
        )

"""Numbers that name objects in graphs, as long as the objects live."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from ..errors import InputError

_numbers = itertools.count()
_things: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def name(thing: object) -> int:
    """Return a number that names a thing."""
    number = next(_numbers)
    _things[number] = thing
    return number


def named(number: int, what: str) -> Any:
    """Return what a number names. Raises ``InputError`` where it is gone."""
    if number not in _things:
        raise InputError(f"the {what} of a compiled call is gone", hint="keep it until the gradients are made")
    return _things[number]

"""Torch without one of the names that reloadpg needs, or with one that has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from reloadpg.c10d.needs import Need

INSTANCE = "_renamed_by_a_new_torch"


def owner_of(need: Need) -> Any:
    module, _, attributes = need.owner.partition(":")
    found: Any = sys.modules[module]
    for name in attributes.split(".") if attributes else ():
        found = getattr(found, name)
    return found


def remove(need: Need) -> None:
    """Remove the name, in this process for good. Attributes of instances are renamed."""
    owner = owner_of(need)
    if not isinstance(owner, type):
        if need.name in vars(owner):
            delattr(owner, need.name)
            return
        owner = type(owner)  # torch's tables are properties of their class
    for base in owner.__mro__:
        if need.name in vars(base):
            delattr(base, need.name)
        for function in vars(base).values():
            _rename(getattr(function, "fget", function), need.name)


def _rename(function: Any, name: str) -> None:
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        function = wrapped
    code = getattr(function, "__code__", None)
    if code is not None and name in code.co_names:
        names = tuple(INSTANCE if one == name else one for one in code.co_names)
        function.__code__ = code.replace(co_names=names)


def change(need: Need, function: Callable[..., Any]) -> None:
    """Replace a function, or a method of a class in C++."""
    setattr(owner_of(need), need.name, function)


def fails(*_: Any, **__: Any) -> Any:
    """What a function is after a change that its name does not show."""
    raise TypeError("this function has changed")

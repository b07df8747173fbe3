"""Blocks that are also decorators."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, TypeVar

from ..errors import InvalidOptionError

F = TypeVar("F", bound=Callable[..., Any])

_LATER = (
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
    inspect.iscoroutinefunction,
)


class Block(ContextDecorator):
    """A ``with`` block that can decorate functions whose body runs in the call."""

    def __call__(self, function: F) -> F:
        if any(runs_later(function) for runs_later in _LATER):
            name = getattr(function, "__qualname__", repr(function))
            raise InvalidOptionError(
                f"{type(self).__name__}() cannot decorate {name}: it is a generator or a coroutine "
                "function, whose body runs after the call. Use `with` in its body."
            )
        return super().__call__(function)

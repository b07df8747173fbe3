"""Blocks that are also decorators, and asynchronous blocks."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..errors import InvalidOptionError

F = TypeVar("F", bound=Callable[..., Any])


class Decorator:
    """A ``with`` block that can decorate functions and coroutine functions.

    Subclasses have ``__enter__`` and ``__exit__``. Each call of a decorated function enters a copy.
    ``async with`` is the same as ``with``: an operation blocks the event loop until it has ended,
    so no other task of the loop uses a group while it runs.
    """

    def __call__(self, function: F) -> F:
        kind = next((kind for kind, test in _GENERATORS.items() if _is(function, test)), "")
        if kind:
            raise InvalidOptionError(
                f"{self._shown} cannot decorate {_name(function)}, which is {kind}: its body runs "
                "after the call, and would leave the block whenever the generator is deleted. Use "
                "the block around the loop over the generator, or as `with` in its body."
            )
        if _is(function, inspect.iscoroutinefunction):

            async def run(*args: Any, **kwargs: Any) -> Any:
                with cast(Any, self)._again():
                    return await function(*args, **kwargs)

            return cast(F, functools.wraps(function)(run))

        def call(*args: Any, **kwargs: Any) -> Any:
            with cast(Any, self)._again():
                return self._ran(function, function(*args, **kwargs))

        return cast(F, functools.wraps(function)(call))

    def _again(self) -> Any:
        """A separate block for one call."""
        return copy.copy(self)

    def _ran(self, function: Callable[..., Any], result: Any) -> Any:
        """Return the result of a function, unless its body has not run yet."""
        if not inspect.iscoroutine(result):
            return result
        result.close()  # otherwise Python also warns that it was never awaited
        raise InvalidOptionError(
            f"{self._shown} decorates {_name(function)}, which returned a coroutine: its body "
            "would run after the block. Decorate the `async def` function itself."
        )

    @property
    def _shown(self) -> str:
        return f"{type(self).__name__}()"

    async def __aenter__(self) -> Any:
        return cast(Any, self).__enter__()

    async def __aexit__(self, *error: Any) -> Any:
        return cast(Any, self).__exit__(*error)


_GENERATORS: dict[str, Callable[[Any], bool]] = {
    "a generator function": inspect.isgeneratorfunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
}


def _is(function: Any, kind: Callable[[Any], bool]) -> bool:
    """Whether a function, or the method that calls an object, is of a kind."""
    return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004 - its kind


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
